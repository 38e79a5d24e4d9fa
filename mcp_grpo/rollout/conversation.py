"""A conversation with a policy that has tools, message by message."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio

from mcp_grpo.rollout.loop import Attempt, result_messages
from mcp_grpo.rollout.renderer import ParsedTurn
from mcp_grpo.tools import Lease
from mcp_grpo.types import Exchange, Message, StopReason


Watch = Callable[[Message | Exchange], None]


class Conversation(Attempt):
    """
    A rollout that goes on when the user says more. Tokens are only appended, as in training.

    What breaks a reply (Ctrl-C, a server, a full context) takes back what was said since the user's message, so that the
    conversation can go on from before it. What tools have done stays done.
    """

    def __init__(self, *args: Any, watch: Watch) -> None:
        super().__init__(*args)
        self._watch = watch
        self._lock = anyio.Lock()  # a reply that was broken off may still be on its way out
        self._unread: list[Exchange] = []  # results that came after the last turn
        self._is_cut = False

    async def say(self, text: str, lease: Lease) -> StopReason:
        """Let the policy reply to a message, and return why it ended."""
        async with self._lock:
            kept = {name: list(v) if isinstance(v, list) else v for name, v in vars(self).items()}
            self.error, stop_reason = None, StopReason.DEADLINE
            try:
                stop_reason = await self._reply({"role": "user", "content": text}, lease)
            finally:
                if stop_reason.is_failure or stop_reason is StopReason.CONTEXT_FULL:
                    vars(self).update({**kept, "error": self.error})
            self._is_cut = stop_reason is StopReason.MAX_TOKENS
            return stop_reason

    async def _reply(self, message: Message, lease: Lease) -> StopReason:
        if not self._prompt_ids:
            self.task = replace(self.task, prompt=(*self.task.prompt, message))
            return await self.begin(lease)
        read = [*result_messages(self._unread, self._renderer.vision), message]
        suffix = self._renderer.suffix_ids(read, is_cut=self._is_cut)
        if self._room() <= len(suffix):
            self.error = "The conversation fills the model's context."
            return StopReason.CONTEXT_FULL
        self._append_read(suffix, read)
        return await self.take_turns(lease)

    async def _generate(self, turn: int, schemas: Sequence[dict]) -> tuple[ParsedTurn, bool]:
        self._unread = []
        parsed, has_ended = await super()._generate(turn, schemas)
        self._watch(parsed.message)
        return parsed, has_ended

    async def _call(self, parsed: ParsedTurn, lease: Lease, turn: int) -> list[Exchange]:
        self._unread = await super()._call(parsed, lease, turn)
        for exchange in self._unread:
            self._watch(exchange)
        return self._unread
