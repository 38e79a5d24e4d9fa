"""
Installs what a few tests need of optional features, DeepSpeed and bitsandbytes, in a folder of its own: see helpers/extras.py.

Where they cannot be had, one line says so and those tests are skipped.
"""

import logging
import shutil
import subprocess
import sys
from pathlib import Path


logger = logging.getLogger(__name__)

REQUIREMENTS = Path(__file__).with_name("extras.txt")
FOLDER = Path(sys.prefix) / "test_extras"
NOTE = FOLDER / "installed.txt"


def install() -> str | None:
    """Install them; why it failed, or `None`."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    command = [*pip, "--target", str(FOLDER), "--requirement", str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        NOTE.write_text(REQUIREMENTS.read_text())
        return None
    shutil.rmtree(FOLDER, ignore_errors=True)
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    is_installed = NOTE.is_file() and NOTE.read_text() == REQUIREMENTS.read_text()
    if not is_installed and (reason := install()):
        logger.warning(
            "DeepSpeed and bitsandbytes were not installed, and the tests that need them are skipped: %s", reason
        )
