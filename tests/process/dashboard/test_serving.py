"""`mcp-grpo dashboard` as a process: it says where it is, serves until it is interrupted, and complains in words."""

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.dashboards import PROGRAM, Dashboard

from mcp_grpo.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Iterator[Dashboard]:
    with Dashboard(folder) as running:
        yield running


def test_it_listens_on_this_machine_alone_and_says_where(dashboard: Dashboard, folder: Path) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", dashboard.url)
    assert dashboard.said[0] == f"There is no run in {folder} yet. One that is started shows by itself."
    with urllib.request.urlopen(dashboard.url) as page:
        assert b"mcp-grpo" in page.read()
    addresses = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    port = int(dashboard.url.rstrip("/").rpartition(":")[2])
    assert {each for each in addresses if each.endswith(f":{port:04X}")} >= {f"0100007F:{port:04X}"}
    assert f"00000000:{port:04X}" not in addresses


def test_an_interrupt_ends_it_at_once_also_while_a_page_is_connected(folder: Path) -> None:
    with Dashboard(folder) as running:
        host, port = running.url.removeprefix("http://").rstrip("/").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(20) == 0
        assert running.rest() == ""


def test_other_machines_need_the_token_that_is_printed(folder: Path) -> None:
    with Dashboard(folder, "--host", "0.0.0.0") as running:
        found = re.fullmatch(r"http://.+:(\d+)/\?token=([\w-]{32})", running.url)
        assert found
        address = f"http://127.0.0.1:{found[1]}/api/runs"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address)
        with urllib.request.urlopen(f"{address}?token={found[2]}") as answer:
            assert answer.status == 200


def test_what_cannot_be_served_is_said_in_a_sentence(
    dashboard: Dashboard, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(folder / "nothing")]) == 1
    assert "There is no folder" in capsys.readouterr().err
    port = dashboard.url.rstrip("/").rpartition(":")[2]
    assert main(["dashboard", str(folder), "--port", port]) == 1
    assert "`--port 0` for one that is free" in capsys.readouterr().err
    assert main(["dashboard", str(folder), "--port", "99999"]) == 1
    assert "from 0 to 65535" in capsys.readouterr().err
    assert main(["dashboard", str(folder), "--host", "no.such.host.invalid"]) == 1
    assert "Check `--host`" in capsys.readouterr().err


def test_it_starts_without_what_training_needs() -> None:
    code = "import sys, mcp_grpo.dashboard; print(sorted({'torch', 'transformers', 'trl'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert PROGRAM[0] == sys.executable
