"""Call the tools of open servers: only those that may be called, each call once, and never a broken server for long."""

from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from mcp_grpo.errors import ToolServerError
from mcp_grpo.synth.chains import call_key
from mcp_grpo.tools import Lease, ToolPool
from mcp_grpo.tools.catalog import Tool
from mcp_grpo.types import ResultKind, Task, ToolCall, ToolResult


NOT_ALLOWED = "it may change things, and `--allow-writes` was not given"
MAX_FAULTS = 3  # of a tool's server in a row, before the tool is left alone


def callable_tools(pool: ToolPool, *, allow_writes: bool) -> tuple[list[Tool], dict[str, str]]:
    """
    Return the tools that may be called, and for each of the others why not.

    A tool that does not say that it only reads is taken for one that changes things: it is called only with `allow_writes`, and only
    on a server of which each trajectory has one to itself.
    """
    isolated = {config.name for config in pool.configs if config.isolation != "shared" or config.is_made_per_task}
    tools: list[Tool] = []
    refused: dict[str, str] = {}
    for tool in pool.catalog.tools:
        if "deprecated" in tool.description.lower():
            refused[tool.name] = "it is deprecated"
        elif tool.is_read_only or (allow_writes and tool.server in isolated):
            tools.append(tool)
        elif not allow_writes:
            refused[tool.name] = NOT_ALLOWED
        else:
            refused[tool.name] = "it may change things, and its server is shared: set its `isolation`"
    return tools, refused


class Caller:
    """One trajectory's use of the servers, which goes on with a new session where one has broken."""

    def __init__(self, pool: ToolPool, tools: Sequence[Tool], max_calls: int) -> None:
        self.num_calls = 0
        self._pool = pool
        self._tools = {tool.name: tool for tool in tools}
        self._left = max_calls
        self._stack = AsyncExitStack()
        self._leases: dict[str, Lease] = {}
        self._known: dict[str, ToolResult] = {}
        self._faults: Counter[str] = Counter()

    @property
    def is_spent(self) -> bool:
        """Tell whether no more calls may be made."""
        return self._left <= 0

    @property
    def broken(self) -> list[str]:
        """Return the tools that were given up."""
        return [name for name, count in self._faults.items() if count >= MAX_FAULTS]

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        """Call a tool, or return what the same call returned before; `None` where nothing can be called any more."""
        key = call_key(tool, arguments)
        if key not in self._known:
            result = await self.call_anew(tool, arguments)
            if result is None or result.kind.is_server_fault:
                return result
            self._known[key] = result
        return self._known[key]

    async def call_anew(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        """Call a tool whatever it returned before."""
        if self.is_spent or self._faults[tool] >= MAX_FAULTS:
            return None
        self._left -= 1
        self.num_calls += 1
        server = self._tools[tool].server
        try:
            lease = await self._lease(server)
            result = await lease.call(ToolCall(name=tool, arguments=dict(arguments)))
        except ToolServerError as error:
            result = ToolResult(text=str(error), kind=ResultKind.SERVER_ERROR)
        if result.kind.is_server_fault:
            self._faults[tool] += 1
            self._leases.pop(server, None)  # given back at the end
            return result
        self._faults[tool] = 0
        return result

    async def close(self) -> None:
        """Give all sessions back."""
        await self._stack.aclose()

    async def _lease(self, server: str) -> Lease:
        if server not in self._leases:
            names = [tool.name for tool in self._tools.values() if tool.server == server]
            task = Task(task_id=f"synth-{server}", prompt=(), servers=(server,), tools=tuple(names))
            self._leases[server] = await self._stack.enter_async_context(self._pool.lease(task))
        return self._leases[server]


@asynccontextmanager
async def calling(pool: ToolPool, tools: Sequence[Tool], max_calls: int) -> AsyncGenerator[Caller, None]:
    """Give a fresh use of the servers, and end it."""
    caller = Caller(pool, tools, max_calls)
    try:
        yield caller
    finally:
        await caller.close()
