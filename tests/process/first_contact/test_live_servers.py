"""Servers get what they need from the shell they are started in, and say what is missing."""

import json
import os
import venv
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import mcp
import pytest
from helpers.shell import Said, Shell
from helpers.vendor_api import Reply, Seen, VendorAPI, vendor_api

from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.errors import ServerConfigError, ToolServerError
from mcp_grpo.tools import ToolPool, load_servers
from mcp_grpo.types import ResultKind, ToolCall


pytestmark = pytest.mark.full


KEYS = {
    "fmp": ("FMP_API_KEY", "fmp-secret-1234"),
    "polygon": ("POLYGON_API_KEY", "polygon-secret-1234"),
    "tavily": ("TAVILY_API_KEY", "tvly-secret-1234"),
    "live": ("SLACK_BOT_TOKEN", "xoxb-secret-1234"),
}
ADDRESSES = {
    "fmp": "FMP_BASE_URL",
    "polygon": "POLYGON_BASE_URL",
    "tavily": "TAVILY_BASE_URL",
    "live": "SLACK_API_URL",
}
SOURCES = [("finance", "fmp"), ("finance", "polygon"), ("search", "tavily"), ("slack", "live")]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "finance": ("getStockSplits", {"symbol": "ACME"}),
    "search": ("tavily_search", {"query": "acme"}),
    "slack": ("slack_get_users", {}),
}

CALL = """
import json, sys

import anyio

from mcp_grpo import ToolCall, ToolPool
from mcp_grpo.desk.servers import desk_servers


async def main(servers, *calls):
    servers = desk_servers(backends=json.loads(servers)) if servers.startswith("{") else servers
    async with ToolPool(servers) as pool:
        for call in calls:
            name, arguments = json.loads(call)
            result = await pool.call(ToolCall(name=name, arguments=arguments))
            print(result.kind.name, result.text)


anyio.run(main, *sys.argv[1:])
"""

SHOP = """
import os

from mcp.server.mcpserver import MCPServer

KEY = os.environ["SHOP_KEY"]
server = MCPServer("shop")


@server.tool()
def length() -> int:
    "How long the key is."
    return len(KEY)


server.run("stdio")
"""

ShellIn = Callable[[Path], Shell]


def answer(seen: Seen) -> Reply:
    """What each vendor would say."""
    return Reply({
        "/splits": [{"symbol": "ACME", "date": "2024-06-10", "numerator": 10, "denominator": 1}],
        "/v3/reference/splits": {"status": "OK", "results": [{"execution_date": "2024-06-10", "split_from": 1, "split_to": 10}]},
        "/search": {"results": [{"title": "Acme on 2024-06-10", "url": "https://a.test", "content": "x", "score": 1.0}]},
        "/users.list": {"ok": True, "members": [{"id": "U1", "name": "ann", "real_name": "2024-06-10"}]},
    }[seen.path])  # fmt: skip


@pytest.fixture
async def api() -> AsyncGenerator[VendorAPI, None]:
    async with vendor_api() as api:
        api.answer = answer
        yield api


def environment(api: VendorAPI, *sources: str) -> dict[str, str]:
    return dict(KEYS[source] for source in sources) | {ADDRESSES[source]: api.url for source in sources}


async def run(shell: Shell, *command: str | Path, **variables: str) -> Said:
    """Run a command while the API of this process answers."""
    return await anyio.to_thread.run_sync(partial(shell.run_forked, *command, **variables))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's folder, with a script that calls tools."""
    folder = tmp_path / "projects" / "mine"
    folder.mkdir(parents=True)
    (folder / "call.py").write_text(CALL)
    return folder


def write_servers(folder: Path, **servers: Any) -> Path:
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return folder / "mcp.json"


