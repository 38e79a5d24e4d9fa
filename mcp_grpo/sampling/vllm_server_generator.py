"""Sample on vLLM servers: send token ids, get token ids and log-probabilities back."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling.generator import Generation, Sampling, with_allowed_logprobs


_HEALTH_INTERVAL = 20.0  # seconds without an answer before a health check
_HEALTH_TIMEOUT = 10.0
_MAX_MISSED = 2  # failed health checks in a row before a server is lost
_CONNECT_TIMEOUT = 10.0
_MAX_CONNECTIONS = 512  # of a process to a server
_NOT_UNDERSTOOD = (400, 404, 405, 422)  # a server without an endpoint, or with another form of it
_BUSY = (429, 502, 503, 504)  # a server or proxy that did not take the request
_MAX_BUSY = 6  # times in a row, with growing pauses of 15 seconds in all
_MAX_KNOWN = 8192  # trajectories whose server is remembered

# Sample the policy as it is, whatever the defaults of the server.
_PLAIN = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "skip_special_tokens": False,
    "return_token_ids": True,
}
_COMPLETIONS = "/v1/completions"
_TOKENS = "/inference/v1/generate"  # token ids in and out, of which the server need not make text


class _ServerLost(Exception):
    """A server cannot be reached; its requests can go to another, since sampling has no side effects."""


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    num_under_way: int = 0
    num_trajectories: int = 0  # of those that are remembered
    takes_tokens: bool | None = None  # at `_TOKENS`, once that is known
    lost: str | None = None  # the reason, if it is


class VLLMServerGenerator:
    """
    Generator over one or more `vllm serve`.

    All turns of a trajectory go to the server that holds its prefix; a new trajectory goes to the server with the fewest. A
    lost server is not asked again, and its trajectories continue on the others. An abandoned request is dropped, which makes
    the server abort it.

    Args:
        urls (`Sequence[str]`):
            Addresses of the servers.
        model (`Callable[[], str]`):
            Returns the name of the model or adapter to sample a request from.
        end_of_turn_ids (`Sequence[int]`):
            Tokens that end a turn.
    """

    def __init__(self, urls: Sequence[str], *, model: Callable[[], str], end_of_turn_ids: Sequence[int]) -> None:
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._model = model
        self._end_of_turn_ids = sorted(end_of_turn_ids)
        self._homes: OrderedDict[int, _Server] = OrderedDict()  # who holds the prefix of a trajectory
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers that are not lost."""
        return [server.url for server in self._servers if server.lost is None]

    def keep_only(self, urls: Collection[str]) -> None:
        """Mark all other servers, which no longer get weights, as lost."""
        for server in self._servers:
            if server.url not in urls:
                server.lost = server.lost or "it was not up when weights were sent"

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        constraint = sampling.constraint
        choice = await self._ask(
            sampling.trajectory,
            {
                "prompt": list(prompt_ids),
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": sampling.seed >> 1,
                "stop_token_ids": self._end_of_turn_ids,
                "ignore_eos": True,
                "logprobs": 0,
                **({} if constraint is None else {"structured_outputs": {"grammar": constraint.text}}),
            },
        )
        token_ids, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
        if len(token_ids) != len(logprobs):
            raise SamplerError(
                f"A vLLM server answered with {len(token_ids)} tokens and {len(logprobs)} log-probabilities. Each token "
                "needs its own: run a vLLM that TRL supports, 0.22 or newer."
            )
        generation = Generation(
            token_ids=token_ids,
            logprobs=logprobs if sampling.temperature else (0.0,) * len(logprobs),
            finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
        )
        if constraint is None:
            return generation
        # vLLM reports the constrained distribution; score the tokens without the constraint.
        body = _scoring([*prompt_ids, *token_ids])
        return with_allowed_logprobs(generation, _scores(body, await self._ask(sampling.trajectory, body)))

    async def score(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Return the policy's log-probabilities of tokens at temperature 1, all but the first; one list per server."""
        body, scores = _scoring(token_ids), []
        for server in self._servers:
            if server.lost is None:
                try:
                    scores.append(_scores(body, await self._answer(server, body)))
                except _ServerLost as error:
                    server.lost = str(error)
        self._left()
        return scores

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]. The servers do the sampling; this only waits."""
        wait([until])

    def alone(self) -> AbstractContextManager[None]:
        """Do nothing: no thread runs an engine here."""
        return nullcontext()

    def close(self) -> None:
        """Close the connections. Safe to call more than once."""
        session, self._session = self._session, None
        if session is not None and self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(session.close(), self._loop).result(timeout=_CONNECT_TIMEOUT)

    async def _ask(self, trajectory: int, body: Mapping[str, Any]) -> dict[str, Any]:
        while True:
            server = self._server_of(trajectory)
            try:
                return await self._answer(server, body)
            except _ServerLost as error:
                server.lost = server.lost or str(error)

    async def _answer(self, server: _Server, body: Mapping[str, Any]) -> dict[str, Any]:
        server.num_under_way += 1
        try:
            return await self._watched(server, {**_PLAIN, **body, "model": self._model()})
        finally:
            server.num_under_way -= 1

    def _left(self) -> list[_Server]:
        """Return the servers that are not lost; raises [`SamplerError`] if there is none."""
        left = [server for server in self._servers if server.lost is None]
        if not left:
            reasons = "; ".join(f"{server.url}: {server.lost}" for server in self._servers)
            raise SamplerError(
                f"No vLLM server is left ({reasons}). Check the server's own log, restart it, and resume the run from its "
                "last checkpoint."
            )
        return left

    def _server_of(self, trajectory: int) -> _Server:
        left, home = self._left(), self._homes.pop(trajectory, None)
        if home is not None:
            home.num_trajectories -= 1
        if home is None or home.lost is not None:
            home = min(left, key=lambda server: (server.num_trajectories, server.num_under_way))
        home.num_trajectories += 1
        self._homes[trajectory] = home  # as the newest
        if len(self._homes) > _MAX_KNOWN:
            _, oldest = self._homes.popitem(last=False)
            oldest.num_trajectories -= 1
        return home

    async def _watched(self, server: _Server, body: dict[str, Any]) -> dict[str, Any]:
        """Wait for an answer while the server passes its health checks."""
        request = asyncio.ensure_future(self._post(server, body))
        num_missed = 0
        try:
            while not (await asyncio.wait([request], timeout=_HEALTH_INTERVAL))[0]:
                try:
                    await self._check(server)
                    num_missed = 0
                except _ServerLost:
                    num_missed += 1
                    if num_missed == _MAX_MISSED:
                        raise
            return request.result()
        finally:
            request.cancel()

    async def _post(self, server: _Server, body: dict[str, Any]) -> dict[str, Any]:
        status, text = 0, ""
        is_refused = False  # where token ids are taken
        for attempt in range(_MAX_BUSY):
            in_tokens = server.takes_tokens is not False and "prompt_logprobs" not in body and not is_refused
            path, sent = (_TOKENS, _in_tokens(body)) if in_tokens else (_COMPLETIONS, body)
            try:
                async with self._connection().post(server.url + path, json=sent) as response:
                    if response.status == 200:
                        choice = (await response.json())["choices"][0]
                        if in_tokens or is_refused:
                            server.takes_tokens = in_tokens
                        if choice["finish_reason"] in ("stop", "length"):
                            return _from_tokens(choice) if in_tokens else choice
                        # The server aborted it, which does not end the policy's turn.
                        status, text = 503, f"the turn ended with {choice['finish_reason']!r}"
                    elif in_tokens and not server.takes_tokens and response.status in _NOT_UNDERSTOOD:
                        is_refused = True  # if it is the request that is wrong, the other endpoint refuses it, too
                        continue
                    else:
                        status, text = response.status, (await response.text())[:500]
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self._check(server)  # if it is up, it only closed the connection
                status, text = 503, repr(error)
            if status == 500:
                await self._check(server)  # also its answer when its engine has died
            if status not in _BUSY:
                raise SamplerError(f"The vLLM server at {server.url} refuses a request ({status}): {text}")
            await asyncio.sleep(0.25 * 2**attempt)
        raise _ServerLost(f"it takes no requests ({status}): {text}")

    async def _check(self, server: _Server) -> None:
        # On a connection of its own, so that it does not wait behind the requests.
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{server.url}/health") as response,
            ):
                if response.status == 200:
                    return
                reason = f"its health check answers {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"it cannot be reached ({error!r})"
        raise _ServerLost(reason)

    def _connection(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=_MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
            )
        return self._session


def _in_tokens(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for a completion in the form that `_TOKENS` takes. Beside what is named, its defaults are plain."""
    named = ("max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "logprobs", "structured_outputs")
    params = {name: body[name] for name in named if name in body}
    return {"model": body["model"], "token_ids": body["prompt"], "sampling_params": {**params, "detokenize": False}}


def _from_tokens(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer of `_TOKENS` in the form of a completion."""
    logprobs = [each["logprob"] for each in (choice["logprobs"] or {}).get("content") or ()]
    return {**choice, "logprobs": {"token_logprobs": logprobs}}


def _scoring(token_ids: Sequence[int]) -> dict[str, Any]:
    return {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}


def _scores(body: Mapping[str, Any], choice: Mapping[str, Any]) -> list[float]:
    rows = zip(body["prompt"][1:], choice["prompt_logprobs"][1:], strict=True)
    return [row[str(token)]["logprob"] for token, row in rows]
