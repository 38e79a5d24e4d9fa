"""
The values that flow through a rollout: made once, never edited.

`Task -> Trajectory(Segment, ToolCall, ToolResult, StopReason)`. They hold no logic but derived views, so that masks,
log-probabilities and token ids cannot get out of step: they are all read off the same segments.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain
from operator import add
from typing import Any, Protocol


Message = dict[str, Any]  # a chat message, as chat templates and TRL take it

TRAJECTORY_ID = "mcp_grpo/trajectory_id"
SETUP = "mcp_grpo/setup"
"""In `_meta` of a request: whose call it is, for servers that keep state by that."""
OUTAGE = "mcp_grpo/outage"
"""In `_meta` of an error: what the server itself relies on has failed, so that the policy is not to blame."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    """The policy ended a turn without calling a tool."""
    MAX_TURNS = "max_turns"
    """The policy still called tools in its last allowed turn."""
    MAX_TOKENS = "max_tokens"
    """The completion reached its token budget."""
    CONTEXT_FULL = "context_full"
    """A tool result did not fit into the model's context, which was tighter than the token budget; or the prompt did not."""
    DEADLINE = "deadline"
    """The trajectory ran out of wall-clock time."""
    SERVER_FAILED = "server_failed"
    """A server broke or did not answer in time: our fault, never the policy's."""

    @property
    def is_failure(self) -> bool:
        """
        Tell whether the trajectory ended for a reason the policy is not to blame for. A full context is none: the policy asked
        for what did not fit, and what is left out is never unlearnt.
        """
        return self in (StopReason.DEADLINE, StopReason.SERVER_FAILED)


class ResultKind(StrEnum):
    """The kind of result of a tool call, by who is responsible for it."""

    OK = "ok"
    TOOL_ERROR = "tool_error"
    """The tool ran and answered with an error: an observation like any other."""
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    MALFORMED_CALL = "malformed_call"
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"

    @property
    def is_policy_fault(self) -> bool:
        """Tell whether the policy asked for something that could not be called."""
        return self in (ResultKind.UNKNOWN_TOOL, ResultKind.INVALID_ARGUMENTS, ResultKind.MALFORMED_CALL)

    @property
    def is_server_fault(self) -> bool:
        """Tell whether the call failed for a reason on our side; the trajectory is then not trained on."""
        return self in (ResultKind.TIMEOUT, ResultKind.SERVER_ERROR)


