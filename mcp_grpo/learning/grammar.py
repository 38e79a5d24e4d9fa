"""Roles of tokens by a grammar of the tools: what the schemas force is told from what the policy chose."""

from collections.abc import Mapping, Sequence
from operator import is_not
from typing import Any

from mcp_grpo.rollout.grammar import TurnGrammar, TurnGrammars
from mcp_grpo.types import Segment, TokenRole


CERTAIN = -1e-6  # log-probability, but for rounding


class GrammarRoles:
    """
    Tells syntax from choices in a sampled turn, by walking the tools' grammar along its tokens.

    A token is forced if its bytes are the beginning of those that the grammar leaves no alternative to at that point.
    How many tokens a constrained sampler could have drawn there does not matter: the same bytes can be cut into tokens
    in several ways.

    A turn that the grammar does not accept to its end has no forced tokens. That is one with a call that cannot be read
    or breaks off, and also one whose calls would be understood but are not written as the chat template writes them.

    Args:
        grammars ([`TurnGrammars`]):
            The grammars of the policy's tokenizer.

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
        """See [`roles`]."""
        return self.roles(segment.token_ids, tools)

    def roles(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[TokenRole, ...]:
        """
        The role of each token.

        Args:
            token_ids (`Sequence[int]`):
                Tokens of one turn, as they were sampled, the end-of-turn token included.
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools that were offered.

        Returns:
            `tuple[TokenRole, ...]`: One role per token.
        """
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
        # Trajectories share schemas. To see that they are the same ones takes less time than to look them up.
        if self._grammar is None or len(tools) != len(self._tools) or any(map(is_not, tools, self._tools)):
            self._tools, self._grammar = tuple(tools), self._grammars.grammar(tools)
        return self._grammar


class SamplerRoles:
    """
    Tells syntax from choices in a turn that was sampled under its grammar, by what the sampler says.

    Where the grammar left one token, it was drawn with probability 1. No grammar is walked a second time.

    Args:
        grammars ([`TurnGrammars`]):
            The grammars that turns were sampled under.
    """

    def __init__(self, grammars: TurnGrammars) -> None:
        self._grammars = grammars

    def __call__(self, segment: Segment, tools: Sequence[Mapping[str, Any]]) -> tuple[TokenRole, ...]:
        """
        The role of each token.

        Args:
            segment (`Segment`):
                One turn, with the log-probabilities it was sampled with.
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools that were offered; not needed here.

        Returns:
            `tuple[TokenRole, ...]`: One role per token. What stands before a call, what opens it and the end of the turn
            are never forced.
        """
        triggers = self._grammars.triggers(self._grammars.pieces(segment.token_ids))
        first = min(triggers, default=len(segment.token_ids))
        roles: list[TokenRole] = []
        for i, (token, logprob) in enumerate(zip(segment.token_ids, segment.logprobs or (), strict=True)):
            is_forced = i > first and logprob >= CERTAIN and token not in self._grammars.end_of_turn_ids
            plain = TokenRole.FORCED if is_forced else TokenRole.CHOICE
            roles.append(TokenRole.TRIGGER if i in triggers else plain)
        return tuple(roles)
