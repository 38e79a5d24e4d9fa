"""One process of several that does something by itself, while the others wait."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from mcp_grpo.errors import MCPGRPOError, SettingsError


_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FORK_LAUNCHED", "NODE_RANK")
_BEGINNINGS = ("MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")


def call_alone(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """
    Call a function in a new process that takes itself for the only one.

    Args:
        function (`Callable`):
            Of a module, so that the new process finds it.
        arguments (`Any`):
            What it gets.
        seconds (`float`):
            After which it is given up.

    Returns:
        `Any`: What it returned.

    Raises:
        [`MCPGRPOError`]: What it raised.
        [`SettingsError`]: If it did not end in time, or ended without a word.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sending, function, arguments), daemon=True)
    with _one_of_one():
        process.start()
    sending.close()
    try:
        if not receiving.poll(seconds):
            raise SettingsError(f"It took more than {seconds:.0f} seconds.")
        found = receiving.recv()
    except EOFError:
        process.join(10)
        raise SettingsError(f"Its process ended with status {process.exitcode}.") from None
    finally:
        process.kill()
        process.join()
        receiving.close()
    if isinstance(found, MCPGRPOError):
        raise found
    return found


def _answer(sending: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found = function(*arguments)
    except MCPGRPOError as error:
        found = error
    except Exception as error:
        found = SettingsError(f"{type(error).__name__}: {error}")
    sending.send(found)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _one_of_one() -> Generator[None]:
    """Leave out of the environment that there are several processes."""
    left_out = {key: value for key, value in os.environ.items() if key in _NAMES or key.startswith(_BEGINNINGS)}
    for key in left_out:
        del os.environ[key]
    try:
        yield
    finally:
        os.environ.update(left_out)
