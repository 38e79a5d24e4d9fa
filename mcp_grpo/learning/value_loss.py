"""What a value head learns: the return of each turn."""

import torch

from mcp_grpo.errors import SettingsError


def turn_weights(
    turn_ids: torch.Tensor, dtype: torch.dtype = torch.float32, max_turns: int | None = None
) -> torch.Tensor:
    """
    Weights with which every turn counts the same, however long it is.

    Args:
        turn_ids (`torch.Tensor` of shape `(B, T)`):
            The turn that each token was sampled in, and -1 for tokens that the policy did not sample.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Type of the weights.
        max_turns (`int`, *optional*):
            More than the greatest turn. It is looked up if not given, which waits for the device.

    Returns:
        `torch.Tensor` of shape `(B, T)`: One over the length of the turn, and 0 for tokens that were not sampled. Their
        sum is the number of turns.

    Example:

    ```python
    >>> turn_weights(torch.tensor([[0, 0, -1, -1, 1, -1]]))
    tensor([[0.5000, 0.5000, 0.0000, 0.0000, 1.0000, 0.0000]])
    ```
    """
    slots = turn_ids.clamp(min=-1) + 1
    num_slots = 1 + (int(slots.max()) if max_turns is None else max_turns)
    counts = turn_ids.new_zeros((turn_ids.size(0), num_slots))
    counts.scatter_add_(1, slots, torch.ones_like(slots))
    return counts.gather(1, slots).to(dtype).reciprocal().masked_fill(turn_ids < 0, 0.0)


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    num_turns: float | torch.Tensor,
    max_turns: int | None = None,
    old_values: torch.Tensor | None = None,
    clip_range: float | None = None,
) -> torch.Tensor:
    """
    Squared error of values: the mean over the tokens of a turn, summed over turns, and divided by `num_turns`.

    Tokens that the policy had no choice in count, for they are states like any other; those of tools do not.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            Values of the states that the tokens were sampled in.
        returns (`torch.Tensor` of shape `(B, T)`):
            Return from the turn of each token on. What stands at tokens that were not sampled is not looked at.
        turn_ids (`torch.Tensor` of shape `(B, T)`):
            The turn that each token was sampled in, and -1 for tokens that the policy did not sample.
        num_turns (`float` or `torch.Tensor`):
            What to divide by: the turns of all micro-batches of one update, and of all processes, over the number of
            processes. The gradient of an update is then the same for every way to split it.
        max_turns (`int`, *optional*):
            See [`turn_weights`].
        old_values (`torch.Tensor` of shape `(B, T)`, *optional*):
            Values at the time of the rollout. Needed with `clip_range`.
        clip_range (`float`, *optional*):
            How far a value may move from the old one before moving on has no more effect, as in PPO. No limit if not
            given.

    Returns:
        `torch.Tensor`: A scalar, to be multiplied by a coefficient and added to the loss. If no token was sampled it is 0,
        and still has a gradient, as processes that wait for each other's gradients need.
    """
    not_sampled = turn_ids < 0
    errors = (values - returns).masked_fill(not_sampled, 0.0).square()
    if clip_range is not None:
        if old_values is None:
            raise SettingsError(
                "Values are clipped around the old ones: pass `old_values` together with `clip_range`."
            )
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        errors = torch.maximum(errors, (clipped - returns).masked_fill(not_sampled, 0.0).square())
    return (errors * turn_weights(turn_ids, errors.dtype, max_turns)).sum() / num_turns
