"""Tell how difficult tasks are by how often a policy solves them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from mcp_grpo.evaluation import Attempt


EASY, MEDIUM = 0.7, 0.3  # success from which on a task is


def rated(rows: Sequence[dict[str, Any]], attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """
    Return rows with the share of a policy's attempts that solved them as `success_rate`, and `difficulty` by it.

    Args:
        rows (`Sequence[dict[str, Any]]`):
            Rows of tasks.
        attempts (`Iterable[Attempt]`):
            Attempts at them. A task without one stays as it is.

    Returns:
        `list[dict[str, Any]]`: The rows, in their order.
    """
    solved: dict[str, list[bool]] = defaultdict(list)
    for attempt in attempts:
        solved[attempt.task_id].append(attempt.is_solved)
    return [_rated(row, solved[row["task_id"]]) if row["task_id"] in solved else dict(row) for row in rows]


def _rated(row: dict[str, Any], solved: Sequence[bool]) -> dict[str, Any]:
    rate = sum(solved) / len(solved)
    difficulty = "easy" if rate >= EASY else "medium" if rate >= MEDIUM else "hard"
    return {**row, "success_rate": rate, "difficulty": difficulty}
