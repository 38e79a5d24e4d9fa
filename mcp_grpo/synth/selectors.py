"""Point at one value of a result in a way that can be said in words and applied to another result."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from mcp_grpo.synth.readings import MARK, NAME, Form, Reading, is_scalar
from mcp_grpo.synth.tame import is_tame, is_tame_key


Kind = Literal[
    "field", "where", "nth", "most", "least", "count", "count_where", "sum", "where_count", "line", "pair", "cell"
]  # fmt: skip
MAX_DEPTH = 3
MIN_ITEMS, MAX_ITEMS = 2, 400  # of a list that is asked about
_PAIR = re.compile(r"^([A-Z][A-Za-z ]{1,24}):\s+\S")
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


class NotThereError(Exception):
    """The result has no such value, or more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """
    One value of a result.

    Args:
        kind (`str`):
            How it is found.
        path (`tuple[str, ...]`, *optional*):
            Where in nested objects the list or the object is.
        key (`str`, *optional*):
            Field of a list's items that they are told apart by.
        equals (`Any`, *optional*):
            Value of that field.
        field (`str`, *optional*):
            Field of the item that is meant; of a list of plain values, none.
        index (`int`, *optional*, defaults to `0`):
            Position of the item or line; -1 is the last.
    """

    kind: Kind
    path: tuple[str, ...] = ()
    key: str | None = None
    equals: Any = None
    field: str | None = None
    index: int = 0

    @property
    def shape(self) -> str:
        """Return what it is about, whatever the single values are; tasks of one shape are of one chain."""
        named = [part for part in (self.key, self.field) if part is not None]
        return f"{self.kind}({'.'.join(self.path)}{':' if named else ''}{','.join(named)})"

    @property
    def is_count(self) -> bool:
        """Tell whether it is asked for by "how many"."""
        return self.kind in ("count", "count_where", "where_count")

    def find(self, reading: Reading) -> Any:
        """Return the value in a result. Raises [`NotThereError`] if it is not there, or not the only one."""
        value = _at(reading.value, self.path)
        if self.kind == "field":
            return _scalar(value)
        items = _items(value)
        match self.kind:
            case "count":
                return len(items)
            case "line" | "nth":
                return _scalar(_part(_nth(items, self.index), self.field))
            case "pair":
                starts = f"{self.key}:"
                return _scalar(_only([item for item in items if str(item).startswith(starts)])[len(starts) :].strip())
            case "cell":
                row = _only(items)
                cells = list(row.values()) if isinstance(row, dict) else row
                return _scalar(_only(_items(cells)))
            case "sum":
                numbers = [_number(_part(item, self.key)) for item in items]
                return round(sum(numbers), 6)
            case "most" | "least":
                return _scalar(_part(_extreme(items, self.key, is_most=self.kind == "most"), self.field))
            case _:
                chosen = [item for item in items if _same(_part(item, self.key), self.equals)]
        if self.kind == "count_where":
            return len(chosen)
        part = _part(_only(chosen), self.field)
        return len(_items(part)) if self.kind == "where_count" else _scalar(part)

    def value_in(self, reading: Reading) -> Any:
        """Return the value in a result, or `None`."""
        try:
            return self.find(reading)
        except NotThereError:
            return None

    def words(self, form: Form) -> str:
        """Return it in words: "the `size` of the entry whose `name` is `a.txt`"; for counts, what follows "how many"."""
        one, many = {"table": ("row", "rows"), "text": ("line", "lines")}.get(form, ("entry", "entries"))
        return self._count_words(form, one, many) if self.is_count else self._value_words(form, one, many)

    def _count_words(self, form: Form, one: str, many: str) -> str:
        if self.kind == "count":
            return f"{many} are there{self._under}"
        if self.kind == "where_count":
            return f"items does the `{self.field}` of the {one}{self._under} whose `{self.key}` is {_shown(self.equals)} have"
        if form == "marked" and self.key == MARK:
            return f"{many} are marked `[{self.equals}]`"
        return f"{many}{self._under} have `{self.key}` equal to {_shown(self.equals)}"

    def _value_words(self, form: Form, one: str, many: str) -> str:
        under = self._under
        of = f"the {self._field_words(form)} of" if self.field is not None else ""
        position = "last" if self.index == -1 else _ORDINALS[self.index]
        match self.kind:
            case "field":
                outer = f" under `{'.'.join(self.path[:-1])}`" if len(self.path) > 1 else ""
                return f"the `{self.path[-1]}`{outer}" if self.path else "the result"
            case "sum":
                return f"the sum of `{self.key}` over all {many}{under}"
            case "most" | "least":
                return f"{of} the {one}{under} with the {'highest' if self.kind == 'most' else 'lowest'} `{self.key}`"
            case "nth":
                return f"{of} the {position} {one}{under}" if of else f"the {position} item{under}"
            case "line":
                return f"the {position} line that is not empty"
            case "pair":
                return f"the text after `{self.key}:`"
            case "cell":
                return "the only value"
            case _:
                return f"{of} the {one}{under} whose `{self.key}` is {_shown(self.equals)}"

    @property
    def _under(self) -> str:
        return f" under `{'.'.join(self.path)}`" if self.path else ""

    def _field_words(self, form: Form) -> str:
        return (
            {MARK: "mark in brackets", NAME: "name"}.get(self.field or "", "")
            if form == "marked"
            else f"`{self.field}`"
        )

    @property
    def texts(self) -> list[str]:
        """Return the values that its words show."""
        return [str(self.equals)] if isinstance(self.equals, str | int | float) else []

    def at(self, value: Any) -> "Selector":
        """Return it with another value of the field that items are told apart by."""
        return replace(self, equals=value)


