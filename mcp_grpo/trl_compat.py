"""
Every private name and every patch of TRL and Transformers, in one place.

`mcp_grpo` pins `trl>=1.16,<1.17`. `OVERRIDES`, `ATTRIBUTES` and `SOURCES` list what else is relied on without a promise to keep it;
`tests/unit/test_seams.py` checks each, so that an upgrade which moves something fails there, in words, and not in the middle of a
run.
"""

import inspect
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer
from transformers import trainer as transformers_trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    qwen3_chat_template,
    supports_tool_calling,
)
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.models.utils import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import (
    FusedCausalLMOutput,
    add_fused_lm_head,
    disable_dropout_in_model,
    get_peft_config,
    get_quantization_config,
    is_async_callable,
    split_tensor_dict,
)

from mcp_grpo.console import InertConsole


__all__ = [
    "ATTRIBUTES",
    "COMPLETIONS",
    "INTEGRATION_TO_CALLBACK",
    "NO_TASKS",
    "OVERRIDES",
    "ROW_MEAN_LOSSES",
    "SOURCES",
    "TOKEN_MEAN_LOSSES",
    "TRAINER_STATE_NAME",
    "TREE_ATTENTION",
    "FusedCausalLMOutput",
    "GRPOTrainer",
    "LossDenominator",
    "ModelConfig",
    "SFTConfig",
    "SFTTrainer",
    "VLLMGeneration",
    "add_fused_lm_head",
    "add_response_schema",
    "attending_by",
    "attends_by_sdpa",
    "attention_name",
    "attention_with_logsumexp",
    "calling_instead",
    "checkpointed_layers",
    "clip_limits",
    "clipped_fraction",
    "delete_old_checkpoints",
    "disable_dropout_in_model",
    "engine_arguments",
    "get_peft_config",
    "get_quantization_config",
    "get_training_chat_template",
    "give_bias",
    "give_values",
    "head_reads_all",
    "inert_tables",
    "is_async_callable",
    "is_chat_template_prefix_preserving",
    "loss_weights",
    "parse_response",
    "policy_for_generation",
    "policy_pass",
    "processed_image",
    "qwen3_chat_template",
    "save_checkpoint_apart",
    "send_only",
    "split_tensor_dict",
    "supports_tool_calling",
    "tables_as_text",
    "unset_hf_deepspeed_config",
    "upload_copies",
    "use_attention",
    "vllm_made_by",
    "without_bonuses",
    "without_checkpointing",
]

# ---- What is relied on ----

OVERRIDES = (
    "_calculate_rewards",
    "_clip_grad_norm",
    "_compute_loss",
    "_determine_best_metric",
    "_generate",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_prepare_inputs",
    "_push_from_checkpoint",
    "_save",
    "_save_checkpoint",
    "_save_rng_state",
    "create_model_card",
    "create_optimizer",
    "evaluate",
    "evaluation_loop",
    "get_batch_samples",
    "log",
    "push_to_hub",
    "save_model",
    "train",
    "training_step",
)
"""Methods of `GRPOTrainer` and `Trainer` that [`MCPGRPOTrainer`] overrides."""

ATTRIBUTES = (
    "_buffered_inputs",
    "_entropy_bonus_enabled",
    "_last_loaded_step",
    "_logs",
    "_metrics",
    "_name",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "_tag_names",
    "_tokenizer",
    "aux_loss_enabled",
    "current_gradient_accumulation_steps",
    "eos_token_ids",
    "rollout_func",
)
"""Attributes and methods of them that it reads, sets or calls."""

TREE_ATTENTION = "shared_prompts"  # of models that run prompts once, where a model is told which attention to use
COMPLETIONS = 3
"""Index of the completions in what `GRPOTrainer._generate` returns."""

