"""The loss: TRL's own, and what may be added to it or held back from it."""

import logging
import math
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.helpers import disable_input_dtype_casting
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from mcp_grpo._trl import LossDenominator, clip_limits, clipped_fraction, per_update, without_bonuses
from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.learning import (
    MIN_SCALE,
    Bootstrap,
    Critic,
    Health,
    HealthNote,
    MovingReference,
    RatioGate,
    TokenFigures,
    TurnRewards,
    Unpadded,
    ValueRecorder,
    add_value_head,
    by_length,
    capped_reference,
    imitation_loss,
    kl_of_active,
    kl_of_masked,
    minds_width,
    needs_bootstrap,
    ratio_edges,
    ratio_quantiles,
    to_tokens,
    token_metrics,
    token_sums,
    turn_columns,
)
from mcp_grpo.monitor import GPUWatch, Phases


logger = logging.getLogger(__name__)

Batch = dict[str, Any]

# What TRL asks of a model, beside images and the like.
_OF_TEXT = ("batch_size", "compute_entropy", "compute_aux_loss")


class ObjectiveTrainer(GRPOTrainer):
    """
    TRL's GRPO, with turn-level advantages, a value head, a reference that moves, and guards for ratios and KL.

    TRL's `_compute_loss` stays in charge of the policy term. It reads advantages and reference log-probabilities after
    its forward pass, from a copy of the inputs that has been settled by then. With everything off, its loss and its
    gradients are TRL's, bit by bit.
    """

    # Narrower, or wider, than `transformers` has them: what they are here.
    args: MCPGRPOConfig
    accelerator: Any
    model: Any
    ref_model: Any
    optimizer: Any
    num_generations: int
    num_generations_eval: int
    reward_weights: torch.Tensor
    chat_template_kwargs: dict[str, Any]

    _is_guarded = False  # whether it is known what tokens were sampled with, so that ratios and KL are guarded

    def __init__(self, model: Any, reward_funcs: Any, args: MCPGRPOConfig, train_dataset: Any, **kwargs: Any) -> None:
        self._settled: Batch | None = None  # the inputs of the loss at hand
        self._recorder: ValueRecorder | None = None
        self._logps: Any = None
        self._is_scoring = False
        self._phases = Phases(args)
        self._gpu_watch = GPUWatch()
        super().__init__(model, reward_funcs, args, train_dataset, **kwargs)
        self._turn_rewards = TurnRewards(self.reward_funcs, self.reward_func_names)
        self.reward_funcs = self._turn_rewards.functions
        policy = self.accelerator.unwrap_model(self.model)
        self._minds_width = minds_width(policy.config)
        self._critic: Critic | None = None
        if args.value_head_kind:
            kind = cast(Any, args.value_head_kind)
            self._critic = Critic(
                add_value_head(policy, kind=kind, backbone_grad_scale=args.value_backbone_grad_scale),
                mode=args.advantage_mode,
                gamma=args.gamma,
                lam=args.lam,
                warmup_steps=args.value_warmup_steps,
                clip_range=args.value_clip_range,
            )
        self._reference: MovingReference | None = None
        if args.ref_sync != "none":
            # Parameters that are sharded together must have one dtype, and are cast together.
            is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
            is_bf16 = self.accelerator.mixed_precision == "bf16" and not is_sharded
            self._reference = MovingReference(
                policy,
                self.ref_model,
                mode=cast(Any, args.ref_sync),
                decay=args.ref_ema_decay,
                autocast_dtype=torch.bfloat16 if is_bf16 else None,
            )
        if self.use_vllm:  # which does not know them
            named = self.vllm_generation._iter_named_params
            others = ("value_head", "modules_to_save.ref.")
            self.vllm_generation._iter_named_params = lambda: (
                p for p in named() if not any(o in p[0] for o in others)
            )
        self._kl_control = args.make_kl_control()
        self._token_figures = TokenFigures()  # of the update at hand
        self._pass_figures: tuple[dict[str, float], dict[str, float]] = {}, {}
        self._policy_loss: torch.Tensor | None = None  # of the update at hand, on this rank
        self._gate = RatioGate(args.ratio_gate_min, args.ratio_gate_max)
        self._ratio_edges = ratio_edges(*clip_limits(self), args.ratio_gate_min, args.ratio_gate_max)
        self._bootstrap = Bootstrap(
            num_steps=args.bootstrap_steps,
            imitation_coef=args.bootstrap_imitation_coef,
            entropy_coef=args.bootstrap_entropy_coef,
        )
        self._has_entropy_bonus = self._entropy_bonus_enabled
        self._health = Health(args.on_unhealthy, args.health_patience)
        self._figures: dict[str, float] = {}  # of the step at hand
        self._entropies: list[float] = []  # of its passes
        self.add_callback(_StepEnd(self))

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _generate_every(self) -> int:
        """Micro-batches from one generation to the next."""
        return cast("int", self.args.steps_per_generation) * self.num_iterations

    @property
    def _is_on_policy(self) -> bool:
        """Whether each batch is used for one update only."""
        return self.args.gradient_accumulation_steps % self._generate_every == 0

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def _retries(self) -> int:
        """How often a first turn without a call is sampled again: what is only judged is judged as it is."""
        return self.args.first_call_retries if self.model.training else 0

    def _record(self, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._metrics[self._mode][key].append(value)
        if self.model.training:
            self._figures |= metrics

    # ---- What a batch is learnt from ----

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        self._rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Under autocast an adapter's float32 is cast to bfloat16, and so is what peft casts to float32 for it, bit by bit
        # what it was. Without dropout, that there and back is only time.
        is_idle = self._is_guarded and self.accelerator.mixed_precision == "bf16" and _has_plain_adapter(self.model)
        with self._phases("loss"), disable_input_dtype_casting(self.model, active=is_idle):
            return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        self._recorder = None
        # Only then does TRL run the policy on the batch before its loss does; the values of that pass come for free.
        self._is_scoring = not self._is_on_policy
        try:
            with self._phases("scoring"):
                batch = super()._generate_and_score_completions(inputs)
        finally:
            self._is_scoring = False
        if self.model.training:
            self._figures |= {key: self._metrics["train"][key][-1] for key in ("reward", "frac_reward_zero_std")}
        self._add_columns(batch)
        if self._critic is not None or self.args.advantage_mode != "group":
            self._add_turns(batch)
        if self.model.training and self._is_guarded:
            self._figures["is_flat"] = float(self._is_flat())
        return batch

    def _is_flat(self) -> bool:
        """Return whether no attempt of a batch did better than the others it is compared with."""
        if "frac_reward_zero_std" in self._figures:
            return self._figures["frac_reward_zero_std"] == 1
        # A value head compares all attempts with each other, and turns with turns.
        totals = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        return not self._turn_rewards.given and bool((totals == totals[0]).all())

    def _add_columns(self, batch: Batch) -> None:
        """Add what else the loss needs to a batch that has been scored."""

    def _is_cut(self, batch: Batch) -> torch.Tensor:
        """1 for the completions that ended because there was no more room."""
        last = (batch["completion_mask"].sum(dim=1, keepdim=True) - 1).clamp(min=0)
        ends = torch.tensor(self.eos_token_ids, device=last.device)
        return (~torch.isin(batch["completion_ids"].gather(1, last).squeeze(1), ends)).float()

    def _add_turns(self, batch: Batch) -> None:
        args, size = self.args, len(batch["completion_ids"])
        rewards = self._rewards[self.accelerator.process_index * size :][:size]
        turn_ids = batch["turn_ids"] if "turn_ids" in batch else _turn_ids(batch)
        turn_ids = turn_ids.masked_fill(rewards.isnan().all(dim=1, keepdim=True), -1)
        counts = (turn_ids.amax(dim=1) + 1).tolist()
        batch |= turn_columns(
            turn_ids,
            self._turn_rewards.per_turn(rewards, self.reward_weights, counts),
            self._group_size,
            gamma=args.gamma,
            scale=args.advantage_scale,
            accelerator=self.accelerator,
            min_scale=1.0 if self._critic is not None and self._critic.gives_advantages else MIN_SCALE,
        )
        if self.model.training and args.advantage_mode != "group":
            # Turns may teach though all totals are the same, and values without others to compare with.
            del self._figures["frac_reward_zero_std"]
            if args.advantage_mode == "group_turn":
                is_flat = self.accelerator.gather(batch["turn_advantages"].abs().max()).max() == 0
                self._figures["frac_reward_zero_std"] = float(is_flat)
        if args.truncation == "bootstrap" and "is_cut" not in batch:
            batch["is_cut"] = self._is_cut(batch)
        if self._critic is not None:  # fixed now: what is learnt from a batch must not change its own weight
            batch["mixing_weight"] = torch.tensor(self._critic.mixing.value, device=turn_ids.device)
        if self._recorder is not None:
            batch["old_values"] = self._recorder.values()
            batch["old_values_after"] = self._recorder.values_after()
        if args.advantage_mode != "group":
            batch["advantages"] = to_tokens(batch["turn_advantages"] / batch["advantage_scale"], turn_ids)

    def _bootstrap_columns(self, batch: Batch, metrics: dict[str, float]) -> Batch:
        """What to imitate while the policy cannot form calls: the syntax of valid calls, where they did well."""
        forced = batch["forced"] * (batch["completion_mask"] > 0)
        imitated = forced * (batch["advantages"] > 0).unsqueeze(1)
        active, sampled = batch["completion_mask"] * batch["tool_mask"], batch["turn_ids"] >= 0
        sums = torch.stack([figure.sum().float() for figure in (imitated, active, sampled)])
        num_imitated, active, sampled = self.accelerator.reduce(sums, reduction="sum")
        valid_rate = metrics.get("tools/valid_rate", math.nan)
        is_needed = needs_bootstrap((active / sampled.clamp(min=1)).item(), valid_rate)
        self._record({"bootstrap/is_needed": float(is_needed)})
        return {
            "imitated": imitated,
            "num_imitated": num_imitated,
            "needs_bootstrap": torch.tensor(float(is_needed), device=imitated.device),
        }

    @property
    def _is_trimming(self) -> bool:
        """Whether passes are only as wide as their longest row."""
        return self.args.trim_padding and self._is_guarded and not self._minds_width

    @property
    def _is_sum_of_rows(self) -> bool:
        """Whether an update is the same however its rows are spread over passes, unless one is over `kl_hard_cap`."""
        args = self.args
        has_means = self.loss_type == "bnpo" or self._has_entropy_bonus or args.bootstrap_steps > 0
        looks_around = args.top_entropy_quantile < 1 or self.aux_loss_enabled
        return not has_means and not looks_around

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        batches = self._buffered_inputs
        if batches is before or "pixel_values" in inputs or not self._is_trimming or not self._is_sum_of_rows:
            return inputs
        self._buffered_inputs = by_length(batches)  # all of one update: see `check_arguments`
        return self._buffered_inputs[self._step % len(batches)]

    # ---- The loss ----

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        args, beta, entropy_coef = self.args, self.beta, self.entropy_coef
        strength = self._bootstrap.strength(self.state.global_step) if self.model.training else 0.0
        if strength and not inputs.get("needs_bootstrap"):  # in this order: reading a tensor waits for the device
            strength = 0.0
        self._settled = inputs = {**inputs}
        if "is_first_phase" in inputs:  # the last rollout may have been that of an evaluation
            self.temperature = args.temperature_at(0 if inputs["is_first_phase"] else None)
        try:
            # The policy term and the KL term are means over rows for some losses; the entropy bonus is not.
            self.beta = float(beta * inputs.get("row_scale", 1.0))
            if strength:
                self.entropy_coef += self._bootstrap.entropy_coef * strength
            self._entropy_bonus_enabled = self._has_entropy_bonus or strength > 0
            loss = super()._compute_loss(model, inputs)
            if self._is_guarded:
                self._end_pass(loss.detach(), inputs)
            if "masked" in inputs and self.beta and args.kl_on_forced and args.schema_mask_weight == 0:
                denominator = LossDenominator.of(self, inputs)
                kl = kl_of_masked(self._logps, inputs, denominator, is_corrected=args.use_bias_correction_kl)
                loss = loss + self.beta * kl
        finally:
            self.beta, self._settled = beta, None
            if strength:
                self.entropy_coef = entropy_coef
        if self._critic is not None:
            assert self._recorder
            is_training, num_turns = self.model.training, per_update(self, inputs["num_turns"])
            value_loss = self._critic.loss(inputs, self._recorder, num_turns, learn=is_training)
            loss = loss + args.value_loss_coef * value_loss
            if not is_training:
                self._record({"value/loss": self._mean_over_ranks(value_loss.detach())})
        if strength:
            imitation = imitation_loss(self._logps, inputs["imitated"], per_update(self, inputs["num_imitated"]))
            loss = loss + self._bootstrap.imitation_coef * strength * imitation
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        is_policy = self._settled is not None or self._is_scoring
        is_text = not any(value is not None for name, value in kwargs.items() if name not in _OF_TEXT)
        if self._is_trimming and is_text:
            model = Unpadded(model, multiple=int(self.pad_to_multiple_of or 1))
        recorder = ValueRecorder(model, logits_to_keep) if self._critic is not None and is_policy else None
        output = super()._get_per_token_logps_and_entropies(
            cast(Any, recorder or model), input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        if is_policy:
            self._recorder, self._is_scoring = recorder, False
        if self._settled is not None:
            self._logps = output[0]
            self._settle(self._settled, output[0].detach())
        return output

    def _settle(self, inputs: Batch, logps: torch.Tensor) -> None:
        """Give a batch its advantages and its reference once this pass is done, before TRL reads them."""
        if self._critic is not None:
            assert self._recorder
            self._critic.settle(inputs, self._recorder, learn=self.model.training and self._is_first_pass)
        if "row_scale" in inputs:
            inputs["advantages"] = inputs["advantages"] * inputs["row_scale"]
        weight = self.args.schema_mask_weight
        if "masked" in inputs and weight > 0:
            inputs["advantages"] = _per_token(inputs["advantages"]) * (1 - inputs["masked"] * (1 - weight))
        if self._is_guarded:
            self._guard(inputs, logps)

    @property
    def _is_first_pass(self) -> bool:
        """Whether the batch at hand is used for the first time."""
        return not self.model.training or self._step % self._generate_every < cast(
            "int", self.args.steps_per_generation
        )

    def _guard(self, inputs: Batch, logps: torch.Tensor) -> None:
        """Take tokens out of the policy term whose ratio is too far off, and all of them if the KL divergence is."""
        sampling, reference = inputs["sampling_per_token_logps"], inputs.get("ref_per_token_logps")
        if self.args.old_logps == "trainer":
            old = inputs.get("old_per_token_logps", logps)
            gated = self._gate(old, sampling)
            weights = (old - sampling).exp().masked_fill(gated, 0)
        else:
            gated = self._gate(logps, sampling)
            weights = (~gated).float()
            # An advantage of 0 does not undo a ratio without end.
            inputs["old_per_token_logps"] = torch.where(gated, logps, inputs["old_per_token_logps"])
        advantages = _per_token(inputs["advantages"]) * weights
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        sums = token_sums(
            logps=logps,
            sampling_logps=sampling,
            ref_logps=reference,
            advantages=advantages,
            active=mask,
            sampled=((mask + inputs["masked"]) > 0) if "masked" in inputs else mask,
            gated=gated,
            is_on_policy=self._is_first_pass and not (self.model.training and self.args.rollout_ahead),
            edges=self._ratio_edges,
        )
        total = self.accelerator.reduce(torch.stack(list(sums.values())), reduction="sum").tolist()
        total = dict(zip(sums, total, strict=True))
        metrics, quantiles = token_metrics(total), ratio_quantiles(logps, sampling, mask, self.accelerator)
        total["idle"] = total["gated"]
        if "kl/active" in metrics and (cap := self.args.kl_hard_cap) is not None:
            inputs["ref_per_token_logps"] = capped_reference(logps, cast(torch.Tensor, reference), cap)
            is_over = not metrics["kl/active"] <= cap
            self._record({"kl/hard_cap_hits": float(is_over)})
            if is_over:
                advantages, total["idle"] = torch.zeros_like(advantages), total["active"]
        inputs["advantages"] = advantages
        self._pass_figures = total, quantiles

    def _end_pass(self, loss: torch.Tensor, inputs: Batch) -> None:
        """Note what TRL's loss came to in one pass, and what its tokens were like."""
        policy_loss = without_bonuses(self, loss)
        if self.beta:
            correction = self.importance_sampling_level if self.args.use_bias_correction_kl else None
            denominator = LossDenominator.of(self, inputs)
            kl = kl_of_active(self._logps, inputs, denominator, correction=cast(Any, correction))
            policy_loss = policy_loss - self.beta * kl
        total, quantiles = self._pass_figures
        # What is gated has an advantage of 0 and is never clipped as well.
        total["idle"] += clipped_fraction(self) * total["active"]
        if self.model.training:
            self._token_figures.add(total, quantiles)
            self._entropies.append(self._metrics["train"]["entropy"][-1])
            self._policy_loss = policy_loss if self._policy_loss is None else self._policy_loss + policy_loss
        else:
            self._record(token_metrics(total) | quantiles | {"loss/policy": self._mean_over_ranks(policy_loss)})

    def _mean_over_ranks(self, value: torch.Tensor) -> float:
        return self.accelerator.reduce(value, reduction="mean").item()

    # ---- The optimizer ----

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if self._critic is not None and isinstance(optimizer, torch.optim.Optimizer):
            own = list(self._critic.head.parameters())
            ids = {id(parameter) for parameter in own}
            if {id(parameter) for parameter in optimizer.param_groups[-1]["params"]} == ids:
                return optimizer  # made before
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
            optimizer.add_param_group({"params": own, "lr": self.args.value_learning_rate, "weight_decay": 0.0})
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._critic is None:
            return super()._clip_grad_norm(model)
        # By itself: clipped together, a large gradient of the value head would shrink the policy's step.
        own = list(self._critic.head.parameters())
        torch.nn.utils.clip_grad_norm_(own, self.args.max_grad_norm)
        gradients = [parameter.grad for parameter in own]
        try:
            for parameter in own:
                parameter.grad = None
            return super()._clip_grad_norm(model)
        finally:
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient

    def _end_step(self) -> bool:
        """Do what follows an update: KL control, the mixing weight, the reference. Return whether to train on."""
        if self._critic is not None:
            self._record(self._critic.end_step(lambda sums: self.accelerator.reduce(sums, reduction="sum")))
        of_tokens, self._token_figures = self._token_figures.metrics(), TokenFigures()
        self._record(of_tokens)
        if self._policy_loss is not None:
            self._record({"loss/policy": self._mean_over_ranks(self._policy_loss)})
            self._policy_loss = None
        if self._kl_control is not None and "kl/active" in of_tokens:
            self._kl_control.update(of_tokens["kl/active"])
            self.beta = self._kl_control.beta
            self._record({"kl/beta": self.beta})
        if self._reference is not None and self.state.global_step % self.args.ref_sync_steps == 0:
            self._reference.sync()
            distance, num_differing = self._reference.difference()
            self._record({"ref/distance": distance, "ref/num_differing": num_differing})
        if self._phases.is_measuring:
            self._record(self._phases.end_step())
        self._record(self._gpu_watch.metrics())
        figures, self._figures = self._figures, {}
        entropies, self._entropies = self._entropies, []
        self._logps, self._recorder = None, None  # and with them what is left of the graph
        if not self._is_guarded:
            return True
        figures["entropy"] = sum(entropies) / len(entropies)
        if self._kl_control is not None:
            figures["kl_target"] = cast(float, self.args.kl_target)
        if self.args.constrained_decoding:  # ratios are to what the constraint left, and not 1
            figures.pop("align/score", None)
        if self._bootstrap.strength(self.state.global_step):  # calls are being learnt
            figures.pop("tools/valid_rate", None)
        is_on_policy = self._is_on_policy and not self.args.rollout_ahead
        notes = self._health.check(figures, step=self.state.global_step, is_on_policy=is_on_policy)
        self._say(notes)
        self._record({f"health/{name}": 1.0 for name in self._health.showing})
        return not any(note.is_fatal for note in notes)

    def _say(self, notes: list[HealthNote]) -> None:
        """Say what is wrong with the run, once for all processes."""
        for note in notes if self.is_world_process_zero() else []:
            logger.warning("Step %d: %s", note.step, note.sentence)

    def _save_before_stopping(self) -> None:
        """Write a checkpoint to go on from once what is wrong has been mended."""
        if self.model.training and self.state.global_step and self.args.save_strategy != "no":
            self._save_checkpoint(self.model, trial=None)


class _StepEnd(TrainerCallback):
    """Tells the trainer how far an update is."""

    def __init__(self, trainer: ObjectiveTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._phases.begin("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._phases.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer._end_step():
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
        if self._trainer._is_guarded and control.should_training_stop and args.eval_strategy != "no":
            control.should_evaluate = True  # or nobody would know how well the last policy does


def _per_token(advantages: torch.Tensor) -> torch.Tensor:
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def _turn_ids(batch: Batch) -> torch.Tensor:
    """The turn of each token, where nobody has said it: a run of tokens in the loss is one."""
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    begins = torch.diff(mask, dim=1, prepend=torch.zeros_like(mask[:, :1])) == 1
    return (begins.cumsum(dim=1) - 1).masked_fill(mask == 0, -1)


def _has_plain_adapter(model: Any) -> bool:
    config = getattr(model, "peft_config", {}).get("default")
    return isinstance(config, LoraConfig) and not config.use_dora
