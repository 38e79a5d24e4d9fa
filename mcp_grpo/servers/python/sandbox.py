"""
The walls around sandboxed code: which of them this system can build, and how.

`README.md` beside this file says what each level stops.
"""

import ctypes
import fcntl
import importlib.util
import json
import logging
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from mcp_grpo.errors import SettingsError, ToolServerError
from mcp_grpo.servers.python import seccomp
from mcp_grpo.servers.python.process import Launch, Limits, Process, remove


logger = logging.getLogger(__name__)

Level = Literal["auto", "bubblewrap", "landlock", "rlimits"]

_RUNNER = Path(__file__).with_name("runner.py")
_PACKAGES = ("numpy",)  # what code may import beside the standard library, where it is installed
_HIDDEN = ("site-packages", "dist-packages")  # are in the folder of the standard library, but not of it
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_LINKER_CACHE = Path("/etc/ld.so.cache")
_FOLDER_PREFIX = "mcp_grpo_python_"

# The libraries that the interpreter and its extension modules need are those that the linker opens for them.
_LIST_LIBRARIES = """
import ctypes, json, pathlib, sys
for folder in sys.argv[1:]:
    for library in pathlib.Path(folder).rglob("*.so"):
        if "tkinter" not in library.name:
            try: ctypes.CDLL(str(library))
            except OSError: pass
names = set()
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_void_p)
def visit(info, size, data):
    names.add(ctypes.string_at(info[1]).decode())
    return 0
ctypes.CDLL(None).dl_iterate_phdr(CALLBACK(visit), None)
print(json.dumps(sorted(name for name in names if name.startswith("/"))))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """
    The files of the host that sandboxed code can read, and run.

    Args:
        python (`str`):
            The interpreter.
        stdlib (`tuple[str, ...]`):
            Folders of the standard library.
        packages (`dict[str, str]`):
            Folders of other packages, by name.
        folders (`tuple[str, ...]`):
            Further folders that those packages need.
        libraries (`tuple[str, ...]`):
            Shared libraries that are elsewhere.
    """

    python: str
    stdlib: tuple[str, ...]
    packages: dict[str, str]
    folders: tuple[str, ...]
    libraries: tuple[str, ...]

    @classmethod
    def on_this_host(cls) -> "Visible":
        """
        What the interpreter that runs this needs.

        Returns:
            [`Visible`]: The files.
        """
        python = os.path.realpath(sys.executable)
        places = dict.fromkeys(os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))
        # A virtual environment has such a folder, too, with no standard library in it.
        marks = ("os.py", "lib-dynload")
        stdlib = tuple(folder for folder in places if any(os.path.exists(f"{folder}/{mark}") for mark in marks))
        packages, folders = {}, []
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations:
                packages[name] = spec.submodule_search_locations[0]
                libraries = f"{packages[name]}.libs"
                folders += [libraries] if os.path.isdir(libraries) else []
        libraries = ()
        if sys.platform == "linux":
            places = [f"{folder}/lib-dynload" for folder in stdlib] + list(packages.values())
            command = [python, "-I", "-S", "-c", _LIST_LIBRARIES, *places]
            found = subprocess.run(command, capture_output=True, check=True, env={}, stdin=subprocess.DEVNULL)
            seen = tuple(f"{folder}/" for folder in (*stdlib, *packages.values(), *folders))
            paths = (os.path.normpath(path) for path in json.loads(found.stdout))
            libraries = tuple(path for path in paths if not path.startswith(seen))
        return cls(python=python, stdlib=stdlib, packages=packages, folders=tuple(folders), libraries=libraries)

    def hidden(self) -> Iterator[str]:
        """Folders within others that are not to be seen."""
        for folder in self.stdlib:
            yield from (f"{folder}/{name}" for name in _HIDDEN if os.path.isdir(f"{folder}/{name}"))


class Sandbox(ABC):
    """
    One way to start confined processes.

    Args:
        limits ([`Limits`]):
            What each process may use.
        visible ([`Visible`]):
            What it may read.
    """

    level: ClassVar[str]
    has_private_files: ClassVar[bool] = False

    def __init__(self, limits: Limits, visible: Visible) -> None:
        self.limits = limits
        self._visible = visible
        self._has_seccomp = seccomp.is_supported()

    @property
    def description(self) -> str:
        """The walls, by name."""
        return f"{self.level} + seccomp" if self._has_seccomp else f"{self.level} only"

    @property
    def packages(self) -> tuple[str, ...]:
        """Names of the packages that code can import beside the standard library."""
        return tuple(self._visible.packages)

    def start(self) -> Process:
        """
        Start a process, which has then to be opened.

        Returns:
            [`Process`]: The process. It ends with the thread that this is called on.
        """
        return Process(self._launch(), self.limits)

    def close(self) -> None:  # noqa: B027 - not every sandbox leaves something
        """Remove what is left on the host."""

    @abstractmethod
    def _launch(self) -> Launch:
        """How the next process is started."""

    def _command(self, runner: str) -> list[str]:
        return [self._visible.python, "-S", "-s", "-P", "-B", runner]

    def _settings(self, pid: int, *, parent: int, folder: str) -> dict[str, Any]:
        limits = self.limits
        program = seccomp.filter_program(pid, has_private_files=self.has_private_files) if self._has_seccomp else None
        return {
            "limits": {
                "RLIMIT_AS": limits.max_memory_mib << 20,
                "RLIMIT_FSIZE": limits.max_files_mib << 20,
                "RLIMIT_NOFILE": limits.max_open_files,
                "RLIMIT_CORE": 0,
                "RLIMIT_MEMLOCK": 0,
            },
            "seccomp": program and program.hex(),
            "landlock": None,
            "parent": parent,
            "folder": folder,
            "packages": self._visible.packages,
            "max_output": limits.max_output,
            "cpu": None,
            "hints": _hints(limits),
        }


class Bubblewrap(Sandbox):
    """Namespaces of its own for everything, and a file system that has nothing but the interpreter in it."""

    level = "bubblewrap"
    has_private_files = True

    def __init__(self, limits: Limits, visible: Visible) -> None:
        super().__init__(limits, visible)
        tool = shutil.which("bwrap")
        if tool is None:
            raise ToolServerError("bubblewrap is not installed: `apt-get install bubblewrap` or the like.")
        if not self._has_seccomp:
            raise ToolServerError(f"There is no seccomp filter for this machine, {platform.machine()}.")
        self._tool = tool

    def _launch(self) -> Launch:
        info = os.pipe()
        return Launch(
            command=[*self._walls(info[1]), *self._command("/runner.py")],
            environment={},
            settings=lambda _: self._settings(1, parent=0, folder="/tmp"),
            mounted_folder="/tmp",
            info=info,
        )

    def _settings(self, pid: int, *, parent: int, folder: str) -> dict[str, Any]:
        settings = super()._settings(pid, parent=parent, folder=folder)
        # Counted for this user in this namespace. The kernel does not count for root, where only `Process` looks.
        settings["limits"]["RLIMIT_NPROC"] = self.limits.max_threads
        return settings

    def _walls(self, info: int) -> list[str]:
        visible = self._visible
        options = ["--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"]
        options += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
        options += ["--info-fd", str(info)]
        for name, value in _environment().items():
            options += ["--setenv", name, value]
        # First, because Python itself may be in a folder below it.
        options += ["--size", str(self.limits.max_files_mib << 20), "--tmpfs", "/tmp"]
        for folder in visible.stdlib:
            options += ["--ro-bind", folder, folder]
        for folder in visible.hidden():
            options += ["--tmpfs", folder]
        for path in (visible.python, *visible.packages.values(), *visible.folders, *visible.libraries):
            options += ["--ro-bind", path, path]
        if _LINKER_CACHE.exists():
            options += ["--ro-bind", str(_LINKER_CACHE), str(_LINKER_CACHE)]
        for device in _DEVICES:
            options += ["--dev-bind", device, device]
        options += ["--ro-bind", str(_RUNNER), "/runner.py"]
        for folder in visible.hidden():
            options += ["--remount-ro", folder]
        return [self._tool, *options, "--remount-ro", "/", "--chdir", "/tmp", "--"]


class _OnHostFiles(Sandbox):
    """A sandbox whose private folder is on the host."""

    def __init__(self, limits: Limits, visible: Visible) -> None:
        super().__init__(limits, visible)
        _remove_old_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        # Held as long as this process lives, so that another can see whether the folder is still in use.
        self._lock = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """See [`Sandbox.close`]."""
        os.close(self._lock)
        remove(self._folder)

    def _launch(self) -> Launch:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        return Launch(
            command=self._command(str(_RUNNER)),
            environment=_environment(),
            settings=lambda pid: self._settings(pid, parent=os.getpid(), folder=str(folder)),
            folder=folder,
        )


class Landlock(_OnHostFiles):
    """The kernel lets it open nothing but the interpreter's files and its private folder."""

    level = "landlock"
    _READ, _WRITE, _READ_FOLDER = 1 << 2, 1 << 1, 1 << 3

    def __init__(self, limits: Limits, visible: Visible) -> None:
        if not seccomp.is_supported():
            raise ToolServerError(f"There is no seccomp filter for this machine, {platform.machine()}.")
        self._version = ctypes.CDLL(None).syscall(444, None, 0, 1)
        if self._version < 1:
            raise ToolServerError("This kernel has no Landlock, or does not let us use it. Linux 5.13 and newer can.")
        super().__init__(limits, visible)

    def _settings(self, pid: int, *, parent: int, folder: str) -> dict[str, Any]:
        settings = super()._settings(pid, parent=parent, folder=folder)
        version = self._version
        num_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
        handled = (1 << num_rights) - 1
        # struct landlock_ruleset_attr: files; TCP, to bind and connect; abstract sockets and signals to others.
        attributes = struct.pack("=QQQ", handled, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
        device_nodes_sockets_programs = 1 << 6 | 1 << 11 | 1 << 9 | 1
        rules = [(folder, handled & ~device_nodes_sockets_programs)]
        rules += [(path, self._READ | (0 if os.path.isfile(path) else self._READ_FOLDER)) for path in self._readable()]
        rules += [(path, self._READ_FOLDER) for path in self._visible.stdlib]
        rules += [(path, self._READ | self._WRITE) for path in _DEVICES]
        settings["landlock"] = {"attributes": attributes.hex(), "rules": rules}
        return settings

    def _readable(self) -> Iterator[str]:
        """Rules only ever add, so that the parts of the standard library are named one by one, to leave others out."""
        for folder in self._visible.stdlib:
            paths = (f"{folder}/{name}" for name in os.listdir(folder) if name not in _HIDDEN)
            yield from filter(os.path.exists, paths)  # not links that lead nowhere
        yield from (*self._visible.packages.values(), *self._visible.folders, *self._visible.libraries)
        if _LINKER_CACHE.exists():
            yield str(_LINKER_CACHE)


class Rlimits(_OnHostFiles):
    """No wall around files: what the user of the server can read, code can read."""

    level = "rlimits"

    def _settings(self, pid: int, *, parent: int, folder: str) -> dict[str, Any]:
        settings = super()._settings(pid, parent=parent, folder=folder)
        for number in ("EPERM", "EACCES", "EROFS"):
            del settings["hints"][number]  # which speak of walls
        if not self._has_seccomp:
            settings["limits"]["RLIMIT_NPROC"] = 0  # no process and no thread more, for any user but root
            settings["cpu"] = self.limits.timeout
        return settings


def open_sandbox(level: Level, limits: Limits) -> Sandbox:
    """
    The strongest sandbox that this system can build, or the one that is asked for. Each is tried before it is trusted.

    Args:
        level (`str`):
            `"auto"`, `"bubblewrap"`, `"landlock"` or `"rlimits"`.
        limits ([`Limits`]):
            What each process may use.

    Returns:
        [`Sandbox`]: The sandbox.

    Raises:
        [`ToolServerError`]: If it cannot be built.
    """
    if level not in get_args(Level):
        raise SettingsError(f"`level` must be one of {get_args(Level)}, got {level!r}.")
    kinds = {kind.level: kind for kind in (Bubblewrap, Landlock, Rlimits)}
    if sys.platform != "linux" and level != "rlimits":
        raise ToolServerError(
            f"There are no walls for Python code on this system, {sys.platform}: --sandbox {level} needs Linux. "
            "`--sandbox rlimits` runs it with limits on time and memory only, and with a view of your files."
        )
    visible = Visible.on_this_host()
    problems = []
    for name in kinds if level == "auto" else (level,):
        try:
            sandbox = kinds[name](limits, visible)
            _try(sandbox)
        except ToolServerError as error:
            problems.append(f"{name}: {error}")
            continue
        if name == "rlimits" and level == "auto":
            logger.warning("Python code can read the files of this user. %s", " ".join(problems))
        return sandbox
    raise ToolServerError(f"Python code cannot be sandboxed as asked for. {' '.join(problems)}")


def _try(sandbox: Sandbox) -> None:
    """Run something, to see whether the system lets us."""
    try:
        process = sandbox.start()
        process.open()
        reply = process.call("import math\nmath.factorial(5)")
        process.end()
        if reply.value != "120":
            raise ToolServerError(f"Code does not run in it: {reply.ended or reply.error}")
    except ToolServerError:
        sandbox.close()
        raise


def _environment() -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same code gives the same result, also where it prints a set
        "PYTHONUTF8": "1",
    }


def _hints(limits: Limits) -> dict[str, str]:
    files = f"The limit for all files together is {limits.max_files_mib} MiB."
    walls = "This sandbox has no network and no other processes, and only the files in its current folder."
    return {
        "memory": f"The limit is {limits.max_memory_mib} MiB of memory.",
        "ENOSPC": files,
        "EFBIG": files,
        "EMFILE": f"The limit is {limits.max_open_files} open files.",
        "EPERM": walls,
        "EACCES": walls,
        "EROFS": walls,
    }


def _remove_old_folders() -> None:
    """Remove the folders of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < 60:
                continue  # of another user, or not locked yet
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(descriptor)
