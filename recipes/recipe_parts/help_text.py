"""The text of `--help`: settings by subject, a line or two each."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from trl import ModelConfig

from mcp_grpo import MCPGRPOConfig


OWN = "This recipe"
MODEL = "Model and adapter"
TRAJECTORIES = "Trajectories and tools"
LEARNING = "Learning"
VLLM = "vLLM"
RECORDS = "Evaluation, saving, tracking"
REST = "Everything else of TRL and Transformers"
SUBJECTS = (OWN, MODEL, TRAJECTORIES, LEARNING, VLLM, RECORDS, REST)

_NAMES = {
    MODEL: (
        *(field.name for field in fields(ModelConfig)),
        *("model_init_kwargs", "gradient_checkpointing", "use_cpu", "bf16", "fp16", "cast_lm_head_to_fp32"),
        *("chat_template_path",),
    ),
    TRAJECTORIES: (
        *("max_turns", "max_turn_tokens", "max_completion_length", "max_result_tokens", "temperature"),
        *("num_generations", "chat_template_kwargs", "trajectory_timeout", "batch_timeout", "max_failed_fraction"),
        *("max_concurrent_trajectories", "straggler_policy", "straggler_quantile", "truncation", "first_call_retries"),
        *("constrained_decoding", "first_phase_steps", "first_phase_temperature", "first_phase_turn_tokens"),
        *("dynamic_sampling", "cassette", "cassette_mode", "max_length", "packing"),
    ),
    LEARNING: (
        *(
            "learning_rate",
            "lr_scheduler_type",
            "warmup_steps",
            "max_steps",
            "num_train_epochs",
            "optim",
            "weight_decay",
        ),
        *("max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
        *("generation_batch_size", "num_iterations", "seed", "loss_type", "epsilon", "epsilon_high", "delta", "beta"),
        *("use_bias_correction_kl", "scale_rewards", "reward_weights", "entropy_coef", "importance_sampling_level"),
        *("train_sampling_strategy", "assistant_only_loss", "completion_only_loss"),
    ),
    VLLM: ("use_vllm", "rollout_ahead"),
    RECORDS: (
        *("output_dir", "resume_from_checkpoint", "eval_strategy", "eval_steps", "eval_on_start", "eval_delay"),
        *("per_device_eval_batch_size", "num_generations_eval", "load_best_model_at_end", "metric_for_best_model"),
        *("greater_is_better", "report_to", "run_name", "project", "push_to_hub", "push_value_head", "disable_tqdm"),
        *("log_completions", "num_completions_to_print", "on_unhealthy", "health_patience", "keep_best"),
    ),
}
_BEGINNINGS = {VLLM: ("vllm_", "weight_sync"), RECORDS: ("save_", "logging_", "hub_", "trackio_")}
_CHOICES = 4  # of a setting, before the others are left to its documentation
_SENTENCES = 2  # of what TRL and Transformers say about a setting; their documentation has the rest


def subject_of(name: str, own: Iterable[str]) -> str:
    """
    Return the subject that a setting belongs to.

    Args:
        name (`str`):
            The setting.
        own (`Iterable[str]`):
            The recipe's own settings.

    Returns:
        `str`: One of `SUBJECTS`. A setting of `MCPGRPOConfig` that is nowhere else is about learning.
    """
    if name in own:
        return OWN
    for subject, names in _NAMES.items():
        if name in names or name.startswith(_BEGINNINGS.get(subject, ("--",))):
            return subject
    return LEARNING if name in MCPGRPOConfig.__annotations__ else REST


def help_text(program: str, description: str, actions: Sequence[argparse.Action], own: Sequence[str]) -> str:
    """
    Write what `--help` prints.

    Args:
        program (`str`):
            Name of the program.
        description (`str`):
            What it does.
        actions (`Sequence[argparse.Action]`):
            Its settings.
        own (`Sequence[str]`):
            Those that are the recipe's own.

    Returns:
        `str`: The text.
    """
    width = min(shutil.get_terminal_size((119, 24)).columns, 119)
    lines = [f"usage: {program} [--config FILE.yaml] [--SETTING VALUE ...]", "", description.strip(), ""]
    lines += ["Every setting is a flag and a key of the YAML file; a flag comes first. `-` may stand for `_`."]
    by_subject: dict[str, list[argparse.Action]] = {subject: [] for subject in SUBJECTS}
    for action in actions:
        if action.dest != "help" and not action.option_strings[0].startswith("--no_"):
            by_subject[subject_of(action.dest, own)].append(action)
    order = {name: place for place, name in enumerate(name for names in _NAMES.values() for name in names)}
    for subject, listed in by_subject.items():
        if not listed:
            continue
        lines += ["", subject, "-" * len(subject)]
        if subject != OWN:
            listed.sort(key=lambda action: order.get(action.dest, len(order)))
        for action in listed:
            is_ours = action.dest in own or action.dest in MCPGRPOConfig.__annotations__
            lines += _lines_of(action, width, None if is_ours else 1 if subject == REST else _SENTENCES)
    return "\n".join(lines) + "\n"


def _lines_of(action: argparse.Action, width: int, num_sentences: int | None) -> list[str]:
    """A setting, the values it takes, its default and what it means."""
    is_switch = getattr(action.type, "__name__", "") == "string_to_bool"
    kind = "true|false" if is_switch else "VALUE ..." if action.nargs == "+" else "VALUE"
    if action.choices:
        choices = [_plain(each) for each in action.choices]
        kind = "|".join(choices[:_CHOICES] + ["..."] * (len(choices) > _CHOICES))
    default = "" if action.default is None else f" (default: {_plain(action.default)})"
    words = " ".join(str(action.help or "").replace("%%", "%").split())
    if num_sentences is not None:
        words = ". ".join(words.split(". ")[:num_sentences]).rstrip(".") + "." if words else ""
    body = textwrap.wrap(words, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return [f"  --{action.dest} {kind}{default}", *body]


def _plain(value: Any) -> str:
    value = getattr(value, "value", value)
    return str(value).lower() if isinstance(value, bool) else str(value)
