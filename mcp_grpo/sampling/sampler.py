"""The policy as it is sampled from: which generator, with which weights."""

import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling.gate import GatedGenerator
from mcp_grpo.sampling.generator import Generator as TurnGenerator
from mcp_grpo.sampling.threads import choose_threads
from mcp_grpo.sampling.transformers_generator import TransformersGenerator
from mcp_grpo.sampling.vllm_backend import VLLMBackend
from mcp_grpo.sampling.weight_probe import WeightProbe, farthest
from mcp_grpo.trl_compat import policy_for_generation


NUM_HELD = 2  # sequences that the weights are probed with
MAX_HELD_TOKENS = 256  # of each

Prompts = Callable[[], Sequence[Sequence[int]]]


class Sampler(Protocol):
    """
    What samples from a trainer's policy.

    Attributes:
        max_context (`int`, *optional*):
            Tokens of a prompt and its completion that it has room for; `None` if only the model limits them.
        sleeps (`bool`):
            Whether it gives its memory back while it is not awake.
    """

    max_context: int | None
    sleeps: bool

    @property
    def is_behind(self) -> bool:
        """Return whether it samples from the policy as it was before, until it is woken the next time."""
        ...

    def awake(self, prompts: Prompts) -> AbstractContextManager[TurnGenerator]:
        """Sample from the policy as it is now while active; `prompts` are some of what it will be asked to continue."""
        ...

    def forget_weights(self) -> None:
        """Take the policy for changed, also at the same step."""
        ...

    def close(self) -> None:
        """End what it has started. Safe to call more than once."""
        ...