def selectors_of(reading: Reading) -> list[Selector]:
    """Propose what can be asked about a result, in a fixed order."""
    if reading.form == "text":
        lines = _items(reading.value)
        if len(lines) < 2:
            return []
        pairs = Counter(match[1] for line in lines if (match := _PAIR.match(str(line))))
        found = [Selector(kind="pair", key=key) for key, times in pairs.items() if times == 1 and is_tame_key(key)]
        # Under a heading of the tool's own, "the second line" may be that of the tool or that of the text.
        places = (-1,) if str(lines[0]).endswith(":") else (0, 1, 2, -1)
        plain = [
            index for index in places if index < len(lines) - 1 and not re.search(r"[:=-]$|: ", str(lines[index]))
        ]
        return found + [Selector(kind="line", index=index) for index in plain]
    if reading.form == "scalar":
        return [Selector(kind="field")]
    return list(dict.fromkeys(_walk(reading.value, ())))


def place_of(reading: Reading, path: Sequence[str], index: int | None, field: str | None) -> list[Selector]:
    """Return the ways to point at a value whose place is known: a field of an object, or of an item of a list."""
    if index is None:
        return [Selector(kind="field", path=(*path, *([] if field is None else [field])))]
    items = _items(_at(reading.value, tuple(path)))
    found = [
        Selector(kind="nth", path=tuple(path), field=field, index=end) for end in (0, -1) if index == end % len(items)
    ]
    if field is None or not isinstance(items[index], dict):
        return found if len(items) >= MIN_ITEMS else []
    for key in _unique_keys(items):
        if key != field:
            found.insert(0, Selector(kind="where", path=tuple(path), key=key, equals=items[index][key], field=field))
    return found


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[Selector]:
    if isinstance(value, dict) and len(path) < MAX_DEPTH:
        for key, inner in cast("dict[Any, Any]", value).items():
            if not is_tame_key(key) or "." in key:
                continue
            if is_scalar(inner):
                yield Selector(kind="field", path=(*path, key))
            elif isinstance(inner, dict | list):
                yield from _walk(inner, (*path, key))
    elif isinstance(value, list) and MIN_ITEMS <= len(cast("list[Any]", value)) <= MAX_ITEMS:
        yield from _of_list(cast("list[Any]", value), path)


