"""The parts of a run, made from its settings."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from transformers import PretrainedConfig, ProcessorMixin

from mcp_grpo.config import MIN_RESULT_TOKENS, MCPGRPOConfig
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import is_solved
from mcp_grpo.learning import (
    Credit,
    KLControl,
    MovingReference,
    Objective,
    ValueEstimator,
    add_value_head,
    ratio_edges,
)
from mcp_grpo.masking import (
    MIN_UNFORCED_TOKENS,
    Bootstrap,
    GrammarRoles,
    MaskRule,
    SamplerRoles,
    SchemaMask,
    SyntaxRoles,
    TurnGrammars,
)
from mcp_grpo.rewards.task import is_done
from mcp_grpo.rollout import BatchCollector, Limits, Renderer, RolloutEngine
from mcp_grpo.rollout.choice import TaskChoice
from mcp_grpo.rollout.context import OldResults
from mcp_grpo.sampling.sampler import Sampler, TransformersSampler, VLLMSampler
from mcp_grpo.sampling.vision import Vision
from mcp_grpo.sampling.vllm_backend import VLLMBackend, VLLMSettings
from mcp_grpo.sampling.vllm_server_backend import VLLMServerBackend
from mcp_grpo.tools import Cassette
from mcp_grpo.trl_compat import clip_limits
from mcp_grpo.types import Trajectory


def make_cassette(args: MCPGRPOConfig) -> Cassette | None:
    """Return the recording that this process makes or plays, if any."""
    if args.cassette is None:
        return None
    return Cassette.for_rank(args.cassette, cast(Any, args.cassette_mode), args.process_index)


def make_vllm_backend(args: MCPGRPOConfig) -> Callable[..., VLLMBackend] | None:
    """Return what TRL is to make its vLLM backend with, which takes what `VLLMGeneration` does; `None` without vLLM."""
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


def make_limits(args: MCPGRPOConfig, model_config: PretrainedConfig, max_context: int | None = None) -> Limits:
    """Return where a trajectory ends at the latest; `max_context` is what the sampler limits the context to."""
    known = [max_context, getattr(model_config.get_text_config(), "max_position_embeddings", None)]
    max_context = min((each for each in known if each is not None), default=None)
    max_completion_length = args.max_completion_length or max_context
    if max_completion_length is None:
        raise SettingsError("Set `max_completion_length`: the model's configuration does not limit its context.")
    return Limits(
        max_turns=args.max_turns,
        max_completion_length=max_completion_length,
        max_context=max_context,
        max_turn_tokens=args.max_turn_tokens,
        max_result_tokens=args.max_result_tokens or max(MIN_RESULT_TOKENS, max_completion_length // 2),
        timeout=args.trajectory_timeout,
        old_results=cast("OldResults", args.old_results),
    )


def max_concurrent(args: MCPGRPOConfig) -> int:
    """Return how many trajectories a process may have under way at a time."""
    batch_size = args.per_device_train_batch_size * cast("int", args.steps_per_generation)
    return args.max_concurrent_trajectories or batch_size * (2 if args.max_staleness else 1)


def make_grammars(args: MCPGRPOConfig, renderer: Renderer) -> TurnGrammars | None:
    """Return the grammars that turns are sampled under, or told syntax from choices by, if they are needed."""
    if args.schema_mask != "grammar" and not args.constrained_decoding:
        return None
    return TurnGrammars(
        renderer.tokenizer,
        end_of_turn_ids=renderer.end_of_turn_ids,
        chat_template_kwargs=renderer.chat_template_kwargs,
    )


def make_schema_mask(args: MCPGRPOConfig, renderer: Renderer, grammars: TurnGrammars | None) -> SchemaMask | None:
    """Return what masks the syntax of tool calls, if anything does. Without a rule, it only tells syntax from choices."""
    is_masking = args.constrained_decoding or args.schema_mask != "off"
    if not is_masking and not args.bootstrap_steps:
        return None
    rule = MaskRule(
        min_prob=args.schema_mask_min_prob,
        min_unforced_tokens=MIN_UNFORCED_TOKENS if args.min_unforced_fraction else 0,
        min_unforced_fraction=args.min_unforced_fraction,
    )
    if grammars is not None:
        return SchemaMask((SamplerRoles if args.constrained_decoding else GrammarRoles)(grammars), rule)
    syntax = SyntaxRoles(
        renderer.tokenizer,
        end_of_turn_ids=renderer.end_of_turn_ids,
        chat_template=renderer.chat_template,
        chat_template_kwargs=renderer.chat_template_kwargs,
    )
    if not syntax.is_supported:
        raise SettingsError(
            "The chat template writes tool calls in a way that `schema_mask` cannot read, so nothing could be masked. "
            'Set `schema_mask="off"` and `bootstrap_steps=0`.'
        )
    return SchemaMask(lambda segment, tools: syntax.roles(segment.token_ids, tools), rule if is_masking else None)


def make_kl_control(args: MCPGRPOConfig) -> KLControl | None:
    """Return what raises `beta` when the policy drifts, if anything does."""
    if args.kl_target is None or args.beta <= 0:
        return None
    return KLControl(args.beta, target=args.kl_target, max_beta=max(1.0, args.beta))


def make_vision(trainer: Any) -> tuple[Vision | None, str | None]:
    """Return what makes pictures into inputs of a trainer's policy, where it can see any; or why it is not shown them."""
    processor, args = trainer.processing_class, trainer.args
    if not isinstance(processor, ProcessorMixin):
        return None, None
    if args.use_vllm and args.vllm_mode == "server":
        return None, 'vLLM servers are given text only; with `vllm_mode="colocate"` or `use_vllm=False` it sees them'
    if args.old_results != "keep":
        return None, f'`old_results="{args.old_results}"` shortens results that hold some; set it to "keep"'
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return (
            None,
            "it was not tried with FSDP or DeepSpeed, where processes with images would wait for those without; train with DDP",
        )
    try:
        vision = Vision(processor)
    except SettingsError as error:
        return None, str(error)
    if args.use_vllm and not vision.repeats_token:
        return None, "its processor writes more than one token in the place of an image, which vLLM may do otherwise"
    return vision, None


