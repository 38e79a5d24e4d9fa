"""
Recordings of tool calls: made with real servers, played back without them.

A recording is a text file with one JSON object per line. The first line lists the tools, each other line is one call:

```
{"cassette": 1, "mcp_grpo": "0.1.0", "hash": "9f86...", "servers": {"weather": [{"name": "forecast", ...}]}}
{"task": "t1", "attempt": 0, "call": 0, "server": "weather", "tool": "forecast", "arguments": {}, "result": {"text": "sun"}}
```

A call of a `state_tool` also has `after`: a hash of the trajectory's earlier calls to that server that may have changed
something, its set-up included. The first line then names the `state_tools`, and likewise the `setup_tools` and `user_tools`.
A message of a user that is not the task's own is recorded like a call, of the server `(user)`; what that user called is not.
Pictures that tools returned are files in a folder beside the recording (`calls.jsonl` has `calls.images`), named by their hashes.
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self, TextIO, cast, get_args

import anyio
import mcp.types as types

from mcp_grpo.errors import CassetteError, ToolServerError
from mcp_grpo.tools.catalog import Tool
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.images import ImageFolder, after_cut
from mcp_grpo.tools.sessions.server import CallServer
from mcp_grpo.types import ResultKind, ToolResult


logger = logging.getLogger(__name__)

Mode = Literal["record", "replay", "match", "cache"]

VERSION = 1
MAX_SHOWN = 300  # characters of a call's arguments in a message

Listed = Mapping[str, tuple[types.Tool, ...]]
_Ask = Callable[[], Awaitable[ToolResult]]  # calls the server
_Request = tuple[str, str, str, str | None]


class Cassette:
    """
    A recording of the tool calls of a run, to be made or to be played.

    The trajectories of a task are identified by the order in which they begin, and the calls of a trajectory by the order
    in which they are made. A call without an answer in the recording returns a server error, since it is not the policy's
    fault. Secrets of the servers are written as `***`.

    Args:
        path (`str` or `Path`):
            The file.
        mode (`str`):
            `"record"`: servers answer, and everything is written to a new file. `"replay"`: the file answers, and each
            trajectory must make the recorded calls in the recorded order. `"match"`: the file answers calls of the same tool
            with the same arguments, whoever makes them; several answers are played in order, and the last is repeated. A
            state is that of a trajectory that made the same calls to that server, read-only ones aside. `"cache"`: servers
            answer, but a read-only tool (`readOnlyHint`) of a shared server is not asked the same thing twice, in this run
            or in a later one with the same file.

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
        self._images = ImageFolder(self.path.with_suffix(".images"))
        self._configs: dict[str, ServerConfig] = {}
        self._file: TextIO | None = None
        self.listed: dict[str, tuple[types.Tool, ...]] = {}  # the recorded tools of each server; none for a new file
        self.state_tools: dict[str, str] = {}  # by server
        self.setup_tools: dict[str, str] = {}
        self.user_tools: dict[str, list[str]] = {}
        self._hash: str | None = None  # of the recorded tools
        self._is_torn = False
        self._size = 0  # without what is torn
        self._in_order: dict[tuple[str, int, int], tuple[_Call, ToolResult]] = {}
        self._by_request: dict[_Request, deque[ToolResult]] = {}
        self._asking: dict[_Request, anyio.Event] = {}
        if mode == "record":
            self._refuse_to_overwrite()
        elif mode != "cache" or _has_content(self.path):
            self._read()

    @classmethod
    def for_rank(cls, path: str | Path, mode: Mode, rank: int) -> Self:
        """
        Make the cassette of one of several processes, which must not share a file.

        Args:
            path (`str` or `Path`):
                The file of rank 0, such as `calls.jsonl`. That of rank 1 is `calls.rank1.jsonl`.
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
        """Return whether servers answer, and not the file."""
        return self.mode in ("record", "cache")

    def open(self, listed: Listed, configs: Iterable[ServerConfig], catalog_hash: str) -> None:
        """
        Prepare for the calls of a run with these tools. Secrets are those of `configs`; without them, arguments are looked
        up as they are. Raises [`CassetteError`] if the tools do not fit those of the file.
        """
        configs = tuple(configs)
        self._configs = {config.name: config for config in configs}
        if not self.needs_servers:
            self._refuse_without_states()
            return
        if self.mode == "record":
            self._refuse_to_overwrite()
        if self._hash not in (None, catalog_hash):
            raise CassetteError(
                f"The tools of the servers have changed since the cache {str(self.path)!r} was made: their hash was "
                f"{self._hash!r} and is {catalog_hash!r}. Delete the file, or use another one."
            )
        self._file = self._opened()
        if self._hash is None:
            self._hash = catalog_hash
            self.listed = dict(listed)
            self.state_tools = {config.name: config.state_tool for config in configs if config.state_tool is not None}
            self.setup_tools = {config.name: config.setup_tool for config in configs if config.setup_tool is not None}
            self.user_tools = {config.name: list(config.user_tools) for config in configs if config.user_tools}
            self._write_header()

    def wrap(
        self, server: str, call_server: CallServer | None, task_id: str, attempt: int, numbers: Iterator[int]
    ) -> CallServer:
        """
        Wrap one trajectory's calls to a server, or replace them where `call_server` is `None`. `attempt` is the index of the
        trajectory among those of its task, and `numbers` counts its calls to all servers.
        """
        state_tool, changes = self.state_tools.get(server), hashlib.sha256()

        async def answer(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
            call = _Call(
                task=task_id,
                attempt=attempt,
                call=next(numbers),  # before anything is awaited: the calls of a turn run concurrently
                server=server,
                tool=tool.tool,
                arguments=self._hide_secrets(server, dict(arguments)),
                after=changes.hexdigest() if tool.tool == state_tool else None,
            )
            if not tool.is_read_only:
                changes.update(json.dumps(call.request).encode())
            if self.mode == "replay":
                return self._replayed(call)
            if self.mode == "match":
                return self._matched(call)
            assert call_server is not None
            ask = partial(call_server, tool, arguments)
            if self.mode == "record":
                return await self._recorded(call, ask)
            return await (self._cached(call, ask) if self._is_cacheable(tool) else ask())

        return answer

    def close(self) -> None:
        """Close the file. Calls that end later are not recorded."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _hide_secrets(self, server: str, value: Any) -> Any:
        config = self._configs.get(server)
        return value if config is None else config.hide_secrets(value)

    def _is_cacheable(self, tool: Tool) -> bool:
        """Return whether the same call has the same answer: not where each trajectory has its own state."""
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
            return self._without_answer(call, f"it has {num_calls} calls of that attempt, but not this one. {advice}")
        recorded, result = self._in_order[call.place]
        if recorded.request != call.request:
            return self._without_answer(call, f"what was recorded there is {recorded.shown}. {advice}")
        return result

    def _matched(self, call: "_Call") -> ToolResult:
        results = self._by_request.get(call.request)
        if results is None and call.after is not None:
            return self._without_answer(
                call, "no trajectory in it made the same calls to that server. Record one that does."
            )
        if results is None:
            others = sum(request[:2] == call.request[:2] for request in self._by_request)
            return self._without_answer(call, f"it has that tool with {others} other arguments. Record this call.")
        return results.popleft() if len(results) > 1 else results[0]

    async def _cached(self, call: "_Call", ask: _Ask) -> ToolResult:
        request = call.request
        if (under_way := self._asking.get(request)) is not None:
            await under_way.wait()  # trajectories of a group begin alike; if this fails, each asks for itself
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
        if self._file is None:
            return
        text = self._hide_secrets(call.server, result.text)
        hidden = replace(
            result,
            text=text,
            structured=self._hide_secrets(call.server, result.structured),
            images=after_cut(result.images, result.text, text),
        )
        content = {name: value for name, value in asdict(call).items() if name != "after" or value is not None}
        # Of the result, only what differs from its default; the call names the server.
        values = {field: getattr(hidden, field.name) for field in fields(hidden) if field.name != "server"}
        content["result"] = {field.name: value for field, value in values.items() if value != field.default}
        if hidden.images:
            content["result"]["images"] = self._images.keep(hidden.images)
        self._write(content)

    def _write_header(self) -> None:
        servers = {
            server: [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
            for server, tools in self.listed.items()
        }
        header = {"cassette": VERSION, "mcp_grpo": version("mcp-grpo"), "hash": self._hash, "servers": servers}
        named = {"state_tools": self.state_tools, "setup_tools": self.setup_tools, "user_tools": self.user_tools}
        self._write(header | {name: tools for name, tools in named.items() if tools})

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            # ASCII, because JSON may hold halves of surrogate pairs, which UTF-8 cannot. Flushed, so that a killed run loses
            # at most a line.
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
                f"The recording {str(self.path)!r} cannot be written: {error.strerror}. Use another file."
            ) from error

    def _refuse_to_overwrite(self) -> None:
        if _has_content(self.path):
            raise CassetteError(
                f"There is a recording {str(self.path)!r} already. Delete it, use another file, or play it with mode "
                f"'replay' or 'match'."
            )

    def _refuse_without_states(self) -> None:
        for name, config in self._configs.items():
            if name in self.listed and config.state_tool not in (None, self.state_tools.get(name)):
                raise CassetteError(
                    f"The recording {str(self.path)!r} was made without the `state_tool` {config.state_tool!r} of server "
                    f"{name!r}. Record again, or remove the option."
                )

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        self._is_torn = True
                        logger.warning(
                            "The last line of the recording %r is cut off, as after a killed run, and is ignored. If it is "
                            "complete, end it with a newline.",
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
        if self._hash is None:
            raise CassetteError(
                f"The recording {str(self.path)!r} holds nothing, not even a complete first line. Delete it and record again."
            )

    def _read_line(self, line: bytes, number: int) -> None:
        try:
            content = json.loads(line)
            if self._hash is None:
                self._read_header(content)
            else:
                call, result = _read_call(content, self._images)
                if self.mode == "replay":
                    self._in_order[call.place] = (call, result)
                elif self.mode == "match" or _is_kept(result):
                    self._by_request.setdefault(call.request, deque()).append(result)
        except CassetteError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CassetteError(
                f"Line {number} of the recording {str(self.path)!r} cannot be parsed: {type(error).__name__}: {error}. "
                f"It begins with {line[:60]!r}. Fix it if it was edited, or record again."
            ) from error

    def _read_header(self, content: Any) -> None:
        header = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        found = header.get("cassette")
        if found is None:
            raise CassetteError(
                f"The file {str(self.path)!r} is not a recording of tool calls: its first line is not a header with "
                f"a version. Check the path."
            )
        if found != VERSION:
            raise CassetteError(
                f"The recording {str(self.path)!r} has version {found!r}; this version of mcp_grpo reads {VERSION}. "
                f"Use the mcp_grpo that made it, {header.get('mcp_grpo')!r}, or record again."
            )
        for server, tools in header["servers"].items():
            self.listed[server] = tuple(types.Tool.model_validate(tool) for tool in tools)
        self.state_tools = dict(header.get("state_tools", {}))
        self.setup_tools = dict(header.get("setup_tools", {}))
        self.user_tools = dict(header.get("user_tools", {}))
        self._hash = header["hash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Any other line, without its result."""

    task: str
    attempt: int
    call: int
    server: str
    tool: str
    arguments: dict[str, Any]
    after: str | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        """Position in a run."""
        return self.task, self.attempt, self.call

    @property
    def request(self) -> _Request:
        """Server, tool, arguments and earlier changes: what it asks for, as a key."""
        return self.server, self.tool, json.dumps(self.arguments, sort_keys=True, ensure_ascii=False), self.after

    @property
    def shown(self) -> str:
        """Description of what it asks for."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        arguments = arguments if len(arguments) <= MAX_SHOWN else f"{arguments[:MAX_SHOWN]}..."
        return f"`{self.tool}` of server {self.server!r} with {arguments}"


def _read_call(content: dict[str, Any], images: ImageFolder) -> tuple[_Call, ToolResult]:
    result: dict[str, Any] = content.pop("result")
    call = _Call(**content)
    result["kind"] = ResultKind(result.get("kind", ResultKind.OK))
    result["repairs"] = tuple(result.get("repairs", ()))
    result["images"] = images.take(result.get("images", ()))
    return call, ToolResult(**result, server=call.server)


def _is_kept(result: ToolResult) -> bool:
    """Return whether a cache may repeat this answer: it is the tool's own, not a failure on the way."""
    return result.kind in (ResultKind.OK, ResultKind.TOOL_ERROR)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
