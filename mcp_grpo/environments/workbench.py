"""
WorkBench (Styles et al., 2024): office tasks whose outcome is the state of five sandbox databases.

Tools, tasks, start states and the check of the end state are those of a clone of `olly-styles/WorkBench`; nothing of it is copied here.
"""

import ast
import inspect
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from mcp.types import Tool, ToolAnnotations

from mcp_grpo.environments.environment import Environment
from mcp_grpo.environments.functions import function_server
from mcp_grpo.environments.modules import ModuleSet, compiled_modules
from mcp_grpo.environments.workbench_lookups import Lookups
from mcp_grpo.errors import SettingsError
from mcp_grpo.tools.secrets import shown_error
from mcp_grpo.types import Task


logger = logging.getLogger(__name__)

SERVER = "workbench"
STATE_TOOL = "outcome"  # hidden from the policy
HELD_OUT = 4  # every so many templates of a domain are kept for testing
MAX_TURNS = 20  # the authors' limit
MAX_RESULT_TOKENS = 2500  # the longest that the authors' solutions read, 2,397 by Qwen's tokenizer
SIDE_EFFECTS = "have unwanted side effects"

_TOOLKITS, _CHECKS = "src.tools.toolkits", "src.evals.utils"
_QUERIES = "data/processed/queries_and_answers"
_SUFFIX = "_queries_and_answers.csv"
_NOW = "HARDCODED_CURRENT_TIME"
_DOMAIN_NAMES = {"crm": "customer_relationship_manager"}  # as some tasks call it, but not the toolkits
_MAX_STEPS = 1_000_000  # that a search may take in one cell of a table
_CELL = 64  # characters of a long cell, of those that are searched
_MAX_PATTERN = 1000  # characters
_ESCAPED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # characters without a meaning, and sets of them
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_FIXED = re.compile(r"\{\d+\}")
_STRAY_BRACES = re.compile(r"([{}])\1")  # doubled for a template of LangChain


def make_workbench(data: str | Path, tools: str = "domains") -> Environment:
    """
    Make the environment.

    Args:
        data (`str` or `Path`):
            A clone of `olly-styles/WorkBench`.
        tools (`str`, *optional*, defaults to `"domains"`):
            Tools that a task is given: those of its `"domains"`, or `"all"`. The authors report both.

    Returns:
        [`Environment`]: 690 tasks in the splits `"train"` and `"test"`, which have no template in common.
    """
    if tools not in ("domains", "all"):
        raise SettingsError(f"`tools` of WorkBench must be 'domains' or 'all', got {tools!r}.")
    bench = WorkBench(Path(data))
    rows = bench.rows(with_all_tools=tools == "all")
    return Environment(
        name="WorkBench",
        servers={SERVER: {"server": bench.server, "x-mcp-grpo": {"state_tool": STATE_TOOL, "coerce_arguments": True}}},
        splits={split: [row for row in rows if row["split"] == split] for split in ("train", "test")},
        max_turns=MAX_TURNS,
        max_result_tokens=MAX_RESULT_TOKENS,
        flaws={SIDE_EFFECTS: lambda states: states.get(SERVER, {}).get("side_effects", False)},
    )


