"""
What is taken from TRL without TRL's promise to keep it.

`mcp_grpo` pins `trl>=1.16,<1.17`. `tests/test_package.py` checks what is taken here and what the trainer overrides and
reads, so that an upgrade which moves something fails there, in words, and not in the middle of a run.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.models.utils import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import (
    FusedCausalLMOutput,
    add_fused_lm_head,
    disable_dropout_in_model,
    is_async_callable,
    split_tensor_dict,
)


__all__ = [
    "COMPLETIONS",
    "NO_TASKS",
    "ROW_MEAN_LOSSES",
    "TOKEN_MEAN_LOSSES",
    "FusedCausalLMOutput",
    "LossDenominator",
    "VLLMGeneration",
    "add_fused_lm_head",
    "add_lm_head_of",
    "add_response_schema",
    "clip_limits",
    "clipped_fraction",
    "disable_dropout_in_model",
    "engine_arguments",
    "get_training_chat_template",
    "heads_made_by",
    "is_async_callable",
    "is_chat_template_prefix_preserving",
    "parse_response",
    "per_update",
    "policy_for_generation",
    "split_tensor_dict",
    "supports_tool_calling",
    "tables_as_text",
    "vllm_made_by",
    "without_bonuses",
]

# Index of the completions in what `GRPOTrainer._generate` returns.
COMPLETIONS = 3

# Losses that divide by a number of rows, not of tokens: a row left out of the loss still counts in their denominator.
NO_TASKS = Dataset.from_dict({"task_id": [""], "prompt": [""]})
"""For TRL, which asks for a dataset also where nothing is trained."""

ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")

# Losses that divide by the tokens of the whole update, whatever micro-batch they are in.
TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")

# Where TRL logs the share of tokens that a loss clips; the others clip none.
_CLIPPED = dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), "clip_ratio/region_mean")
_CLIPPED |= {"cispo": "cispo_clip_ratio"}


@contextmanager
def policy_for_generation(trainer: GRPOTrainer) -> Generator[PreTrainedModel]:
    """
    The policy of a trainer, whole on this process and in evaluation mode.

    Args:
        trainer (`GRPOTrainer`):
            The trainer.

    Yields:
        `PreTrainedModel`: The model to generate with.
    """
    args: Any = trainer.args
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        _unsharded(trainer),
    ):
        was_training = model.training
        model.eval()
        try:
            yield model
        finally:
            model.train(was_training)


@contextmanager
def _unsharded(trainer: GRPOTrainer) -> Generator[None]:
    """In which the weights that FSDP2 shards are whole on every process, so that each may call the model as often as it likes."""
    self: Any = trainer
    modules = [module for module in self.model_wrapped.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(
                bool(self.accelerator.state.fsdp_plugin.reshard_after_forward), recurse=False
            )


@contextmanager
def vllm_made_by(make: Callable[..., VLLMGeneration] | None) -> Generator[None]:
    """
    Let TRL's trainer make its vLLM backend by something else than `VLLMGeneration`.

    Args:
        make (`Callable[..., VLLMGeneration]`, *optional*):
            Gets what `VLLMGeneration` would. `None` changes nothing.
    """
    module: Any = grpo_trainer
    original = module.VLLMGeneration
    module.VLLMGeneration = make or original
    try:
        yield
    finally:
        module.VLLMGeneration = original


def add_lm_head_of(temperatures: Iterable[float], current: Callable[[], float]) -> Callable[..., None]:
    """
    What gives a model a fused LM head whose temperature may change.

    TRL divides logits by the temperature that it was given when the head was added. Where a run samples at several, each
    has a head of its own, and every call goes through the one of the temperature at hand.

    Args:
        temperatures (`Iterable[float]`):
            All that there will be.
        current (`Callable[[], float]`):
            The one at hand.

    Returns:
        `Callable[..., None]`: Takes what `add_fused_lm_head` does.
    """

    def add(model: PreTrainedModel, temperature: float = 1.0, **kwargs: Any) -> None:
        patched: Any = model
        original, heads = patched.forward, {}
        for each in {temperature, *temperatures}:
            patched.forward = original
            add_fused_lm_head(model, temperature=each, **kwargs)
            heads[each] = patched.forward.__func__

        @wraps(heads[temperature])  # `generate` checks its arguments against this signature
        def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            return heads[current()](self, *args, fused_lm_head=fused_lm_head, **kwargs)

        patched.forward = MethodType(forward, model)

    return add


@contextmanager
def heads_made_by(add: Callable[..., None] | None) -> Generator[None]:
    """
    Let TRL's trainer add its LM heads by something else than `add_fused_lm_head`.

    Args:
        add (`Callable[..., None]`, *optional*):
            Gets what `add_fused_lm_head` would. `None` changes nothing.
    """
    module: Any = grpo_trainer
    original = module.add_fused_lm_head
    module.add_fused_lm_head = add or original
    try:
        yield
    finally:
        module.add_fused_lm_head = original


@contextmanager
def engine_arguments(arguments: Mapping[str, Any]) -> Generator[None]:
    """
    Add to what TRL's backend makes its vLLM engine with.

    Args:
        arguments (`Mapping[str, Any]`):
            Arguments of `vllm.LLM`; they come before TRL's own. `None` takes one away.
    """
    module: Any = vllm_generation
    original = module.LLM

    def make(**kwargs: Any) -> Any:
        merged = {**kwargs, **arguments}
        return original(**{name: value for name, value in merged.items() if value is not None})

    module.LLM = make
    try:
        yield
    finally:
        module.LLM = original


class _TablesAsText:
    """Weights & Biases, with tables in which what is neither text nor a number is written as JSON."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def Table(self, dataframe: Any) -> Any:
        def as_text(value: Any) -> Any:
            return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else value

        return self._tracker.Table(dataframe=dataframe.map(as_text))


