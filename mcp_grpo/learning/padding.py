"""Passes through a model that spend no time on padding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcp_grpo._trl import split_tensor_dict


_BY_WIDTH = ("longrope", "dynamic")  # rotary embeddings that are others for longer inputs
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Unpadded:
    """
    Calls a model on rows that all begin in the first column, as wide as the longest of them.

    TRL pads a batch to its longest prompt on the left and to its longest completion on the right, and the rows of one pass
    are seldom the longest. Moved to the left, they need no attention mask either: what follows a token is never attended
    to. That lets attention take its fastest way. What the model says is put back to where it was asked for.

    It stands in for the model in one call of TRL's `_get_per_token_logps_and_entropies`. Numbers are those of each row
    alone, and so those of the padded rows, but for rounding, if the model does not mind padding on the left. Tokens of a row
    must be one run.

    Args:
        model (`Callable`):
            Causal language model with a fused LM head, which may be wrapped for several processes. See [`minds_width`].
        multiple (`int`, *optional*, defaults to `1`):
            What the width is to be a multiple of, where the padded rows allow it.
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
        """
        Call the model.

        Args:
            input_ids (`torch.Tensor` of shape `(B, L)`):
                The padded rows.
            attention_mask (`torch.Tensor` of shape `(B, L)`):
                1 for tokens, 0 for padding.
            labels (`torch.Tensor` of shape `(B, L)`):
                Tokens to score.
            num_values (`int`, *optional*):
                Last positions whose values are asked for; see [`ValueRecorder`].
            kwargs (`Any`):
                What else the model is called with.

        Returns:
            `FusedCausalLMOutput`: As for the padded rows, with zeros for padding.
        """
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
        for name in _PER_TOKEN:
            if (found := getattr(output, name, None)) is not None:
                setattr(output, name, _put_back(found, places[:, 1:], input_ids.shape)[:, 1:])
        if num_values is not None and getattr(output, "value_preds", None) is not None:
            output.value_preds = _put_back(output.value_preds, places, input_ids.shape)[:, -num_values:]
        return output


def by_length(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Put rows of like length into one pass, the longest first.

    Args:
        batches (`Sequence[dict[str, Any]]`):
            The rows of each pass of one update, as TRL has split them.

    Returns:
        `list[dict[str, Any]]`: As many passes with as many rows.
    """
    columns = [name for name, value in batches[0].items() if value is not None and value.ndim]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in columns}
    lengths = rows["prompt_mask"].sum(dim=1) + rows["completion_mask"].sum(dim=1)
    order = torch.argsort(lengths, descending=True, stable=True)
    return split_tensor_dict(batches[0] | {name: value[order] for name, value in rows.items()}, len(batches))


def minds_width(config: Any) -> bool:
    """
    Whether a model says something else of a row that stands among longer ones.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Its configuration.

    Returns:
        `bool`: Whether its rotary embeddings depend on the width of the input.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]  # or one for each type of layer
    return any(each.get("rope_type") in _BY_WIDTH for each in kinds)


def _put_back(found: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # An adapter may have put tokens of its own before the row.
    return found.new_zeros(shape).scatter(1, places, found[:, -places.size(1) :])
