"""Sample with plain `transformers`, gathering concurrent requests into batches."""

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria
from transformers.cache_utils import DynamicCache
from transformers.generation.stopping_criteria import StoppingCriteriaList

from mcp_grpo.errors import RolloutError
from mcp_grpo.masking.constrained import Constraints
from mcp_grpo.precision import in_double
from mcp_grpo.sampling.generator import Generation, Sampling
from mcp_grpo.sampling.shared_prefix import SharedPrefixCache, has_lasting_keys, shared_cache, shares_prefix
from mcp_grpo.sampling.vision import picture_inputs, token_types, type_column


# Seconds. A batch costs about the same for one row as for many, so it is held open while requests keep coming, but never
# for long.
_LINGER = 0.02
_MAX_LINGER = 0.25

# Below this, a shared prefix is not worth a forward pass of its own.
_MIN_SHARED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class _Request:
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    result: Future[Generation] = field(default_factory=Future)
    is_dropped: threading.Event = field(default_factory=threading.Event)


class TransformersGenerator:
    """
    Generator over a `transformers` model in this process.

    `generate` may be awaited from any event loop; the model runs in `serve`, on the thread that calls it. Each row of a batch
    is sampled from its own seeded stream, so that it depends on what it is batched with only by rounding: matrix products round
    otherwise for other shapes, and where two tokens are nearly as likely as each other, that may decide. Which requests meet in
    a batch depends on how long tools take, so that two runs of one seed may differ.

    Args:
        model (`PreTrainedModel`):
            The policy.
        end_of_turn_ids (`Sequence[int]`):
            Tokens that end a turn.
        pad_token_id (`int`):
            Token to pad batches with.
        autocast (`Callable[[], AbstractContextManager]`, *optional*):
            Context in which the trainer computes log-probabilities, so that the sampler's have the same precision.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_of_turn_ids: Sequence[int],
        pad_token_id: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model: Any = model
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self._pad_token_id = pad_token_id
        self._autocast = autocast
        self._inbox: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        request = _Request(tuple(prompt_ids), sampling)
        self._inbox.put(request)
        try:
            return await asyncio.wrap_future(request.result)
        finally:
            request.is_dropped.set()  # it may still be sampled, but nobody waits for it

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]."""
        until.add_done_callback(lambda _: self._inbox.put(None))
        while not until.done():
            batch = self._next_batch()
            if not batch:
                continue
            try:
                generations = self._generate(batch)
            except BaseException as error:
                # As an error of ours: a `KeyboardInterrupt` belongs to this thread, and would end the waiting loop.
                for request in batch:
                    request.result.set_exception(RolloutError(f"Generation was cut off by {error!r}."))
                raise
            for request, generation in zip(batch, generations, strict=True):
                request.result.set_result(generation)

    def _next_batch(self) -> list[_Request]:
        """Return all waiting requests, once no more come in."""
        batch: list[_Request] = []
        timeout, deadline = 1.0, time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0:
            try:
                request = self._inbox.get(timeout=min(timeout, left))
            except queue.Empty:
                break
            if request is None:
                break
            if not batch:
                timeout, deadline = _LINGER, time.monotonic() + _MAX_LINGER
            if request.result.set_running_or_notify_cancel():
                batch.append(request)
        return batch

    @torch.no_grad()
    def _generate(self, batch: list[_Request]) -> list[Generation]:
        with self._autocast(), _bare_generation_config(self._model):
            return self._sample(batch)

    def _sample(self, batch: list[_Request]) -> list[Generation]:
        device, num_shared = self._model.device, self._shared_length(batch)
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.full((len(batch), width), self._pad_token_id)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            # Shared tokens first, then padding, then the rest: positions follow the mask, so padding may be in the middle,
            # and the shared tokens are in the same columns for all rows.
            prompt = torch.tensor(request.prompt_ids)
            start = width - (len(prompt) - num_shared)
            ids[row, :num_shared], mask[row, :num_shared] = prompt[:num_shared], 1
            ids[row, start:], mask[row, start:] = prompt[num_shared:], 1
        samplings = [request.sampling for request in batch]
        pictures = self._picture_inputs(samplings, ids)
        sampler = _RowSampler(samplings)
        budgets = torch.tensor([sampling.max_tokens for sampling in samplings], device=device)
        with self._prefix(ids[:1, :num_shared], len(batch)) as cache:
            output = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                **{name: value.to(device) for name, value in pictures.items()},
                past_key_values=cache,
                generation_config=GenerationConfig(
                    max_new_tokens=int(budgets.max()),
                    do_sample=False,  # `_RowSampler` samples, and leaves one token to choose
                    eos_token_id=sorted(self._end_of_turn_ids),
                    pad_token_id=self._pad_token_id,
                    disable_compile=True,
                ),
                # Processes generate independently of each other.
                synced_gpus=False,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([_Ends(width, budgets, batch)]),
            )
        tokens, logprobs, allowed_logprobs = output[:, width:].tolist(), sampler.logprobs(), sampler.allowed_logprobs()
        return [self._cut(*row) for row in zip(samplings, tokens, logprobs, allowed_logprobs, strict=True)]

    def _picture_inputs(self, samplings: Sequence[Sampling], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model takes beside tokens, where there are pictures among them."""
        pictures = [picture for sampling in samplings for picture in sampling.pictures]
        if not pictures:
            return {}
        types, token_ids = type_column(self._model), pictures[0].token_ids
        return picture_inputs(pictures) | ({} if types is None else {types: token_types(ids, token_ids)})

    def _cut(
        self, sampling: Sampling, tokens: list[int], logprobs: list[float], allowed_logprobs: list[float]
    ) -> Generation:
        """Cut a row at its end-of-turn token or its budget; what follows is padding."""
        budget = sampling.max_tokens
        end = next((i + 1 for i, token in enumerate(tokens[:budget]) if token in self._end_of_turn_ids), None)
        length = min(budget, len(tokens)) if end is None else end
        return Generation(
            token_ids=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            finish_reason="length" if end is None else "stop",
            allowed_logprobs=None if sampling.constraint is None else tuple(allowed_logprobs[:length]),
        )

    def _shared_length(self, batch: list[_Request]) -> int:
        """Return how many tokens all prompts share, if the model can share them."""
        length = _shared_length(batch)
        return length if length and (shares_prefix(self._model) or self._can_copy_prefix) else 0

    @property
    def _can_copy_prefix(self) -> bool:
        # Of the families that do not name their layers, not each follows the mask alone where there is padding in the middle.
        config = self._model.config
        return has_lasting_keys(config) and bool(getattr(config, "layer_types", None))

    @contextmanager
    def _prefix(self, ids: torch.Tensor, num_rows: int) -> Generator[DynamicCache | None]:
        """Compute the keys and values of the shared tokens once, if there are any; on a CPU, keep and read them once, too."""
        if not ids.numel():
            yield None
            return
        cache = shared_cache(self._model, ids.to(self._model.device))
        if shares_prefix(self._model):
            cache = SharedPrefixCache(cache)
            with cache.attending(self._model):
                yield cache
        else:
            cache.batch_repeat_interleave(num_rows)
            yield cache


@contextmanager
def _bare_generation_config(model: PreTrainedModel) -> Generator[None]:
    """
    Ignore the checkpoint's own generation settings, from which `generate` fills what is not set: with its repetition penalty
    or suppressed tokens, the sampler would not be the policy that is trained.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    original, base.generation_config = base.generation_config, GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = original


def _shared_length(batch: list[_Request]) -> int:
    """Return how many tokens all prompts share, leaving at least one to each; 0 if that is not worth it."""
    if len(batch) < 2:
        return 0
    first = min((request.prompt_ids for request in batch), key=len)
    length = len(first) - 1
    for request in batch:
        length = next((i for i in range(length) if request.prompt_ids[i] != first[i]), length)
    return length if length >= _MIN_SHARED_TOKENS else 0


class _RowSampler(LogitsProcessor):
    """
    Samples each row with its own random numbers, and keeps the log-probabilities.

    It inverts the cumulative distribution at one uniform number, so a row uses exactly one random number per token, whatever
    the batch. All other scores become -inf, which leaves greedy search one choice.
    """

    def __init__(self, samplings: list[Sampling]) -> None:
        self._streams = [random.Random(sampling.seed) for sampling in samplings]
        self._temperatures = [sampling.temperature for sampling in samplings]
        self._constraints = Constraints([sampling.constraint for sampling in samplings])
        self._logprobs: list[torch.Tensor] = []
        self._allowed_logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        temperatures = scores.new_tensor(self._temperatures, dtype=torch.float32).unsqueeze(1)
        greedy = temperatures == 0
        logprobs = torch.log_softmax(scores.float() / temperatures.masked_fill(greedy, 1.0), dim=-1)
        logprobs, allowed_logprobs = self._constraints.confine(logprobs)
        # In double precision: over a large vocabulary, rounding would shift the borders between tokens.
        cumulative = in_double(logprobs).exp().cumsum(dim=-1)
        draws = cumulative.new_tensor([stream.random() for stream in self._streams]).unsqueeze(1)
        tokens = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True).clamp(max=scores.shape[1] - 1)
        tokens = tokens.to(scores.device)
        tokens = torch.where(greedy, logprobs.argmax(dim=-1, keepdim=True), tokens)
        self._constraints.advance(tokens)
        self._allowed_logprobs.append(allowed_logprobs)
        self._logprobs.append(logprobs.gather(1, tokens).squeeze(1).masked_fill(greedy.squeeze(1), 0.0))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)

    def logprobs(self) -> list[list[float]]:
        """Return one list per row, with one log-probability per token."""
        return torch.stack(self._logprobs, dim=1).tolist()

    def allowed_logprobs(self) -> list[list[float]]:
        """Return the same of all tokens together that a row's constraint allowed; 0 without a constraint."""
        return torch.stack(self._allowed_logprobs, dim=1).tolist()


class _Ends(StoppingCriteria):
    """Ends each row at its own number of tokens, or when nobody waits for it."""

    def __init__(self, prompt_width: int, budgets: torch.Tensor, batch: list[_Request]) -> None:
        self._prompt_width = prompt_width
        self._budgets = budgets
        self._batch = batch

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        dropped = [request.is_dropped.is_set() for request in self._batch]
        is_over = input_ids.shape[1] - self._prompt_width >= self._budgets
        return is_over | is_over.new_tensor(dropped) if any(dropped) else is_over
