"""
Ask where turn-level advantages, the value head and the schema mask earn their place, and which settings keep a policy from collapse.

    python benchmarks/regimes.py [--seeds 0 1 2 3 4] [--jobs 2] [--regimes chain small form small_end chain_end stable steep lopsided]
        [--ways ...] [--max-steps 30] [--stop-after SECONDS] [--output-dir outputs/regimes]
    python benchmarks/regimes.py --table

Every run is on the quickstart's two servers, with 32 trajectories per update. The regimes are:

- `chain`: four to six calls, each with the result of the one before ("What is the desk of the manager of the mentor of Ada
  Kent?"). Beside the 1 for the answer, each turn is rewarded: 0.2 if it makes the next call of the solution on what the call
  before has answered, or gives the answer when it is time to; -0.2 otherwise. Groups of eight.
- `small`: the same in groups of two.
- `chain_end`, `small_end`: the same two with nothing but the 1 for the answer.
- `form`: the quickstart's tasks and rewards, and a model that writes about half of its calls so that they cannot be made.
- `stable`: the quickstart's tasks, rewards and learning rate, with the settings of the recipes.
- `steep`: the same at three times that rate, where a policy soon gets worse again.
- `lopsided`: as `stable`, with a model that makes single calls without fail and blurs its choices where there are several, and tasks of
  which eight in ten are single calls. Held-out tasks are a third of each kind.

The chains' modes are `advantage_mode`s, and two of them once more with `gamma=0.5`, by which a turn has credit for what follows
soon (`_near`). All divide advantages by their spread over the batch: `scale_rewards="batch"` for `group`. The ways of `form` are
`off` (no mask), `syntax` (the default mask), `hard` (all syntax, however unlikely), `bootstrap` (no mask, and
`bootstrap_steps`); and where the extra `grammar` is installed `grammar` and `constrained` (`constrained_decoding`). Those of
`stable` and `steep` are the `recipe` (`epsilon` 0.2, `epsilon_high` 0.28, `beta` 0, `scale_rewards="none"`, a constant rate), and the
same with one setting changed: see `single_changes`. `clip_same` is only there to show that it is the same run: with one update
for each batch ratios are 1, and nothing is clipped. So `twice` learns two times from each batch, and `twice_clip_same` is to be
read beside it.

For each seed the quickstart's warm start learns by imitation, with choices that are blurred: chains for one model, calls with
errors of form for another, single calls without any error for a third; `stable` and `steep` begin with a model that was warmed up as the quickstart's. All ways of a seed
start from the same model. The table has the mean of success on training tasks over all updates (without solutions that were
replayed), and over the last ten; success on held-out tasks at the end; how far success, averaged over five updates, fell from the best that
it had been; entropy; the share of trajectories that ran out of turns or tokens, and of calls that could be made; how the value
head did; and each way beside the first of its regime, seed by seed, with 95 % intervals. `summary.csv` in the output folder
has the figures of each run. Runs that are finished are not repeated; those of all seeds of the first regimes come first,
`hybrid` and what needs an extra last. It takes about one minute of one core for each model and two for each run.
"""

import argparse
import csv
import importlib.util
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from advantages import MODES, Completion, calls_in, shown_figure
from learning_runs import (
    BASE,
    SUCCESS,
    Result,
    TaskSet,
    Way,
    averaged,
    make_parser,
    mean_success,
    paired_gain,
    quickstart_tasks,
    results,
    run,
    shown,
    train_on_servers,
    warm_up,
)
from rich.console import Console
from rich.table import Table
from schema_mask import MASKS


