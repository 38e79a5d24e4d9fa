"""A server's share of the event loop, so that one that talks without being asked holds up no other."""

import time

import anyio
import anyio.lowlevel


CREDIT = 0.05  # seconds of work that a server may cause at once
RATE = 0.05  # seconds of work per second that it may cause for long
MAX_WAIT = 1.0  # seconds before a server is read again, so that ending it is noticed

# Seconds that the SDK takes for a message: a task, a handler, and for a request a reply.
MESSAGE_COST = 0.0005
BYTE_COST = 1e-9  # for a byte that is read and dropped
ANSWER_COST = 0.002  # that an answer to a call may take to read; what it takes longer counts
LINE_COST = 0.0001  # the same for a line of an event stream, of which a message has two or three


class Share:
    """
    Counts the work that a server causes without being asked, and makes its reader wait once that is too much.

    Answers to calls are free, unless they take long to read: their number is limited. A server that is not read for a while finds its pipe full and waits.
    """

    def __init__(self) -> None:
        self._credit = CREDIT
        self._counted_at = time.monotonic()
        self._is_charged = False

    def charge(self, seconds: float) -> None:
        """Count work."""
        now = time.monotonic()
        self._credit = min(CREDIT, self._credit + RATE * (now - self._counted_at)) - seconds
        self._counted_at = now
        self._is_charged = True

    def charge_answer(self, seconds: float) -> None:
        """Count the work for an answer to a call."""
        if seconds > ANSWER_COST:
            self.charge(seconds - ANSWER_COST)

    async def settle(self) -> None:
        """Let others run if there was work, and wait if there was too much."""
        if not self._is_charged:
            return
        self._is_charged = False
        if self._credit < 0:
            await anyio.sleep(min(MAX_WAIT, -self._credit / RATE))
        else:
            await anyio.lowlevel.checkpoint()
