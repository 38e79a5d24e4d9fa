import json
import os
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from mcp_grpo.errors import ServerConfigError
from mcp_grpo.tools import ServerConfig, load_servers


STDIO = {"command": "server", "args": ["--flag"]}
HTTP = {"url": "https://example.com/mcp"}


def load_one(entry: Any) -> ServerConfig:
    (config,) = load_servers({"mcpServers": {"s": entry}})
    return config


@pytest.mark.parametrize("wrap", [lambda e: {"mcpServers": e}, lambda e: {"servers": e, "inputs": []}, lambda e: e])
def test_all_outer_forms_of_the_file_mean_the_same(wrap: Any) -> None:
    configs = load_servers(wrap({"a": STDIO, "b": HTTP}))
    assert [(config.name, config.transport) for config in configs] == [("a", "stdio"), ("b", "http")]


def test_a_bare_map_may_call_a_server_servers() -> None:
    (config,) = load_servers({"servers": STDIO})
    assert (config.name, config.command) == ("servers", "server")


def test_a_file_is_read_and_its_folder_is_where_a_relative_cwd_starts(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"s": STDIO | {"cwd": "data"}}}))
    (config,) = load_servers(path)
    assert config.cwd == str(tmp_path / "data")
    assert load_servers(str(path)) == (config,)


def test_an_absolute_cwd_stays(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"s": STDIO | {"cwd": "/srv"}}))
    assert load_servers(path)[0].cwd == "/srv"


@pytest.mark.parametrize("key", ["type", "transport"])
@pytest.mark.parametrize("alias", ["http", "streamable-http", "streamable_http", "streamableHttp"])
def test_the_transport_has_its_aliases(key: str, alias: str) -> None:
    assert load_one(HTTP | {key: alias}).transport == "http"


def test_a_server_object_runs_in_process() -> None:
    server = MCPServer("files")
    assert load_one(server).server is server
    assert load_one({"server": server, "x-mcp-grpo": {"max_inflight": 2}}).max_inflight == 2


def test_configurations_pass_through() -> None:
    configs = load_servers({"s": STDIO})
    assert load_servers(configs) == configs


def test_variables_are_expanded_in_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("V", "value")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    config = load_one({
        "command": "${V}",
        "args": ["--a=${env:V}", "${UNSET:-default}", "${EMPTY:-default}", "$V ${V%x}"],
        "env": {"K": "<${V}>"},
        "cwd": "/${V}",
    })  # fmt: skip
    assert config.command == "value"
    assert config.args == ("--a=value", "default", "default", "$V ${V%x}")
    assert config.env == {"K": "<value>"}
    assert config.cwd == "/value"
    web = load_one({"url": "http://${V}/", "headers": {"Authorization": "Bearer ${V}"}})
    assert (web.url, web.headers) == ("http://value/", {"Authorization": "Bearer value"})


def written(folder: Path, entry: Any, variables: str | None = None) -> ServerConfig:
    """A server read from a file, with a file of variables beside it."""
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"s": entry}}))
    if variables is not None:
        (folder / ".env").write_text(variables)
    (config,) = load_servers(folder / "servers.json")
    return config


def test_variables_of_a_file_beside_the_configuration_are_expanded(tmp_path: Path) -> None:
    variables = "# comment\nexport CITY_KEY='a b'  # another\nRAW=${CITY_KEY}$HOME\nNOTHING\n"
    config = written(tmp_path, STDIO | {"args": ["${CITY_KEY}", "${env:RAW}", "${NOTHING:-none}"]}, variables)
    assert config.args == ("a b", "${CITY_KEY}$HOME", "none")
    assert config.env == {}


