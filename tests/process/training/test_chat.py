"""A person talks to a policy in the terminal, and sees each call; nothing is left behind when they go."""

import io
import json
import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.endpoint import call, stand_in
from helpers.fork_server import ForkServer, Started
from helpers.runs import make_trainer
from helpers.sums import ROWS, SERVER, SERVERS
from peft import LoraConfig
from servers.sums import server

from mcp_grpo import Endpoint
from mcp_grpo.chat import chat
from mcp_grpo.cli import main, make_console
from mcp_grpo.rollout import Renderer


# What a terminal starts: the pseudo-terminal becomes the one of this session, so that Ctrl-C is a signal.
IN_TERMINAL = """
import fcntl, os, sys, termios
terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for stream in range(3):
    os.dup2(terminal, stream)
sys.stdin = open(0, closefd=False)
from mcp_grpo import Endpoint
from mcp_grpo.chat import chat
from mcp_grpo.cli import main, make_console
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> Path:
    """The folder of a run that has learnt nothing yet."""
    folder = tmp_path_factory.mktemp("run")
    lora = LoraConfig(r=4, target_modules="all-linear")
    with make_trainer(folder, adding_model, peft_config=lora) as trainer:
        trainer.save_model()
    return folder


def servers_file(folder: Path, *arguments: str) -> str:
    server = {"command": sys.executable, "args": [str(SERVER), *arguments]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"sums": server}}))
    return str(folder / "mcp.json")


class Terminal:
    """The keyboard and the screen of a chat."""

    def __init__(self, keyboard: int, started: Started) -> None:
        self.started, self.screen, self._keyboard = started, "", keyboard

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Return what is shown up to a text, from where it was looked at last."""
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.screen!r}"
            if select.select([self._keyboard], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self._keyboard, 4096).decode("utf-8", "replace")
                except OSError:  # the other side is closed
                    time.sleep(0.1)
        shown, _, self.screen = self.screen.partition(text)
        return shown + text


@contextmanager
def terminal(fork_server: ForkServer, folder: Path, *arguments: str) -> Iterator[Terminal]:
    keyboard, other = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
    started = fork_server.start("-c", IN_TERMINAL, os.ttyname(other), "chat", *arguments, cwd=folder, env=environment)
    try:
        yield Terminal(keyboard, started)
    finally:
        os.close(other)
        os.close(keyboard)
        started.wait(60)


def running(argument: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] * (argument in process.cmdline())
        except psutil.Error:
            continue
    return found


def test_ctrl_c_ends_a_reply_and_ctrl_d_the_chat(tmp_path: Path, fork_server: ForkServer, adapter: Path) -> None:
    called = tmp_path / "called"
    servers = servers_file(tmp_path, "--hang", str(called))
    fixed = ["--adapter", str(adapter), "--temperature", "0", "--servers", servers]
    with terminal(fork_server, tmp_path, *fixed) as shown:
        assert "Tools: add" in shown.wait_for("you> ")
        shown.type("2+3?\n")
        shown.wait_for('-> add({"a": 2, "b": 3})')
        while not called.exists():
            time.sleep(0.05)
        shown.type("\x03")
        shown.wait_for("The reply was ended.")
        shown.wait_for("you> ")
        time.sleep(1)  # the prompt is shown a moment before keys are read
        shown.type("\x03")  # with nothing under way
        shown.wait_for("Ctrl-D ends the chat.")
        assert running(str(called))
        shown.type("\x04")
        assert shown.started.wait(60) == 0
    assert not running(str(called))


def ask(lines: str, *arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(lines))
        return main(["chat", *arguments])


def test_an_adapter_is_talked_to_and_each_call_is_shown(
    tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--adapter", str(adapter), "--temperature", "0", "--max-tokens", "60", "--max-turns", "2"]
    assert ask("2+3?\nAgain!\n", *fixed, "--servers", servers_file(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert 'you> 2+3?\n  -> add({"a": 2, "b": 3})\n  <- 5  (' in shown
    assert "policy> 5\nyou> Again!\n" in shown
    assert not running(str(tmp_path))


def test_an_endpoint_is_talked_to_and_hostile_text_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x1b[31m [red]text[/red]"

    def reply(body: dict[str, Any]) -> Any:
        last = body["messages"][-1]
        if last["content"] == "break":
            return 400, "no", {}
        if last["role"] == "user" and "2+3" in last["content"]:
            return {"tool_calls": [call("add", {"a": 2, "b": 3})]}
        return {"content": f"{evil} {len(body['messages'])}"}

    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": SERVERS}))
    with stand_in(reply) as endpoint:
        fixed = ["--endpoint", endpoint.url, "--name", "m", "--servers", str(tmp_path / "mcp.json")]
        assert ask("2+3?\n\nbreak\nand more\n", *fixed, "--system", "Be brief.") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "␛]0;owned␛[31m [red]text[/red] 4" in shown  # system, user, call and result
    assert '-> add({"a": 2, "b": 3})' in shown
    assert "<- 5" in shown
    assert "A server failed. Your message is forgotten" in shown
    roles = [message["role"] for message in endpoint.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert endpoint.bodies[-1]["messages"][-1]["content"] == "and more"


def test_results_that_an_endpoint_had_no_turn_to_read_are_sent_with_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+3?\nagain\n"))
    with stand_in(lambda body: {"tool_calls": [call("add", {"a": 2, "b": 3})]}) as endpoint:
        policy = Endpoint(base_url=endpoint.url, model="m", max_turns=1)
        chat(policy, {"sums": server}, console=make_console())
    assert [message["role"] for message in endpoint.bodies[-1]["messages"]] == ["user", "assistant", "tool", "user"]


def test_what_is_missing_is_said(tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": SERVERS}))
    servers = ["--servers", str(tmp_path / "mcp.json")]
    for arguments, problem in [
        (["--adapter", str(tmp_path / "nothing"), *servers], "There is no policy at"),
        (["--adapter", str(adapter), "--base", str(tmp_path / "nothing"), *servers], "cannot be loaded. Pass `base`"),
        (["--adapter", str(adapter), "--servers", str(tmp_path / "nothing.json")], "nothing.json"),
        (["--endpoint", "http://127.0.0.1:9/v1", *servers], "`--name`"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--name", "m", *servers], "cannot be reached"),
    ]:
        assert ask("", *arguments) == 1
        assert problem in capsys.readouterr().err


def test_the_system_message_of_training_is_that_of_the_chat(
    tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}]
    with make_trainer(tmp_path, adding_model, rows=[{**row, "prompt": opening} for row in ROWS]) as trainer:
        trainer.save_model()
    prompts: list[Any] = []
    own = Renderer.prompt_ids

    def seen(self: Renderer, messages: Any, tools: Any) -> Any:
        prompts.append(list(messages))
        return own(self, messages, tools)

    monkeypatch.setattr(Renderer, "prompt_ids", seen)
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": SERVERS}))
    assert ask("2+3?\n", "--model", str(tmp_path), "--max-tokens", "5", "--servers", str(tmp_path / "mcp.json")) == 0
    assert prompts[-1] == opening
