"""Passes through a model that spend no time on padding."""

from typing import Any

import torch


_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Unpadded:
    """
    Calls a model on rows that all begin in the first column, as wide as the longest of them.

    TRL pads a batch to its longest prompt on the left and to its longest completion on the right, and the rows of one pass
    are seldom the longest. Moved to the left, they need no attention mask either: what follows a token is never attended
    to. That lets attention take its fastest way. What the model says is put back to where it was asked for.

    It stands in for the model in one call of TRL's `_get_per_token_logps_and_entropies`. Numbers are those of the padded
    rows but for rounding.

    Args:
        model (`Callable`):
            Causal language model with a fused LM head, which may be wrapped for several processes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

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


def _put_back(found: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return found.new_zeros(shape).scatter(1, places, found)
