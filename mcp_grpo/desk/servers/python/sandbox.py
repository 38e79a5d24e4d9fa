"""
Levels of isolation for sandboxed code: which of them this system supports, and how they are built.

`README.md` beside this file says what each level stops.
"""

import ctypes
import fcntl
import importlib.util
import json
import logging
import os
import platform
import secrets
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

from mcp_grpo.desk.servers.python import seccomp
from mcp_grpo.desk.servers.python.process import Launch, Limits, Process, remove
from mcp_grpo.errors import SettingsError, ToolServerError


logger = logging.getLogger(__name__)

Level = Literal["auto", "bubblewrap", "landlock", "rlimits"]

_RUNNER = Path(__file__).with_name("runner.py")
_PACKAGES = ("numpy",)  # what code may import beside the standard library, where it is installed
_HIDDEN = ("site-packages", "dist-packages")  # are in the folder of the standard library, but not of it
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_LINKER_CACHE = Path("/etc/ld.so.cache")
_FOLDER_PREFIX = "mcp_grpo_python_"
_USERS = range(0x60000000, 0x68000000)  # that no system gives to anybody; one is taken for each process

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
    """Files of the host that sandboxed code can read and run."""

    python: str
    stdlib: tuple[str, ...]
    packages: dict[str, str]
    folders: tuple[str, ...]
    libraries: tuple[str, ...]

    @classmethod
    def on_this_host(cls) -> "Visible":
        """Return what the interpreter of this process needs."""
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

    @property
    def is_open_to_all(self) -> bool:
        """Return whether a user with no rights can reach it all: not where Python is in somebody's home."""
        # The interpreter has been loaded by the time it changes its user.
        libraries = (path for path in self.libraries if "libpython" not in path)
        paths = (*self.stdlib, *self.packages.values(), *self.folders, *libraries)
        return all(_is_open_to_all(Path(path)) for path in map(os.path.realpath, paths))

    def hidden(self) -> Iterator[str]:
        """Return folders within visible ones that are hidden."""
        for folder in self.stdlib:
            yield from (f"{folder}/{name}" for name in _HIDDEN if os.path.isdir(f"{folder}/{name}"))


class Sandbox(ABC):
    """A way to start confined processes."""

    level: ClassVar[str]
    has_private_files: ClassVar[bool] = False
    has_own_users = False

    def __init__(self, limits: Limits, visible: Visible) -> None:
        self.limits = limits
        self._visible = visible
        self._has_seccomp = seccomp.is_supported()

    @property
    def description(self) -> str:
        """Name the means of isolation."""
        return f"{self.level} + seccomp" if self._has_seccomp else f"{self.level} only"

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the names of the packages that code can import beside the standard library."""
        return tuple(self._visible.packages)

    def start(self) -> Process:
        """Start a process, which has then to be opened."""
        return Process(self._launch(), self.limits)

    def close(self) -> None:  # noqa: B027 - not every sandbox leaves something
        """Remove what is left on the host."""

    @abstractmethod
    def _launch(self) -> Launch:
        """Describe how to start the next process."""

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
            "user": None,
            "parent": parent,
            "folder": folder,
            "packages": self._visible.packages,
            "max_output": limits.max_output,
            "cpu": None,
            "hints": _hints(limits),
        }


class Bubblewrap(Sandbox):
    """Namespaces for everything, and a file system with nothing but the interpreter."""

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
    """A sandbox whose private folder is on the host. Started as root, each process gets a user of its own."""

    def __init__(self, limits: Limits, visible: Visible) -> None:
        super().__init__(limits, visible)
        _remove_old_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        self.has_own_users = os.geteuid() == 0 and visible.is_open_to_all and _can_change_users()
        if self.has_own_users:
            self._folder.chmod(0o711)
        # Held as long as this process lives, so that another can see whether the folder is still in use.
        self._lock = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        os.close(self._lock)
        remove(self._folder)

    def _launch(self) -> Launch:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        user = secrets.choice(_USERS) if self.has_own_users else None
        if user is not None:
            os.chown(folder, user, user)

        def settings(pid: int) -> dict[str, Any]:
            settings = self._settings(pid, parent=os.getpid(), folder=str(folder))
            settings["user"] = user
            if user is not None:  # counted for it alone
                settings["limits"].setdefault("RLIMIT_NPROC", self.limits.max_threads)
            return settings

        command = self._command(str(_RUNNER))
        return Launch(command=command, environment=_environment(), settings=settings, folder=folder)

    @property
    def description(self) -> str:
        return f"{super().description}, with users of their own" if self.has_own_users else super().description


class Landlock(_OnHostFiles):
    """The kernel lets the process open only the interpreter's files and its private folder."""

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
        """
        List readable files. Rules only add, so parts of the standard library are named one by one to leave others out.
        """
        for folder in self._visible.stdlib:
            paths = (f"{folder}/{name}" for name in os.listdir(folder) if name not in _HIDDEN)
            yield from filter(os.path.exists, paths)  # not links that lead nowhere
        yield from (*self._visible.packages.values(), *self._visible.folders, *self._visible.libraries)
        if _LINKER_CACHE.exists():
            yield str(_LINKER_CACHE)


class Rlimits(_OnHostFiles):
    """No isolation of files: code can read what the server's user can read."""

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
    """Open the strongest sandbox that this system supports, or the given one. Each is tested before it is used."""
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
            sandbox = _opened(kinds[name], limits, visible)
        except ToolServerError as error:
            problems.append(f"{name}: {error}")
            continue
        if name == "rlimits" and level == "auto":
            logger.warning("Python code can read the files of this user. %s", " ".join(problems))
        return sandbox
    raise ToolServerError(f"Python code cannot be sandboxed as asked for. {' '.join(problems)}")


def _opened(kind: type[Sandbox], limits: Limits, visible: Visible) -> Sandbox:
    sandbox = kind(limits, visible)
    try:
        _try(sandbox)
    except ToolServerError:
        if not sandbox.has_own_users:
            raise
        # Walls matter more than users.
        sandbox = kind(limits, visible)
        sandbox.has_own_users = False
        _try(sandbox)
    return sandbox


def _try(sandbox: Sandbox) -> None:
    """Run something, to see whether the system lets us."""
    try:
        process = sandbox.start()
        process.open()
        # With modules that are loaded only then, from where they are.
        reply = process.call("import csv, decimal, math\nmath.factorial(5)")
        process.end()
        if reply.value != "120":
            raise ToolServerError(f"Code does not run in it: {reply.ended or reply.error}")
    except ToolServerError:
        sandbox.close()
        raise


def _is_open_to_all(path: Path) -> bool:
    try:
        modes = [(place.stat().st_mode, 0o1) for place in path.parents] + [(path.stat().st_mode, 0o4)]
    except OSError:
        return False
    return all(mode & right for mode, right in modes)


def _can_change_users() -> bool:
    """Return whether root here may become the users that are given, and still see what their processes have open."""
    code = (
        "import os, sys\nn = int(sys.argv[1])\nos.setgroups([])\nos.setresgid(n, n, n)\nos.setresuid(n, n, n)\ninput()"
    )
    tried = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, str(_USERS[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 10
        while tried.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                if _user_of(tried.pid) == _USERS[0]:
                    os.listdir(f"/proc/{tried.pid}/fd")
                    return True
            time.sleep(0.01)
        return False
    finally:
        tried.kill()
        tried.wait()
        if tried.stdin:
            tried.stdin.close()


def _user_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[2]) for line in lines if line.startswith("Uid:"))


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
