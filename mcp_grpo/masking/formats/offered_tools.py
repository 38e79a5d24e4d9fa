"""The tools that a turn was offered, as far as they determine what a call of them looks like."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mcp_grpo.masking.formats.cursor import Unreadable, num_shared
from mcp_grpo.tools.arguments import SchemaError, compiled, problems, properties


Spell = Callable[[str], str]  # how a name or a key is spelled

_MAX_REFERENCES = 8  # from one schema to the next, before they are taken for a loop


class Shape:
    """
    What a schema, valid or not, leaves no choice in.

    Only what holds whatever else the schema says is used, because keywords of a JSON schema narrow each other down:
    `type`, if it is one; `required`; and `properties`, where `additionalProperties` forbids others. `root` is what its
    references point into.
    """

    def __init__(self, schema: Any, root: Mapping[str, Any], spell: Spell) -> None:
        self._schema = resolved(schema, root)
        self._root = root
        self._spell = spell

    @cached_property
    def type(self) -> str | None:
        """The only type that values can have, if there is one."""
        declared = self._schema.get("type")
        return declared if isinstance(declared, str) else None

    @cached_property
    def keys(self) -> "dict[str, Shape]":
        """The spelled keys it names, and the shapes of their values."""
        named = properties(self._schema)
        return {self._spell(key): Shape(value, self._root, self._spell) for key, value in named.items()}

    @cached_property
    def required(self) -> frozenset[str]:
        """The spelled keys that must come."""
        required = self._schema.get("required")
        required = required if isinstance(required, list) else []
        return frozenset(self._spell(key) for key in required if isinstance(key, str))

    @cached_property
    def is_closed(self) -> bool:
        """Return whether only the keys it names can come."""
        return self._schema.get("additionalProperties") is False and "patternProperties" not in self._schema

    @cached_property
    def items(self) -> "Shape":
        """The shape of the items of a list."""
        is_tuple = "prefixItems" in self._schema  # then `items` does not hold for the first ones
        return Shape(None if is_tuple else self._schema.get("items"), self._root, self._spell)

    def num_choices(self, key: str, used: Collection[str]) -> int:
        """
        Return how many characters of a key that comes after the used ones are choices; one more than it has if its end is a
        choice too, because a longer key begins like it.
        """
        if key not in self.keys or not (self.is_closed or key in self.required):
            return len(key) + 1  # another key could have come in its place
        choices = num_choices(key, (other for other in self.keys if other not in used))
        return choices if self.is_closed else max(1, choices)  # or some other key before it


def num_choices(name: str, names: Iterable[str]) -> int:
    """
    Return how many characters it takes to tell a name from others: none if there are no others, and one more than it has
    if a longer one begins like it.
    """
    return max((1 + num_shared(name, other) for other in names if other != name), default=0)


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow the references of a schema into its root; return an empty one if there is nothing there."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        if "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        schema = root if isinstance(reference, str) and reference.startswith("#/") else None
        for step in str(reference).split("/")[1:]:
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return {}


class OfferedTool:
    """A tool: its spelled name, how many characters tell it from the others, and the shape of its arguments."""

    def __init__(self, name: str, parameters: Mapping[str, Any], num_choices: int, spell: Spell) -> None:
        self.name = name
        self.num_choices = num_choices
        self.shape = Shape(parameters, parameters, spell)
        try:
            self._validator = compiled(parameters)
        except SchemaError:
            self._validator = None

    def check(self, readings: Sequence[Mapping[str, Any]]) -> None:
        """Raise [`Unreadable`] unless the arguments are valid in one of the ways they can be read."""
        if self._validator is None or all(problems(self._validator, reading) for reading in readings):
            raise Unreadable


class OfferedTools:
    """The tools that a turn was offered, by their spelled names."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], spell_name: Spell, spell_key: Spell) -> None:
        functions = {spell_name(tool["function"]["name"]): tool["function"] for tool in tools}
        self.schemas = list(tools)
        self._by_name = {
            name: OfferedTool(name, function.get("parameters") or {}, num_choices(name, functions), spell_key)
            for name, function in functions.items()
        }

    def find(self, name: str) -> OfferedTool:
        """Return a tool; raises [`Unreadable`] if it was not offered."""
        if name not in self._by_name:
            raise Unreadable
        return self._by_name[name]
