"""Which tokens of a tool call were forced, by the syntax of the call alone."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import TemplateError
from mcp_grpo.rollout.formats import CallSyntax, Cursor, Offer, detect_syntax
from mcp_grpo.types import TokenRole


_CHOICE, _FORCED, _TRIGGER = range(3)


class SyntaxRoles:
    """
    Tells the tokens of a tool call in which the policy had no choice from those in which it had one.

    A token is forced if every byte of it is. Forced is what the format of the call and the schemas of the offered tools
    leave no alternative to: the wrapper, a tool's name from where no other tool has the same beginning, keys likewise,
    colons, the quote that opens a text where the schema wants a text, a brace or a comma where no other can come. Never
    forced is what a value consists of, nor where it ends, nor the end of the turn.

    A call counts only if it is written as the chat template would write it, blanks included, and is valid. If one call of
    a turn is not, or the turn does not end, no token of the turn is forced.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The policy's tokenizer.
        end_of_turn_ids (`Sequence[int]`):
            Tokens at which the policy's turn ends.
        chat_template (`str`, *optional*):
            The template that is trained on, if it is not the tokenizer's.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed on to the template.

    Example:

    Of `get_forecast` and `get_time`, both with a text `city` and nothing else, what stands between « and » is forced:

    ```
    <tool_call>«\\n{"name": "»get_f«orecast", "arguments": {"city": "»Paris"«}}\\n</tool_call>»<|im_end|>
    ```
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_of_turn_ids: Sequence[int],
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self._format = detect_syntax(
                tokenizer,
                end_of_turn_ids=end_of_turn_ids,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
        except TemplateError:
            self._format = None
        self._ends = frozenset(end_of_turn_ids)
        self._offers: dict[tuple[str, ...], Offer] = {}
        self._roles = _Roles()

    @property
    def is_supported(self) -> bool:
        """Whether calls in this model's format can be read. If not, every token is a choice."""
        return self._format is not None

    def roles(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[TokenRole, ...]:
        """
        What each token of a turn is.

        Args:
            token_ids (`Sequence[int]`):
                The turn, as it was sampled: from after the generation prompt to the token that ended it.
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools that were offered, in the form chat templates take.

        Returns:
            `tuple[TokenRole, ...]`: One entry per token.
        """
        roles = (TokenRole.CHOICE,) * len(token_ids)
        pieces = [] if self._format is None else self._format.spelling.tokens(token_ids)
        text = "".join(pieces)
        if self._format is None or self._format.trigger not in text:
            return roles
        kinds = self._kinds(self._format, text, token_ids[-1] in self._ends, tools)
        first, last = len(kinds) - len(kinds.lstrip(b"\0")), len(kinds.rstrip(b"\0"))
        if not last:
            return roles
        starts = list(accumulate(map(len, pieces), initial=0))
        begin, end = bisect_right(starts, first) - 1, bisect_left(starts, last)
        read = [self._roles[kinds[i:j]] for i, j in pairwise(starts[begin : end + 1])]
        return (*roles[:begin], *read, *roles[end:])

    def _kinds(self, call: CallSyntax, text: str, is_ended: bool, tools: Sequence[Mapping[str, Any]]) -> bytes:
        """What each character of the spelling of a turn is."""
        offer = self._offer(call, tools)
        cursor = Cursor(text)
        cursor.position = start = call.reasoning.end(text)
        triggers: list[int] = []
        is_valid = is_ended
        while (trigger := call.find(text, cursor.position)) >= 0:
            triggers.append(trigger)
            cursor.position = trigger + len(call.trigger)
            is_valid = is_valid and call.read(cursor, offer)
        if call.is_bare and text[cursor.position :] != call.end:
            is_valid = False
        if any(text.count(mark, start) != number * len(triggers) for mark, number in call.marks_per_call.items()):
            is_valid = False
        kinds = cursor.forced() if is_valid else bytearray(len(text))
        for trigger in triggers:
            kinds[trigger : trigger + len(call.trigger)] = bytes([_TRIGGER]) * len(call.trigger)
        return bytes(kinds)

    def _offer(self, call: CallSyntax, tools: Sequence[Mapping[str, Any]]) -> Offer:
        names = tuple(tool["function"]["name"] for tool in tools)
        offer = self._offers.get(names)
        # Trajectories share schemas, and comparing one with itself takes no time.
        if offer is None or offer.tools != list(tools):
            self._offers[names] = offer = call.offer(tools)
        return offer


class _Roles(dict[bytes, TokenRole]):
    """Roles of tokens by the kinds of their characters. There are many tokens, but few kinds of them."""

    def __missing__(self, kinds: bytes) -> TokenRole:
        if _TRIGGER in kinds:
            role = TokenRole.TRIGGER
        elif _FORCED not in kinds:
            role = TokenRole.CHOICE
        else:
            role = TokenRole.STRADDLING if _CHOICE in kinds else TokenRole.FORCED
        self[kinds] = role
        return role
