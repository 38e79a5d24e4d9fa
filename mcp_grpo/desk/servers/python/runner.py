"""
What runs inside the sandbox: it locks the door behind itself, then runs the code that it is sent, one call at a time.

It is started as a file of its own and sees nothing of this package. Its stdin is a socket to the server, on which every
message is a length of four bytes and JSON. What the code prints goes through stdout and stderr as it is.
"""

import _thread
import ast
import builtins
import ctypes
import errno
import io
import json
import linecache
import os
import resource
import sys
import traceback
import types
from importlib.util import spec_from_file_location


_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_MAX_FRAMES = 8


class Channel:
    """The socket to the server."""

    def __init__(self, descriptor):
        self._descriptor = descriptor

    def receive(self):
        """Return the next message, or `None` if the server is gone."""
        size = self._read(4)
        data = size and self._read(int.from_bytes(size, "big"))
        return json.loads(data) if data else None

    def send(self, message):
        data = json.dumps(message).encode()
        data = memoryview(len(data).to_bytes(4, "big") + data)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _read(self, size):
        data = b""
        while len(data) < size:
            part = os.read(self._descriptor, size - len(data))
            if not part:
                return None
            data += part
        return data


class Installed:
    """Finder of the few visible packages, whose folder cannot be listed."""

    def __init__(self, packages):
        self._packages = packages

    def find_spec(self, name, path=None, target=None):
        if path is not None or name not in self._packages:
            return None
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # or it would take memory for every core
        folder = self._packages[name]
        return spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])


class Interpreter:
    """Runs code in one module and reports its result."""

    def __init__(self, max_output, hints):
        self._max_output = max_output
        self._hints = hints
        self._num_calls = 0
        self._module = types.ModuleType("__main__")
        self._module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._module

    def run(self, code):
        """Return the value of the last expression, or the error, as text."""
        self._num_calls += 1
        name = f"<call {self._num_calls}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        value = error = None
        try:
            value = self._evaluate(code, name)
            if value is not None:
                value = self._cut(repr(value))
        except SystemExit as end:
            value = None
            if end.code not in (None, 0):
                error = f"SystemExit: {end.code}"
        except BaseException as problem:
            value, error = None, self._describe(problem, name)
        for stream in filter(None, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
            try:
                stream.flush()
            except BaseException:  # the code may have closed or replaced it
                continue
        return {"value": value, "error": error}

    def _evaluate(self, code, name):
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._module.__dict__)
        if last is None:
            return None
        return eval(compile(ast.Expression(last.value), name, "eval"), self._module.__dict__)

    def _describe(self, problem, name):
        trace = problem.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        try:
            report = traceback.TracebackException(type(problem), problem, trace, limit=-_MAX_FRAMES, compact=True)
            lines = "".join(report.format()).rstrip().split("\n")
            if not isinstance(problem, SyntaxError):  # where a mark says more than its line
                lines = [line for line in lines if line.strip(" ~^") or not line]
            text = "\n".join(lines)
        except BaseException:  # an error may be made so that it cannot be shown
            text = type(problem).__name__
        hint = self._hints.get("memory") if isinstance(problem, MemoryError) else None
        if isinstance(problem, OSError):
            hint = self._hints.get(errno.errorcode.get(problem.errno or 0))
        return self._cut(text) + (f"\n{hint}" if hint else "")

    def _cut(self, text):
        half = self._max_output // 2
        if len(text) <= 2 * half:
            return text
        return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"


def confine(settings):
    """Give up everything that the code is not to have. There is no way back."""
    for name, value in settings["limits"].items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except ValueError:
            if sys.platform == "linux":
                raise  # other systems do not have them all
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # As the user that we still are, who can reach all that is to be seen.
    ruleset = make_ruleset(libc, **settings["landlock"]) if settings["landlock"] else None
    if settings["user"] is not None:  # before the rest: the kernel forgets by whose death we end
        os.setgroups([])
        os.setresgid(settings["user"], settings["user"], settings["user"])
        os.setresuid(settings["user"], settings["user"], settings["user"])
    libc.mallopt(-8, 1)  # M_ARENA_MAX: further arenas are only address space, which is limited
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, nothing), "capset")
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")
    if os.getppid() != settings["parent"]:
        os._exit(1)  # the server ended before we could say that we want to end with it
    if ruleset is not None:
        check(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock restriction")
        os.close(ruleset)
    if settings["seccomp"]:
        program = bytes.fromhex(settings["seccomp"])
        # struct sock_fprog: the number of instructions, padding, and where they are.
        array = ctypes.create_string_buffer(program, len(program))
        count = (len(program) // 8).to_bytes(8, sys.byteorder)
        program = ctypes.create_string_buffer(count + ctypes.addressof(array).to_bytes(8, sys.byteorder), 16)
        check(libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def make_ruleset(libc, attributes, rules):
    """Return a Landlock ruleset that restricts opening to the files that a rule names."""
    attributes = bytes.fromhex(attributes)
    ruleset = check(libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0), "landlock")
    for path, rights in rules:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        check(libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), "landlock rule")
        os.close(place)
    return ruleset


def check(result, what):
    """End the process when a step of the confinement fails: better no sandbox than half of one."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def limit_cpu(seconds):
    """Limit CPU time on systems where the server cannot observe it."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, resource.RLIM_INFINITY))


def main():
    channel = Channel(os.dup(0))
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    settings = channel.receive()
    if settings is None:
        return
    os.environ.pop("PWD", None)  # bubblewrap's
    sys.path.append(settings["folder"])
    sys.meta_path.append(Installed(settings["packages"]))
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, "utf-8", "backslashreplace", line_buffering=True)
    _thread.stack_size(1 << 20)
    interpreter = Interpreter(settings["max_output"], settings["hints"])
    confine(settings)
    channel.send({"ready": True})
    while (request := channel.receive()) is not None:
        if settings["cpu"]:
            limit_cpu(settings["cpu"])
        channel.send({**interpreter.run(request["code"]), "number": request["number"]})
    os._exit(0)


main()
