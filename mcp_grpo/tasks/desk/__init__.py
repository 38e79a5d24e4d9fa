"""Tasks on the desk's servers, with answers that a program can check and solutions that were tried."""

from mcp_grpo.tasks.desk.build import FAMILIES, HELD_OUT_FAMILIES, SPLITS, build_tasks


__all__ = ["FAMILIES", "HELD_OUT_FAMILIES", "SPLITS", "build_tasks"]
