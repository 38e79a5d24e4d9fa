"""Figures about a batch of trajectories."""

from dataclasses import replace

import pytest

from mcp_grpo.metrics import trajectory_metrics
from mcp_grpo.types import Exchange, ResultKind, StopReason, Task, ToolCall, ToolResult, Trajectory


def trajectory(*results: ToolResult) -> Trajectory:
    call = ToolCall(name="add", arguments={})
    return Trajectory(
        task=Task(task_id="t", prompt=()),
        prompt_ids=(1,),
        segments=(),
        messages=(),
        exchanges=tuple(Exchange(call=call, result=result, turn=0) for result in results),
        stop_reason=StopReason.MAX_TURNS,
    )


def metrics(*trajectories: Trajectory) -> dict[str, float]:
    return {key: ratio.total / ratio.count for key, ratio in trajectory_metrics(trajectories).items() if ratio.count}


@pytest.mark.parametrize(
    ("key", "result"),
    [
        ("tools/repaired_rate", ToolResult(text="", repairs=("`a` was taken for `b`",))),
        ("tools/cut_rate", ToolResult(text="", num_cut=5)),
        ("tools/retried_rate", ToolResult(text="", num_attempts=2)),
        ("tools/kind/tool_error", ToolResult(text="", kind=ResultKind.TOOL_ERROR)),
        ("tools/failure_frequency", ToolResult(text="", kind=ResultKind.TIMEOUT)),
    ],
)
def test_a_share_of_calls_is_of_all_calls_not_a_mean_of_means(key: str, result: ToolResult) -> None:
    plain = ToolResult(text="5")
    assert metrics(trajectory(plain, plain, plain), trajectory(result))[key] == 1 / 4


def test_kinds_of_results_are_shares_of_a_whole() -> None:
    figures = metrics(trajectory(*(ToolResult(text="", kind=kind) for kind in ResultKind), ToolResult(text="")))
    assert figures["tools/kind/ok"] == 2 / 8
    assert sum(value for key, value in figures.items() if key.startswith("tools/kind/")) == 1


def test_what_was_kept_of_prompts_is_a_share_of_their_tokens_where_the_sampler_knows_it() -> None:
    known = replace(trajectory(), turn_reads=((100, 0), (300, 96)))
    assert metrics(known, trajectory())["rollout/cached_fraction"] == 96 / 400
    assert "rollout/cached_fraction" not in metrics(trajectory())


def test_the_keys_do_not_depend_on_what_happened() -> None:
    assert trajectory_metrics([]).keys() == trajectory_metrics([trajectory(ToolResult(text="5"))]).keys()
