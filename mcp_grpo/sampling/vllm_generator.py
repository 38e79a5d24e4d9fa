"""Sample with a vLLM engine in this process, adding and removing requests between its steps."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling.generator import Generation, Sampling, with_allowed_logprobs
from mcp_grpo.sampling.vision import Picture, decode


_IDLE_SECONDS = 1.0  # between checks of whether the rollout is done
_STEP_SECONDS = 300.0  # for the last step of an engine that another thread wants


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    prompt_ids: Sequence[int]
    params: Any
    request_id: str
    result: asyncio.Future[Any]  # of the event loop that asks, which alone may set it
    pictures: Sequence[Picture] = ()


class VLLMGenerator:
    """
    Generator over a vLLM engine in this process.

    `generate` may be awaited from any event loop. The engine runs in `serve`, on the thread that calls it: before each of its
    steps new requests are added and abandoned ones aborted, so that no trajectory waits for another. Of several threads that
    serve, one runs the engine for all, and the next takes over when it leaves. Prompts and completions are token ids; no
    tokenizer is involved.

    Args:
        engine (`vllm.LLMEngine`):
            The engine, with `logprobs_mode="processed_logprobs"`.
        end_of_turn_ids (`Sequence[int]`):
            Tokens that end a turn.
        adapter (`Callable[[], LoRARequest | None]`, *optional*):
            Returns the adapter to sample a new request with.
    """

    def __init__(
        self, engine: Any, *, end_of_turn_ids: Sequence[int], adapter: Callable[[], Any] = lambda: None
    ) -> None:
        self._engine = engine
        self._end_of_turn_ids = sorted(end_of_turn_ids)
        self._adapter = adapter
        self._takes_seeds = _takes_seeds(engine)
        self._inbox: queue.SimpleQueue[_Request | str | None] = queue.SimpleQueue()  # a name is of a request to abort
        self._under_way: dict[str, _Request] = {}
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._is_run = False  # by some thread
        self._is_wanted = False  # by a thread that must have the engine for itself

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        output = await self._ask(
            prompt_ids, _params(sampling, self._end_of_turn_ids, with_seed=self._takes_seeds), sampling.pictures
        )
        completion = output.outputs[0]
        generation = Generation(
            token_ids=tuple(completion.token_ids),
            logprobs=_sampled_logprobs(completion.token_ids, completion.logprobs, sampling),
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            num_cached=output.num_cached_tokens,
        )
        if sampling.constraint is None:
            return generation
        # vLLM reports the constrained distribution; score the tokens without the constraint.
        (scores,) = await self.score([*prompt_ids, *generation.token_ids], sampling.pictures)
        return with_allowed_logprobs(generation, scores)

    async def score(self, token_ids: Sequence[int], pictures: Sequence[Picture] = ()) -> list[list[float]]:
        """Return the policy's log-probabilities of tokens at temperature 1, all but the first; one list per engine."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._ask(token_ids, params, pictures)
        rows = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [[row[token].logprob for token, row in rows]]

    async def _ask(self, prompt_ids: Sequence[int], params: Any, pictures: Sequence[Picture] = ()) -> Any:
        result = asyncio.get_running_loop().create_future()
        request = _Request(prompt_ids, params, f"mcp-grpo-{next(self._numbers)}", result, pictures)
        self._inbox.put(request)
        try:
            output = await result
        finally:
            if not result.done() or result.cancelled():
                self._inbox.put(request.request_id)
        if pictures and list(output.prompt_token_ids) != list(prompt_ids):
            raise SamplerError(
                "vLLM put other tokens in the place of a picture than the model's processor: its turns would be learnt in another "
                "context than they were written in. Sample with `use_vllm=False`."
            )
        return output

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]. Any number of threads may serve."""
        until.add_done_callback(self._tell)
        while self._has_turn(until):
            try:
                self._run(until)
            finally:
                self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """
        Keep all other threads from running the engine, which has nothing under way if nobody waits for a turn.

        Raises:
            [`SamplerError`]: If a step of the engine does not end.
        """
        with self._change:
            self._is_wanted = True
            self._inbox.put(None)
            try:
                if not self._change.wait_for(lambda: not self._is_run, timeout=_STEP_SECONDS):
                    raise SamplerError(
                        f"A step of the vLLM engine has not ended for {_STEP_SECONDS:.0f} seconds, so that it cannot be sent new "
                        "weights: it hangs. Look at vLLM's own output and at its GPU, and resume from the last checkpoint."
                    )
                self._is_run = True
            finally:
                self._is_wanted = False
        try:
            self._take(is_idle=False)  # so that the engine drops what was given up
            yield
        finally:
            self._leave()

    def _has_turn(self, until: Future[Any]) -> bool:
        """Wait until no other thread runs the engine; return whether this one still has to."""
        with self._change:
            self._change.wait_for(lambda: until.done() or not (self._is_run or self._is_wanted))
            if until.done():
                return False
            self._is_run = True
            return True

    def _leave(self) -> None:
        with self._change:
            self._is_run = False
            self._change.notify_all()

    def _tell(self, _: Future[Any]) -> None:
        """Make threads look whether what they wait for is done."""
        self._inbox.put(None)
        with self._change:
            self._change.notify_all()

    def _run(self, until: Future[Any]) -> None:
        try:
            while not until.done() and not self._is_wanted:
                self._take(is_idle=not self._under_way)
                if self._under_way:
                    self._step()
            self._take(is_idle=False)  # what was given up with it
        except BaseException as error:
            self._fail(error)
            try:
                if isinstance(error, Exception):
                    raise _explained(error) from error
                raise
            finally:
                self._drop(list(self._under_way))

    def _take(self, is_idle: bool) -> None:
        """Add and abort requests of the engine; wait for one if it is idle."""
        with suppress(queue.Empty):
            item = self._inbox.get(timeout=_IDLE_SECONDS) if is_idle else self._inbox.get_nowait()
            while True:
                if isinstance(item, _Request):
                    self._add(item)
                elif item in self._under_way:
                    self._drop([item])
                item = self._inbox.get_nowait()

    def _add(self, request: _Request) -> None:
        if request.result.cancelled():
            return
        try:
            self._engine.add_request(
                request.request_id,
                _prompt(request.prompt_ids, request.pictures),
                request.params,
                lora_request=self._adapter(),
            )
        except Exception as error:  # only this request is refused
            _resolve([(request, SamplerError(f"vLLM refuses the request: {error}"))])
        else:
            self._under_way[request.request_id] = request

    def _step(self) -> None:
        finished = [output for output in self._engine.step() if output.finished]
        asked = [(self._under_way.pop(output.request_id, None), output) for output in finished]
        _resolve([(request, output) for request, output in asked if request is not None])

    def _drop(self, names: list[str]) -> None:
        if names:
            for name in names:
                del self._under_way[name]
            self._engine.abort_request(names)

    def _fail(self, error: BaseException) -> None:
        # As our own error: a `KeyboardInterrupt` belongs to this thread, and would end the waiting event loop.
        _resolve(
            [(request, SamplerError(f"Generation was cut off by {error!r}.")) for request in self._under_way.values()]
        )


def _prompt(prompt_ids: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
    """
    Return a prompt as vLLM takes it. It replaces the first token of each picture by as many as the picture needs, so that all but
    the first are left out here.
    """
    if not pictures:
        return {"prompt_token_ids": list(prompt_ids)}
    token_ids, counts = pictures[0].token_ids, iter([picture.num_tokens for picture in pictures])
    kept: list[int] = []
    num_more = 0  # tokens of the picture at hand that are still to come
    for token in prompt_ids:
        if token in token_ids and num_more == 0:
            num_more = next(counts, 1)
            kept.append(token)
        elif token not in token_ids:
            kept.append(token)
        num_more -= token in token_ids
    return {
        "prompt_token_ids": kept,
        "multi_modal_data": {"image": [decode(picture.image) for picture in pictures]},
    }


def _takes_seeds(engine: Any) -> bool:
    """
    Return whether a request may have a seed of its own for nothing.

    vLLM's first model runner (of older versions, and with `VLLM_USE_V2_MODEL_RUNNER=0`) draws for each such request by itself: one more kernel on a GPU
    for each sequence and token. Sampling there does not repeat itself to the bit with seeds either, as kernels add up in other orders in other batches.
    """
    is_gpu = engine.vllm_config.device_config.device_type == "cuda"
    return not is_gpu or bool(getattr(engine.vllm_config, "use_v2_model_runner", False))


def _params(sampling: Sampling, end_of_turn_ids: list[int], *, with_seed: bool) -> Any:
    # Not from `vllm` itself, which looks for it anew each time.
    from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    constraint = sampling.constraint
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed >> 1 if with_seed else None,  # of 63 bits
        stop_token_ids=end_of_turn_ids,
        ignore_eos=True,  # only the tokens above end a turn, whatever the checkpoint says
        logprobs=0,
        flat_logprobs=True,  # numbers in a list, not two objects for each token
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=None if constraint is None else StructuredOutputsParams(grammar=constraint.text),
        skip_clone=True,  # they are of one request only
    )


def _sampled_logprobs(token_ids: Sequence[int], flat: Any, sampling: Sampling) -> tuple[float, ...]:
    if sampling.temperature == 0:  # the most likely token is certain
        return (0.0,) * len(token_ids)
    if list(token_ids) != flat.token_ids:
        raise SamplerError(
            "vLLM returned log-probabilities of other tokens than it sampled. This is a bug in mcp_grpo: please report it."
        )
    return tuple(flat.logprobs)


def _resolve(results: Sequence[tuple[_Request, Any]]) -> None:
    """Tell those who wait for requests what came of them: each event loop once, as waking it takes a while."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for request, result in results:
        by_loop.setdefault(request.result.get_loop(), []).append((request.result, result))
    for loop, found in by_loop.items():
        with suppress(RuntimeError):  # it is closed, and nobody waits there
            loop.call_soon_threadsafe(_settle, found)


def _settle(found: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in found:
        if future.done():  # nobody waits for it any more
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _explained(error: Exception) -> SamplerError:
    if "out of memory" in str(error).lower():
        return SamplerError(
            f"The vLLM engine ran out of memory: {error}. Lower `vllm_gpu_memory_utilization` if the policy takes what is "
            "missing, raise it if the engine's own cache is too small, or set `vllm_enable_sleep_mode=True`."
        )
    return SamplerError(f"The vLLM engine failed: {error!r}. The trajectories under way are lost; restart the run.")
