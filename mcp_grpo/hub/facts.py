"""What a served policy needs beside its weights, its tokenizer and its chat template."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


POLICY_FILE = "mcp_grpo.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """
    How a policy was prompted in training, and on what base model.

    Args:
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            What the chat template was given, such as `{"enable_thinking": False}`.
        tools (`list[dict[str, Any]]`, *optional*):
            Schemas of all tools, as the prompts showed them.
        catalog_hash (`str`, *optional*):
            SHA-256 of them.
        quantization (`dict[str, Any]`, *optional*):
            What the base model was quantised by when it was loaded, as a `quantization_config`; `None` if it was loaded as
            it is. See [`quantization_of`].
    """

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    catalog_hash: str | None = None
    quantization: dict[str, Any] | None = None


def quantization_of(policy: Any) -> dict[str, Any] | None:
    """
    What a model was quantised by when it was loaded.

    Args:
        policy (`PreTrainedModel` or `PeftModel`):
            The policy, unwrapped.

    Returns:
        `dict[str, Any]` or `None`: A `quantization_config`; `None` if there is none, or if the base model comes with it.
    """
    config: Any = getattr(policy.config, "quantization_config", None)
    if config is None or getattr(getattr(policy, "hf_quantizer", None), "pre_quantized", False):
        return None
    return dict(config) if isinstance(config, dict) else config.to_dict()


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
