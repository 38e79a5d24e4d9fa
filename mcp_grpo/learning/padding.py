"""Passes through a model that spend no time on padding, nor on predictions that nobody reads."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import pad

from mcp_grpo.trl_compat import head_reads_all, split_tensor_dict


_BY_WIDTH = ("longrope", "dynamic")  # rotary embeddings that are others for longer inputs
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Unpadded:
    """
    Calls a model on rows that all begin in the first column, as wide as the longest of them.

    TRL pads a batch to its longest prompt on the left and to its longest completion on the right, and the rows of one pass are
    seldom the longest. Moved to the left they need no attention mask, because a token never attends to what follows it, so that
    attention takes its fastest path. Outputs are put back to where they were asked for, and equal those of the padded rows up to
    rounding. The tokens of a row must be contiguous. It stands in for the model in one call of TRL's
    `_get_per_token_logps_and_entropies`; `multiple` is what the width is rounded up to, where the padded rows allow it.
    """

    def __init__(self, model: Any, multiple: int = 1) -> None:
        self._model = model
        self._multiple = multiple

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        num_values: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the model on the rows without padding; return its output as for the padded rows, with zeros for padding."""
        width = int(attention_mask.sum(dim=1).amax().clamp(min=2))
        width = min(-(-width // self._multiple) * self._multiple, input_ids.size(1))
        places = torch.argsort(attention_mask, dim=1, descending=True, stable=True)[:, :width]
        if num_values is not None:
            kwargs["num_values"] = width
        # The load of experts is counted without padding.
        needs_mask = kwargs.get("output_router_logits")
        output = self._model(
            input_ids=input_ids.gather(1, places),
            attention_mask=attention_mask.gather(1, places) if needs_mask else None,
            labels=labels.gather(1, places),
            **kwargs,
        )
        for name in PER_TOKEN:
            if (found := getattr(output, name, None)) is not None:
                setattr(output, name, _put_back(found, places[:, 1:], input_ids.shape)[:, 1:])
        if num_values is not None and getattr(output, "value_preds", None) is not None:
            output.value_preds = _put_back(output.value_preds, places, input_ids.shape)[:, -num_values:]
        return output


class LabelledOnly:
    """
    Calls a model whose LM head is to read only tokens that have labels.

    TRL's head does so on GPUs. On CPUs and on Apple's it reads all of them, each of which costs a product with the whole vocabulary, and then leaves out
    those without. Outputs equal its own up to rounding, as do gradients.

    Args:
        model (`Any`):
            The model, which may be wrapped for several processes.
        called (`Any`, *optional*):
            What to call instead of it.
    """

    def __init__(self, model: Any, called: Any = None) -> None:
        self._model = model
        self._called = model if called is None else called

    def __call__(self, *, labels: torch.Tensor, **kwargs: Any) -> Any:
        """Call the model; return its output as for all tokens."""
        bare = getattr(self._model, "module", self._model)
        targets = labels[:, 1:]
        is_label = targets != -100
        if not head_reads_all(labels.device) or any(hasattr(each, "_orig_mod") for each in bare.modules()):
            return self._called(labels=labels, **kwargs)
        thread = threading.get_ident()

        def select(module: Any, args: Any, output: Any) -> Any:
            if threading.get_ident() == thread:  # and not another's pass
                # An adapter may have put tokens of its own before the rows.
                hidden = output.last_hidden_state[:, -labels.size(1) : -1]
                output.last_hidden_state = hidden[is_label][None]
            return output

        lm: Any = bare.get_base_model() if isinstance(bare, PeftModel) else bare
        hook = lm.base_model.register_forward_hook(select)
        try:
            output = self._called(shift_labels=targets[is_label][None], **kwargs)
        finally:
            hook.remove()
        for name in PER_TOKEN:
            if (found := getattr(output, name, None)) is not None:
                setattr(output, name, found.new_zeros(is_label.shape).masked_scatter(is_label, found))
        output.label_mask = is_label
        return output


class SampledOnly:
    """
    Calls a model for the log-probabilities of tokens that the policy sampled; those of others come out as 0.

    TRL asks for those of all tokens of a completion, most of which tools wrote: each costs a product with the whole vocabulary,
    and none of them is read. It stands in for the model in one call of TRL's `_get_per_token_logps_and_entropies`, which may
    call it on several parts of a batch. `is_sampled` has shape `(B, T)`; completions are the last `num_tokens` columns.
    """

    def __init__(self, model: Any, is_sampled: torch.Tensor, num_tokens: int) -> None:
        self._model = model
        self._left = pad(is_sampled, (0, num_tokens - is_sampled.size(1)))

    def __call__(self, *, labels: torch.Tensor, **kwargs: Any) -> Any:
        """Call the model on the next rows."""
        is_sampled, self._left = self._left[: len(labels)], self._left[len(labels) :]
        is_read = pad(is_sampled, (labels.size(1) - is_sampled.size(1), 0)) > 0
        return self._model(labels=labels.masked_fill(~is_read, -100), **kwargs)


def in_order(batches: Sequence[dict[str, Any]], order: torch.Tensor) -> list[dict[str, Any]]:
    """Put the rows of all passes into another order; as many passes with as many rows as before."""
    columns = [name for name, value in batches[0].items() if value is not None and value.ndim]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in columns}
    return split_tensor_dict(batches[0] | {name: value[order] for name, value in rows.items()}, len(batches))


def depends_on_width(config: Any) -> bool:
    """Return whether a model gives other outputs for a row that stands among longer ones."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]  # or one for each type of layer
    return any(each.get("rope_type") in _BY_WIDTH for each in kinds)


def _put_back(found: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # An adapter may have put tokens of its own before the row.
    return found.new_zeros(shape).scatter(1, places, found[:, -places.size(1) :])
