"""Convert rows of JSON to a dataset, with JSON for what one Arrow type cannot hold."""

# `datasets` is not typed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from datasets import Dataset, Features, Json, List, Value


_SCALARS: Mapping[type, str] = {str: "string", bool: "bool", int: "int64", float: "float64"}


def dataset_from_rows(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """
    Make a dataset whose rows equal those given.

    Arrow has one type per column: it would refuse answers that are numbers in one row and lists in another, and give every
    object the keys of all others. Columns that hold more than one plain type are therefore stored as JSON, which the
    dataset decodes when a row is read.

    Args:
        rows (`Sequence[Mapping[str, Any]]`):
            The rows. One that lacks a column has `None` there.

    Returns:
        [`~datasets.Dataset`]: The rows, in their order.
    """
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name in row:
            columns.setdefault(name, [])
    features: dict[str, Any] = {}
    for name, values in columns.items():
        values.extend(row.get(name) for row in rows)
        features[name] = feature = _feature(values)
        if isinstance(feature, Json):
            # A text that happens to be JSON would be taken for encoded already; so is what it gets.
            columns[name] = [None if value is None else json.dumps(value) for value in values]
    return Dataset.from_dict(columns, features=Features(features))


def _feature(values: Sequence[Any]) -> Any:
    given = [value for value in values if value is not None]
    kinds = {type(value) for value in given}
    if not kinds:
        return Value("null")
    if kinds == {int} and not all(-(2**63) <= value < 2**63 for value in given):
        return Json()
    if len(kinds) == 1 and (dtype := _SCALARS.get(kinds.pop())) is not None:
        return Value(dtype)
    if all(_is_texts(value) for value in given):
        return List(Value("string"))
    if all(_is_plain_prompt(value) for value in given):
        return List({"role": Value("string"), "content": Value("string")})
    return Json()


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[Any]", value))


def _is_plain_prompt(value: Any) -> bool:
    """Tell whether it is a list of messages with only a role and a text."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, dict)
        and cast("dict[str, Any]", message).keys() == {"role", "content"}
        and _is_texts([*cast("dict[str, Any]", message).values()])
        for message in cast("list[Any]", value)
    )
