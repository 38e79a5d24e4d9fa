"""A third-party server in a sandbox works, and sees nothing but what it was given."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp
import pytest
from helpers.bpf import judge

from mcp_grpo.errors import ServerConfigError, ToolServerError
from mcp_grpo.tools import ToolPool, load_servers
from mcp_grpo.tools.transports import confined
from mcp_grpo.types import ToolCall


SERVER = Path(__file__).parents[2] / "servers" / "prisoner.py"
PACKAGES = str(Path(mcp.__file__).parents[1])

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not confined.is_supported(), reason="needs Linux 6.7 or newer with Landlock"),
]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A file, a folder, a port and a socket with a name, all of somebody else."""
    (tmp_path / "canary").write_text("canary-4f1c")
    (tmp_path / "mine").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as named:
        named.bind(str(tmp_path / "named"))
        named.listen()
        yield {"folder": tmp_path, "port": listening.getsockname()[1]}


def entry(sandbox: Any) -> dict[str, Any]:
    options = {"sandbox": {**sandbox, "read": [PACKAGES, *sandbox.get("read", [])]}}
    return {"prisoner": {"command": sys.executable, "args": [str(SERVER)], "cwd": "/", "x-mcp-grpo": options}}


async def answers(sandbox: Any, *codes: str) -> list[str]:
    async with ToolPool(entry(sandbox)) as pool:
        return [(await pool.call(ToolCall(name="do", arguments={"code": code}))).text for code in codes]


