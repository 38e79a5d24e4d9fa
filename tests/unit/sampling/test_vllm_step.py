"""What a step of vLLM's engine has finished is told to those who wait for it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_grpo.sampling.vllm_generator import VLLMGenerator, _Request, _resolve


pytestmark = pytest.mark.anyio


class Finishing:
    """An engine that finishes all requests in its first step, at whose end something else happens."""

    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))

    def __init__(self, at_end: Callable[[], Any]) -> None:
        self._names: list[str] = []
        self._at_end = at_end

    def add_request(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._names.append(name)

    def abort_request(self, names: list[str]) -> None: ...

    def step(self) -> list[Any]:
        self._at_end()
        names, self._names = self._names, []
        return [SimpleNamespace(finished=True, request_id=name) for name in names]


async def test_turns_that_end_in_one_step_wake_those_who_wait_once_and_one_that_was_given_up_is_no_hindrance() -> None:
    loop: Any = asyncio.get_running_loop()
    woken, over = list[Any](), Future[None]()
    wake = loop.call_soon_threadsafe
    generator = VLLMGenerator(Finishing(lambda: wake(turns[0].cancel)), end_of_turn_ids=[0])
    turns = [asyncio.ensure_future(generator._ask([number], None)) for number in range(4)]
    await asyncio.sleep(0)  # until all have asked
    loop.call_soon_threadsafe = lambda *call, **how: woken.append(call) or wake(*call, **how)
    serving = threading.Thread(target=generator.serve, args=[over])
    serving.start()
    try:
        given_up, *others = await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 20)
    finally:
        del loop.call_soon_threadsafe
        over.set_result(None)
        serving.join(20)
    assert isinstance(given_up, asyncio.CancelledError)
    assert [output.request_id for output in others] == ["mcp-grpo-1", "mcp-grpo-2", "mcp-grpo-3"]
    assert len(woken) == 1


async def test_an_event_loop_that_is_closed_is_no_hindrance_to_others() -> None:
    gone = asyncio.new_event_loop()
    requests = [_Request([1], None, "", loop.create_future()) for loop in (gone, asyncio.get_running_loop())]
    gone.close()
    _resolve([(request, "told") for request in requests])
    assert await asyncio.wait_for(requests[1].result, 20) == "told"
