"""A policy behind an OpenAI-compatible endpoint, with its own tool calling."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2

from mcp_grpo.errors import SettingsError, ToolServerError
from mcp_grpo.tools import Lease, ToolPool
from mcp_grpo.types import Exchange, Message, ResultKind, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


FIRST_WAIT, MAX_WAIT = 0.5, 20.0  # seconds before a request is sent again
_PASSING = (408, 409, 425, 429)  # statuses that may be gone at the next try, beside 5xx
_MAX_SHOWN = 300  # characters of a reply in a message


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """
    A model behind an OpenAI-compatible endpoint. It is given the tools as functions, and writes calls in its own way.

    Args:
        base_url (`str`):
            Address, such as `http://localhost:8000/v1`.
        model (`str`):
            Name of the model there.
        api_key_variable (`str`, *optional*):
            Name of the environment variable that holds the key.
        temperature (`float`, *optional*):
            Temperature of sampling; that of the endpoint if not given.
        max_turn_tokens (`int`, *optional*, defaults to `4096`):
            Tokens that it may write in a turn.
        max_turns (`int`, *optional*, defaults to `10`):
            Turns per attempt; a task's own `max_turns` comes first.
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds per attempt, requests that are sent again and tools together.

    Raises:
        [`SettingsError`]: If the key's variable is not set.
    """

    base_url: str
    model: str
    api_key_variable: str | None = None
    temperature: float | None = None
    max_turn_tokens: int = 4096
    max_turns: int = 10
    timeout: float = 600.0
    _headers: dict[str, str] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))
        if self.api_key_variable is None:
            return
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise SettingsError(f"The variable {self.api_key_variable!r} for the endpoint's key is not set.")
        self._headers["Authorization"] = f"Bearer {key}"

    async def check(self) -> None:
        """
        Ask for one word, so that a wrong address, key or name is known at once.

        Raises:
            [`SettingsError`]: If it does not reply.
        """
        async with self.client() as client:
            body = {"model": self.model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
            try:
                response = await client.post(f"{self.base_url}/chat/completions", json=body)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise SettingsError(
                    f"The endpoint {self.base_url!r} cannot be reached: {type(error).__name__}: {error}. Start it, or correct "
                    "the address, which usually ends with `/v1`."
                ) from error
        if response.status_code >= 400 and response.status_code not in _PASSING:
            raise SettingsError(
                f"The endpoint {self.base_url!r} refuses the model {self.model!r}: HTTP status {response.status_code}, "
                f"{response.text[:_MAX_SHOWN]!r}. Correct its address, its name or the key."
            )

    def client(self) -> httpx2.AsyncClient:
        """Return a client for requests to it."""
        return httpx2.AsyncClient(headers=self._headers, timeout=self.timeout)

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        client: httpx2.AsyncClient,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> "Reply":
        """
        Ask for the next message, again and again where the problem may pass: give it a deadline.

        Args:
            messages (`Sequence[Message]`):
                The conversation so far.
            tools (`Sequence[Mapping[str, Any]]`):
                Tools that it may call.
            client (`httpx2.AsyncClient`):
                From [`client`].
            on_problem (`Callable[[str], None]`, *optional*):
                Is told why there was no reply so far.

        Returns:
            [`Reply`]: The message.

        Raises:
            [`EndpointFailed`]: If asking again is useless.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "max_tokens": self.max_turn_tokens}
        body |= {"tools": list(tools)} if tools else {}
        body |= {} if self.temperature is None else {"temperature": self.temperature}
        # Half a surrogate pair, which a tool may return, is no text that could be sent.
        content, headers, wait = json.dumps(body).encode(), {"content-type": "application/json"}, FIRST_WAIT
        while True:
            is_passing, asked = True, 0.0
            try:
                response = await client.post(f"{self.base_url}/chat/completions", content=content, headers=headers)
            except httpx2.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    return self._read(response)
                problem = f"HTTP status {response.status_code}: {response.text[:_MAX_SHOWN]!r}"
                is_passing = response.status_code in _PASSING or response.status_code >= 500
                asked = _seconds(response.headers.get("retry-after"))
            sentence = f"The endpoint {self.base_url!r} gave no reply: {problem}"
            on_problem(sentence)
            if not is_passing:
                raise EndpointFailed(sentence)
            await anyio.sleep(max(wait, asked))
            wait = min(2 * wait, MAX_WAIT)

    def _read(self, response: httpx2.Response) -> "Reply":
        try:
            reply = response.json()
            choice = reply["choices"][0]
            message = dict(choice["message"])
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise EndpointFailed(
                f"The reply of {self.base_url!r} is not a chat completion: {response.text[:_MAX_SHOWN]!r}"
            ) from None
        usage = reply.get("usage") or {}
        return Reply(
            message=message,
            is_whole=choice.get("finish_reason") != "length",
            tokens_read=int(usage.get("prompt_tokens") or 0),
            tokens_written=int(usage.get("completion_tokens") or 0),
        )

    async def attempt(
        self, task: Task, pool: ToolPool, client: httpx2.AsyncClient
    ) -> tuple[Trajectory, tuple[int, int]]:
        """
        Attempt a task once. Whatever happens to endpoint, tools and servers ends up in the trajectory.

        Args:
            task ([`Task`]):
                What to attempt.
            pool ([`ToolPool`]):
                The open servers.
            client (`httpx2.AsyncClient`):
                From [`client`].

        Returns:
            `tuple[Trajectory, tuple[int, int]]`: The trajectory, with one placeholder token for each turn, and the tokens that
            the endpoint says it has read and written.
        """
        conversation = EndpointConversation(self, task, client)
        stop_reason, start, states = StopReason.DEADLINE, time.monotonic(), {}
        try:
            async with pool.lease(task) as lease:
                start = time.monotonic()
                with anyio.move_on_after(self.timeout):
                    stop_reason = await conversation.attempt(lease)
                if not stop_reason.is_failure:
                    states = await lease.states()
        except (ToolServerError, EndpointFailed) as error:
            stop_reason, conversation.error = StopReason.SERVER_FAILED, str(error)
        trajectory = conversation.trajectory(stop_reason, seconds=time.monotonic() - start, states=states)
        return trajectory, (conversation.tokens_read, conversation.tokens_written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A message of an endpoint, as it came."""

    message: Message
    is_whole: bool
    tokens_read: int
    tokens_written: int


class EndpointFailed(Exception):
    """The endpoint gave no reply that could be used: not the policy's fault."""


class EndpointConversation:
    """An attempt while it is made, or a conversation: it goes on when the user says more."""

    def __init__(
        self,
        endpoint: Endpoint,
        task: Task,
        client: httpx2.AsyncClient,
        watch: Callable[[Message | Exchange], None] | None = None,
    ) -> None:
        self.error: str | None = None
        self.messages: list[Message] = []
        self.exchanges: list[Exchange] = []
        self.num_turns = self.tokens_read = self.tokens_written = 0
        self._endpoint = endpoint
        self._task = task
        self._client = client
        self._watch = watch or (lambda seen: None)
        self._sent: list[Message] = [dict(message) for message in task.prompt]  # as the endpoint has them
        self._user_exchanges: tuple[Exchange, ...] = ()
        self._unread: tuple[Sequence[Any], list[Exchange]] = (), []  # results that came after the last turn

    async def say(self, text: str, lease: Lease) -> StopReason:
        """
        Let the model reply to a message, and return why it ended. What was said since is taken back if it fails or is broken off.
        """
        sent, unread, stop_reason = list(self._sent), self._unread, StopReason.DEADLINE
        try:
            self._observe(*unread)
            self._unread = (), []
            self._sent.append({"role": "user", "content": text})
            with anyio.move_on_after(self._endpoint.timeout):
                stop_reason = await self.run(lease)
        except (ToolServerError, EndpointFailed) as error:
            stop_reason, self.error = StopReason.SERVER_FAILED, str(error)
        finally:
            if stop_reason.is_failure:
                self._sent, self._unread = sent, unread
        return stop_reason

    async def attempt(self, lease: Lease) -> StopReason:
        """Let the model reply until the user has no more to say, and return why it ended."""
        stop_reason = await self.run(lease)
        while stop_reason is StopReason.ANSWERED:
            said = await lease.next_user_turn(lambda: self.trajectory(StopReason.ANSWERED))
            self._user_exchanges = lease.user_exchanges
            if said is None:
                break
            message: Message = {"role": "user", "content": said[0].content}
            self._sent.append(message)
            self.messages.append(message)
            stop_reason = await self.run(lease)
        return stop_reason

    def trajectory(self, stop_reason: StopReason, **more: Any) -> Trajectory:
        """Return what was said so far, with one placeholder token for each turn."""
        return Trajectory(
            task=self._task,
            prompt_ids=(0,),
            segments=(Segment(token_ids=(0,), logprobs=(0.0,)),) * self.num_turns,
            messages=tuple(self.messages),
            exchanges=tuple(self.exchanges),
            stop_reason=stop_reason,
            error=self.error,
            user_exchanges=self._user_exchanges,
            **more,
        )

    async def run(self, lease: Lease) -> StopReason:
        """Let the model reply until it answers, or to a limit."""
        tools = [tool.schema for tool in lease.tools]
        max_turns = self._task.max_turns or self._endpoint.max_turns
        for index in range(max_turns):
            turn = self.num_turns
            message, is_whole = await self._ask(tools)
            self.num_turns += 1
            written: Sequence[Any] = message.get("tool_calls") or ()
            if not is_whole and not written:
                self._keep(message, [])
                self._watch(self.messages[-1])
                return StopReason.MAX_TOKENS
            calls = [read_call(call) for call in written]
            self._keep(message, calls)
            self._watch(self.messages[-1])
            if not calls:
                return StopReason.ANSWERED
            results = await _call_all(calls, lease)
            found = [
                Exchange(call=call, result=result, turn=turn) for (call, _), result in zip(calls, results, strict=True)
            ]
            self.exchanges += found
            for exchange in found:
                self._watch(exchange)
            if broken := [each for each in found if each.result.kind.is_server_fault]:
                self.error = f"`{broken[0].call.name}`: {broken[0].result.text}"
                return StopReason.SERVER_FAILED
            if index + 1 < max_turns:
                self._observe(written, found)
            else:
                self._unread = written, found
        return StopReason.MAX_TURNS

    async def _ask(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Message, bool]:
        """Return the next message, and whether it is whole."""
        reply = await self._endpoint.reply(self._sent, tools, self._client, on_problem=self._note)
        self.tokens_read += reply.tokens_read
        self.tokens_written += reply.tokens_written
        self.error = None
        return reply.message, reply.is_whole

    def _note(self, problem: str) -> None:
        self.error = problem  # the deadline may come before the next try

    def _keep(self, message: Message, calls: Sequence[tuple[ToolCall, str | None]]) -> None:
        self._sent.append(
            {k: v for k, v in message.items() if k in ("role", "content", "tool_calls") and v is not None}
        )
        kept: Message = {"role": "assistant", "content": message.get("content") or ""}
        if calls:
            kept["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call, _ in calls
            ]
        self.messages.append(kept)

    def _observe(self, written: Sequence[Any], found: Sequence[Exchange]) -> None:
        for call, exchange in zip(written, found, strict=True):
            text = exchange.result.text
            self._sent.append({"role": "tool", "tool_call_id": call.get("id") or "", "content": text})
            self.messages.append({"role": "tool", "name": exchange.call.name, "content": text})


def read_call(call: Any) -> tuple[ToolCall, str | None]:
    """Read a call as the API writes it; the second value says what cannot be read."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    try:
        arguments = json.loads(text or "{}") if isinstance(text, str | None) else text
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", arguments={"text": str(text)}), f"its arguments are not JSON ({error})"
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(name="", arguments={"text": str(call)}), "it needs a name and an object of arguments"
    return ToolCall(name=name, arguments=arguments), None


async def _call_all(calls: Sequence[tuple[ToolCall, str | None]], lease: Lease) -> list[ToolResult]:
    made = iter(await lease.call_all([call for call, problem in calls if problem is None]))
    return [
        next(made)
        if problem is None
        else ToolResult(text=f"The tool call could not be read: {problem}.", kind=ResultKind.MALFORMED_CALL)
        for _, problem in calls
    ]


def _seconds(header: str | None) -> float:
    try:
        return min(max(0.0, float(header or 0)), MAX_WAIT)
    except ValueError:  # a date
        return 0.0