NUM_HELD_OUT = 60
NUM_EASY = 8  # for each task of two calls, and each of three, in the lopsided set
NUM_LAST = 10  # updates at the end of a run that are looked at by themselves
STEP_REWARD = 0.2
SOLVED = "solutions/solved_fraction"  # success without replayed solutions
KEPT = (SUCCESS, "reward", "entropy", "frac_reward_zero_std", "tools/valid_rate", "mask/masked_fraction")
KEPT_KINDS = ("value/", "stop/", "solutions/", "groups/", "tasks/", "kl", "clip_ratio/")
VALUE_HEAD = {"value_learning_rate": 5e-3}  # runs are short
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "max_completion_length": 320,
    "max_turn_tokens": 32,  # three times what a call takes; a batch waits for those that ramble
    "scale_rewards": "batch",
    "record_trajectories": False,
    "on_unhealthy": "warn",
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group": MODES["group"],
    "group_turn": MODES["group_turn"],
    "gae": {**MODES["gae"], **VALUE_HEAD},
    "group_turn_near": {**MODES["group_turn"], "gamma": 0.5},
    "gae_near": {**MODES["gae"], **VALUE_HEAD, "gamma": 0.5},
    "hybrid": {**MODES["hybrid"], **VALUE_HEAD},
}
FORMS: dict[str, dict[str, Any]] = {
    "off": MASKS["off"],
    "syntax": MASKS["default"],
    "hard": MASKS["hard"],
    "bootstrap": {**MASKS["off"], "bootstrap_steps": 20},
    "grammar": {"schema_mask": "grammar"},
    "constrained": {**MASKS["off"], "constrained_decoding": True},
}
LATE = ("hybrid", "grammar", "constrained")
RECIPE: dict[str, Any] = {  # as recipes/configs/ has it for models that were trained
    "lr_scheduler_type": "constant_with_warmup",
    "scale_rewards": "none",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
}
NEEDS_GRAMMAR = ("grammar", "constrained")


def single_changes(rate: float) -> dict[str, dict[str, Any]]:
    """The settings of the recipes at a learning rate, and with one of them changed at a time."""
    kl = {"beta": 0.05}
    band = {"use_adaptive_entropy": True, "entropy_target": 0.1, "entropy_coef_delta": 0.001, "entropy_coef_max": 0.02}
    return {
        "recipe": {"learning_rate": rate},
        "replay": {"learning_rate": rate, "replay_solutions": True},
        "kl": {"learning_rate": rate, **kl},
        "entropy": {"learning_rate": rate, "entropy_coef": 0.005},
        "entropy_band": {"learning_rate": rate, **band},
        "dynamic_sampling": {"learning_rate": rate, "dynamic_sampling": 2},
        "spread": {"learning_rate": rate, "task_choice": "spread"},
        "clip_same": {"learning_rate": rate, "epsilon_high": 0.2},
        "scale_group": {"learning_rate": rate, "scale_rewards": "group"},
        "cut_masked": {"learning_rate": rate, "truncation": "mask"},
        "kl_adaptive": {"learning_rate": rate, **kl, "kl_target": 0.05},
        "rate_half": {"learning_rate": rate / 2},
        "rate_double": {"learning_rate": rate * 2},
        "rank_low": {"learning_rate": rate, "lora_r": 4},
        "decay": {"learning_rate": rate, "lr_scheduler_type": "linear"},
        "decay_spread": {"learning_rate": rate, "lr_scheduler_type": "linear", "task_choice": "spread"},
        "scale_batch": {"learning_rate": rate, "scale_rewards": "batch"},
        "kl_moving": {"learning_rate": rate, **kl, "ref_sync": "ema", "ref_sync_steps": 1, "ref_ema_decay": 0.9},
        "twice": {"learning_rate": rate, "num_iterations": 2},
        "twice_clip_same": {"learning_rate": rate, "num_iterations": 2, "epsilon_high": 0.2},
    }


