"""Findings of an examination: what is right, what is wrong and what to do about it, and what could not be looked at."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from rich.table import Table
from rich.text import Text

from mcp_grpo.errors import MCPGRPOError
from mcp_grpo.inert import inert


T = TypeVar("T")

Status = Literal["ok", "wrong", "warning", "not run", "left"]

_COLOURS: dict[Status, str] = {"ok": "green", "wrong": "red", "warning": "yellow", "not run": "dim", "left": "dim"}
_ORDER: tuple[Status, ...] = ("wrong", "not run", "warning", "ok", "left")  # of the lines of a pre-flight


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 tool", "2 tools"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of a report. `left` is what only the machine of the run can tell."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    @property
    def shown_status(self) -> str:
        """Return the status for a table: what is left to another machine was not run here."""
        return "not run" if self.status == "left" else self.status


@dataclass(frozen=True, slots=True)
class Report:
    """
    What an examination has found.

    Args:
        findings (`tuple[Finding, ...]`):
            One for each check, in the order in which they were made.
    """

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Return what is wrong."""
        return tuple(one for one in self.findings if one.status == "wrong")

    @property
    def sentence(self) -> str:
        """Sum up in one sentence."""
        number = len(self.problems)
        if not number:
            return "found nothing wrong."
        return "1 thing is wrong." if number == 1 else f"{number} things are wrong."

    def table(self) -> Table:
        """Return the findings as a table for the terminal; what to do stands below what is wrong."""
        table = Table("check", "", "found", show_lines=False, pad_edge=False)
        for one in self.findings:
            said = f"{one.found}\n-> {one.remedy}" if one.remedy else one.found
            table.add_row(one.name, Text(one.shown_status, _COLOURS[one.status]), Text(said))
        return table

    def as_json(self) -> str:
        """Return the findings for programs."""
        shown = [{**asdict(one), "status": one.shown_status} for one in self.findings]
        rows = [{name: inert(value) for name, value in row.items()} for row in shown]
        return json.dumps({"ok": not self.problems, "checks": rows}, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        start = "The pre-flight found nothing wrong." if not self.problems else f"The pre-flight: {self.sentence}"
        lines = [
            f"  {status:<8}{one.name}: {one.found}".replace("\n", "\n          ")
            for status in _ORDER
            for one in self.findings
            if one.status == status
        ]
        return "\n".join([start, *lines])


class Findings:
    """Collects findings. A check that fails does not keep another from being made."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._failed: list[str] = []

    def run(self, name: str, check: Callable[[], T], *, needs: Sequence[str] = (), remedy: str = "") -> T | None:
        """Make a check, unless one that it needs has failed; return what it returns, or `None`."""
        if missing := [need for need in needs if need in self._failed]:
            self._failed.append(name)
            self._add(name, "not run", f"needs {' and '.join(missing)}")
            return None
        try:
            return check()
        except Exception as error:  # whatever a run would end with is a finding, and other checks are still to be made
            kind = "" if isinstance(error, MCPGRPOError) else f"{type(error).__name__}: "
            self.fail(name, f"{kind}{error}", remedy)
            return None

    def ok(self, name: str, found: str) -> None:
        """Note what is right."""
        self._add(name, "ok", found)

    def warn(self, name: str, found: str, remedy: str = "") -> None:
        """Note what a run can live with."""
        self._add(name, "warning", found, remedy)

    def leave(self, name: str, found: str) -> None:
        """Note what only the machine of the run can tell."""
        self._add(name, "left", found)

    def skip(self, name: str, found: str) -> None:
        """Note what was not looked at, since nothing was given to look at."""
        self._add(name, "not run", found)

    def fail(self, name: str, problem: str, remedy: str = "") -> None:
        """Note something that is wrong, unless another check has said the same."""
        self._failed.append(name)
        if not any(problem in one.found for one in self._found if one.status == "wrong"):
            self._add(name, "wrong", problem, remedy or "Do what it says.")

    def block(self, name: str) -> None:
        """Keep checks from being made that need this one, of which another row says what is wrong."""
        self._failed.append(name)

    def has_failed(self, *names: str) -> bool:
        """Return whether one of these checks has failed."""
        return any(name in self._failed for name in names)

    def report(self) -> Report:
        """Return what was found so far."""
        return Report(tuple(self._found))

    def _add(self, name: str, status: Status, found: str, remedy: str = "") -> None:
        self._found.append(Finding(name=name, status=status, found=found, remedy=remedy))
