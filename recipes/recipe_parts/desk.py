"""What to train on: the desk, or servers and tasks of your own."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

import mcp_grpo.rewards
from mcp_grpo.errors import SettingsError
from mcp_grpo.servers import desk_servers
from mcp_grpo.tasks import load_tasks
from mcp_grpo.tasks.desk import build_tasks


NUM_DESK_TASKS = 1000


@dataclass
class TaskArguments:
    """
    What to train on.

    Args:
        servers (`str`, *optional*):
            JSON file of MCP servers, in the `mcpServers` form. If `None`, the desk: finance, search, Python and Slack.
        tasks (`str`, *optional*):
            Tasks to train on: a file, a folder, or the id of a dataset on the Hub. If `None`, tasks on the desk.
        num_tasks (`int`, *optional*):
            How many of them, the first ones. If `None`, all; 1000 of the desk.
        world (`int`, *optional*, defaults to `0`):
            Which invented world the desk is in.
    """

    servers: str | None = field(
        default=None,
        metadata={"help": "JSON file of MCP servers. If `None`, the desk: finance, search, Python, Slack."},
    )
    tasks: str | None = field(
        default=None, metadata={"help": "Tasks to train on: a file, a folder, or a Hub id. If `None`, the desk's."}
    )
    num_tasks: int | None = field(default=None, metadata={"help": "How many tasks to train on, the first ones."})
    world: int = field(default=0, metadata={"help": "Which invented world the desk is in."})

    def __post_init__(self) -> None:
        if self.servers is not None and self.tasks is None:
            raise SettingsError("`servers` are of no use without tasks for them. Set `tasks`, too.")
        if self.num_tasks is not None and self.num_tasks < 1:
            raise SettingsError(f"`num_tasks` must be at least 1, got {self.num_tasks}.")

    @property
    def is_desk(self) -> bool:
        """Whether the servers are the desk's."""
        return self.servers is None

    def load_servers(self, pool_size: int = 1) -> Any:
        """
        The servers, as [`MCPGRPOTrainer`] takes them.

        Args:
            pool_size (`int`, *optional*, defaults to `1`):
                Processes of each server of the desk.

        Returns:
            `str` or `dict`: The servers.
        """
        return desk_servers(seed=self.world, pool_size=pool_size) if self.servers is None else self.servers

    def load(self, source: str | None, split: str, number: int | None) -> Dataset:
        """
        Tasks of a split.

        Args:
            source (`str`, *optional*):
                A file, a folder or a Hub id; `None` for the desk.
            split (`str`):
                Split of the desk.
            number (`int`, *optional*):
                How many.

        Returns:
            [`~datasets.Dataset`]: The tasks.
        """
        if source is None:
            return build_tasks(split, number or NUM_DESK_TASKS, world=self.world)
        tasks = load_tasks(source)
        return tasks if number is None else tasks.select(range(min(number, len(tasks))))


def load_rewards(names: list[str] | None) -> list[Callable[..., Any]]:
    """
    Reward functions by their names.

    Args:
        names (`list[str]`, *optional*):
            Names in `mcp_grpo.rewards`, or `module:function`. If `None`, whether the task was done, less a little for
            calls that could not be made.

    Returns:
        `list[Callable[..., Any]]`: The functions.
    """
    return [_load_reward(name) for name in names or ["desk_reward"]]


def _load_reward(name: str) -> Callable[..., Any]:
    module_name, separator, function = name.rpartition(":")
    try:
        module = importlib.import_module(module_name) if separator else mcp_grpo.rewards
        found = getattr(module, function)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"There is no reward {name!r}: {error}. Name one of `mcp_grpo.rewards`, or `module:function` of a module that "
            "can be imported from here."
        ) from error
    return found() if _is_maker(found) else found


def _is_maker(found: Callable[..., Any]) -> bool:
    """Whether something makes a reward function, such as `desk_reward()`: it can be called with nothing, a reward cannot."""
    if not inspect.isfunction(found):
        return False
    parameters = inspect.signature(found).parameters.values()
    return not any(one.default is one.empty or one.kind is one.VAR_KEYWORD for one in parameters)
