"""What a run needs that is not part of every installation."""

from typing import Any

from mcp_grpo.requirements import missing_packages


def missing_requirements(config: Any, model: Any) -> list[str]:
    """
    Return what a run needs and this machine does not have.

    Args:
        config ([`MCPGRPOConfig`]):
            Settings of the run.
        model ([`~trl.ModelConfig`]):
            Model of the run.

    Returns:
        `list[str]`: One sentence for each setting that needs a package which is not installed: what to install, or what to
        set to do without it.
    """
    return missing_packages(config, model)
