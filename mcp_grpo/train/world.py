"""Where a run trains: on the servers of a file, or in an environment that brings its own tasks and rewards."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcp_grpo.environments import Environment, load_environment
from mcp_grpo.rewards import fault_penalty, is_done, task_outcome
from mcp_grpo.tools.users import User
from mcp_grpo.train.arguments import TrainArguments
from mcp_grpo.train.settings import show_results
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
        place (`Sequence[str]`):
            Arguments that name it to the command that tries a policy.
    """

    name: str
    servers: Any
    reward_funcs: Sequence[Callable[..., Any]]
    is_success: Callable[[Trajectory], bool] = is_done
    user: User | None = None
    environment: Environment | None = None
    place: Sequence[str]

    def fit(self, settings: dict[str, Any], context: int | None) -> None:
        """Change settings to those that the environment asks for, as far as the context of the model has room."""
        if self.environment is not None:
            settings["max_turns"] = self.environment.max_turns
            if self.environment.max_result_tokens is not None:
                show_results(settings, self.environment.max_result_tokens, context)

    def attempt(self, policy: Path) -> str:
        """Return the command that tries the policy in a folder."""
        if self.environment is None:
            return shlex.join(["mcp-grpo", "chat", "--adapter", str(policy), *self.place])
        return shlex.join(["mcp-grpo", "bench", *self.place, "--policy", str(policy), "--out", str(policy / "bench")])


@lru_cache(maxsize=1)  # an environment may read much, and is asked for by several stages
def world_of(arguments: TrainArguments) -> World:
    """Return the world that arguments name."""
    if arguments.environment is None:
        return World(
            name=f"the servers of {arguments.servers}",
            servers=arguments.servers,
            reward_funcs=(task_outcome, fault_penalty),
            place=["--servers", str(arguments.servers)],
        )
    options = dict(arguments.options)
    environment = load_environment(arguments.environment, arguments.data, **options)
    place = [arguments.environment]
    place += [] if arguments.data is None else ["--data", arguments.data]
    place += [part for name, value in options.items() for part in ("--option", name, value)]
    place += ["--split", "test"] if has_splits(environment) else []
    rewards = tuple(environment.reward_funcs)
    return World(
        name=environment.name,
        servers=environment.servers,
        reward_funcs=rewards if fault_penalty in rewards else (*rewards, fault_penalty),
        is_success=environment.is_success,
        user=environment.user,
        environment=environment,
        place=place,
    )


def has_splits(environment: Environment) -> bool:
    """Tell whether an environment says which tasks are to train on, and which to judge by."""
    return all(environment.splits.get(name) for name in ("train", "test"))
