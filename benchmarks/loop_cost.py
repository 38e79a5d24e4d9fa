"""
Ask what our loop costs by itself: everything of a rollout but sampling.

    python benchmarks/loop_cost.py [--trajectories 64 512] [--tokenizer FOLDER] [--rounds 3] [--json figures.json]

Tasks have 8 attempts each, 20 tools whose schemas have about 9,000 characters, as the desk's do, and four turns: three that
call a tool in process, and an answer. Turns are sampled at once, out of thin air. Results have 600 characters; two attempts
of a group are told the same, as attempts at one task often are. "Anew" renders and encodes every prompt and every result,
and lets Python look through all of its objects for garbage; "kept" is what the library does. Seconds are those that the
process has computed. The tokenizer is that in the folder, with Qwen3's chat template, or one of bytes. It exits with 1 if
"kept" does not take less time. Nothing is downloaded.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fixed_turns import NAME, TEMPLATE_KWARGS, FixedTurns, Script, family_tokenizer, markdown, say, turns_read_by
from mcp.types import Tool
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template

from mcp_grpo.environments import function_server
from mcp_grpo.rollout import Limits, Renderer, RolloutEngine, prompt_encoder, renderer
from mcp_grpo.sampling import Generation, Sampling
from mcp_grpo.types import Task


NUM_ATTEMPTS, NUM_CALLS, NUM_TOKENS, NUM_WORDS = 8, 3, 64, 75
WORDS = ("account", "balance", "company", "date", "division", "filing", "margin", "quarter", "revenue", "share")


def describe(number: int) -> Tool:
    """Describe a tool about as long as those of the desk."""
    fields: dict[str, Any] = {
        word: {"type": "string", "description": f"The {word} to look for, as it is written there."}
        for word in WORDS[:5]
    }
    fields |= {"seconds": {"type": "number"}}
    name = NAME if number == 0 else f"look_up_{WORDS[number % len(WORDS)]}_{number}"
    return Tool(
        name=name, description="Look something up in the books.", input_schema={"type": "object", "properties": fields}
    )


TOOLS = [describe(number) for number in range(20)]


class AtOnce:
    """A generator that takes no time."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        token_ids = tuple(self._random.choices(range(20, 200), k=sampling.max_tokens))
        return Generation(token_ids=token_ids, logprobs=(-1.0,) * len(token_ids), finish_reason="stop")

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]."""
        until.result()


class Books:
    """Servers whose results differ by task, by pair of attempts, and by call."""

    def __init__(self) -> None:
        self._num_made = 0

    def make(self, task: Task | None) -> Any:
        """Make the server of one trajectory."""
        pair, calls = self._num_made % NUM_ATTEMPTS // 2, 0
        self._num_made += 1

        def call(name: str, arguments: Mapping[str, Any]) -> str:
            nonlocal calls
            calls += 1
            seed = f"{task.task_id if task else ''} {pair} {calls}"
            return " ".join(random.Random(seed).choices(WORDS, k=NUM_WORDS))

        return function_server("books", TOOLS, call)


@contextmanager
def anew() -> Iterator[None]:
    """Keep no tokens, and leave Python's search for garbage as it is."""
    sizes = ("NUM_PROMPTS", "NUM_SUFFIXES", "NUM_COUNTS")
    with ExitStack() as stack:
        for module, name in (*((renderer, name) for name in sizes), (prompt_encoder, "NUM_HEADS")):
            stack.enter_context(patch.object(module, name, 0))
        stack.enter_context(patch("gc.freeze"))
        yield


@contextmanager
def kept() -> Iterator[None]:
    """Do as the library does."""
    yield


WAYS = {"anew": anew, "kept": kept}


def measure(engine: RolloutEngine, tokenizer: Any, number: int) -> float:
    """Return the seconds that the process computes for a rollout."""
    tasks = [
        Task(
            task_id=str(index // NUM_ATTEMPTS),
            prompt=({"role": "user", "content": f"Question {index // NUM_ATTEMPTS}?"},),
        )
        for index in range(number)
    ]
    script = Script(latencies=[[0.0] * NUM_CALLS] * number, tokens=NUM_TOKENS)
    limits = Limits(max_turns=NUM_CALLS + 1, max_completion_length=16_384, max_context=32_768)
    with turns_read_by(script):
        rendering = Renderer(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], chat_template_kwargs=TEMPLATE_KWARGS)
        start = time.process_time()
        trajectories = engine.roll_out(
            tasks, renderer=rendering, generator=FixedTurns(AtOnce(), script), limits=limits
        )
        seconds = time.process_time() - start
    if any(len(trajectory.exchanges) != NUM_CALLS or trajectory.error for trajectory in trajectories):
        raise RuntimeError("Trajectories did not do what they were to do.")
    return seconds


def main() -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: What does not hold.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokenizer", help="folder of a tokenizer")
    parser.add_argument("--rounds", type=int, default=3, help="of each, after one to warm up")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    tokenizer: Any = family_tokenizer("qwen3")
    if arguments.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer, local_files_only=True)
        tokenizer.chat_template = qwen3_chat_template
    found: dict[str, dict[int, list[float]]] = {way: {} for way in WAYS}
    engine = RolloutEngine({"books": Books().make})
    try:
        for number in arguments.trajectories:
            for count in range(arguments.rounds + 1):
                for name, way in WAYS.items():
                    with way():
                        seconds = measure(engine, tokenizer, number)
                    if count:
                        found[name].setdefault(number, []).append(seconds)
    finally:
        engine.close()
    rows, problems = [], list[str]()
    for number in arguments.trajectories:
        before, now = (found[name][number] for name in WAYS)
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        turns = number * (NUM_CALLS + 1)
        each = [
            f"{statistics.median(seconds):.2f} ({1000 * statistics.median(seconds) / turns:.2f} ms a turn)"
            for seconds in (before, now)
        ]
        rows.append([str(number), *each, f"{ratio:.2f}"])
        if ratio >= 1:
            problems.append(f"It is not faster to keep tokens for {number} trajectories: {ratio:.2f} of the time.")
    say(markdown(["trajectories", "anew, s", "kept, s", "of the time"], rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return problems


if __name__ == "__main__":
    if failures := main():
        sys.exit("\n".join(failures))
