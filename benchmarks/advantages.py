"""
Ask whether turn-level advantages or a value head help, and whether the library learns as well as stock TRL.

    python benchmarks/advantages.py [--seeds 0 1 2 3 4] [--jobs 2] [--tasks quickstart harder]
        [--modes group group_turn gae hybrid trl] [--max-steps 40] [--output-dir outputs/advantages]

For each seed one model is warmed up as the quickstart does it, and every mode starts from it. The sets of tasks are:

- `quickstart`: its tasks, of one to three calls, and its rewards: 1 for the answer, less 0.1 for each call that could not be made.
- `harder`: only tasks of two and three calls, on the same servers, with one turn to spare; and beside the 1 for the answer a
  reward for each turn: -0.1 if it has a call that does not lead to the answer, or one that was made before, 0 otherwise.

The modes `group`, `group_turn`, `gae` and `hybrid` are `advantage_mode`s of `MCPGRPOTrainer`. Advantages are not scaled in any of them, nor in
`trl` (`scale_rewards="none"`, as of the quickstart). The value head learns with a rate of 2e-3,
as the policy does: the default is for longer runs of larger models. `hybrid` may rely on it after 20 updates, half of the run. `trl` is stock `trl.GRPOTrainer(tools=...)` with functions that call the same servers, from the same
prompts, with the same settings. There, a call that cannot be read is taken for the answer, rewards for turns are added up, all
tasks of a set have the turns of the longest, and held-out tasks are attempted by `evaluate`.

The table has the updates until success on the training tasks, averaged over five updates, reached 0.9; the mean of success
over all updates; success on held-out tasks; and how the value head did. Below it, each mode is
compared with `trl`, or with `group` where that is left out, seed by seed, with an interval, which needs ten seeds or so to be narrow. The picture, `advantages.png`, is written to the output
folder. Runs that are finished are not repeated, so that what was interrupted can be gone on with; another `--max-steps` needs another
folder. It takes about two minutes of one core for each seed's model, and four for each run.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from learning_runs import (
    BASE,
    GOAL,
    SUCCESS,
    WINDOW,
    Result,
    TaskSet,
    averaged,
    base_path,
    make_parser,
    mean_success,
    paired_gain,
    quickstart_tasks,
    results,
    run,
    shown,
    train_and_judge,
    train_on_servers,
    updates_to_goal,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table


VALUE_HEAD = {"value_learning_rate": 2e-3}
# `scale_rewards="none"` is the quickstart's, and holds for all.
MODES: dict[str, dict[str, Any]] = {
    "group": {"advantage_mode": "group"},
    "group_turn": {"advantage_mode": "group_turn"},
    "gae": {"advantage_mode": "gae", **VALUE_HEAD},
    "hybrid": {"advantage_mode": "hybrid", **VALUE_HEAD},
    "trl": {},
}
LABELS = {
    "group": "group: one advantage per trajectory",
    "group_turn": "group_turn: group, turn by turn",
    "gae": "gae: value head",
    "hybrid": "hybrid: group and value head",
    "trl": "stock TRL",
}
TITLES = {
    "quickstart": "quickstart: 1 to 3 calls, rewards at the end",
    "harder": "harder: 2 and 3 calls, rewards for turns",
}
MAX_TURNS = 5  # of a harder task: three calls, the answer, and one to spare
NUM_EVAL = 60  # held-out attempts at a time

Completion = list[dict[str, Any]]  # the messages of a trajectory


def main() -> None:
    """Run all, or one part of it in a process of its own."""
    parser = make_parser(__doc__, way=["TASKS", "MODE"], output_dir="outputs/advantages", max_steps=40)
    parser.add_argument("--tasks", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    arguments = parser.parse_args()
    ways = [(tasks, mode) for tasks in arguments.tasks for mode in arguments.modes]
    run(__file__, arguments, ways, train=train, report=report)


def train(arguments: argparse.Namespace, seed: int, tasks: str, mode: str) -> Result:
    """Train once."""
    chosen = quickstart_tasks() if tasks == "quickstart" else harder_tasks()
    if mode == "trl":
        result = train_with_trl(arguments, seed, tasks, chosen)
    else:
        result = train_on_servers(arguments, seed, [tasks, mode], chosen, **MODES[mode])
    return {"tasks": tasks, "mode": mode, "max_steps": arguments.max_steps, **result}


# ---- Tasks with rewards for turns ----


def harder_tasks() -> TaskSet:
    """Tasks of two and three calls, as many as the quickstart has in all."""
    from mcp_grpo import exact_answer
    from mcp_grpo.quickstart.tasks import build_tasks

    train_rows, held_out_rows = (
        [{**row, "max_turns": MAX_TURNS} for row in rows if row["difficulty"] != "easy"]
        for rows in build_tasks(num_train=4500, num_held_out=180)
    )
    return TaskSet(train=train_rows, held_out=held_out_rows, reward_funcs=[exact_answer, turn_penalty])


def turn_penalty(
    completions: list[Completion], subject: list[str], steps: list[list[str]], **kwargs: Any
) -> list[list[float]]:
    """-0.1 for every turn with a call that does not lead to the answer, or that was made before."""
    return [turn_rewards(*of_one) for of_one in zip(completions, subject, steps, strict=True)]


def turn_rewards(completion: Completion, subject: str, steps: list[str]) -> list[float]:
    """Rewards of the turns of one trajectory."""
    from mcp_grpo.quickstart.tasks import scripted_solution

    solution = scripted_solution({"subject": subject, "steps": steps})
    needed = [call for message in solution for call in calls_in(message)]
    rewards = []
    for message in completion:
        if message["role"] != "assistant":
            continue
        is_useless = is_unread(message)
        for call in calls_in(message):
            if call in needed:
                needed.remove(call)
            else:
                is_useless = True
        rewards.append(-0.1 if is_useless else 0.0)
    return rewards


def calls_in(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Names and arguments of the tool calls of a message."""
    return [call["function"] for call in message.get("tool_calls") or ()]


