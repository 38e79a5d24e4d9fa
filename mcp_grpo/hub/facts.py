"""What a served policy needs beside its weights, its tokenizer and its chat template."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


POLICY_FILE = "mcp_grpo.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """
    How a policy was prompted in training.

    Args:
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            What the chat template was given, such as `{"enable_thinking": False}`.
        tools (`list[dict[str, Any]]`, *optional*):
            Schemas of all tools, as the prompts showed them.
        catalog_hash (`str`, *optional*):
            SHA-256 of them.
    """

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    catalog_hash: str | None = None


def write_facts(folder: str | Path, facts: PolicyFacts) -> None:
    """
    Write the facts beside a policy, to `mcp_grpo.json`.

    Args:
        folder (`str` or `Path`):
            The policy's folder.
        facts ([`PolicyFacts`]):
            The facts.
    """
    (Path(folder) / POLICY_FILE).write_text(json.dumps(asdict(facts), indent=2, ensure_ascii=False) + "\n")


def read_facts(folder: str | Path) -> PolicyFacts:
    """
    The facts beside a policy.

    Args:
        folder (`str` or `Path`):
            The policy's folder.

    Returns:
        [`PolicyFacts`]: The facts; empty ones if the folder has none.
    """
    file = Path(folder) / POLICY_FILE
    return PolicyFacts(**json.loads(file.read_text())) if file.is_file() else PolicyFacts()
