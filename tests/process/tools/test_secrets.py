"""What a server is given in confidence comes back from it in every way, and leaves this process in none."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import anyio
import psutil
import pytest
from servers import teller

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools import Cassette, ToolPool
from mcp_grpo.tools.sessions import server as server_module
from mcp_grpo.tools.sessions.call_queue import CallQueue
from mcp_grpo.tools.sessions.session import Session
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = pytest.mark.anyio

TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))
ENV = {
    "GITHUB_PAT": "canary-of-a-pat-1",
    "JWT": "canary-of-a-jwt-2",
    "SLACK_WEBHOOK_URL": "https://hooks.example.com/services/T1/B2/canaryOfAHook3",
    "API_KEY": "c4x7",
    "DATABASE": "mysql://ann:canary-of-a-database-5@h/d",
}
ARGS = ["-e", "TOKEN=canary-of-an-argument-6", "--header", "Authorization: Bearer canary-of-a-header-7"]
ARGS += ["postgresql://ann:canary-of-an-address-8@h/d", "c4n4ry9Zq7Lm2Xw8Pt", "https://h/mcp/c4n4ryInThePath77x/sse"]
SECRETS = [
    *ENV.values(),
    "canaryOfAHook3",
    "canary-of-a-database-5",
    "canary-of-an-argument-6",
    "canary-of-a-header-7",
]
SECRETS += ["canary-of-an-address-8", "c4n4ry9Zq7Lm2Xw8Pt", "c4n4ryInThePath77x"]


def servers(*args: str) -> dict[str, Any]:
    return {"teller": {"command": sys.executable, "args": [str(teller.__file__), *ARGS, *args], "env": ENV}}


def found_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


async def test_secrets_stay_out_of_tools_results_errors_and_recordings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "calls.jsonl"
    with caplog.at_level(logging.DEBUG):
        async with ToolPool(servers(), Cassette(path, "record")) as pool:
            (tool,) = pool.catalog.tools
            told = await pool.call(ToolCall(name="tell", arguments={"text": "canary-of-a-pat-1"}))
            failed = await pool.call(ToolCall(name="tell", arguments={"text": "error"}))
    for text in (told.text, failed.text, tool.description, str(tool.schema)):
        assert "***" in text
        assert found_in(text) == []
    assert list(tool.input_schema["properties"]) == ["text"]
    assert found_in(path.read_text() + repr(pool.configs) + caplog.text) == []


async def test_the_tools_of_a_recording_are_those_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with ToolPool(servers(), Cassette(path, "record")) as pool:
        recorded = pool.catalog
    async with ToolPool(None, Cassette(path, "replay")) as pool:
        assert pool.catalog.hash == recorded.hash


async def test_secrets_stay_out_of_the_error_of_a_server_that_does_not_start() -> None:
    with pytest.raises(ToolServerError) as raised:
        async with ToolPool(servers("--fail")):
            pass
    assert "It cannot start with" in str(raised.value)
    assert found_in(str(raised.value)) == []


class TestMistakesOfOurs:
    """A mistake, here or in a library, is logged with where it happened, and with neither secrets nor control sequences."""

    @pytest.fixture(autouse=True)
    def log(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        with caplog.at_level(logging.DEBUG):
            yield
        text = "\n".join(logging.Formatter().format(record) for record in caplog.get_records("call"))
        assert "raise RuntimeError(" in text, "there is no traceback"
        assert "secret ***" in text
        assert found_in(text) == []
        assert "\x1b" not in text

    @staticmethod
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"\x1b]0;secret {ENV['GITHUB_PAT']}")

    async def test_in_a_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with ToolPool(servers()) as pool:
            monkeypatch.setattr(Session, "call", self.fail)
            result = await pool.call(ToolCall(name="tell", arguments={"text": ""}))
        assert result.kind is ResultKind.SERVER_ERROR
        assert result.text == "RuntimeError: ␛]0;secret ***"

    @pytest.mark.full
    async def test_in_reading_a_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = servers("--forget")
        entry["teller"]["x-mcp-grpo"] = {"isolation": "exclusive", "state_tool": "forget"}
        async with ToolPool(entry) as pool, pool.lease(TASK) as lease:
            monkeypatch.setattr(Session, "call", self.fail)
            with pytest.raises(ToolServerError, match=r"secret \*\*\*"):
                await lease.states()

    @pytest.mark.full
    async def test_in_a_reset(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        entry = servers("--forget")
        entry["teller"]["x-mcp-grpo"] = {"isolation": "exclusive", "reset_tool": "forget"}
        async with ToolPool(entry) as pool:
            async with pool.lease(TASK) as lease:
                await lease.call(ToolCall(name="tell", arguments={"text": ""}))
                monkeypatch.setattr(Session, "call", self.fail)
            await logged("The reset tool of server 'teller' failed unexpectedly", caplog)

    async def test_in_keeping_and_in_starting_a_session(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(server_module, "UNEXPECTED_DELAY", 0.01)
        async with ToolPool(servers()):
            monkeypatch.setattr(Session, "open", self.fail)
            monkeypatch.setattr(CallQueue, "remove", self.fail)
            for process in psutil.Process().children():
                if str(teller.__file__) in process.cmdline():
                    process.kill()
            await logged("Keeping a session with server 'teller' failed", caplog)
            await logged("Starting a session with server 'teller' failed unexpectedly", caplog)


async def logged(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with anyio.fail_after(30):
        while text not in caplog.text:
            await anyio.sleep(0.01)
