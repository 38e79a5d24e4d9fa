"""No text that a policy writes raises anywhere: not in the rollout, not in rewards, tables, logs, views or the terminal."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.hostile import call, texts, values
from helpers.policies import ScriptedGenerator
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from mcp.server.mcpserver import MCPServer
from trl.trainer.utils import print_prompt_completions_sample

from mcp_grpo.desk.reward import COMPANY_WORDS, desk_reward
from mcp_grpo.masking.roles import SyntaxRoles
from mcp_grpo.metrics import tool_metrics, trajectory_metrics
from mcp_grpo.monitor import (
    ScoredBatch,
    TrajectoryLog,
    any_text_in_terminal,
    explain,
    table_messages,
    trajectory_columns,
)
from mcp_grpo.monitor.recorder import batch_table
from mcp_grpo.rewards import (
    Rubric,
    answer_match,
    call_penalty,
    efficiency,
    exact_answer,
    fault_penalty,
    format_reward,
    matches_answer,
    matches_state,
    state_match,
    task_outcome,
)
from mcp_grpo.rewards.answers import gives_only, mentions_answer
from mcp_grpo.rewards.judge import _read_ranking, _transcript
from mcp_grpo.rollout import Limits, Renderer, roll_out
from mcp_grpo.tools import ToolPool
from mcp_grpo.types import Task, Trajectory


pytestmark = pytest.mark.fuzz

TOKENIZER = family_tokenizer("qwen3")
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3", TOKENIZER))
PROMPT = ({"role": "user", "content": "What was the revenue of the Acme Corp.?"},)
ANSWERS: list[Any] = [
    12.5,
    {"type": "number", "value": 12.5, "unit": "million USD", "tolerance": 0.005},
    "2024-03-05",
    {"type": "name", "value": "Nestlé", "aliases": ["NESN"]},
    ["VLTA", 5],
    {"type": "set", "values": ["VLTA", "NWL", "2024-03-05"]},
    True,
    {"type": "refusal"},
]
REWARDS = [
    answer_match,
    exact_answer,
    fault_penalty,
    format_reward(max_length=50),
    call_penalty(),
    efficiency(exact_answer, budget=1),
    Rubric({"answer": answer_match, "form": format_reward()}, gates={"form": "answer"}),
    task_outcome,
    state_match,
    desk_reward(),
]
QUIET = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def pool(portal: BlockingPortal) -> Iterator[ToolPool]:
    server = MCPServer("desk", log_level="ERROR")

    @server.tool()
    async def echo(text: str, number: float = 0.0) -> str:
        """Say it again."""
        return f"{text}{number}"

    @server.tool()
    async def look(filters: dict[str, Any]) -> dict[str, Any]:
        """Look for it."""
        return filters

    with portal.wrap_async_context_manager(ToolPool({"desk": server})) as pool:
        yield pool


calls = st.tuples(
    st.sampled_from(["echo", "look"]) | texts,
    st.dictionaries(st.sampled_from(["text", "number", "filters"]) | texts, values, max_size=3) | values,
)
good_calls = st.text(max_size=8).map(lambda text: ("echo", {"text": text})) | st.dictionaries(
    st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=3), max_size=3
).map(lambda filters: ("look", {"filters": filters}))
turns = st.lists((calls | good_calls).map(lambda made: call(*made)) | texts, min_size=1, max_size=3).map("".join)


@QUIET
@given(first=turns, second=turns, final=texts, answer=st.sampled_from(ANSWERS), state=values)
@example(first=call("echo", {"text": "\ud83d"}), second=call("look", {}), final="1" * 310, answer=12.5, state=10**310)
@example(
    first=call("echo", {"text": 1}),
    second=call("echo", {"text": "x"}),
    final="5 uſd",
    answer=12.5,
    state="ſep 5, 2024",
)
@example(first=call("look", {}), second=call("echo", [1]), final="[" * 400 + "]" * 400, answer=["A"], state={})
def test_a_trajectory_of_anything_is_rolled_out_rewarded_shown_and_logged(
    portal: BlockingPortal,
    pool: ToolPool,
    tmp_path: Path,
    first: str,
    second: str,
    final: str,
    answer: Any,
    state: Any,
) -> None:
    metadata = {"symbols": ["ACME"], "expected_state": {"desk": {"type": "number", "value": 5}}}
    task = Task(task_id="sum", prompt=PROMPT, answer=answer, metadata=metadata)
    # Text that cannot be encoded cannot be sampled; escapes can.
    said = [f"{turn.encode(errors='replace').decode()}<|im_end|>" for turn in (first, second, final, "", "")]
    limits = Limits(max_turns=4, max_completion_length=60_000)
    generator = ScriptedGenerator(TOKENIZER, said)
    trajectory = portal.call(lambda: roll_out(task, pool=pool, renderer=RENDERER, generator=generator, limits=limits))
    event(f"ended: {trajectory.stop_reason}")
    for exchange in trajectory.exchanges:
        event(f"call: {exchange.result.kind}")
    trajectory.__dict__["states"] = {"desk": state}
    rewarded(trajectory)
    shown(trajectory, tmp_path)


def rewarded(trajectory: Trajectory) -> None:
    for reward in REWARDS:
        (given_reward,) = reward(trajectory=[trajectory])
        assert np.isfinite(np.sum(given_reward))
    transcript = _transcript(trajectory, 1000)
    assert len(transcript) < 10_000
    json.dumps(transcript).encode()


def shown(trajectory: Trajectory, folder: Path) -> None:
    """Do with a trajectory what a run does that logs everything."""
    columns = trajectory_columns([trajectory])
    messages = table_messages(list(trajectory.messages))
    assert table_messages(messages) == messages
    frame = {
        "completion": [messages, [{"role": "assistant", "content": ""}]],
        **{k: v * 2 for k, v in columns.items()},
    }
    pd.DataFrame(frame).to_parquet(folder / "completions.parquet")
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    kept, sys.stdout = sys.stdout, printed
    try:
        with any_text_in_terminal():
            print_prompt_completions_sample([list(PROMPT)], [messages], {"r": [0.0]}, [0.0], 1, extra=columns)
            printed.flush()
    finally:
        sys.stdout = kept
    view = explain(trajectory, reward=0.0)
    str(view).encode()
    view.save(folder / "view.html")
    trajectory_metrics([trajectory])
    tool_metrics([trajectory])
    width = len(trajectory.completion_ids)
    ones = torch.ones(1, width, dtype=torch.long)
    columns = {"completion_mask": ones, "tool_mask": ones, "advantages": torch.zeros(1, width)}
    batch = ScoredBatch(step=1, trajectories=[trajectory], rewards=[{"r": 0.0}], columns=columns)
    TrajectoryLog(folder)(batch)
    pq.write_table(batch_table(batch, []), folder / "recorded.parquet")


@QUIET
@given(text=texts, answer=st.sampled_from(ANSWERS), value=values)
@example(text="5 uſd", answer=12.5, value=10**5000)
def test_any_text_is_an_answer_or_none(text: str, answer: Any, value: Any) -> None:
    for words in ({}, {"words": COMPANY_WORDS}):
        found = matches_answer(text, answer, **words)
        event(f"matches: {found}")
    mentions_answer(text, answer, COMPANY_WORDS)
    gives_only(text, [answer], COMPANY_WORDS)
    expectations: list[Any] = [5, 2.5, True, None, "x", [1], {"a": 1}, {"any_order": [1, "x"]}, {"one_of": [1]}]
    expectations += [
        {"contains": ["x", {"type": "number", "value": 5}]},
        {"only": [5]},
        {"type": "number", "value": 5},
    ]
    for expected in expectations:
        assert isinstance(matches_state(value, expected), bool)
        assert isinstance(matches_state(text, expected), bool)


@QUIET
@given(text=texts)
@example(text='{"ranking": ' * 2000)
@example(text="[" * 100_000)
def test_any_reply_of_a_judge_is_a_ranking_or_none(text: str) -> None:
    assert _read_ranking(text, ["1", "2"]) is None
    assert _read_ranking(f'{text}\n{{"ranking": [["2"], ["1"]]}}', ["1", "2"]) in (None, [["2"], ["1"]])


@QUIET
@given(text=turns)
def test_roles_are_found_in_any_turn(pool: ToolPool, text: str) -> None:
    ids = TOKENIZER(f"{text.encode(errors='replace').decode()}<|im_end|>", add_special_tokens=False)["input_ids"]
    schemas = [tool.schema for tool in pool.catalog.tools]
    roles = SyntaxRoles(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3", TOKENIZER)).roles(ids, schemas)
    assert len(roles) == len(ids)