@pytest.mark.anyio
class TestKeys:
    async def test_a_written_file_names_the_keys_that_are_exported_and_its_servers_get_them(
        self, project: Path, shell_in: ShellIn, api: VendorAPI
    ) -> None:
        backends = {"finance": "fmp", "search": "tavily", "slack": "live"}
        shell, exported = shell_in(project), environment(api, *backends.values())
        options = [text for name, source in backends.items() for text in (f"--{name}", source)]
        written = await run(shell, "mcp-grpo", "desk", *options, **exported)
        assert written.status == 0
        assert written.err == ""
        assert "secret" not in written.out
        assert "PYTHONPATH" not in written.out  # the library is installed
        (project / "servers.json").write_text(written.out)
        calls = [json.dumps(CALLS[name]) for name in backends]
        said = await run(shell, "call.py", "servers.json", *calls, **exported)
        assert said.status == 0, said.terminal
        assert said.out.count("OK") == said.out.count("2024-06-10") == len(backends)
        sent = json.dumps([seen.headers for seen in api.requests])
        assert all(KEYS[source][1] in sent for source in backends.values())

    @pytest.mark.parametrize(("name", "source"), SOURCES)
    async def test_a_source_of_desk_servers_has_its_key_from_the_environment_and_hides_it(
        self, api: VendorAPI, monkeypatch: pytest.MonkeyPatch, name: str, source: str
    ) -> None:
        servers = desk_servers(backends={name: source})["mcpServers"]
        assert all(entry.get("env", {}).keys() <= {"PYTHONPATH"} for other, entry in servers.items() if other != name)
        for variable, value in environment(api, source).items():
            monkeypatch.setenv(variable, value)
        (config,) = load_servers({name: servers[name]})
        assert KEYS[source][1] in config.secret_values
        assert KEYS[source][1] not in config.redact(f"wrong key {KEYS[source][1]}")
        async with ToolPool([config]) as pool:
            tool, arguments = CALLS[name]
            result = await pool.call(ToolCall(name=tool, arguments=arguments))
        assert result.kind is ResultKind.OK
        assert "2024-06-10" in result.text
        assert KEYS[source][1] in json.dumps(api.requests[0].headers)

    def test_keys_that_are_missing_are_all_named_when_the_file_is_written_and_when_it_is_used(
        self, project: Path, shell_in: ShellIn
    ) -> None:
        shell = shell_in(project)
        written = shell.run_forked("mcp-grpo", "desk", "--finance", "fmp", "--slack", "live")
        assert written.status == 0  # a good file, perhaps for another machine
        (project / "servers.json").write_text(written.out)
        used = shell.run_forked("mcp-grpo", "desk", "--compare", "servers.json")
        assert used.status == 1
        for said in (written, used):
            for variable in ("FMP_API_KEY", "SLACK_BOT_TOKEN"):
                assert f"`export {variable}=...`" in said.terminal
            assert str(project / ".env") in said.terminal
            assert ":-default" not in said.terminal  # there is no default for a key

    async def test_files_of_variables_count_beside_the_file_here_and_above_the_nearest_first(
        self, project: Path, shell_in: ShellIn, api: VendorAPI
    ) -> None:
        (project / "sub").mkdir()
        entry = desk_servers(backends={"finance": "fmp"})["mcpServers"]["finance"]
        (project / "sub" / "servers.json").write_text(json.dumps({"finance": entry}))
        (project / "sub" / ".env").write_text("FMP_API_KEY=from-beside-the-file\n")
        (project / ".env").write_text(f"FMP_BASE_URL={api.url}\nFMP_API_KEY=from-here\n")
        (project.parent / ".env").write_text("FMP_BASE_URL=http://above.invalid\nHTTP_PROXY=\n")
        call = json.dumps(CALLS["finance"])
        said = await run(shell_in(project), "call.py", "sub/servers.json", call)
        assert said.out.startswith("OK"), said.terminal
        said = await run(shell_in(project), "call.py", "sub/servers.json", call, FMP_API_KEY="exported-key")
        assert said.out.startswith("OK"), said.terminal
        assert [seen.headers["apikey"] for seen in api.requests] == ["from-beside-the-file", "exported-key"]

    @pytest.mark.full
    async def test_desk_servers_read_a_file_of_variables_above_the_working_directory(
        self, project: Path, shell_in: ShellIn, api: VendorAPI
    ) -> None:
        lines = [f"{name}={value}" for name, value in environment(api, "fmp").items()]
        (project.parent / ".env").write_text("\n".join(lines))
        said = await run(shell_in(project), "call.py", '{"finance": "fmp"}', json.dumps(CALLS["finance"]))
        assert said.out.startswith("OK"), said.terminal
        assert api.requests[0].headers["apikey"] == KEYS["fmp"][1]


