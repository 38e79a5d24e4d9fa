"""Programs of `servers/` on several processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, DistributedType

from helpers.extras import with_extras


SCRIPTS = Path(__file__).parent.parent / "servers"
LIMIT = 480  # seconds; on two busy cores, four trainings take three minutes


def launch(
    script: str | Path, *arguments: object, num_processes: int = 2, has_extras: bool = False
) -> subprocess.CompletedProcess[str]:
    """
    Run a program, of `servers/` or of another folder, on several processes, which may have the packages of `helpers.extras`,
    and wait for them.
    """
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}")
    command = [*launcher, str(SCRIPTS / script), *map(str, arguments)]
    environment = {**(with_extras() if has_extras else os.environ), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                process.terminate()  # ends its processes, too; killed, it would leave them
                try:
                    process.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def share_weights_on_cpu() -> Iterator[None]:
    """On a CPU `accelerate` takes no notice of FSDP, although torch has it there; here it does."""
    plugins: list[Any] = []
    original, environ = AcceleratorState.__init__, dict(os.environ)

    def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugins.extend([fsdp_plugin] if fsdp_plugin else [])
        if plugins:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugins[0]

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = original
        os.environ.clear()  # what `transformers` asks of `accelerate` is in there
        os.environ.update(environ)
