"""
Check values against a server's JSON schema, for a short time only.

Both the schema and the value come from outside, and checks run on the event loop: a pattern that tries every way to match, or
references that multiply, must not hold it up. A schema that takes too long twice in a row is not used again: once may be the
garbage collector's fault, or a busy machine's.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import regex
from jsonschema import validators
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable


logger = logging.getLogger(__name__)

MAX_SECONDS = 0.1  # of this thread's time for one check; an ordinary one takes a thousandth
MAX_ERRORS = 1_000  # of one value
MAX_SCHEMA_SIZE = 100_000  # characters of JSON
MAX_PATTERN = 1_000  # characters

# Raised for a schema that cannot be used: it refers to what is not there, to itself, or has a pattern of another dialect.
UNUSABLE = (Unresolvable, RecursionError, re.error, regex.error, ArithmeticError, ValueError)

_Keyword = Callable[[Any, Any, Any, Any], "Iterable[ValidationError] | None"]


class TooSlowError(ValueError):
    """A check took too long."""


class _Clock(threading.local):
    """The time by which the check of this thread must be done."""

    ends_at = float("inf")
    num_ticks = 0

    def tick(self) -> None:
        """Look at the clock now and then, since looking takes as long as many a check. Raises [`TooSlowError`]."""
        self.num_ticks += 1
        if self.num_ticks % 16 == 0:
            self.left()

    def left(self) -> float:
        """Return the seconds that are left. Raises [`TooSlowError`] if there are none."""
        if (left := self.ends_at - time.thread_time()) <= 0:
            raise TooSlowError
        return left


_clock = _Clock()


class Checker:
    """A schema that values can be checked against. Raises `SchemaError` if it is none, or cannot be read in a short time."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        kind = _bounded(validators.validator_for(schema, default=validators.Draft202012Validator))
        try:
            if len(json.dumps(schema)) > MAX_SCHEMA_SIZE:
                raise SchemaError(f"The schema has more than {MAX_SCHEMA_SIZE} characters.")
            meta = kind(kind.META_SCHEMA, format_checker=kind.FORMAT_CHECKER)
            for error in _found(meta, dict(schema)):
                raise SchemaError.create_from(error)
        except (TooSlowError, RecursionError) as error:
            raise SchemaError("The schema takes too long to read.") from error
        nothing = Registry[Any]()  # the default one would fetch foreign references over the network
        self._validator = kind(schema, registry=nothing)
        self._plain = _plain_types(schema)
        self._is_slow = False

    def errors(self, value: Mapping[str, Any]) -> list[ValidationError]:
        """Return what is wrong with a value; nothing if that takes too long, since the server checks it anyway."""
        if self._is_slow or (self._plain is not None and _is_plainly_valid(value, *self._plain)):
            return []
        try:
            return _found(self._validator, dict(value))
        except TooSlowError:
            self._is_slow = True
            logger.warning(
                "Checking arguments against the input schema %.100s took more than %g s; from now on only the server checks "
                "them.",
                json.dumps(self._validator.schema),
                MAX_SECONDS,
            )
            return []


_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_WORDS = {"title", "description", "default", "examples", "$schema"}  # that forbid nothing

_Plain = tuple[dict[str, tuple[type, ...]], frozenset[str], bool]


def _plain_types(schema: Mapping[str, Any]) -> _Plain | None:
    """Return types by name, names that are required, and whether there may be others; `None` if a schema says more than that."""
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    if schema.get("type") != "object" or not isinstance(more, bool):
        return None
    if schema.keys() - _WORDS - {"type", "properties", "required", "additionalProperties"}:
        return None
    types: dict[str, tuple[type, ...]] = {}
    for name, part in properties.items():
        said = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind = said.get("type")
        if said.keys() - _WORDS - {"type"} or not isinstance(kind, str) or kind not in _PLAIN_TYPES:
            return None
        types[name] = _PLAIN_TYPES[kind]
    return types, frozenset(schema.get("required", ())), more


