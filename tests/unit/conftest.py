import sys
from collections.abc import Iterator

import pytest


STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})

_started: list[str] = []


def _note_start(event: str, arguments: tuple[object, ...], starts: frozenset[str] = STARTS) -> None:
    if event in starts:  # a default, as the module's names are gone when the interpreter ends, and hooks are not
        _started.append(f"{event}{arguments[:2]}")


sys.addaudithook(_note_start)


@pytest.fixture(autouse=True)
def _no_process_is_started(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of this folder that starts a process: its place is `tests/process`."""
    _started.clear()
    yield
    if request.node.get_closest_marker("vllm"):  # which compiles what is not in its cache
        return
    assert not _started, (
        f"Tests of tests/unit start no process, and this one did. Move it to tests/process: {_started}"
    )
