"""Trajectories as the lists and tensors that TRL takes."""

from collections.abc import Sequence
from itertools import repeat
from operator import is_

import numpy as np
import torch

from mcp_grpo._trl import ROW_MEAN_LOSSES
from mcp_grpo.types import TokenRole, Trajectory


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
    masks = [t.sampled_mask if is_soft and t.is_learnt_from else t.loss_mask for t in trajectories]
    return {
        "prompt_ids": [list(t.prompt_ids) for t in trajectories],
        "completion_ids": [list(t.completion_ids) or [filler_id] for t in trajectories],
        "logprobs": [list(t.logprobs) or [0.0] for t in trajectories],
        "env_mask": [list(mask) or [0] for mask in masks],
        "trajectory": list(trajectories),
    }


def padded(rows: Sequence[Sequence[float]], like: torch.Tensor, filler: float = 0) -> torch.Tensor:
    """
    Figures for each token of completions, as a tensor.

    Args:
        rows (`Sequence[Sequence[float]]`):
            One figure per token, or nothing for a completion that has none. Small ones are quickest as `bytes`.
        like (`torch.Tensor` of shape `(B, T)`):
            The completions, padded on the right.
        filler (`float`, *optional*, defaults to `0`):
            What stands where nothing is given.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The figures, of the type of `filler`.
    """
    table = np.full(like.shape, filler, dtype=np.int64 if isinstance(filler, int) else np.float32)
    for row, figures in enumerate(rows):
        table[row, : len(figures)] = np.frombuffer(figures, np.uint8) if isinstance(figures, bytes) else figures
    return torch.from_numpy(table).to(like.device)


def token_columns(trajectories: Sequence[Trajectory], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    What the loss needs to know of each token, beside what TRL tells it.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Finished trajectories. Those that are not learnt from have no turns, and nothing masked or forced.
        like (`torch.Tensor` of shape `(B, T)`):
            Their completions, padded on the right.

    Returns:
        `dict[str, torch.Tensor]`: Tensors of shape `(B, T)`: `turn_ids`, the turn of each sampled token and -1 for
        others; and, if known, `masked`, 1 where the policy loss leaves a token out that the policy wrote, and `forced`,
        1 where it is syntax of a valid call.
    """
    learnt = [trajectory if trajectory.is_learnt_from else None for trajectory in trajectories]
    columns = {"turn_ids": padded([t.turn_ids if t else () for t in learnt], like, -1)}
    if any(trajectory.masked is not None for trajectory in trajectories):
        columns["masked"] = padded([bytes((t and t.masked) or ()) for t in learnt], like, 0.0)
    if any(trajectory.roles is not None for trajectory in trajectories):
        forced = [bytes(map(is_, (t and t.roles) or (), repeat(TokenRole.FORCED))) for t in learnt]
        columns["forced"] = padded(forced, like, 0.0)
    return columns


def row_columns(
    trajectories: Sequence[Trajectory], left_out: float, *, loss_type: str, truncation: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """
    What the loss needs to know of each trajectory, beside what TRL tells it.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Finished trajectories.
        left_out (`float`):
            Share of the trajectories of all processes that are left out of loss and baseline.
        loss_type (`str`):
            TRL's name of the loss.
        truncation (`str`):
            What a trajectory is that ran out of turns or tokens.
        device (`torch.device`):
            Where the tensors are to be.

    Returns:
        `dict[str, torch.Tensor]`: Where they are needed, `row_scale`, a scalar that makes up for rows which are left out
        and still counted in the denominator; and `is_cut`, of shape `(B,)`, 1 for what ran out of turns or tokens.
    """
    columns: dict[str, torch.Tensor] = {}
    if left_out and loss_type in ROW_MEAN_LOSSES:
        columns["row_scale"] = torch.tensor(1 / (1 - left_out) if left_out < 1 else 0.0, device=device)
    if truncation == "bootstrap":
        columns["is_cut"] = torch.tensor([float(t.is_cut) for t in trajectories], device=device)
    return columns
