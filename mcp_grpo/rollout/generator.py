"""The seam between the rollout and whatever samples tokens."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from mcp_grpo.rollout.grammar import TurnGrammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """
    How one turn is sampled.

    Args:
        max_tokens (`int`):
            Limit on the tokens of the turn, at least 1.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of the distribution. 0 takes the most likely token.
        seed (`int`, *optional*, defaults to `0`):
            Start of this turn's own stream of random numbers. What else is in the batch does not change it.
        constraint ([`TurnGrammar`], *optional*):
            Grammar that the turn is confined to, so that its tool calls are always valid. `None` samples freely.
        trajectory (`int`, *optional*, defaults to `0`):
            Number of the trajectory that the turn is of, so that all its turns can go to where its prefix is.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    constraint: TurnGrammar | None = None
    trajectory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """
    One sampled turn.

    Args:
        token_ids (`tuple[int, ...]`):
            What was sampled, at least one token, the end-of-turn token included.
        logprobs (`tuple[float, ...]`):
            Log-probability of each token under the distribution it was sampled from.
        finish_reason (`Literal["stop", "length"]`):
            Whether the policy ended its turn or ran out of tokens.
        allowed_logprobs (`tuple[float, ...]`, *optional*):
            `log Z` of each token: of the probability that the policy gave to all tokens the constraint allowed there,
            at the sampling temperature. `None` if there was no constraint.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    allowed_logprobs: tuple[float, ...] | None = None


def with_allowed_logprobs(generation: Generation, scores: Sequence[float]) -> Generation:
    """
    Add to a turn that was sampled under a constraint how much of the policy the constraint left.

    Args:
        generation ([`Generation`]):
            The turn, with log-probabilities of the constrained distribution.
        scores (`Sequence[float]`):
            Log-probabilities that the policy itself gives to the tokens before it, and then to its own.

    Returns:
        [`Generation`]: The same with `allowed_logprobs`.
    """
    own = scores[len(scores) - len(generation.token_ids) :]
    pairs = zip(own, generation.logprobs, strict=True)
    return replace(generation, allowed_logprobs=tuple(min(0.0, policy - sampled) for policy, sampled in pairs))


class Generator(Protocol):
    """Prompts in, sampled tokens and their log-probabilities out."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """
        Sample one turn. Any number of these may be awaited at once, from any event loop. One that is cancelled is not to be
        sampled any further.

        Args:
            prompt_ids (`Sequence[int]`):
                Everything the policy has seen so far.
            sampling ([`Sampling`]):
                How to sample.

        Returns:
            [`Generation`]: The turn.
        """
        ...

    def serve(self, until: Future[Any]) -> None:
        """
        Do the sampling, on the thread that owns the model, until `until` is done.

        Args:
            until (`Future`):
                The rollout that asks for generations.
        """
        ...