class TokenRole(StrEnum):
    """The part a token plays in a tool call."""

    ENVIRONMENT = "environment"
    """Written by a tool or by the chat template."""
    CHOICE = "choice"
    """Free text, reasoning, the name of a tool, a value, the end of a turn: another token could have stood here."""
    TRIGGER = "trigger"
    """Opens a tool call: calling at all is a choice."""
    STRADDLING = "straddling"
    """Syntax of a tool call and a choice in one token, which makes it a choice."""
    FORCED = "forced"
    """Syntax of a valid tool call, where its format left no choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTurn:
    """
    A further message of the user, after the policy has answered.

    Args:
        content (`str`):
            The message.
        tools (`tuple[str, ...]`, *optional*):
            Names of tools that the policy may use from now on. Until then it is not offered them.
    """

    content: str
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    One row of the dataset: what to do, with which tools, and what the reward needs to know.

    Args:
        task_id (`str`):
            Name of the task, unique in its dataset.
        prompt (`tuple[Message, ...]`):
            Opening messages.
        servers (`tuple[str, ...]`, *optional*):
            Names of the servers whose tools the policy may use. `None` stands for all of them.
        tools (`tuple[str, ...]`, *optional*):
            Names of the tools the policy may use. `None` stands for all tools of `servers`.
        max_turns (`int`, *optional*):
            Limit on turns for this task, after each message of the user; the configuration's limit applies when it is `None`.
        difficulty (`str`, *optional*):
            Free label, used to group metrics.
        answer (`Any`, *optional*):
            Expected answer, in whatever form the reward functions read it.
        user_turns (`tuple[UserTurn, ...]`, *optional*):
            Further messages of the user: each follows an answer of the policy.
        metadata (`Mapping[str, Any]`, *optional*):
            Every other column of the row.
    """

    task_id: str
    prompt: tuple[Message, ...]
    servers: tuple[str, ...] | None = None
    tools: tuple[str, ...] | None = None
    max_turns: int | None = None
    difficulty: str | None = None
    answer: Any = None
    user_turns: tuple[UserTurn, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def kind(self) -> str | None:
        """Return what kind of task it is: its column `family`, or its `difficulty` where there is no family."""
        named = (self.metadata.get("family"), self.difficulty)
        return next((str(each) for each in named if each not in (None, "")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """
    A call as the policy wrote it.

    Args:
        name (`str`):
            Name of the tool, as the prompt names it.
        arguments (`Mapping[str, Any]`):
            Arguments, as the policy wrote them.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """
    A picture that a tool returned, and where it stands in the text of its result.

    Args:
        data (`bytes`):
            The file, as the server sent it.
        mime_type (`str`):
            What the server says it is.
        note (`str`):
            What stands for it in the text of the result.
        num_after (`int`, *optional*, defaults to `0`):
            How many characters of the text come after it.
    """

    data: bytes = field(repr=False)
    mime_type: str
    note: str
    num_after: int = 0

    @property
    def sha256(self) -> str:
        """Return the hash of the file, by which it can be told from others."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def reference(self) -> dict[str, Any]:
        """Return what records have of it: which file it is, not the file."""
        return {"sha256": self.sha256, "bytes": len(self.data), "mime_type": self.mime_type}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """
    The result of a tool call, error or not.

    Args:
        text (`str`):
            What the policy reads.
        kind (`ResultKind`, *optional*, defaults to `ResultKind.OK`):
            Whether it worked, and if not, whose doing it is.
        structured (`Any`, *optional*):
            The result's structured content, for reward functions; the policy does not see it.
        server (`str`, *optional*):
            Name of the server that answered.
        seconds (`float`, *optional*, defaults to `0.0`):
            How long the server took. Waiting in a queue does not count.
        num_attempts (`int`, *optional*, defaults to `1`):
            How often the call was sent. More than once only where that does no harm.
        repairs (`tuple[str, ...]`, *optional*):
            What was changed in the arguments before the call, in words. The policy reads them too.
        num_cut (`int`, *optional*, defaults to `0`):
            How many characters were cut out of the text, because it was over the budget for one result.
        images (`tuple[Image, ...]`, *optional*):
            Pictures that came with it, in the order of their notes in the text. In a trajectory, those that the policy saw in the
            place of their notes.
    """

    text: str
    kind: ResultKind = ResultKind.OK
    structured: Any = None
    server: str | None = None
    seconds: float = 0.0
    num_attempts: int = 1
    repairs: tuple[str, ...] = ()
    num_cut: int = 0
    images: tuple[Image, ...] = ()

    @property
    def is_error(self) -> bool:
        """Tell whether anything but a plain success came back."""
        return self.kind is not ResultKind.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """
    A tool call, its result and the turn it belongs to.

    Args:
        call (`ToolCall`):
            What the policy asked for. A call that could not be parsed has an empty name and its text as the argument
            `text`.
        result (`ToolResult`):
            What came back.
        turn (`int`):
            Index of the turn, from 0.
    """

    call: ToolCall
    result: ToolResult
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """
    A message of the user and all that the policy did until it answered.

    Args:
        question (`str`):
            The user's message; empty if the prompt does not end with one that is text.
        exchanges (`tuple[Exchange, ...]`):
            The policy's calls, with their results.
        answer (`str`, *optional*):
            The message it answered with; `None` if it did not come to one.
    """

    question: str
    exchanges: tuple[Exchange, ...]
    answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """
    A run of tokens with one author.

    Args:
        token_ids (`tuple[int, ...]`):
            The tokens, at least one.
        logprobs (`tuple[float, ...]`, *optional*):
            One log-probability per token under the distribution it was sampled from. `None` for tokens that the
            environment wrote.
        allowed_logprobs (`tuple[float, ...]`, *optional*):
            For tokens that were sampled under a constraint, the log-probability that the policy gave to all that the
            constraint allowed there. `None` for tokens that were sampled freely.
        context_ids (`tuple[int, ...]`, *optional*):
            What the policy saw before it wrote these, where that was not all that stands before them: prompt included, with old
            tool results shortened. What follows was written after these, in the same context.
        images (`tuple[Image, ...]`, *optional*):
            Pictures that stand among tokens of the environment, in order: those of their placeholders are theirs.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    allowed_logprobs: tuple[float, ...] | None = None
    context_ids: tuple[int, ...] | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("A segment needs at least one token; leave an empty one out.")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"A sampled segment needs one log-probability per token, got {len(self.logprobs)} for "
                f"{len(self.token_ids)} tokens. Pass the generator's output as it is."
            )
        if self.allowed_logprobs is not None and len(self.allowed_logprobs) != len(self.logprobs or ()):
            raise ValueError(
                f"A segment sampled under a constraint needs one entry of `allowed_logprobs` per token, got "
                f"{len(self.allowed_logprobs)} for {len(self.logprobs or ())}. Pass the generator's output as it is."
            )

    @property
    def sampled(self) -> bool:
        """Tell whether the policy wrote these tokens."""
        return self.logprobs is not None

    @property
    def policy_logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each token under the policy without a constraint; 0.0 for the environment's."""
        if self.logprobs is None or self.allowed_logprobs is None:
            return self.logprobs or (0.0,) * len(self.token_ids)
        return tuple(map(add, self.logprobs, self.allowed_logprobs))


def is_of_user(message: Message) -> bool:
    """Tell whether the user said a message of a trajectory: not so where the policy was asked to sum up."""
    return message["role"] == "user" and "asks_for" not in message


class VocabularyLike(Protocol):
    """Something that knows the bytes of each token, such as a `Vocabulary`."""

    def pieces(self, ids: Sequence[int], /) -> list[bytes]:
        """Return the exact bytes of each token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """
    The finished record of one attempt at a task.

    Everything per token is derived from `segments`, so ids, masks and log-probabilities have equal lengths by
    construction.

    Args:
        task (`Task`):
            What was attempted.
        prompt_ids (`tuple[int, ...]`):
            Tokens of the opening prompt, as the generator first saw them.
        segments (`tuple[Segment, ...]`):
            What followed, in order. A segment the policy wrote opens a turn.
        messages (`tuple[Message, ...]`):
            The same, as chat messages.
        exchanges (`tuple[Exchange, ...]`):
            Every tool call with its result.
        stop_reason (`StopReason`):
            Why it ended.
        seconds (`float`, *optional*, defaults to `0.0`):
            Wall-clock time from the first token to the end.
        error (`str`, *optional*):
            What broke, for a trajectory that failed.
        roles (`tuple[TokenRole, ...]`, *optional*):
            What each completion token is to its author. `None` takes every sampled token for a choice.
        masked (`tuple[bool, ...]`, *optional*):
            Whether the policy loss leaves a completion token out although the policy wrote it. `None` if it leaves
            none out.
        vocabulary (`VocabularyLike`, *optional*):
            What knows the bytes of each token, for [`~mcp_grpo.explain`].
        left_out (`bool`, *optional*, defaults to `False`):
            Whether loss and baseline leave it out although it did not fail.
        queue_seconds (`float`, *optional*, defaults to `0.0`):
            How long it waited to be started, because enough others were under way.
        states (`Mapping[str, Any]`, *optional*):
            What it has left behind at the servers that have a `state_tool`, by their names; none if it was broken off.
        is_scripted (`bool`, *optional*, defaults to `False`):
            Whether its turns are those of the task's scripted solution. Its log-probabilities are 0 then, and ratios are
            taken to those of the policy that is trained.
        turn_seconds (`tuple[tuple[float, float], ...]`, *optional*):
            For each turn, how long it was generated and how long its calls took, waiting included.
        turn_reads (`tuple[tuple[int, int], ...]`, *optional*):
            For each turn of which the sampler knows it, how many tokens its prompt had, and how many of them were not computed anew.
        user_exchanges (`tuple[Exchange, ...]`, *optional*):
            Tool calls of the user with their results; their `turn` is the number of turns that the policy had had.
        staleness (`int`, *optional*, defaults to `0`):
            Updates of the policy between its beginning and its use. Later turns may be of newer weights.

    Example:

    ```
    segments        policy: call (3 tokens)   environment: result (2)   policy: answer (1)
    sampled_mask    1 1 1                     0 0                       1
    turn_ids        0 0 0                     -1 -1                     1
    ```
    """

    task: Task
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    exchanges: tuple[Exchange, ...]
    stop_reason: StopReason
    seconds: float = 0.0
    error: str | None = None
    roles: tuple[TokenRole, ...] | None = None
    masked: tuple[bool, ...] | None = None
    vocabulary: VocabularyLike | None = field(default=None, repr=False, compare=False)
    left_out: bool = False
    queue_seconds: float = 0.0
    states: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_scripted: bool = False
    turn_seconds: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    turn_reads: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    user_exchanges: tuple[Exchange, ...] = ()
    staleness: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"The trajectory of task {self.task.task_id!r} has no prompt tokens.")
        for name, values in (("roles", self.roles), ("masked", self.masked)):
            if values is not None and len(values) != len(self.completion_ids):
                raise ValueError(
                    f"`{name}` needs one entry per completion token, tool results included; got {len(values)} for "
                    f"{len(self.completion_ids)} tokens (task {self.task.task_id!r})."
                )

    @cached_property
    def completion_ids(self) -> tuple[int, ...]:
        """Return all tokens after the prompt, tool results included."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def images(self) -> tuple[Image, ...]:
        """Return the pictures that the policy saw, in order."""
        return tuple(chain.from_iterable(segment.images for segment in self.segments))

    @cached_property
    def views(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """
        Return the contexts that the policy wrote in: what came before, and the completion tokens from `start` to `end` that follow
        it, up to the last that it wrote. There is one, the prompt and all tokens, unless old tool results were shortened on the way.
        """
        starts, contexts, ends, length = [0], [self.prompt_ids], [0], 0
        for segment in self.segments:
            if segment.context_ids is not None:
                starts.append(length)
                contexts.append(segment.context_ids)
                ends.append(length)
            length += len(segment.token_ids)
            ends[-1] = length if segment.sampled else ends[-1]
        ends[-1] = length  # what tools wrote last, nobody has shortened
        return tuple(zip(contexts, starts, ends, strict=True))

    @cached_property
    def sampled_mask(self) -> tuple[int, ...]:
        """Return 1 where the policy sampled the token, 0 where the environment wrote it."""
        return tuple(chain.from_iterable([int(s.sampled)] * len(s.token_ids) for s in self.segments))

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """Return 1 where the policy loss applies: sampled, not masked, in a trajectory that is learnt from."""
        if not self.is_learnt_from:
            return (0,) * len(self.sampled_mask)
        if self.masked is None:
            return self.sampled_mask
        return tuple(int(s and not m) for s, m in zip(self.sampled_mask, self.masked, strict=True))

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """Return the sampler's log-probability of each token; 0.0 where the environment wrote it."""
        return tuple(chain.from_iterable(s.logprobs or (0.0,) * len(s.token_ids) for s in self.segments))

    @property
    def policy_logprobs(self) -> tuple[float, ...]:
        """
        Return the log-probability of each token under the policy that sampled, without its constraint if it had one; 0.0 where
        the environment wrote it. Ratios are taken to it.
        """
        return tuple(chain.from_iterable(s.policy_logprobs for s in self.segments))

    @cached_property
    def turn_ids(self) -> tuple[int, ...]:
        """Return the turn of each sampled token, from 0; -1 where the environment wrote it."""
        turn = -1
        ids: list[int] = []
        for segment in self.segments:
            turn += segment.sampled
            ids.extend([turn if segment.sampled else -1] * len(segment.token_ids))
        return tuple(ids)

    @property
    def num_turns(self) -> int:
        """Return how many times the policy generated."""
        return sum(segment.sampled for segment in self.segments)

    @property
    def answer(self) -> str | None:
        """
        Return the text of the final message; `None` if the policy did not end with one, or it was empty.

        Where it is `None`, no reward that ships is paid: what was cut short would otherwise be worth as much as what came to
        its end, and the policy would learn not to end.
        """
        text = self.messages[-1].get("content") if self.stop_reason is StopReason.ANSWERED else None
        return text if text and text.strip() else None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """
        Return what was done and answered after each message of the user; one round where the user spoke only at first.

        Example:

        ```python
        def every_answer_is_short(trajectory, **kwargs):
            return [float(all(len(r.answer or "") < 200 for r in each.rounds)) for each in trajectory]
        ```
        """
        opening = self.task.prompt[-1].get("content") if self.task.prompt else None
        questions: list[str] = [opening if isinstance(opening, str) else ""]
        answers: list[str | None] = [None]
        round_of: list[int] = []  # by turn
        for message in self.messages:
            if is_of_user(message):
                questions.append(message["content"])
                answers.append(None)
            elif message["role"] == "assistant":
                round_of.append(len(questions) - 1)
                answers[-1] = None if message.get("tool_calls") else message.get("content")
        if self.stop_reason is not StopReason.ANSWERED:
            answers[-1] = None
        return tuple(
            Round(
                question=question,
                exchanges=tuple(e for e in self.exchanges if e.turn < len(round_of) and round_of[e.turn] == index),
                answer=answer if answer and answer.strip() else None,
            )
            for index, (question, answer) in enumerate(zip(questions, answers, strict=True))
        )

    @property
    def is_failed(self) -> bool:
        """
        Tell whether it ended for a reason the policy is not to blame for; it is then left out of loss and baseline. So is one
        whose prompt filled the context, before the policy wrote anything.
        """
        return self.stop_reason.is_failure or (self.stop_reason is StopReason.CONTEXT_FULL and not self.segments)

    @property
    def is_cut(self) -> bool:
        """Tell whether it ran out of turns, of tokens or of the model's context."""
        cuts = (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL)
        return self.stop_reason in cuts and not self.is_failed

    @property
    def is_learnt_from(self) -> bool:
        """Tell whether it enters loss and baseline."""
        return not (self.is_failed or self.left_out)
