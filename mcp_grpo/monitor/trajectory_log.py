"""Every decision of a trajectory, for those who look for what went wrong."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_grpo.inert import inert
from mcp_grpo.monitor.token_view import explain
from mcp_grpo.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """
    A batch that is about to be learnt from, on one process.

    Args:
        step (`int`):
            Optimizer steps done before it.
        trajectories (`Sequence[Trajectory]`):
            The attempts.
        rewards (`Sequence[Mapping[str, float]]`):
            Rewards of each attempt by the name of their function; NaN where it gave none.
        columns (`Mapping[str, Any]`):
            Inputs of the loss, padded: `completion_mask`, `tool_mask`, `advantages` and others. A value head changes
            advantages only with the pass of the loss.
    """

    step: int
    trajectories: Sequence[Trajectory]
    rewards: Sequence[Mapping[str, float]]
    columns: Mapping[str, Any]


class TrajectoryLog:
    """
    Every decision of one trajectory per batch: the prompt as it is rendered, each turn token by token, each call and what
    came back, what the loss sees, rewards and advantage.

    Args:
        folder (`Path`):
            Gets a text `step-<n>.txt` and a page `step-<n>.html` per batch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, batch: ScoredBatch) -> None:
        """
        Write the first trajectory of a batch. Hand this to [`MCPGRPOTrainer.watch_batches`].

        Args:
            batch ([`ScoredBatch`]):
                The batch.
        """
        trajectory, columns = batch.trajectories[0], batch.columns
        in_loss = columns["completion_mask"][0] * columns["tool_mask"][0]
        advantages = columns["advantages"][0]
        advantages = advantages.expand(in_loss.shape) if advantages.dim() == 0 else advantages
        assert trajectory.vocabulary
        pieces = trajectory.vocabulary.pieces(trajectory.prompt_ids + trajectory.completion_ids)
        start = len(trajectory.prompt_ids)

        def text(first: int, last: int) -> str:
            return b"".join(pieces[first:last]).decode("utf-8", "replace")

        lines = [f"Task {trajectory.task.task_id!r}, step {batch.step}"]
        lines += ["", f"== Prompt, as it is rendered: {start} tokens ==", text(0, start)]
        roles = trajectory.roles or ["choice" if s else "environment" for s in trajectory.sampled_mask]
        offset, turn = 0, -1
        for segment in trajectory.segments:
            end = offset + len(segment.token_ids)
            turn += segment.sampled
            author = f"turn {turn}, written by the policy" if segment.sampled else "written by tools and template"
            lines += ["", f"== {author}: {end - offset} tokens ==", text(start + offset, start + end)]
            if segment.sampled:
                lines += ["", "   token  log-prob  in loss  advantage  role        text"]
                lines += [
                    f"{trajectory.completion_ids[i]:>8}  {trajectory.logprobs[i]:>8.4f}  {'yes' if in_loss[i] else 'no':>7}  "
                    f"{float(advantages[i]):>9.4f}  {roles[i]!s:<10}  {pieces[start + i].decode('utf-8', 'replace')!r}"
                    for i in range(offset, end)
                ]
                for exchange in trajectory.exchanges:
                    if exchange.turn == turn:
                        call, result = exchange.call, exchange.result
                        lines += [
                            "",
                            f"-- call of {call.name!r} with {json.dumps(dict(call.arguments), default=str)}",
                            f"   {result.kind} after {result.seconds:.3f} s, {result.num_attempts} attempt(s)"
                            + (f", repaired: {'; '.join(result.repairs)}" if result.repairs else "")
                            + (f", {result.num_cut} characters cut" if result.num_cut else ""),
                            *(f"   {line}" for line in result.text.splitlines()),
                        ]
            offset = end
        lines += ["", "== Outcome ==", f"stop reason: {trajectory.stop_reason}, {trajectory.seconds:.2f} s"]
        if trajectory.error:
            lines.append(f"error: {trajectory.error}")
        lines.append(
            f"learnt from: {'yes' if trajectory.is_learnt_from else 'no'}, {int(in_loss.sum())} tokens in the loss"
        )
        rewards = batch.rewards[0]
        lines += [f"reward {name}: {value}" for name, value in rewards.items()]
        given = sorted({round(float(a), 6) for a, seen in zip(advantages, in_loss, strict=True) if seen})
        lines.append(f"advantage: {', '.join(map(str, given)) or 'none'}")
        if "mixing_weight" in columns:
            lines.append("(before the value head, which comes in with the pass of the loss)")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{batch.step}.txt"
        path.write_text(inert("\n".join(lines)) + "\n", encoding="utf-8")
        total = sum(value for value in rewards.values() if value == value)
        explain(trajectory, reward=total).save(path.with_suffix(".html"))