def is_unread(message: dict[str, Any]) -> bool:
    """Whether a message has a tool call that could not be read."""
    return not message.get("tool_calls") and "<tool_call>" in message["content"]


# ---- Stock TRL ----


class ServerTool(dict[str, Any]):
    """
    A tool of a server that is its own schema and can be called.

    TRL takes functions and writes their schemas itself, from their docstrings, in other words than the server's. This one is
    put into the prompt as it is, so that the model reads what it was warmed up on.

    Args:
        schema (`dict[str, Any]`):
            The schema, as chat templates take it.
        call (`Callable[..., Any]`):
            Makes a tool call, given a name and arguments.
    """

    def __init__(self, schema: dict[str, Any], call: Callable[..., Any]) -> None:
        super().__init__(schema)
        self.__name__: str = schema["function"]["name"]
        self._call = call

    def __call__(self, **arguments: Any) -> str:
        """What the server answers; an error if the call could not be made."""
        result = self._call(self.__name__, arguments)
        if result.kind.is_policy_fault or result.kind.is_server_fault:
            raise ValueError(result.text)
        return result.text


def train_with_trl(arguments: argparse.Namespace, seed: int, name: str, tasks: TaskSet) -> Result:
    """Train once with TRL's own loop of tool calls."""
    import torch
    from anyio.from_thread import start_blocking_portal
    from datasets import Dataset
    from quickstart import ADAPTER, SERVERS, make_config
    from trl import GRPOTrainer

    from mcp_grpo import ToolCall, ToolPool

    torch.set_num_threads(1)
    folder = arguments.output_dir
    config = make_config(
        folder / f"{name}-trl-{seed}",
        seed,
        max_steps=arguments.max_steps,
        disable_tqdm=True,
        max_tool_calling_iterations=max(row["max_turns"] for row in tasks.train) - 1,
        num_generations_eval=2,
        per_device_eval_batch_size=NUM_EVAL,
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(ToolPool(SERVERS)) as pool:

        def call(name: str, arguments: dict[str, Any]) -> Any:
            return portal.call(pool.call, ToolCall(name=name, arguments=arguments))

        trainer = GRPOTrainer(
            str(base_path(folder, BASE, seed)),
            reward_funcs=[exact_answer, fault_penalty if name == "quickstart" else summed(turn_penalty)],
            args=config,
            train_dataset=Dataset.from_list(tasks.train),
            eval_dataset=Dataset.from_list(tasks.held_out),
            tools=[ServerTool(tool.schema, call) for tool in pool.catalog.tools],
            peft_config=ADAPTER,
        )
        return train_and_judge(trainer, lambda: trainer.evaluate()[f"eval_{SUCCESS}"], seed)


def exact_answer(completions: list[Completion], answer: list[str], **kwargs: Any) -> list[float]:
    """The library's reward of this name, on messages."""
    return [float(is_answered(*of_one)) for of_one in zip(completions, answer, strict=True)]


def is_answered(completion: Completion, answer: str) -> bool:
    """Whether the last message is the answer."""
    last = completion[-1]
    is_final = last["role"] == "assistant" and not last.get("tool_calls")
    return is_final and last["content"].strip().casefold() == answer.strip().casefold()


def fault_penalty(completions: list[Completion], **kwargs: Any) -> list[float]:
    """The library's reward of this name, on messages."""
    return [-0.1 * min(sum(map(is_fault, completion)), 3) for completion in completions]


def is_fault(message: dict[str, Any]) -> bool:
    """Whether a message has a call that could not be read, or is what TRL answers to one that could not be made."""
    return message["content"].startswith("{'error': ") if message["role"] == "tool" else is_unread(message)


def summed(function: Callable[..., list[list[float]]]) -> Callable[..., list[float]]:
    """Rewards for turns, as the rewards for trajectories that TRL takes."""

    @functools.wraps(function)
    def sums(**kwargs: Any) -> list[float]:
        return [math.fsum(rewards) for rewards in function(**kwargs)]

    return sums


# ---- What came out ----


def report(arguments: argparse.Namespace) -> None:
    """Print the tables and draw the picture."""
    console = Console(width=180)
    for tasks in arguments.tasks:
        table = Table(title=f"Advantages, {tasks}: {len(arguments.seeds)} seeds each; median (all)")
        for column in (
            "",
            "updates to 0.9",
            "mean success",
            "held out before",
            "held out after",
            "explained variance, last 10",
            "mixing weight at the end",
            "seconds",
        ):
            table.add_column(column)
        for mode in arguments.modes:
            if not (runs := results(arguments, tasks, mode)):
                continue
            histories = [run["history"] for run in runs]
            table.add_row(
                mode,
                shown([updates_to_goal(history) for history in histories], "{:.0f}"),
                shown([mean_success(run) for run in runs], "{:.2f}"),
                shown([run["before"] for run in runs], "{:.2f}"),
                shown([run["after"] for run in runs], "{:.2f}"),
                shown_figure(histories, "value/explained_variance", 10),
                shown_figure(histories, "value/mixing_weight", 1),
                f"{statistics.median(run['seconds'] for run in runs):.0f}",
            )
        console.print(table)
        baseline = next((each for each in ("trl", "group") if each in arguments.modes), None)
        if baseline is not None:
            for mode in (each for each in arguments.modes if each != baseline):
                console.print(beside(arguments, tasks, mode, baseline))
    draw(arguments)


def beside(arguments: argparse.Namespace, tasks: str, mode: str, baseline: str) -> str:
    """Compare a mode with another, seed by seed: mean success over all updates, and success on held-out tasks."""
    first, second = results(arguments, tasks, baseline), results(arguments, tasks, mode)
    over_updates, held_out = (paired_gain(first, second, value) for value in (mean_success, lambda run: run["after"]))
    return f"{mode} beside {baseline}, 95 % interval over seeds: mean success {over_updates}, held out {held_out}"


def shown_figure(histories: Sequence[list[Result]], key: str, num_last: int) -> str:
    """The mean of the last times that a figure was logged; nothing if it never was."""
    logged = [[entry[key] for entry in history if key in entry][-num_last:] for history in histories]
    return shown([statistics.mean(values) for values in logged], "{:.2f}") if all(logged) else ""


def draw(arguments: argparse.Namespace) -> None:
    """Draw success over updates: the mean over seeds, and one standard error to each side."""
    figure = Figure(figsize=(6.4 * len(arguments.tasks), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(arguments.tasks), squeeze=False, sharey=True)[0]
    for axes, tasks in zip(panels, arguments.tasks, strict=True):
        for mode in arguments.modes:
            columns = list(zip(*(averaged(run["history"]) for run in results(arguments, tasks, mode)), strict=False))
            updates = range(WINDOW, WINDOW + len(columns))
            means = [statistics.mean(column) for column in columns]
            errors = [standard_error(column) for column in columns]
            colour = f"C{list(MODES).index(mode)}"
            axes.plot(updates, means, color=colour, label=LABELS[mode], linestyle="--" if mode == "trl" else "-")
            axes.fill_between(
                updates,
                [mean - error for mean, error in zip(means, errors, strict=True)],
                [mean + error for mean, error in zip(means, errors, strict=True)],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=TITLES[tasks], xlabel="update", ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"success on training tasks, mean of {WINDOW} updates")
    panels[0].legend(fontsize="small", loc="lower right")
    path = arguments.output_dir / "advantages.png"
    figure.savefig(path, dpi=150)
    Console().print(f"Wrote {path}.")


def standard_error(values: Sequence[float]) -> float:
    """Standard error of a mean; 0 for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
