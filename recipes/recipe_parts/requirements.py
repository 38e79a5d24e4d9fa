"""What a run needs that not every machine has: packages of extras, and weights."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from mcp_grpo.doctor.weights import missing_weights
from mcp_grpo.errors import SettingsError
from mcp_grpo.requirements import missing_packages


def missing_requirements(config: Any, model: Any) -> list[str]:
    """Return a sentence for each package that a run needs and this machine does not have."""
    found = missing_packages(config, model)
    file = getattr(config, "launch_with", None)
    if file and not any("`deepspeed`" in each for each in found) and find_spec("deepspeed") is None:
        path = Path(__file__).parent.parent / "accelerate" / file
        if yaml.safe_load(path.read_text()).get("distributed_type") == "DEEPSPEED":
            found.append(
                f"This configuration is launched with `recipes/accelerate/{file}`, which needs `deepspeed`, which is not "
                "installed: `pip install 'mcp-grpo[deepspeed]'`, or choose a configuration for FSDP2."
            )
    return found


def check_requirements(config: Any, model: Any) -> None:
    """Refuse a run that lacks something, before anything is started for it."""
    lacking = missing_requirements(config, model)
    # One process asks the Hub for all: the others would only ask the same.
    if int(os.environ.get("RANK", "0")) == 0 and (problem := missing_weights(model)):
        lacking.append(problem)
    if lacking:
        raise SettingsError("\n".join(lacking))
