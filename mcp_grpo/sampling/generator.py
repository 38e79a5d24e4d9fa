"""The interface between the rollout and whatever samples tokens."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from mcp_grpo.masking.grammar import TurnGrammar
from mcp_grpo.sampling.vision import Picture


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
            Seed of this turn's own random numbers, whatever else is in the batch.
        constraint ([`TurnGrammar`], *optional*):
            Grammar that keeps tool calls valid. `None` samples freely.
        trajectory (`int`, *optional*, defaults to `0`):
            Number of the trajectory, so that all its turns can go to the server that holds its prefix.
        pictures (`tuple[Picture, ...]`, *optional*):
            Pictures in the prompt, in order; their tokens are in it, each as often as the model needs it.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    constraint: TurnGrammar | None = None
    trajectory: int = 0
    pictures: tuple[Picture, ...] = ()


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
            `log Z` of each token: of the probability that the policy gave to all tokens the constraint allowed there, at
            the sampling temperature. `None` without a constraint.
        num_cached (`int`, *optional*):
            How many tokens of the prompt were not computed anew, because an earlier prompt began alike. `None` if not known.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    allowed_logprobs: tuple[float, ...] | None = None
    num_cached: int | None = None


def with_allowed_logprobs(generation: Generation, scores: Sequence[float]) -> Generation:
    """
    Add `allowed_logprobs` to a turn sampled under a constraint. `scores` are the unconstrained log-probabilities of the
    tokens before the turn and of its own.
    """
    own = scores[len(scores) - len(generation.token_ids) :]
    pairs = zip(own, generation.logprobs, strict=True)
    return replace(generation, allowed_logprobs=tuple(min(0.0, policy - sampled) for policy, sampled in pairs))


class Generator(Protocol):
    """Prompts in, sampled tokens and their log-probabilities out."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Sample one turn. Any number may be awaited at once, from any event loop; a cancelled one is sampled no further."""
        ...

    def serve(self, until: Future[Any]) -> None:
        """Do the sampling, on the thread that owns the model, until the rollout `until` is done."""
        ...
