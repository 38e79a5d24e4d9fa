"""
Installs the third-party servers that the tests of this folder run against.

Each PyPI server has an environment of its own: some need an SDK that the trainer cannot live with. What is installed
already, in the version named here, is left alone.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


logger = logging.getLogger(__name__)

FOLDER = Path(os.environ.get("MCP_GRPO_PEERS") or Path(__file__).parents[2] / ".peers").absolute()

# By the name of their environment, which holds all of them.
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "npm": (
        "@modelcontextprotocol/server-everything@2026.8.31",
        "@modelcontextprotocol/server-filesystem@2026.8.31",
        "@modelcontextprotocol/server-memory@2026.8.31",
        "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
    ),
    "time": ("mcp-server-time==2026.10.19",),
    "git": ("mcp-server-git==2026.10.19",),
    "fetch": ("mcp-server-fetch==2026.10.24",),
    "sqlite": ("mcp-server-sqlite==2025.4.25", "mcp<2"),  # they do not say so themselves, and die at import
    "calculator": ("mcp-server-calculator==0.2.1",),
    "duckdb": ("mcp-server-duckdb==1.1.0", "mcp<2"),
}


def is_installed(environment: str) -> bool:
    """Whether an environment holds what it should, in these versions."""
    note = _note(environment)
    return note.is_file() and note.read_text() == _content(environment)


def program(environment: str, name: str) -> str:
    """Path of a server's program."""
    scripts = "node_modules/.bin" if environment == "npm" else "bin"
    return str(FOLDER / environment / scripts / name)


def install(environment: str) -> None:
    """Make an environment, or bring it up to date."""
    folder = FOLDER / environment
    if environment == "npm":
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *ENVIRONMENTS["npm"])
    else:
        _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
        pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check")
        _run(*pip, "install", "-qq", *ENVIRONMENTS[environment])
    if environment == "fetch":
        # Its HTML reader gets its JavaScript half from npm when it is first used, which would be inside a tool call.
        _run(str(folder / "bin" / "python"), "-c", "from readabilipy.simple_json import have_node; have_node()")
    _note(environment).write_text(_content(environment))  # last of all: half an installation is none


def _note(environment: str) -> Path:
    return FOLDER / environment / "installed"


def _content(environment: str) -> str:
    return "\n".join(ENVIRONMENTS[environment]) + "\n"


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        sys.exit(
            f"`{command[0]}` is not on PATH; the servers written for Node.js need it. Install Node.js 20 or newer."
        )
    except subprocess.CalledProcessError as error:
        sys.exit(f"`{' '.join(command)}` ended with {error.returncode}. What it says is above.")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for environment in ENVIRONMENTS:
        if not is_installed(environment):
            logger.info("Installing %s under %s", ", ".join(ENVIRONMENTS[environment]), FOLDER / environment)
            install(environment)
