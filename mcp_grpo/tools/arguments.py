"""Checks a call's arguments before they are sent, and says in one uniform way what is wrong with them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from mcp.types import JSONRPCRequest
from referencing import Registry
from referencing.exceptions import Unresolvable


MAX_PROBLEMS = 5
MAX_PROBLEM_LENGTH = 200  # a message repeats the value that is wrong, and that value may be very long

Schema = Mapping[str, Any]


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
            Arguments, as the policy wrote them. Half of a surrogate pair, or hundreds of nested lists, parse well but
            cannot be sent, and would take the connection down with them.

    Returns:
        `str` or `None`: What is wrong, or `None`.
    """
    params = {"_": {"_": {"_": dict(arguments)}}}  # deeper than the message will be, so that the message fits too
    try:
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
    except (Unresolvable, RecursionError, re.error):
        # The schema cannot be used after all: it refers to what is not there, to itself, or has a pattern of another
        # dialect. That is not the policy's doing, so the call goes to the server, which checks it anyway.
        return []
    return found


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
    required = schema.get("required", ())
    properties: Mapping[str, Any] = schema.get("properties", {})
    return ", ".join(
        f"{name} ({_type(value)}{', required' if name in required else ''})" for name, value in properties.items()
    )


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


__all__ = ["SchemaError", "compiled", "problems", "signature", "unsendable"]
