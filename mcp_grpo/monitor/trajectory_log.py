"""Every decision of a trajectory, for those who look for what went wrong."""

import json
from pathlib import Path
from typing import Any


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

    def watch(self, trainer: Any) -> None:
        """
        Write them from now on, on the main process.

        Args:
            trainer ([`MCPGRPOTrainer`]):
                The trainer.
        """
        make_batch = trainer._generate_and_score_completions

        def watched(inputs: Any) -> Any:
            batch = make_batch(inputs)
            if trainer.is_world_process_zero():
                self._write(trainer, batch)
            return batch

        trainer._generate_and_score_completions = watched

    def _write(self, trainer: Any, batch: dict[str, Any]) -> None:
        trajectory, rewards = trainer._trajectories[0], trainer._rewards[0].tolist()
        in_loss = batch["completion_mask"][0] * batch["tool_mask"][0]
        advantages = batch["advantages"][0]
        advantages = advantages.expand(in_loss.shape) if advantages.dim() == 0 else advantages
        pieces = trajectory.vocabulary.pieces(trajectory.prompt_ids + trajectory.completion_ids)
        start = len(trajectory.prompt_ids)

        def text(first: int, last: int) -> str:
            return b"".join(pieces[first:last]).decode("utf-8", "replace")

        lines = [
            f"Task {trajectory.task.task_id!r}, step {trainer.state.global_step}, temperature {trainer.temperature}"
        ]
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
        names = trainer.reward_func_names
        lines += [f"reward {name}: {value}" for name, value in zip(names, rewards, strict=True)]
        given = sorted({round(float(a), 6) for a, seen in zip(advantages, in_loss, strict=True) if seen})
        lines.append(f"advantage: {', '.join(map(str, given)) or 'none'}")
        if trainer.args.value_head_kind:
            lines.append("(before the value head, which comes in with the pass of the loss)")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{trainer.state.global_step}.txt"
        path.write_text("\n".join(lines) + "\n")
        total = sum(value for value in rewards if value == value)
        trajectory.explain(reward=total).save(path.with_suffix(".html"))
