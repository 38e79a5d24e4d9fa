"""What the command `mcp-grpo doctor` is told, as a subject to examine."""

import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from mcp_grpo.config import MCPGRPOConfig, removed_problems
from mcp_grpo.doctor.examination import Subject
from mcp_grpo.errors import SettingsError
from mcp_grpo.rewards.named import load_reward
from mcp_grpo.tasks import load_tasks
from mcp_grpo.trl_compat import ModelConfig


OF_RECIPES = [
    "servers",
    "tasks",
    "num_tasks",
    "world",
    "eval_tasks",
    "num_eval_tasks",
    "rewards",
    "server_processes",
    "launch_with",
    "resume",
    "debug_trajectory",
    "profile",
    "preflight",
    "env",
]
"""Settings of `recipes/grpo_qwen3.py` that are neither the trainer's nor the model's."""


def subject_of(
    *,
    servers: str | None = None,
    tasks: str | None = None,
    split: str | None = None,
    model: str | None = None,
    config: str | None = None,
    rewards: Mapping[str, str] | None = None,
) -> Subject:
    """Return what is to be examined: what a file of settings says, with the flags first; `rewards` are names of one's own."""
    settings = _read(Path(config)) if config else {}
    servers, tasks = servers or settings.get("servers"), tasks or settings.get("tasks")
    name, judged = model or settings.get("model_name_or_path"), settings.get("eval_tasks")
    names = [(rewards or {}).get(each, each) for each in settings.get("rewards") or ["task_outcome"]]
    loaded: dict[str, Any] = {**_only(settings, ModelConfig), "model_name_or_path": name}
    return Subject(
        servers=(lambda: servers) if servers else None,
        tasks=(lambda: load_tasks(tasks, split)) if tasks else None,
        eval_tasks=(lambda: load_tasks(judged)) if judged else None,
        rewards=lambda: [load_reward(each) for each in names],
        model=ModelConfig(**loaded) if name else None,
        config=(lambda: _config(settings)) if config else None,
        settings=_only(settings, MCPGRPOConfig),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a YAML file: {' '.join(str(error).split())}.") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{path} holds {type(found).__name__}, where settings are wanted: `name: value` lines.")
    return found


def _config(settings: Mapping[str, Any]) -> MCPGRPOConfig:
    """Make the trainer's settings, and refuse names that are no settings, with the nearest ones."""
    known = [*(field.name for kind in (MCPGRPOConfig, ModelConfig) for field in fields(kind)), *OF_RECIPES]
    problems = removed_problems(settings)
    for name in settings:
        if name not in known and not any(f"`{name}" in problem for problem in problems):
            near = get_close_matches(name, known, 1)
            problems.append(f"There is no setting `{name}`." + (f" Did you mean `{near[0]}`?" if near else ""))
    if problems:
        raise SettingsError("\n".join(problems))
    return MCPGRPOConfig(**_only(settings, MCPGRPOConfig))


def _only(settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: _number(value) for name, value in settings.items() if name in names}


def _number(value: Any) -> Any:
    """Return `1e-6`, which YAML takes for text, as a number."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value