NO_TASKS = Dataset.from_dict({"task_id": [""], "prompt": [""]})
"""For TRL, which asks for a dataset also where nothing is trained."""

ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that divide by a number of rows: a row that is left out of the loss still counts in their denominator."""

TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")
"""Losses that divide by the tokens of the whole update, whatever micro-batch they are in."""

# Where TRL logs the share of tokens that a loss clips; the others clip none.
_CLIPPED = dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), "clip_ratio/region_mean")
_CLIPPED |= {"cispo": "cispo_clip_ratio"}

SOURCES: Mapping[Any, tuple[str, ...]] = {
    GRPOTrainer._generate: (
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields",
        'extra_fields.pop("env_mask", None)',
        "self.state.global_step != self._last_loaded_step",
    ),
    GRPOTrainer._generate_and_score_completions: (
        'output["sampling_per_token_logps"]',
        'if old_per_token_logps is not None:\n            output["old_per_token_logps"] = old_per_token_logps',
    ),
    GRPOTrainer._compute_loss: (
        "input_ids = torch.cat([prompt_ids, completion_ids], dim=1)",
        "attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)",
        "compute_entropy=True",
        "compute_aux_loss=self.aux_loss_enabled",
        'inputs.get("old_per_token_logps")',
        'advantages = inputs["advantages"]',
        "self.beta * per_token_kl",
        'if self.loss_type in ["grpo", "sapo"]:',
        'elif self.loss_type == "dr_grpo":',
        'elif self.loss_type == "luspo":',
        *(f'self._metrics[mode]["{name}"].append(' for name in ("policy_loss", "aux_loss", *_CLIPPED.values())),
    ),
    add_fused_lm_head: (
        "compact = _use_triton(hidden_states.device)",
        "hidden_states = backbone_outputs.last_hidden_state\n            labels = shift_labels",
    ),
    SFTTrainer.compute_loss: ("outputs = model(**inputs, fused_lm_head=True)", "outputs.label_mask.sum()"),
    Trainer._save_checkpoint: (
        'checkpoint_folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"',
        "run_dir = self._get_output_dir(trial=trial)",
        "if self.args.push_to_hub:\n            self._push_from_checkpoint(output_dir)",
        "rotate_checkpoints(\n                output_dir=run_dir,",
    ),
    GRPOTrainer.log: ("logging_backend.Table(dataframe=df)",),
    GradientCheckpointingLayer.__call__: (
        "if self.gradient_checkpointing and self.training:",
        "partial(super().__call__",
    ),
    trl_utils.print_prompt_completions_sample: ("console = Console()",),
    GRPOTrainer.__init__: ("self._dist =", "self._metrics =", "self._tokenizer =", "self.rollout_func ="),
}
"""Text that the source of a function must contain."""

NUM_UPLOADS = 3  # of folders, in `transformers.trainer`; there are none of single files

# Parameters of `_get_per_token_logps_and_entropies` that are no columns of a batch.
_OF_THE_PASS = (
    "self",
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)


# ---- The policy and its loss ----


def policy_pass(trainer: Any, model: Any, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, Any, Any]:
    """Run the policy over a micro-batch as `_compute_loss` does; return log-probabilities, entropies and auxiliary loss."""
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    columns = {name: inputs.get(name) for name in parameters if name not in _OF_THE_PASS}
    return trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].size(1),
        compute_entropy=True,
        compute_aux_loss=trainer.aux_loss_enabled,
        **columns,
    )


@contextmanager
def loss_weights(trainer: Any, *, beta: float, more_entropy: float) -> Generator[None]:
    """Let TRL's loss have another weight of its KL term, and more weight on its entropy bonus."""
    before = {name: getattr(trainer, name) for name in ("beta", "entropy_coef", "_entropy_bonus_enabled")}
    trainer.beta = beta
    if more_entropy:
        trainer.entropy_coef += more_entropy
        trainer._entropy_bonus_enabled = True
    try:
        yield
    finally:
        trainer.beta = before["beta"]
        if more_entropy:
            trainer.entropy_coef = before["entropy_coef"]
            trainer._entropy_bonus_enabled = before["_entropy_bonus_enabled"]


def head_reads_all(device: torch.device) -> bool:
    """Return whether TRL's fused LM head also reads tokens without labels, though it need not: it has no Triton kernel there."""
    return device.type in ("cpu", "mps")


