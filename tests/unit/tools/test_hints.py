"""What is said about a stdio server that did not start."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mcp_grpo.tools import ServerConfig
from mcp_grpo.tools.transports.startup_hints import missing_file_hint, start_hints


def config(*args: str, **options: Any) -> ServerConfig:
    return ServerConfig(name="s", transport="stdio", command="python", args=args, **options)


KEY_ERROR = """Traceback (most recent call last):
  File "/srv/shop.py", line 2, in <module>
    KEY = os.environ[NAME]
  File "<frozen os>", line 679, in __getitem__
KeyError: 'SHOP_KEY'"""

PYDANTIC = """pydantic_core._pydantic_core.ValidationError: 1 validation error for Settings
shop_key
  Field required [type=missing, input_value={}, input_type=dict]"""


@pytest.mark.parametrize(
    "stderr",
    [
        KEY_ERROR,
        PYDANTIC,
        "The environment variable SHOP_KEY is not set. Set it to your key.",
        "Error: SHOP_KEY environment variable is required",
        "Missing SHOP_KEY",
        "Please set the SHOP_KEY environment variable",
        "error: missing required environment variable: SHOP_KEY",
        "fatal: $SHOP_KEY must be set",
        "No value for `SHOP_KEY` was found among the environment variables",
    ],
)
class TestVariables:
    def test_one_that_is_set_here_is_to_be_passed_on(self, stderr: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOP_KEY", "s3cret-value")
        (hint,) = start_hints(config("/srv/shop.py"), stderr)
        assert '`"env": {"SHOP_KEY": "${SHOP_KEY}"}`' in hint
        assert "only gets what its entry names" in hint
        assert "s3cret-value" not in hint

    def test_one_in_a_file_of_variables_beside_the_configuration_is_set(
        self, stderr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SHOP_KEY", raising=False)
        (tmp_path / ".env").write_text("SHOP_KEY=s3cret-value")
        (hint,) = start_hints(config("/srv/shop.py", folder=str(tmp_path)), stderr)
        assert "only gets what its entry names" in hint

    def test_one_that_is_not_set_is_to_be_exported(self, stderr: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SHOP_KEY", raising=False)
        if stderr == PYDANTIC:  # a field has the name of its variable only where there is such a variable
            assert start_hints(config("/srv/shop.py"), stderr) == []
            return
        (hint,) = start_hints(config("/srv/shop.py"), stderr)
        assert "`export SHOP_KEY=...`" in hint
        assert '`"env": {"SHOP_KEY": "${SHOP_KEY}"}`' in hint

    def test_one_that_the_server_has_is_not_what_it_misses(self, stderr: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOP_KEY", "s3cret-value")
        assert start_hints(config("/srv/shop.py", env={"SHOP_KEY": "s3cret-value"}), stderr) == []


def test_several_variables_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "one")
    monkeypatch.setenv("SHOP_TOKEN", "two")
    (hint,) = start_hints(config(), "SHOP_KEY is not set\nSHOP_TOKEN is not set\nSHOP_KEY is required")
    assert '`"env": {"SHOP_KEY": "${SHOP_KEY}", "SHOP_TOKEN": "${SHOP_TOKEN}"}`' in hint


def test_a_variable_that_is_passed_on_empty_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "")
    (hint,) = start_hints(config(env={"SHOP_KEY": ""}), "SHOP_KEY is not set")
    assert "SHOP_KEY, but that is empty" in hint


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "KeyError: 'SHOP_KEY'",  # of any dictionary
        "Error [ERR_MODULE_NOT_FOUND]: a required file is missing",
        "npm error code E404: '@scope/shop.py@1.0' is not in this registry",
        "HTTP 401 UNAUTHORIZED",
        "AttributeError: 'Shop' object has no attribute 'list_tools'",
    ],
)
def test_what_is_no_known_cause_gets_no_hint(stderr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_KEY", raising=False)
    assert start_hints(config("@scope/shop.py@1.0", "shop.server", "https://x.test/shop.py"), stderr) == []


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "file").mkdir()
        (tmp_path / "data").mkdir()
        return tmp_path

    def test_one_beside_the_configuration_needs_its_folder(self, folder: Path) -> None:
        (folder / "file" / "shop.py").write_text("")
        hint = missing_file_hint(config(folder=str(folder / "file")), "shop.py")
        assert hint is not None
        assert f"{str(Path.cwd())!r}, the working directory of this process" in hint
        assert '`"cwd": "."`' in hint

    def test_one_in_the_working_directory_needs_its_path(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        (folder / "shop.py").write_text("")
        hint = missing_file_hint(config(cwd=str(folder / "data"), folder=str(folder / "file")), "shop.py")
        assert hint is not None
        assert f"{str(folder / 'data')!r}, the `cwd` of its entry" in hint
        assert f"its full path, {str(folder / 'shop.py')!r}" in hint

    def test_one_that_is_nowhere_says_where_a_relative_cwd_starts(self, folder: Path) -> None:
        hint = missing_file_hint(config(folder=str(folder / "file")), "shop.py")
        assert hint is not None
        assert str(folder / "file") in hint
        assert "full path" in (missing_file_hint(config(), "shop.py") or "")

    def test_one_that_is_there_or_absolute_is_not_told_of(self, folder: Path) -> None:
        (folder / "data" / "shop.py").write_text("")
        assert missing_file_hint(config(cwd=str(folder / "data")), "shop.py") is None
        assert missing_file_hint(config(), "/no/such/shop.py") is None

    @pytest.mark.parametrize(
        "stderr",
        [
            "python: can't open file '/srv/lib/shop.py': [Errno 2] No such file or directory",
            "Error: Cannot find module '/srv/lib/shop.py'",
            "Error: Unable to access jarfile lib/shop.py",
        ],
    )
    def test_a_script_that_the_server_complains_of_was_looked_for(self, stderr: str) -> None:
        (hint,) = start_hints(config("--flag", "lib/shop.py"), stderr)
        assert "'lib/shop.py' was looked for in" in hint


@pytest.mark.parametrize(
    "stderr",
    [
        "ModuleNotFoundError: No module named 'mcp.server.fastmcp'",
        "ImportError: cannot import name 'FastMCP' from 'mcp.server' (/srv/mcp/server/__init__.py)",
        "AttributeError: 'Server' object has no attribute 'list_tools'",
    ],
)
def test_a_server_for_an_older_mcp_needs_an_environment_of_its_own(stderr: str) -> None:
    (hint,) = start_hints(config("shop.py"), stderr)
    assert "version 1 of the package `mcp`" in hint
    assert "`uvx`" in hint


def test_a_module_that_is_missing_belongs_into_an_environment_of_its_own() -> None:
    (hint,) = start_hints(config(), "ModuleNotFoundError: No module named 'requests'")
    assert "no module 'requests'" in hint
    assert "virtual environment" in hint
    (hint,) = start_hints(config(), f"{sys.executable}: No module named mcp_grpo.desk.servers")
    assert "`mcp-grpo desk`" in hint
