"""A trajectory whose ids, masks and log-probabilities differ in length cannot be built."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_grpo.types import ResultKind, Segment, StopReason, Task, ToolResult, Trajectory


TASK = Task(task_id="t", prompt=({"role": "user", "content": "hi"},))

token_ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=12).map(tuple)
written = token_ids.map(lambda ids: Segment(token_ids=ids))
sampled = token_ids.flatmap(
    lambda ids: st.lists(st.floats(-30, 0), min_size=len(ids), max_size=len(ids)).map(
        lambda logprobs: Segment(token_ids=ids, logprobs=tuple(logprobs))
    )
)
segments = st.lists(st.one_of(written, sampled), max_size=10).map(tuple)


def trajectory(parts: tuple[Segment, ...], stop_reason: StopReason = StopReason.ANSWERED) -> Trajectory:
    messages = ({"role": "assistant", "content": "done"},)
    return Trajectory(
        task=TASK, prompt_ids=(1,), segments=parts, messages=messages, exchanges=(), stop_reason=stop_reason
    )


@given(segments)
def test_everything_per_token_has_one_length(parts: tuple[Segment, ...]) -> None:
    made = trajectory(parts)
    length = sum(len(part.token_ids) for part in parts)
    assert len(made.completion_ids) == length
    assert len(made.sampled_mask) == length
    assert len(made.logprobs) == length
    assert len(made.turn_ids) == length


@given(segments)
def test_masks_turns_and_log_probabilities_agree_on_who_wrote_a_token(parts: tuple[Segment, ...]) -> None:
    made = trajectory(parts)
    for mask, logprob, turn in zip(made.sampled_mask, made.logprobs, made.turn_ids, strict=True):
        assert mask or logprob == 0.0
        assert bool(mask) == (turn >= 0)
    assert max(made.turn_ids, default=-1) + 1 == made.num_turns


@given(segments)
def test_segments_can_be_read_back_from_the_whole(parts: tuple[Segment, ...]) -> None:
    made, start = trajectory(parts), 0
    for part in parts:
        end = start + len(part.token_ids)
        assert made.completion_ids[start:end] == part.token_ids
        assert made.logprobs[start:end] == (part.logprobs or (0.0,) * len(part.token_ids))
        start = end


@given(token_ids, st.lists(st.floats(-30, 0), max_size=20).map(tuple))
def test_a_segment_with_another_number_of_log_probabilities_is_refused(
    ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> None:
    if len(ids) == len(logprobs):
        assert Segment(token_ids=ids, logprobs=logprobs).sampled
    else:
        with pytest.raises(ValueError, match="one log-probability per token"):
            Segment(token_ids=ids, logprobs=logprobs)


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Segment(token_ids=())


def test_a_trajectory_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt tokens"):
        Trajectory(
            task=TASK, prompt_ids=(), segments=(), messages=(), exchanges=(), stop_reason=StopReason.SERVER_FAILED
        )


def test_values_cannot_be_edited() -> None:
    made = trajectory((Segment(token_ids=(1, 2), logprobs=(-1.0, -2.0)),))
    for value, name in [(made, "segments"), (made.segments[0], "token_ids"), (TASK, "prompt")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, ())


def test_a_trajectory_can_be_sent_to_another_process() -> None:
    made = trajectory((Segment(token_ids=(1, 2), logprobs=(-1.0, -2.0)),))
    assert pickle.loads(pickle.dumps(made)) == made


def test_only_faults_that_are_ours_fail_a_trajectory() -> None:
    written = (Segment(token_ids=(1,), logprobs=(-1.0,)),)
    failed = {reason for reason in StopReason if trajectory(written, reason).is_failed}
    assert failed == {StopReason.DEADLINE, StopReason.SERVER_FAILED}
    assert trajectory((), StopReason.CONTEXT_FULL).is_failed  # the prompt alone was too long


def test_what_the_policy_asked_for_and_did_not_fit_is_a_cut() -> None:
    """Left out, it would be worth more than failing, and never unlearnt."""
    written = (Segment(token_ids=(1,), logprobs=(-1.0,)),)
    cut = {reason for reason in StopReason if trajectory(written, reason).is_cut}
    assert cut == {StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL}
    assert not trajectory((), StopReason.CONTEXT_FULL).is_cut


def test_what_failed_is_not_learnt_from() -> None:
    learnt = {reason for reason in StopReason if trajectory((), reason).is_learnt_from}
    assert learnt == {StopReason.ANSWERED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS}


def test_every_result_kind_blames_one_side_at_most() -> None:
    assert not any(kind.is_policy_fault and kind.is_server_fault for kind in ResultKind)
    assert not ToolResult(text="fine").is_error
    assert ToolResult(text="no", kind=ResultKind.TOOL_ERROR).is_error


def test_there_is_an_answer_only_if_the_policy_gave_one() -> None:
    assert trajectory(()).answer == "done"
    assert trajectory((), StopReason.MAX_TURNS).answer is None