def make_sampler(
    trainer: Any, engine: RolloutEngine, vision: Vision | None, **callbacks: Callable[..., Any]
) -> Sampler:
    """Return what samples from the policy of a trainer; `callbacks` are those of [`VLLMSampler`]."""
    # Nothing can follow a token that stands for a picture which nobody has.
    ends = [*trainer.eos_token_ids, *(vision.token_ids if vision else ())]
    if not trainer.use_vllm:
        return TransformersSampler(trainer, ends)
    args = trainer.args
    return VLLMSampler(
        backend=trainer.vllm_generation,
        model=lambda: trainer.model,
        accelerator=trainer.accelerator,
        end_of_turn_ids=ends,
        num_reserved=int(args.constrained_decoding),
        sleeps=args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode,
        turn_timeout=args.trajectory_timeout,
        step=lambda: trainer.state.global_step,
        ask=engine.ask,
        **callbacks,
    )


def make_collector(
    args: MCPGRPOConfig,
    engine: RolloutEngine,
    sampler: Sampler,
    renderer: Renderer,
    *,
    model_config: PretrainedConfig,
    accelerator: Accelerator,
    train_dataset: Dataset | None,
    is_success: Callable[[Trajectory], bool] | None,
    shows_progress: bool,
) -> BatchCollector:
    """Return what collects the trajectories of a batch."""
    grammars = make_grammars(args, renderer)
    return BatchCollector(
        engine=engine,
        sampler=sampler,
        renderer=renderer,
        limits=make_limits(args, model_config, sampler.max_context),
        accelerator=accelerator,
        grammars=grammars if args.constrained_decoding else None,
        schema_mask=make_schema_mask(args, renderer, grammars),
        seed=args.seed,
        temperature=args.temperature,
        max_concurrent=max_concurrent(args),
        max_staleness=args.max_staleness,
        choice=TaskChoice(train_dataset) if args.task_choice == "spread" and train_dataset is not None else None,
        max_refills=args.dynamic_sampling,
        is_solved=partial(is_solved, is_success=is_success or is_done) if args.replay_solutions else None,
        masks_cuts=args.truncation == "mask",
        shows_progress=shows_progress,
    )


def num_groups(args: MCPGRPOConfig, train_dataset: Any) -> int:
    """Return how many groups a run attempts."""
    if args.max_steps <= 0:
        return math.ceil(args.num_train_epochs * len(train_dataset))
    num_passes = args.max_steps * args.gradient_accumulation_steps
    num_batches = math.ceil(num_passes / cast("int", args.steps_per_generation) / args.num_iterations)
    return num_batches * cast("int", args.generation_batch_size) // cast("int", args.num_generations)


def make_credit(args: MCPGRPOConfig, reward_names: Sequence[str]) -> Credit:
    """Return what knows where advantages come from."""
    aggregation = args.multi_objective_aggregation
    is_summed = aggregation == "sum_then_normalize"
    hindrance = (
        None if is_summed else f"`multi_objective_aggregation={aggregation!r}` normalises each function by itself"
    )
    return Credit(args.advantage_mode, args.gamma, reward_names, hindrance)


def make_value_estimator(args: MCPGRPOConfig, policy: Any, *, gamma: float) -> ValueEstimator | None:
    """Add a value head to the policy and return what trains it, where `advantage_mode` needs one."""
    if not args.has_value_head:
        return None
    return ValueEstimator(add_value_head(policy), mode=args.advantage_mode, gamma=gamma, lam=args.lam)


def make_reference(trainer: Any, policy: Any) -> MovingReference | None:
    """Return the reference that follows the policy of a trainer, if it does."""
    args = trainer.args
    if args.ref_sync == "none":
        return None
    # Parameters that are sharded together must have one dtype, and are cast together.
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    is_bf16 = trainer.accelerator.mixed_precision == "bf16" and not is_sharded
    return MovingReference(
        policy,
        trainer.ref_model,
        mode=args.ref_sync,
        decay=args.ref_ema_decay,
        autocast_dtype=torch.bfloat16 if is_bf16 else None,
    )


def make_objective(trainer: Any, values: ValueEstimator | None, *, is_guarded: bool) -> Objective:
    """Return what the loss of a trainer has beside TRL's terms."""
    args = trainer.args
    return Objective(
        accelerator=trainer.accelerator,
        values=values,
        is_guarded=is_guarded,
        old_logps=args.old_logps,
        ratio_gate=args.ratio_gate,
        ratio_edges=ratio_edges(*clip_limits(trainer), 1 / args.ratio_gate, args.ratio_gate),
        kl_hard_cap=args.kl_hard_cap,
        is_kl_corrected=args.use_bias_correction_kl,
        importance_sampling_level=trainer.importance_sampling_level,
        value_loss_coef=args.value_loss_coef,
        bootstrap=Bootstrap(
            num_steps=args.bootstrap_steps,
            imitation_coef=args.bootstrap_imitation_coef,
            entropy_coef=args.bootstrap_entropy_coef,
        ),
    )


def has_plain_adapter(model: Any) -> bool:
    """Return whether a model has a LoRA adapter without DoRA."""
    config = getattr(model, "peft_config", {}).get("default")
    return isinstance(config, LoraConfig) and not config.use_dora