def give_values(model: Any, output_type: Any) -> None:
    """Let a model with a fused LM head and a `value_head` return values of the last `num_values` positions, too."""
    # The function and not the bound method: a copy of the model must read its own hidden states.
    fused_forward = model.forward.__func__

    @wraps(type(model).forward)  # `generate` checks its arguments against this signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, num_values: int = 0, **kwargs: Any) -> Any:
        if not (fused_lm_head and num_values):
            return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        hidden: list[torch.Tensor] = []
        # Before any other hook leaves tokens out.
        hook = self.base_model.register_forward_hook(
            lambda *call: hidden.append(call[-1].last_hidden_state), prepend=True
        )
        try:
            output = fused_forward(self, *args, fused_lm_head=True, **kwargs)
        finally:
            hook.remove()
        # Inside the forward pass, and part of its output: wrappers such as DDP and FSDP see nothing else.
        return output_type(**output, value_preds=self.value_head(hidden[0][:, -num_values:]))

    model.forward = MethodType(forward, model)


_attention_lock = threading.Lock()
# By configuration: how many attend by another for a while, and which attention it has else.
_lent_attention: dict[int, tuple[int, str | None]] = {}


def attention_name(model: Any) -> str | None:
    """Return which attention a model uses, but for a while that [`attending_by`] lasts."""
    config = model.config
    with _attention_lock:
        return _lent_attention.get(id(config), (0, config._attn_implementation))[1]


def use_attention(model: Any, name: str | None) -> None:
    """Let a model use another attention. Unlike `set_attn_implementation`, ask neither the model nor the Hub."""
    key = id(model.config)
    with _attention_lock:
        if key in _lent_attention:
            _lent_attention[key] = _lent_attention[key][0], name
        else:
            model.config._attn_implementation = name


@contextmanager
def attending_by(model: Any, name: str) -> Generator[None]:
    """Let a model use another attention for a while. Several threads may do so at once, if all name the same: the last puts back what was."""
    config = model.config
    with _attention_lock:
        count, before = _lent_attention.get(id(config), (0, config._attn_implementation))
        _lent_attention[id(config)] = count + 1, before
        config._attn_implementation = name
    try:
        yield
    finally:
        with _attention_lock:
            count, before = _lent_attention.pop(id(config))  # `use_attention` may have changed it meanwhile
            if count > 1:
                _lent_attention[id(config)] = count - 1, before
            else:
                config._attn_implementation = before


def attends_by_sdpa(model: Any) -> bool:
    """Return whether a model, where it is only called with rows, attends by SDPA: also by an attention of ours that is more than that."""
    return attention_name(model) in ("sdpa", TREE_ATTENTION)