class TransformersSampler:
    """
    Samples with the model that is trained. On a CPU, both go on as many threads as suit the model and the machine.

    Args:
        trainer (`GRPOTrainer`):
            The trainer.
        end_of_turn_ids (`Sequence[int]`):
            Tokens that end a turn.
    """

    def __init__(self, trainer: Any, end_of_turn_ids: Sequence[int]) -> None:
        self.max_context: int | None = None
        self.sleeps = False
        self._trainer = trainer
        self._end_of_turn_ids = end_of_turn_ids
        self._generator: TransformersGenerator | None = None
        if trainer.accelerator.device.type == "cpu":
            choose_threads(trainer.model.num_parameters())

    @property
    def is_behind(self) -> bool:
        """Always false: there is only one model."""
        return False

    @contextmanager
    def awake(self, prompts: Prompts) -> Generator[TurnGenerator]:
        """See [`Sampler.awake`]."""
        if self._generator is not None:
            yield self._generator
            return
        trainer = self._trainer
        with policy_for_generation(trainer) as model:
            self._generator = TransformersGenerator(
                model,
                end_of_turn_ids=self._end_of_turn_ids,
                pad_token_id=trainer._tokenizer.pad_token_id,
                autocast=trainer.accelerator.autocast,
            )
            try:
                yield self._generator
            finally:
                self._generator = None

    def forget_weights(self) -> None:
        """Do nothing: there is only one model."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(kw_only=True)
class VLLMSampler:
    """
    Samples with vLLM, after sending it the weights if they have changed. They are sent between turns: what is under way goes on
    with them, and each of its turns is sampled by one version of the policy.

    Args:
        backend ([`VLLMBackend`]):
            vLLM in process, or its servers.
        model (`Callable[[], Any]`):
            Returns the policy, whose log-probabilities vLLM's are compared with.
        accelerator (`accelerate.Accelerator`):
            Knows the other ranks.
        end_of_turn_ids (`Sequence[int]`):
            Tokens that end a turn.
        num_reserved (`int`):
            Tokens of the context that are kept free: what was sampled under a constraint is scored as a prompt, which must
            leave room for one.
        sleeps (`bool`):
            Whether the engine sleeps while the policy trains.
        turn_timeout (`float`):
            Seconds after which a turn is given up.
        step (`Callable[[], int]`):
            Returns the optimizer steps done.
        ask (`Callable`):
            Waits for something that needs a generator.
        record (`Callable[[dict[str, float]], None]`):
            Logs metrics.
        phase (`Callable[[str], AbstractContextManager]`):
            Context of a phase of a step.
    """

    backend: VLLMBackend
    model: Callable[[], Any]
    accelerator: Accelerator
    end_of_turn_ids: Sequence[int]
    num_reserved: int
    sleeps: bool
    turn_timeout: float
    step: Callable[[], int]
    ask: Callable[[Any, Callable[[], Awaitable[Any]]], Any]
    record: Callable[[dict[str, float]], None]
    phase: Callable[[str], AbstractContextManager[Any]]
    max_context: int | None = field(init=False)
    _generator: Any = field(init=False)
    _gate: GatedGenerator | None = field(init=False)
    _probe: WeightProbe = field(init=False, default_factory=WeightProbe)
    _held: list[list[int]] = field(init=False, default_factory=list)
    _depth: int = field(init=False, default=0)
    _loaded_step: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.max_context = self.backend.max_context - self.num_reserved
        self._generator = self.backend.make_generator(self.end_of_turn_ids)
        self._gate = GatedGenerator(self._generator, self.turn_timeout)

    @property
    def is_behind(self) -> bool:
        """See [`Sampler.is_behind`]."""
        return self.step() != self._loaded_step

    @contextmanager
    def awake(self, prompts: Prompts) -> Generator[TurnGenerator]:
        """See [`Sampler.awake`]. On several processes all must enter it together, if weights have changed."""
        self._depth += 1
        try:
            if self._depth == 1:
                with self.phase("sync"):
                    self._prepare(prompts)
            assert self._gate, "the sampler was closed"
            yield self._gate
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.backend.sleep()

    def forget_weights(self) -> None:
        """See [`Sampler.forget_weights`]."""
        self._loaded_step = None

    def close(self) -> None:
        """Close connections, remove files, and give memory back."""
        self._generator = self._gate = None  # they hold the engine
        self.backend.close()

    def _prepare(self, prompts: Prompts) -> None:
        is_new = self.is_behind
        if not is_new and not self.backend.is_asleep:
            return
        assert self._gate, "the sampler was closed"
        with self._gate.between_turns():
            start = time.perf_counter()
            with self._generator.alone():
                self.backend.sync_weights()
                self._loaded_step = self.step()
                self.backend.wake_up()
            seconds = time.perf_counter() - start
            mismatch = self._probed(prompts) if is_new else 0.0
        if is_new:
            metrics = {
                "sampler/sync_seconds": seconds,
                "sampler/sync_megabytes": self.backend.bytes_sent / 1e6,
                "sampler/weight_mismatch": mismatch,
                "sampler/beyond_noise": self._probe.beyond_noise(mismatch),
            }
            if self.backend.rounded_away is not None:
                metrics["sampler/rounded_away"] = self.backend.rounded_away
            self.record(metrics)

    def _probed(self, prompts: Prompts) -> float:
        """Return how far vLLM's log-probabilities are from the trainer's; raise if it has other weights."""
        if not self._held:
            max_tokens = min(MAX_HELD_TOKENS, self.backend.max_context - 1)
            different = list(dict.fromkeys(tuple(ids[-max_tokens:]) for ids in prompts()))
            # As many on all processes: the policy may have to be called together.
            self._held = [list(different[i % len(different)]) for i in range(NUM_HELD)]
        expected = list(chain(*map(self._logps, self._held)))
        problem, mismatch = None, 0.0
        try:
            mismatch = self._probe.check(farthest(self._scores(), expected), expected)
        except SamplerError as error:
            problem = str(error)
        problem = next((each for each in gather_object([problem]) if each), None)
        if problem is not None:
            raise SamplerError(problem)
        return mismatch

    def _scores(self) -> list[list[float]]:
        """Return what each engine or server gives to all held sequences."""
        while True:
            # One at a time: vLLM fails where a step has prompts of several requests to score with an adapter.
            scores = [self.ask(self._generator, partial(self._generator.score, ids)) for ids in self._held]
            if len({len(each) for each in scores}) == 1:  # else one was lost meanwhile
                return [list(chain(*each)) for each in zip(*scores, strict=True)]

    @torch.no_grad()
    def _logps(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], device=self.accelerator.device)
        with self.accelerator.autocast():
            logits = self.model()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        logps = logits[0, :-1].float().log_softmax(-1)
        return logps.gather(1, ids[0, 1:, None]).squeeze(1).tolist()
