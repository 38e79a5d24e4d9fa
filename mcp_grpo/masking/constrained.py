"""Constrain sampling to grammars, for the rows of a batch that have one."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from mcp_grpo.errors import RolloutError
from mcp_grpo.masking.grammar import TurnGrammar


if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class Constraints:
    """
    The constraints of a batch while its turns are sampled; `None` for an unconstrained row.

    A constrained row is sampled from `q = p / Z` on the tokens that its grammar allows next, where `Z` is what the policy
    `p` gives to all of them together. So the sampler's log-probabilities are exactly those of `q`, and `log Z` says how much
    of the policy the constraint cut away.
    """

    def __init__(self, grammars: Sequence[TurnGrammar | None]) -> None:
        self._matchers = {row: grammar.matcher() for row, grammar in enumerate(grammars) if grammar is not None}
        self._vocab_size = max((grammar.vocab_size for grammar in grammars if grammar is not None), default=0)

    def confine(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Restrict the log-probabilities `(B, V)` of the next token to what grammars allow; return them and `log Z` `(B,)`. Rows
        without a constraint, and those whose turn has ended, stay as they are.
        """
        log_z = logprobs.new_zeros(len(logprobs))
        under_way = [row for row, matcher in self._matchers.items() if not matcher.is_stopped()]
        if not under_way:
            return logprobs, log_z
        rows = torch.tensor(under_way, device=logprobs.device)
        is_forbidden = self._forbidden(under_way, logprobs.shape[1]).to(logprobs.device)
        confined = logprobs[rows].masked_fill(is_forbidden, -torch.inf)
        log_z[rows] = confined.logsumexp(dim=-1)
        return logprobs.index_copy(0, rows, confined - log_z[rows, None]), log_z

    def advance(self, tokens: torch.Tensor) -> None:
        """Advance the grammars by the sampled tokens `(B, 1)`."""
        if not self._matchers:  # do not wait for the device
            return
        sampled = tokens.flatten().tolist()
        for row, matcher in self._matchers.items():
            if not matcher.is_stopped():
                matcher.consume_token(sampled[row])
                _check(matcher)

    def _forbidden(self, rows: Sequence[int], num_columns: int) -> torch.Tensor:
        """Return which tokens may not come next."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        matchers = [self._matchers[row] for row in rows]
        words = allocate_token_bitmask(len(rows), self._vocab_size)
        fill_next_token_bitmask_par(_executor(), [(matcher, i) for i, matcher in enumerate(matchers)], words)
        for matcher in matchers:
            _check(matcher)
        # The model may have more columns than the tokenizer has tokens; those are 0, which forbids them.
        is_allowed = np.unpackbits(words.view(np.uint8), axis=1, count=num_columns, bitorder="little")
        return torch.from_numpy(is_allowed == 0)


@cache
def _executor() -> "LLExecutor":
    """Return threads that compute the masks of many rows in parallel."""
    from llguidance import LLExecutor

    return LLExecutor()


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise RolloutError(
            f"The grammar of the tool calls could not be followed: {matcher.get_error().splitlines()[0]}. Sample without "
            "a constraint, or exclude the tools with the largest schemas."
        )
