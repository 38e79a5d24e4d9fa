"""Turns are held back while weights are sent: each is sampled by one version of the policy."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from mcp_grpo.sampling import Generation, Sampling
from mcp_grpo.sampling.gate import GatedGenerator


SAMPLING = Sampling(max_tokens=1)


class Slow:
    """Samples a turn for as long as the test wants."""

    def __init__(self) -> None:
        self.under_way: list[int] = []
        self.may_end = threading.Event()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.under_way.append(prompt_ids[0])
        while not self.may_end.is_set():
            await anyio.sleep(0.005)
        return Generation(token_ids=(prompt_ids[0],), logprobs=(0.0,), finish_reason="stop")

    def serve(self, until: Future[Any]) -> None:
        until.result(timeout=60)


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


def wait_for(holds: Callable[[], bool]) -> None:
    with anyio.from_thread.start_blocking_portal() as portal:
        portal.call(_until, holds)


async def _until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not holds():
            await anyio.sleep(0.005)


def test_turns_that_are_being_sampled_end_and_others_begin_later(portal: BlockingPortal) -> None:
    slow = Slow()
    gate = GatedGenerator(slow)
    first = portal.start_task_soon(gate.generate, [1], SAMPLING)
    wait_for(lambda: slow.under_way == [1])
    entered, leave = threading.Event(), threading.Event()

    def send() -> None:
        with gate.between_turns():
            entered.set()
            leave.wait(20)

    sending = threading.Thread(target=send)
    sending.start()
    wait_for(lambda: gate._opening is not None)
    second = portal.start_task_soon(gate.generate, [2], SAMPLING)
    assert not entered.wait(0.1)  # the first turn is still being sampled
    slow.may_end.set()
    assert first.result(20).token_ids == (1,)
    assert entered.wait(20)
    assert slow.under_way == [1]
    leave.set()
    assert second.result(20).token_ids == (2,)
    sending.join()


def test_a_turn_that_is_given_up_before_it_began_holds_nobody_up(portal: BlockingPortal) -> None:
    slow = Slow()
    slow.may_end.set()
    gate = GatedGenerator(slow)
    with ExitStack() as stack:
        stack.enter_context(gate.between_turns())
        gone, staying = (portal.start_task_soon(gate.generate, [n], SAMPLING) for n in (1, 2))
        portal.call(anyio.sleep, 0.02)
        gone.cancel()
        portal.call(anyio.sleep, 0.02)
        assert not staying.done()
    assert staying.result(20).token_ids == (2,)
    with pytest.raises(CancelledError):
        gone.result()
    with gate.between_turns():
        assert slow.under_way == [2]


def test_what_goes_wrong_while_weights_are_sent_lets_turns_begin_again(portal: BlockingPortal) -> None:
    slow = Slow()
    slow.may_end.set()
    gate = GatedGenerator(slow)
    with pytest.raises(KeyboardInterrupt), gate.between_turns():
        raise KeyboardInterrupt
    assert portal.start_task_soon(gate.generate, [3], SAMPLING).result(20).token_ids == (3,)
