"""The syntax of a model's tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_grpo.masking.formats.cursor import Cursor
from mcp_grpo.masking.formats.notation import Notation
from mcp_grpo.masking.formats.offered_tools import OfferedTools
from mcp_grpo.masking.formats.spelling import Spelling, spelled


REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))


class Reasoning:
    """Finds the reasoning of a turn. Some templates open it in the `header`, the text before a turn."""

    def __init__(self, spelling: Spelling, header: str) -> None:
        self._header = header
        # As a control token, or written out in letters.
        self._openings, self._endings = (
            {spell(tag) for tag in tags for spell in (spelling.text, spelled)}
            for tags in zip(*REASONING_TAGS, strict=True)
        )

    @property
    def is_open(self) -> bool:
        """Return whether a turn begins with reasoning."""
        return self.end(" ") > 0

    def end(self, text: str) -> int:
        """Return where the last reasoning of a turn ends: 0 if there is none, its length if it does not end."""
        text = self._header + text
        end = max((text.rfind(ending) + len(ending) for ending in self._endings if ending in text), default=0)
        if any(text.find(opening, end) >= 0 for opening in self._openings):
            end = len(text)
        return max(0, end - len(self._header))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Describe how a model writes tool calls, as its chat template does it. All texts are spelled."""

    # What opens a call: a control token; or a tag; or, if the template has neither, everything up to the tool's name.
    trigger: str
    # Whether it is neither a control token nor a tag. It then opens a call only at the beginning of a message, and the call
    # must be the last thing in it.
    is_bare: bool
    before_name: str  # between the trigger and the tool's name
    notation: Notation  # of what follows the name
    between: str | None  # between two calls of a turn; `None` if a second one has no trigger of its own
    after_last: str  # between the last call and the end of the turn
    header: str  # before a turn, and before every message of one that has several
    reasoning: Reasoning  # in which nothing is a call
    end: str  # the token that ends a turn after a call
    # How often a call has texts that a parser might stumble over: those of control tokens never, tags once.
    marks_per_call: Mapping[str, int]
    spelling: Spelling

    def find(self, text: str, start: int) -> int:
        """Return where the next trigger of a turn begins, or -1."""
        if not self.is_bare:
            return text.find(self.trigger, start)
        if start == 0 and text.startswith(self.trigger):
            return 0
        found = text.find(self.header + self.trigger, start)
        return found + len(self.header) if found >= 0 else -1

    def read(self, cursor: Cursor, tools: OfferedTools) -> bool:
        """
        Read what follows a trigger: a call, or several. Return whether it is valid and written as the template would write
        it; if not, the cursor stays where it is.
        """
        start = cursor.position
        try:
            cursor.literal(self.before_name)
            is_followed = True
            while is_followed:
                tool = tools.find(cursor.until(self.notation.after_name))
                cursor.skip(len(tool.name), tool.num_choices)
                readings, is_followed = self.notation.read(cursor, tool)
                tool.check(readings)
        except (ValueError, RecursionError):  # also from values that are no JSON, no UTF-8, or nested too deeply
            cursor.position = start
            return False
        return True

    def offered(self, tools: Sequence[Mapping[str, Any]]) -> OfferedTools:
        """Prepare tool schemas for [`read`]."""
        return OfferedTools(tools, spelled, self.notation.spell_key)
