"""Trajectories as tensors: each figure at its token, and nothing elsewhere."""

import torch

from mcp_grpo.learning.columns import padded, token_columns
from mcp_grpo.types import Segment, StopReason, Task, TokenRole, Trajectory


LIKE = torch.zeros(3, 5, dtype=torch.long)


def test_figures_stand_at_their_tokens_and_the_filler_elsewhere() -> None:
    for rows in ([(1, 0, 2), (), (1,)], [bytes((1, 0, 2)), b"", bytes((1,))]):
        expected = [[1, 0, 2, -1, -1], [-1] * 5, [1, -1, -1, -1, -1]]
        whole, real = padded(rows, LIKE, -1), padded(rows, LIKE, -1.0)
        assert (whole.dtype, real.dtype) == (torch.long, torch.float32)
        assert whole.tolist() == real.tolist() == expected
    assert padded([(0.25, 0.5), (), ()], LIKE, 0.0)[0].tolist() == [0.25, 0.5, 0, 0, 0]


def test_columns_say_what_each_token_is_and_nothing_of_rows_that_are_left_out() -> None:
    def made(**changes: object) -> Trajectory:
        settings = {
            "task": Task(task_id="a", prompt=()),
            "prompt_ids": (1,),
            "segments": (
                Segment(token_ids=(5, 6), logprobs=(-1.0, -1.0)),
                Segment(token_ids=(7,)),
                Segment(token_ids=(8,), logprobs=(-1.0,)),
            ),
            "messages": (),
            "exchanges": (),
            "stop_reason": StopReason.ANSWERED,
            "roles": (TokenRole.TRIGGER, TokenRole.FORCED, TokenRole.ENVIRONMENT, TokenRole.CHOICE),
            "masked": (False, True, False, False),
        }
        return Trajectory(**{**settings, **changes})

    columns = token_columns([made(), made(left_out=True), made(roles=None, masked=None)], LIKE)
    assert columns["turn_ids"].tolist() == [[0, 0, -1, 1, -1], [-1] * 5, [0, 0, -1, 1, -1]]
    assert columns["masked"].tolist() == columns["forced"].tolist() == [[0, 1, 0, 0, 0], [0] * 5, [0] * 5]
    assert columns["masked"].dtype == columns["forced"].dtype == torch.float32
    assert columns["turn_ids"].dtype == torch.long