def test_the_environment_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("V", "from the environment")
    assert written(tmp_path, STDIO | {"args": ["${V}"]}, "V=from the file").args == ("from the environment",)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with folders above it that are ours."""
    folder = tmp_path / "above" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


class TestFilesOfVariables:
    @pytest.mark.parametrize("place", [".", "..", "../.."])
    def test_one_here_or_above_counts_also_for_servers_that_are_no_file(self, here: Path, place: str) -> None:
        (here / place / ".env").write_text("V=value")
        assert load_one(STDIO | {"args": ["${V}"]}).args == ("value",)

    def test_the_nearest_comes_first_variable_by_variable(self, here: Path) -> None:
        (here / "..").joinpath(".env").write_text("A=above\nB=above\nC=above\n")
        (here / ".env").write_text("A=here\nB=here\n")
        (here / "configs").mkdir()
        config = written(here / "configs", STDIO | {"args": ["${A}", "${B}", "${C}"]}, "A=beside\n")
        assert config.args == ("beside", "here", "above")

    def test_the_environment_comes_before_all(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("V", "from the environment")
        (here / ".env").write_text("V=here")
        assert load_one(STDIO | {"args": ["${V}"]}).args == ("from the environment",)

    def test_one_above_that_belongs_to_somebody_else_does_not_count(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (here.parent / ".env").write_text("V=planted")
        stat = Path.stat

        def of_another(path: Path, **options: Any) -> Any:
            found = stat(path, **options)
            return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]]) if path.name == ".env" else found

        monkeypatch.setattr(Path, "stat", of_another)
        assert load_one(STDIO | {"args": ["${V:-none}"]}).args == ("none",)
        (here / ".env").write_text("V=here")
        assert load_one(STDIO | {"args": ["${V:-none}"]}).args == ("here",)

    def test_one_above_that_is_no_text_is_told_of_and_left_out(
        self, here: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (here.parent / ".env").write_bytes(b"K=\xff\xfe")
        assert load_one(STDIO).command == "server"
        assert "is not text" in caplog.text

    def test_their_values_are_hidden(self, here: Path) -> None:
        (here / ".env").write_text("SHOP_KEY=s3cret-value")
        config = load_one(STDIO | {"env": {"SHOP_KEY": "${SHOP_KEY}"}})
        assert config.redact("it is s3cret-value") == config.hide_secrets("it is s3cret-value") == "it is ***"


def test_a_variable_of_a_server_that_may_be_unset_is_passed_on_as_it_is_or_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SET", "value")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    names = ("SET", "EMPTY", "UNSET")
    env = {name: f"${{{name}:-}}" for name in names} | {"NAMED": "${env:UNSET:-}", "PART": "<${UNSET:-}>"}
    assert load_one(STDIO | {"env": env}).env == {"SET": "value", "EMPTY": "", "PART": "<>"}


def test_all_variables_that_are_not_set_are_told_at_once_and_a_key_gets_no_default() -> None:
    entry = STDIO | {"args": ["${UNSET_A}"], "env": {"K": "${UNSET_API_KEY}"}}
    with pytest.raises(ServerConfigError) as caught:
        load_servers({"one": entry, "two": HTTP | {"headers": {"Authorization": "Bearer ${UNSET_B}"}}})
    one_a, one_key, two_b = str(caught.value).splitlines()
    assert all(words in one_a for words in ("'one'", "UNSET_A", "${UNSET_A:-default}"))
    assert all(words in one_key for words in ("'one'", "`export UNSET_API_KEY=...`", ".env"))
    assert "default" not in one_key
    assert all(words in two_b for words in ("'two'", "UNSET_B"))


def test_a_folder_called_env_is_no_file_of_variables(tmp_path: Path) -> None:
    (tmp_path / ".env").mkdir()
    assert written(tmp_path, STDIO).command == "server"


def test_a_variable_that_is_not_set_is_refused_with_the_file_it_could_be_in(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError) as caught:
        written(tmp_path, STDIO | {"args": ["${NOT_SET_ANYWHERE}"]})
    assert str(tmp_path / ".env") in str(caught.value)


def test_a_file_of_variables_that_is_no_text_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"K=\xff\xfe")
    with pytest.raises(ServerConfigError, match=r"\.env' is not text"):
        written(tmp_path, STDIO)


@pytest.mark.parametrize("path", ["keys/prod.env", "${workspaceFolder}/keys/prod.env", "keys/${STAGE:-prod}.env"])
def test_an_env_file_adds_to_the_environment_of_a_stdio_server_below_its_own(tmp_path: Path, path: str) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "prod.env").write_text("A=from the file\nB=too\n")
    config = written(tmp_path, STDIO | {"envFile": path, "env": {"A": "its own"}})
    assert config.env == {"A": "its own", "B": "too"}


def test_an_env_file_is_left_to_other_clients_by_an_http_server() -> None:
    assert load_one(HTTP | {"envFile": "/no/such/.env"}).env == {}


def test_our_options_are_read_from_their_own_key_and_foreign_keys_are_ignored() -> None:
    options = {"call_timeout": 5, "allowed_tools": ["a"], "protocol": "legacy"}
    config = load_one(STDIO | {"timeout": 60000, "autoApprove": ["x"], "x-mcp-grpo": options})
    assert (config.call_timeout, config.allowed_tools, config.protocol) == (5, ("a",), "legacy")
    assert config.connect_timeout == 60.0


def test_disabled_servers_are_skipped() -> None:
    configs = load_servers({"a": STDIO | {"disabled": True}, "b": STDIO | {"disabled": False}})
    assert [config.name for config in configs] == ["b"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (STDIO | HTTP, ["'s'", "command", "url"]),
        ({"args": []}, ["'s'", "`command` or `url`", "args"]),
        ("server", ["'s'", "str"]),
        ({"type": "stdio"}, ["`command`", "None"]),
        ({"type": "http", "command": "x"}, ["`url`", "None"]),
        (HTTP | {"type": "sse"}, ["'sse'", "http"]),
        (HTTP | {"type": "carrier-pigeon"}, ["'carrier-pigeon'", "stdio"]),
        ({"url": "ftp://example.com"}, ["http://", "ftp"]),
        ({"command": ""}, ["`command`", "''"]),
        (STDIO | {"args": "--flag"}, ["`args`", "a str", "list"]),
        (STDIO | {"args": [8000]}, ["`args`", "8000", "Quote"]),
        (STDIO | {"env": ["A=b"]}, ["`env`", "list"]),
        (STDIO | {"env": {"PORT": 8000}}, ["`env`", "PORT", "Quote"]),
        (STDIO | {"env": {"K": "${NOT_SET_ANYWHERE}"}}, ["`env`", "'NOT_SET_ANYWHERE'", ":-default"]),
        (STDIO | {"args": ["${input:key}"]}, ["`args`", "${input:key}", "${NAME}"]),
        (STDIO | {"x-mcp-grpo": {"call_timout": 3}}, ["'call_timout'", "`call_timeout`"]),
        (STDIO | {"x-mcp-grpo": {"zzz": 3}}, ["'zzz'", "max_inflight"]),
        (STDIO | {"x-mcp-grpo": 3}, ["x-mcp-grpo", "3"]),
        (STDIO | {"x-mcp-grpo": {"call_timeout": 0}}, ["`call_timeout`", "positive", "0"]),
        (STDIO | {"x-mcp-grpo": {"connect_timeout": "60s"}}, ["`connect_timeout`", "'60s'"]),
        (STDIO | {"x-mcp-grpo": {"max_inflight": 1.5}}, ["`max_inflight`", "1.5"]),
        (STDIO | {"x-mcp-grpo": {"allowed_tools": "read"}}, ["`allowed_tools`", "'read'"]),
        (STDIO | {"x-mcp-grpo": {"protocol": "new"}}, ["`protocol`", "'new'", "legacy"]),
        (STDIO | {"x-mcp-grpo": {"isolation": "own"}}, ["`isolation`", "'own'", "exclusive"]),
        (STDIO | {"x-mcp-grpo": {"pool_size": 0}}, ["`pool_size`", "0"]),
        (STDIO | {"x-mcp-grpo": {"spares": -1}}, ["`spares`", "-1"]),
        (STDIO | {"x-mcp-grpo": {"retries": True}}, ["`retries`", "True"]),
        (STDIO | {"x-mcp-grpo": {"idempotent_tools": [1]}}, ["`idempotent_tools`", "1"]),
        (STDIO | {"x-mcp-grpo": {"reset_tool": ""}}, ["`reset_tool`", "''"]),
        (STDIO | {"x-mcp-grpo": {"reset_tool": "reset"}}, ["`reset_tool`", "'shared'", "'exclusive'"]),
        (STDIO | {"x-mcp-grpo": {"state_tool": 3, "isolation": "meta"}}, ["`state_tool`", "3"]),
        (STDIO | {"x-mcp-grpo": {"state_tool": "state"}}, ["`state_tool`", "'shared'", "'exclusive'"]),
        (STDIO | {"x-mcp-grpo": {"argument_aliases": ["code"]}}, ["`argument_aliases`", "'code'", "python_code"]),
        (STDIO | {"x-mcp-grpo": {"argument_aliases": {"n": 1}}}, ["`argument_aliases`", "'n': 1"]),
        (STDIO | {"x-mcp-grpo": {"coerce_arguments": "yes"}}, ["`coerce_arguments`", "'yes'", "true or false"]),
        (STDIO | {"x-mcp-grpo": {"error_patterns": "^Error"}}, ["`error_patterns`", "'^Error'", "list"]),
        (STDIO | {"x-mcp-grpo": {"error_patterns": ["ok", "Error [("]}}, ["`error_patterns`", "'Error [('", "unterm"]),
        (STDIO | {"envFile": 3}, ["`envFile`", "3"]),
        (STDIO | {"envFile": "/no/such/.env"}, ["`envFile`", "'s'", "'/no/such/.env'", "No such file"]),
        (STDIO | {"cwd": "${workspaceFolder}"}, ["`cwd`", "'workspaceFolder'"]),
        ({"server": "not an object"}, ["`server`", "MCPServer"]),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_refused_in_words_that_help(entry: Any, words: list[str]) -> None:
    with pytest.raises(ServerConfigError) as caught:
        load_one(entry)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("content", [{}, {"mcpServers": {}}, {"a": STDIO | {"disabled": True}}, []])
def test_no_server_at_all_is_refused(content: Any) -> None:
    with pytest.raises(ServerConfigError, match="No server"):
        load_servers(content)


def test_servers_that_are_no_map_are_refused() -> None:
    with pytest.raises(ServerConfigError, match="map names to servers"):
        load_servers({"mcpServers": [STDIO]})


def test_a_list_of_anything_else_is_refused() -> None:
    with pytest.raises(ServerConfigError, match="ServerConfig"):
        load_servers([MCPServer("files")])  # type: ignore[list-item]


def test_two_servers_of_one_name_are_refused() -> None:
    (config,) = load_servers({"s": STDIO})
    with pytest.raises(ServerConfigError, match=r"\['s'\]"):
        load_servers([config, config])


@pytest.mark.parametrize("text", ["{", "[]", '{"mcpServers": {},}'])
def test_a_file_that_is_no_object_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "servers.json"
    path.write_text(text)
    with pytest.raises(ServerConfigError, match=r"servers\.json"):
        load_servers(path)


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match=r"nowhere\.json"):
        load_servers(tmp_path / "nowhere.json")


def test_the_repr_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret-value")
    stdio = load_one(STDIO | {"env": {"KEY": "literal-secret"}, "args": ["--key", "${SECRET}"]})
    web = load_one(
        {"url": "https://u:pw@h/${SECRET}?k=in-the-query", "headers": {"Authorization": "Bearer abcdefghij"}}
    )
    shown = repr(stdio) + repr(web) + str([stdio, web])
    for secret in ("literal-secret", "s3cret-value", "abcdefghij", "in-the-query", "pw"):
        assert secret not in shown
    assert "server --key ***" in shown
    assert "https://h/***" in shown


def test_redacting_leaves_short_values_and_paths(tmp_path: Path) -> None:
    config = load_one(STDIO | {"env": {"LEVEL": "INFO", "HOME": str(tmp_path), "KEY": "abcdefgh"}})
    assert config.redact(f"INFO {tmp_path} abcdefgh") == f"INFO {tmp_path} ***"


def test_results_lose_secrets_but_no_ordinary_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "Rotterdam")
    monkeypatch.setenv("GITHUB_PAT_TOKEN", "ghp-abcdefgh")
    env = {
        "CITY": "Amsterdam",
        "AUTHOR": "Multatuli",
        "OpenAI_ApiKey": "sk-12345678",
        "DATABASE": "postgres://ann:hunter2hunter2@db/main",
        "PRIVATE_PEM": "line one\nline two",
        "KEY_FILE": "/usr/bin/env",
        "TOKEN": "short",
    }
    config = load_one(STDIO | {"env": env, "args": ["${PLACE}", "${GITHUB_PAT_TOKEN}"]})
    secrets = [env["OpenAI_ApiKey"], env["DATABASE"], "hunter2hunter2", env["PRIVATE_PEM"], "ghp-abcdefgh"]
    secrets.append(json.dumps(env["PRIVATE_PEM"])[1:-1])
    ordinary = ["Amsterdam", "Rotterdam", "Multatuli", "/usr/bin/env", "short"]
    assert [config.hide_secrets(f"<{text}>") for text in secrets] == ["<***>"] * len(secrets)
    assert [config.hide_secrets(text) for text in ordinary] == ordinary


def test_results_lose_the_headers_but_not_those_about_formats() -> None:
    headers = {"Authorization": "Bearer abcdefghij", "X-Tenant": "tenant-one", "Accept": "application/json"}
    config = load_one(HTTP | {"headers": headers})
    assert config.hide_secrets("Bearer abcdefghij, abcdefghij, tenant-one, application/json") == (
        "***, ***, ***, application/json"
    )
    assert config.redact("application/json") == "***"


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("--api-key", "abc", "run"), "p --api-key *** run"),
        (("--token=abc",), "p --token=***"),
        (("--verbose", "abc"), "p --verbose abc"),
    ],
)
def test_a_secret_in_the_arguments_is_not_shown(args: tuple[str, ...], shown: str) -> None:
    assert ServerConfig(name="s", transport="stdio", command="p", args=args).target == shown


def test_a_secret_in_the_address_is_not_shown() -> None:
    config = ServerConfig(name="s", transport="http", url="http://me:hunter2222@h/mcp?api_key=sk-0123456789")
    assert config.redact("hunter2222 and sk-0123456789") == "*** and ***"


def test_an_option_of_ours_that_stands_in_the_wrong_place_is_named(caplog: pytest.LogCaptureFixture) -> None:
    (server,) = load_servers({"slow": {"command": "slow", "max_inflight": 99, "pool_size": 3, "autoApprove": []}})
    assert (server.max_inflight, server.pool_size) == (8, None)
    assert "`max_inflight`, `pool_size` of server 'slow' has no effect there" in caplog.text
    assert "autoApprove" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://",
        "http:///mcp",
        "http://host:port/mcp",
        "http://host:99999/",
        "http://a b/mcp",
        "https://:8000/",
    ],
)
def test_an_address_that_is_none_gets_an_error_that_does_not_repeat_it(url: str) -> None:
    with pytest.raises(ServerConfigError, match="`url` of server 'web' is not an address") as caught:
        ServerConfig(name="web", transport="http", url=url + "?key=s3cret-value")
    assert "s3cret-value" not in str(caught.value)


def test_a_limit_on_trajectories_needs_a_server_that_tells_them_apart() -> None:
    with pytest.raises(
        ServerConfigError, match="`max_trajectories` of server 'x' has no effect with isolation 'shared'"
    ):
        ServerConfig(name="x", transport="stdio", command="x", max_trajectories=3)
