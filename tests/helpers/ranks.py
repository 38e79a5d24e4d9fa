"""Programs of `servers/` on two processes."""

import os
import subprocess
import sys
from pathlib import Path


SCRIPTS = Path(__file__).parent.parent / "servers"


def launch(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program on two processes, and wait for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [*command, str(SCRIPTS / script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
