"""Tell the tokens of a tool call that were forced from those that the policy chose."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import is_not
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import TemplateError
from mcp_grpo.masking.formats import CallSyntax, Cursor, OfferedTools, detect_syntax
from mcp_grpo.masking.grammar import TurnGrammar, TurnGrammars
from mcp_grpo.types import Segment, TokenRole


_CHOICE, _FORCED, _TRIGGER = range(3)
_CERTAIN = -1e-6  # log-probability 0, but for rounding


class SyntaxRoles:
    """
    Finds forced tokens by reading calls as the chat template writes them; works without llguidance.

    A token is forced if all of its bytes are: those to which the syntax of the call and the schemas of the offered tools
    leave no alternative. That is the wrapper, a tool's name from where no other tool has the same beginning, keys likewise,
    colons, the quote that opens a text where the schema wants a text, a brace or a comma where no other can come. The
    content of a value, its end and the end of the turn are never forced.

    A call counts only if it is valid and written exactly as the chat template would write it. If one call of a turn is not,
    or the turn does not end, no token of the turn is forced.

    Example:

    Of `get_forecast` and `get_time`, both with a text `city` and nothing else, what is between « and » is forced:

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
            self._syntax = detect_syntax(
                tokenizer,
                end_of_turn_ids=end_of_turn_ids,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
        except TemplateError:
            self._syntax = None
        self._ends = frozenset(end_of_turn_ids)
        self._offered: dict[tuple[str, ...], OfferedTools] = {}

    @property
    def is_supported(self) -> bool:
        """Return whether this model's calls can be read. If not, every token is a choice."""
        return self._syntax is not None

    def roles(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[TokenRole, ...]:
        """Return the role of each token of a sampled turn, from after the generation prompt to its end-of-turn token."""
        roles = (TokenRole.CHOICE,) * len(token_ids)
        pieces = [] if self._syntax is None else self._syntax.spelling.tokens(token_ids)
        text = "".join(pieces)
        if self._syntax is None or self._syntax.trigger not in text:
            return roles
        kinds = self._kinds(self._syntax, text, token_ids[-1] in self._ends, tools)
        first, last = len(kinds) - len(kinds.lstrip(b"\0")), len(kinds.rstrip(b"\0"))
        if not last:
            return roles
        starts = list(accumulate(map(len, pieces), initial=0))
        begin, end = bisect_right(starts, first) - 1, bisect_left(starts, last)
        read = [_role(kinds[i:j]) for i, j in pairwise(starts[begin : end + 1])]
        return (*roles[:begin], *read, *roles[end:])

    def _kinds(self, call: CallSyntax, text: str, is_ended: bool, tools: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the kind of each character of the spelling of a turn."""
        offered = self._offered_tools(call, tools)
        cursor = Cursor(text)
        cursor.position = start = call.reasoning.end(text)
        triggers: list[int] = []
        is_valid = is_ended
        while (trigger := call.find(text, cursor.position)) >= 0:
            triggers.append(trigger)
            cursor.position = trigger + len(call.trigger)
            is_valid = is_valid and call.read(cursor, offered)
        if call.is_bare and text[cursor.position :] != call.end:
            is_valid = False
        if any(text.count(mark, start) != number * len(triggers) for mark, number in call.marks_per_call.items()):
            is_valid = False
        kinds = cursor.forced() if is_valid else bytearray(len(text))
        for trigger in triggers:
            kinds[trigger : trigger + len(call.trigger)] = bytes([_TRIGGER]) * len(call.trigger)
        return bytes(kinds)

    def _offered_tools(self, call: CallSyntax, tools: Sequence[Mapping[str, Any]]) -> OfferedTools:
        names = tuple(tool["function"]["name"] for tool in tools)
        offered = self._offered.get(names)
        # Trajectories share schemas, and comparing one with itself takes no time.
        if offered is None or offered.schemas != list(tools):
            self._offered[names] = offered = call.offered(tools)
        return offered


@cache
def _role(kinds: bytes) -> TokenRole:
    """Return the role of a token by the kinds of its characters: many tokens, but few different ones."""
    if _TRIGGER in kinds:
        return TokenRole.TRIGGER
    if _FORCED not in kinds:
        return TokenRole.CHOICE
    return TokenRole.STRADDLING if _CHOICE in kinds else TokenRole.FORCED


class GrammarRoles:
    """
    Finds forced tokens by walking the tools' grammar along a turn.

    A token is forced if the grammar leaves no alternative to its bytes at that point. How many tokens a constrained sampler
    could have drawn there does not matter: the same bytes can be cut into tokens in several ways.

    A turn that the grammar does not accept to its end has no forced tokens: one with a call that is unreadable, breaks off,
    or is not written as the chat template writes it.

    Example:

    ```
    <tool_call> \\n {" name ": ␣" get    _weather   ",    ␣" arguments ": ␣{" city ": ␣" Paris  "}}\\n  </tool_call> <|im_end|>
    trigger     forced ...        choice straddling forced ...                         choice choice forced       choice
    ```

    Here the tools are `get_weather` and `get_time`: after `get`, only `_` is forced.
    """

    def __init__(self, grammars: TurnGrammars) -> None:
        self._grammars = grammars
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._grammar: TurnGrammar | None = None

    def __call__(self, segment: Segment, tools: Sequence[Mapping[str, Any]]) -> tuple[TokenRole, ...]:
        return self.roles(segment.token_ids, tools)

    def roles(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[TokenRole, ...]:
        """Return the role of each token of a sampled turn, end-of-turn token included."""
        pieces = self._grammars.pieces(token_ids)
        triggers = self._grammars.triggers(pieces)
        roles = [TokenRole.TRIGGER if i in triggers else TokenRole.CHOICE for i in range(len(pieces))]
        if not triggers:
            return tuple(roles)
        walked, first, forced = list(roles), min(triggers), b""
        matcher = self._grammar_of(tools).matcher()
        # Nothing is forced in free text, so it is read at once.
        if not matcher.consume_tokens(list(token_ids[:first])):
            return tuple(roles)
        for i in range(first, len(pieces)):
            forced = forced or matcher.compute_ff_bytes()
            if forced and i not in triggers and token_ids[i] not in self._grammars.end_of_turn_ids:
                walked[i] = TokenRole.FORCED if forced.startswith(pieces[i]) else TokenRole.STRADDLING
            if not matcher.consume_token(token_ids[i]):
                return tuple(roles)
            forced = forced[len(pieces[i]) :]
        return tuple(walked if matcher.is_accepting() else roles)

    def _grammar_of(self, tools: Sequence[Mapping[str, Any]]) -> TurnGrammar:
        # Trajectories share schemas, and an identity check is faster than a lookup.
        if self._grammar is None or len(tools) != len(self._tools) or any(map(is_not, tools, self._tools)):
            self._tools, self._grammar = tuple(tools), self._grammars.grammar(tools)
        return self._grammar


class SamplerRoles:
    """
    Finds forced tokens in a turn that was sampled under its grammar: where that left one token, it was drawn with
    probability 1. What opens a call and the end of the turn are never forced.
    """

    def __init__(self, grammars: TurnGrammars) -> None:
        self._grammars = grammars

    def __call__(self, segment: Segment, tools: Sequence[Mapping[str, Any]]) -> tuple[TokenRole, ...]:
        """Return the role of each token of a segment with log-probabilities."""
        triggers = self._grammars.triggers(self._grammars.pieces(segment.token_ids))
        first = min(triggers, default=len(segment.token_ids))
        roles: list[TokenRole] = []
        for i, (token, logprob) in enumerate(zip(segment.token_ids, segment.logprobs or (), strict=True)):
            is_forced = i > first and logprob >= _CERTAIN and token not in self._grammars.end_of_turn_ids
            plain = TokenRole.FORCED if is_forced else TokenRole.CHOICE
            roles.append(TokenRole.TRIGGER if i in triggers else plain)
        return tuple(roles)