def _of_list(items: list[Any], path: tuple[str, ...]) -> Iterator[Selector]:
    yield Selector(kind="count", path=path)
    if all(is_scalar(item) for item in items):
        yield from (Selector(kind="nth", path=path, index=index) for index in (0, 1, -1))
        return
    if not all(isinstance(item, dict) for item in items):
        return
    keys = [key for key in items[0] if is_tame_key(key) and all(key in item for item in items)]
    scalar = [key for key in keys if all(is_scalar(item[key]) for item in items)]
    for key in scalar:
        yield from _of_field(items, path, key, scalar)
    for unique in _unique_keys(items)[:2]:
        for item in items:
            for key in item:
                if key != unique and is_tame_key(key) and is_scalar(item[key]):
                    yield Selector(kind="where", path=path, key=unique, equals=item[unique], field=key)
                elif is_tame_key(key) and isinstance(item[key], list) and len(item[key]) > 1:
                    yield Selector(kind="where_count", path=path, key=unique, equals=item[unique], field=key)


def _of_field(items: list[Any], path: tuple[str, ...], key: str, scalar: Sequence[str]) -> Iterator[Selector]:
    values = [item[key] for item in items]
    times = Counter(map(str, values))
    if 1 < len(times) < len(items):
        for value in dict.fromkeys(values):
            if isinstance(value, str):
                yield Selector(kind="count_where", path=path, key=key, equals=value)
    if not all(isinstance(value, int | float) for value in values) or len(set(values)) == 1:
        return
    if "id" not in key.lower() and "year" not in key.lower():
        yield Selector(kind="sum", path=path, key=key)
    for kind, best in (("most", max(values)), ("least", min(values))):
        if values.count(best) == 1:
            for other in scalar:
                if other != key:
                    yield Selector(kind=cast("Kind", kind), path=path, key=key, field=other)


def _unique_keys(items: Sequence[Any]) -> list[str]:
    """Return the fields that tell all items apart by short values, texts first."""
    if not all(isinstance(item, dict) for item in items) or len(items) < MIN_ITEMS:
        return []
    found: list[tuple[bool, str]] = []
    for key in items[0]:
        values = [item.get(key) for item in items]
        is_short = all(is_scalar(value) and is_tame(str(value), 60) for value in values)
        if is_tame_key(key) and is_short and len({str(value).casefold() for value in values}) == len(items):
            found.append((not isinstance(values[0], str), key))
    return [key for _, key in sorted(found, key=lambda one: one[0])]


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise NotThereError
        value = cast("Mapping[str, Any]", value)[key]
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise NotThereError
    return cast("list[Any]", value)


def _only(items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise NotThereError
    return items[0]


def _nth(items: Sequence[Any], index: int) -> Any:
    if not -len(items) <= index < len(items):
        raise NotThereError
    return items[index]


def _part(item: Any, key: str | None) -> Any:
    if key is None:
        return item
    if not isinstance(item, Mapping) or key not in item:
        raise NotThereError
    return cast("Mapping[str, Any]", item)[key]


def _scalar(value: Any) -> Any:
    if not is_scalar(value):
        raise NotThereError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotThereError
    return value


def _extreme(items: Sequence[Any], key: str | None, *, is_most: bool) -> Any:
    values = [_number(_part(item, key)) for item in items]
    if not values:
        raise NotThereError
    best = max(values) if is_most else min(values)
    return _only([item for item, value in zip(items, values, strict=True) if value == best])


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def _shown(value: Any) -> str:
    """Return a value between backticks; that of an earlier result has no text of its own."""
    return f"`{value}`" if isinstance(value, str | int | float) else "that value"
