"""Reward functions by their names in files and on the command line."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from mcp_grpo.errors import SettingsError


def load_reward(name: str) -> Callable[..., Any]:
    """Load a reward function: a name in `mcp_grpo.rewards`, or `module:function`, which may also make one."""
    module, _, function = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module or "mcp_grpo.rewards"), function)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"There is no reward {name!r}: {error}. Name one of `mcp_grpo.rewards`, or `module:function` of a module that "
            "can be imported from here."
        ) from error
    return found() if _is_maker(found) else found


def _is_maker(found: Callable[..., Any]) -> bool:
    """Return whether something makes a reward function: it can be called with nothing, a reward cannot."""
    if not inspect.isfunction(found):
        return False
    parameters = inspect.signature(found).parameters.values()
    return not any(one.default is one.empty or one.kind is one.VAR_KEYWORD for one in parameters)