def attempts(outside: dict[str, Any]) -> dict[str, str]:
    folder, port = outside["folder"], outside["port"]
    return {
        "read": f"Path('{folder}/canary').read_text()",
        "list": f"list(Path('{folder}').iterdir())",
        "home": f"list(Path('{Path.home()}').iterdir())",
        "environment": f"Path('/proc/{os.getpid()}/environ').read_bytes()",
        "command line": f"Path('/proc/{os.getpid()}/cmdline').read_bytes()",
        "write": f"Path('{folder}/new').write_text('x')",
        "system": "Path('/usr/evil').write_text('x')",
        "other program": f"subprocess.run(['/bin/cat', '{folder}/canary'], check=True, capture_output=True)",
        "tcp": f"socket.create_connection(('127.0.0.1', {port}), 2)",
        "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "unix": f"socket.socket(socket.AF_UNIX).connect('{folder}/named')",
        "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    }


async def test_it_sees_no_files_and_no_network_but_has_a_home(outside: dict[str, Any]) -> None:
    tried = attempts(outside)
    found = await answers({}, *tried.values(), "Path.home().joinpath('f').write_text('x'), str(Path.home())")
    refused = dict(zip(tried, found, strict=False))
    through = [
        name for name, text in refused.items() if not text.startswith(("PermissionError", "CalledProcessError"))
    ]
    assert through == [], refused
    assert not (outside["folder"] / "new").exists()
    assert found[-1].startswith("did (1, ")
    home = found[-1].split("'")[1]
    assert home != str(Path.home())
    assert not Path(home).exists()  # any more


DEEP = "import os\nos.chdir(Path.home())\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')"
"""Folders in folders, more than Python may recurse into."""


@pytest.mark.full
async def test_a_home_that_is_deeper_than_python_recurses_is_removed() -> None:
    _, home = await answers({}, f"exec({DEEP!r})", "str(Path.home())")
    assert not Path(home.removeprefix("did ")).exists()


@pytest.mark.full
def test_a_home_is_removed_when_we_are_killed(tmp_path: Path) -> None:
    """By the watchdog, as the guard of the server has no more than a second."""
    code = (
        "import anyio, os, signal, sys\nfrom mcp_grpo.tools import ToolPool\nfrom mcp_grpo.types import ToolCall\n"
        "async def main():\n"
        f"    async with ToolPool({entry({})!r}) as pool:\n"
        "        for code in ('Path.home().joinpath(\"f\").write_text(\"x\")', 'str(Path.home())'):\n"
        "            text = (await pool.call(ToolCall(name='do', arguments={'code': code}))).text\n"
        "        print(text, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "anyio.run(main)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(SERVER.parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    home = Path(done.stdout.strip().removeprefix("did "))
    assert tmp_path in home.parents
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, f"left behind: {list(tmp_path.iterdir())}"
        time.sleep(0.05)


async def test_it_sees_what_it_is_given(outside: dict[str, Any]) -> None:
    folder, port = outside["folder"], outside["port"]
    tried = attempts(outside)
    given = {"read": [str(folder / "canary")], "write": [str(folder / "mine")], "network": [port]}
    read, wrote, connected, udp, other = await answers(
        given, tried["read"], f"Path('{folder}/mine/f').write_text('x')", tried["tcp"], tried["udp"],
        "socket.create_connection(('127.0.0.1', 1), 2)",
    )  # fmt: skip
    assert (read, wrote) == ("did canary-4f1c", "did 1")
    assert (folder / "mine" / "f").read_text() == "x"
    assert connected.startswith("did <socket")
    assert udp.startswith("PermissionError")
    assert other.startswith("PermissionError")  # and not ConnectionRefusedError, as it is for who may try


async def test_with_all_of_the_network_there_are_still_no_files_and_no_named_sockets(outside: dict[str, Any]) -> None:
    tried = attempts(outside)
    connected, udp, read, unix = await answers(
        {"network": True}, *(tried[name] for name in ("tcp", "udp", "read", "unix"))
    )
    assert connected.startswith("did <socket")
    assert udp.startswith("did <socket")
    assert read.startswith("PermissionError")
    assert unix.startswith("PermissionError")


async def test_without_the_option_nothing_is_in_its_way(outside: dict[str, Any]) -> None:
    servers = entry({})
    del servers["prisoner"]["x-mcp-grpo"]
    async with ToolPool(servers) as pool:
        result = await pool.call(ToolCall(name="do", arguments={"code": attempts(outside)["read"]}))
    assert result.text == "did canary-4f1c"


async def test_it_is_not_started_where_it_cannot_be_kept_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "_MIN_VERSION", 1000)
    with pytest.raises(ToolServerError, match=r"cannot be kept in a sandbox here.*Linux 6\.7"):
        await answers({})


def test_a_process_that_cannot_seal_itself_does_not_become_the_server() -> None:
    # Within a filter that refuses Landlock, as in some containers.
    walls = '{"read": [], "write": [], "network": ["no port"]}'
    command = [sys.executable, "-I", confined.__file__, walls, "/bin/echo", "free"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "free" not in done.stdout


@pytest.mark.parametrize(
    "sandbox", [True, {"reads": []}, {"read": "/tmp"}, {"network": "no"}, {"network": [0]}, {"network": [True]}]
)
def test_a_wrong_option_is_refused(sandbox: Any) -> None:
    with pytest.raises(ServerConfigError, match="`sandbox` of server 's' must be an object"):
        load_servers({"s": {"command": "p", "x-mcp-grpo": {"sandbox": sandbox}}})


def test_a_server_that_is_not_started_here_has_no_sandbox() -> None:
    with pytest.raises(ServerConfigError, match="not started here"):
        load_servers({"s": {"url": "http://h", "x-mcp-grpo": {"sandbox": {}}}})


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("network", "family", "kind", "is_allowed"),
    [
        (False, 2, 1, False), (False, 1, 1, False), ([443], 2, 1 | 0o2000000, True), ([443], 10, 1, True),
        ([443], 2, 2, False), ([443], 1, 1, False), (True, 2, 2, True), (True, 16, 3, True), (True, 1, 1, False),
        (True, 17, 3, False),
    ],
)  # fmt: skip
def test_verdicts_on_sockets(machine: str, network: Any, family: int, kind: int, is_allowed: bool) -> None:
    architecture, number, refused = confined._MACHINES[machine]
    program = confined.filter_program(network, machine)
    assert (judge(program, number, architecture, (family, kind)) == 0x7FFF0000) == is_allowed
    assert judge(program, 0, architecture, ()) == 0x7FFF0000
    assert judge(program, refused[-1], architecture, ()) != 0x7FFF0000
    assert judge(program, 0, architecture ^ 1, ()) != 0x7FFF0000
