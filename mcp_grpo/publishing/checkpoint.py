"""
What a run goes on from: whole checkpoints, and in each, beside what Transformers keeps, one file per process.

A checkpoint is written apart, given a manifest of its files, and then renamed: it is complete, or it is not there. One that lost
a part later is found out by its manifest.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mcp_grpo.errors import SettingsError


STATE_FILE = "objective-{rank}.pt"  # beside those of the optimizer and the random state
MANIFEST_FILE = "manifest.json"
UNFINISHED = "_unfinished"  # folder in the output folder for checkpoints that are being written; never uploaded

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = ("*.safetensors", "*.bin", "global_step*", "pytorch_model_fsdp*")  # one of these


def begin_checkpoint(output_dir: str | Path) -> Path:
    """Return the folder to write a checkpoint in, without what a killed run left there."""
    folder = Path(output_dir) / UNFINISHED
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def finish_checkpoint(written: Path, final: Path) -> None:
    """Give a checkpoint its manifest and its name; another process may have done it on the same disk."""
    with suppress(FileNotFoundError):
        manifest = {"files": {path: size for path, size in _files(written) if path != MANIFEST_FILE}}
        (written / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
        if final.exists():  # of the same step, by an earlier run
            final.rename(written.with_name(f"{final.name}.old"))
        written.rename(final)
    shutil.rmtree(written.parent, ignore_errors=True)


def checkpoint_problem(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or `None` if a run can go on from it."""
    try:
        json.loads((folder / "trainer_state.json").read_text())
    except FileNotFoundError:
        return "it has no trainer_state.json"
    except (OSError, ValueError):
        return "its trainer_state.json cannot be read"
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return "it has no weights"
    try:
        expected = json.loads((folder / MANIFEST_FILE).read_text())["files"]
    except FileNotFoundError:
        return None  # made by an earlier version, or downloaded
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {MANIFEST_FILE} cannot be read"
    found = dict(_files(folder))
    if missing := sorted(expected.keys() - found.keys()):
        return f"it has lost {', '.join(missing)}"
    cut = [name for name, size in expected.items() if found[name] != size]
    return f"{cut[0]} has {found[cut[0]]} bytes instead of {expected[cut[0]]}" if cut else None


def newest_checkpoint(output_dir: str | Path) -> tuple[str | None, list[str]]:
    """Return the newest checkpoint that is complete, and what is wrong with each newer one."""
    problems: list[str] = []
    for folder in _checkpoints(Path(output_dir)):
        problem = checkpoint_problem(folder)
        if problem is None:
            return str(folder), problems
        problems.append(f"{folder.name} is not complete: {problem}.")
    return None, problems


def complete_checkpoints(output_dir: str | Path) -> list[int]:
    """Return the steps of the checkpoints that are complete, the newest first."""
    return [step for folder, step in _checkpoints(Path(output_dir)).items() if checkpoint_problem(folder) is None]


def checked_checkpoint(resume_from: Any, output_dir: str | Path) -> tuple[Any, str]:
    """
    Return the checkpoint that a run is to go on from, and a sentence that says which one was taken and why.

    Raises:
        [`SettingsError`]: If the one that was named is not complete, or none is.
    """
    if resume_from is None or resume_from is False:
        return resume_from, ""
    if resume_from is not True:
        folder = Path(resume_from)
        if folder.is_dir() and (problem := checkpoint_problem(folder)):
            raise SettingsError(
                f"The checkpoint {str(folder)!r} is not complete: {problem}. Name another, or pass "
                "`resume_from_checkpoint=True` for the newest that is complete."
            )
        return resume_from, f"The run goes on from {str(folder)!r}."
    found, problems = newest_checkpoint(output_dir)
    if found is None:
        raise SettingsError(
            f"There is no complete checkpoint in {str(output_dir)!r} to go on from. "
            f"{' '.join(problems) or 'There is none at all.'} Leave `resume_from_checkpoint` out to start anew."
        )
    return found, " ".join([*problems, f"The run goes on from {found!r}."])


def _checkpoints(folder: Path) -> dict[Path, int]:
    """Return the checkpoints in a folder with their steps, the newest first."""
    named = {path: _CHECKPOINT.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    steps = {path: int(match[1]) for path, match in named.items() if match and path.is_dir()}
    return dict(sorted(steps.items(), key=lambda item: -item[1]))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            yield path.relative_to(folder).as_posix(), path.stat().st_size


def save_state(folder: str | Path, state: dict[str, Any], *, rank: int, num_processes: int) -> None:
    """Write the state of one process; `batch` is the one that is still to be learnt from, `None` if there is none."""
    torch.save({**state, "num_processes": num_processes}, Path(folder) / STATE_FILE.format(rank=rank))


def load_state(folder: str | Path, *, rank: int, num_processes: int, device: torch.device) -> dict[str, Any] | None:
    """
    Read the state of a run; `None` if the checkpoint has none.

    What all processes have in common is read from the first one's file, also if there are more or fewer now. `batch` is this
    process's own; it is `None` where the number of processes is another one: a new batch is rolled out then.
    """
    file, own_file = (Path(folder) / STATE_FILE.format(rank=each) for each in (0, rank))
    if not file.is_file():
        return None
    state = torch.load(file, map_location=device, weights_only=True)
    if state["batch"] is not None:
        is_same = state["num_processes"] == num_processes
        state["batch"] = torch.load(own_file, map_location=device, weights_only=True)["batch"] if is_same else None
    return state