@dataclass(frozen=True, kw_only=True)
class Regime:
    """
    Conditions to train under.

    Args:
        base (`str`):
            The model to start from, one of `BASES`.
        tasks (`Callable[[], TaskSet]`):
            What to train on.
        ways (`Mapping[str, dict[str, Any]]`):
            The settings to compare, by name; the first is what the others are compared with.
        settings (`dict[str, Any]`, *optional*):
            Settings that all of them have.
    """

    base: str
    tasks: Callable[[], TaskSet]
    ways: Mapping[str, dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Run all, or one part of it in a process of its own."""
    parser = make_parser(__doc__, way=["REGIME", "WAY"], output_dir="outputs/regimes", max_steps=30)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    ways = [(regime, way) for regime in arguments.regimes for way in ways_of(arguments, regime)]
    run(
        __file__,
        arguments,
        ways,
        train=train,
        report=report,
        bases=BASES,
        base_of=lambda way: REGIMES[way[0]].base,
        order=partial(priority, arguments.regimes),
    )


def ways_of(arguments: argparse.Namespace, regime: str) -> list[str]:
    """What is compared in a regime, as far as it is asked for and installed."""
    has_grammar = importlib.util.find_spec("llguidance") is not None
    chosen = [way for way in REGIMES[regime].ways if way in arguments.ways]
    return [way for way in chosen if has_grammar or way not in NEEDS_GRAMMAR]


def priority(regimes: Sequence[str], seed: int, way: Way) -> tuple[bool, int, int]:
    """What a run is sorted by: regimes in their order with all of their seeds, and ways that say least at the end."""
    return way[1] in LATE, regimes.index(way[0]), seed


def train(arguments: argparse.Namespace, seed: int, name: str, way: str) -> Result:
    """Train once."""
    regime = REGIMES[name]
    settings = {**COMMON, **regime.settings, **regime.ways[way]}
    result = train_on_servers(arguments, seed, [name, way], regime.tasks(), base=regime.base, **settings)
    history = [
        {key: value for key, value in entry.items() if key in KEPT or key.startswith(KEPT_KINDS)}
        | {SUCCESS: entry.get(SOLVED, entry[SUCCESS])}
        for entry in result["history"]
    ]
    return {"regime": name, "way": way, "max_steps": arguments.max_steps, **result, "history": history}


# ---- Chains of calls ----


def chain_tasks(*, rewards_turns: bool) -> TaskSet:
    """Tasks of four to six calls, each with the result of the one before."""
    from mcp_grpo import exact_answer
    from mcp_grpo.quickstart.directory import EMPLOYEES
    from mcp_grpo.quickstart.directory import NUM_HELD_OUT as NUM_HELD_OUT_PEOPLE

    rng = random.Random(0)
    return TaskSet(
        train=draw_chains("train", EMPLOYEES[NUM_HELD_OUT_PEOPLE:], 3000, rng),
        held_out=draw_chains("held-out", EMPLOYEES[:NUM_HELD_OUT_PEOPLE], NUM_HELD_OUT, rng),
        reward_funcs=[exact_answer, step_rewards] if rewards_turns else [exact_answer],
    )


def draw_chains(split: str, employees: Sequence[Any], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Draw different tasks, of four, five and six calls by turns."""
    from mcp_grpo.quickstart.tasks import COLLEAGUES, THINGS, scripted_solution

    rows: dict[str, dict[str, Any]] = {}  # by question, so that none comes twice
    while len(rows) < count:
        person, thing = rng.choice(employees).name, rng.choice(THINGS)
        colleagues = rng.choices(COLLEAGUES, k=2 + len(rows) % 3)
        relations = "".join(f"the {colleague} of " for colleague in reversed(colleagues))
        question = f"What is the {thing} of {relations}{person}?"
        row = {
            "task_id": f"{split}-{len(rows)}",
            "prompt": [{"role": "user", "content": question}],
            "servers": ["people", "office"],
            "max_turns": len(colleagues) + 3,
            "subject": person,
            "steps": ["find_person", *(f"get_{colleague}" for colleague in colleagues), f"get_{thing}"],
        }
        rows.setdefault(question, {**row, "answer": scripted_solution(row)[-1]["content"]})
    return list(rows.values())


def step_rewards(
    completions: list[Completion], subject: list[str], steps: list[list[str]], **kwargs: Any
) -> list[list[float]]:
    """Reward each turn by itself: whether it was the right step, given what the turns before have led to."""
    return [rewards_of_steps(*of_one) for of_one in zip(completions, subject, steps, strict=True)]


def rewards_of_steps(completion: Completion, subject: str, steps: list[str]) -> list[float]:
    """Rewards of the turns of one trajectory."""
    rewards, value = list[float](), subject
    for message in completion:
        if message["role"] != "assistant":
            value = message["content"]
            continue
        needed = []
        if len(rewards) < len(steps):
            tool = steps[len(rewards)]
            needed = [{"name": tool, "arguments": {"name" if tool == "find_person" else "employee": value}}]
        rewards.append(STEP_REWARD if calls_in(message) == needed else -STEP_REWARD)
    return rewards


def short_tasks() -> TaskSet:
    """The quickstart's tasks, with their solutions, and with fewer to judge by."""
    from mcp_grpo.quickstart.tasks import with_solutions

    tasks = quickstart_tasks()
    return replace(tasks, train=with_solutions(tasks.train), held_out=tasks.held_out[:NUM_HELD_OUT])


def lopsided_tasks() -> TaskSet:
    """The quickstart's tasks, of which eight in ten to train on take a single call, and with fewer to judge by."""
    tasks = quickstart_tasks()
    train, num_easy = list[dict[str, Any]](), 0
    for row in tasks.train:  # as many of each difficulty, by turns
        is_easy = row["difficulty"] == "easy"
        num_easy += is_easy
        if is_easy or num_easy % NUM_EASY == 0:
            train.append(row)
    return replace(tasks, train=train, held_out=tasks.held_out[:NUM_HELD_OUT])


# ---- Models to start from ----


def make_lopsided_base(seed: int, folder: Path) -> None:
    """Teach the warm start single calls without fail, and choices that are blurred where there are several."""

    def solution(row: dict[str, Any], noise: float, rng: random.Random) -> list[dict[str, Any]]:
        from mcp_grpo.quickstart.tasks import scripted_solution

        return scripted_solution(row, 0.0 if row["difficulty"] == "easy" else noise, rng)

    imitate(
        quickstart_tasks().train, seed, folder, max_call_steps=0, num_noisy_steps=120, noise=0.7, solution=solution
    )


def make_chain_base(seed: int, folder: Path) -> None:
    """Teach the warm start chains, with choices that are blurred."""
    imitate(chain_tasks(rewards_turns=False).train, seed, folder, max_call_steps=200, noise=0.5)


def make_form_base(seed: int, folder: Path) -> None:
    """Teach the warm start to make mistakes of form."""
    imitate(quickstart_tasks().train, seed, folder, max_call_steps=0, noise=0.5, solution=unreliable_solution)


def imitate(rows: list[dict[str, Any]], seed: int, folder: Path, **settings: Any) -> None:
    """Go on with the warm-up of the quickstart's warm start, and save what comes out."""
    import anyio
    import torch
    from quickstart import list_tools
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mcp_grpo.quickstart.warm_start import WARM_START
    from mcp_grpo.quickstart.warmup import warm_up as go_on

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(WARM_START, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(WARM_START)
    go_on(model, tokenizer, rows, anyio.run(list_tools), max_copy_steps=0, seed=seed, **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def unreliable_solution(row: dict[str, Any], noise: float, rng: random.Random) -> list[dict[str, Any]]:
    """A solution with blurred choices, up to a call that cannot be made: each is one with probability `noise`."""
    from mcp_grpo.quickstart.tasks import scripted_solution

    messages = list[dict[str, Any]]()
    for message in scripted_solution(row, noise, rng):
        if message.get("tool_calls") and rng.random() < noise:
            (call,) = calls_in(message)
            mistaken = rng.choice(MISTAKES)(call["name"], *call["arguments"].items())
            return [*messages, {"role": "assistant", "content": mistaken}]
        messages.append(message)
    return messages


def written(name: str, argument: tuple[str, str], arguments: str = "arguments", end: str = "}}") -> str:
    """A tool call as a model writes it."""
    key, value = argument
    return f'<tool_call>\n{{"name": "{name}", "{arguments}": {{"{key}": "{value}"{end}\n</tool_call>'


MISTAKES: list[Callable[[str, tuple[str, str]], str]] = [
    lambda name, argument: written(name, argument, end="}"),
    lambda name, argument: written(name, argument, arguments="args"),
    lambda name, argument: written(name, ("id", argument[1])),
    lambda name, argument: written(name.rpartition("_")[2], argument),
]
"""Ways to write a call that cannot be made: without a brace, with a wrong key of the format or the tool, with half a name."""


# ---- What came out ----


def report(arguments: argparse.Namespace) -> None:
    """Print the tables, and write the figures of each run to a file."""
    console = Console(width=240)
    rows = list[dict[str, Any]]()
    for name in arguments.regimes:
        found = {way: runs for way in ways_of(arguments, name) if (runs := results(arguments, name, way))}
        if found:
            console.print(regime_table(name, found))
        rows += [figures_of(name, way, run) for way, runs in found.items() for run in runs]
    if rows:
        with (arguments.output_dir / "summary.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def regime_table(name: str, found: Mapping[str, list[Result]]) -> Table:
    """What came out of a regime, with each way beside the first."""
    first, *_ = REGIMES[name].ways
    table = Table(title=f"{name}: median (all seeds); beside {first}: mean difference with 95 % interval over seeds")
    for column in (
        "",
        "mean success",
        f"beside {first}",
        f"last {NUM_LAST} updates",
        f"beside {first}",
        "held out before",
        "after",
        f"beside {first}",
        "fall from the best",
        f"beside {first}",
        f"entropy, last {NUM_LAST}",
        "cut",
        f"calls made, first 5; last {NUM_LAST}",
        f"explained variance, last {NUM_LAST}",
        "seconds",
    ):
        table.add_column(column)
    for way, runs in found.items():
        cells = [
            (shown([value(run) for run in runs], "{:.2f}"), paired_gain(found.get(first, []), runs, value))
            for value in (mean_success, mean_success_at_end, held_out_after, fall)
        ]
        if way == first:
            cells = [(figures, "") for figures, _ in cells]
        histories = [run["history"] for run in runs]
        table.add_row(
            way,
            *cells[0],
            *cells[1],
            f"{statistics.median(run['before'] for run in runs):.2f}",
            *cells[2],
            *cells[3],
            shown_figure(histories, "entropy", NUM_LAST),
            f"{statistics.median(map(share_cut, runs)):.2f}",
            "; ".join(
                f"{statistics.median(calls_made(history[part]) for history in histories):.2f}"
                for part in (slice(5), slice(-NUM_LAST, None))
            ),
            shown_figure(histories, "value/explained_variance", NUM_LAST),
            f"{statistics.median(run['seconds'] for run in runs):.0f}",
        )
    return table


def figures_of(regime: str, way: str, result: Result) -> dict[str, Any]:
    """The figures of one run."""
    history = result["history"]
    figures = {
        "mean_success": mean_success(result),
        "last_success": mean_success_at_end(result),
        "held_out_before": result["before"],
        "held_out_after": result["after"],
        "fall": fall(result),
        "entropy": mean_logged(history[-NUM_LAST:], "entropy"),
        "cut": share_cut(result),
        "flat_groups": mean_logged(history, "frac_reward_zero_std"),
        "replayed": mean_logged(history, "solutions/replayed_fraction"),
        "kl": mean_logged(history[-NUM_LAST:], "kl/all"),
        "beta": mean_logged(history[-NUM_LAST:], "kl/beta"),
        "clipped": mean_logged(history, "clip_ratio/region_mean"),
        "seconds": result["seconds"],
    }
    shared = {"regime": regime, "way": way, "seed": result["seed"], "updates": len(history)}
    return shared | {key: round(value, 4) for key, value in figures.items()}


def mean_logged(history: Sequence[Result], key: str) -> float:
    """The mean of a figure over the updates that logged it; 0 if none did."""
    return statistics.fmean([entry[key] for entry in history if key in entry] or [0.0])


def calls_made(history: Sequence[Result]) -> float:
    """Share of calls that could be made; updates in which the policy made none do not count."""
    return mean_logged(history, "tools/valid_rate")


def share_cut(result: Result) -> float:
    """Share of trajectories that ran out of turns or tokens."""
    return sum(mean_logged(result["history"], f"stop/{limit}") for limit in ("max_turns", "max_tokens"))


def fall(result: Result) -> float:
    """How far success, averaged over a few updates, fell from the best that it had been."""
    success = averaged(result["history"])
    return max(best - now for best, now in zip(accumulate(success, max), success, strict=True))


def mean_success_at_end(result: Result) -> float:
    """Mean of success on training tasks over the last updates."""
    return mean_success({"history": result["history"][-NUM_LAST:]})


def held_out_after(result: Result) -> float:
    """Success on held-out tasks at the end."""
    return result["after"]


BASES = {
    BASE: warm_up,
    "chain_base": make_chain_base,
    "form_base": make_form_base,
    "lopsided_base": make_lopsided_base,
}
REGIMES = {
    "chain": Regime(
        base="chain_base",
        tasks=partial(chain_tasks, rewards_turns=True),
        ways=ADVANTAGES,
    ),
    "small": Regime(
        base="chain_base",
        tasks=partial(chain_tasks, rewards_turns=True),
        ways=ADVANTAGES,
        settings={"num_generations": 2},
    ),
    "form": Regime(base="form_base", tasks=short_tasks, ways=FORMS),
    "small_end": Regime(
        base="chain_base",
        tasks=partial(chain_tasks, rewards_turns=False),
        ways={way: ADVANTAGES[way] for way in ("group", "group_turn", "gae", "hybrid")},
        settings={"num_generations": 2},
    ),
    "chain_end": Regime(
        base="chain_base",
        tasks=partial(chain_tasks, rewards_turns=False),
        ways={way: ADVANTAGES[way] for way in ("group", "group_turn", "gae", "hybrid")},
    ),
    "stable": Regime(base=BASE, tasks=short_tasks, ways=single_changes(2e-3), settings=RECIPE),
    "lopsided": Regime(base="lopsided_base", tasks=lopsided_tasks, ways=single_changes(2e-3), settings=RECIPE),
    "steep": Regime(base=BASE, tasks=short_tasks, ways=single_changes(6e-3), settings=RECIPE),
}
WAYS = list(dict.fromkeys(way for regime in REGIMES.values() for way in regime.ways))


if __name__ == "__main__":
    main()
