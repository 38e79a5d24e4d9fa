"""Which session a call goes to, and whose turn it is."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import anyio

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.session import Session


@dataclass(slots=True, eq=False)
class _Waiter:
    """Someone who waits for a place."""

    done: anyio.Event = field(default_factory=anyio.Event)
    session: Session | None = None
    error: ToolServerError | None = None


class CallQueue:
    """
    Places on the sessions of one server, `max_inflight` on each.

    The least loaded session comes first. Those who wait are served in turn: each trajectory one place at a time, so that
    one that makes twenty calls at once does not hold up the others.

    Args:
        max_inflight (`int`):
            Places on each session.
    """

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._loads: dict[Session, int] = {}
        self._waiting: dict[Hashable, deque[_Waiter]] = {}  # by trajectory, the next one first
        self.error: ToolServerError | None = None
        """Why nobody need wait, if nobody need."""

    def add(self, session: Session) -> None:
        """
        Offer the places of a session.

        Args:
            session ([`Session`]):
                An open session.
        """
        self._loads[session] = 0
        self.error = None
        self._serve()

    def remove(self, session: Session) -> None:
        """
        Take a session out, whatever is still in flight on it.

        Args:
            session ([`Session`]):
                The session; one that is not there is fine.
        """
        self._loads.pop(session, None)

    def fail(self, error: ToolServerError) -> None:
        """
        Let those who wait fail, and those to come, until there is a session again.

        Args:
            error ([`ToolServerError`]):
                Why there is none. Nothing happens if there is one.
        """
        if not self._loads:
            self.close(error)

    def close(self, error: ToolServerError) -> None:
        """
        Take all sessions out, and let those who wait fail, and those to come.

        Args:
            error ([`ToolServerError`]):
                Why.
        """
        self._loads.clear()
        self.error = error
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.error = error
                waiter.done.set()
        self._waiting.clear()

    async def acquire(self, key: Hashable) -> Session:
        """
        Wait for a place. It must be given back by [`release`].

        Args:
            key (`Hashable`):
                Whose turn it is to count as.

        Returns:
            [`Session`]: A session, which may have ended while nobody looked. Raises [`ToolServerError`] if there is none,
            and will be none soon.
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
        """
        Give a place back.

        Args:
            session ([`Session`]):
                What [`acquire`] returned.
        """
        if session in self._loads:
            self._loads[session] -= 1
        if self._waiting:
            self._serve()

    def _free(self) -> Session | None:
        best, least = None, self._max_inflight
        for session, load in self._loads.items():
            if load < least:
                best, least = session, load
        return best

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
        """Someone who waited was cancelled."""
        if waiter.session is not None:  # served in the same instant
            self.release(waiter.session)
        elif (waiters := self._waiting.get(key)) is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]
