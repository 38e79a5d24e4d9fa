"""One trajectory, from its task to its end."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from mcp_grpo.errors import RolloutError, ToolServerError
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.rollout.context import MIN_SUMMARY, SUMMARY_REQUEST, Context, OldResults
from mcp_grpo.rollout.progress import RolloutProgress
from mcp_grpo.rollout.renderer import MAX_CHARACTERS_PER_TOKEN, ParsedTurn, Renderer
from mcp_grpo.rollout.well_formed import well_formed
from mcp_grpo.sampling.generator import Generator, Sampling
from mcp_grpo.sampling.vision import MAX_IMAGES, Picture, UnseenError, Vision
from mcp_grpo.tools import Lease, Tool, ToolPool
from mcp_grpo.tools.images import after_cut, joined, split
from mcp_grpo.types import (
    Exchange,
    Image,
    Message,
    ResultKind,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    UserTurn,
    is_of_user,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    Where a trajectory ends at the latest.

    Args:
        max_turns (`int`):
            Times the policy may generate after each message of the user; a task's own `max_turns` comes first.
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
        old_results (`str`, *optional*, defaults to `"keep"`):
            What becomes of old tool results where the context has no more room; see [`MCPGRPOConfig`].
    """

    max_turns: int
    max_completion_length: int
    max_context: int | None = None
    max_result_tokens: int | None = None
    max_turn_tokens: int | None = None
    timeout: float = 600.0
    old_results: OldResults = "keep"


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
        progress ([`RolloutProgress`], *optional*):
            Where turns, tokens and tool calls are counted.

    Returns:
        [`Trajectory`]: The finished record.
    """
    attempt = Attempt(task, renderer, generator, limits, temperature, seed, grammars, progress or RolloutProgress())
    stop_reason, seconds = StopReason.DEADLINE, 0.0
    try:
        async with pool.lease(task) as lease:
            # Getting a lease and giving it back takes what the servers take, which is not the policy's time.
            start = time.monotonic()
            try:
                with anyio.move_on_after(limits.timeout):
                    stop_reason = await attempt.run(lease)
            finally:
                seconds = time.monotonic() - start
            if not stop_reason.is_failure:
                attempt.states = well_formed(await lease.states())
    except ToolServerError as error:
        stop_reason, attempt.error = StopReason.SERVER_FAILED, str(error)
    return attempt.finish(stop_reason, seconds=seconds)


class Attempt:
    """Collect what is written, to become a `Trajectory` at the end."""

    def __init__(
        self,
        task: Task,
        renderer: Renderer,
        generator: Generator,
        limits: Limits,
        temperature: float,
        seed: int,
        grammars: TurnGrammars | None,
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
        self._progress = progress
        self._prompt_ids: tuple[int, ...] = ()
        self._history: tuple[int, ...] = ()
        self._seen: tuple[int, ...] = ()
        self._segments: list[Segment] = []
        self._messages: list[Message] = []
        self._exchanges: list[Exchange] = []
        self._turn_seconds: list[tuple[float, float]] = []
        self._turn_reads: list[tuple[int, int]] = []
        self._user_exchanges: tuple[Exchange, ...] = ()
        self._num_turns = 0
        self._pictures: tuple[Picture, ...] = ()  # in the history, in order
        self._num_images = 0  # that the policy sees, or will
        self._context = Context(renderer, limits.old_results, limits.max_context)
        self._is_recast = False  # whether the history is not all that stands before it

    async def run(self, lease: Lease) -> StopReason:
        """Attempt the task until the user has no more to say, or a limit."""
        stop_reason = await self.begin(lease)
        while stop_reason is StopReason.ANSWERED:
            said = await lease.next_user_turn(lambda: self.finish(StopReason.ANSWERED, seconds=0.0))
            self._user_exchanges = lease.user_exchanges
            if said is None:
                break
            stop_reason = self._hear(*said) or await self.take_turns(lease)
        return stop_reason

    async def begin(self, lease: Lease) -> StopReason:
        """Attempt the task until the first answer, or a limit."""
        schemas = [tool.schema for tool in lease.tools]
        self._prompt_ids = self._history = self._renderer.prompt_ids(self.task.prompt, schemas)
        self._context.begin(self._prompt_ids)
        if self._room() < 1:
            self.error = (
                f"The prompt of task {self.task.task_id!r} has {len(self._prompt_ids)} tokens, which leaves no room in "
                f"the model's context of {self._limits.max_context}. Allow fewer tools or shorten the prompt."
            )
            return StopReason.CONTEXT_FULL
        return await self.take_turns(lease)

    async def take_turns(self, lease: Lease) -> StopReason:
        """Generate and call tools until an answer or a limit."""
        schemas = [tool.schema for tool in lease.tools]
        max_turns = self.task.max_turns or self._limits.max_turns
        for index in range(max_turns):
            turn, start = self._num_turns, time.monotonic()
            self._num_turns += 1
            parsed, ended = await self._generate(turn, schemas)
            generated = time.monotonic()
            self._turn_seconds.append((generated - start, 0.0))
            if not ended:
                return StopReason.MAX_TOKENS
            if not parsed.calls and parsed.malformed is None:
                return StopReason.ANSWERED
            exchanges = await self._call(parsed, lease, turn)
            self._turn_seconds[-1] = (generated - start, time.monotonic() - generated)
            self._exchanges += exchanges
            broken = [e for e in exchanges if e.result.kind.is_server_fault]
            if broken:
                self.error = f"`{broken[0].call.name}`: {broken[0].result.text}"
                return StopReason.SERVER_FAILED
            # In its last turn the policy's calls still run, for what they do, but it cannot read the results.
            if index + 1 < max_turns and (stop_reason := await self._observe(exchanges, schemas)):
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
            states=self.states,
            turn_seconds=tuple(self._turn_seconds),
            turn_reads=tuple(self._turn_reads),
            user_exchanges=self._user_exchanges,
        )
        context_ids, start, end = trajectory.views[-1]
        if (
            self._history
            and context_ids + trajectory.completion_ids[start:end] != self._history
            and not self._is_recast
        ):
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
        sampling = Sampling(
            max_tokens=min(self._room(), self._limits.max_turn_tokens or self._room()),
            temperature=self._temperature,
            seed=derived_seed(self._seed, turn),
            constraint=None if self._grammars is None else self._grammars.grammar(schemas),
            trajectory=self._seed,
            pictures=self._pictures,
        )
        generation = await self._generator.generate(self._history, sampling)
        if generation.allowed_logprobs is not None and sampling.constraint is None:
            raise RolloutError(
                "The generator has sampled under a constraint though none was asked for: ratios would be those of another "
                "distribution, and the policy would not learn the format. Turn structured output off in the sampler, or set "
                "`constrained_decoding=True`."
            )
        parsed = self._renderer.parse(self._history, generation.token_ids, schemas)
        self._progress.num_tokens += len(generation.token_ids)
        if generation.num_cached is not None:
            self._turn_reads.append((len(self._history), generation.num_cached))
        self._progress.num_turns += 1
        self._seen = self._history + generation.token_ids
        self._append(
            Segment(
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                allowed_logprobs=generation.allowed_logprobs,
                context_ids=self._history if self._is_recast else None,
            )
        )
        self._is_recast = False
        self._messages.append(parsed.message)
        # A token that stands for a picture ends a turn, too, which cannot go on after it: nobody has such a picture.
        has_ended = generation.finish_reason == "stop" and generation.token_ids[-1] in self._renderer.end_of_turn_ids
        return parsed, has_ended

    async def _call(self, parsed: ParsedTurn, lease: Lease, turn: int) -> list[Exchange]:
        if parsed.malformed is not None:
            calls = (ToolCall(name="", arguments={"text": parsed.message["content"]}),)
            text = f"The tool call could not be read: {parsed.malformed}. Write it again in the required format."
            results = [ToolResult(text=text, kind=ResultKind.MALFORMED_CALL)]
        else:
            calls = parsed.calls
            with self._progress.calling(len(calls)):
                results = [await self._looked_at(result) for result in await lease.call_all(calls)]
        return [
            Exchange(
                call=ToolCall(name=well_formed(call.name), arguments=well_formed(call.arguments)),
                result=self._shortened(
                    replace(result, text=well_formed(result.text), structured=well_formed(result.structured))
                ),
                turn=turn,
            )
            for call, result in zip(calls, results, strict=True)
        ]

    async def _looked_at(self, result: ToolResult) -> ToolResult:
        """Keep the pictures of a result that the policy can see; the note of another says why it is not shown."""
        vision = self._renderer.vision
        if not result.images or vision is None or result.kind.is_server_fault:
            return replace(result, images=()) if result.images else result
        parts: list[str | Image] = []
        room = float("inf") if self._limits.max_result_tokens is None else self._limits.max_result_tokens
        for part in split(result.text, result.images):
            if not isinstance(part, str):
                try:
                    # Large ones take a while, in which other trajectories go on.
                    num_tokens = (await anyio.to_thread.run_sync(vision.picture, part)).num_tokens
                    if num_tokens > room:
                        raise UnseenError(f"it takes {num_tokens} tokens, and there is room for {int(room)}")
                    if self._num_images >= MAX_IMAGES:
                        raise UnseenError(f"you have seen {MAX_IMAGES} images already")
                    room -= num_tokens
                    self._num_images += 1
                except UnseenError as why:
                    part = f"{part.note.removesuffix(']')}; not shown: {why}]"
            parts.append(part)
        text, images = joined(parts)
        return replace(result, text=text, images=images)

    def _shortened(self, result: ToolResult) -> ToolResult:
        max_tokens = self._limits.max_result_tokens
        # Why a server failed is for us to read, not for the policy.
        if max_tokens is None or result.kind.is_server_fault:
            return result
        text, num_cut = self._renderer.shortened(result.text, max_tokens)
        images = after_cut(result.images, result.text, text)
        return replace(result, text=text, num_cut=num_cut, images=images) if num_cut else result

    def _hear(self, said: UserTurn, tools: Sequence[Tool]) -> StopReason | None:
        """Append what the user says for the policy to read, or say why it does not fit."""
        text = well_formed(said.content)
        # What the task has written is there to be read as it is.
        if self._limits.max_result_tokens is not None and said not in self.task.user_turns:
            text, _ = self._renderer.shortened(text, self._limits.max_result_tokens)
        text += told_of(tools)
        return self._read([{"role": "user", "content": text}], "A message of the user")

    async def _observe(self, exchanges: Sequence[Exchange], schemas: Sequence[dict]) -> StopReason | None:
        """Append the results for the policy to read, or say why they do not fit."""
        messages = result_messages(exchanges, self._renderer.vision)
        if self._context.wants_summary(self._num_tokens, messages, self._history):
            asked = [*messages, SUMMARY_REQUEST]
            if self._num_tokens(asked) + MIN_SUMMARY <= self._room():
                return self._read(asked, "Tool results", makes_room=False) or await self._sum_up(schemas)
        return self._read(messages, "Tool results")

    async def _sum_up(self, schemas: Sequence[dict]) -> StopReason | None:
        """Let the policy sum up, and go on from the task and what it wrote."""
        turn = self._num_turns
        self._num_turns += 1
        start = time.monotonic()
        parsed, ended = await self._generate(turn, [])
        self._turn_seconds.append((time.monotonic() - start, 0.0))
        if not ended:
            return StopReason.MAX_TOKENS
        asked = [message["content"] for message in self._messages if is_of_user(message)][-1:]
        summary = parsed.message.get("content") or ""
        self._recast(self._context.begin_anew(self.task.prompt, summary, asked, schemas, len(self._segments)))
        return None if self._room() > 0 else self._full("The summary")

    def _num_tokens(self, messages: Sequence[Message]) -> int:
        """Return how many tokens messages have, or where they are far too many, at least that many."""
        num_characters = sum(len(message["content"]) for message in messages)
        if num_characters > MAX_CHARACTERS_PER_TOKEN * self._most():
            return num_characters // MAX_CHARACTERS_PER_TOKEN
        return len(self._renderer.suffix_ids(messages))

    def _read(self, messages: Sequence[Message], what: str, *, makes_room: bool = True) -> StopReason | None:
        num_characters = sum(len(message["content"]) for message in messages)
        # What is far too long is not tokenised to find that out: it would hold up every other trajectory.
        if num_characters > MAX_CHARACTERS_PER_TOKEN * self._most():
            suffix, length = (), num_characters // MAX_CHARACTERS_PER_TOKEN
        else:
            suffix = self._renderer.suffix_ids(messages)
            length = len(suffix)
        if makes_room and length < self._budget() and self._context.is_short_after(length, self._history):
            self._make_room(length)
        if self._room() <= length:
            # Beyond both, the tighter one is the reason: with a larger context, the budget would have ended it just here.
            if self._context_room() >= self._budget():
                return StopReason.MAX_TOKENS
            return self._full(f"{what} of {num_characters} characters")
        if messages[0]["role"] == "tool":
            self._context.note_results(len(self._segments), [m for m in messages if m["role"] == "tool"], messages)
        self._append_read(suffix, messages)
        return None

    def _append_read(self, suffix: tuple[int, ...], messages: Sequence[Message]) -> None:
        """Append messages for the policy to read, given their tokens."""
        pictures = tuple(picture for message in messages for picture in message.get("images", ()))
        self._append(Segment(token_ids=suffix, images=tuple(picture.image for picture in pictures)))
        self._pictures += pictures
        self._messages += [recorded(message) for message in messages]

    def _full(self, what: str) -> StopReason:
        self.error = f"{what} did not fit into the model's context."
        return StopReason.CONTEXT_FULL

    def _make_room(self, length: int) -> None:
        """Shorten old results, where that is wanted, for as many tokens to be read."""
        shortened = self._context.shortened(self._segments, length)
        if shortened is not None and shortened != self._history:
            self._recast(shortened)

    def _recast(self, history: tuple[int, ...]) -> None:
        self._history = self._seen = history
        self._is_recast = True

    def _append(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._history += segment.token_ids

    def _context_room(self) -> float:
        return float("inf") if self._limits.max_context is None else self._limits.max_context - len(self._history)

    def _budget(self) -> int:
        """Return how many more tokens the completion may have."""
        return self._limits.max_completion_length - sum(len(segment.token_ids) for segment in self._segments)

    def _most(self) -> int:
        """Return how many tokens could fit at most, if room is made."""
        is_kept = self._limits.old_results == "keep" or self._limits.max_context is None
        return self._room() if is_kept else self._limits.max_context or 0

    def _room(self) -> int:
        """Return how many more tokens fit."""
        return int(min(self._budget(), self._context_room()))


def result_messages(exchanges: Sequence[Exchange], vision: Vision | None = None) -> list[Message]:
    """Return the results of calls as messages for the policy to read, with the pictures that it can see under `images`."""
    # A name that the policy made up is not echoed: templates trust names and could render control tokens.
    unnamed = (ResultKind.UNKNOWN_TOOL, ResultKind.MALFORMED_CALL)
    messages: list[Message] = []
    for exchange in exchanges:
        call, result = exchange.call, exchange.result
        name = "unknown" if result.kind in unnamed else call.name
        messages.append({"role": "tool", "name": name, "content": result.text})
        if vision is not None and result.images:
            messages[-1]["images"] = [vision.picture(image) for image in result.images]
    return messages


def recorded(message: Message) -> Message:
    """Return a message as a trajectory has it: which pictures it had, not the pictures."""
    if "images" not in message:
        return message
    return {**message, "images": [picture.image.reference for picture in message["images"]]}


def told_of(tools: Sequence[Tool]) -> str:
    """Return the text that tells the policy of tools that it has from now on; nothing if there are none."""
    described = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    return f"\n\nYou can use these tools from now on:\n{described}" if tools else ""


def derived_seed(*parts: int | str) -> int:
    """Derive a seed from several parts, such as a run's seed, a step and an index; similar parts give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
