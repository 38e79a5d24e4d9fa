"""Tasks: what the policy is to do."""

from mcp_grpo.tasks.rows import task_from_row, tasks_from_rows


__all__ = ["task_from_row", "tasks_from_rows"]