@pytest.mark.anyio
class TestNetwork:
    async def test_a_live_source_uses_the_proxy_of_the_environment(
        self, api: VendorAPI, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # In capital letters only: the same name in small letters, if it were passed on empty, would overrule it.
        for name in ("http_proxy", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", api.url)
        monkeypatch.setenv("FMP_API_KEY", "fmp-secret-1234")
        monkeypatch.setenv("FMP_BASE_URL", "http://fmp.invalid")
        servers = desk_servers(backends={"finance": "fmp"})["mcpServers"]
        async with ToolPool({"finance": servers["finance"]}) as pool:
            tool, arguments = CALLS["finance"]
            result = await pool.call(ToolCall(name=tool, arguments=arguments))
        assert result.kind is ResultKind.OK
        assert api.requests[0].headers["Host"] == "fmp.invalid"

    async def test_a_certificate_file_of_the_environment_reaches_a_live_source(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", "/no/such/certificates.pem")
        monkeypatch.setenv("FMP_API_KEY", "fmp-secret-1234")
        servers = desk_servers(backends={"finance": "fmp"})["mcpServers"]
        with pytest.raises(ToolServerError, match="certificates of the environment cannot be used") as caught:
            async with ToolPool({"finance": servers["finance"]}):
                pass
        assert "seems to need" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("servers")
    (folder / "call.py").write_text(CALL)
    (folder / "shop.py").write_text(SHOP)
    (folder / "other.py").write_text('raise SystemExit("Error: OTHER_KEY is not set")\n')
    (folder / "old.py").write_text("from mcp.server.fastmcp import FastMCP\n\nFastMCP('old').run()\n")
    return folder


@pytest.fixture(scope="module")
def shell_elsewhere(folder: Path) -> Shell:
    (folder / "elsewhere").mkdir()
    return Shell(folder / "elsewhere", home=folder)


@pytest.fixture(scope="module")
def said(folder: Path, shell_elsewhere: Shell) -> Said:
    path = write_servers(
        folder,
        keyed={"command": "python", "args": [str(folder / "shop.py")]},
        other={"command": "python", "args": [str(folder / "other.py")]},
        old={"command": "python", "args": [str(folder / "old.py")]},
        lost={"command": "python", "args": ["shop.py"]},
    )
    return shell_elsewhere.run("mcp-grpo", "desk", "--compare", path, SHOP_KEY="shop-secret-1234")


class TestServersThatDoNotStart:
    """One run, in which each server has a cause of its own; and one after the lines that it gives were added."""

    def test_all_are_told_at_once_without_secrets(self, said: Said) -> None:
        assert said.status == 1
        assert "4 of 4 servers could not be opened" in said.terminal
        assert "shop-secret-1234" not in said.terminal
        assert "by hand" not in said.terminal  # the shell has the variable, and all would seem well there

    def test_a_variable_that_is_set_here_but_not_passed_on_is_told_with_the_line_to_add(self, said: Said) -> None:
        assert (
            "The environment variable SHOP_KEY is set, but a server only gets what its entry names. Add to the entry: "
            '`"env": {"SHOP_KEY": "${SHOP_KEY}"}`'
        ) in said.terminal

    def test_a_variable_that_is_set_nowhere_is_to_be_exported_and_passed_on(self, said: Said) -> None:
        assert "OTHER_KEY, which is not set. Export it (`export OTHER_KEY=...`)" in said.terminal
        assert '`"env": {"OTHER_KEY": "${OTHER_KEY}"}`' in said.terminal

    def test_a_script_that_is_not_found_is_told_with_the_folder_and_what_to_write(
        self, said: Said, folder: Path
    ) -> None:
        assert f"'shop.py' was looked for in '{folder / 'elsewhere'}', the working directory" in said.terminal
        assert 'write `"cwd": "."` into the entry' in said.terminal

    def test_a_server_for_an_older_mcp_is_to_have_an_environment_of_its_own(self, said: Said) -> None:
        assert "written for version 1 of the package `mcp`" in said.terminal
        assert all(word in said.terminal for word in ("`uvx`", "`npx`", "virtual environment"))

    def test_the_lines_that_were_given_help(self, folder: Path, shell_elsewhere: Shell) -> None:
        entry = {"command": "python", "args": ["shop.py"]}
        path = write_servers(folder, shop=entry | {"env": {"SHOP_KEY": "${SHOP_KEY}"}, "cwd": "."})
        said = shell_elsewhere.run("python", folder / "call.py", path, '["length", {}]', SHOP_KEY="shop-secret-1234")
        assert said.out == "OK 16\n", said.terminal


class TestLibraryOnPath:
    @pytest.mark.full
    def test_servers_of_a_library_that_is_only_on_pythonpath_start(self, clone: Path, project: Path) -> None:
        """Its Python also takes the argument of the earlier system."""
        venv.create(project / "bare", symlinks=True)
        python = project / "bare" / "bin" / "python"
        packages = str(Path(mcp.__file__).parents[1])
        shell = Shell(project, home=project.parent)
        path = os.pathsep.join([os.path.relpath(clone, project), packages])
        command = "from mcp_grpo.cli import main; raise SystemExit(main())"
        written = shell.run(python, "-c", command, "desk", PYTHONPATH=path)
        assert written.status == 0, written.terminal
        entry = json.loads(written.out)["mcpServers"]["finance"]
        assert entry["env"] == {"PYTHONPATH": os.pathsep.join([str(clone), packages])}
        (project / "servers.json").write_text(written.out)
        calls = ('["run_python", {"python_code": "print(6 * 7)"}]', '["searchName", {"query": "Solar"}]')
        said = shell.run(python, "call.py", "servers.json", *calls, PYTHONPATH=path)
        assert said.status == 0, said.terminal
        assert "OK" in said.out
        assert "42" in said.out
        assert "`python_code` was taken for `code`" in said.out


def test_a_source_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="'fpm' as the source of 'finance', which can be 'fmp' or 'polygon'"):
        desk_servers(backends={"finance": "fpm"})


def test_a_key_that_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMP_API_KEY", raising=False)
    with pytest.raises(ServerConfigError, match="FMP_API_KEY"):
        load_servers(desk_servers(backends={"finance": "fmp"}))
