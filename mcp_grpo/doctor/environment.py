"""The machine and its packages: versions that fit each other, the GPU, disk and memory."""

import os
import platform
import shutil
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mcp_grpo.doctor.findings import Findings
from mcp_grpo.doctor.machine import Machine


PACKAGE = "mcp-grpo"
SHOWN = ("trl", "transformers", "peft", "accelerate", "mcp", "torch")  # whose versions are told where all is well
MIN_DISK = 2.0  # GiB: an adapter, its optimizer and recorded trajectories; whole weights need more
MIN_MEMORY = 2.0  # GiB
OPTIONAL = {
    "vllm": ("sampling with vLLM", "turns are sampled by Transformers, which is slower"),
    "bitsandbytes": ("weights in 4 bits and 8-bit optimizers", "weights cannot be loaded in 4 bits"),
    "deepspeed": ("sharding by DeepSpeed", "several GPUs are used by DDP or FSDP"),
    "llguidance": ("grammars of tool calls", "`constrained_decoding` and `schema_mask: grammar` are not to be had"),
}
"""Optional packages: what each is for, and what its absence means."""


def examine_environment(findings: Findings, machine: Machine, folder: Path) -> None:
    """Look at versions, the GPU, memory, and the disk that a run writes to."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:  # a checkout on the path
        findings.warn(
            "versions",
            f"{PACKAGE} is not installed, so that the versions it needs are not known.",
            "`pip install -e .` in the checkout.",
        )
    else:
        examine_python(findings, str(package.metadata["Requires-Python"] or ""), platform.python_version())
        examine_versions(findings, package.requires or [])
    if machine.gpu is None:
        findings.warn(
            "gpu", "There is none: training goes on the CPU, which is for tiny models.", "Train where a GPU is."
        )
    else:
        kind = "with bf16" if machine.has_bf16 else "without bf16"
        findings.ok("gpu", f"{machine.gpu}, {machine.memory:.0f} GiB, {kind}")
    examine_optional(findings)
    examine_memory(findings)
    findings.run("disk", lambda: examine_disk(findings, folder), remedy="Name another `output_dir`.")


def examine_python(findings: Findings, required: str, version: str) -> None:
    """Compare the version of Python with the one that is required."""
    if SpecifierSet(required).contains(version, prereleases=True):
        findings.ok("python", version)
    else:
        findings.fail("python", f"Python {version} is running, and {required} is required.", "Use another Python.")


def examine_versions(findings: Findings, requires: Iterable[str]) -> None:
    """Compare what is installed with what this library requires; what only an extra needs may be missing."""
    problems: list[str] = []
    wanted: list[str] = []
    for requirement in map(Requirement, requires):
        is_base = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not is_base and requirement.name not in OPTIONAL:
            continue
        version, fits = _version(requirement.name), f"{requirement.name}{requirement.specifier}"
        if version is None and is_base:
            problems.append(f"{requirement.name} is not installed, and {fits} is required")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is installed, and {fits} is required")
        else:
            continue
        wanted.append(f"'{fits}'")
    if problems:
        findings.fail("versions", "; ".join(problems) + ".", f"pip install {' '.join(dict.fromkeys(wanted))}")
    else:
        findings.ok("versions", ", ".join(f"{name} {version}" for name in SHOWN if (version := _version(name))))


def examine_optional(findings: Findings) -> None:
    """Say which optional packages are here, and what it means where they are not."""
    for name, (use, without) in OPTIONAL.items():
        if find_spec(name) is None:
            findings.ok(name, f"not installed: {without}")
        else:
            findings.ok(name, f"{_version(name) or _other_build(name)}, for {use}")


def examine_memory(findings: Findings, needed: float = MIN_MEMORY) -> None:
    """Look at the memory that is free."""
    free, total = (size / 2**30 for size in (psutil.virtual_memory().available, psutil.virtual_memory().total))
    if free < needed:
        findings.warn("memory", f"Only {free:.1f} of {total:.1f} GiB are free.", "End other programs.")
    else:
        findings.ok("memory", f"{free:.1f} of {total:.1f} GiB free")


def examine_disk(findings: Findings, folder: Path, needed: float = MIN_DISK) -> None:
    """Look at the room where a run writes."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        findings.fail("disk", f"Nothing can be written to {folder}.", "Name another `output_dir`, or mend its rights.")
        return
    free = shutil.disk_usage(place).free / 2**30
    if free < needed:
        findings.fail(
            "disk",
            f"{free:.1f} GiB are free for {folder}, and a run needs {needed:.1f} at least.",
            "Make room, or name another `output_dir`; `save_total_limit` keeps fewer checkpoints.",
        )
    else:
        findings.ok("disk", f"{free:.0f} GiB free for {folder}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _other_build(module: str) -> str:
    """Return the name and version of a build that has a name of its own, such as one for CPUs."""
    names = metadata.packages_distributions().get(module, ())
    return ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(names)) or "installed"
