"""Trajectories as the lists and tensors that TRL takes."""

from collections.abc import Sequence
from itertools import repeat
from operator import is_

import numpy as np
import torch

from mcp_grpo.trl_compat import ROW_MEAN_LOSSES
from mcp_grpo.types import TokenRole, Trajectory


def rollout_columns(trajectories: Sequence[Trajectory], filler_id: int) -> dict[str, list]:
    """Return what TRL asks of a `rollout_func`; `filler_id`, masked, stands for a completion without any token."""
    return {
        "prompt_ids": [list(t.prompt_ids) for t in trajectories],
        "completion_ids": [list(t.completion_ids) or [filler_id] for t in trajectories],
        "logprobs": [list(t.policy_logprobs) or [0.0] for t in trajectories],
        "env_mask": [list(t.loss_mask) or [0] for t in trajectories],
        "trajectory": list(trajectories),
    }


def turns_of(completion_mask: torch.Tensor, tool_mask: torch.Tensor | int) -> torch.Tensor:
    """Return the turn of each token where nobody has said it: a run of tokens in the loss is one; -1 for others."""
    mask = completion_mask * tool_mask
    begins = torch.diff(mask, dim=1, prepend=torch.zeros_like(mask[:, :1])) == 1
    return (begins.cumsum(dim=1) - 1).masked_fill(mask == 0, -1)


def ends_cut(completion_ids: torch.Tensor, completion_mask: torch.Tensor, end_ids: Sequence[int]) -> torch.Tensor:
    """Return 1 for the completions that do not end with one of `end_ids`, because there was no more room."""
    last = (completion_mask.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    ends = torch.tensor(end_ids, device=last.device)
    return (~torch.isin(completion_ids.gather(1, last).squeeze(1), ends)).float()


def padded(rows: Sequence[Sequence[float]], like: torch.Tensor, filler: float = 0) -> torch.Tensor:
    """Return quantities of each token of completions as a tensor of the shape of `like` and the type of `filler`."""
    table = np.full(like.shape, filler, dtype=np.int64 if isinstance(filler, int) else np.float32)
    for row, values in enumerate(rows):
        # Small numbers are quickest as `bytes`.
        table[row, : len(values)] = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else values
    return torch.from_numpy(table).to(like.device)


def sampled_column(trajectories: Sequence[Trajectory], device: torch.device) -> torch.Tensor:
    """Return 1 for the tokens of completions that the policy sampled, as wide as the longest completion."""
    masks = [bytes(trajectory.sampled_mask) for trajectory in trajectories]
    return padded(masks, torch.empty(len(masks), max(1, *map(len, masks)), device=device), 0)


def token_columns(trajectories: Sequence[Trajectory], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Return what the loss needs to know of each token beside what TRL tells it, in columns of the shape of `like`.

    `turn_ids` is the turn of each sampled token and -1 for others; `masked` is 1 where the policy loss leaves out a token that the
    policy wrote, `forced` where it is syntax of a valid call, both if known. Trajectories that are not learnt from have no turns.
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
    Return what the loss needs to know of each trajectory beside what TRL tells it, where it does.

    `row_scale` is a scalar that makes up for the share of rows that are `left_out` and still counted in the denominator; `is_cut`
    is 1 for what ran out of turns or tokens; `is_scripted` tells the rows that the policy did not sample.
    """
    columns: dict[str, torch.Tensor] = {}
    if left_out and loss_type in ROW_MEAN_LOSSES:
        columns["row_scale"] = torch.tensor(1 / (1 - left_out) if left_out < 1 else 0.0, device=device)
    if truncation == "bootstrap":
        columns["is_cut"] = torch.tensor([float(t.is_cut) for t in trajectories], device=device)
    if any(trajectory.is_scripted for trajectory in trajectories):
        columns["is_scripted"] = torch.tensor([t.is_scripted for t in trajectories], device=device)
    return columns
