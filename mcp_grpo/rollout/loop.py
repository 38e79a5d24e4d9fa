"""One trajectory, from its task to its end."""

import hashlib
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.lowlevel

from mcp_grpo.errors import RolloutError, ToolServerError
from mcp_grpo.rollout.generator import Generation, Generator, Sampling
from mcp_grpo.rollout.grammar import TurnGrammars
from mcp_grpo.rollout.progress import RolloutProgress
from mcp_grpo.rollout.renderer import MAX_CHARACTERS_PER_TOKEN, ParsedTurn, Renderer
from mcp_grpo.rollout.scheduling import Cutoff
from mcp_grpo.tools import Lease, ToolPool
from mcp_grpo.types import Exchange, Message, ResultKind, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    Where a trajectory ends at the latest.

    Args:
        max_turns (`int`):
            Times the policy may generate; a task's own `max_turns` comes first.
        max_completion_length (`int`):
            Tokens after the prompt, tool results included, as TRL counts them.
        max_context (`int`, *optional*):
            Tokens the model can attend to, prompt included.
        max_result_tokens (`int`, *optional*):
            Tokens of one tool result; a longer one is cut in the middle. `None` cuts nothing.
        max_turn_tokens (`int`, *optional*):
            Tokens of one turn; one that reaches them ends the trajectory. `None` for no such limit.
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds of wall-clock time. Waiting for a lease does not count.
    """

    max_turns: int
    max_completion_length: int
    max_context: int | None = None
    max_result_tokens: int | None = None
    max_turn_tokens: int | None = None
    timeout: float = 600.0


async def roll_out(
    task: Task,
    *,
    pool: ToolPool,
    renderer: Renderer,
    generator: Generator,
    limits: Limits,
    temperature: float = 1.0,
    seed: int = 0,
    grammars: TurnGrammars | None = None,
    first_call_retries: int = 0,
    cutoff: Cutoff | None = None,
    progress: RolloutProgress | None = None,
) -> Trajectory:
    """
    Attempt a task once: generate, call the tools, append what they say, until an answer or a limit.

    Whatever happens to tools and servers ends up in the trajectory; nothing of it is raised.

    Args:
        task (`Task`):
            What to attempt.
        pool (`ToolPool`):
            The open servers.
        renderer (`Renderer`):
            Messages to tokens and back.
        generator (`Generator`):
            The policy.
        limits (`Limits`):
            Where to end at the latest.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of sampling.
        seed (`int`, *optional*, defaults to `0`):
            Seed of this trajectory. The same seed and the same tool results give the same trajectory.
        grammars (`TurnGrammars`, *optional*):
            Confine every turn to the grammar of its tools. `None` samples freely.
        first_call_retries (`int`, *optional*, defaults to `0`):
            How often the first turn may be thrown away and sampled again because the policy ended it without a tool call.
            The last draw is kept whatever it is. What was thrown away leaves no trace but its number and the time it took.
            A turn that did not end or has a call that cannot be read is kept, and so is one without chance or without
            tools.
        cutoff ([`Cutoff`], *optional*):
            What may end it from outside, waiting for a lease included.
        progress ([`RolloutProgress`], *optional*):
            Where turns, tokens and tool calls are counted.

    Returns:
        [`Trajectory`]: The finished record.
    """
    cutoff, progress = cutoff or Cutoff(), progress or RolloutProgress()
    attempt = _Attempt(task, renderer, generator, limits, temperature, seed, grammars, first_call_retries, progress)
    stop_reason, seconds = StopReason.DEADLINE, 0.0
    try:
        async with AsyncExitStack() as stack:  # around the scope: whatever ends a trajectory, its lease is given back
            with cutoff.scope() as scope:
                await anyio.lowlevel.checkpoint_if_cancelled()
                lease = await stack.enter_async_context(pool.lease(task))
                # Getting a lease and giving it back takes what the servers take, which is not the policy's time.
                start = time.monotonic()
                try:
                    with anyio.move_on_after(limits.timeout):
                        stop_reason = await attempt.run(lease)
                finally:
                    seconds = time.monotonic() - start
                if not stop_reason.is_failure:
                    attempt.states = await lease.states()
            if scope.cancelled_caught:
                stop_reason, attempt.error = cutoff.stop_reason, cutoff.error
    except ToolServerError as error:
        stop_reason, attempt.error = StopReason.SERVER_FAILED, str(error)
    return attempt.finish(stop_reason, seconds=seconds)


class _Attempt:
    """What has been written so far; becomes a `Trajectory` at the end."""

    def __init__(
        self,
        task: Task,
        renderer: Renderer,
        generator: Generator,
        limits: Limits,
        temperature: float,
        seed: int,
        grammars: TurnGrammars | None,
        first_call_retries: int,
        progress: RolloutProgress,
    ) -> None:
        self.task = task
        self.error: str | None = None
        self.states: dict[str, Any] = {}
        self._renderer = renderer
        self._generator = generator
        self._limits = limits
        self._temperature = temperature
        self._seed = seed
        self._grammars = grammars
        self._first_call_retries = first_call_retries
        self._progress = progress
        self._num_rejected = 0
        self._prompt_ids: tuple[int, ...] = ()
        self._history: tuple[int, ...] = ()
        self._seen: tuple[int, ...] = ()
        self._segments: list[Segment] = []
        self._messages: list[Message] = []
        self._exchanges: list[Exchange] = []

    async def run(self, lease: Lease) -> StopReason:
        schemas = [tool.schema for tool in lease.tools]
        self._prompt_ids = self._history = self._renderer.prompt_ids(self.task.prompt, schemas)
        if self._room() < 1:
            self.error = (
                f"The prompt of task {self.task.task_id!r} has {len(self._prompt_ids)} tokens, which leaves no room in "
                f"the model's context of {self._limits.max_context}. Allow fewer tools or shorten the prompt."
            )
            return StopReason.CONTEXT_FULL
        max_turns = self.task.max_turns or self._limits.max_turns
        for turn in range(max_turns):
            parsed, ended = await self._generate(turn, schemas)
            if not ended:
                return StopReason.MAX_TOKENS
            if _calls_nothing(parsed):
                return StopReason.ANSWERED
            exchanges = await self._call(parsed, lease, turn)
            self._exchanges += exchanges
            broken = [e for e in exchanges if e.result.kind.is_server_fault]
            if broken:
                self.error = f"`{broken[0].call.name}`: {broken[0].result.text}"
                return StopReason.SERVER_FAILED
            # In its last turn the policy's calls still run, for what they do, but it cannot read the results.
            if turn + 1 < max_turns and (stop_reason := self._observe(exchanges)):
                return stop_reason
        return StopReason.MAX_TURNS

    def finish(self, stop_reason: StopReason, seconds: float) -> Trajectory:
        trajectory = Trajectory(
            task=self.task,
            prompt_ids=self._prompt_ids or self._renderer.prompt_ids(self.task.prompt, []),
            segments=tuple(self._segments),
            messages=tuple(self._messages),
            exchanges=tuple(self._exchanges),
            stop_reason=stop_reason,
            seconds=seconds,
            error=self.error,
            vocabulary=self._renderer.vocabulary,
            num_rejected=self._num_rejected,
            states=self.states,
        )
        if self._history and trajectory.prompt_ids + trajectory.completion_ids != self._history:
            raise RolloutError(
                f"The tokens recorded for task {self.task.task_id!r} are not those that the policy saw. Training on "
                "them would be wrong. This is a bug in mcp_grpo: please report it with the model's name."
            )
        return trajectory

    async def _generate(self, turn: int, schemas: Sequence[dict]) -> tuple[ParsedTurn, bool]:
        """Sample a turn and read it; whether the policy ended it by itself comes second."""
        if self._history[: len(self._seen)] != self._seen:
            raise RolloutError(
                f"The prompt of turn {turn} does not begin with what the policy saw and sampled before (task "
                f"{self.task.task_id!r}). This is a bug in mcp_grpo: please report it with the model's name."
            )
        generation, parsed = await self._draw(derived_seed(self._seed, turn), schemas)
        # Without tools there is nothing to call, and without chance the same turn would come again.
        max_rejected = self._first_call_retries if turn == 0 and schemas and self._temperature > 0 else 0
        while self._num_rejected < max_rejected and self._has_ended(generation) and _calls_nothing(parsed):
            self._num_rejected += 1
            generation, parsed = await self._draw(derived_seed(self._seed, turn, self._num_rejected), schemas)
        self._progress.num_turns += 1
        self._seen = self._history + generation.token_ids
        self._append(
            Segment(
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                allowed_logprobs=generation.allowed_logprobs,
            )
        )
        self._messages.append(parsed.message)
        return parsed, self._has_ended(generation)

    def _has_ended(self, generation: Generation) -> bool:
        """Return whether the policy ended its turn by itself: the token that does so is there."""
        return generation.finish_reason == "stop" and generation.token_ids[-1] in self._renderer.end_of_turn_ids

    async def _draw(self, seed: int, schemas: Sequence[dict]) -> tuple[Generation, ParsedTurn]:
        sampling = Sampling(
            max_tokens=min(self._room(), self._limits.max_turn_tokens or self._room()),
            temperature=self._temperature,
            seed=seed,
            constraint=None if self._grammars is None else self._grammars.grammar(schemas),
            trajectory=self._seed,
        )
        generation = await self._generator.generate(self._history, sampling)
        self._progress.num_tokens += len(generation.token_ids)
        if generation.allowed_logprobs is not None and sampling.constraint is None:
            raise RolloutError(
                "The generator has sampled under a constraint though none was asked for: ratios would be those of another "
                "distribution, and the policy would not learn the format. Turn structured output off in the sampler, or set "
                '`constrained_decoding=True` with `schema_mask="sampler"`.'
            )
        return generation, self._renderer.parse(self._history, generation.token_ids, schemas)

    async def _call(self, parsed: ParsedTurn, lease: Lease, turn: int) -> list[Exchange]:
        if parsed.malformed is not None:
            calls = (ToolCall(name="", arguments={"text": parsed.message["content"]}),)
            text = f"The tool call could not be read: {parsed.malformed}. Write it again in the required format."
            results = [ToolResult(text=text, kind=ResultKind.MALFORMED_CALL)]
        else:
            calls = parsed.calls
            with self._progress.calling(len(calls)):
                results = await lease.call_all(calls)
        return [
            Exchange(call=call, result=self._shortened(result), turn=turn)
            for call, result in zip(calls, results, strict=True)
        ]

    def _shortened(self, result: ToolResult) -> ToolResult:
        max_tokens = self._limits.max_result_tokens
        # Why a server failed is for us to read, not for the policy.
        if max_tokens is None or result.kind.is_server_fault:
            return result
        text, num_cut = self._renderer.shortened(result.text, max_tokens)
        return replace(result, text=text, num_cut=num_cut) if num_cut else result

    def _observe(self, exchanges: Sequence[Exchange]) -> StopReason | None:
        """Append the results for the policy to read, or say why they do not fit."""
        # A name that the policy made up is not echoed: templates trust names and could render control tokens.
        unnamed = (ResultKind.UNKNOWN_TOOL, ResultKind.MALFORMED_CALL)
        messages: list[Message] = [
            {"role": "tool", "name": "unknown" if e.result.kind in unnamed else e.call.name, "content": e.result.text}
            for e in exchanges
        ]
        # What is far too long is not tokenised to find that out: it would hold up every other trajectory.
        num_characters = sum(len(exchange.result.text) for exchange in exchanges)
        if num_characters > MAX_CHARACTERS_PER_TOKEN * self._room():
            suffix, length = (), num_characters // MAX_CHARACTERS_PER_TOKEN
        else:
            suffix = self._renderer.suffix_ids(messages)
            length = len(suffix)
        if self._room() <= length:
            # Beyond both, the tighter one is the reason: with a larger context, the budget would have ended it just here.
            if self._context_room() >= self._budget():
                return StopReason.MAX_TOKENS
            self.error = f"Tool results of {num_characters} characters do not fit into the model's context."
            return StopReason.CONTEXT_FULL
        self._append(Segment(token_ids=suffix))
        self._messages += messages
        return None

    def _append(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._history += segment.token_ids

    def _context_room(self) -> float:
        return float("inf") if self._limits.max_context is None else self._limits.max_context - len(self._history)

    def _budget(self) -> int:
        """How many more tokens the completion may have."""
        return self._limits.max_completion_length - (len(self._history) - len(self._prompt_ids))

    def _room(self) -> int:
        """How many more tokens fit."""
        return int(min(self._budget(), self._context_room()))


def _calls_nothing(parsed: ParsedTurn) -> bool:
    """Return whether a turn neither calls a tool nor tries to."""
    return not parsed.calls and parsed.malformed is None


def derived_seed(*parts: int | str) -> int:
    """
    A seed made of several, such as a run's seed, a step and an index; near parts do not give near seeds.

    Args:
        parts (`int` or `str`):
            What the seed depends on.

    Returns:
        `int`: A non-negative 64-bit number.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
