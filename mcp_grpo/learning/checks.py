"""What a batch must be like before it is learnt from."""

from collections import Counter
from collections.abc import Sequence

from mcp_grpo.errors import RolloutError


def check_groups(task_ids: Sequence[str], size: int, offset: int = 0) -> None:
    """
    Refuse a batch in which a group holds attempts at more than one task.

    Args:
        task_ids (`Sequence[str]`):
            The tasks of this process's part of the batch, in order.
        size (`int`):
            Attempts per group.
        offset (`int`, *optional*, defaults to `0`):
            Index of the first of them in the whole batch.

    Raises:
        [`RolloutError`]: If there is such a group.
    """
    groups: dict[int, set[str]] = {}
    for index, task_id in enumerate(task_ids, offset):
        groups.setdefault(index // size, set()).add(task_id)
    if mixed := [sorted(found) for found in groups.values() if len(found) > 1]:
        raise RolloutError(
            f"A group must hold {size} attempts at one task, but one holds the tasks {mixed[0]}. Do not replace the "
            "trainer's sampler or data loader, and keep `dispatch_batches` off."
        )


def check_failures(reasons: Sequence[str], fraction: float, limit: float) -> None:
    """
    Stop a run in which too many trajectories fail.

    Args:
        reasons (`Sequence[str]`):
            Why each of the failed trajectories did.
        fraction (`float`):
            Share of all trajectories that failed.
        limit (`float`):
            Share that is still tolerated.

    Raises:
        [`RolloutError`]: If it is more than that; the message lists the most common reasons.
    """
    if fraction <= limit:
        return
    listed = "\n".join(f"  - {count} times {reason}" for reason, count in Counter(reasons).most_common(5))
    raise RolloutError(
        f"{fraction:.0%} of the trajectories failed for reasons the policy is not to blame for, more than "
        f"`max_failed_fraction` ({limit:.0%}):\n{listed}\n"
        "Mend the servers, give them more time (`call_timeout`, `trajectory_timeout`, `batch_timeout`), or raise the "
        "limit."
    )
