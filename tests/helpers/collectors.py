"""Collectors of batches without what a test does not need."""

from types import SimpleNamespace
from typing import Any

import torch

from mcp_grpo.rollout.collect import BatchCollector


def make_collector(*, rank: int = 0, num_processes: int = 1, **changes: Any) -> BatchCollector:
    """A collector on one of some processes. What is not given is not there."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), process_index=rank, num_processes=num_processes)
    settings: dict[str, Any] = {
        **dict.fromkeys(("engine", "sampler", "renderer", "limits", "grammars", "schema_mask", "choice", "is_solved")),
        "accelerator": accelerator,
        "seed": 0,
        "temperature": 1.0,
        "max_concurrent": 8,
        "max_staleness": 0,
        "max_refills": 0,
        "masks_cuts": False,
        "shows_progress": False,
    }
    return BatchCollector(**settings | changes)
