"""Serve the dashboard until it is interrupted."""

import errno
import ipaddress
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from mcp_grpo.dashboard.app import make_app
from mcp_grpo.dashboard.runs import Runs
from mcp_grpo.errors import SettingsError


def serve(folder: Path, *, host: str = "127.0.0.1", port: int = 0, say: Callable[[str], None] = print) -> None:
    """
    Serve the dashboard until it is interrupted.

    Args:
        folder (`Path`):
            Folder that runs are written to, or the folder of one run.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen at. Any but one of this machine needs a token, which is in the address that is said.
        port (`int`, *optional*, defaults to `0`):
            Port to listen at; 0 for one that is free.
        say (`Callable`, *optional*, defaults to `print`):
            Gets the address, and what there is to know.

    Raises:
        [`SettingsError`]: If there is no such folder, or the address cannot be listened at.
    """
    if not folder.is_dir():
        raise SettingsError(
            f"There is no folder {folder}. Name the folder that runs are written to, such as `outputs`."
        )
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    token = None if _is_loopback(host) else secrets.token_urlsafe(24)
    num_runs = len(Runs(folder).all())
    if not num_runs:
        say(f"There is no run in {folder} yet. One that is started shows by itself.")
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    shown = f"[{shown}]" if ":" in shown else shown
    say(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
    if token:
        say("Whoever has this address can read all runs in the folder, and what is sent is not encrypted.")
    config = uvicorn.Config(
        make_app(folder, token),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:  # beyond, some systems take what is left of it
        raise SettingsError(f"`--port` must be from 0 to 65535, got {port}.")
    listening = None
    try:
        kind = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(kind[0], socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(kind[4])
        listening.listen(128)  # so that who opens the address at once waits, and is not refused
        return listening
    except OSError as error:
        if listening is not None:
            listening.close()
        taken = error.errno == errno.EADDRINUSE
        advice = "Name another port with `--port`, or `--port 0` for one that is free." if taken else "Check `--host`."
        raise SettingsError(f"{host}:{port} cannot be listened at ({error.strerror or error}). {advice}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
