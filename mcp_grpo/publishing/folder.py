"""Copy a policy's folder for publication: only the policy, and nothing private."""

import json
import logging
import mmap
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from mcp_grpo.errors import PublishingError
from mcp_grpo.publishing.policy_file import POLICY_FILE
from mcp_grpo.tools.secrets import MIN_LENGTH, hidden, secret_values, without_tokens


logger = logging.getLogger(__name__)

# Named one by one: an output folder may hold anything, such as recordings, logs, the base model or somebody's notes.
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
_POLICY_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "chat_template.jinja",
    "README.md",
    "curves.png",
    POLICY_FILE,
    "tool_parser.py",
    *_TOKENIZER_FILES,
)
_OBJECTIVE_FILES = "objective-*.pt"
_CHECKPOINT_FILES = (
    "optimizer.*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "trainer_state.json",
    _OBJECTIVE_FILES,
)
# They come from the base model as they are, and hold so many words that one of them may well be somebody's password.
_UNTOUCHED = ("tokenizer.json", "tokenizer.model", "vocab.*", "merges.txt")
_CACHED_MODEL = re.compile(r"models--([^/\\]+)--([^/\\]+)")
_MIN_PARTS = 3  # of a path that is told from a word: "/home/ann", but not "/data"
_MIN_BYTES = 6  # of what is looked for in weights, where anything shorter may be by chance


@dataclass(frozen=True, slots=True)
class PrivateValues:
    """Secrets and paths that must not leave this machine, longest path first."""

    secrets: tuple[str, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, secrets: Iterable[str | None], paths: Iterable[str | Path | None]) -> "PrivateValues":
        """Collect those of a run and those of the environment."""
        named = [("key", secret) for secret in secrets if secret]
        places = {os.path.abspath(path) for path in [*filter(None, paths), Path.cwd(), Path.home()]}
        places |= {os.path.realpath(place) for place in places}
        told = {place for place in places if len(Path(place).parts) >= _MIN_PARTS}
        homes = {os.path.abspath(Path.home()), os.path.realpath(Path.home())} - {os.sep}
        # "/root" may be a word of somebody's, and "/root/notes" is not.
        told |= {home + os.sep for home in homes - told}
        return cls(
            secrets=secret_values([*os.environ.items(), *named], {}),
            paths=tuple(sorted(told, key=len, reverse=True)),
        )

    def hide(self, text: str) -> str:
        """Take them out of a text."""
        text = without_tokens(hidden(self.secrets, text))
        for path in self.paths:
            text = text.replace(path, f"...{os.sep}" if path.endswith(os.sep) else "...")
        return text

    def hide_in(self, content: Any) -> Any:
        """Take them out of the texts of a JSON value; its numbers stay numbers."""
        if isinstance(content, dict):
            return {self.hide(name): self.hide_in(value) for name, value in content.items()}
        if isinstance(content, list):
            return [self.hide_in(value) for value in content]
        return self.hide(content) if isinstance(content, str) else content

    def are_in(self, file: Path) -> bool:
        """Tell whether a file of any size holds one of them."""
        if not file.stat().st_size:
            return False
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            secrets = (secret for secret in self.secrets if len(secret) >= MIN_LENGTH)
            values = [value.encode("utf-8", "replace") for value in (*secrets, *self.paths)]
            return any(content.find(value) >= 0 for value in values if len(value) >= _MIN_BYTES)


def publishable_copy(folder: Path, target: Path, *, private: PrivateValues, is_checkpoint: bool = False) -> None:
    """
    Copy what makes up a policy, and only that, with nothing private in it.

    Left behind are the value head, the reference, recordings, logs, completions, pickled settings and whatever else is in the folder. So is
    the batch of a checkpoint that was saved in the midst of one: a run that goes on from the copy rolls out a new one. The
    name of a base model that is a folder of this machine becomes that of the Hub if it comes from its cache, and is left out
    if not.
    """
    patterns = [*_POLICY_FILES, *(_CHECKPOINT_FILES if is_checkpoint else ())]
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.iterdir()):
        if not file.is_file() or not any(fnmatch(file.name, pattern) for pattern in patterns):
            continue
        copy = target / file.name
        shutil.copyfile(file, copy)
        if any(fnmatch(file.name, pattern) for pattern in _UNTOUCHED):
            continue
        if file.suffix == ".json":
            _clean_json(copy, private)
            continue
        if file.suffix in (".md", ".jinja", ".txt"):
            copy.write_text(private.hide(copy.read_text()))
            continue
        if fnmatch(file.name, _OBJECTIVE_FILES):
            _drop_batch(copy)
        if private.are_in(copy):
            raise PublishingError(
                f"{file.name} was not uploaded: it holds a secret of the environment or a path of this machine, and cannot be "
                "cleaned. Remove it from what is saved, or unset the variable if it is not a secret."
            )


def hub_name(base: str | None) -> str | None:
    """Return the Hub's name of a base model: of a name itself or of a folder of the cache; else `None`."""
    if not base or not (os.path.isabs(base) or base.startswith((".", "~")) or os.path.exists(base)):
        return base or None
    cached = _CACHED_MODEL.search(base)
    return f"{cached[1]}/{cached[2]}" if cached else None


def _clean_json(file: Path, private: PrivateValues) -> None:
    cleaner = _CLEANERS.get(file.name)
    text = file.read_text()
    if cleaner is None and private.hide(text) == text:
        return
    content = json.loads(text)
    if cleaner is not None:
        cleaner(content)
    file.write_text(json.dumps(private.hide_in(content), indent=2, ensure_ascii=False) + "\n")


def _drop_batch(file: Path) -> None:
    state = torch.load(file, map_location="cpu", weights_only=True)
    torch.save({**state, "batch": None}, file)


def _clean_adapter(config: dict[str, Any]) -> None:
    base = config.get("base_model_name_or_path")
    config["base_model_name_or_path"] = hub_name(base)
    if base and config["base_model_name_or_path"] is None:
        logger.warning(
            "The adapter's base model is a local folder, which is not published. To load the adapter, others pass "
            'their own: `load_adapter(..., base="...")`.'
        )


def _clean_model(config: dict[str, Any]) -> None:
    if "_name_or_path" in config:
        config["_name_or_path"] = hub_name(config["_name_or_path"]) or ""


def _clean_state(state: dict[str, Any]) -> None:
    if state.get("best_model_checkpoint"):
        state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name


_CLEANERS = {
    "adapter_config.json": _clean_adapter,
    "config.json": _clean_model,
    "trainer_state.json": _clean_state,
}
