"""
Ask how many trajectories per second can begin in a state of their own.

    python benchmarks/start_states.py [--number 500] [--workers 64]

Each trajectory gets a server in the state that its task names, reads from it, and gives it back. A lane is one way to that:

- `made, functions`: a function makes a `function_server` for each trajectory, in the trainer's process
- `made, MCPServer`: the same with an `MCPServer`, whose tools the SDK inspects each time
- `set up, stdio`: processes with a `setup_tool` and a `reset_tool`, leased one after the other (`--processes`)

All have the same three tools. The last line says how many times as many begin per second in process as by stdio.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.types import Tool
from rich.console import Console

from mcp_grpo.environments import function_server
from mcp_grpo.tools import ToolPool
from mcp_grpo.tools.setup import start_states
from mcp_grpo.types import Task, ToolCall


TEXT = {"type": "string"}
TOOLS = [
    Tool(name="read", description="Read a file.", input_schema={"type": "object", "properties": {"name": TEXT}}),
    Tool(
        name="write",
        description="Write a file.",
        input_schema={"type": "object", "properties": {"name": TEXT, "text": TEXT}},
    ),
    Tool(name="content", description="Return all files.", input_schema={"type": "object", "properties": {}}),
]


def files_of(task: Task | None) -> dict[str, str]:
    """Return the files that a task begins with."""
    return dict(start_states(task).get("files", {}).get("files", {}))


def make_functions(task: Task | None) -> Any:
    """Make the server of plain functions."""
    files = files_of(task)

    def call(name: str, arguments: Mapping[str, Any]) -> str:
        if name == "read":
            return files[arguments["name"]]
        if name == "write":
            files[arguments["name"]] = arguments["text"]
        return json.dumps(files)

    return function_server("files", TOOLS, call)


def make_server(task: Task | None, *, is_filled: bool = False) -> MCPServer:
    """Make the server with the SDK's decorators; one that `is_filled` has tools to begin and to forget."""
    files, server = files_of(task), MCPServer("files", log_level="ERROR")

    @server.tool()
    async def read(name: str) -> str:
        """Read a file."""
        return files[name]

    @server.tool()
    async def write(name: str, text: str) -> str:
        """Write a file."""
        files[name] = text
        return json.dumps(files)

    @server.tool()
    async def content() -> str:
        """Return all files."""
        return json.dumps(files)

    if is_filled:

        @server.tool(name="fill")
        async def fill(files: dict[str, str]) -> str:
            """Begin with these files."""
            held.update(files)
            return "filled"

        @server.tool(name="empty")
        async def empty() -> str:
            """Forget the files."""
            held.clear()
            return "empty"

    held = files
    return server


async def rate(entry: Mapping[str, Any], number: int, workers: int) -> float:
    """Return how many trajectories begin per second."""
    room = anyio.CapacityLimiter(workers)

    async def begin(pool: ToolPool, name: str) -> None:
        setup = {"files": {"files": {"a.txt": name}}}
        task = Task(task_id=name, prompt=({"role": "user", "content": "?"},), metadata={"setup": setup})
        async with room, pool.lease(task) as lease:
            found = await lease.call(ToolCall(name="read", arguments={"name": "a.txt"}))
            assert found.text == name, found

    async with ToolPool({"files": entry}) as pool:
        await begin(pool, "first")
        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for index in range(number):
                group.start_soon(begin, pool, str(index))
        return number / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=500, help="trajectories of a lane")
    parser.add_argument("--workers", type=int, default=64, help="trajectories at a time")
    parser.add_argument("--processes", type=int, default=8, help="processes by stdio")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        make_server(None, is_filled=True).run("stdio")
        return
    options = {"isolation": "exclusive", "setup_tool": "fill", "reset_tool": "empty", "pool_size": arguments.processes}
    process = {"command": sys.executable, "args": [str(Path(__file__).resolve()), "--serve"], "x-mcp-grpo": options}
    lanes = {
        "made, functions": {"server": make_functions},
        "made, MCPServer": {"server": make_server},
        "set up, stdio": process,
    }
    rates, console = dict[str, float](), Console()
    for name, entry in lanes.items():
        rates[name] = anyio.run(rate, entry, arguments.number, arguments.workers)
        console.print(f"{name:16} {rates[name]:8.0f} start states per second")
    console.print(f"in process {rates['made, functions'] / rates['set up, stdio']:.1f} times as many as by stdio")


if __name__ == "__main__":
    main()
