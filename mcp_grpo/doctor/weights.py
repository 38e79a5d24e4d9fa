"""Where the weights of a model are: in a folder, in the cache of the Hub, on the Hub, or nowhere."""

from json import loads
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from mcp_grpo.doctor.stand_in import STAND_IN


WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
HUB_TIMEOUT = 15.0  # seconds for the Hub to say that it has a model
INSTEAD = (
    "Without weights, `mcp-grpo train` alone, and `make quickstart` (`recipes/quickstart.py`), train a small model that comes with them, and "
    "`--config recipes/configs/cpu_debug.yaml` runs `recipes/grpo_qwen3.py` with a tiny random one."
)


def missing_weights(model: Any) -> str | None:
    """Return what is wrong if the weights of a model are in no folder, not in the cache of the Hub, and not on the Hub."""
    name, revision = str(model.model_name_or_path), model.model_revision
    if name == STAND_IN:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return None
        return f"The folder {name!r} has no `config.json`, so there is no model in it. Name one that `save_pretrained` wrote."
    if is_here(name, revision):
        return None
    return _missing_on_hub(name, revision)


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


def is_here(name: str, revision: str) -> bool:
    """Return whether a folder or the cache of the Hub has a model's configuration and weights."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return (folder / "config.json").is_file() and any((folder / file).is_file() for file in WEIGHTS)
    return _is_cached(name, revision)


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
