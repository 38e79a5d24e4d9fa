"""What a stdio server with the option `sandbox` may see, and how it is started so that it sees no more."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.transports import confined


# What programs need to run at all, to resolve names and to check certificates.
_SYSTEM = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/version",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/etc/resolv.conf",
    "/run/systemd/resolve",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/protocols",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/alternatives",
    "/etc/mime.types",
    "/etc/passwd",
    "/etc/group",
    "/etc/os-release",
]
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def behind_walls(config: ServerConfig, command: str, home: str) -> tuple[list[str], dict[str, str]]:
    """
    Return the words before a server's command that keep it in, and the variables that it needs. `home` is a folder of its own.
    Raises [`ToolServerError`] where this system cannot do it.
    """
    options = config.sandbox or {}
    if not confined.is_supported():
        raise ToolServerError(
            f"The server {config.name!r} cannot be kept in a sandbox here, as its option `sandbox` asks for: that takes Linux 6.7 "
            "or newer with Landlock, on x86_64 or aarch64. Run it in a container instead, or remove the option."
        )
    start = Path(config.folder or os.getcwd())
    read, write = (
        [str(start / Path(path).expanduser()) for path in options.get(kind, ())] for kind in ("read", "write")
    )
    if missing := [path for path in (*read, *write) if not os.path.exists(path)]:
        raise ToolServerError(f"`sandbox` of server {config.name!r} names {missing[0]!r}, which does not exist.")
    network = options.get("network", False)
    walls = {
        "read": [*_SYSTEM, *_of_command(config, command), *read],
        "write": [*_DEVICES, home, *write],
        "network": network if isinstance(network, bool) else list(network),
    }
    variables = {"HOME": home, "TMPDIR": home, "XDG_CACHE_HOME": home}
    if not isinstance(network, bool):
        variables["RES_OPTIONS"] = "use-vc"  # names are asked for by TCP, too
    return [sys.executable, "-I", "-S", confined.__file__, json.dumps(walls)], variables


def _of_command(config: ServerConfig, command: str) -> Iterator[str]:
    """Yield where the program is installed, the files that its arguments name, and its working directory; never a home."""
    homes = {"/", "/home", "/root", os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))}
    cwd = config.cwd or os.getcwd()
    folders = [os.path.dirname(os.path.dirname(path)) for path in (command, os.path.realpath(command))]
    yield from (folder for folder in (*folders, cwd) if os.path.abspath(folder) not in homes)
    yield from (path for path in (command, os.path.realpath(command)) if os.path.isfile(path))
    yield from (path for path in (os.path.join(cwd, arg) for arg in config.args) if os.path.isfile(path))
