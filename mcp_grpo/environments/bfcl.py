"""
BFCL v4 multi-turn (Patil et al.): conversations with scripted users over eight stateful APIs, checked by states and responses.

Tools, conversations, executor and checker are those of the package `bfcl-eval`; nothing of it is copied here.
"""

import ast
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from mcp.types import Tool

from mcp_grpo.environments.environment import Environment
from mcp_grpo.environments.functions import function_server
from mcp_grpo.environments.modules import ModuleSet
from mcp_grpo.errors import SettingsError
from mcp_grpo.tools.setup import start_states
from mcp_grpo.types import ResultKind, StopReason, Task, Trajectory


SERVER = "bfcl"
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
HELD_OUT = 4  # every so many conversations, with all their variants, are kept for testing
ERRORS = ("^Error during execution: ", '^\\{"error": ')  # how tools say that they failed

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_PACKAGE = "bfcl_eval"
_CHECKS = f"{_PACKAGE}.eval_checker.multi_turn_eval.multi_turn_checker"
_EXECUTION = f"{_PACKAGE}.eval_checker.multi_turn_eval.multi_turn_utils"
_BACKENDS = f"{_PACKAGE}.constants.executable_backend_config"
_PROMPTS = f"{_PACKAGE}.constants.default_prompts"


def make_bfcl(category: str | None = None) -> Environment:
    """
    Make the environment.

    Args:
        category (`str`, *optional*):
            One of `"base"`, `"miss_func"`, `"miss_param"` and `"long_context"`; all of them, if not given.

    Returns:
        [`Environment`]: 200 conversations of each category in the splits `"train"` and `"test"`, which share none of the conversations
        that the categories vary.
    """
    if find_spec(_PACKAGE) is None:
        raise SettingsError("BFCL is not installed. Run `pip install --no-deps bfcl-eval==2026.3.23 mpmath`.")
    if category not in (None, *CATEGORIES):
        raise SettingsError(f"`category` of BFCL must be one of {CATEGORIES}, got {category!r}.")
    rows = [row for one in CATEGORIES if category in (None, one) for row in _rows(one)]
    return Environment(
        name="BFCL v4 multi-turn",
        servers={SERVER: {"server": make_server, "x-mcp-grpo": {"error_patterns": list(ERRORS)}}},
        splits={split: [row for row in rows if row["split"] == split] for split in ("train", "test")},
        reward_funcs=(conversation_outcome,),
        is_success=is_right,
        max_turns=import_module(_PROMPTS).MAXIMUM_STEP_LIMIT + 1,  # and a message, which the authors do not count
    )


def make_server(task: Task | None) -> Any:
    """Make the server of one trajectory, with the APIs in the state that its conversation begins with."""
    execute = _execution(start_states(task).get(SERVER, {}))
    return function_server(SERVER, _tools(), lambda name, arguments: execute([_written(name, arguments)])[0])


