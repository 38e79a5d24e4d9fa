"""The settings of a run: TRL's, and a few of our own."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from datasets import Dataset
from transformers import PretrainedConfig, ProcessorMixin
from transformers.integrations.integration_utils import is_trackio_available
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl.trainer.grpo_config import GRPOConfig

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning import REACTIONS, GrammarRoles, KLControl, MaskRule, SamplerRoles, SchemaMask, SyntaxRoles
from mcp_grpo.requirements import check_packages
from mcp_grpo.rollout import Limits, Renderer, Schedule
from mcp_grpo.rollout.grammar import TurnGrammars
from mcp_grpo.tools import Cassette


SCHEMA_MASKS = ["off", "syntax", "grammar", "sampler"]
ADVANTAGE_MODES = ["group", "group_turn", "gae", "hybrid"]
ADVANTAGE_SCALES = ["batch", "none"]
VALUE_HEADS = ["linear", "mlp"]
TRUNCATIONS = ["terminal", "mask", "bootstrap"]
ROLLOUTS_AHEAD = [0, 1]
WEIGHT_SYNCS = ["auto", "merge", "adapter"]
OLD_LOGPS = ["sampler", "trainer"]
REF_SYNCS = ["none", "ema", "hard"]
STRAGGLER_POLICIES = ["wait", "cut"]
FRACTIONS = (
    "max_failed_fraction",
    "schema_mask_min_prob",
    "schema_mask_weight",
    "min_unforced_fraction",
    "gamma",
    "lam",
    "value_backbone_grad_scale",
)
COUNTS = (
    "min_unforced_tokens",
    "first_call_retries",
    "bootstrap_steps",
    "bootstrap_imitation_coef",
    "bootstrap_entropy_coef",
    "value_loss_coef",
    "value_learning_rate",
    "value_warmup_steps",
    "dynamic_sampling",
    "first_phase_steps",
)
FIRST_PHASE = ("first_phase_temperature", "first_phase_turn_tokens")
POSITIVE_OR_NONE = (
    "value_clip_range",
    "kl_target",
    "kl_hard_cap",
    "max_concurrent_trajectories",
    "batch_timeout",
    "max_turn_tokens",
    *FIRST_PHASE,
)
MIN_RESULT_TOKENS = 16  # with fewer, there is no room for the words that say that something was cut


@dataclass
class MCPGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`MCPGRPOTrainer`].

    This class includes only the parameters that are specific to training on MCP servers. For a full list of training
    arguments, please refer to the [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`] documentation. They mean
    what they mean there; `max_completion_length` counts tool results too, and `chat_template_kwargs` reaches the
    template of every turn.

    Args:
        max_turns (`int`, *optional*, defaults to `10`):
            Times the policy may generate in one trajectory. A task's own `max_turns` comes first.
        max_turn_tokens (`int`, *optional*):
            Tokens the policy may generate in one turn. A turn that reaches them ends the trajectory, as one that reaches
            `max_completion_length` does: a few that ramble make a whole batch wait. If `None`, there is no such limit.
        max_result_tokens (`int`, *optional*):
            Tokens of one tool result that the policy reads. A longer one is cut in the middle, with a note that says so.
            If `None`, half of `max_completion_length`.
        trajectory_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds a trajectory may take, tools and generation together. Waiting for a server to be free does not count.
            One that takes longer enters neither the loss nor the group's baseline.
        max_failed_fraction (`float`, *optional*, defaults to `0.25`):
            Share of the trajectories of a batch that may fail for reasons the policy is not to blame for (a server that
            broke, a deadline). With more, training stops with an error that says what broke.
        max_concurrent_trajectories (`int`, *optional*):
            Trajectories that each process has under way at a time. The others wait in a queue, and those of tasks that took
            most turns so far start first. What is sampled does not depend on it. If `None`, a whole batch.
        batch_timeout (`float`, *optional*):
            Seconds that the rollout of a batch may take, in training and in evaluation; each round of `dynamic_sampling` has
            as many again. Trajectories that are still under way or in the queue then end, and count as failed. If `None`,
            there is no limit but `trajectory_timeout`.
        straggler_policy (`str`, *optional*, defaults to `"wait"`):
            What becomes of the last trajectories of a batch: `"wait"` waits for them; `"cut"` ends them once
            `straggler_quantile` of the process's batch has ended, while training. They enter neither the loss nor the
            group's baseline, and do not count as failed. This favours short trajectories: the policy learns less from
            tasks that take long, or from slow tools, and may come to avoid them.
        straggler_quantile (`float`, *optional*, defaults to `0.9`):
            Share of the trajectories of a process's batch, above 0 and up to 1, that must have ended before the others are
            cut. A batch of fewer than 10 has no stragglers at 0.9.
        schema_mask (`str`, *optional*, defaults to `"off"`):
            Whether the syntax of tool calls leaves the policy loss, token by token. `"syntax"` finds it by the chat
            template and the tools' schemas; `"grammar"` by a grammar of them, which needs the extra `grammar`;
            `"sampler"` by what the sampler says, with `constrained_decoding`.
        schema_mask_min_prob (`float`, *optional*, defaults to `0.99`):
            Smallest probability that a token of syntax was sampled with to be masked. Where the format is not reliable
            yet, nothing is masked, and it is learnt. 0 masks all of it.
        schema_mask_weight (`float`, *optional*, defaults to `0.0`):
            What the advantage of a masked token is multiplied by. 0 takes it out of the loss and its denominators;
            anything more leaves it in, with that weight.
        mask_trigger (`bool`, *optional*, defaults to `False`):
            Whether the tokens that open a tool call are masked too, and with them the choice to call one.
        kl_on_forced (`bool`, *optional*, defaults to `True`):
            Whether masked tokens keep their KL term, if `beta` is not 0, so that the format does not drift unseen.
        min_unforced_tokens (`int`, *optional*, defaults to `16`):
            Tokens that must stay in the loss of a batch. The least probable of the masked ones come back to make up for
            it.
        min_unforced_fraction (`float`, *optional*, defaults to `0.3`):
            The same, as a share of the tokens that the policy sampled.
        constrained_decoding (`bool`, *optional*, defaults to `False`):
            Whether tool calls are sampled under the grammar of the tools, so that they are always valid. The policy then
            does not learn the format, and ratios are those of the constrained distribution. Needs the extra `grammar`,
            and `schema_mask="sampler"`.
        first_call_retries (`int`, *optional*, defaults to `0`):
            How often the first turn of a trajectory is sampled again if the policy calls no tool in it. For a policy that
            seldom does. What is trained on is then not quite what the policy does; `rollout/rejection_cost` says by how
            much.
        bootstrap_steps (`int`, *optional*, defaults to `0`):
            Steps in which a policy that cannot form tool calls yet is helped, by imitation of the syntax of its own good
            calls and by an entropy bonus, both fading. After that, and whenever its calls are valid, there is no such
            help.
        bootstrap_imitation_coef (`float`, *optional*, defaults to `0.05`):
            Weight of that imitation at the first step, from which it falls to 0 over `bootstrap_steps`.
        bootstrap_entropy_coef (`float`, *optional*, defaults to `0.01`):
            Weight of that entropy bonus at the first step, from which it falls to 0 over `bootstrap_steps`.
        advantage_mode (`str`, *optional*, defaults to `"group"`):
            Where the advantage of a token comes from. `"group"` is TRL's: one for each trajectory. `"group_turn"`
            compares the return from each turn on with those of the group's other attempts; `"gae"` with a value head, by
            generalised advantage estimation over turns; `"hybrid"` mixes both, by how well the value head does.
        gamma (`float`, *optional*, defaults to `0.99`):
            Discount from one turn to the next, in all modes but `"group"`. There is none within a turn.
        lam (`float`, *optional*, defaults to `0.95`):
            Lambda of generalised advantage estimation, from one turn to the next.
        advantage_scale (`str`, *optional*, defaults to `"batch"`):
            What advantages are divided by, in all modes but `"group"`: `"batch"` for the standard deviation over the
            batch of what the group's baselines leave, `"none"` for nothing. `"group"` has TRL's `scale_rewards`.
        value_head (`str`, *optional*):
            The value head: `"linear"` or `"mlp"`. If `None`, a linear one where `advantage_mode` needs it.
        value_loss_coef (`float`, *optional*, defaults to `0.5`):
            Weight of the value head's loss.
        value_learning_rate (`float`, *optional*, defaults to `1e-4`):
            Learning rate of the value head. Its gradients are clipped by themselves.
        value_backbone_grad_scale (`float`, *optional*, defaults to `0.0`):
            How much of the value head's gradient reaches the model below. With 0, the policy's gradient is what it would
            be without a value head.
        value_warmup_steps (`int`, *optional*, defaults to `20`):
            Batches before `"hybrid"` relies on the value head.
        value_clip_range (`float`, *optional*):
            How far the value of a token may move from where it was when it was sampled, in its loss. `None` for no limit.
        push_value_head (`bool`, *optional*, defaults to `False`):
            Whether the value head goes to the Hub with the model.
        report_to (`str` or `list[str]`, *optional*):
            Trackers: `"wandb"`, `"trackio"` and others of Transformers, or `"none"`. If not given, every figure goes to
            `metrics.jsonl` in the output folder and, where it is installed, to Trackio, in a project named like the output
            folder. Trackio keeps figures and tables on this machine, also when the policy is pushed to the Hub, unless
            `trackio_space_id` or `trackio_static_space_id` names a Space for them.
        truncation (`str`, *optional*, defaults to `"terminal"`):
            What a trajectory is that ran out of turns or tokens: `"terminal"` takes it for ended; `"mask"` leaves it out of
            loss and baseline; `"bootstrap"` lets the value head say what would have followed.
        old_logps (`str`, *optional*, defaults to `"sampler"`):
            The log-probabilities that ratios are taken to: `"sampler"` for those that tokens were sampled with;
            `"trainer"` for the trainer's own at that time, with the difference between the two as a weight of each token
            (0 outside of `ratio_gate_min` and `ratio_gate_max`).
        ratio_gate_min (`float`, *optional*, defaults to `0.25`):
            Smallest ratio of a token to learn from. Below, it leaves the policy term, but not the denominators.
        ratio_gate_max (`float`, *optional*, defaults to `4.0`):
            Largest ratio of a token to learn from.
        kl_target (`float`, *optional*, defaults to `0.4`):
            With `servers`, nats per token of KL divergence from the reference above which `beta` is raised step by step,
            up to 1. It never falls below what it was at the start. `None` leaves it alone.
        kl_hard_cap (`float`, *optional*, defaults to `3.0`):
            With `servers`, nats per token above which a micro-batch has no policy term, and is only pulled back to the
            reference; no single token counts with more. `None` for no limit.
        ref_sync (`str`, *optional*, defaults to `"none"`):
            How the reference follows the policy: `"none"`, `"ema"` for a moving average, `"hard"` for a copy. Works for
            adapters, too. Needs `beta` above 0.
        ref_sync_steps (`int`, *optional*, defaults to `10`):
            Steps from one time to the next.
        ref_ema_decay (`float`, *optional*, defaults to `0.99`):
            What the average keeps of itself each time.
        dynamic_sampling (`int`, *optional*, defaults to `0`):
            How many times, at most, groups whose attempts all have the same reward are replaced by groups of other tasks.
            0 leaves them; with `advantage_mode="group"` they teach nothing. Reward functions are called once more for it.
        on_unhealthy (`str`, *optional*, defaults to `"stop"`):
            With `servers`, what to do about signs that the run does not learn. `"stop"` ends it with a checkpoint and a
            [`HealthError`] where it cannot learn any more (no calls, no spread in any group, ratios that are wrong before the first
            update, a policy that has collapsed), and warns of all others. `"warn"` never ends it. `"strict"` ends
            it for every sign.
        health_patience (`int`, *optional*, defaults to `5`):
            Batches in a row in which a sign must show before it counts.
        keep_best (`bool`, *optional*, defaults to `True`):
            With `servers`, evaluations and checkpoints: whether the policy that did best in an evaluation is kept, and is
            the one that is there, and saved, when training ends. "Best" is by `metric_for_best_model`, `"eval_reward"` if not
            given.
        first_phase_steps (`int`, *optional*, defaults to `0`):
            Steps at the start that are sampled in another way: by the two settings that follow. Ratios stay right: what
            is sampled at a temperature is also scored and learnt from at that temperature.
        first_phase_temperature (`float`, *optional*):
            Temperature of sampling in the first phase. If `None`, `temperature`.
        first_phase_turn_tokens (`int`, *optional*):
            Tokens of one turn in the first phase. If `None`, `max_turn_tokens`.
        rollout_ahead (`int`, *optional*, defaults to `0`):
            With 1, the next batch is rolled out while the current one is trained on, by the policy as it was one update
            before; ratios are to that policy. Needs vLLM, on a server or in process without sleep mode. A run that is
            resumed rolls its first batch out anew. 0 is strictly on-policy.
        trim_padding (`bool`, *optional*, defaults to `True`):
            With `servers`, whether a pass through the policy is only as wide as the longest trajectory in it, and not as
            all of the batch, and begins without padding: attention needs no mask then, which is faster. Numbers are those of
            each trajectory alone. Trajectories of like length share a pass, unless the loss is more than a sum over them
            (`loss_type="bnpo"`, an entropy bonus, `top_entropy_quantile`, `bootstrap_steps`, a loss of experts); TRL's own
            figures that are means over passes (`entropy`, `kl`, `clip_ratio`) give short trajectories more weight then. Left
            out for images and for rotary embeddings that depend on the width.
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            How the policy's weights get to vLLM: `"merge"` sends the whole model, with its adapter merged into it;
            `"adapter"` sends only the adapter, and vLLM applies it. `"auto"` merges in process, where that is cheap and
            sampling is then faster, and sends adapters to servers and to quantised models.
        weight_sync_tolerance (`float`, *optional*, defaults to `0.1`):
            Nats per token by which vLLM's log-probabilities may differ from the trainer's after weights were sent, as a
            mean over a few held sequences. With more, the run stops: vLLM has other weights.
        vllm_engine_kwargs (`dict` or `str`, *optional*):
            Further arguments of the vLLM engine in process, such as `{"enforce_eager": true}`.
        vllm_server_urls (`list[str]`, *optional*):
            Addresses of several vLLM servers. If `None`, TRL's `vllm_server_base_url`, or host and port.
        cassette (`str`, *optional*):
            File in which tool calls are recorded, or from which they are answered. Each process has its own.
        cassette_mode (`str`, *optional*, defaults to `"record"`):
            `"record"` writes a new file; `"replay"` and `"match"` answer from it, without servers; `"cache"` asks servers
            only what the file does not know. See [`Cassette`].
    """

    _VALID_DICT_FIELDS: ClassVar = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    max_turns: int = field(
        default=10,
        metadata={
            "help": "Times the policy may generate in one trajectory. A task's own `max_turns` comes first.",
        },
    )
    max_turn_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens the policy may generate in one turn. A turn that reaches them ends the trajectory.",
        },
    )
    max_result_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of one tool result that the policy reads. A longer one is cut in the middle, with a note that "
            "says so. If `None`, half of `max_completion_length`.",
        },
    )
    trajectory_timeout: float = field(
        default=600.0,
        metadata={
            "help": "Seconds a trajectory may take, tools and generation together. Waiting for a server to be free does "
            "not count. One that takes longer enters neither the loss nor the group's baseline.",
        },
    )
    max_failed_fraction: float = field(
        default=0.25,
        metadata={
            "help": "Share of the trajectories of a batch that may fail for reasons the policy is not to blame for (a "
            "server that broke, a deadline). With more, training stops with an error that says what broke.",
        },
    )
    max_concurrent_trajectories: int | None = field(
        default=None,
        metadata={
            "help": "Trajectories that each process has under way at a time. The others wait in a queue, and those of tasks "
            "that took most turns so far start first. If `None`, a whole batch.",
        },
    )
    batch_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that the rollout of a batch may take. Trajectories that are still under way or in the queue then "
            "end, and count as failed. If `None`, there is no limit but `trajectory_timeout`.",
        },
    )
    straggler_policy: str = field(
        default="wait",
        metadata={
            "help": "What becomes of the last trajectories of a batch, while training. `cut` leaves them out of loss and "
            "baseline, which favours short trajectories.",
            "choices": STRAGGLER_POLICIES,
        },
    )
    straggler_quantile: float = field(
        default=0.9,
        metadata={
            "help": "Share of the trajectories of a process's batch that must have ended before the others are cut.",
        },
    )
    schema_mask: str = field(
        default="off",
        metadata={
            "help": "Whether the syntax of tool calls leaves the policy loss, token by token.",
            "choices": SCHEMA_MASKS,
        },
    )
    schema_mask_min_prob: float = field(
        default=0.99,
        metadata={
            "help": "Smallest probability that a token of syntax was sampled with to be masked. 0 masks all of it.",
        },
    )
    schema_mask_weight: float = field(
        default=0.0,
        metadata={
            "help": "What the advantage of a masked token is multiplied by. 0 takes it out of the loss altogether.",
        },
    )
    mask_trigger: bool = field(
        default=False,
        metadata={
            "help": "Whether the tokens that open a tool call are masked too, and with them the choice to call one.",
        },
    )
    kl_on_forced: bool = field(
        default=True,
        metadata={
            "help": "Whether masked tokens keep their KL term, if `beta` is not 0, so that the format does not drift unseen.",
        },
    )
    min_unforced_tokens: int = field(
        default=16,
        metadata={
            "help": "Tokens that must stay in the loss of a batch. The least probable of the masked ones come back.",
        },
    )
    min_unforced_fraction: float = field(
        default=0.3,
        metadata={
            "help": "The same, as a share of the tokens that the policy sampled.",
        },
    )
    constrained_decoding: bool = field(
        default=False,
        metadata={
            "help": 'Whether tool calls are sampled under the grammar of the tools. Needs `schema_mask="sampler"`.',
        },
    )
    first_call_retries: int = field(
        default=0,
        metadata={
            "help": "How often the first turn of a trajectory is sampled again if the policy calls no tool in it.",
        },
    )
    bootstrap_steps: int = field(
        default=0,
        metadata={
            "help": "Steps in which a policy that cannot form tool calls yet is helped with their syntax.",
        },
    )
    bootstrap_imitation_coef: float = field(
        default=0.05,
        metadata={
            "help": "Weight, at the first step, of imitating the syntax of good calls; it falls to 0 over `bootstrap_steps`.",
        },
    )
    bootstrap_entropy_coef: float = field(
        default=0.01,
        metadata={
            "help": "Weight, at the first step, of the entropy bonus; it falls to 0 over `bootstrap_steps`.",
        },
    )
    advantage_mode: str = field(
        default="group",
        metadata={
            "help": "Where the advantage of a token comes from.",
            "choices": ADVANTAGE_MODES,
        },
    )
    gamma: float = field(
        default=0.99,
        metadata={
            "help": "Discount from one turn to the next, in all modes but `group`.",
        },
    )
    lam: float = field(
        default=0.95,
        metadata={
            "help": "Lambda of generalised advantage estimation, from one turn to the next.",
        },
    )
    advantage_scale: str = field(
        default="batch",
        metadata={
            "help": "What advantages are divided by, in all modes but `group`.",
            "choices": ADVANTAGE_SCALES,
        },
    )
    value_head: str | None = field(
        default=None,
        metadata={
            "help": "The value head: `linear` or `mlp`. If `None`, a linear one where `advantage_mode` needs it.",
        },
    )
    value_loss_coef: float = field(
        default=0.5,
        metadata={
            "help": "Weight of the value head's loss.",
        },
    )
    value_learning_rate: float = field(
        default=1e-4,
        metadata={
            "help": "Learning rate of the value head.",
        },
    )
    value_backbone_grad_scale: float = field(
        default=0.0,
        metadata={
            "help": "How much of the value head's gradient reaches the model below.",
        },
    )
    value_warmup_steps: int = field(
        default=20,
        metadata={
            "help": "Steps before `hybrid` relies on the value head.",
        },
    )
    value_clip_range: float | None = field(
        default=None,
        metadata={
            "help": "How far the value of a token may move from where it was when it was sampled, in its loss.",
        },
    )
    push_value_head: bool = field(
        default=False,
        metadata={
            "help": "Whether the value head goes to the Hub with the model.",
        },
    )
    report_to: None | str | list[str] = field(  # noqa: RUF036 (in this order, the command line can read it)
        default=None,
        metadata={
            "help": "Trackers of Transformers, or `none`. If not given, `metrics.jsonl` in the output folder, and Trackio if "
            "it is installed. Trackio keeps them on this machine, unless a Space is named.",
        },
    )
    truncation: str = field(
        default="terminal",
        metadata={
            "help": "What a trajectory is that ran out of turns or tokens.",
            "choices": TRUNCATIONS,
        },
    )
    old_logps: str = field(
        default="sampler",
        metadata={
            "help": "The log-probabilities that ratios are taken to.",
            "choices": OLD_LOGPS,
        },
    )
    ratio_gate_min: float = field(
        default=0.25,
        metadata={
            "help": "Smallest ratio of a token to learn from.",
        },
    )
    ratio_gate_max: float = field(
        default=4.0,
        metadata={
            "help": "Largest ratio of a token to learn from.",
        },
    )
    kl_target: float | None = field(
        default=0.4,
        metadata={
            "help": "Nats per token of KL divergence from the reference above which `beta` is raised step by step.",
        },
    )
    kl_hard_cap: float | None = field(
        default=3.0,
        metadata={
            "help": "Nats per token above which a batch is only pulled back to the reference.",
        },
    )
    ref_sync: str = field(
        default="none",
        metadata={
            "help": "How the reference follows the policy.",
            "choices": REF_SYNCS,
        },
    )
    ref_sync_steps: int = field(
        default=10,
        metadata={
            "help": "Steps from one time that the reference follows the policy to the next.",
        },
    )
    ref_ema_decay: float = field(
        default=0.99,
        metadata={
            "help": "What the moving average keeps of itself each time.",
        },
    )
    dynamic_sampling: int = field(
        default=0,
        metadata={
            "help": "How many times, at most, groups whose attempts all have the same reward are replaced by groups of "
            "other tasks.",
        },
    )
    on_unhealthy: str = field(
        default="stop",
        metadata={
            "help": 'What to do about signs that the run does not learn: "stop" where it cannot any more, and warn of others; '
            '"warn" only; "strict", to stop for every sign.',
        },
    )
    health_patience: int = field(
        default=5,
        metadata={
            "help": "Batches in a row in which a sign of ill health must show before it counts.",
        },
    )
    keep_best: bool = field(
        default=True,
        metadata={
            "help": "Whether the policy that did best in an evaluation is kept, and is the one that is saved in the end.",
        },
    )
    first_phase_steps: int = field(
        default=0,
        metadata={
            "help": "Steps at the start that are sampled in another way.",
        },
    )
    first_phase_temperature: float | None = field(
        default=None,
        metadata={
            "help": "Temperature of sampling in the first phase. If `None`, `temperature`.",
        },
    )
    first_phase_turn_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of one turn in the first phase. A turn that reaches them ends the trajectory.",
        },
    )
    rollout_ahead: int = field(
        default=0,
        metadata={
            "help": "With 1, the next batch is rolled out while the current one is trained on. Needs vLLM.",
            "choices": ROLLOUTS_AHEAD,
        },
    )
    trim_padding: bool = field(
        default=True,
        metadata={"help": "Whether the policy is spared the padding of trajectories."},
    )
    weight_sync: str = field(
        default="auto",
        metadata={
            "help": "How the policy's weights get to vLLM: merged into the whole model, or as an adapter.",
            "choices": WEIGHT_SYNCS,
        },
    )
    weight_sync_tolerance: float = field(
        default=0.1,
        metadata={
            "help": "Nats per token by which vLLM's log-probabilities may differ from the trainer's.",
        },
    )
    vllm_engine_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further arguments of the vLLM engine in process.",
        },
    )
    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={
            "help": "Addresses of several vLLM servers.",
        },
    )
    cassette: str | None = field(
        default=None,
        metadata={
            "help": "File in which tool calls are recorded, or from which they are answered. Each process has its own.",
        },
    )
    cassette_mode: str = field(
        default="record",
        metadata={
            "help": '"record" writes a new file; "replay" and "match" answer from it, without servers; "cache" asks '
            "servers only what the file does not know.",
        },
    )

    def __post_init__(self) -> None:
        _check_deepspeed(self)
        if self.bf16 is None and (self.use_cpu or not is_torch_bf16_gpu_available()):
            # TRL turns it on by default, then refuses a machine that has no such GPU; a CPU may only imitate it, minutes a turn.
            self.bf16 = False
        self.writes_metrics = self.report_to is None
        if self.report_to is None:
            self.report_to = "trackio" if is_trackio_available() else "none"
        super().__post_init__()
        if self.project == "huggingface":  # the same for all that do not name one
            self.project = Path(str(self.output_dir)).resolve().name or self.project
        if self.trackio_space_id is None and self.trackio_static_space_id is None:
            self.trackio_static_space_id = (
                False  # or a push uploads the whole project, with completions, to a public Space
            )
        if self.max_turns < 1:
            raise SettingsError(f"`max_turns` must be at least 1, got {self.max_turns}.")
        if self.max_result_tokens is not None and self.max_result_tokens < MIN_RESULT_TOKENS:
            raise SettingsError(
                f"`max_result_tokens` must be at least {MIN_RESULT_TOKENS}, got {self.max_result_tokens}: the policy could "
                "not read any result. Raise it, or leave it at `None` for half of `max_completion_length`."
            )
        if self.trajectory_timeout <= 0:
            raise SettingsError(
                f"`trajectory_timeout` must be a positive number of seconds, got {self.trajectory_timeout}."
            )
        self._check_ranges()
        self._check_choices(straggler_policy=STRAGGLER_POLICIES, on_unhealthy=REACTIONS)
        if self.health_patience < 1:
            raise SettingsError(f"`health_patience` must be at least 1, got {self.health_patience}.")
        if not 0 < self.straggler_quantile <= 1:
            raise SettingsError(
                f"`straggler_quantile` must be above 0 and at most 1, got {self.straggler_quantile}: it is the share of a batch "
                "that must have ended before the others are cut."
            )
        self._check_schema_mask()
        self._check_advantages()
        self._check_guards()
        self._check_first_phase()

    def _check_ranges(self) -> None:
        for name in FRACTIONS:
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise SettingsError(f"`{name}` must be between 0 and 1, got {value}.")
        for name in COUNTS:
            if (value := getattr(self, name)) < 0:
                raise SettingsError(f"`{name}` must be 0 or more, got {value}.")
        for name in POSITIVE_OR_NONE:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise SettingsError(f"`{name}` must be positive or `None`, got {value}.")

    def _check_schema_mask(self) -> None:
        self._check_choices(schema_mask=SCHEMA_MASKS)
        if self.constrained_decoding != (self.schema_mask == "sampler"):
            raise SettingsError(
                f"`constrained_decoding={self.constrained_decoding}` does not go with `schema_mask={self.schema_mask!r}`: a "
                "token that a constraint forced was no decision of the policy, and only the sampler knows which were. Set "
                '`schema_mask="sampler"` with constrained decoding, and another without.'
            )
        if self.constrained_decoding and self.importance_sampling_level != "token":
            raise SettingsError(
                '`constrained_decoding` needs `importance_sampling_level="token"`, got '
                f"{self.importance_sampling_level!r}: over a sequence, ratios would weigh down just those whose format is weak."
            )

    def _check_choices(self, **choices: Sequence[Any]) -> None:
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise SettingsError(f"`{name}` must be one of {known}, got {getattr(self, name)!r}.")

    def _check_advantages(self) -> None:
        self._check_choices(advantage_mode=ADVANTAGE_MODES, advantage_scale=ADVANTAGE_SCALES, truncation=TRUNCATIONS)
        if self.value_head is not None:
            self._check_choices(value_head=VALUE_HEADS)
        if self.value_head_kind and self.fp16:
            raise SettingsError(
                "`fp16` scales the loss, and the value head's gradients, which are clipped by themselves, with it. Use `bf16`."
            )
        if self.advantage_mode != "group" and self.multi_objective_aggregation != "sum_then_normalize":
            raise SettingsError(
                f"`advantage_mode={self.advantage_mode!r}` needs the sum of all rewards of a turn, but "
                f"`multi_objective_aggregation={self.multi_objective_aggregation!r}` normalises each by itself. Set it to "
                '"sum_then_normalize".'
            )
        if self.truncation == "bootstrap" and self.advantage_mode not in ("gae", "hybrid"):
            raise SettingsError(
                '`truncation="bootstrap"` needs a value head to say what would have followed, and returns of a group are '
                f'not comparable with it. Set `advantage_mode` to "gae" or "hybrid", got {self.advantage_mode!r}.'
            )

    def _check_guards(self) -> None:
        self._check_choices(old_logps=OLD_LOGPS, ref_sync=REF_SYNCS)
        self._check_choices(weight_sync=WEIGHT_SYNCS, rollout_ahead=ROLLOUTS_AHEAD)
        if self.weight_sync_tolerance <= 0:
            raise SettingsError(f"`weight_sync_tolerance` must be positive, got {self.weight_sync_tolerance}.")
        if not 0 <= self.ratio_gate_min < 1 < self.ratio_gate_max:
            raise SettingsError(
                f"`ratio_gate_min` ({self.ratio_gate_min}) must be below 1 and `ratio_gate_max` ({self.ratio_gate_max}) above, "
                "or nothing could be learnt from."
            )
        if self.ref_sync != "none" and self.beta == 0:
            raise SettingsError(
                f"`ref_sync={self.ref_sync!r}` moves a reference that is not used: `beta` is 0. Set `beta` above 0 (0.05 is a "
                'start), or `ref_sync="none"`.'
            )
        if self.ref_sync != "none" and self.sync_ref_model:
            raise SettingsError("`ref_sync` and `sync_ref_model` both move the reference. Set only `ref_sync`.")
        if self.ref_sync_steps < 1:
            raise SettingsError(f"`ref_sync_steps` must be at least 1, got {self.ref_sync_steps}.")
        if not 0 < self.ref_ema_decay < 1:
            raise SettingsError(
                f"`ref_ema_decay` must be between 0 and 1, got {self.ref_ema_decay}: it is what the reference keeps of itself."
            )
        if self.bootstrap_steps and self.use_adaptive_entropy:
            raise SettingsError(
                "`bootstrap_steps` and `use_adaptive_entropy` both set the weight of the entropy bonus. Use one of them."
            )

    def _check_first_phase(self) -> None:
        given = [name for name in FIRST_PHASE if getattr(self, name) is not None]
        if bool(given) != bool(self.first_phase_steps):
            raise SettingsError(
                f"`first_phase_steps` is {self.first_phase_steps}, and what is different in the first phase is "
                f"{', '.join(f'`{name}`' for name in given) or 'nothing'}: one is of no use without the other. Set both, or "
                "neither."
            )

    @property
    def value_head_kind(self) -> str | None:
        """The value head that there is to be, if any."""
        return self.value_head or ("linear" if self.advantage_mode in ("gae", "hybrid") else None)

    def keeps_best(self, eval_dataset: Any) -> bool:
        """
        Return whether there will be a best policy to keep.

        Args:
            eval_dataset (`Dataset` or `Mapping`, *optional*):
                Tasks to judge by.

        Returns:
            `bool`: Whether `keep_best` is on, and there are evaluations and checkpoints.
        """
        is_judged = eval_dataset is not None and self.eval_strategy != "no"
        return self.keep_best and is_judged and self.save_strategy != "no"

    def make_kl_control(self) -> KLControl | None:
        """
        What raises `beta` when the policy drifts.

        Returns:
            [`KLControl`] or `None`: The control, if there is to be one.
        """
        if self.kl_target is None or self.beta <= 0:
            return None
        return KLControl(self.beta, target=self.kl_target, max_beta=max(1.0, self.beta))

    @property
    def replays(self) -> bool:
        """Whether tool calls are answered by a recording, so that no server is needed."""
        return self.cassette is not None and self.cassette_mode in ("replay", "match")

    def make_cassette(self) -> Cassette | None:
        """
        The recording that this process makes or plays.

        Returns:
            [`Cassette`] or `None`: The recording, if there is to be one. Raises [`CassetteError`] if it cannot be.
        """
        if self.cassette is None:
            return None
        return Cassette.for_rank(self.cassette, cast(Any, self.cassette_mode), self.process_index)

    def make_grammars(self, renderer: Renderer) -> TurnGrammars | None:
        """
        The grammars that turns are sampled under, or told syntax from choices by.

        Args:
            renderer (`Renderer`):
                Knows how the policy's calls are written.

        Returns:
            [`TurnGrammars`] or `None`: The grammars, if they are needed.
        """
        if self.schema_mask not in ("grammar", "sampler"):
            return None
        return TurnGrammars(
            renderer.tokenizer,
            end_of_turn_ids=renderer.end_of_turn_ids,
            chat_template_kwargs=renderer.chat_template_kwargs,
        )

    def make_schema_mask(self, renderer: Renderer, grammars: TurnGrammars | None) -> SchemaMask | None:
        """
        What masks the syntax of tool calls.

        Args:
            renderer (`Renderer`):
                Knows how the policy's calls are written.
            grammars ([`TurnGrammars`], *optional*):
                From [`make_grammars`].

        Returns:
            [`SchemaMask`] or `None`: The mask, if there is to be one. Raises [`SettingsError`] if the format of the
            policy's calls is not known.
        """
        if self.schema_mask == "off" and not self.bootstrap_steps:
            return None
        rule = (
            None
            if self.schema_mask == "off"
            else MaskRule(
                min_prob=self.schema_mask_min_prob,
                mask_trigger=self.mask_trigger,
                min_unforced_tokens=self.min_unforced_tokens,
                min_unforced_fraction=self.min_unforced_fraction,
            )
        )
        if grammars is not None:
            return SchemaMask((SamplerRoles if self.constrained_decoding else GrammarRoles)(grammars), rule)
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
        return SchemaMask(lambda segment, tools: syntax.roles(segment.token_ids, tools), rule)

    def limits(self, model_config: PretrainedConfig, max_context: int | None = None) -> Limits:
        """
        Where a trajectory ends at the latest.

        Args:
            model_config ([`~transformers.PretrainedConfig`]):
                Configuration of the policy, which limits its context.
            max_context (`int`, *optional*):
                What the sampler limits it to.

        Returns:
            [`Limits`]: The limits.
        """
        known = [max_context, getattr(model_config.get_text_config(), "max_position_embeddings", None)]
        max_context = min((each for each in known if each is not None), default=None)
        max_completion_length = self.max_completion_length or max_context
        if max_completion_length is None:
            raise SettingsError("Set `max_completion_length`: the model's configuration does not limit its context.")
        return Limits(
            max_turns=self.max_turns,
            max_completion_length=max_completion_length,
            max_context=max_context,
            max_turn_tokens=self.max_turn_tokens,
            max_result_tokens=self.max_result_tokens or max(MIN_RESULT_TOKENS, max_completion_length // 2),
            timeout=self.trajectory_timeout,
        )

    def temperature_at(self, step: int | None) -> float:
        """
        Temperature that a batch is sampled, scored and learnt from at.

        Args:
            step (`int`, *optional*):
                The step it is for, from 0. `None` for what is not trained on.

        Returns:
            `float`: The temperature.
        """
        if step is None or step >= self.first_phase_steps or self.first_phase_temperature is None:
            return self.temperature
        return self.first_phase_temperature

    def limits_at(self, step: int | None, limits: Limits) -> Limits:
        """
        Where the trajectories of a batch end at the latest.

        Args:
            step (`int`, *optional*):
                The step it is for, from 0. `None` for what is not trained on.
            limits ([`Limits`]):
                The limits after the first phase.

        Returns:
            [`Limits`]: The limits of that step.
        """
        if step is None or step >= self.first_phase_steps or self.first_phase_turn_tokens is None:
            return limits
        return replace(limits, max_turn_tokens=self.first_phase_turn_tokens)

    def schedule(self, *, is_batch: bool, is_training: bool) -> Schedule:
        """
        How trajectories share their time.

        Args:
            is_batch (`bool`):
                Whether they are a batch of training or evaluation, which has a deadline.
            is_training (`bool`):
                Whether they are trained on. Only then may those that take long be cut.

        Returns:
            [`Schedule`]: The schedule.
        """
        batch_size = self.per_device_train_batch_size * cast("int", self.steps_per_generation)
        cuts = is_batch and is_training and self.straggler_policy == "cut"
        return Schedule(
            max_concurrent=self.max_concurrent_trajectories or batch_size,
            batch_timeout=self.batch_timeout if is_batch else None,
            straggler_quantile=self.straggler_quantile if cuts else None,
        )


NEEDS_SERVERS = (
    "max_turn_tokens",
    "max_concurrent_trajectories",
    "batch_timeout",
    "straggler_policy",
    "straggler_quantile",
    "schema_mask",
    "constrained_decoding",
    "first_call_retries",
    "bootstrap_steps",
    "bootstrap_imitation_coef",
    "bootstrap_entropy_coef",
    "old_logps",
    "ratio_gate_min",
    "ratio_gate_max",
    "dynamic_sampling",
    "on_unhealthy",
    "health_patience",
    "keep_best",
    "first_phase_steps",
    "rollout_ahead",
    "weight_sync",
    "weight_sync_tolerance",
    "vllm_engine_kwargs",
    "vllm_server_urls",
    "cassette",
)


def _check_deepspeed(args: MCPGRPOConfig) -> None:
    if args.deepspeed:
        check_packages(args)  # Transformers imports it at once


def check_without_servers(args: MCPGRPOConfig) -> None:
    """
    Refuse what would silently do nothing without servers.

    Args:
        args (`MCPGRPOConfig`):
            The trainer's configuration.

    Raises:
        [`SettingsError`]: If there is such a thing.
    """
    defaults = {field.name: field.default for field in fields(MCPGRPOConfig)}
    for name in NEEDS_SERVERS:
        if getattr(args, name) != defaults[name]:
            raise SettingsError(
                f"`{name}={getattr(args, name)!r}` is for training on MCP servers, and there are none. Pass `servers`, or leave "
                f"it at {defaults[name]!r}."
            )
    if args.truncation == "mask":
        raise SettingsError(
            '`truncation="mask"` is for training on MCP servers, and there are none. Pass `servers`, or use TRL\'s '
            "`mask_truncated_completions`."
        )


def check_arguments(args: Any, train_dataset: Any, kwargs: Mapping[str, Any]) -> None:
    """
    Refuse, before anything is started, what would not train correctly on MCP servers.

    Args:
        args (`MCPGRPOConfig`):
            The trainer's configuration.
        train_dataset (`Dataset` or `IterableDataset`, *optional*):
            Its tasks. `None` if it is not to train.
        kwargs (`Mapping[str, Any]`):
            Its other arguments.

    Raises:
        [`SettingsError`]: If there is such a thing; the message has all of them, and says what to set instead.
    """
    if not isinstance(args, MCPGRPOConfig):
        raise SettingsError(f"With `servers`, `args` must be an `MCPGRPOConfig`, got {type(args).__name__}.")
    problems = [
        f"`{name}` and `servers` both say where tools come from. Pass only `servers`."
        for name in ("tools", "rollout_func", "environment_factory")
        if kwargs.get(name) is not None
    ]
    # The sampler's log-probabilities are the old ones of the ratio: they must be those of the policy itself.
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
    problems += [
        f"`{name}={getattr(args, name)!r}` samples from another distribution than the one that is trained, so that ratios "
        f"would be wrong. Leave it at {value!r}; use `temperature` to explore more or less."
        for name, value in neutral.items()
        if getattr(args, name) not in (value, None)
    ]
    problems += [message for is_refused, message in _refusals(args, train_dataset, kwargs) if is_refused]
    num_tasks = cast("int", args.generation_batch_size) // cast("int", args.num_generations)
    if isinstance(train_dataset, Dataset) and len(train_dataset) < num_tasks:
        problems.append(
            f"A batch holds {num_tasks} tasks (`generation_batch_size` {args.generation_batch_size} / `num_generations` "
            f"{args.num_generations}), but the dataset has only {len(train_dataset)}: not one batch could be made, and "
            "training would end at once. Add tasks, lower `per_device_train_batch_size`, or raise `num_generations`."
        )
    if problems:
        raise SettingsError("\n".join(problems))


def _is_fsdp1(args: MCPGRPOConfig) -> bool:
    """Whether the policy is sharded by the first FSDP, as the settings or `accelerate launch` have it."""
    if args.fsdp:
        return int(cast(Any, args.fsdp_config or {}).get("version", 2)) == 1
    return os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION", "1") == "1"


def _refusals(
    args: MCPGRPOConfig, train_dataset: Any, kwargs: Mapping[str, Any]
) -> list[tuple[bool | int | None, str]]:
    """What cannot be, and what to say to it."""
    return [
        (
            args.temperature <= 0,
            f"`temperature` must be positive, got {args.temperature}: a group needs varied attempts.",
        ),
        (
            args.use_transformers_continuous_batching,
            "`use_transformers_continuous_batching` generates for a batch at a time, and trajectories differ. Set "
            "`use_vllm=True` for continuous batching, or leave both off.",
        ),
        (
            _is_fsdp1(args) and not args.use_vllm,
            "FSDP 1 cannot generate with `servers`: its processes must call the model equally often, and trajectories "
            "differ. Set `use_vllm=True`, or use FSDP 2 (`fsdp_version: 2`), or DDP.",
        ),
        (
            not args.ds3_gather_for_generation and not args.use_vllm,
            "With `servers`, `ds3_gather_for_generation` must stay `True`: trajectories differ in length.",
        ),
        (
            args.use_vllm and args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1,
            "`vllm_tensor_parallel_size` above 1 in process makes all of its processes generate in step, and trajectories "
            'differ. Set `vllm_mode="server"` and start the server with `--tensor-parallel-size`.',
        ),
        (
            args.use_vllm and args.constrained_decoding and {args.temperature, args.temperature_at(0)} != {1},
            f"`constrained_decoding` with vLLM needs `temperature=1.0`, got {args.temperature} (and {args.temperature_at(0)} at "
            "the start): what a constraint cuts away can only be told at that temperature.",
        ),
        (
            bool(args.vllm_structured_outputs_regex),
            "`vllm_structured_outputs_regex` constrains the policy without telling the trainer. Use "
            "`constrained_decoding=True`.",
        ),
        (
            args.rollout_ahead and not args.use_vllm,
            "`rollout_ahead=1` samples while the policy trains, which the model that is trained cannot do. Set "
            "`use_vllm=True`.",
        ),
        (
            args.rollout_ahead and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode,
            "`rollout_ahead=1` needs the engine while the policy trains, and `vllm_enable_sleep_mode` puts it to sleep then. "
            'Set one of them off, or `vllm_mode="server"`.',
        ),
        (
            args.rollout_ahead
            and (args.num_iterations > 1 or args.gradient_accumulation_steps != args.steps_per_generation),
            f"`rollout_ahead=1` needs one update per batch: `num_iterations` ({args.num_iterations}) must be 1, and "
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}) equal to `steps_per_generation` "
            f"({args.steps_per_generation}).",
        ),
        (
            bool(args.vllm_server_urls) and args.vllm_mode != "server",
            '`vllm_server_urls` are of no use with `vllm_mode="colocate"`. Set `vllm_mode="server"`.',
        ),
        (
            args.gradient_accumulation_steps % cast("int", args.steps_per_generation),
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}) must be a multiple of "
            f"`steps_per_generation` ({args.steps_per_generation}), so that every update holds whole groups.",
        ),
        (
            bool(args.dynamic_sampling) and not isinstance(train_dataset, Dataset | None),
            "`dynamic_sampling` draws other tasks from the dataset, so it must be a `Dataset`, not a stream.",
        ),
        (
            args.mask_truncated_completions,
            "`mask_truncated_completions` only knows completions without an end-of-turn token. With `servers`, set "
            '`truncation="mask"` instead, which knows what ran out of turns, too.',
        ),
        (
            args.remove_unused_columns,
            "`remove_unused_columns=True` would drop the tasks' columns. Set it to `False`.",
        ),
        (
            isinstance(kwargs.get("processing_class"), ProcessorMixin),
            "`processing_class` must be a tokenizer: tools are text. Pass the processor's `.tokenizer`.",
        ),
    ]
