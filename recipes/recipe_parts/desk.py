"""What to train on: the desk, or servers and tasks of your own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import build_tasks
from mcp_grpo.errors import SettingsError
from mcp_grpo.rewards.named import load_reward
from mcp_grpo.tasks import load_tasks


NUM_DESK_TASKS = 1000
DESK_REWARD = "mcp_grpo.desk.reward:desk_reward"


@dataclass
class TaskArguments:
    """The servers and tasks of a recipe."""

    servers: str | None = field(
        default=None,
        metadata={
            "help": "JSON file of MCP servers, in the `mcpServers` form. If `None`, the desk: finance, search, Python, Slack."
        },
    )
    tasks: str | None = field(
        default=None, metadata={"help": "Tasks to train on: a file, a folder, or a Hub id. If `None`, the desk's."}
    )
    num_tasks: int | None = field(
        default=None,
        metadata={"help": "How many tasks to train on, the first ones. If `None`, all; 1000 of the desk."},
    )
    world: int = field(default=0, metadata={"help": "Which invented world the desk is in."})

    def __post_init__(self) -> None:
        if self.servers is not None and self.tasks is None:
            raise SettingsError("`servers` are of no use without tasks for them. Set `tasks`, too.")
        if self.num_tasks is not None and self.num_tasks < 1:
            raise SettingsError(f"`num_tasks` must be at least 1, got {self.num_tasks}.")

    @property
    def is_desk(self) -> bool:
        """Return whether the servers are the desk's."""
        return self.servers is None

    def load_servers(self, pool_size: int = 1) -> Any:
        """Return the servers, as [`MCPGRPOTrainer`] takes them; `pool_size` is for the desk's."""
        return desk_servers(seed=self.world, pool_size=pool_size) if self.servers is None else self.servers

    def load(self, source: str | None, split: str, number: int | None) -> Dataset:
        """Load tasks: from a file, a folder or a Hub id, or of a split of the desk."""
        if source is None:
            return build_tasks(split, number or NUM_DESK_TASKS, world=self.world)
        tasks = load_tasks(source)
        return tasks if number is None else tasks.select(range(min(number, len(tasks))))


def load_rewards(names: list[str] | None) -> list[Callable[..., Any]]:
    """Load reward functions: names in `mcp_grpo.rewards`, or `module:function`. If `None`, `desk_reward`."""
    return [load_reward(DESK_REWARD if name == "desk_reward" else name) for name in names or ["desk_reward"]]
