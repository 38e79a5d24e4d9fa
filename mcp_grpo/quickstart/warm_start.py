"""The model that the quickstart starts from, made by `recipes/make_warm_start.py`, with a fingerprint of its data."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp_grpo.quickstart.model import SPLIT_PATTERN, qwen3_chat_template
from mcp_grpo.quickstart.tasks import Row, scripted_solution


WARM_START = Path(__file__).parent / "warm_start"
SEED = 4  # of the warm-up: of five, the one that reinforcement learning took the fewest steps from
WHAT_TO_RUN = "run `make warm-start` (minutes)"
_FINGERPRINT = WARM_START / "made_from.json"


def fingerprint(rows: Sequence[Row], tools: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return digests of all that a warm start depends on."""
    conversations = [[*row["prompt"], *scripted_solution(row)] for row in rows]
    parts = {
        "tasks": conversations,
        "tools": list(tools),
        "chat_template": qwen3_chat_template,
        "split_pattern": SPLIT_PATTERN,
    }
    return {name: hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16] for name, part in parts.items()}


def fits_world(rows: Sequence[Row], tools: Sequence[dict[str, Any]]) -> bool:
    """Return whether the warm start was made from these tasks and tools."""
    return _FINGERPRINT.exists() and json.loads(_FINGERPRINT.read_text()) == fingerprint(rows, tools)


def keep_fingerprint(rows: Sequence[Row], tools: Sequence[dict[str, Any]]) -> None:
    """Write down what the warm start was made from."""
    _FINGERPRINT.write_text(json.dumps(fingerprint(rows, tools), indent=2) + "\n")
