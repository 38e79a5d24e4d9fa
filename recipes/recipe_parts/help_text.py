"""The text of `--help`: settings by subject, a line or two each."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from trl import ModelConfig

from mcp_grpo.config import STAGES, own_settings


OWN = "This recipe"
MODEL = "Model and adapter"
LEARNING = "Learning"
RECORDS = "Evaluation, saving, tracking"
REST = "Everything else of TRL and Transformers"
SUBJECTS = (OWN, MODEL, *map(str.capitalize, STAGES), LEARNING, RECORDS, REST)

_OURS = {one.name: str(one.metadata["stage"]).capitalize() for one in own_settings()}
_THEIRS = {
    MODEL: " ".join(field.name for field in fields(ModelConfig))
    + " model_init_kwargs gradient_checkpointing use_cpu bf16 fp16 cast_lm_head_to_fp32 chat_template_path",
    "Rollout": "max_completion_length temperature num_generations chat_template_kwargs",
    "Sampling": "use_vllm",
    "Batch": "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size "
    "num_iterations train_sampling_strategy max_length packing",
    "Advantages": "scale_rewards reward_weights",
    "Guards": "loss_type epsilon epsilon_high delta importance_sampling_level beta use_bias_correction_kl entropy_coef",
    LEARNING: "learning_rate lr_scheduler_type warmup_steps max_steps num_train_epochs optim weight_decay max_grad_norm seed "
    "assistant_only_loss completion_only_loss",
    RECORDS: "output_dir resume_from_checkpoint eval_strategy eval_steps eval_on_start eval_delay per_device_eval_batch_size "
    "num_generations_eval load_best_model_at_end metric_for_best_model greater_is_better report_to run_name project "
    "push_to_hub disable_tqdm log_completions num_completions_to_print",
}
_HOMES = _OURS | {name: subject for subject, names in _THEIRS.items() for name in names.split()}
_BEGINNINGS = {"vllm_": "Sampling"} | dict.fromkeys(("save_", "logging_", "hub_", "trackio_"), RECORDS)
_CHOICES = 4  # of a setting, before the others are left to its documentation
_SENTENCES = 2  # of what TRL and Transformers say about a setting; their documentation has the rest


def subject_of(name: str, own: Iterable[str]) -> str:
    """Return the subject that a setting belongs to; `own` are the recipe's own settings."""
    if name in own:
        return OWN
    by_beginning = (subject for beginning, subject in _BEGINNINGS.items() if name.startswith(beginning))
    return _HOMES.get(name) or next(by_beginning, REST)


def help_text(program: str, description: str, actions: Sequence[argparse.Action], own: Sequence[str]) -> str:
    """Write what `--help` prints."""
    width = min(shutil.get_terminal_size((119, 24)).columns, 119)
    lines = [f"usage: {program} [--config FILE.yaml] [--SETTING VALUE ...]", "", description.strip(), ""]
    lines += ["Every setting is a flag and a key of the YAML file; a flag comes first. `-` may stand for `_`."]
    by_subject: dict[str, list[argparse.Action]] = {subject: [] for subject in SUBJECTS}
    for action in actions:
        if action.dest != "help" and not action.option_strings[0].startswith("--no_"):
            by_subject[subject_of(action.dest, own)].append(action)
    order = {name: place for place, name in enumerate(_HOMES)}
    for subject, listed in by_subject.items():
        if not listed:
            continue
        lines += ["", subject, "-" * len(subject)]
        if subject != OWN:
            listed.sort(key=lambda action: order.get(action.dest, len(order)))
        for action in listed:
            is_ours = action.dest in own or action.dest in _OURS
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
