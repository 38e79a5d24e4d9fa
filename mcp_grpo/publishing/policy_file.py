"""The file with what a served policy needs beside weights, tokenizer and chat template."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcp_grpo.types import Task


POLICY_FILE = "mcp_grpo.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Hold how a policy was prompted in training, and its base model."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    catalog_hash: str | None = None
    quantization: dict[str, Any] | None = None
    system: str | None = None


def quantization_of(policy: Any) -> dict[str, Any] | None:
    """
    Return the `quantization_config` a model was loaded with; `None` if there is none or the base model has its own.
    """
    config: Any = getattr(policy.config, "quantization_config", None)
    if config is None or getattr(getattr(policy, "hf_quantizer", None), "pre_quantized", False):
        return None
    return dict(config) if isinstance(config, dict) else config.to_dict()


def shared_system(tasks: Sequence[Task]) -> str | None:
    """Return the system message that every task begins with; `None` if they begin otherwise."""
    first = {json.dumps(task.prompt[0]) if task.prompt[0]["role"] == "system" else "" for task in tasks}
    if len(first) != 1 or "" in first:
        return None
    content = json.loads(first.pop()).get("content")
    return content if isinstance(content, str) else None


def write_policy_file(folder: str | Path, settings: PolicySettings) -> None:
    """Write `mcp_grpo.json` beside a policy."""
    (Path(folder) / POLICY_FILE).write_text(json.dumps(asdict(settings), indent=2, ensure_ascii=False) + "\n")


def read_policy_file(folder: str | Path) -> PolicySettings:
    """Read `mcp_grpo.json` beside a policy; return empty settings if there is none."""
    file = Path(folder) / POLICY_FILE
    return PolicySettings(**json.loads(file.read_text())) if file.is_file() else PolicySettings()
