"""What is told in the terminal, once, however logging is set up."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from mcp_grpo.monitor import tell


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """One below a root without handlers."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    found = logging.getLogger("tests.told")
    yield found
    found.setLevel(logging.NOTSET)
    found.handlers.clear()


def test_it_is_shown_where_the_log_is_not(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    tell(logger, "Prompts\x1b[2J are run once.")
    assert capsys.readouterr().err == "Prompts␛[2J are run once.\n"


@pytest.mark.parametrize("place", ["root", "own"])
def test_it_is_shown_once_where_the_log_is_shown(
    logger: logging.Logger, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.setLevel(logging.INFO)
    (logger if place == "own" else logging.getLogger()).addHandler(logging.StreamHandler(sys.stderr))
    tell(logger, "Prompts are run once.")
    assert capsys.readouterr().err == "Prompts are run once.\n"


def test_it_is_written_to_a_log_and_shown_where_that_is_a_file(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.StringIO()
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(file))
    logger.addHandler(shown := logging.StreamHandler(sys.stderr))
    shown.setLevel(logging.WARNING)
    tell(logger, "Prompts are run once.")
    assert (file.getvalue(), capsys.readouterr().err) == 2 * ("Prompts are run once.\n",)


def test_who_wants_no_warnings_is_told_nothing(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logger.setLevel(logging.ERROR)
    tell(logger, "Prompts are run once.")
    assert capsys.readouterr().err == ""
