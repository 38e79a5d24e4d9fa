"""Trajectories as the lists and tensors that TRL takes."""

from collections.abc import Sequence

import torch

from mcp_grpo.types import Trajectory


def rollout_columns(trajectories: Sequence[Trajectory], filler_id: int, *, is_soft: bool = False) -> dict[str, list]:
    """
    What TRL asks of a `rollout_func`.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Finished trajectories.
        filler_id (`int`):
            Token that stands for a completion without any, which TRL cannot take. It is masked.
        is_soft (`bool`, *optional*, defaults to `False`):
            Whether masked tokens stay in the loss, to be weighted there.

    Returns:
        `dict[str, list]`: One entry per trajectory in each list.
    """
    masks = [t.sampled_mask if is_soft and not t.is_failed else t.loss_mask for t in trajectories]
    return {
        "prompt_ids": [list(t.prompt_ids) for t in trajectories],
        "completion_ids": [list(t.completion_ids) or [filler_id] for t in trajectories],
        "logprobs": [list(t.logprobs) or [0.0] for t in trajectories],
        "env_mask": [list(mask) or [0] for mask in masks],
        "trajectory": list(trajectories),
    }


def padded_masks(trajectories: Sequence[Trajectory], like: torch.Tensor) -> torch.Tensor:
    """
    Which tokens are masked, as a tensor.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Trajectories with masks.
        like (`torch.Tensor` of shape `(B, T)`):
            Their completions, padded on the right.

    Returns:
        `torch.Tensor` of shape `(B, T)`: 1 where the policy loss leaves a token out that the policy wrote.
    """
    masks = torch.zeros(like.shape, device=like.device)
    for row, trajectory in enumerate(trajectories):
        if trajectory.masked and not trajectory.is_failed:
            masks[row, : len(trajectory.masked)] = torch.tensor(trajectory.masked, dtype=masks.dtype)
    return masks
