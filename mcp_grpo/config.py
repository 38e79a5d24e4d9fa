"""The settings of a run: TRL's, and ours. Each of ours is written once, in its field."""

import operator
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from transformers.integrations.integration_utils import is_trackio_available
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl.trainer.grpo_config import GRPOConfig

from mcp_grpo.errors import SettingsError
from mcp_grpo.requirements import check_packages


C = TypeVar("C", bound=type)

STAGES = ("rollout", "sampling", "record and replay", "batch", "mask", "advantages", "guards", "reference", "health")
"""Stages of a step, in the order in which settings are listed."""

MIN_RESULT_TOKENS = 16  # with fewer, there is no room for the words that say that something was cut

_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_KINDS = {int: "an integer", float: "a number", bool: "`True` or `False`", str: "a string", dict: "a dict"}


class Removed(NamedTuple):
    """A setting of an earlier version: its default, where that is what always happens now, and what there is instead."""

    default: Any
    instead: str


_NO_DEFAULT = object()
_FIRST_PHASE = Removed(
    None, "a run samples in one way from start to end. Set `temperature` and `max_turn_tokens` for all steps"
)
_STRAGGLERS = "every trajectory is waited for. Set `trajectory_timeout` or `max_turn_tokens` to end long ones"

REMOVED: Mapping[str, Removed] = {
    "batch_timeout": Removed(None, "a batch has no deadline of its own. Set `trajectory_timeout`"),
    "straggler_policy": Removed("wait", _STRAGGLERS),
    "straggler_quantile": Removed(_NO_DEFAULT, _STRAGGLERS),
    "schema_mask_weight": Removed(
        0.0, "a masked token always leaves the loss. Raise `schema_mask_min_prob` to mask fewer tokens"
    ),
    "mask_trigger": Removed(False, "the choice to call a tool always stays in the loss"),
    "kl_on_forced": Removed(True, "masked tokens always keep their KL term"),
    "schema_mask=sampler": Removed(
        _NO_DEFAULT,
        'leave `schema_mask` at "off"; `constrained_decoding` by itself masks what the sampler was forced to write',
    ),
    "first_call_retries": Removed(
        0,
        "what is sampled is what is trained on. If the policy seldom calls a tool, warm it up, or set `bootstrap_steps`",
    ),
    "advantage_scale": Removed(
        _NO_DEFAULT,
        'turn-level advantages are divided by their standard deviation over the batch, unless `scale_rewards` is "none"',
    ),
    "value_head": Removed(
        None, 'there is a linear value head exactly where `advantage_mode` is "gae" or "hybrid". Set `advantage_mode`'
    ),
    "value_backbone_grad_scale": Removed(0.0, "the value head's gradient never reaches the model below it"),
    "value_warmup_steps": Removed(
        20, '`advantage_mode="hybrid"` always relies on the group alone for its first 20 batches'
    ),
    "value_clip_range": Removed(
        None, "the value loss is never clipped. Lower `value_learning_rate` for slower values"
    ),
    "push_value_head": Removed(
        False, "the value head stays in `output_dir`, as `value_head.safetensors`. Upload that file by hand"
    ),
    "ratio_gate_min": Removed(0.25, "`ratio_gate`, one number above 1, sets both limits: 4.0 is 0.25 to 4.0"),
    "ratio_gate_max": Removed(4.0, "`ratio_gate`, one number above 1, sets both limits: 4.0 is 0.25 to 4.0"),
    "health_patience": Removed(
        5, "a sign counts after 5 batches in a row. Set `on_unhealthy` to choose what it leads to"
    ),
    "first_phase_steps": _FIRST_PHASE._replace(default=0),
    "first_phase_temperature": _FIRST_PHASE,
    "first_phase_turn_tokens": _FIRST_PHASE,
    "min_unforced_tokens": Removed(
        16, "16 tokens of a batch stay in the loss wherever `min_unforced_fraction` is above 0"
    ),
    "rollout_ahead": Removed(
        0,
        "`max_staleness` bounds how many updates old a trajectory may be. Set `max_staleness=1` to roll one batch ahead",
    ),
    "trim_padding": Removed(True, "padding is always left out where that is exact"),
    "weight_sync_tolerance": Removed(0.1, "the tolerance is always 0.1 nats per token"),
}
"""Settings of earlier versions by name; `name=value` for a value that is no choice any more."""


