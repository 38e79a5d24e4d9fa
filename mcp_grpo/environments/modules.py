"""Load modules of somebody else's repository anew for each trajectory, since some keep their state in global variables."""

import builtins
import pathlib
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any


def compiled_modules(root: pathlib.Path, package: str) -> dict[str, CodeType]:
    """Compile every module of a package below a folder, by its dotted name."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): compile(path.read_bytes(), str(path), "exec")
        for path in sorted((root / package).rglob("*.py"))
        if path.stem != "__init__"
    }


class ModuleSet:
    """
    Modules that import each other and stand-ins for what they need, seen by nobody else: `sys.modules` is left as it is.

    Args:
        code (`Mapping[str, CodeType]`):
            The modules' code by dotted name.
        stand_in (`Callable[[str], Any]`):
            Returns what an import of another name gives, or `None` for what is installed.
    """

    def __init__(self, code: Mapping[str, CodeType], stand_in: Callable[[str], Any]) -> None:
        self._code = code
        self._stand_in = stand_in
        self._loaded: dict[str, ModuleType] = {}
        self._builtins = vars(builtins) | {"__import__": self._import}

    def load(self, name: str) -> Any:
        """Return a module, run on first use."""
        if name not in self._loaded:
            self._loaded[name] = module = ModuleType(name)
            vars(module)["__builtins__"] = self._builtins
            exec(self._code[name], vars(module))
        return self._loaded[name]

    def _import(self, name: str, scope: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name in self._code and fromlist:
            return self.load(name)
        if fromlist and any(f"{name}.{item}" in self._code for item in fromlist):
            return SimpleNamespace(**{item: self.load(f"{name}.{item}") for item in fromlist})
        found = self._stand_in(name)
        return builtins.__import__(name, scope, local, fromlist, level) if found is None else found
