"""Turns are held back while weights are sent: each is sampled by one version of the policy."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling import Generation, Sampling
from mcp_grpo.sampling.gate import GatedGenerator


SAMPLING = Sampling(max_tokens=1)


class Slow:
    """Samples a turn for as long as the test wants."""

    def __init__(self) -> None:
        self.under_way: list[int] = []
        self.may_end = threading.Event()
        self.breaks = threading.Event()
        self.is_served = threading.Event()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.under_way.append(prompt_ids[0])
        while not self.may_end.is_set():
            await anyio.sleep(0.005)
        return Generation(token_ids=(prompt_ids[0],), logprobs=(0.0,), finish_reason="stop")

    def serve(self, until: Future[Any]) -> None:
        self.is_served.set()
        while not until.done():
            if self.breaks.wait(0.005):
                raise RuntimeError("device lost")


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
    gate = GatedGenerator(slow, turn_timeout=60)
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
    gate = GatedGenerator(slow, turn_timeout=60)
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
    gate = GatedGenerator(slow, turn_timeout=60)
    with pytest.raises(KeyboardInterrupt), gate.between_turns():
        raise KeyboardInterrupt
    assert portal.start_task_soon(gate.generate, [3], SAMPLING).result(20).token_ids == (3,)


def test_a_turn_that_hangs_is_waited_for_no_longer_than_turns_may_take(
    portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_grpo.sampling.gate.END_TIME", 0.1)
    slow = Slow()
    gate = GatedGenerator(slow, turn_timeout=0.2)
    hanging = portal.start_task_soon(gate.generate, [1], SAMPLING)
    wait_for(lambda: slow.under_way == [1])
    start = time.monotonic()
    said = r"waited 0 seconds for turns .*\(1 by now\).*`trajectory_timeout`.*resume from the last checkpoint"
    with pytest.raises(SamplerError, match=said), gate.between_turns():
        raise AssertionError("weights were sent in the midst of a turn")
    assert 0.3 <= time.monotonic() - start < 20
    other = portal.start_task_soon(gate.generate, [2], SAMPLING)  # what was held back begins
    slow.may_end.set()
    assert [each.result(20).token_ids for each in (hanging, other)] == [(1,), (2,)]
    with gate.between_turns():
        assert gate._num_turns == 0


@pytest.mark.parametrize("breaks_first", [True, False])
def test_a_thread_that_fails_while_it_serves_is_noticed_at_once(portal: BlockingPortal, breaks_first: bool) -> None:
    slow = Slow()
    gate = GatedGenerator(slow, turn_timeout=600)
    turn = portal.start_task_soon(gate.generate, [1], SAMPLING)
    wait_for(lambda: slow.under_way == [1])
    ended: Future[None] = Future()
    errors: list[Exception] = []

    def serve() -> None:
        try:
            gate.serve(ended)
        except RuntimeError as error:
            errors.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    if breaks_first:
        slow.breaks.set()
        serving.join(20)
    else:
        threading.Timer(0.1, slow.breaks.set).start()
    start = time.monotonic()
    with pytest.raises(SamplerError, match=r"failed: RuntimeError\('device lost'\)") as raised, gate.between_turns():
        raise AssertionError("weights were sent to what has failed")
    assert time.monotonic() - start < 20
    serving.join(20)
    assert [raised.value.__cause__] == errors
    turn.cancel()
    wait_for(lambda: gate._num_turns == 0)
    with gate.between_turns():  # nothing is left of it
        pass


def test_a_thread_that_fails_is_of_no_account_while_another_serves_the_turns(portal: BlockingPortal) -> None:
    slow = Slow()
    gate = GatedGenerator(slow, turn_timeout=60)
    turn = portal.start_task_soon(gate.generate, [1], SAMPLING)
    wait_for(lambda: slow.under_way == [1])
    serving = threading.Thread(target=gate.serve, args=[turn])
    serving.start()
    assert slow.is_served.wait(20)
    broken = Slow()
    broken.breaks.set()
    gate._generator = broken
    with pytest.raises(RuntimeError, match="device lost"):
        gate.serve(turn)
    threading.Timer(0.1, slow.may_end.set).start()
    with gate.between_turns():
        assert gate._num_turns == 0
    serving.join(20)
