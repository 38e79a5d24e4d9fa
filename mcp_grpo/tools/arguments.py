"""Check a call's arguments before they are sent, repair what may be repaired, and explain what is wrong."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jsonschema.exceptions import SchemaError, ValidationError
from mcp.types import JSONRPCRequest

from mcp_grpo.tools.schema_checks import UNUSABLE, Checker, matches


MAX_PROBLEMS = 5
MAX_VALUE_LENGTH = 40  # of a number that a repair repeats
MAX_PROBLEM_LENGTH = 200  # a message repeats the wrong value, which may be very long
SURELY_SHALLOW = 100  # brackets, which the SDK can write even if all are nested

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Arguments to send, a clause for each repair, and for the policy why they cannot be sent, if they cannot."""

    arguments: Mapping[str, Any]
    repairs: tuple[str, ...] = ()
    refusal: str | None = None


def compiled(schema: Schema) -> Checker:
    """Compile a tool's input schema. Raises `SchemaError` if it is not a schema, or cannot be read in a short time."""
    return Checker(schema)


def unsendable(arguments: Mapping[str, Any]) -> str | None:
    """
    Return why arguments cannot be written as JSON, if they cannot: NaN, half a surrogate pair, or hundreds of nested lists
    parse well, but could take the connection down.
    """
    try:
        text = json.dumps(arguments, allow_nan=False, ensure_ascii=False)  # or NaN would silently arrive as null
        text.encode()
        if text.count("[") + text.count("{") > SURELY_SHALLOW:
            params = {"_": {"_": {"_": dict(arguments)}}}  # deeper than the message will be
            JSONRPCRequest(jsonrpc="2.0", id=0, method="tools/call", params=params).model_dump_json()
    except (ValueError, TypeError, RecursionError):
        return "the arguments are not valid JSON text, or nested too deeply"
    return None


def problems(checker: Checker, arguments: Mapping[str, Any]) -> list[str]:
    """Return one short clause per problem, at most a few."""
    found: list[str] = []
    try:
        for error in checker.errors(arguments):
            found.extend(clause for clause in _clauses(error) if clause not in found)
            if len(found) > MAX_PROBLEMS:
                return [*found[:MAX_PROBLEMS], "and more"]
    except UNUSABLE:
        return []  # not the policy's fault; the server checks the call anyway
    return found


def renamed(arguments: Mapping[str, Any], aliases: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Rename aliases to the arguments they stand for, unless both are given; return a clause for each."""
    given, repairs = dict(arguments), list[str]()
    for alias in arguments:
        name = aliases.get(alias)
        if name is not None and name not in given:
            given[name] = given.pop(alias)
            repairs.append(f"`{alias}` was taken for `{name}`")
    return given, repairs


def coerced(checker: Checker, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """
    Convert values of a wrong type to what they clearly spell: `"3"` to a number, `'["a"]'` to a list, 3 to a text. Only what
    the schema finds wrong as written and right as converted is changed. Return a clause for each change.
    """
    try:
        conversions: dict[str, Any] = {}
        for name, items in _wrong(checker, arguments).items():
            conversion = _converted_items(arguments[name], items)
            if conversion is not arguments[name]:
                conversions[name] = conversion
        for name in _wrong(checker, {**arguments, **conversions}):
            conversions.pop(name, None)
    except UNUSABLE:
        return dict(arguments), []
    repairs = [_repair(name, arguments[name], conversion) for name, conversion in conversions.items()]
    return {**arguments, **conversions}, repairs


def _wrong(checker: Checker, arguments: Mapping[str, Any]) -> dict[str, set[int]]:
    """Return the arguments that are wrong; for a list, which items are, or none if the whole is."""
    found: dict[str, set[int]] = {}
    for error in checker.errors(arguments):
        name, *inner = error.absolute_path or (None,)
        if name is not None:
            found.setdefault(str(name), set()).update(step for step in inner[:1] if isinstance(step, int))
    return found


def _converted_items(value: Any, items: set[int]) -> Any:
    """Convert a value, or the given items of a list; return the same object if nothing changes."""
    if not isinstance(value, list):
        return _converted(value)
    values = cast("list[Any]", value)
    read = [_converted(item) if not items or i in items else item for i, item in enumerate(values)]
    return read if any(new is not old for new, old in zip(read, values, strict=True)) else values


def _converted(value: Any) -> Any:
    """Convert a text or a number to the other value it spells; return the same object if there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(
            value.lower() if value in ("True", "False") else value, parse_constant=_finite, parse_float=_finite
        )
    except (ValueError, RecursionError):
        return value
    return value if isinstance(read, str) or unsendable({"_": read}) else read


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"JSON has no {text}")
    return number


def _repair(name: str, written: Any, read: Any) -> str:
    if isinstance(written, list):
        num_items = sum(new is not old for new, old in zip(read, cast("list[Any]", written), strict=True))
        return f"{num_items} of the items of `{name}` were read as what they spell"
    return f"`{name}` was read as {_in_words(read)}, not as {'text' if isinstance(written, str) else 'a number'}"


def _in_words(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None:
        return "null"
    text = json.dumps(value)
    if len(text) > MAX_VALUE_LENGTH:
        return "text" if isinstance(value, str) else "a number"
    kind = "text" if isinstance(value, str) else "boolean" if isinstance(value, bool) else "number"
    return f"the {'integer' if type(value) is int else kind} {text}"


def _clauses(error: ValidationError) -> Iterator[str]:
    path = [str(step) for step in error.absolute_path]
    instance: Any = error.instance
    if error.validator == "required":
        for name in cast("list[str]", error.validator_value):
            if name not in instance:
                yield f"`{'.'.join([*path, name])}` is missing"
    elif error.validator == "additionalProperties" and error.validator_value is False:
        schema = cast(Schema, error.schema)
        known: Schema = schema.get("properties", {})
        patterns: Schema = schema.get("patternProperties", {})
        for name in instance:
            if name not in known and not any(matches(pattern, name) for pattern in patterns):
                yield f"`{'.'.join([*path, name])}` is not an argument"
    else:
        message = error.message
        if len(message) > MAX_PROBLEM_LENGTH:
            message = f"{message[: MAX_PROBLEM_LENGTH // 2]} ... {message[-MAX_PROBLEM_LENGTH // 2 :]}"
        yield f"`{'.'.join(path)}`: {message}" if path else message


def signature(schema: Schema) -> str:
    """Describe the arguments of a schema: `"city (string, required), days (integer)"`."""
    required: Any = schema.get("required")
    required = cast("list[Any]", required) if isinstance(required, list) else []
    return ", ".join(
        f"{name} ({_type(value)}{', required' if name in required else ''})"
        for name, value in properties(schema).items()
    )


def properties(schema: Schema) -> Schema:
    """Return the schemas of the arguments by name; the schema need not be valid."""
    named: Any = schema.get("properties")
    return cast(Schema, named) if isinstance(named, Mapping) else {}


def _type(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "anything"
    fields = cast(Schema, schema)
    if "enum" in fields:
        return "one of " + ", ".join(repr(value) for value in fields["enum"])
    if isinstance(kind := fields.get("type"), str):
        return kind
    if isinstance(kind, list):
        return " or ".join(str(option) for option in cast("list[Any]", kind))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := fields.get(key), list):
            return " or ".join(dict.fromkeys(_type(option) for option in cast("list[Any]", options)))
    return "object" if "$ref" in fields else "anything"


__all__ = [
    "Prepared",
    "SchemaError",
    "coerced",
    "compiled",
    "problems",
    "properties",
    "renamed",
    "signature",
    "unsendable",
]
