"""Run chains on the servers, and keep what they come to only where it is the same twice."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from mcp_grpo.synth.chains import Chain, Ref, Step
from mcp_grpo.synth.readings import Reading, read
from mcp_grpo.synth.selectors import NotThereError
from mcp_grpo.types import ToolResult


EVENTS = re.compile(r"creat|modif|access|update|birth|chang|written|[acm]time", re.IGNORECASE)
_NOT_FOUND = re.compile(
    r"\bno\b|\bnot\b|n't\b|unknown|invalid|missing|absent|does not exist|denied|cannot|unable|ENOENT|error",
    re.IGNORECASE,
)

_REFUSED = re.compile(r"\bdenied\b|\boutside\b|\bnot (?:allowed|permitted)\b|\bforbidden\b", re.IGNORECASE)


class CallTool(Protocol):
    """Something that calls tools."""

    async def __call__(self, tool: str, arguments: Mapping[str, Any], /) -> ToolResult | None: ...


class DroppedError(Exception):
    """The chain makes no sound task; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A chain that was run: its calls with all values in place, their results, and what they came to."""

    chain: Chain
    calls: tuple[Step, ...]
    texts: tuple[str, ...]
    readings: tuple[Reading, ...]
    value: Any = None  # of the answer; for states, what each of the reads returned
    errors: tuple[bool, ...] = ()  # for states, whether that was an error

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what must be the same whenever the chain is run."""
        return [(call.tool, dict(call.arguments)) for call in self.calls], self.value  # pyright: ignore[reportReturnType]


async def run_chain(chain: Chain, call: CallTool) -> Run:
    """Run the calls of a chain. Raises [`DroppedError`] where they do not come to what the chain says."""
    calls: list[Step] = []
    texts: list[str] = []
    readings: list[Reading] = []
    for number, step in enumerate(chain.steps):
        arguments = {name: _resolved(value, readings) for name, value in step.arguments.items()}
        result = await _answered(call, step.tool, arguments)
        is_absence = chain.outcome == "nothing" and number == len(chain.steps) - 1 and chain.missing is None
        if result.is_error != step.fails and not (is_absence and result.is_error):
            raise DroppedError("a call failed" if result.is_error else "a call that should fail worked")
        if step.fails and not _explains(result.text, step, chain):
            raise DroppedError("the error does not say what was wrong")
        calls.append(Step(tool=step.tool, arguments=arguments, fails=result.is_error))
        texts.append(result.text)
        readings.append(read(result.text))
    value: Any = None
    shown: list[ToolResult] = []
    if chain.outcome == "state":
        shown = [await _answered(call, one.tool, one.arguments) for one in chain.reads]
        value = [result.text for result in shown]
    elif chain.outcome == "nothing":
        _check_absence(chain, calls[-1], texts[-1], readings[-1])
    else:
        value = _answer(chain, readings)
    return Run(
        chain=chain,
        calls=tuple(calls),
        texts=tuple(texts),
        readings=tuple(readings),
        value=value,
        errors=tuple(result.is_error for result in shown),
    )


def check_present(made: Run, now: datetime | None = None) -> None:
    """
    Refuse a chain one of whose results tells the present day or hour: what it says is another tomorrow. When a thing was made or
    changed is a fact about the thing.
    """
    now = now or datetime.now(UTC)
    for reading in made.readings:
        for key, value in _leaves(reading.value, ""):
            if tells_present(value, now) and (not EVENTS.search(key) or value == made.value):
                raise DroppedError("the result tells the present time")


