"""Opens a pool on the misbehaving server, has it start a process and a daemon, says so, and leaves in a given way."""

import os
import signal
import sys
import time
import types
from pathlib import Path

import anyio
import psutil


ROOT = Path(__file__).parents[2]

# As in a terminal, also where the tests run in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

package = types.ModuleType("mcp_grpo")  # in place of the real one, which takes long to import
package.__path__ = [str(ROOT / "mcp_grpo")]
sys.modules["mcp_grpo"] = package

from mcp_grpo.tools import ServerConfig, ToolPool  # noqa: E402
from mcp_grpo.types import ToolCall  # noqa: E402


ROGUE = str(ROOT / "tests" / "servers" / "rogue.py")


def rogue(name: str) -> ServerConfig:
    return ServerConfig(name=name, transport="stdio", command=sys.executable, args=(ROGUE,), protocol="legacy")


async def start_grandchild(pool: ToolPool) -> None:
    for name in ("grandchild", "daemon"):
        result = await pool.call(ToolCall(name=name, arguments={}))
        assert not result.is_error, result


async def main(how: str) -> None:
    async with ToolPool([rogue("first")]) as pool:
        await start_grandchild(pool)
        if how == "fork" and os.fork() == 0:
            time.sleep(1000)
        if how == "restart":
            (watchdog,) = (
                child for child in psutil.Process().children() if child.cmdline()[-1] == "mcp_grpo watchdog"
            )
            watchdog.kill()
            watchdog.wait(5)
            async with ToolPool([rogue("second")]) as other:
                await start_grandchild(other)
                await leave(how)
        await leave(how)


async def leave(how: str) -> None:
    os.write(1, b"ready\n")
    match how:
        case "raise":
            sys.stdin.readline()
            raise KeyError("mine")
        case "exit":
            sys.stdin.readline()
            sys.exit(3)
        case "_exit":
            sys.stdin.readline()
            os._exit(3)
        case _:
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
