"""Checks a call's arguments before they are sent, mends what may be mended, and says what is wrong with the rest."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from mcp.types import JSONRPCRequest
from referencing import Registry
from referencing.exceptions import Unresolvable


MAX_PROBLEMS = 5
MAX_PROBLEM_LENGTH = 200  # a message repeats the value that is wrong, and that value may be very long
MAX_NUMBER_LENGTH = 40  # of a number that a repair repeats

# The schema cannot be used after all: it refers to what is not there, to itself, or has a pattern of another dialect.
SURELY_SHALLOW = 100  # brackets, of which the SDK can write as many inside each other

_UNUSABLE = (Unresolvable, RecursionError, re.error, ArithmeticError, ValueError)

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """
    Arguments as they are to be sent.

    Args:
        arguments (`Mapping[str, Any]`):
            The arguments, mended.
        repairs (`tuple[str, ...]`, *optional*):
            What was mended, one clause each.
        refusal (`str`, *optional*):
            A sentence for the policy that says why they cannot be sent, if they cannot.
    """

    arguments: Mapping[str, Any]
    repairs: tuple[str, ...] = ()
    refusal: str | None = None


def compiled(schema: Schema) -> Validator:
    """
    A validator for a tool's input schema.

    Args:
        schema (`Mapping[str, Any]`):
            JSON schema of the arguments.

    Returns:
        `Validator`: It looks nothing up outside the schema. Raises `SchemaError` if the schema is not one.
    """
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(dict(schema))
    return kind(schema, registry=Registry())  # the default one would fetch foreign references over the network


def unsendable(arguments: Mapping[str, Any]) -> str | None:
    """
    Why arguments cannot be written as JSON, if they cannot.

    Args:
        arguments (`Mapping[str, Any]`):
            Arguments, as the policy wrote them. NaN, half of a surrogate pair, or hundreds of nested lists parse well but
            cannot be sent, and could take the connection down with them.

    Returns:
        `str` or `None`: What is wrong, or `None`.
    """
    try:
        text = json.dumps(arguments, allow_nan=False, ensure_ascii=False)  # or NaN would silently arrive as null
        text.encode()
        if text.count("[") + text.count("{") > SURELY_SHALLOW:
            params = {"_": {"_": {"_": dict(arguments)}}}  # deeper than the message will be, so that that fits too
            JSONRPCRequest(jsonrpc="2.0", id=0, method="tools/call", params=params).model_dump_json()
    except (ValueError, TypeError, RecursionError):
        return "the arguments are not valid JSON text, or nested too deeply"
    return None


def problems(validator: Validator, arguments: Mapping[str, Any]) -> list[str]:
    """
    What is wrong with arguments.

    Args:
        validator (`Validator`):
            From [`compiled`].
        arguments (`Mapping[str, Any]`):
            Arguments, as the policy wrote them.

    Returns:
        `list[str]`: One short clause per problem, at most a few; empty if there is none.
    """
    found: list[str] = []
    try:
        for error in validator.iter_errors(dict(arguments)):
            found.extend(clause for clause in _clauses(error) if clause not in found)
            if len(found) > MAX_PROBLEMS:
                return [*found[:MAX_PROBLEMS], "and more"]
    except _UNUSABLE:
        return []  # not the policy's doing, so the call goes to the server, which checks it anyway
    return found


def renamed(arguments: Mapping[str, Any], aliases: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """
    Take aliases for the arguments they mean.

    Args:
        arguments (`Mapping[str, Any]`):
            Arguments, as the policy wrote them.
        aliases (`Mapping[str, str]`):
            Arguments by their aliases. Where both were written, the alias stays as it is.

    Returns:
        `tuple[dict[str, Any], list[str]]`: The arguments, and a clause per alias.
    """
    mended, repairs = dict(arguments), list[str]()
    for alias in arguments:
        name = aliases.get(alias)
        if name is not None and name not in mended:
            mended[name] = mended.pop(alias)
            repairs.append(f"`{alias}` was taken for `{name}`")
    return mended, repairs


def coerced(validator: Validator, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """
    Read values of a wrong type as what they plainly spell: `"3"` as a number, `'["a"]'` as a list, 3 as a text.

    Args:
        validator (`Validator`):
            From [`compiled`]. It has the last word: only what it finds wrong as written and right as read is changed.
        arguments (`Mapping[str, Any]`):
            Arguments that it finds something wrong with.

    Returns:
        `tuple[dict[str, Any], list[str]]`: The arguments, and a clause per argument that was changed.
    """
    try:
        readings: dict[str, Any] = {}
        for name, items in _wrong(validator, arguments).items():
            reading = _reading_of_items(arguments[name], items)
            if reading is not arguments[name]:
                readings[name] = reading
        for name in _wrong(validator, {**arguments, **readings}):
            readings.pop(name, None)
    except _UNUSABLE:
        return dict(arguments), []
    repairs = [_repair(name, arguments[name], reading) for name, reading in readings.items()]
    return {**arguments, **readings}, repairs


def _wrong(validator: Validator, arguments: Mapping[str, Any]) -> dict[str, set[int]]:
    """The arguments whose values are wrong; of lists, the items that are, or none to say that the whole is."""
    found: dict[str, set[int]] = {}
    for error in validator.iter_errors(dict(arguments)):
        name, *inner = error.absolute_path or (None,)
        if name is not None:
            found.setdefault(str(name), set()).update(step for step in inner[:1] if isinstance(step, int))
    return found


def _reading_of_items(value: Any, items: set[int]) -> Any:
    """A value, or the given items of a list, as what they spell; the very same object if that is what they are."""
    if not isinstance(value, list):
        return _reading(value)
    values = cast("list[Any]", value)
    read = [_reading(item) if not items or i in items else item for i, item in enumerate(values)]
    return read if any(new is not old for new, old in zip(read, values, strict=True)) else values


def _reading(value: Any) -> Any:
    """The other value that a text or a number spells; the very same object if it spells none."""
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
    text = json.dumps(value)
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return "a list"
        case bool():
            return f"the boolean {text}"
        case str():
            return f"the text {text}"
        case _ if len(text) > MAX_NUMBER_LENGTH:
            return "a number"
        case int():
            return f"the integer {text}"
        case _:
            return f"the number {text}"


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
            if name not in known and not any(re.search(pattern, name) for pattern in patterns):
                yield f"`{'.'.join([*path, name])}` is not an argument"
    else:
        message = error.message
        if len(message) > MAX_PROBLEM_LENGTH:
            message = f"{message[: MAX_PROBLEM_LENGTH // 2]} ... {message[-MAX_PROBLEM_LENGTH // 2 :]}"
        yield f"`{'.'.join(path)}`: {message}" if path else message


def signature(schema: Schema) -> str:
    """
    The arguments a schema asks for, in words.

    Args:
        schema (`Mapping[str, Any]`):
            JSON schema of the arguments.

    Returns:
        `str`: Such as `"city (string, required), days (integer)"`; empty if there are none.
    """
    required: Any = schema.get("required")
    required = cast("list[Any]", required) if isinstance(required, list) else []
    return ", ".join(
        f"{name} ({_type(value)}{', required' if name in required else ''})"
        for name, value in properties(schema).items()
    )


def properties(schema: Schema) -> Schema:
    """
    The arguments a schema names.

    Args:
        schema (`Mapping[str, Any]`):
            JSON schema of the arguments, which need not be valid.

    Returns:
        `Mapping[str, Any]`: Their schemas by name.
    """
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
