"""Tasks on the desk's servers, with answers that a program can check and tested solutions."""

from mcp_grpo.desk.tasks.build import FAMILIES, HELD_OUT_FAMILIES, SPLITS, build_tasks


__all__ = ["FAMILIES", "HELD_OUT_FAMILIES", "SPLITS", "build_tasks"]
