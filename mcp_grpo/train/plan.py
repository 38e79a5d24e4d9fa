"""The plan of a run: its stages, and about how long each takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from mcp_grpo.train.ledger import Ledger
from mcp_grpo.train.settings import WARM_UP_BATCH, ModelSize, warm_up_steps


STAGES = ("doctor", "tasks", "calls", "before", "training", "after", "report")
NUM_LOOKED_AT = 16  # attempts that tell whether a policy can call tools, and ever succeeds
ATTEMPTS = 2  # at each of the tasks to judge by, where they can differ
TOKENS_WRITTEN, TOKENS_READ = 120, 800  # by an attempt, about, with tools that say little
WARM_START_SHARE = 1 / 3  # of the time that is left, for a warm start that would take longer
START = 20.0  # seconds for servers and a model
START_OF_VLLM = 60.0
# Weights times tokens per second, and the least seconds of an attempt: on two CPU cores (SmolLM2-135M and the quickstart's model; learning
# with what attempts and solutions begin with computed once), and on an H200 (SmolLM2-135M to Qwen3-1.7B, as rows).
SAMPLING = {"cpu": (5e9, 0.03), "gpu": (2e11, 0.25), "vllm": (8e11, 0.055)}
LEARNING = {"cpu": (2.5e10, 0.03), "gpu": (2e13, 0.02), "vllm": (2e13, 0.02)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """
    One stage of a run.

    Args:
        name (`str`):
            Its name.
        what (`str`):
            What it does.
        seconds (`float`, *optional*):
            About how long it takes; `None` where that is not known.
        more (`float`, *optional*):
            How much longer it takes if the policy has to be warmed up.
    """

    name: str
    what: str
    seconds: float | None
    more: float | None = None


def make_plan(
    settings: Mapping[str, Any],
    size: ModelSize,
    *,
    tasks: str,
    num_train: int | None,
    num_test: int,
    num_validation: int,
    has_tasks: bool,
    attempts: int = ATTEMPTS,
    minutes: float | None = None,
) -> list[Stage]:
    """
    Plan a run.

    Args:
        settings (`Mapping[str, Any]`):
            The settings of the machine.
        size ([`ModelSize`]):
            The model.
        tasks (`str`):
            What is said of the tasks.
        num_train (`int`, *optional*):
            Tasks to train on, where they are known.
        num_test (`int`):
            Tasks to judge by, or about how many.
        num_validation (`int`):
            Tasks to choose the best policy by.
        has_tasks (`bool`):
            Whether there are tasks already.
        attempts (`int`, *optional*, defaults to `2`):
            Attempts at each task to judge by.
        minutes (`float`, *optional*):
            Minutes that all of it may take.

    Returns:
        `list[Stage]`: The stages, in their order.
    """
    place = "vllm" if settings["use_vllm"] else "cpu" if settings.get("use_cpu") else "gpu"
    sampled = _seconds(size, TOKENS_WRITTEN, *SAMPLING[place])
    learnt = _seconds(size, TOKENS_READ, *LEARNING[place])
    start = START + (START_OF_VLLM if place == "vllm" else 0.0)
    step = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    judged = attempts * num_test
    num_evaluations = 1 + settings["max_steps"] // settings["eval_steps"] if num_validation else 0
    chosen = num_evaluations * num_validation * settings["num_generations_eval"]
    warm = warm_up_steps(size, num_train or 0) * WARM_UP_BATCH
    training = settings["max_steps"] * step

    def cost(num_sampled: float, num_learnt: float = 0.0, other: float = 0.0) -> float | None:
        if sampled is None or learnt is None:
            return None
        return num_sampled * sampled + num_learnt * learnt + other

    imitation = cost(0.0, warm)
    if imitation is not None and minutes is not None:
        imitation = min(imitation, WARM_START_SHARE * 60 * minutes)
    return [
        Stage(name="doctor", what="find what is wrong before anything is started", seconds=START),
        Stage(name="tasks", what=tasks, seconds=1.0 if has_tasks else 30.0),
        Stage(
            name="calls",
            what=f"see in {NUM_LOOKED_AT} attempts whether the policy calls tools well and ever succeeds; if not, warm it up",
            seconds=cost(NUM_LOOKED_AT, other=start),
            more=None if imitation is None else cost(num_test + NUM_LOOKED_AT, other=start + imitation),
        ),
        Stage(name="before", what=f"{judged} attempts at {num_test} tasks to judge by", seconds=cost(judged)),
        Stage(
            name="training",
            what=f"{settings['max_steps']} steps of {step} attempts each"
            + (f", {num_evaluations} evaluations to keep the best" if chosen else ""),
            seconds=cost(training + chosen, training),
        ),
        Stage(name="after", what="the same attempts again, and what to compare with", seconds=cost(judged, other=5.0)),
        Stage(name="report", what="adapter, card, report page, and how to serve it", seconds=5.0),
    ]


def attempts_at(temperature: float | None) -> int:
    """Return the attempts at each task to judge by: one, where all are alike."""
    return 1 if temperature == 0 else ATTEMPTS


def plan_table(stages: Sequence[Stage], ledger: Ledger) -> Table:
    """Return the plan for the terminal, with what is done already."""
    table = Table("", "stage", "what it does", "about", show_lines=False, pad_edge=False)
    left = [stage for stage in stages if not ledger.is_done(stage.name)]
    for number, stage in enumerate(stages, start=1):
        about = duration(stage.seconds) if stage in left else "done"
        if stage in left and stage.more is not None:
            about += f"; warm start {duration(stage.more)}"
        style = "" if stage in left else "dim"
        table.add_row(str(number), stage.name, Text(stage.what), Text(about), style=style)
    table.add_section()
    unknown = any(stage.seconds is None for stage in left)
    total = sum(stage.seconds or 0.0 for stage in left)
    table.add_row("", "in all", "", Text(duration(None if unknown else total)))
    if not unknown and (more := sum(stage.more or 0.0 for stage in left)):
        table.add_row("", "", "with a warm start", Text(duration(total + more)))
    return table


def duration(seconds: float | None) -> str:
    """Return a time in words, as roughly as it is known."""
    if seconds is None:
        return "not known"
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _seconds(size: ModelSize, tokens: int, speed: float, least: float) -> float | None:
    """Return the seconds of an attempt, by the tokens that are computed for it."""
    return None if size.parameters is None else max(least, tokens * size.parameters / speed)
