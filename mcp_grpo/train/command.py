"""From servers to an adapter: `mcp-grpo train`."""

import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from mcp_grpo.errors import SettingsError
from mcp_grpo.train.arguments import MODEL, TrainArguments
from mcp_grpo.train.ledger import Ledger


INTERRUPTED = 130  # as shells say it


def train(arguments: TrainArguments, folder: Path, console: Console, *, is_dry: bool = False) -> int:
    """
    Show the plan, and take its stages, each unless it was done earlier in the same folder.

    Args:
        arguments ([`TrainArguments`]):
            What the command was told.
        folder (`Path`):
            Folder of the run.
        console (`Console`):
            Where to say what is going on.
        is_dry (`bool`, *optional*, defaults to `False`):
            Whether to stop after the plan.

    Returns:
        `int`: The exit status: 0 after a run that ended well.
    """
    start = time.monotonic()
    _use_one_device()
    ledger = Ledger(folder, arguments.told())
    if arguments.servers is not None and not Path(arguments.servers).is_file():
        raise SettingsError(
            f"There is no file {arguments.servers!r}. `--servers` names a JSON file with `mcpServers`."
        )
    with console.status("loading torch, Transformers and TRL ..."):
        from mcp_grpo.train.stages import Stages  # here, as `--help` needs none of it
    with TemporaryDirectory() as scratch:
        arguments = _resolved(arguments, Path(scratch) if is_dry else folder)
        choice, size, plan = _planned(arguments, folder)
    _show_plan(arguments, choice, plan, ledger, console)
    if is_dry:
        return 0
    with ledger.hold():
        end = None if arguments.minutes is None else start + 60 * arguments.minutes
        stages = Stages(arguments, choice, size, ledger, console, end=end)
        try:
            for number, (name, take) in enumerate(stages.all.items(), start=1):
                _take(f"{number}/{len(stages.all)}", name, take, ledger, console)
            return 0 if stages.conclude() else 1
        except KeyboardInterrupt:
            console.print("\nStopped. The same command goes on from here.")
            return INTERRUPTED
        finally:
            stages.close()


def _use_one_device() -> None:
    """Keep to one process and one GPU: Transformers would spread a batch over all that it sees, which a rollout cannot be."""
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # threads that wait leave the cores to others; before torch comes
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError(
            "`mcp-grpo train` is one process on one GPU. Start it without `accelerate launch`; several GPUs go through "
            "`recipes/grpo_qwen3.py`, with the tasks that this command makes."
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _resolved(arguments: TrainArguments, folder: Path) -> TrainArguments:
    """Name what was not named: the files of the quickstart, written into a folder, or only the model."""
    if arguments.servers is not None or arguments.environment is not None:
        return replace(arguments, model=arguments.model or MODEL)
    from mcp_grpo.quickstart.files import write_world

    world = write_world(folder / "quickstart")
    return replace(
        arguments,
        servers=world.servers,
        tasks=world.tasks,
        eval_tasks=world.eval_tasks,
        model=arguments.model or world.model,
    )


def _planned(arguments: TrainArguments, folder: Path) -> tuple[Any, Any, list[Any]]:
    """Choose settings for this machine and the model, and plan the stages."""
    from mcp_grpo.doctor.machine import Machine
    from mcp_grpo.synth.splits import SHARES
    from mcp_grpo.train.plan import attempts_at, make_plan
    from mcp_grpo.train.settings import ModelSize, fit_step, settings_for
    from mcp_grpo.train.splits import MAX_VALIDATION, TASKS_FOLDER, load_splits
    from mcp_grpo.train.world import world_of

    size = ModelSize.of(str(arguments.model))
    choice = settings_for(
        Machine.here(),
        size,
        use_cpu=arguments.use_cpu,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
    )
    world = world_of(arguments)
    world.fit(choice.settings, size.context)
    settings = dict(choice.settings)
    has_tasks = (
        arguments.tasks is not None
        or world.environment is not None
        or (folder / TASKS_FOLDER / "train.jsonl").is_file()
    )
    if has_tasks:
        splits = load_splits(arguments, folder)
        num_train, num_test = len(splits.train), len(splits.test)
        num_validation = 0 if splits.validation is None else len(splits.validation)
        said = splits.sentence
    else:
        num_train = round(arguments.num_tasks * (1 - sum(SHARES.values())))
        num_test = min(arguments.num_eval_tasks, round(arguments.num_tasks * SHARES["test"]))
        num_validation = min(MAX_VALIDATION, round(arguments.num_tasks * SHARES["validation"]))
        said = f"make up to {arguments.num_tasks} tasks by calling the tools, and hold some out by chain of calls"
    fit_step(settings, max(1, num_train))
    plan = make_plan(
        settings,
        size,
        tasks=said,
        num_train=num_train,
        num_test=max(1, num_test),
        num_validation=num_validation,
        has_tasks=has_tasks,
        attempts=attempts_at(arguments.eval_temperature),
        minutes=arguments.minutes,
    )
    return choice, size, plan


def _show_plan(arguments: TrainArguments, choice: Any, plan: list[Any], ledger: Ledger, console: Console) -> None:
    from mcp_grpo.train.plan import plan_table
    from mcp_grpo.train.world import world_of

    console.print(f"Train {arguments.model} on {world_of(arguments).name}, in {ledger.folder}.", soft_wrap=True)
    for reason in choice.reasons:
        console.print(f"  {reason}", soft_wrap=True)
    console.print(plan_table(plan, ledger))
    if arguments.minutes is not None:
        console.print(_time_left(arguments.minutes, plan, ledger), soft_wrap=True)
    console.print("Times are rough, and for tools that answer at once. The same command goes on where it stopped.")


def _time_left(minutes: float, plan: list[Any], ledger: Ledger) -> str:
    """Say what a limit of time means, or that it is too short for what it does not shorten."""
    from mcp_grpo.train.plan import duration

    if ledger.is_done("training"):
        return f"Training is done, so that {minutes:g} minutes are no limit to what follows it."
    left = [each for each in plan if not ledger.is_done(each.name)]
    fixed = sum(each.seconds or 0.0 for each in left if each.name != "training")
    with_warm_start = fixed + sum(each.more or 0.0 for each in left)
    for seconds, which in ((fixed, "All"), (with_warm_start, "With a warm start, all")):
        if seconds > 60 * minutes:
            fewer = ", or lower `--num-eval-tasks`" if len(left) == len(plan) else ""
            return (
                f"{which} but training takes about {duration(seconds)}, which is more than {minutes:g} minutes: there will be one step of "
                f"training. Raise `--minutes`{fewer}."
            )
    return f"A warm start and training end early enough that all takes about {minutes:g} minutes at most."


def _take(place: str, name: str, take: Any, ledger: Ledger, console: Console) -> None:
    """Take a stage, or say that it was done earlier."""
    from mcp_grpo.train.plan import duration

    if ledger.is_done(name):
        console.print(
            Text.assemble((f"[{place}] {name}", "bold"), f": done earlier. {ledger.said(name)}"), soft_wrap=True
        )
        return
    console.print(Text(f"[{place}] {name}", "bold"))
    start = time.monotonic()
    said = take()
    seconds = time.monotonic() - start
    ledger.finish(name, said, seconds)
    console.print(f"{said} ({duration(seconds)})", soft_wrap=True)
