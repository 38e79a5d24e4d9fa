"""What a policy or a server wrote, as every file, table and terminal can take it."""

from collections.abc import Mapping
from typing import Any, cast


MAX_DEPTH = 64  # of lists and objects in each other


def well_formed(value: Any, depth: int = 0) -> Any:
    """
    Replace, in a JSON value, halves of surrogate pairs, which no file can hold, and what is nested so deeply that whoever
    walks through it might fail.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {
            well_formed(key): well_formed(item, depth + 1) for key, item in cast("Mapping[Any, Any]", value).items()
        }
    return [well_formed(item, depth + 1) for item in cast("list[Any]", value)]
