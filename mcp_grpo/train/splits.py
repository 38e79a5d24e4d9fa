"""Which tasks are trained on, which the best policy is chosen by, and which it is judged by."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from mcp_grpo.environments import Environment
from mcp_grpo.errors import SettingsError
from mcp_grpo.synth.splits import MIN_CHAINS, split_by_chain
from mcp_grpo.tasks import load_tasks
from mcp_grpo.tasks.columns import dataset_from_rows
from mcp_grpo.train.arguments import TrainArguments
from mcp_grpo.train.world import has_splits, world_of


TASKS_FOLDER = "tasks"  # in that of a run, where tasks are made
CHAIN, TEMPLATE = (
    "chain",
    "template",
)  # columns that say which tasks are alike: of tasks that are made, and of environments
GROUNDED = "grounded"  # column that says whether a solution uses only what the task or a tool has shown before
MAX_VALIDATION = 32  # tasks that the best policy is chosen by


@dataclass(frozen=True, kw_only=True)
class Splits:
    """
    Tasks of a run. No task is in two of the parts.

    Args:
        train ([`~datasets.Dataset`]):
            Tasks to train on.
        validation ([`~datasets.Dataset`], *optional*):
            Tasks that the best policy is chosen by; `None` if there are too few.
        test ([`~datasets.Dataset`]):
            Tasks to judge by, before and after.
        note (`str`, *optional*, defaults to `""`):
            What is to be known about the tasks to judge by.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset
    note: str = ""

    @property
    def sentence(self) -> str:
        """Say how many tasks there are of each part."""
        chosen = 0 if self.validation is None else len(self.validation)
        best = f", {chosen} to choose the best policy by" if chosen else ""
        return f"{len(self.train)} tasks to train on{best}, {len(self.test)} to judge by"


def load_splits(arguments: TrainArguments, folder: Path) -> Splits:
    """
    Load the tasks that were named, or that were made in the folder of a run, and hold some out where none are to judge by.

    Args:
        arguments ([`TrainArguments`]):
            The arguments.
        folder (`Path`):
            Folder of the run.

    Returns:
        [`Splits`]: The same for the same arguments and files.

    Raises:
        [`SettingsError`]: If there are too few tasks to hold some out.
    """
    if (environment := world_of(arguments).environment) is not None:
        return _of_environment(environment, arguments)
    if arguments.tasks is None:
        return _made(arguments, folder / TASKS_FOLDER)
    tasks = load_tasks(arguments.tasks)
    if arguments.eval_tasks is None:
        return _held_out(tasks, arguments, f"in {arguments.tasks}")
    test = load_tasks(arguments.eval_tasks)
    places, _ = _split(tasks, arguments.seed)
    both = set(tasks["task_id"]) & set(test["task_id"])
    note = f"{len(both)} of the tasks to judge by are trained on, too, by their `task_id`." if both else ""
    return _parts(
        tasks.select(sorted([*places["train"], *places["test"]])),
        tasks.select(places["validation"]),
        test,
        arguments,
        note,
    )


def _of_environment(environment: Environment, arguments: TrainArguments) -> Splits:
    """Return the environment's own splits, with tasks to choose the best policy by from those to train on."""
    if not has_splits(environment):
        splits = _held_out(environment.tasks(), arguments, f"in {environment.name}", TEMPLATE)
        return replace(splits, train=_without_guesses(splits.train.to_list()))
    tasks = _without_guesses(environment.splits["train"])
    places, _ = _split(tasks, arguments.seed, TEMPLATE)
    train = sorted([*places["train"], *places["test"]])
    return _parts(tasks.select(train), tasks.select(places["validation"]), environment.tasks("test"), arguments, "")


def _without_guesses(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """Take away solutions that use what a policy cannot know: they would teach it to guess."""
    return dataset_from_rows([row if row.get(GROUNDED, True) else {**row, "solution": None} for row in rows])


def _made(arguments: TrainArguments, folder: Path) -> Splits:
    """Return the tasks that were made, as they were split; where there were too few chains, some are held out by task."""
    parts = {path.stem: load_tasks(path) for path in folder.glob("*.jsonl")}
    if "test" in parts:
        return _parts(parts["train"], parts.get("validation"), parts["test"], arguments, "")
    return _held_out(parts["train"], arguments, "that could be made")


def _held_out(tasks: Dataset, arguments: TrainArguments, where: str, column: str = CHAIN) -> Splits:
    places, is_by_chain = _split(tasks, arguments.seed, column)
    if not places["test"]:
        raise SettingsError(
            f"There {'are' if len(tasks) != 1 else 'is'} {len(tasks)} task{'s' if len(tasks) != 1 else ''} {where}, too few to "
            f"hold some out to judge by, which takes {MIN_CHAINS} or more. "
            + (
                "Name tasks to judge by with `--eval-tasks`, or give or make more tasks."
                if arguments.environment is None
                else "Give the environment the splits `train` and `test`, or more tasks."
            )
        )
    has_chains = column in tasks.column_names
    note = (
        ""
        if is_by_chain or not has_chains
        else (
            f"There are too few different {'chains of calls' if column == CHAIN else 'templates'} to hold some out: the tasks to judge by "
            f"ask for other things along the same {column}s as those that are trained on."
        )
    )
    train, validation, test = (tasks.select(places[name]) for name in ("train", "validation", "test"))
    return _parts(train, validation, test, arguments, note)


def _split(tasks: Dataset, seed: int, column: str = CHAIN) -> tuple[dict[str, list[int]], bool]:
    """Return the places of the tasks of each part: by chain, where there are enough chains, else by task."""
    ids = tasks["task_id"]
    kinds = tasks[column] if column in tasks.column_names else ids
    chains = [str(task_id if kind is None else kind) for kind, task_id in zip(kinds, ids, strict=True)]
    is_by_chain = len(set(chains)) >= MIN_CHAINS
    keys: Sequence[Any] = chains if is_by_chain else tasks["task_id"]
    rows = [{"chain": str(key), "place": place} for place, key in enumerate(keys)]
    return {part: [row["place"] for row in found] for part, found in split_by_chain(rows, seed).items()}, is_by_chain


def _parts(train: Dataset, validation: Dataset | None, test: Dataset, arguments: TrainArguments, note: str) -> Splits:
    def some(tasks: Dataset, number: int) -> Dataset:
        """Draw tasks, in their order: neighbours may be of one kind, and so may every third."""
        drawn = random.Random(f"{arguments.seed} some").sample(range(len(tasks)), min(number, len(tasks)))
        return tasks.select(sorted(drawn))

    return Splits(
        train=train,
        validation=some(validation, MAX_VALIDATION) if validation is not None and len(validation) >= 2 else None,
        test=some(test, arguments.num_eval_tasks),
        note=note,
    )
