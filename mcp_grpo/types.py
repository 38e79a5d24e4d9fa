"""
The values that flow through a rollout: made once, never edited.

`Task -> Trajectory(Segment, ToolCall, ToolResult, StopReason)`. They hold no logic but derived views, so that masks,
log-probabilities and token ids cannot get out of step: they are all read off the same segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

from mcp_grpo.token_view import TokenView, ViewCall, ViewToken


Message = dict[str, Any]  # a chat message, as chat templates and TRL take it

TRAJECTORY_ID = "mcp_grpo/trajectory_id"
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
    """A tool result did not fit into the model's context, which was tighter than the token budget."""
    DEADLINE = "deadline"
    """The trajectory, or its whole batch, ran out of wall-clock time."""
    SERVER_FAILED = "server_failed"
    """A server broke or did not answer in time: our fault, never the policy's."""
    STRAGGLER = "straggler"
    """Most of its batch had ended, and those that were left were cut, as was asked for: no failure."""

    @property
    def is_failure(self) -> bool:
        """Whether the trajectory ended for a reason the policy is not to blame for."""
        return self in (StopReason.CONTEXT_FULL, StopReason.DEADLINE, StopReason.SERVER_FAILED)


class ResultKind(StrEnum):
    """What came back from a tool call, by whose doing it is."""

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
        """Whether the policy asked for something that could not be called."""
        return self in (ResultKind.UNKNOWN_TOOL, ResultKind.INVALID_ARGUMENTS, ResultKind.MALFORMED_CALL)

    @property
    def is_server_fault(self) -> bool:
        """Whether the call failed for a reason that is ours; the trajectory is then not trained on."""
        return self in (ResultKind.TIMEOUT, ResultKind.SERVER_ERROR)