def tells_present(value: Any, now: datetime) -> bool:
    """Tell whether a value has the present day in it, in any time zone, or the seconds since 1970."""
    days = [now + timedelta(days=days) for days in (-1, 0, 1)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return any(abs(value / factor - now.timestamp()) < 2 * 86400 for factor in (1, 1000))
    text = str(value)
    forms = (
        "%Y-%m-%d",
        "%Y/%m/%d",
        "%d.%m.%Y",
        "%m/%d/%Y",
        "%d/%m/%Y",
        "%a %b %d",
        "%a, %d %b %Y",
        "%d %b %Y",
        "%B %d, %Y",
    )
    if any(day.strftime(form) in text for day in days for form in forms):
        return True
    clock = re.search(r"(?<![\d:.])([01]?\d|2[0-3]):([0-5]\d):[0-5]\d(?![\d:])", text)
    minutes = int(clock[1]) * 60 + int(clock[2]) if clock else 0
    return clock is not None and abs(minutes - now.hour * 60 - now.minute) <= 2


async def run_all(
    chains: Sequence[Chain],
    call: CallTool,
    note: Callable[[Chain, str], None],
    say: Callable[[str], None] = lambda text: None,
) -> list[Run]:
    """Run chains one after another; `note` is told why one is dropped."""
    made: list[Run] = []
    for number, chain in enumerate(chains):
        say(f"{number} of {len(chains)} chains run, {len(made)} of them come to something ...")
        try:
            found = await run_chain(chain, call)
            check_present(found)
        except DroppedError as error:
            note(chain, str(error))
        else:
            made.append(found)
    return made


async def run_again(
    made: Sequence[Run],
    call: CallTool,
    note: Callable[[Chain, str], None],
    say: Callable[[str], None] = lambda text: None,
) -> list[Run]:
    """Run chains a second time, in the opposite order, and keep those that come to the same."""
    stable: dict[int, Run] = {}
    for number in reversed(range(len(made))):
        say(f"{len(made) - number} of {len(made)} chains run again ...")
        first = made[number]
        try:
            second = await run_chain(first.chain, call)
            if not is_same(first, second):
                raise DroppedError("it came to something else the second time")
        except DroppedError as error:
            note(first.chain, str(error))
        else:
            stable[number] = first
    return [stable[number] for number in sorted(stable)]


def is_same(one: Run, other: Run) -> bool:
    """Tell whether two runs of a chain made the same calls and came to the same."""
    return one.key == other.key


async def _answered(call: CallTool, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
    result = await call(tool, arguments)
    if result is None:
        raise DroppedError("no more calls may be made")
    if result.kind.is_server_fault:
        raise DroppedError("the server failed")
    return result


def _resolved(value: Any, readings: Sequence[Reading]) -> Any:
    if not isinstance(value, Ref):
        return value
    try:
        found = value.selector.find(readings[value.step])
    except NotThereError:
        raise DroppedError("a value that the next call needs is not there") from None
    found = f"{value.prefix}{found}" if value.prefix else found
    return [found] if value.is_listed else found


def _answer(chain: Chain, readings: Sequence[Reading]) -> Any:
    assert chain.answer is not None
    answer = (
        chain.answer.at(_resolved(chain.answer.equals, readings)) if chain.answer.equals is not None else chain.answer
    )
    try:
        last = answer.find(readings[-1])
        if chain.outcome == "value":
            return round(last, chain.digits) if chain.digits is not None else last
        first = answer.find(readings[-2])
    except NotThereError:
        raise DroppedError("the answer is not there, or not the only one") from None
    if not isinstance(first, int | float) or not isinstance(last, int | float) or first == last:
        raise DroppedError("there is no difference")
    return round(abs(first - last), 6)


def _check_absence(chain: Chain, call: Step, text: str, reading: Reading) -> None:
    if chain.missing is not None:
        return
    if _REFUSED.search(text):
        raise DroppedError("the tool refuses to look, which does not show that there is no such thing")
    is_told = call.fails and _NOT_FOUND.search(text) is not None
    is_empty = not call.fails and (
        reading.is_empty or (len(text) < 200 and re.search(r"\bno\b|\bnot\b|\bnone\b", text, re.IGNORECASE))
    )
    if not is_told and not is_empty:
        raise DroppedError("the tool does not say that there is no such thing")


def _explains(text: str, step: Step, chain: Chain) -> bool:
    """Tell whether an error names the value that was wrong."""
    wrong = [str(value).rsplit("/", 1)[-1] for value in step.arguments.values() if isinstance(value, str)]
    return _NOT_FOUND.search(text) is not None and (any(value in text for value in wrong) or len(text) > 20)


def _leaves(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def as_text(value: Any) -> str:
    """Return a value as a final message has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
