"""The policy as it is sampled from: which generator, with which weights."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate.utils import gather_object

from mcp_grpo._trl import policy_for_generation
from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.errors import SamplerError
from mcp_grpo.rollout import Generator as TurnGenerator
from mcp_grpo.rollout import RolloutEngine, TransformersGenerator
from mcp_grpo.rollout.probe import WeightProbe, farthest
from mcp_grpo.rollout.vllm_backend import VLLMBackend, VLLMSettings
from mcp_grpo.rollout.vllm_server_backend import VLLMServerBackend
from mcp_grpo.threads import choose_threads


NUM_HELD = 2  # sequences that the weights are probed with
MAX_HELD_TOKENS = 256  # of each


class Sampler(Protocol):
    """
    What samples from a trainer's policy.

    Attributes:
        max_context (`int`, *optional*):
            Tokens of a prompt and its completion that it has room for; `None` if only the model limits them.
    """

    max_context: int | None

    def awake(self, prompts: Callable[[], Sequence[Sequence[int]]]) -> Any:
        """
        Context in which it samples from the policy as it is now. May be entered again within itself.

        Args:
            prompts (`Callable[[], Sequence[Sequence[int]]]`):
                Some of what it will be asked to continue, if it wants to know.

        Returns:
            `AbstractContextManager[TurnGenerator]`: With the generator.
        """
        ...

    def close(self) -> None:
        """End what it has started. Safe to call more than once."""
        ...


class TransformersSampler:
    """
    Samples with the model that is trained. On a CPU, both go on as many threads as suit the model and the machine.

    Args:
        trainer (`MCPGRPOTrainer`):
            The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.max_context: int | None = None
        self._trainer = trainer
        self._generator: TransformersGenerator | None = None
        if trainer.accelerator.device.type == "cpu":
            choose_threads(trainer.model.num_parameters())

    @contextmanager
    def awake(self, prompts: Callable[[], Sequence[Sequence[int]]]) -> Generator[TurnGenerator]:
        """See [`Sampler.awake`]."""
        if self._generator is not None:
            yield self._generator
            return
        trainer = self._trainer
        with policy_for_generation(trainer) as model:
            self._generator = TransformersGenerator(
                model,
                end_of_turn_ids=trainer.eos_token_ids,
                pad_token_id=trainer._tokenizer.pad_token_id,
                autocast=trainer.accelerator.autocast,
            )
            try:
                yield self._generator
            finally:
                self._generator = None

    def close(self) -> None:
        """Nothing to do."""


class VLLMSampler:
    """
    Samples with vLLM, after sending it the weights if they have changed.

    Args:
        trainer (`MCPGRPOTrainer`):
            The trainer.
        engine ([`RolloutEngine`]):
            Runs what is asynchronous.
    """

    def __init__(self, trainer: Any, engine: RolloutEngine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._backend: VLLMBackend = trainer.vllm_generation
        # What was sampled under a constraint is scored as a prompt, which must leave room for one token.
        self.max_context: int | None = self._backend.max_context - trainer.args.constrained_decoding
        self._generator = self._backend.make_generator(trainer.eos_token_ids)
        self._probe = WeightProbe(trainer.args.weight_sync_tolerance)
        self._held: list[list[int]] = []
        self._depth = 0

    @contextmanager
    def awake(self, prompts: Callable[[], Sequence[Sequence[int]]]) -> Generator[TurnGenerator]:
        """See [`Sampler.awake`]. On several processes all must enter it together, if weights have changed."""
        self._depth += 1
        try:
            if self._depth == 1:
                with self._trainer._phases("sync"):
                    self._prepare(prompts)
            yield self._generator
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._backend.sleep()

    def close(self) -> None:
        """Close connections, remove files, and give memory back."""
        self._generator: Any = None  # it holds the engine
        self._backend.close()

    def _prepare(self, prompts: Callable[[], Sequence[Sequence[int]]]) -> None:
        trainer, backend = self._trainer, self._backend
        is_new = trainer.state.global_step != trainer._last_loaded_step
        if not is_new and not backend.is_asleep:
            return
        start = time.perf_counter()
        backend.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step
        backend.wake_up()
        seconds = time.perf_counter() - start
        if is_new:
            mismatch = self._probed(prompts)
            trainer._record(
                {
                    "sampler/sync_seconds": seconds,
                    "sampler/sync_megabytes": backend.bytes_sent / 1e6,
                    "sampler/weight_mismatch": mismatch,
                }
            )

    def _probed(self, prompts: Callable[[], Sequence[Sequence[int]]]) -> float:
        if not self._held:
            max_tokens = min(MAX_HELD_TOKENS, self._backend.max_context - 1)
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
        """What each engine or server gives to all held sequences."""
        while True:
            scores = [self._engine.ask(self._generator, partial(self._generator.score, ids)) for ids in self._held]
            if len({len(each) for each in scores}) == 1:  # else one was lost meanwhile
                return [list(chain(*each)) for each in zip(*scores, strict=True)]

    @torch.no_grad()
    def _logps(self, token_ids: list[int]) -> list[float]:
        trainer = self._trainer
        ids = torch.tensor([token_ids], device=trainer.accelerator.device)
        with trainer.accelerator.autocast():
            logits = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        logps = logits[0, :-1].float().log_softmax(-1)
        return logps.gather(1, ids[0, 1:, None]).squeeze(1).tolist()


def vllm_backend(args: MCPGRPOConfig) -> Callable[..., VLLMBackend] | None:
    """
    What TRL is to make its vLLM backend with.

    Args:
        args ([`MCPGRPOConfig`]):
            The settings of the run.

    Returns:
        `Callable[..., VLLMBackend]` or `None`: Takes what `VLLMGeneration` does. `None` if there is to be no vLLM.
    """
    if not args.use_vllm:
        return None
    engine: dict[str, Any] = dict(cast(Any, args.vllm_engine_kwargs) or {})
    if args.constrained_decoding:
        engine.setdefault("structured_outputs_config", {"backend": "guidance"})
    settings = VLLMSettings(
        weight_sync=cast(Any, args.weight_sync),
        engine=engine,
        urls=args.vllm_server_urls or (),
        folder=Path(args.output_dir or ".") / "sampler",
    )
    return partial(VLLMServerBackend if args.vllm_mode == "server" else VLLMBackend, settings=settings)
