"""What a run needs that not every machine has: packages of extras, and weights."""

import os
from importlib.util import find_spec
from json import loads
from pathlib import Path
from typing import Any

import httpx
import yaml
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from mcp_grpo.errors import SettingsError
from mcp_grpo.requirements import missing_packages
from recipe_parts.stand_in import STAND_IN


WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
HUB_TIMEOUT = 15.0  # seconds for the Hub to say that it has a model
INSTEAD = (
    "Without weights, `make quickstart` (`recipes/quickstart.py`) trains a small model that is made on the spot, and "
    "`--config recipes/configs/cpu_debug.yaml` runs `recipes/grpo_qwen3.py` with a tiny random one."
)


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


def missing_weights(model: Any) -> str | None:
    """
    Look for the weights of a model: in a folder, in the cache of the Hub, and on the Hub.

    Args:
        model ([`~trl.ModelConfig`]):
            Which model.

    Returns:
        `str` or `None`: What is wrong and what to do, if they are nowhere. `None` if they are there, or the Hub has them.
    """
    name, revision = str(model.model_name_or_path), model.model_revision
    if name == STAND_IN:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return None
        return f"The folder {name!r} has no `config.json`, so there is no model in it. Name one that `save_pretrained` wrote."
    if _is_cached(name, revision):
        return None
    return _missing_on_hub(name, revision)


def check_requirements(config: Any, model: Any) -> None:
    """
    Refuse a run that lacks something, before anything is started for it.

    Args:
        config ([`MCPGRPOConfig`]):
            Settings of the run.
        model ([`~trl.ModelConfig`]):
            Model of the run.

    Raises:
        [`SettingsError`]: If a package or the weights are missing; the message names all of it.
    """
    lacking = missing_requirements(config, model)
    # One process asks the Hub for all: the others would only ask the same.
    if int(os.environ.get("RANK", "0")) == 0 and (problem := missing_weights(model)):
        lacking.append(problem)
    if lacking:
        raise SettingsError("\n".join(lacking))


def _missing_on_hub(name: str, revision: str) -> str | None:
    """Say what is wrong if the Hub does not have a model for us."""
    try:
        validate_repo_id(name)
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except HFValidationError:
        return f"There is no folder {name!r} here, and no model on the Hub can have such a name. {INSTEAD}"
    except OfflineModeIsEnabled:
        why = "this machine is offline (`HF_HUB_OFFLINE` is set)"
    except HfHubHTTPError as error:
        return (
            f"There is no folder {name!r} here, and the Hub has no such model, or not for you (status "
            f"{error.response.status_code}). Look at its name, or log in with `hf auth login`. {INSTEAD}"
        )
    except (httpx.HTTPError, OSError) as error:
        why = f"the Hub cannot be reached ({type(error).__name__})"
    else:
        return None
    return (
        f"The weights of {name!r} are neither a folder here nor in the cache, and {why}: fetch them where there is a network "
        f"(`hf download {name}`), or name a folder that has them (`--model_name_or_path FOLDER`). {INSTEAD}"
    )


def _is_cached(name: str, revision: str) -> bool:
    """Return whether the cache of the Hub has a model's configuration and all of its weights."""

    def path(file: str) -> str | None:
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError:
            return None
        return found if isinstance(found, str) else None

    if path("config.json") is None:
        return False
    for file in WEIGHTS:
        if (found := path(file)) is not None:
            shards = loads(Path(found).read_text())["weight_map"].values() if file.endswith(".json") else ()
            return all(path(shard) is not None for shard in set(shards))
    return False
