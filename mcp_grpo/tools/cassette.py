"""
Recordings of tool calls: made with real servers, played back without them.

A recording is a text file with one JSON object per line. The first line says which tools there were, each other line is
one call:

```
{"cassette": 1, "mcp_grpo": "0.1.0", "hash": "9f86...", "servers": {"weather": [{"name": "forecast", ...}]}}
{"task": "t1", "attempt": 0, "call": 0, "server": "weather", "tool": "forecast", "arguments": {}, "result": {"text": "sun"}}
```

A call of a `state_tool` also says what it came `after`: a hash of the trajectory's calls of that server that may have changed
something. The first line then names the `state_tools`.
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self, TextIO, cast, get_args

import anyio
import mcp.types as types

from mcp_grpo.errors import CassetteError, ToolServerError
from mcp_grpo.tools.catalog import Tool
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.seat import Seat
from mcp_grpo.types import ResultKind, ToolResult


logger = logging.getLogger(__name__)

Mode = Literal["record", "replay", "match", "cache"]

VERSIONS = (1,)  # that can be read; the last one is written
MAX_SHOWN = 300  # characters of a call's arguments in a message

Listed = Mapping[str, tuple[types.Tool, ...]]
_Ask = Callable[[], Awaitable[ToolResult]]  # calls the server
_Request = tuple[str, str, str, str | None]


class Cassette:
    """
    A recording of the tool calls of a run, to be made or to be played.

    The trajectories of a task are told apart by the order in which they begin, and the calls of a trajectory by the order
    in which they are made. A call that has no answer in the recording comes back as a server error: that is our fault,
    not the policy's. Secrets of the servers are written as `***`.

    Args:
        path (`str` or `Path`):
            The file.
        mode (`str`):
            `"record"`: servers answer, and all is written to a new file. `"replay"`: the file answers, and each trajectory
            must make the calls that were recorded, in that order. `"match"`: the file answers calls of the same tool with
            the same arguments, whoever makes them; several answers are played in their order, and the last is repeated. A
            state is that of a trajectory that made the same calls of that server, those that only read left out.
            `"cache"`: servers answer, but a tool of a shared server that says that it changes nothing (`readOnlyHint`) is
            not asked the same thing twice, in this run or in a later one with the same file.

    Example:

    ```python
    cassette = Cassette("calls.jsonl", "record")
    async with ToolPool("servers.json", cassette=cassette) as pool:
        ...
    ```
    """

    def __init__(self, path: str | Path, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise CassetteError(f"The mode of a cassette must be one of {get_args(Mode)}, got {mode!r}.")
        self.path = Path(path)
        self.mode: Mode = mode
        self._configs: dict[str, ServerConfig] = {}
        self._file: TextIO | None = None
        self._header: _Header | None = None
        self._is_torn = False
        self._size = 0  # without what is torn
        self._in_order: dict[tuple[str, int, int], tuple[_Call, ToolResult]] = {}
        self._by_request: dict[_Request, deque[ToolResult]] = {}
        self._asking: dict[_Request, anyio.Event] = {}
        if mode == "record":
            self._refuse_to_overwrite()
        elif mode != "cache" or _is_filled(self.path):
            self._read()

    @classmethod
    def for_rank(cls, path: str | Path, mode: Mode, rank: int) -> Self:
        """
        The cassette of one of several processes, which must not share a file.

        Args:
            path (`str` or `Path`):
                The file of rank 0, such as `calls.jsonl`. That of rank 1 is then `calls.rank1.jsonl`.
            mode (`str`):
                See [`Cassette`].
            rank (`int`):
                Index of the process.

        Returns:
            [`Cassette`]: Its cassette.
        """
        path = Path(path)
        return cls(path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}"), mode)

    @property
    def needs_servers(self) -> bool:
        """Whether servers answer, or else the file."""
        return self.mode in ("record", "cache")

    @property
    def listed(self) -> dict[str, tuple[types.Tool, ...]]:
        """The tools of each server at the time of the recording; none for a file that is still to be made."""
        return dict(self._header.servers) if self._header is not None else {}

    @property
    def state_tools(self) -> dict[str, str]:
        """The `state_tool` of each server that had one at the time of the recording."""
        return dict(self._header.state_tools) if self._header is not None else {}

    def open(self, listed: Listed, configs: Iterable[ServerConfig], catalog_hash: str) -> None:
        """
        Make ready for the calls of a run.

        Args:
            listed (`Mapping[str, tuple[mcp.types.Tool, ...]]`):
                The tools of each server.
            configs (`Iterable[ServerConfig]`):
                The servers, for their secrets. When the file answers they may be left out; arguments are then looked up
                as they are.
            catalog_hash (`str`):
                What [`Catalog.hash`] says of the tools. Raises [`CassetteError`] if a cache was made with other tools, or a
                recording without a `state_tool` that a server has now.
        """
        configs = tuple(configs)
        self._configs = {config.name: config for config in configs}
        if not self.needs_servers:
            self._refuse_without_states()
            return
        if self.mode == "record":
            self._refuse_to_overwrite()
        if self._header is not None and self._header.hash != catalog_hash:
            raise CassetteError(
                f"The tools of the servers have changed since the cache {str(self.path)!r} was made: their hash was "
                f"{self._header.hash!r} and is {catalog_hash!r}. Delete the file, or name another one."
            )
        self._file = self._opened()
        if self._header is None:
            state_tools = {config.name: config.state_tool for config in configs if config.state_tool is not None}
            self._header = _Header(hash=catalog_hash, servers=dict(listed), state_tools=state_tools)
            self._write(self._header.as_json())

    def seat(self, server: str, seat: Seat | None, task_id: str, attempt: int, counter: Iterator[int]) -> Seat:
        """
        A trajectory's seat at a server, with the recording in between or in its place.

        Args:
            server (`str`):
                Name of the server.
            seat ([`Seat`], *optional*):
                The seat at the real server, where there is one.
            task_id (`str`):
                The task of the trajectory.
            attempt (`int`):
                Index of the trajectory among those of its task, from 0.
            counter (`Iterator[int]`):
                Numbers the calls of the trajectory, from 0; all its seats share one.

        Returns:
            [`Seat`]: What the trajectory calls.
        """

        state_tool, changes = self.state_tools.get(server), hashlib.sha256()

        async def answer(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
            is_state = tool.tool == state_tool
            call = _Call(
                task=task_id,
                attempt=attempt,
                call=next(counter),  # before anything is awaited: the calls of a turn run at the same time
                server=server,
                tool=tool.tool,
                arguments=self._hide_secrets(server, dict(arguments)),
                after=changes.hexdigest() if is_state else None,
            )
            if not tool.is_read_only:
                changes.update(json.dumps(call.request).encode())

            def ask() -> Awaitable[ToolResult]:
                assert seat is not None
                return seat.call(tool, arguments)

            return await self._answer(call, tool, ask)

        return _CassetteSeat(answer)

    def close(self) -> None:
        """Close the file. Calls that end after this are not recorded."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _hide_secrets(self, server: str, value: Any) -> Any:
        config = self._configs.get(server)
        return value if config is None else config.hide_secrets(value)

    async def _answer(self, call: "_Call", tool: Tool, ask: _Ask) -> ToolResult:
        match self.mode:
            case "record":
                return await self._recorded(call, ask)
            case "replay":
                return self._replayed(call)
            case "match":
                return self._matched(call)
            case "cache":
                return await (self._cached(call, ask) if self._is_cached(tool) else ask())

    def _is_cached(self, tool: Tool) -> bool:
        """Whether the same question has the same answer: not if trajectories have each their own state to read."""
        config = self._configs.get(tool.server)
        return tool.is_read_only and (config is None or config.isolation == "shared")

    async def _recorded(self, call: "_Call", ask: _Ask) -> ToolResult:
        try:
            result = await ask()
        except ToolServerError as error:
            self._write_call(call, ToolResult(text=str(error), kind=ResultKind.SERVER_ERROR))
            raise
        self._write_call(call, result)
        return result

    def _replayed(self, call: "_Call") -> ToolResult:
        advice = "Replay with the policy, the seed and the settings of the recording, or use mode 'match'."
        if call.place not in self._in_order:
            num_calls = sum(place[:2] == call.place[:2] for place in self._in_order)
            return self._without_answer(call, f"it has {num_calls} calls of that attempt, and not this one. {advice}")
        recorded, result = self._in_order[call.place]
        if recorded.request != call.request:
            return self._without_answer(call, f"what was recorded there is {recorded.shown}. {advice}")
        return result

    def _matched(self, call: "_Call") -> ToolResult:
        results = self._by_request.get(call.request)
        if results is None and call.after is not None:
            return self._without_answer(
                call, "no trajectory in it made the same calls of that server. Record such a one."
            )
        if results is None:
            others = sum(request[:2] == call.request[:2] for request in self._by_request)
            return self._without_answer(call, f"it has that tool with {others} other arguments. Record such a call.")
        return results.popleft() if len(results) > 1 else results[0]

    async def _cached(self, call: "_Call", ask: _Ask) -> ToolResult:
        request = call.request
        if (under_way := self._asking.get(request)) is not None:
            await under_way.wait()  # trajectories of a group begin alike; if this one fails, each asks for itself
        if (results := self._by_request.get(request)) is not None:
            return results[-1]
        answered = self._asking[request] = anyio.Event()
        try:
            result = await ask()
            if _is_kept(result):
                self._write_call(call, result)
                self._by_request[request] = deque([result])
        finally:
            self._asking.pop(request, None)
            answered.set()
        return result

    def _without_answer(self, call: "_Call", why: str) -> ToolResult:
        text = (
            f"The recording {str(self.path)!r} has no answer to call {call.call} of attempt {call.attempt} at task "
            f"{call.task!r}, which is {call.shown}: {why}"
        )
        return ToolResult(text=text, kind=ResultKind.SERVER_ERROR, server=call.server)

    def _write_call(self, call: "_Call", result: ToolResult) -> None:
        hidden = replace(
            result,
            text=self._hide_secrets(call.server, result.text),
            structured=self._hide_secrets(call.server, result.structured),
        )
        self._write(call.as_json() | {"result": _result_as_json(hidden)})

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            # In ASCII, because JSON may hold halves of surrogate pairs, which UTF-8 cannot. Flushed, so that a run that is
            # killed loses no more than a line.
            self._file.write(json.dumps(content) + "\n")
            self._file.flush()

    def _opened(self) -> TextIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._is_torn:
                os.truncate(self.path, self._size)
            return self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise CassetteError(
                f"The recording {str(self.path)!r} cannot be written: {error.strerror}. Name a file that can."
            ) from error

    def _refuse_to_overwrite(self) -> None:
        if _is_filled(self.path):
            raise CassetteError(
                f"There is a recording {str(self.path)!r} already. Delete it, name another file, or play it with mode "
                f"'replay' or 'match'."
            )

    def _refuse_without_states(self) -> None:
        for name, config in self._configs.items():
            if (
                config.state_tool is not None
                and name in self.listed
                and config.state_tool != self.state_tools.get(name)
            ):
                raise CassetteError(
                    f"The recording {str(self.path)!r} was made without the `state_tool` {config.state_tool!r} of server "
                    f"{name!r}. Record anew, or leave the option out."
                )

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        self._is_torn = True
                        logger.warning(
                            "The last line of the recording %r is cut off, as when a run is killed, and is left out. If it "
                            "is whole, end it with a newline.",
                            str(self.path),
                        )
                        break
                    self._read_line(line, number)
                    self._size += len(line)
        except OSError as error:
            raise CassetteError(
                f"The recording {str(self.path)!r} cannot be read: {error.strerror}. Check the path, and make the recording "
                f"first, with mode 'record'. Each process of a run has a file of its own."
            ) from error
        if self._header is None:
            raise CassetteError(
                f"The recording {str(self.path)!r} holds nothing, not even a whole first line. Delete it and record anew."
            )

    def _read_line(self, line: bytes, number: int) -> None:
        try:
            content = json.loads(line)
            if self._header is None:
                self._header = self._read_header(content)
            else:
                call, result = _read_call(content)
                if self.mode == "replay":
                    self._in_order[call.place] = (call, result)
                elif self.mode == "match" or _is_kept(result):
                    self._by_request.setdefault(call.request, deque()).append(result)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CassetteError):
                raise
            raise CassetteError(
                f"Line {number} of the recording {str(self.path)!r} cannot be understood: {type(error).__name__}: {error}. "
                f"It begins with {line[:60]!r}. Mend it if it was edited, or record anew."
            ) from error

    def _read_header(self, content: Any) -> "_Header":
        header = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        found = header.get("cassette")
        if found is None:
            raise CassetteError(
                f"The file {str(self.path)!r} is not a recording of tool calls: its first line is no header with a "
                f"version. Check the path."
            )
        if found not in VERSIONS:
            raise CassetteError(
                f"The recording {str(self.path)!r} is of version {found!r}; this version of mcp_grpo knows {VERSIONS}. "
                f"Use the one that made it, which is {header.get('mcp_grpo')!r}, or record anew."
            )
        return _Header.from_json(header)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The first line."""

    hash: str
    servers: dict[str, tuple[types.Tool, ...]]
    state_tools: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        servers = {
            server: [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
            for server, tools in self.servers.items()
        }
        header = {"cassette": VERSIONS[-1], "mcp_grpo": version("mcp-grpo"), "hash": self.hash, "servers": servers}
        return header | ({"state_tools": self.state_tools} if self.state_tools else {})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "_Header":
        servers = {
            server: tuple(types.Tool.model_validate(tool) for tool in tools)
            for server, tools in content["servers"].items()
        }
        return cls(hash=content["hash"], servers=servers, state_tools=dict(content.get("state_tools", {})))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Any other line, but for the result."""

    task: str
    attempt: int
    call: int
    server: str
    tool: str
    arguments: dict[str, Any]
    after: str | None = None

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        if self.after is None:
            del content["after"]
        return content

    @property
    def place(self) -> tuple[str, int, int]:
        """Where in a run it was made."""
        return self.task, self.attempt, self.call

    @property
    def request(self) -> _Request:
        """What it asks for."""
        return self.server, self.tool, json.dumps(self.arguments, sort_keys=True, ensure_ascii=False), self.after

    @property
    def shown(self) -> str:
        """What it asks for, in words."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        arguments = arguments if len(arguments) <= MAX_SHOWN else f"{arguments[:MAX_SHOWN]}..."
        return f"`{self.tool}` of server {self.server!r} with {arguments}"


@dataclass(frozen=True, slots=True)
class _CassetteSeat:
    answer: Callable[[Tool, Mapping[str, Any]], Awaitable[ToolResult]]

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """See [`Seat.call`]."""
        return await self.answer(tool, arguments)


def _read_call(content: dict[str, Any]) -> tuple[_Call, ToolResult]:
    result: dict[str, Any] = content.pop("result")
    call = _Call(**content)
    result["kind"] = ResultKind(result.get("kind", ResultKind.OK))
    result["repairs"] = tuple(result.get("repairs", ()))
    return call, ToolResult(**result, server=call.server)


def _result_as_json(result: ToolResult) -> dict[str, Any]:
    """All that is not as usual. The server is named by the call."""
    values = {field: getattr(result, field.name) for field in fields(result) if field.name != "server"}
    return {field.name: value for field, value in values.items() if value != field.default}


def _is_kept(result: ToolResult) -> bool:
    """Whether a cache may give this answer again: it is the tool's own, and not a failure on the way to it."""
    return result.kind in (ResultKind.OK, ResultKind.TOOL_ERROR)


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
