"""
Ask how many tokens the desk's tasks take when they are done as their scripted solutions do, and what limits would not allow.

    python benchmarks/desk_lengths.py --tokenizer FOLDER [--train 1000] [--validation 75]

The solutions are replayed on the real servers without limits. The tokenizer is that in the folder, with Qwen3's chat template; without
`--tokenizer`, that of Qwen3 if it is on this machine. Nothing is sampled or trained.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import product

from fixed_turns import markdown, say
from recipe_step import find_tokenizer

from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import build_tasks
from mcp_grpo.rollout import Limits, Renderer, RolloutEngine, derived_seed
from mcp_grpo.rollout.replay import ScriptedGenerator, scripted_turns
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.types import Task, Trajectory


SPLITS = ("train", "validation")
UNLIMITED = 1_000_000
RESULTS, COMPLETIONS = (1024, 2048, 3072, 4096), (2048, 3072, 4096, 6144)
FEATURES = ("prompt", "after it", "longest result", "longest turn", "turns")


def replay(tasks: Sequence[Task], renderer: Renderer) -> list[Trajectory]:
    """Attempt each task as its solution does."""
    turns = {derived_seed(0, index): scripted_turns(task, renderer) for index, task in enumerate(tasks)}
    engine = RolloutEngine(desk_servers())
    try:
        return engine.roll_out(
            tasks,
            renderer=renderer,
            generator=ScriptedGenerator(turns),
            limits=Limits(max_turns=100, max_completion_length=UNLIMITED),
        )
    finally:
        engine.close()


def lengths(trajectory: Trajectory, renderer: Renderer) -> tuple[int, ...]:
    """Return the features of a trajectory."""
    results = (len(renderer.tokenizer.encode(each.result.text)) for each in trajectory.exchanges)
    turns = (len(each.token_ids) for each in trajectory.segments if each.logprobs is not None)
    return (
        len(trajectory.prompt_ids),
        len(trajectory.completion_ids),
        max(results, default=0),
        max(turns, default=0),
        trajectory.num_turns,
    )


def main() -> None:
    """Replay, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder of a tokenizer")
    parser.add_argument("--train", type=int, default=1000, help="tasks of the train split")
    parser.add_argument("--validation", type=int, default=75, help="tasks of the validation split")
    options = parser.parse_args()
    tokenizer, source = find_tokenizer(options.tokenizer, "Qwen/Qwen3-0.6B")
    renderer = Renderer(
        tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], chat_template_kwargs={"enable_thinking": False}
    )
    tasks = [task for split in SPLITS for task in tasks_from_rows(build_tasks(split, getattr(options, split)))]
    found = [(each.task.kind, lengths(each, renderer)) for each in replay(tasks, renderer)]
    prompt, after = (statistics.fmean(one[place] for _, one in found) for place in (0, 1))
    say(
        f"{len(found)} tasks, tokenizer {source}, on average {prompt:,.0f} tokens and {after:,.0f} after them. The most of each family:",
        "",
    )
    rows = [
        [str(kind), *(f"{max(each):,}" for each in zip(*(one for other, one in found if other == kind), strict=True))]
        for kind in dict.fromkeys(kind for kind, _ in found)
    ]
    say(markdown(["family", *FEATURES], rows), "")
    fit = {
        limits: sum(one[2] <= limits[0] and one[1] <= limits[1] for _, one in found)
        for limits in product(RESULTS, COMPLETIONS)
    }
    header = ["solutions that fit, of a result of", *(f"{each:,} after the prompt" for each in COMPLETIONS)]
    say(
        markdown(
            header,
            [[f"{most:,}", *(f"{fit[most, each] / len(found):.1%}" for each in COMPLETIONS)] for most in RESULTS],
        )
    )


if __name__ == "__main__":
    main()