class WorkBench:
    """A clone of the repository: its code is compiled once, and its tables are read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._code: dict[str, CodeType] = compiled_modules(root, "src") if (root / "src").is_dir() else {}
        if not {_TOOLKITS, _CHECKS} <= self._code.keys() or not (root / _QUERIES).is_dir():
            raise SettingsError(
                f"{str(root)!r} is not WorkBench: it has no `src/tools/toolkits.py`, `src/evals/utils.py` or `{_QUERIES}`. Name a clone "
                "of https://github.com/olly-styles/WorkBench."
            )
        self._tables: dict[str, pd.DataFrame] = {}  # by path
        self._stand_ins = {
            "pandas": _Overlay(pd, read_csv=self._read_csv),
            "langchain.tools": SimpleNamespace(tool=_tool),
            "numpy": _Overlay(np, random=np.random.RandomState()),  # one of their modules sets the seed
            "random": random.Random(),
        }
        self._judging = Lock()
        self._checks = self.fresh().load(_CHECKS)
        self._is_correct, execute = self._checks.is_correct, self._checks.execute_actions_and_reset_state
        self._after = lru_cache(maxsize=128)(lambda actions: execute(list(actions)))
        toolkits = self.fresh().load(_TOOLKITS)
        self.searches = {tool.name for tool in toolkits.tools_without_side_effects}
        self.tools = [_described(tool, is_read=tool.name in self.searches) for tool in toolkits.all_tools]
        self.tools.append(Tool(name=STATE_TOOL, description="", input_schema={"type": "object", "properties": {}}))

    def fresh(self) -> ModuleSet:
        """Return modules in their start state."""
        return ModuleSet(self._code, self._stand_in)

    def server(self, task: Task | None) -> Any:
        """Make the server of one trajectory."""
        office = _Office(self, () if task is None else task.metadata["actions"])
        return function_server(SERVER, self.tools, office.call)

    def judge(self, modules: ModuleSet, actions: Sequence[str]) -> dict[str, bool]:
        """Compare the state of modules with that after the right actions, by the authors' own functions."""
        checks, live, attempted = self._checks, modules.load(_CHECKS), list[str]()
        live.DOMAINS = []  # so that its function, which resets these and then copies the tables, only copies them
        left = live.execute_actions_and_reset_state([])
        with self._judging:
            right = self._after(tuple(actions))
            # Equal tables need not be compared in small letters, which would take most of the time.
            is_equal = [
                isinstance(table, pd.DataFrame) and table.equals(other)
                for table, other in zip(left, right, strict=True)
            ]

            def shortened(states: Sequence[Any]) -> list[Any]:
                return [pd.DataFrame() if skip else copy(state) for state, skip in zip(states, is_equal, strict=True)]

            # Theirs runs written calls by `eval`, which is not for what a policy writes: its calls have been made already.
            checks.execute_actions_and_reset_state = lambda given: shortened(left if given is attempted else right)
            try:
                is_correct = bool(self._is_correct(attempted, list(actions), ""))
                checks.execute_actions_and_reset_state = lambda given: left
                checks.is_correct = lambda *_: is_correct
                has_side_effects = bool(checks.has_side_effects(attempted, list(actions)))
            except Exception as error:  # values that the comparison does not expect, which are not right
                logger.warning(
                    "WorkBench's check failed at what an attempt left behind, which counts as wrong.\n%s",
                    shown_error(error),
                )
                is_correct, has_side_effects = False, True
        return {"correct": is_correct, "side_effects": has_side_effects}

    def rows(self, *, with_all_tools: bool) -> list[dict[str, Any]]:
        """Return all tasks."""
        opening = {"role": "system", "content": self._opening}
        rows: list[dict[str, Any]] = []
        for path in sorted((self._root / _QUERIES).glob(f"*{_SUFFIX}")):
            domain = path.name.removesuffix(_SUFFIX)
            table = pd.read_csv(path, dtype=str)
            templates = list(dict.fromkeys(table["base_template"]))
            for number, row in enumerate(table.to_dict(orient="records")):
                actions = ast.literal_eval(row["answer"])
                prompt = [opening, {"role": "user", "content": row["query"]}]
                place = templates.index(row["base_template"])
                domains = [_DOMAIN_NAMES.get(one, one) for one in ast.literal_eval(row["domains"])]
                tools = [tool.name for tool in self._checks.get_toolkits(domains)]
                steps, is_grounded = self._lookups.complete(
                    prompt, list(map(_call, actions)), list(map(_called, tools))
                )
                rows.append(
                    {
                        "task_id": f"{domain}-{number}",
                        "prompt": prompt,
                        "tools": None if with_all_tools else tools,
                        "family": domain,
                        "template": row["base_template"],
                        "split": "test" if place % HELD_OUT == HELD_OUT - 1 else "train",
                        "actions": actions,
                        "expected_state": {SERVER: {"correct": True}},
                        "solution": {"steps": steps, "final": "Done."},
                        "grounded": is_grounded,
                    }
                )
        return rows

    @cached_property
    def _lookups(self) -> Lookups:
        """Return the searches in their start state, which make the authors' solutions such that they can be imitated."""
        tools = self.fresh().load(_TOOLKITS).tools_without_side_effects
        now = vars(self._checks)[_NOW].to_pydatetime()
        return Lookups({_called(tool.name): tool.func for tool in tools}, now, self.tools)

    @cached_property
    def _opening(self) -> str:
        """Return the authors' line on date and rules, which they put before an agent's prompt."""
        tree = ast.parse((self._root / "src/evals/utils.py").read_bytes())
        (found,) = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            and any(isinstance(inner, ast.Name) and inner.id == _NOW for inner in ast.walk(node))
        ]
        return eval(compile(ast.Expression(found), _CHECKS, "eval"), vars(self._checks))

    def _stand_in(self, name: str) -> Any:
        if name in self._stand_ins:
            return self._stand_ins[name]
        return _AGENTS if name.startswith("langchain") else None

    def _read_csv(self, path: str, **options: Any) -> pd.DataFrame:
        if path not in self._tables:
            file = self._root / path
            if not file.is_file() and file.name == "email_addresses.csv":  # of a copy without the raw data
                found = pd.DataFrame({"email_address": self._addresses()})
            else:
                found = pd.read_csv(file, **options)
            # Newer versions of pandas give text a type of its own, which refuses a date in a column of dates as text.
            self._tables[path] = found.astype(object)
        return self._tables[path].copy()

    def _addresses(self) -> list[str]:
        """Return the addresses of colleagues in the tables: those of the commonest domain."""
        tables = [pd.read_csv(path, dtype=str) for path in sorted((self._root / "data/processed").glob("*.csv"))]
        texts = {text for table in tables for column in table for text in table[column].dropna()}
        found = sorted(text for text in texts if re.fullmatch(r"[^@\s]+@[^@\s]+", text))
        ((company, _),) = Counter(address.partition("@")[2] for address in found).most_common(1)
        return [address for address in found if address.endswith(f"@{company}")]