def _is_plainly_valid(
    value: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], required: frozenset[str], more: bool
) -> bool:
    """Return whether a value is valid beyond doubt. It takes a tenth of the time, and most calls are."""
    if not required <= value.keys():
        return False
    # By the very type: to Python, `True` is an integer.
    return all(type(item) in types[name] if name in types else more for name, item in value.items())


def matches(pattern: str, text: str) -> bool:
    """Return whether a text contains a match, for as long as the check may take. Raises `regex.error` for a bad pattern."""
    found = _compiled(pattern)
    try:
        return found.search(text, timeout=min(MAX_SECONDS, _clock.left())) is not None
    except TimeoutError:
        raise TooSlowError from None


def _found(validator: Any, value: Any) -> list[ValidationError]:
    """Return the first errors of a value. Raises [`TooSlowError`] if finding them takes too long, twice."""
    try:
        return _found_in_time(validator, value)
    except TooSlowError:
        return _found_in_time(validator, value)


def _found_in_time(validator: Any, value: Any) -> list[ValidationError]:
    _clock.ends_at = time.thread_time() + MAX_SECONDS
    try:
        return list(islice(validator.iter_errors(value), MAX_ERRORS))
    finally:
        _clock.ends_at = float("inf")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a pattern of more than {MAX_PATTERN} characters is not used")
    re.compile(pattern)  # what Python's own dialect does not have is left to the server
    return regex.compile(pattern)


@lru_cache
def _bounded(kind: Any) -> Any:
    """Return a validator class that keeps the deadline, whatever the schema asks for."""
    own: dict[str, _Keyword] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "uniqueItems": _unique_items,
        "unevaluatedProperties": _unless_referring(kind.VALIDATORS.get("unevaluatedProperties")),
        "unevaluatedItems": _unless_referring(kind.VALIDATORS.get("unevaluatedItems")),
        "additionalProperties": _additional_properties(kind.VALIDATORS.get("additionalProperties")),
    }
    keywords = {name: check for name, check in own.items() if name in kind.VALIDATORS}
    extend = cast("Callable[[Any, Any], Any]", getattr(validators, "extend"))  # noqa: B009 - it has no types
    bounded = extend(kind, keywords)
    bounded.evolve = _evolve
    return bounded


def _evolve(validator: Any, **changes: Any) -> Any:
    """
    Make the validator of a part of the schema, which is done for each value that the part applies to, and look at the clock.
    The default would take another class where the part names its dialect.
    """
    _clock.tick()
    kept = {"schema": validator.schema, "format_checker": validator.format_checker, "registry": validator._registry}
    return type(validator)(**kept | {"_resolver": validator._resolver} | changes)


def _pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if matches(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(check: Any) -> _Keyword:
    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
        patterns = schema.get("patternProperties")
        if patterns and validator.is_type(instance, "object"):
            # Names that match are taken out, since the original would match them without a deadline.
            instance = {name: v for name, v in instance.items() if not any(matches(p, name) for p in patterns)}
            schema = {"properties": schema.get("properties", {})}
        return check(validator, value, instance, schema)

    return checked


def _unless_referring(check: Any) -> _Keyword:
    """Leave a keyword to the server in parts that refer to others or have patterns, which it would follow without end."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        text = json.dumps(schema)
        if not any(key in text for key in ('"$ref"', '"$dynamicRef"', '"$recursiveRef"', '"patternProperties"')):
            yield from check(validator, value, instance, schema)

    return checked


def _unique_items(validator: Any, is_unique: bool, instance: Any, _: Any) -> Iterator[ValidationError]:
    if is_unique and validator.is_type(instance, "array"):
        items = cast("list[Any]", instance)
        if len({json.dumps(_comparable(item), sort_keys=True) for item in items}) < len(items):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _comparable(value: Any) -> Any:
    """Return a value of which JSON spells equal numbers alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_comparable(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in cast("dict[str, Any]", value).items()}
    return value
