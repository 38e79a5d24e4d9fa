"""Tasks: loading, importing and checking them."""

from mcp_grpo.tasks.grounding import unseen_values
from mcp_grpo.tasks.importing import ImportReport, import_tasks
from mcp_grpo.tasks.loading import load_tasks
from mcp_grpo.tasks.rows import task_from_row, tasks_from_rows


__all__ = ["ImportReport", "import_tasks", "load_tasks", "task_from_row", "tasks_from_rows", "unseen_values"]