@contextmanager
def tables_as_text() -> Iterator[None]:
    """
    In which TRL's tables of completions reach Weights & Biases.

    It wants the same keys in every cell of a column, and messages with tool calls have others than those without.
    """
    module: Any = grpo_trainer
    original = getattr(module, "wandb", None)
    if original is None:
        yield
        return
    module.wandb = _TablesAsText(original)
    try:
        yield
    finally:
        module.wandb = original


def per_update(trainer: GRPOTrainer, count: torch.Tensor) -> torch.Tensor:
    """
    A number of things in a generation batch, as the number in one update of one process.

    Args:
        trainer (`GRPOTrainer`):
            The trainer.
        count (`torch.Tensor`):
            How many there are in all processes together.

    Returns:
        `torch.Tensor`: What to divide a sum over a micro-batch by, to get a mean over the update.
    """
    self: Any = trainer
    count = count.clamp(min=1.0) / self.accelerator.num_processes
    if self.model.training:
        count = count * self.current_gradient_accumulation_steps / self.args.steps_per_generation
    return count


def clip_limits(trainer: GRPOTrainer) -> tuple[float, ...]:
    """
    Ratios beyond which the loss of a trainer clips.

    Args:
        trainer (`GRPOTrainer`):
            The trainer.

    Returns:
        `tuple[float, ...]`: One for each side that it clips on.
    """
    self: Any = trainer
    if self.loss_type == "cispo":
        return (self.epsilon_high,)
    return (1 - self.epsilon_low, 1 + self.epsilon_high) if self.loss_type in _CLIPPED else ()


def clipped_fraction(trainer: GRPOTrainer) -> float:
    """
    Which share of the tokens in the loss the last pass has clipped, of all processes.

    Args:
        trainer (`GRPOTrainer`):
            The trainer.

    Returns:
        `float`: The share.
    """
    self: Any = trainer
    key = _CLIPPED.get(self.loss_type)
    return 0.0 if key is None else self._metrics["train" if self.model.training else "eval"][key][-1]


def without_bonuses(trainer: GRPOTrainer, loss: torch.Tensor) -> torch.Tensor:
    """
    What TRL's loss has just come to, without its bonus for entropy and its term for the balance of experts.

    Args:
        trainer (`GRPOTrainer`):
            The trainer.
        loss (`torch.Tensor`):
            The loss of one pass, without gradient.

    Returns:
        `torch.Tensor`: Policy and KL term. Its mean over processes is right; one of them may have that of all.
    """
    self: Any = trainer
    metrics, accumulation = self._metrics["eval"], 1.0
    if self.model.training:
        metrics, accumulation = self._metrics["train"], self.current_gradient_accumulation_steps
    if self._entropy_bonus_enabled:
        scale = 1.0 if self.loss_type in TOKEN_MEAN_LOSSES else accumulation
        return torch.full_like(loss, metrics["policy_loss"][-1] / scale)
    if self.aux_loss_enabled:
        return loss - self.router_aux_loss_coef * metrics["aux_loss"][-1] / accumulation
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDenominator:
    """
    What TRL divides a sum over tokens by, for each of its losses.

    Args:
        loss_type (`str`):
            TRL's name of the loss.
        accumulation (`float`):
            Micro-batches per update, or 1 where nothing is accumulated.
        max_completion_length (`int`):
            Longest completion; `dr_grpo` divides by it.
        num_items (`torch.Tensor` or `float`, *optional*):
            Tokens in the loss per update and process, for the losses that divide by them (`dapo`, `cispo`, `vespo`).
    """

    loss_type: str
    accumulation: float
    max_completion_length: int
    num_items: Any = None

    @classmethod
    def of(cls, trainer: GRPOTrainer, inputs: Mapping[str, Any]) -> "LossDenominator":
        """
        That of a trainer.

        Args:
            trainer (`GRPOTrainer`):
                The trainer.
            inputs (`Mapping[str, Any]`):
                Inputs of its loss.

        Returns:
            [`LossDenominator`]: The denominator.
        """
        self: Any = trainer
        return cls(
            loss_type=self.loss_type,
            accumulation=self.current_gradient_accumulation_steps if self.model.training else 1.0,
            max_completion_length=self.max_completion_length,
            num_items=per_update(trainer, inputs["num_items_in_batch"]),
        )

    def __call__(self, per_token: torch.Tensor, selected: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        Sum up a term over some tokens, as the loss sums up its own over those in `mask`.

        Args:
            per_token (`torch.Tensor` of shape `(B, T)`):
                The term.
            selected (`torch.Tensor` of shape `(B, T)`):
                1 for the tokens to sum over.
            mask (`torch.Tensor` of shape `(B, T)`):
                1 for the tokens that the loss counts.

        Returns:
            `torch.Tensor`: A scalar, to be added to the loss.
        """
        rows = (per_token * selected).sum(-1)
        if self.loss_type in TOKEN_MEAN_LOSSES:
            return rows.sum() / self.num_items
        if self.loss_type in ("grpo", "sapo"):
            total = (rows / mask.sum(-1).clamp(min=1.0)).mean()
        elif self.loss_type == "bnpo":
            total = rows.sum() / mask.sum().clamp(min=1.0)
        elif self.loss_type == "dr_grpo":
            total = rows.sum() / (per_token.size(0) * self.max_completion_length)
        elif self.loss_type == "luspo":
            total = rows.mean()
        else:
            raise ValueError(f"Unknown loss type: {self.loss_type}")
        return total / self.accumulation
