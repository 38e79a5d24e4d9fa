"""Which session a call goes to, and in which order calls are served."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import anyio

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.sessions.session import Session


@dataclass(slots=True, eq=False)
class _Waiter:
    done: anyio.Event = field(default_factory=anyio.Event)
    session: Session | None = None
    error: ToolServerError | None = None


class CallQueue:
    """
    Hands out `max_inflight` places on each session of a server, on the least loaded session first.

    Waiting trajectories take turns, one place at a time, so that one with twenty calls does not hold up the others.
    """

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._loads: dict[Session, int] = {}
        self._waiting: dict[Hashable, deque[_Waiter]] = {}  # by trajectory, the next one first
        self.error: ToolServerError | None = None  # why calls fail instead of waiting, if they do

    def add(self, session: Session) -> None:
        """Add the places of an open session."""
        self._loads[session] = 0
        self.error = None
        self._serve()

    def remove(self, session: Session) -> None:
        """Remove a session, whatever is in flight on it; an unknown one is ignored."""
        self._loads.pop(session, None)

    def fail(self, error: ToolServerError) -> None:
        """Fail everyone who waits, and new calls, until there is a session; do nothing if there is one."""
        if not self._loads:
            self.close(error)

    def close(self, error: ToolServerError) -> None:
        """Remove all sessions; fail everyone who waits, and new calls."""
        self._loads.clear()
        self.error = error
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.error = error
                waiter.done.set()
        self._waiting.clear()

    async def acquire(self, key: Hashable) -> Session:
        """
        Wait for a place, in the turn of `key`, to be given back by [`release`]. The session may have ended meanwhile.
        Raises [`ToolServerError`] if there is no session.
        """
        if not self._waiting and (session := self._free()) is not None:
            self._loads[session] += 1
            return session
        if self.error is not None:
            raise ToolServerError(str(self.error))
        waiter = _Waiter()
        self._waiting.setdefault(key, deque()).append(waiter)
        try:
            await waiter.done.wait()
        except BaseException:
            self._forget(key, waiter)
            raise
        if waiter.session is None:
            raise ToolServerError(str(waiter.error))
        return waiter.session

    def release(self, session: Session) -> None:
        """Give a place back."""
        if session in self._loads:
            self._loads[session] -= 1
        if self._waiting:
            self._serve()

    def _free(self) -> Session | None:
        session = min(self._loads, key=self._loads.__getitem__, default=None)
        return session if session is not None and self._loads[session] < self._max_inflight else None

    def _serve(self) -> None:
        while self._waiting and (session := self._free()) is not None:
            key = next(iter(self._waiting))
            waiters = self._waiting.pop(key)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[key] = waiters  # behind the others
            self._loads[session] += 1
            waiter.session = session
            waiter.done.set()

    def _forget(self, key: Hashable, waiter: _Waiter) -> None:
        """Remove a waiter that was cancelled."""
        if waiter.session is not None:  # served at the same moment
            self.release(waiter.session)
        elif (waiters := self._waiting.get(key)) is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]