class TokenRole(StrEnum):
    """What a token is to the one who wrote it."""

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
            Limit on turns for this task; the configuration's limit applies when it is `None`.
        difficulty (`str`, *optional*):
            Free label, used to break figures down.
        answer (`Any`, *optional*):
            Expected answer, in whatever form the reward functions read it.
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
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """
    What the policy asked for.

    Args:
        name (`str`):
            Name of the tool, as the prompt names it.
        arguments (`Mapping[str, Any]`):
            Arguments, as the policy wrote them.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """
    What came back from a tool call, error or not.

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
    """

    text: str
    kind: ResultKind = ResultKind.OK
    structured: Any = None
    server: str | None = None
    seconds: float = 0.0
    num_attempts: int = 1
    repairs: tuple[str, ...] = ()
    num_cut: int = 0

    @property
    def is_error(self) -> bool:
        """Whether anything but a plain success came back."""
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
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    allowed_logprobs: tuple[float, ...] | None = None

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
        """Whether the policy wrote these tokens."""
        return self.logprobs is not None


class VocabularyLike(Protocol):
    """What knows the bytes of each token, such as a `Vocabulary`."""

    def pieces(self, ids: Sequence[int], /) -> list[bytes]:
        """The exact bytes of each token."""
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
            What knows the bytes of each token, for [`explain`].
        num_rejected (`int`, *optional*, defaults to `0`):
            How often its first turn was thrown away and sampled again, because it called no tool.
        left_out (`bool`, *optional*, defaults to `False`):
            Whether loss and baseline leave it out although it did not fail.
        queue_seconds (`float`, *optional*, defaults to `0.0`):
            How long it waited to be started, because enough others were under way.
        states (`Mapping[str, Any]`, *optional*):
            What it has left behind at the servers that have a `state_tool`, by their names; none if it was broken off.

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
    num_rejected: int = 0
    left_out: bool = False
    queue_seconds: float = 0.0
    states: Mapping[str, Any] = field(default_factory=dict[str, Any])

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
        """All tokens after the prompt, tool results included."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @cached_property
    def sampled_mask(self) -> tuple[int, ...]:
        """1 where the policy sampled the token, 0 where the environment wrote it."""
        return tuple(chain.from_iterable([int(s.sampled)] * len(s.token_ids) for s in self.segments))

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 where the policy loss looks: sampled, not masked, and in a trajectory that is learnt from."""
        if not self.is_learnt_from:
            return (0,) * len(self.sampled_mask)
        if self.masked is None:
            return self.sampled_mask
        return tuple(int(s and not m) for s, m in zip(self.sampled_mask, self.masked, strict=True))

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """The sampler's log-probability of each token; 0.0 where the environment wrote it."""
        return tuple(chain.from_iterable(s.logprobs or (0.0,) * len(s.token_ids) for s in self.segments))

    @cached_property
    def turn_ids(self) -> tuple[int, ...]:
        """The turn each sampled token belongs to, from 0; -1 where the environment wrote it."""
        turn = -1
        ids: list[int] = []
        for segment in self.segments:
            turn += segment.sampled
            ids.extend([turn if segment.sampled else -1] * len(segment.token_ids))
        return tuple(ids)

    @property
    def num_turns(self) -> int:
        """How many times the policy generated."""
        return sum(segment.sampled for segment in self.segments)

    @property
    def answer(self) -> str | None:
        """
        The text of the final message; `None` if the policy did not end with one, or said nothing in it.

        Where it is `None`, no reward that ships is paid: what was cut short would otherwise be worth as much as what came to
        its end, and the policy would learn not to end.
        """
        text = self.messages[-1].get("content") if self.stop_reason is StopReason.ANSWERED else None
        return text if text and text.strip() else None

    @property
    def is_failed(self) -> bool:
        """Whether it ended for a reason the policy is not to blame for; it is then left out of loss and baseline."""
        return self.stop_reason.is_failure

    @property
    def is_cut(self) -> bool:
        """Whether it ran out of turns or tokens."""
        return self.stop_reason in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS)

    @property
    def is_learnt_from(self) -> bool:
        """Whether it enters loss and baseline."""
        return not (self.is_failed or self.left_out or self.stop_reason is StopReason.STRAGGLER)

    def explain(self, *, reward: float | None = None) -> TokenView:
        """
        Show it token by token: who wrote each, what it is, how likely it was, and whether the policy loss sees it.

        Args:
            reward (`float`, *optional*):
                What it was worth, to be shown with it.

        Returns:
            [`TokenView`]: Shows in a notebook or a terminal, and can be saved as a page.
        """
        if self.vocabulary is None:
            raise ValueError(
                f"The trajectory of task {self.task.task_id!r} has no `vocabulary` to tell what its tokens say. Those "
                "that `MCPGRPOTrainer.roll_out` returns have one."
            )
        pieces = self.vocabulary.pieces(self.prompt_ids + self.completion_ids)
        length, start = len(self.completion_ids), len(self.prompt_ids)
        tokens = [
            ViewToken(token_id=token_id, piece=piece, author="prompt")
            for token_id, piece in zip(self.prompt_ids, pieces[:start], strict=True)
        ]
        by_author = (TokenRole.ENVIRONMENT, TokenRole.CHOICE)
        roles = self.roles or tuple(by_author[sampled] for sampled in self.sampled_mask)
        masked = (True,) * length if not self.is_learnt_from else self.masked or (False,) * length
        columns = (self.completion_ids, pieces[start:], self.turn_ids, self.logprobs, roles, masked)
        turn = None
        for token_id, piece, turn_id, logprob, role, is_masked in zip(*columns, strict=True):
            sampled = turn_id >= 0
            turn = turn_id if sampled else turn  # a reply belongs to the turn it answers
            tokens.append(
                ViewToken(
                    token_id=token_id,
                    piece=piece,
                    author="policy" if sampled else "environment",
                    role=role.value,
                    logprob=logprob if sampled else None,
                    masked=is_masked and sampled,
                    turn=turn,
                )
            )
        return TokenView(
            task_id=self.task.task_id,
            stop_reason=self.stop_reason.value,
            tokens=tuple(tokens),
            calls=tuple(ViewCall(name=e.call.name, kind=e.result.kind.value, turn=e.turn) for e in self.exchanges),
            reward=reward,
            failure=(self.error or "") if self.is_failed else None,
        )
