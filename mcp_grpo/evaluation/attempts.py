"""Attempts at tasks as an evaluation keeps them: in memory, and in a file that it goes on from."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.types import Message, StopReason, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """
    One attempt at a task.

    Args:
        task_id (`str`):
            The task.
        index (`int`):
            Which of the attempts at it, from 0.
        is_solved (`bool`):
            Whether it did what the task asks for.
        stop_reason (`str`):
            Why it ended; see [`StopReason`].
        error (`str`, *optional*):
            What broke, for one that failed.
        family (`str`, *optional*):
            The task's column `family`.
        difficulty (`str`, *optional*):
            The task's `difficulty`.
        num_turns (`int`):
            Times the policy generated.
        prompt_tokens (`int`):
            Tokens that were read: at an endpoint in all turns together, else those of the opening prompt.
        sampled_tokens (`int`):
            Tokens that the policy wrote.
        seconds (`float`):
            Wall-clock time.
        calls (`list[dict[str, Any]]`):
            Every call: `turn`, `name`, `arguments`, `kind`, `server`, `seconds` and `text`, its result.
        messages (`list[Message]`):
            What was said.
        states (`dict[str, Any]`, *optional*):
            What it left behind at the servers that have a `state_tool`, by their names.
    """

    task_id: str
    index: int
    is_solved: bool
    stop_reason: str
    error: str | None
    family: str | None
    difficulty: str | None
    num_turns: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    calls: list[dict[str, Any]]
    messages: list[Message]
    states: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_failed(self) -> bool:
        """Tell whether it ended for a reason the policy is not to blame for."""
        return StopReason(self.stop_reason).is_failure


def attempt_of(
    trajectory: Trajectory, index: int, *, is_solved: bool, tokens: tuple[int, int] | None = None
) -> Attempt:
    """Return what is kept of a trajectory; `tokens` that were read and written, where the trajectory does not tell."""
    read, written = tokens or (len(trajectory.prompt_ids), sum(trajectory.sampled_mask))
    task = trajectory.task
    family = task.metadata.get("family")
    return Attempt(
        task_id=task.task_id,
        index=index,
        is_solved=is_solved,
        stop_reason=str(trajectory.stop_reason),
        error=trajectory.error,
        family=None if family is None else str(family),
        difficulty=task.difficulty,
        num_turns=trajectory.num_turns,
        prompt_tokens=read,
        sampled_tokens=written,
        seconds=trajectory.seconds,
        calls=[
            {
                "turn": exchange.turn,
                "name": exchange.call.name,
                "arguments": dict(exchange.call.arguments),
                "kind": str(exchange.result.kind),
                "server": exchange.result.server,
                "seconds": exchange.result.seconds,
                "text": exchange.result.text,
            }
            for exchange in trajectory.exchanges
        ],
        messages=list(trajectory.messages),
        states=dict(trajectory.states),
    )


def is_solved(trajectory: Trajectory, is_success: Callable[[Trajectory], bool]) -> bool:
    """Tell whether a trajectory did its task; one that failed did not."""
    return not trajectory.is_failed and bool(is_success(trajectory))


class AttemptFile:
    """
    A file with one attempt a line. What was cut off in the middle of a line is attempted anew.

    Args:
        path (`Path`):
            The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Attempt]:
        """Return the attempts of an earlier evaluation that count: those that a server failed are made anew."""
        found: dict[tuple[str, int], Attempt] = {}
        for number, line in enumerate(self._path.read_bytes().split(b"\n") if self._path.is_file() else (), start=1):
            try:
                attempt = Attempt(**json.loads(line)) if line else None
            except (ValueError, TypeError):
                attempt = None
                is_last = number == self._num_lines()
                if not is_last:
                    raise TaskFormatError(
                        f"Line {number} of {self._path} is not an attempt. Delete that line, or name another folder."
                    ) from None
            if attempt is not None and not attempt.is_failed:
                found[attempt.task_id, attempt.index] = attempt
        return list(found.values())

    def write(self, attempts: Iterable[Attempt]) -> None:
        """Write the file anew, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_text("".join(map(_line, attempts)), encoding="utf-8")
        draft.replace(self._path)

    def add(self, attempts: Sequence[Attempt]) -> None:
        """Append attempts, and have them on disk before going on."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, attempts))
            file.flush()

    def _num_lines(self) -> int:
        return len(self._path.read_bytes().split(b"\n"))


def missing(tasks: Sequence[Task], done: Iterable[Attempt], num_attempts: int) -> dict[str, list[int]]:
    """Return the attempts that are still to be made, by task."""
    have: dict[str, set[int]] = defaultdict(set)
    for attempt in done:
        have[attempt.task_id].add(attempt.index)
    left = {task.task_id: [i for i in range(num_attempts) if i not in have[task.task_id]] for task in tasks}
    return {task_id: indices for task_id, indices in left.items() if indices}


def _line(attempt: Attempt) -> str:
    # `ensure_ascii`, because a policy may write half a surrogate pair, which no file can hold.
    return json.dumps(asdict(attempt), default=str) + "\n"
