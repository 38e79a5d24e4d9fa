"""
An MCP server over stdio whose answers to tool calls come late: `late.py MEAN COMMAND...` starts the real one and stands in between.

Latencies are log-normal with the given mean in seconds, cut at 3 s, and one call in a hundred takes 10 s. Standard library only.
"""

import asyncio
import json
import math
import random
import sys


SIGMA, CAP = 1.0, 3.0
RARE, RARE_SECONDS = 0.01, 10.0


def draw(mean: float) -> float:
    """Draw how long a call takes."""
    if random.random() < RARE:
        return RARE_SECONDS
    return min(random.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA), CAP)


def write(line: bytes) -> None:
    """Hand an answer on."""
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


async def main(mean: float, *command: str) -> None:
    """Stand between a client and a server."""
    loop, called = asyncio.get_running_loop(), set()
    server = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdin
    assert server.stdout
    incoming = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(incoming), sys.stdin)

    async def hand_in() -> None:
        while line := await incoming.readline():
            message = json.loads(line)
            if message.get("method") == "tools/call":
                called.add(message["id"])
            server.stdin.write(line)
            await server.stdin.drain()
        server.stdin.close()

    async def hand_out() -> None:
        while line := await server.stdout.readline():
            number = json.loads(line).get("id")
            if number in called:
                called.discard(number)
                loop.call_later(draw(mean), write, line)
            else:
                write(line)

    await asyncio.gather(hand_in(), hand_out())
    await server.wait()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), *sys.argv[2:]))