def removed_problems(given: Mapping[str, Any]) -> list[str]:
    """
    Say what to write in place of settings of an earlier version.

    Args:
        given (`Mapping[str, Any]`):
            Settings by name, others as well. A string of the command line is compared with a default as text.

    Returns:
        `list[str]`: A sentence for each that must be written in another way, and one for all that can be deleted.
    """
    problems: list[str] = []
    idle: list[str] = []
    for name, value in given.items():
        if found := REMOVED.get(f"{name}={value}"):
            problems.append(f"`{name}: {value}` is no longer a choice: {found.instead}.")
        elif found := REMOVED.get(name):
            if value == found.default or str(value).lower() == str(found.default).lower():
                idle.append(f"`{name}: {value}`")
            else:
                problems.append(f"`{name}` is no longer a setting, so delete it: {found.instead}.")
    if idle:
        problems.append(f"Delete {', '.join(idle)}: no longer a setting, and what always happens now.")
    return problems


def _refusing_removed(cls: C) -> C:
    """Make a dataclass say what to write in place of settings that it had before."""
    init = cls.__init__

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if problems := removed_problems(kwargs):
            raise SettingsError("\n".join(problems))
        init(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


class _Metadata(dict[str, Any]):
    """Metadata of a setting. `HfArgumentParser` hands a copy of it to argparse, which knows only some of the keys."""

    def copy(self) -> dict[str, Any]:
        return {name: self[name] for name in ("help", "choices") if name in self}


def _setting(default: Any, stage: str, help: str, **metadata: Any) -> Any:
    """Make a field; `metadata` may have `choices`, `range` and `needs` ("servers", "vllm")."""
    return field(default=default, metadata=_Metadata(help=help, stage=stage, **metadata))


@_refusing_removed
@dataclass
class MCPGRPOConfig(GRPOConfig):
    """
    Configuration class for the [`MCPGRPOTrainer`].

    This class includes only the parameters that are specific to training on MCP servers. For a full list of training
    arguments, please refer to the [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`] documentation. They mean
    what they mean there; `max_completion_length` counts tool results too, and `chat_template_kwargs` reaches the
    template of every turn. `report_to` differs in its default: metrics go to `metrics.jsonl` in the output folder and,
    where it is installed, to Trackio.
    """

    _VALID_DICT_FIELDS: ClassVar = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    report_to: None | str | list[str] = field(  # noqa: RUF036 (in this order, the command line can read it)
        default=None,
        metadata={
            "help": "Trackers: `wandb`, `trackio` and others of Transformers, or `none`. If not given, every metric goes to "
            "`metrics.jsonl` in the output folder and, where it is installed, to Trackio, in a project named like the output "
            "folder. Trackio keeps metrics and tables on this machine, also when the policy is pushed to the Hub, unless "
            "`trackio_space_id` or `trackio_static_space_id` names a Space for them.",
        },
    )

    call_format: str = _setting(
        "auto",
        "rollout",
        "How the policy writes tool calls: `template`, as its chat template does; or `json`, in blocks of fenced JSON, with the "
        "tools in the system prompt, which any chat model can write. `auto` is the template's, unless it has none or the "
        "model was never trained to write its tags, and says why.",
        choices=["auto", "template", "json"],
        needs=("servers",),
    )
    max_turns: int = _setting(
        10,
        "rollout",
        "Times the policy may generate in one trajectory. A task's own `max_turns` comes first.",
        range=">= 1",
    )
    max_turn_tokens: int | None = _setting(
        None,
        "rollout",
        "Tokens the policy may generate in one turn. A turn that reaches them ends the trajectory, as one that "
        "reaches `max_completion_length` does: a few that ramble make a whole batch wait. If `None`, there is no "
        "such limit.",
        range="> 0",
        needs=("servers",),
    )
    max_result_tokens: int | None = _setting(
        None,
        "rollout",
        "Tokens of one tool result that the policy reads. A longer one is cut in the middle, with a note that says "
        "so. If `None`, half of `max_completion_length`.",
        range=f">= {MIN_RESULT_TOKENS}",
    )
    old_results: str = _setting(
        "keep",
        "rollout",
        'What becomes of tool results that were read, once the model\'s context has no more room. `"keep"`: they stay, and the '
        'trajectory ends. `"cut"`: the oldest are cut to 64 tokens. `"drop"`: a note stands for them. `"summarize"`: the policy '
        "sums up, and goes on from the task and its own notes. Each turn is trained in the context that it was written in.",
        choices=["keep", "cut", "drop", "summarize"],
        needs=("servers",),
    )
    trajectory_timeout: float = _setting(
        600.0,
        "rollout",
        "Seconds a trajectory may take, tools and generation together. Waiting for a server to be free does not "
        "count. One that takes longer enters neither the loss nor the group's baseline.",
        range="> 0",
    )
    max_concurrent_trajectories: int | None = _setting(
        None,
        "rollout",
        "Trajectories that each process has under way at a time. The others wait in a queue, and those of tasks that "
        "took most turns so far start first. What is sampled does not depend on it. If `None`, a whole batch, and with "
        "`max_staleness` the next one, too.",
        range="> 0",
        needs=("servers",),
    )
    max_failed_fraction: float = _setting(
        0.25,
        "rollout",
        "Share of the trajectories of a batch that may fail for reasons the policy is not to blame for (a server "
        "that broke, a deadline). With more, training stops with an error that says what broke.",
        range="[0, 1]",
    )
    max_staleness: int = _setting(
        0,
        "rollout",
        "Updates of the policy that may lie between the beginning of a trajectory and its use. 0 is strictly on-policy. With 1, "
        "the next batch is rolled out while the current one is trained on. With more, groups that take long are not waited for "
        "until they are that old; others take their place, and new weights are sent between turns. Ratios are to the policy that "
        "sampled each token. vLLM must be on a server, or in process without sleep mode.",
        range=">= 0",
        needs=("servers", "vllm"),
    )

    weight_sync: str = _setting(
        "auto",
        "sampling",
        "How the policy's weights get to vLLM. `merge` sends the whole model, with its adapter merged into it; "
        "`adapter` sends only the adapter, and vLLM applies it. Merged into weights of 16 bits, small changes are rounded "
        "away (`sampler/rounded_away`), but vLLM samples faster. `auto` merges only in process and in float32, or what vLLM "
        "cannot apply.",
        choices=["auto", "merge", "adapter"],
        needs=("servers", "vllm"),
    )
    vllm_engine_kwargs: dict | str | None = _setting(  # noqa: RUF009
        None,
        "sampling",
        'Further arguments of the vLLM engine in process, such as `{"enforce_eager": true}`.',
        needs=("servers", "vllm"),
    )
    vllm_server_urls: list[str] | None = _setting(  # noqa: RUF009
        None,
        "sampling",
        "Addresses of several vLLM servers. If `None`, TRL's `vllm_server_base_url`, or host and port.",
        needs=("servers", "vllm"),
    )

    cassette: str | None = _setting(
        None,
        "record and replay",
        "File in which tool calls are recorded, or from which they are answered. Each process has its own.",
        needs=("servers",),
    )
    cassette_mode: str = _setting(
        "record",
        "record and replay",
        "`record` writes a new file; `replay` and `match` answer from it, without servers; `cache` asks servers only "
        "what the file does not know.",
        choices=["record", "replay", "match", "cache"],
    )

    task_choice: str = _setting(
        "uniform",
        "batch",
        "Which tasks to attempt. `uniform`: those that the data loader gives. `spread`: of these, rather the ones of a kind (column "
        "`family`, else `difficulty`) whose attempts earned different rewards so far, and others of such kinds in the places of the "
        "rest, as a group whose attempts all do the same teaches nothing. Every kind keeps a tenth of the best one's chance.",
        choices=["uniform", "spread"],
        needs=("servers",),
    )
    dynamic_sampling: int = _setting(
        0,
        "batch",
        "How many times, at most, groups whose attempts all have the same reward are replaced by groups of other "
        "tasks; with advantages for turns, the same in every turn. 0 leaves them. Reward functions score each attempt "
        "once, and what they log is of all attempts, replaced ones included.",
        range=">= 0",
        needs=("servers",),
    )
    replay_solutions: bool = _setting(
        False,
        "batch",
        "Where no attempt of a group solves its task, put the task's scripted solution (column `solution`) in the place of "
        "one of them, run on the servers like an attempt. So a policy also learns what it would never find by itself. "
        "Rewards that are logged are with them; `solutions/solved_fraction` is without.",
        needs=("servers",),
    )
    truncation: str = _setting(
        "terminal",
        "batch",
        "How to treat a trajectory that ran out of turns or tokens: `terminal` takes it for ended; `mask` leaves it "
        "out of loss and baseline; `bootstrap` lets the value head say what would have followed.",
        choices=["terminal", "mask", "bootstrap"],
    )

    schema_mask: str = _setting(
        "off",
        "mask",
        "Take the syntax of tool calls out of the policy loss, token by token. `syntax` finds it by the chat "
        "template and the tools' schemas; `grammar` by a grammar of them, which needs the extra `grammar`.",
        choices=["off", "syntax", "grammar"],
        needs=("servers",),
    )
    schema_mask_min_prob: float = _setting(
        0.99,
        "mask",
        "Mask only tokens of syntax that were sampled with at least this probability. Where the format is not "
        "reliable yet, nothing is masked, and it is learnt. 0 masks all of it.",
        range="[0, 1]",
    )
    min_unforced_fraction: float = _setting(
        0.3,
        "mask",
        "Share of the tokens that the policy sampled that must stay in the loss of a batch, and 16 tokens at least, unless it is "
        "0. The least probable of the masked ones come back to make up for it.",
        range="[0, 1]",
    )
    constrained_decoding: bool = _setting(
        False,
        "mask",
        "Sample tool calls under the grammar of the tools, so that they are always valid, and mask what the sampler "
        "was forced to write. The policy then does not learn the format. Ratios are those of the policy without the "
        "constraint, so that they are 1 on-policy. Needs the extra `grammar`, and goes only with `schema_mask` `off`.",
        needs=("servers",),
    )
    bootstrap_steps: int = _setting(
        0,
        "mask",
        "Steps in which a policy that cannot form tool calls yet is helped, by imitation of the syntax of its own "
        "good calls and by an entropy bonus, both fading. After that, and whenever its calls are valid, there is no "
        "such help.",
        range=">= 0",
        needs=("servers",),
    )
    bootstrap_imitation_coef: float = _setting(
        0.05,
        "mask",
        "Weight of that imitation at the first step, from which it falls to 0 over `bootstrap_steps`.",
        range=">= 0",
        needs=("servers",),
    )
    bootstrap_entropy_coef: float = _setting(
        0.01,
        "mask",
        "Weight of that entropy bonus at the first step, from which it falls to 0 over `bootstrap_steps`.",
        range=">= 0",
        needs=("servers",),
    )

    advantage_mode: str = _setting(
        "auto",
        "advantages",
        "Where the advantage of a token comes from. `group` is TRL's: one for each trajectory. `group_turn` compares "
        "the return from each turn on with those of the group's other attempts; `gae` with a value head, by "
        "generalised advantage estimation over turns; `hybrid` mixes both, by how well the value head does. `auto` is "
        "`group_turn` from the first batch on in which a reward function pays a turn before the last, and `group` "
        'else; the run says which, and why. With `scale_rewards="none"` none of them divides advantages; else all but `group` divide by the spread of '
        "the batch.",
        choices=["auto", "group", "group_turn", "gae", "hybrid"],
    )
    gamma: float | None = _setting(
        None,
        "advantages",
        "Discount from one turn to the next, in all modes but `group`. There is none within a turn. `None` is 0.5 where "
        "`auto` has chosen `group_turn`, and 0.99 else.",
        range="[0, 1]",
    )
    lam: float = _setting(
        0.95,
        "advantages",
        "Lambda of generalised advantage estimation, from one turn to the next.",
        range="[0, 1]",
    )
    value_loss_coef: float = _setting(0.5, "advantages", "Weight of the value head's loss.", range=">= 0")
    value_learning_rate: float = _setting(
        1e-4,
        "advantages",
        "Learning rate of the value head. Its gradients are clipped by themselves, and do not reach the model below "
        "it.",
        range=">= 0",
    )

    old_logps: str = _setting(
        "sampler",
        "guards",
        "The log-probabilities that ratios are taken to: `sampler` for those that tokens were sampled with; "
        "`trainer` for the trainer's own at that time, with the difference between the two as a weight of each token "
        "(0 outside of `ratio_gate`).",
        choices=["sampler", "trainer"],
        needs=("servers",),
    )
    ratio_gate: float = _setting(
        4.0,
        "guards",
        "Drop tokens whose importance ratio is outside of 1 / `ratio_gate` to `ratio_gate` from the policy term, but "
        "not from its denominators.",
        range="> 1",
        needs=("servers",),
    )
    kl_target: float | None = _setting(
        0.4,
        "guards",
        "With `servers`, nats per token of KL divergence from the reference above which `beta` is raised step by "
        "step, up to 1. It never falls below what it was at the start. `None` leaves it alone.",
        range="> 0",
    )
    kl_hard_cap: float | None = _setting(
        3.0,
        "guards",
        "With `servers`, nats per token above which a micro-batch has no policy term, and is only pulled back to the "
        "reference; no single token counts with more. `None` for no limit.",
        range="> 0",
    )

    ref_sync: str = _setting(
        "none",
        "reference",
        "How the reference follows the policy: `none`, `ema` for a moving average, `hard` for a copy. Works for "
        "adapters, too. Needs `beta` above 0.",
        choices=["none", "ema", "hard"],
    )
    ref_sync_steps: int = _setting(
        10, "reference", "Steps from one update of the reference to the next.", range=">= 1"
    )
    ref_ema_decay: float = _setting(
        0.99, "reference", "Share of itself that the moving average keeps at each update.", range="(0, 1)"
    )

    on_unhealthy: str = _setting(
        "stop",
        "health",
        "What to do about signs that the run does not learn. `stop` ends it with a checkpoint and a `HealthError` "
        "where it cannot learn any more (no calls, no spread in any group, ratios that are wrong before the first "
        "update, a policy that has collapsed), and warns of all others. `warn` never ends it. `strict` ends it for "
        "every sign.",
        choices=["stop", "warn", "strict"],
        needs=("servers",),
    )
    record_trajectories: bool = _setting(
        True,
        "health",
        "Write every trajectory that is trained on to Parquet files in `trajectories` of the output folder: messages, calls, "
        "rewards, and for each token what the sampler, the loss and the value head made of it.",
        needs=("servers",),
    )
    keep_best: bool = _setting(
        True,
        "health",
        "Where there are evaluations and checkpoints, keep the policy that did best in an evaluation, and save that "
        "one when training ends. Best is by `metric_for_best_model`, `eval_reward` if not given.",
        needs=("servers",),
    )

    def __post_init__(self) -> None:
        if self.deepspeed:
            check_packages(self)  # Transformers imports it at once
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
        problems = [each for one in own_settings() if (each := _value_problem(one, getattr(self, one.name)))]
        # A value of the wrong type cannot be compared with others.
        problems = problems or [sentence for is_wrong, sentence in self._contradictions() if is_wrong]
        if problems:
            raise SettingsError("\n".join(problems))

    def _contradictions(self) -> list[tuple[bool, str]]:
        """Settings that do not go together: a condition, and what to say where it holds."""
        return [
            (
                self.constrained_decoding and self.schema_mask != "off",
                f"`constrained_decoding=True` does not go with `schema_mask={self.schema_mask!r}`: a token that a "
                "constraint forced was no decision of the policy, and only the sampler knows which were. Leave "
                '`schema_mask` at "off"; what was forced is masked.',
            ),
            (
                self.constrained_decoding and self.importance_sampling_level != "token",
                f'`constrained_decoding` needs `importance_sampling_level="token"`, got {self.importance_sampling_level!r}: '
                "over a sequence, what the policy learns of the format would count as a change of all that it says.",
            ),
            (
                self.has_value_head and self.fp16,
                "`fp16` scales the loss, and the value head's gradients, which are clipped by themselves, with it. "
                "Use `bf16`.",
            ),
            (
                self.advantage_mode not in ("auto", "group")
                and self.multi_objective_aggregation != "sum_then_normalize",
                f"`advantage_mode={self.advantage_mode!r}` needs the sum of all rewards of a turn, but "
                f"`multi_objective_aggregation={self.multi_objective_aggregation!r}` normalises each by itself. Set it to "
                '"sum_then_normalize".',
            ),
            (
                self.truncation == "bootstrap" and not self.has_value_head,
                '`truncation="bootstrap"` needs a value head to say what would have followed, and returns of a group '
                f'are not comparable with it. Set `advantage_mode` to "gae" or "hybrid", got {self.advantage_mode!r}.',
            ),
            (
                self.ref_sync != "none" and self.beta == 0,
                f"`ref_sync={self.ref_sync!r}` moves a reference that is not used: `beta` is 0. Set `beta` above 0 (0.05 is a "
                'start), or `ref_sync="none"`.',
            ),
            (
                self.ref_sync != "none" and self.sync_ref_model,
                "`ref_sync` and `sync_ref_model` both move the reference. Set only `ref_sync`.",
            ),
            (
                self.bootstrap_steps > 0 and self.use_adaptive_entropy,
                "`bootstrap_steps` and `use_adaptive_entropy` both set the weight of the entropy bonus. Use one of "
                "them.",
            ),
        ]

    @property
    def has_value_head(self) -> bool:
        """Return whether advantages come from a value head, at least in part."""
        return self.advantage_mode in ("gae", "hybrid")

    @property
    def replays(self) -> bool:
        """Return whether tool calls are answered by a recording, so that no server is needed."""
        return self.cassette is not None and self.cassette_mode in ("replay", "match")

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


def own_settings() -> list[Field[Any]]:
    """
    Return the fields that are ours, in the order of the stages of a step.

    Returns:
        `list[Field]`: The fields, with `help`, `stage` and, where there are some, `choices`, `range` and `needs` in their
        metadata.
    """
    return [each for each in fields(MCPGRPOConfig) if "stage" in each.metadata]


def _meaning(one: Field[Any]) -> str:
    """Return what a setting means, and what it is of no use without."""
    needs = {"servers": "`servers`", "vllm": "`use_vllm`"}
    needed = " and ".join(needs[each] for each in one.metadata.get("needs", ()))
    return one.metadata["help"] + (f" Needs {needed}." if needed else "")


def _values(one: Field[Any]) -> str:
    """Return the values that a setting takes, in words."""
    hint = _HINTS[one.name]
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if choices := one.metadata.get("choices"):
        words = [f"one of {', '.join(f'`{each!r}`' for each in choices)}"]
    else:
        words = [_KINDS.get(kind, "a list of strings") for kind in kinds if kind is not NoneType]
    if "range" in one.metadata:
        words[-1] += f" in {limits}" if (limits := one.metadata["range"])[0] in "[(" else f" {limits}"
    return " or ".join(words + ["`None`"] * (NoneType in kinds))


def _value_problem(one: Field[Any], value: Any) -> str | None:
    """Say what is wrong with a value by itself: its type, its choices or its range."""
    choices, limits = one.metadata.get("choices"), one.metadata.get("range")
    is_right = _is_of(value, _HINTS[one.name]) and (choices is None or value in choices)
    if is_right and (limits is None or value is None or is_in_range(value, limits)):
        return None
    if problems := removed_problems({one.name: value}):
        return problems[0]
    meaning = one.metadata["help"].split(". ")[0].rstrip(".")
    return f"`{one.name}` must be {_values(one)}, got {value!r}. {meaning}."


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type; an integer is a number, but `True` is not."""
    if isinstance(hint, UnionType):
        return any(_is_of(value, each) for each in get_args(hint))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(each, get_args(hint)[0]) for each in value)
    return isinstance(value, hint)


def is_in_range(value: float, limits: str) -> bool:
    """
    Return whether a number is within limits.

    Args:
        value (`float`):
            The number.
        limits (`str`):
            An interval such as `"(0, 1]"`, or one limit such as `">=0"`.

    Returns:
        `bool`: Whether it is; never for what is not a number.
    """
    if found := re.fullmatch(r"([\[(])(.+),(.+)([\])])", limits):
        low, high = (">=" if found[1] == "[" else ">"), ("<=" if found[4] == "]" else "<")
        return is_in_range(value, low + found[2]) and is_in_range(value, high + found[3])
    comparison, limit = re.fullmatch(r"([<>]=?)(.+)", limits).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return _COMPARISONS[comparison](value, float(limit))


_HINTS = get_type_hints(MCPGRPOConfig)
MCPGRPOConfig.__doc__ = f"{MCPGRPOConfig.__doc__}\n    Args:\n" + "".join(
    f"        {one.name} ({_values(one)}, *optional*, defaults to `{one.default!r}`):\n            {_meaning(one)}\n"
    for one in own_settings()
)
