"""The syntax of a model's tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_grpo.rollout.formats.cursor import Cursor
from mcp_grpo.rollout.formats.notation import Notation
from mcp_grpo.rollout.formats.offer import Offer
from mcp_grpo.rollout.formats.reasoning import Reasoning
from mcp_grpo.rollout.formats.spelling import Spelling, spelled


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """
    How a model writes tool calls, as its chat template does it. All texts are spelled.

    Args:
        trigger (`str`):
            What opens a call: a control token; where the model has none for it, a tag; where the template has none
            either, everything up to the name of the tool.
        is_bare (`bool`):
            Whether it is neither a control token nor a tag. It then opens a call only at the beginning of a message, and
            the call must be the last thing in it.
        before_name (`str`):
            What stands between that and the name of the tool.
        notation (`Notation`):
            What follows the name.
        between (`str`, *optional*):
            What stands between two calls of a turn. `None` if no second one has a trigger of its own.
        after_last (`str`):
            What stands between the last call and the end of the turn.
        header (`str`):
            What stands before a turn, and before every message of one that has several.
        reasoning (`Reasoning`):
            Where calls are none because the model only thinks of them.
        end (`str`):
            The token that ends a turn after a call.
        marks_per_call (`Mapping[str, int]`):
            How often each call has texts that a parser might stumble over: those of control tokens never, tags once.
        spelling (`Spelling`):
            How turns are spelled.
    """

    trigger: str
    is_bare: bool
    before_name: str
    notation: Notation
    between: str | None
    after_last: str
    header: str
    reasoning: Reasoning
    end: str
    marks_per_call: Mapping[str, int]
    spelling: Spelling

    def find(self, text: str, start: int) -> int:
        """
        Where the next call is opened.

        Args:
            text (`str`):
                The turn.
            start (`int`):
                Where to look from.

        Returns:
            `int`: The beginning of its trigger, or -1 if there is none.
        """
        if not self.is_bare:
            return text.find(self.trigger, start)
        if start == 0 and text.startswith(self.trigger):
            return 0
        found = text.find(self.header + self.trigger, start)
        return found + len(self.header) if found >= 0 else -1

    def read(self, cursor: Cursor, offer: Offer) -> bool:
        """
        Read a call, or several that share a trigger.

        Args:
            cursor (`Cursor`):
                Where the trigger ends.
            offer (`Offer`):
                The tools that can be called.

        Returns:
            `bool`: Whether it is written as the template would write it, and valid. If not, the cursor stays where it is.
        """
        start = cursor.position
        try:
            cursor.literal(self.before_name)
            is_followed = True
            while is_followed:
                tool = offer.find(cursor.until(self.notation.after_name))
                cursor.skip(len(tool.name), tool.num_choices)
                readings, is_followed = self.notation.read(cursor, tool)
                tool.check(readings)
        except (ValueError, RecursionError):  # also from values that are no JSON, no UTF-8, or nested too deeply
            cursor.position = start
            return False
        return True

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> Offer:
        """
        Tools, as this format spells them.

        Args:
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools, in the form chat templates take.

        Returns:
            [`Offer`]: The tools.
        """
        return Offer(tools, spelled, self.notation.spell_key)
