"""What the policy still sees of a long trajectory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mcp_grpo.rollout.renderer import Renderer
from mcp_grpo.types import Message, Segment


OldResults = Literal["keep", "cut", "drop", "summarize"]

RESERVE = 8  # an eighth of the context is kept free for the next turn
ROOM = 4  # a quarter is free after results were shortened, so that it is not done at every turn
CUT_TOKENS = 64  # of a result that is cut
MIN_SUMMARY = 64  # tokens that a summary must have room for
DROPPED = "[This result was dropped to make room. Call the tool again if you need it.]"
SUMMARY_REQUEST: Message = {
    "role": "user",
    "content": "You are running out of room. Sum up in a few sentences what you have done and found out so far, with every name, number "
    "and identifier that you still need. What was said before will be gone; do not call a tool now.",
    "asks_for": "summary",
}
_NOTES = "You have begun already. These are your notes:\n\n{}"


class Context:
    """
    Builds what the policy sees from here on, where all that stands before would be too long.

    What the policy wrote stays as it was sampled, token by token; only text of tools is written anew.
    """

    def __init__(self, renderer: Renderer, policy: OldResults, max_context: int | None) -> None:
        self._renderer = renderer
        self._policy = policy
        self._max_context = max_context
        self._opening: tuple[int, ...] = ()
        self._first = 0  # segment after the opening
        self._results: dict[int, tuple[list[Message], list[Message]]] = {}  # by segment: those of tools, and all

    def begin(self, prompt_ids: tuple[int, ...]) -> None:
        """Begin with the opening prompt."""
        self._opening = prompt_ids

    def begin_anew(
        self,
        prompt: Sequence[Message],
        summary: str,
        asked: Sequence[str],
        schemas: Sequence[Mapping[str, Any]],
        first: int,
    ) -> tuple[int, ...]:
        """
        Begin with the prompt, a summary of what was before segment `first`, and what the user asked for since; return the tokens.
        """
        text = "\n\n".join([_NOTES.format(summary), *(f"The user's last message was:\n\n{each}" for each in asked)])
        note: Message = {"role": "user", "content": self._renderer.without_control(text)}
        self._opening, self._first = self._renderer.prompt_ids([*prompt, note], schemas), first
        self._results = {}
        return self._opening

    def note_results(self, segment: int, results: list[Message], messages: Sequence[Message]) -> None:
        """Note that a segment has tool results, which may be shortened later."""
        self._results[segment] = results, list(messages)

    def is_short_after(self, length: int, history: Sequence[int]) -> bool:
        """Return whether so many more tokens leave too little room for a turn, and something is to be done about it."""
        if self._policy == "keep" or self._max_context is None:
            return False
        return len(history) + length > self._max_context - self._max_context // RESERVE

    def wants_summary(
        self, num_tokens: Callable[[Sequence[Message]], int], messages: Sequence[Message], history: Sequence[int]
    ) -> bool:
        """Return whether the policy is to sum up after these messages: they leave too little room, and there is something to sum up."""
        if self._policy != "summarize" or self._max_context is None:
            return False
        is_worth_it = len(history) - len(self._opening) > self._max_context // RESERVE
        # There must be room for the request and the summary, too.
        return is_worth_it and len(history) + num_tokens(messages) > self._max_context - self._max_context // ROOM

    def shortened(self, segments: Sequence[Segment], length: int) -> tuple[int, ...] | None:
        """Return all that stands before with old results shortened, the oldest first, until so many more tokens leave room."""
        assert self._max_context is not None
        parts = {index: segments[index].token_ids for index in range(self._first, len(segments))}
        goal = self._max_context - self._max_context // ROOM - length - len(self._opening)
        for index, (results, messages) in self._results.items():
            if sum(map(len, parts.values())) <= goal:
                break
            short = [{**m, "content": self._short(m["content"])} if m in results else m for m in messages]
            found = self._renderer.suffix_ids(short)
            if len(found) < len(parts[index]):
                parts[index] = found
        return self._opening + tuple(token for part in parts.values() for token in part)

    def _short(self, text: str) -> str:
        return self._renderer.shortened(text, CUT_TOKENS)[0] if self._policy == "cut" else DROPPED
