"""What a newcomer has: a clean clone, a shell without this repository's habits, and a terminal to read."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.fork_server import ForkServer
from helpers.shell import ROOT, Shell


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows, as they are in the working tree."""
    folder = tmp_path_factory.mktemp("clone") / "mcp_grpo"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return folder


@pytest.fixture
def shell(clone: Path, tmp_path: Path, fork_server: ForkServer) -> Shell:
    """A shell in the clone, with an empty home."""
    return Shell(clone, home=tmp_path, fork_server=fork_server)


@pytest.fixture
def shell_in(tmp_path: Path, fork_server: ForkServer) -> Callable[[Path], Shell]:
    """The same in a folder of one's own."""
    return lambda folder: Shell(folder, home=tmp_path, fork_server=fork_server)
