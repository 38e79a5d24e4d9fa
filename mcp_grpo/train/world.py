"""Where a run trains: on the servers of a file, or in an environment that brings its own tasks and rewards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mcp_grpo.environments import Environment, load_environment
from mcp_grpo.rewards import fault_penalty, is_done, task_outcome
from mcp_grpo.tools.users import User
from mcp_grpo.train.arguments import TrainArguments
from mcp_grpo.types import Trajectory


@dataclass(frozen=True, kw_only=True)
class World:
    """
    Where a run trains.

    Args:
        name (`str`):
            What it is called in sentences.
        servers (`Any`):
            Servers, as [`MCPGRPOTrainer`] takes them.
        reward_funcs (`Sequence[Callable]`):
            Reward functions; the first tells success.
        is_success (`Callable[[Trajectory], bool]`):
            Whether a trajectory did its task.
        user (`Callable`, *optional*):
            Says what users say next.
        environment ([`Environment`], *optional*):
            The environment, which brings its own tasks.
        attempt_with (`str`):
            A command that tries a policy here; `{policy}` stands for its folder.
    """

    name: str
    servers: Any
    reward_funcs: Sequence[Callable[..., Any]]
    is_success: Callable[[Trajectory], bool] = is_done
    user: User | None = None
    environment: Environment | None = None
    attempt_with: str

    def fit(self, settings: dict[str, Any]) -> None:
        """Change settings to those that the environment asks for."""
        if self.environment is not None:
            settings["max_turns"] = self.environment.max_turns


@lru_cache(maxsize=1)  # an environment may read much, and is asked for by several stages
def world_of(arguments: TrainArguments) -> World:
    """Return the world that arguments name."""
    if arguments.environment is None:
        return World(
            name=f"the servers of {arguments.servers}",
            servers=arguments.servers,
            reward_funcs=(task_outcome, fault_penalty),
            attempt_with=f"mcp-grpo chat --adapter {{policy}} --servers {arguments.servers}",
        )
    options = dict(arguments.options)
    environment = load_environment(arguments.environment, arguments.data, **options)
    flags = "".join(f" --option {name} {value}" for name, value in options.items())
    data = "" if arguments.data is None else f" --data {arguments.data}"
    return World(
        name=environment.name,
        servers=environment.servers,
        reward_funcs=(*environment.reward_funcs, fault_penalty),
        is_success=environment.is_success,
        user=environment.user,
        environment=environment,
        attempt_with=f"mcp-grpo bench {arguments.environment}{data}{flags} --split test --policy {{policy}} --out {{policy}}/bench",
    )