class _Office:
    """One trajectory's modules, and what the task wants to be done with them."""

    def __init__(self, bench: WorkBench, actions: Sequence[str]) -> None:
        self._bench, self._actions = bench, actions
        self._modules = bench.fresh()
        self._longest = _CELL  # text that may be in a cell

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == STATE_TOOL:
            return json.dumps(self._bench.judge(self._modules, self._actions))
        texts = {key: str(value) for key, value in arguments.items()}
        if name in self._bench.searches:
            for text in texts.values():
                _check_pattern(text, self._longest)
        else:
            self._longest = max([self._longest, *map(len, texts.values())])
        return str(self._functions[name](**texts))

    @cached_property
    def _functions(self) -> dict[str, Callable[..., Any]]:
        return {tool.name: tool.func for tool in self._modules.load(_TOOLKITS).all_tools}


class _Overlay:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Agents:
    """Stands for everything that the authors import to run agents."""

    def __getattr__(self, name: str) -> Any:
        return None


_AGENTS = _Agents()


@dataclass(frozen=True)
class _Tool:
    """A stand-in for the object that the authors' decorator makes of a function."""

    name: str
    func: Callable[..., Any]


def _tool(name: str, **_: Any) -> Callable[[Callable[..., Any]], _Tool]:
    return lambda function: _Tool(name, function)


def _check_pattern(text: str, longest: int) -> None:
    """
    Refuse a text that would be searched for too long. The authors' tools read it as a regular expression, which cannot be broken off:
    with every repetition in it, the time grows by a power of the length of what is searched.
    """
    if len(text) <= _MAX_PATTERN:
        plain = _ESCAPED.sub("x", text)
        is_nested = _REPEATED_GROUP.search(plain) is not None
        plain = _FIXED.sub("", plain).removesuffix(".*")
        num_repeats, num_options = (sum(map(plain.count, kind)) for kind in ("*+{", "?|"))
        if not is_nested and longest ** (num_repeats + 1) * 2**num_options <= _MAX_STEPS:
            return
    elif not set(text) & set("*+?{|"):
        return
    raise ValueError(f"Searching for {text[:100]!r} could take too long. Search for plain text.")


def _described(tool: Any, *, is_read: bool) -> Tool:
    """Return how a tool is described to the policy: by its docstring, whose parameters become the schema."""
    text = _STRAY_BRACES.sub(r"\1", inspect.getdoc(tool.func) or "")
    sections = re.split(r"^(\w+)\n-+\n", text, flags=re.MULTILINE)
    parts = dict(zip(["", *sections[1::2]], map(str.strip, sections[::2]), strict=True))
    told = re.split(r"^(\w+) ?: .*\n", parts.pop("Parameters", ""), flags=re.MULTILINE)
    about = dict(zip(told[1::2], (" ".join(part.split()) for part in told[2::2]), strict=True))
    description = "\n\n".join(f"{title}\n{part}".strip() for title, part in parts.items())
    properties = {
        name: {"type": "string", "description": about.get(name, "")}
        for name in inspect.signature(tool.func).parameters
    }
    return Tool(
        name=tool.name,
        description=description,
        input_schema={"type": "object", "properties": properties, "additionalProperties": False},
        annotations=ToolAnnotations(read_only_hint=is_read),
    )


def _called(tool: str) -> str:
    """Return the name by which a policy calls a tool."""
    return tool.replace(".", "_")


def _call(action: str) -> dict[str, Any]:
    """Read a written call, such as `calendar.delete_event.func(event_id="1")`, as one of a tool."""
    call: Any = ast.parse(action, mode="eval").body
    tool = ast.unparse(call.func).removesuffix(".func")
    return {
        "name": _called(tool),
        "arguments": {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords},
    }
