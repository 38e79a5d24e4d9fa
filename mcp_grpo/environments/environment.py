"""Describe an environment: servers, tasks by split, and what tells success; and find one by its name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from datasets import Dataset

from mcp_grpo.errors import SettingsError
from mcp_grpo.rewards import is_done, task_outcome
from mcp_grpo.tasks.columns import dataset_from_rows
from mcp_grpo.tools.users import User
from mcp_grpo.types import Trajectory


NAMES = {
    "workbench": "mcp_grpo.environments.workbench:make_workbench",
    "bfcl": "mcp_grpo.environments.bfcl:make_bfcl",
    "verifiers": "mcp_grpo.environments.verifiers:make_verifiers",
}
"""Environments that are known by name, and what makes them."""
ALL = "all"
"""Split that has all tasks."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """
    An environment to train on and to evaluate with.

    Args:
        name (`str`):
            Name of the environment.
        servers (`Mapping[str, Any]`):
            Servers, as [`MCPGRPOTrainer`] takes them.
        splits (`Mapping[str, Sequence[Mapping[str, Any]]]`):
            Rows of tasks by split. All of them together are the split `"all"`. A row's `solution` is the ground truth,
            and a row that is not `grounded` has one that a policy cannot come to, or should not.
        reward_funcs (`Sequence[Callable]`, *optional*):
            Reward functions; [`~mcp_grpo.rewards.task_outcome`] if not given.
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            Whether a trajectory did its task; by the task's answer and state, if not given.
        max_turns (`int`, *optional*, defaults to `10`):
            Turns that an attempt is to be allowed.
        max_result_tokens (`int`, *optional*):
            Tokens of a tool result that an attempt is to be shown, where tasks cannot be done with less.
        flaws (`Mapping[str, Callable[[Mapping[str, Any]], bool]]`, *optional*):
            What is counted beside success, by what it is called: each function is given the states that an attempt left.
        user (`Callable`, *optional*):
            Says what users say next, as [`MCPGRPOTrainer`] takes it, where the tasks do not have it written.

    Example:

    ```python
    from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer
    from mcp_grpo.environments import load_environment

    environment = load_environment("workbench", "WorkBench")
    trainer = MCPGRPOTrainer(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        environment.reward_funcs,
        MCPGRPOConfig(
            "outputs/workbench", max_turns=environment.max_turns, max_result_tokens=environment.max_result_tokens
        ),
        environment.tasks("train"),
        servers=environment.servers,
        user=environment.user,
    )
    ```
    """

    name: str
    servers: Mapping[str, Any]
    splits: Mapping[str, Sequence[Mapping[str, Any]]]
    reward_funcs: Sequence[Callable[..., Any]] = (task_outcome,)
    is_success: Callable[[Trajectory], bool] = is_done
    max_turns: int = 10
    max_result_tokens: int | None = None
    flaws: Mapping[str, Callable[[Mapping[str, Any]], bool]] = field(
        default_factory=dict[str, Callable[[Mapping[str, Any]], bool]]
    )
    user: User | None = None

    def tasks(self, split: str = ALL) -> Dataset:
        """
        Return the tasks of a split.

        Args:
            split (`str`, *optional*, defaults to `"all"`):
                Name of the split.

        Returns:
            [`~datasets.Dataset`]: One task per row.
        """
        if split == ALL and ALL not in self.splits:
            return dataset_from_rows([row for rows in self.splits.values() for row in rows])
        if split not in self.splits:
            names = ", ".join(repr(name) for name in dict.fromkeys([*self.splits, ALL]))
            raise SettingsError(f"{self.name} has no split {split!r}. Its splits are {names}.")
        return dataset_from_rows(self.splits[split])


def load_environment(name: str, data: str | Path | None = None, /, **options: Any) -> Environment:
    """
    Make an environment.

    Args:
        name (`str`):
            A known name, such as `"workbench"`, or `module:function` for a function that returns an [`Environment`].
        data (`str` or `Path`, *optional*):
            Folder with the environment's own files, for those that need one.
        options (`Any`):
            Options of the environment.

    Returns:
        [`Environment`]: Its servers, tasks and rewards.
    """
    module, _, function = NAMES.get(name, name).partition(":")
    if not function:
        known = ", ".join(repr(one) for one in NAMES)
        raise SettingsError(
            f"There is no environment {name!r}. Known are {known}; name your own as `module:function`."
        )
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"The environment {name!r} could not be imported: {error}.") from error
    try:
        return make(**({} if data is None else {"data": data}), **options)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # not about what it was called with
        raise SettingsError(f"The environment {name!r} was not given what it takes: {error}.") from error
