"""An engine of vLLM that hangs: whoever wants it is told so."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling.vllm_generator import VLLMGenerator


class Hanging:
    """An engine whose step ends when the test wants."""

    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))

    def __init__(self) -> None:
        self.is_in_step = threading.Event()
        self.may_end = threading.Event()

    def add_request(self, *args: Any, **kwargs: Any) -> None: ...

    def abort_request(self, names: list[str]) -> None: ...

    def step(self) -> list[Any]:
        self.is_in_step.set()
        self.may_end.wait(60)
        return []


@pytest.fixture
def engine() -> Iterator[Hanging]:
    engine = Hanging()
    yield engine
    engine.may_end.set()


def test_a_step_that_does_not_end_is_not_waited_for_for_ever(engine: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_grpo.sampling.vllm_generator._STEP_SECONDS", 0.2)
    generator = VLLMGenerator(engine, end_of_turn_ids=[0])
    done: Future[None] = Future()
    serving = threading.Thread(target=generator.serve, args=[done])
    serving.start()
    with start_blocking_portal() as portal:
        turn = portal.start_task_soon(generator._ask, [1, 2], None)
        assert engine.is_in_step.wait(20)
        turn.cancel()
        with pytest.raises(SamplerError, match="not ended for 0 seconds"), generator.alone():
            raise AssertionError("weights were sent to an engine that is in use")
        engine.may_end.set()
        with generator.alone():  # once the step has ended, it can be had
            assert not generator._under_way
    done.set_result(None)
    serving.join(20)
    assert not serving.is_alive()