def conversation_outcome(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    Pay 1 for a conversation that is right by BFCL's own check, and 0 otherwise.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            Other arguments that the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_right(attempt)) for attempt in trajectory]


def is_right(trajectory: Trajectory) -> bool:
    """Tell whether a conversation is right by BFCL's own check: states and responses after each message of the user."""
    task, rounds = trajectory.task, trajectory.rounds
    ground_truth = task.metadata["ground_truth"]
    if trajectory.stop_reason is not StopReason.ANSWERED or len(rounds) != len(ground_truth):
        return False  # they call it forced to terminate
    steps = [
        [
            [_written(each.call.name, each.call.arguments) for each in step if each.result.kind in _EXECUTED]
            for _, step in groupby(one.exchanges, key=lambda exchange: exchange.turn)
        ]
        for one in rounds
    ]
    entry = {"id": task.task_id, **start_states(task)[SERVER]}
    checks = ModuleSet(_code(), lambda name: None).load(_CHECKS)
    found = checks.multi_turn_checker([[s for s in each if s] for each in steps], ground_truth, entry, "", "policy")
    return bool(found["valid"])


_EXECUTED = (ResultKind.OK, ResultKind.TOOL_ERROR)


def _execution(setup: Mapping[str, Any]) -> Callable[[list[str]], list[str]]:
    """Return the authors' executor, with instances of its own."""
    module = ModuleSet(_code(), lambda name: None).load(_EXECUTION)
    initial, classes = setup.get("initial_config", {}), setup.get("involved_classes", [])
    is_long = bool(setup.get("long_context"))
    return lambda calls: module.execute_multi_turn_func_call(calls, initial, classes, "m", "t", long_context=is_long)[
        0
    ]


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    """
    Write a call as the executor reads it, by `eval`: the name is a tool's, and what a policy wrote is a literal in it, of JSON values.
    """
    return f"{name}(**{dict(arguments)!r})"


@cache
def _code() -> dict[str, Any]:
    """Compile the executor and the checker, which keep instances in global variables."""
    found: dict[str, Any] = {}
    for name in (_CHECKS, _EXECUTION):
        path = _root() / "eval_checker" / "multi_turn_eval" / f"{name.rpartition('.')[2]}.py"
        found[name] = compile(path.read_bytes(), str(path), "exec")
    return found


@cache
def _root() -> Path:
    spec = find_spec(_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _lines(*path: str) -> list[Any]:
    return [json.loads(line) for line in _root().joinpath("data", *path).read_text(encoding="utf-8").splitlines()]


@cache
def _documented() -> dict[str, list[dict[str, Any]]]:
    """Return the documented functions of each class of the multi-turn conversations."""
    files = import_module(_BACKENDS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    used = {name for one in CATEGORIES for entry in _entries(one) for name in entry["involved_classes"]}
    return {name: _lines("multi_turn_func_doc", file) for name, file in files.items() if name in used}


@cache
def _tools() -> list[Tool]:
    tools = [
        Tool(name=one["name"], description=one["description"], input_schema=_schema(one["parameters"]))
        for functions in _documented().values()
        for one in functions
    ]
    # The authors check no types, and a few of their own calls have others than the documented ones, which are then allowed, too.
    schemas = {tool.name: tool.input_schema["properties"] for tool in tools}
    rounds = [each for one in CATEGORIES for row in _rows(one) for each in row["solution"]["rounds"]]
    for call in (call for each in rounds for step in each["steps"] for call in step["calls"]):
        for name, value in call["arguments"].items():
            schema = schemas[call["name"]][name]
            if isinstance(value, str) and schema["type"] in ("integer", "number", "boolean"):
                schema["type"] = [schema["type"], "string"]
    return tools


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema for one with Python's names of types."""
    schema = dict(given) | {"type": _TYPES.get(given.get("type", "any"), given.get("type", "string"))}
    if "properties" in given:
        schema["properties"] = {name: _schema(inner) for name, inner in given["properties"].items()}
    if "items" in given:
        schema["items"] = _schema(given["items"])
    return schema


@cache
def _entries(category: str) -> list[dict[str, Any]]:
    return _lines(f"BFCL_v4_multi_turn_{category}.json")


def _rows(category: str) -> list[dict[str, Any]]:
    answers = {
        one["id"]: one["ground_truth"] for one in _lines("possible_answer", f"BFCL_v4_multi_turn_{category}.json")
    }
    return [_row(entry, answers[entry["id"]], category, number) for number, entry in enumerate(_entries(category))]


def _row(entry: Mapping[str, Any], answer: Sequence[Sequence[str]], category: str, number: int) -> dict[str, Any]:
    missed = {
        turn: [name for name in names if not _is_called(name, answer[: int(turn)])]
        for turn, names in entry.get("missed_function", {}).items()
    }
    later = {name for names in missed.values() for name in names}
    functions = [one["name"] for name in entry["involved_classes"] for one in _documented()[name]]
    more_tools = import_module(_PROMPTS).DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    said = [messages[0]["content"] if messages else more_tools for messages in entry["question"]]
    turns = [{"content": text, "tools": missed.get(str(index), [])} for index, text in enumerate(said)]
    rounds = [
        {"steps": [{"calls": [_call(one, entry["involved_classes"])]} for one in calls], "final": "Done."}
        for calls in answer
    ]
    setup = {"initial_config": entry["initial_config"], "involved_classes": entry["involved_classes"]}
    return {
        "task_id": entry["id"],
        "prompt": entry["question"][0],
        "user_turns": turns[1:],
        "tools": [name for name in functions if name not in later],
        "family": category,
        "split": "test" if number % HELD_OUT == HELD_OUT - 1 else "train",
        "setup": {SERVER: setup | {"long_context": category == "long_context"}},
        "ground_truth": answer,
        "solution": {"rounds": rounds},
    }


def _is_called(name: str, answer: Sequence[Sequence[str]]) -> bool:
    """Tell whether the ground truth has a call of a function: one that is held back until later cannot be meant to be."""
    return any(written.startswith(f"{name}(") for calls in answer for written in calls)


def _call(written: str, classes: Sequence[str]) -> dict[str, Any]:
    """Read a written call, whose arguments may have no names, as one of a tool."""
    call: Any = ast.parse(written.strip(), mode="eval").body
    values = [ast.literal_eval(value) for value in call.args]
    names = _parameters(call.func.id, tuple(classes)) if values else ()
    named = dict(zip(names, values, strict=False)) | {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    return {"name": call.func.id, "arguments": named}


@cache
def _parameters(name: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    homes = import_module(_BACKENDS).CLASS_FILE_PATH_MAPPING
    kinds = [getattr(import_module(homes[one]), one) for one in classes]
    method = next(getattr(kind, name) for kind in kinds if hasattr(kind, name))
    return tuple(inspect.signature(method).parameters)[1:]