def attention_with_logsumexp(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by SDPA's own kernel for CPUs, and return the logarithm of the sum of the exponentials, too, which SDPA does not."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, is_causal=is_causal, attn_mask=bias, scale=scaling)


def checkpointed_layers(model: Any) -> list[Any]:
    """Return the layers of a model that have gradient checkpointing and choose it each for itself, from first to last."""
    return [
        each
        for each in model.modules()
        if isinstance(each, GradientCheckpointingLayer) and each.gradient_checkpointing
    ]


@contextmanager
def without_checkpointing(model: Any, num_layers: int | None = None) -> Generator[None]:
    """
    Let the layers of a model, or the last of them, keep their activations in the passes that begin meanwhile.

    Each reads `gradient_checkpointing` when it is called, and not when it is called again in the backward pass. That goes through the last ones
    first: what they kept is gone by the time when the others are computed again.
    """
    if num_layers is None:
        layers = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    else:
        found = checkpointed_layers(model)
        layers = found[len(found) - num_layers :]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


@contextmanager
def calling_instead(model: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Generator[None]:
    """Let a model run what `make` returns, given its `forward`, which others may have replaced already."""
    was_replaced, forward = "forward" in vars(model), model.forward
    model.forward = make(forward)
    try:
        yield
    finally:
        if was_replaced:
            model.forward = forward
        else:
            del model.forward


@contextmanager
def policy_for_generation(trainer: Any) -> Generator[PreTrainedModel]:
    """Yield the policy of a trainer, whole on this process, in evaluation mode and without gradients."""
    args = trainer.args
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
def _unsharded(trainer: Any) -> Generator[None]:
    """Keep the weights that FSDP2 shards whole on every process, so that each may call the model as often as it likes."""
    modules = [module for module in trainer.model_wrapped.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(
                bool(trainer.accelerator.state.fsdp_plugin.reshard_after_forward), recurse=False
            )


def processed_image(processor: Any, image: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Return what a model takes for one picture beside tokens, and the text that its processor puts in the place of one."""
    init_kwargs = processor.tokenizer.init_kwargs
    settings = processor._merge_kwargs(
        processor.valid_processor_kwargs, tokenizer_init_kwargs=init_kwargs, return_tensors="pt"
    )
    inputs, [placeholder] = processor._process_images([image], **settings["images_kwargs"])
    return {name: value for name, value in inputs.items() if name not in processor.unused_input_names}, placeholder


# ---- vLLM ----


@contextmanager
def vllm_made_by(make: Callable[..., VLLMGeneration] | None) -> Generator[None]:
    """Let TRL's trainer make its vLLM backend by `make` instead of `VLLMGeneration`; `None` changes nothing."""
    with _replaced(grpo_trainer, "VLLMGeneration", make or grpo_trainer.VLLMGeneration):  # type: ignore[attr-defined]
        yield


@contextmanager
def engine_arguments(arguments: Mapping[str, Any]) -> Generator[None]:
    """Add arguments of `vllm.LLM` to those that TRL's backend makes its engine with; `None` takes one away."""
    original = vllm_generation.LLM  # type: ignore[attr-defined]

    def make(**kwargs: Any) -> Any:
        merged = {**kwargs, **arguments}
        return original(**{name: value for name, value in merged.items() if value is not None})

    with _replaced(vllm_generation, "LLM", make):
        yield


def give_bias(model: Any) -> None:
    """Let TRL's fused output layer read that there is no bias where PEFT has wrapped it to train some of its rows."""
    head = model.get_output_embeddings()
    if head is not None and not hasattr(head, "bias"):
        head.bias = None


def send_only(backend: Any, is_sent: Callable[[str], bool]) -> None:
    """Let a vLLM backend send only the weights whose name passes: an engine does not know the others."""
    named = backend._iter_named_params
    backend._iter_named_params = lambda: (pair for pair in named() if is_sent(pair[0]))


# ---- Trackers and uploads ----


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
def tables_as_text() -> Generator[None]:
    """
    Let TRL's tables of completions reach Weights & Biases.

    It wants the same keys in every cell of a column, and messages with tool calls have others than those without.
    """
    tracker = getattr(grpo_trainer, "wandb", None)
    if tracker is None:
        yield
        return
    with _replaced(grpo_trainer, "wandb", _TablesAsText(tracker)):
        yield


@contextmanager
def inert_tables() -> Generator[None]:
    """Let TRL print its tables of completions so that the terminal does not obey what a policy or a tool wrote."""
    with _replaced(trl_utils, "Console", InertConsole):
        yield


class _CopyingApi:
    """An `HfApi` that uploads a copy of a folder in its place."""

    def __init__(self, api: Any, copy: Callable[[Path, Path], None], beside: Path) -> None:
        self._api, self._copy, self._beside = api, copy, beside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: str, run_as_future: bool = False, **kwargs: Any) -> Any:
        # Beside the policy, where there is room for it. The name starts as those that are never uploaded.
        staged = Path(tempfile.mkdtemp(prefix="_upload-", dir=self._beside))
        is_uploading = False
        try:
            self._copy(Path(folder_path), staged)
            result = self._api.upload_folder(folder_path=str(staged), run_as_future=run_as_future, **kwargs)
            if run_as_future:
                result.add_done_callback(lambda _: shutil.rmtree(staged, ignore_errors=True))
                is_uploading = True
            return result
        finally:
            if not is_uploading:
                shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def upload_copies(copy: Callable[[Path, Path], None], beside: Path) -> Generator[None]:
    """Upload sanitized copies of folders while active: `copy(folder, target)` fills an empty folder `beside` the policy."""
    original = transformers_trainer.hf_api  # type: ignore[attr-defined]
    with _replaced(transformers_trainer, "hf_api", lambda: _CopyingApi(original(), copy, beside)):
        yield


def save_checkpoint_apart(trainer: Any, save: Callable[[], None], folder: Path) -> Path:
    """
    Let a trainer write a checkpoint into a `folder` of its own by `save`, without uploading it or deleting older ones; return
    where it was to be.
    """
    step, best = trainer.state.global_step, trainer.state.best_global_step
    run_dir = Path(trainer._get_output_dir(trial=None))
    hub, trainer.args.push_to_hub = trainer.args.push_to_hub, False
    trainer._get_output_dir = lambda trial: str(folder)  # where there is nothing to delete
    try:
        save()
    finally:
        del trainer._get_output_dir
        trainer.args.push_to_hub = hub
    final, best_folder = (run_dir / f"{PREFIX_CHECKPOINT_DIR}-{each}" for each in (step, best))
    if best and (best == step or best_folder.is_dir()):
        trainer.state.best_model_checkpoint = str(best_folder)
    if trainer.args.should_save:
        trainer.state.save_to_json(str(folder / final.name / TRAINER_STATE_NAME))
    return final


def delete_old_checkpoints(trainer: Any) -> None:
    """Delete the checkpoints beyond `save_total_limit`, as Transformers does when it has written one."""
    rotate_checkpoints(
        output_dir=trainer._get_output_dir(trial=None),
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )


@contextmanager
def _replaced(module: Any, name: str, replacement: Any) -> Generator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


# ---- Numbers that TRL's loss does not return ----


def clip_limits(trainer: Any) -> tuple[float, ...]:
    """Return the ratios beyond which the loss of a trainer clips."""
    if trainer.loss_type == "cispo":
        return (trainer.epsilon_high,)
    return (1 - trainer.epsilon_low, 1 + trainer.epsilon_high) if trainer.loss_type in _CLIPPED else ()


def clipped_fraction(trainer: Any) -> float:
    """Return the share of the tokens in the loss that the last pass has clipped, of all processes."""
    key = _CLIPPED.get(trainer.loss_type)
    return 0.0 if key is None else trainer._metrics["train" if trainer.model.training else "eval"][key][-1]


def without_bonuses(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    """
    Take the entropy bonus and the term for the balance of experts out of what TRL's loss has just come to.

    What is left is the policy and the KL term. Its mean over processes is right; one of them may have that of all.
    """
    metrics, accumulation = trainer._metrics["eval"], 1.0
    if trainer.model.training:
        metrics, accumulation = trainer._metrics["train"], trainer.current_gradient_accumulation_steps
    if trainer._entropy_bonus_enabled:
        scale = 1.0 if trainer.loss_type in TOKEN_MEAN_LOSSES else accumulation
        return torch.full_like(loss, metrics["policy_loss"][-1] / scale)
    if trainer.aux_loss_enabled:
        return loss - trainer.router_aux_loss_coef * metrics["aux_loss"][-1] / accumulation
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
        share (`float`, *optional*, defaults to `1.0`):
            Share of a generation batch's rows that one update of one process has.
    """

    loss_type: str
    accumulation: float
    max_completion_length: int
    num_items: Any = None
    share: float = 1.0

    @classmethod
    def of(cls, trainer: Any, inputs: Mapping[str, Any]) -> "LossDenominator":
        """Return that of a trainer, for the inputs of its loss."""
        share, accumulation = 1 / trainer.accelerator.num_processes, 1.0
        if trainer.model.training:
            accumulation = trainer.current_gradient_accumulation_steps
            share *= accumulation / trainer.args.steps_per_generation
        return cls(
            loss_type=trainer.loss_type,
            accumulation=accumulation,
            max_completion_length=trainer.max_completion_length,
            num_items=inputs["num_items_in_batch"].clamp(min=1.0) * share,
            share=share,
        )

    def per_update(self, count: torch.Tensor) -> torch.Tensor:
        """Return a number of things in a generation batch as that in one update of one process."""
        return count.clamp(min=1.0) * self.share

    def __call__(self, per_token: torch.Tensor, selected: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        Sum up a term of shape `(B, T)` over the `selected` tokens, as the loss sums up its own over those in `mask`.

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
