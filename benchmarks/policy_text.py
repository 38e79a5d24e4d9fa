"""
Ask whether everything that reads a policy's text reads it once: degenerate texts, twice as long each time.

    python benchmarks/policy_text.py [--length 100000] [--model mcp_grpo/quickstart/warm_start]

The table has the seconds for the text and the ratio of the time for twice as much of it, the worst text for each reader first. What is
linear has a ratio of about 2, what is quadratic one of 4; it fails above 3, where it takes long enough to be told from noise. It takes
about two minutes.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from mcp_grpo.desk.reward import COMPANY_WORDS
from mcp_grpo.monitor import table_messages, trajectory_columns
from mcp_grpo.rewards import format_reward, matches_answer, matches_state
from mcp_grpo.rewards.answers import gives_only, mentions_answer
from mcp_grpo.rewards.judge import _read_ranking, _transcript
from mcp_grpo.rewards.task import _words
from mcp_grpo.rollout.well_formed import well_formed
from mcp_grpo.types import Exchange, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


Reader = Callable[[str], Any]

TEXTS: Mapping[str, str] = {
    "newlines": "\n",
    "spaces": " ",
    "one letter": "a",
    "capitals": "A",
    "names": "Aa Bb & ",
    "one bracket": "[",
    "round brackets": "(",
    "digits": "1",
    "figures": "1,",
    "dates": "2024-03-",
    "stars": "*",
    "underlines": "_",
    "backticks": "`",
    "answer lines": "Answer: x\n",
    "answers without an end": "answer ",
    "answer and spaces": "answer" + " " * 50,
    "nested JSON": '{"a":',
    "nested rankings": '{"ranking": ',
    "escapes": "\\u00e4",
    "quotation marks": '"',
    "escaped quotation marks": '\\"',
    "boxes": "\\boxed{",
    "no data": "no data ",
    "accents": "e\u0301",
    "marks inside": "a*_`",
}
"""What a text consists of, again and again."""

ANSWERS = (12.5, "2024-03-05", "Nestlé", ["VLTA", "NWL"], True, {"type": "refusal"})


def trajectory_of(text: str) -> Trajectory:
    """Make a trajectory that calls with a text, and ends with it."""
    call = ToolCall(name="look", arguments={"text": text})
    return Trajectory(
        task=Task(task_id="t", prompt=({"role": "user", "content": "How much?"},)),
        prompt_ids=(0,),
        segments=(Segment(token_ids=(1,), logprobs=(0.0,)),),
        messages=({"role": "assistant", "content": text},),
        exchanges=(Exchange(call=call, result=ToolResult(text=text), turn=0),),
        stop_reason=StopReason.ANSWERED,
    )


def readers() -> dict[str, Reader]:
    """Return what reads a policy's text, by name."""
    form = format_reward()

    def answers(text: str) -> None:
        for answer in ANSWERS:
            for said in (text, f"Answer: {text}", f"{text}\nAnswer: 5", f"a{text}a"):
                matches_answer(said, answer, words=COMPANY_WORDS)

    def posts(text: str) -> None:
        for answer in ANSWERS:
            mentions_answer(text, answer, COMPANY_WORDS)
            gives_only(text, [answer], COMPANY_WORDS)
            matches_state(text, {"contains": ["x", answer if isinstance(answer, dict) else "y"]})

    def tables(text: str) -> None:
        trajectory_columns([trajectory_of(text)])
        call = {"type": "function", "function": {"name": "look", "arguments": text}}
        table_messages([{"role": "assistant", "content": text, "tool_calls": [call]}])

    return {
        "answers": answers,
        "posts and states": posts,
        "format_reward": lambda text: form(trajectory=[trajectory_of(text)]),
        "looks": lambda text: _words({"text": text}),
        "a judge's transcript": lambda text: _transcript(trajectory_of(text), 6000),
        "a judge's reply": lambda text: _read_ranking(text, ["1", "2"]),
        "tables": tables,
        "well_formed": lambda text: well_formed({"text": text + "ä"}),
    }


def turn_readers(model: str) -> dict[str, Reader]:
    """Return what reads the tokens of a turn, by name; tokens are made before."""
    from transformers import AutoTokenizer

    from mcp_grpo.masking.roles import SyntaxRoles
    from mcp_grpo.rollout import Renderer, set_call_format

    tokenizer = AutoTokenizer.from_pretrained(model)
    set_call_format(tokenizer, "auto")
    ends = [tokenizer.eos_token_id]
    renderer = Renderer(tokenizer, end_of_turn_ids=ends)
    roles = SyntaxRoles(tokenizer, end_of_turn_ids=ends, chat_template=renderer.chat_template)
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": schema}}]
    prompt = renderer.prompt_ids([{"role": "user", "content": "How much?"}], tools)

    def ids(text: str) -> list[int]:
        pieces = [
            text[start : start + 1000] for start in range(0, len(text), 1000)
        ]  # long words take a tokenizer long
        return [one for piece in tokenizer(pieces, add_special_tokens=False)["input_ids"] for one in piece] + ends

    def parsed(text: str) -> None:
        for said in (
            text,
            f"<tool_call>\n{text}",
            f'<tool_call>\n{{"name": "look", "arguments": {{"text": {json.dumps(text)}',
        ):
            renderer.parse(prompt, ids(said), tools)

    return {"turns": parsed, "roles": lambda text: roles.roles(ids(f"<tool_call>\n{text}"), tools)}


def seconds(reader: Reader, text: str) -> float:
    """Return the least time of the process over a few tries."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        reader(text)
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return best


def main() -> None:
    """Measure and print, and fail where something is not linear."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=100_000, help="repetitions of each text")
    parser.add_argument("--model", default="mcp_grpo/quickstart/warm_start", help="whose tokenizer reads turns")
    parser.add_argument(
        "--limit", type=float, default=3.0, help="largest ratio, where the longer text takes 0.2 s or more"
    )
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.length:,} repetitions, and twice as many")
    for column in ("reader", "worst text", "seconds", "ratio", "largest ratio above 0.2 s"):
        table.add_column(column)
    failed: list[str] = []
    for name, reader in (readers() | turn_readers(arguments.model)).items():
        # Turns are as long as a model's context, not longer.
        length = arguments.length if name not in ("turns", "roles") else min(arguments.length, 10_000)
        found = {}
        for kind, unit in TEXTS.items():
            once, twice = (seconds(reader, unit * number) for number in (length, 2 * length))
            found[kind] = once, twice / max(once, 1e-4)
        worst = max(found, key=lambda kind: found[kind][0])
        above = {kind: ratio for kind, (once, ratio) in found.items() if once * ratio >= 0.2}
        table.add_row(
            name, worst, f"{found[worst][0]:.4f}", f"{found[worst][1]:.1f}", f"{max(above.values(), default=0):.1f}"
        )
        failed += [f"{name}, {kind}: {ratio:.1f}" for kind, ratio in above.items() if ratio > arguments.limit]
    Console().print(table)
    if failed:
        raise SystemExit(f"Not linear: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
