"""The pre-flight: `mcp_grpo.doctor` on what the command line of a recipe says, without a GPU and without weights."""

from collections.abc import Callable
from typing import Any

from mcp_grpo import MCPGRPOConfig
from mcp_grpo.doctor import Report, Subject, examine
from recipe_parts.requirements import missing_requirements


def run_preflight(
    config: MCPGRPOConfig,
    model: Any,
    *,
    settings: dict[str, Any],
    train_dataset: Callable[[], Any],
    eval_dataset: Callable[[], Any],
    servers: Callable[[], Any],
    rewards: Callable[[], list[Callable[..., Any]]],
) -> Report:
    """
    Start the servers and build the trainer on a tiny random model in place of the weights; what a GPU is needed for is
    left out, and named.
    """
    return examine(
        Subject(
            servers=servers,
            tasks=train_dataset,
            eval_tasks=eval_dataset,
            rewards=rewards,
            model=model,
            config=lambda: config,
            settings=settings,
            packages=missing_requirements,
            uses_weights=False,
        )
    )
