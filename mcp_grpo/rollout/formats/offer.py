"""The tools that a turn was offered, as far as they decide what a call of them must look like."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mcp_grpo.rollout.formats.cursor import Unreadable, num_shared
from mcp_grpo.tools.arguments import SchemaError, compiled, problems


# How a name or a key is spelled.
Spell = Callable[[str], str]

_MAX_REFERENCES = 8  # from one schema to the next, before it is taken for a circle


class Shape:
    """
    What a schema leaves no choice in.

    Only what holds whatever else the schema says is used, because keywords of a JSON schema narrow each other down:
    `type`, if it is one; `required`; and `properties`, where `additionalProperties` forbids others.

    Args:
        schema (`Any`):
            The schema, valid or not.
        root (`Mapping[str, Any]`):
            The schema it is a part of, which its references point into.
        spell (`Callable[[str], str]`):
            How keys are spelled.
    """

    def __init__(self, schema: Any, root: Mapping[str, Any], spell: Spell) -> None:
        self._schema = referred(schema, root)
        self._root = root
        self._spell = spell

    @cached_property
    def type(self) -> str | None:
        """The only type that values can have, if there is one."""
        declared = self._schema.get("type")
        return declared if isinstance(declared, str) else None

    @cached_property
    def keys(self) -> "dict[str, Shape]":
        """The keys it names, spelled, and the shapes of their values."""
        named = self._schema.get("properties")
        named = named if isinstance(named, Mapping) else {}
        return {self._spell(key): Shape(value, self._root, self._spell) for key, value in named.items()}

    @cached_property
    def required(self) -> frozenset[str]:
        """The keys that must come, spelled."""
        required = self._schema.get("required")
        required = required if isinstance(required, list) else []
        return frozenset(self._spell(key) for key in required if isinstance(key, str))

    @cached_property
    def is_closed(self) -> bool:
        """Whether no other keys than those it names can come."""
        return self._schema.get("additionalProperties") is False and "patternProperties" not in self._schema

    @cached_property
    def items(self) -> "Shape":
        """The shape of the items of a list."""
        has_own = "prefixItems" in self._schema  # then the first items are not what `items` says
        return Shape(None if has_own else self._schema.get("items"), self._root, self._spell)

    def num_choices(self, key: str, used: Collection[str]) -> int:
        """
        How much of a key is a choice.

        Args:
            key (`str`):
                The key, spelled.
            used (`Collection[str]`):
                The keys that came before it.

        Returns:
            `int`: How many of its first characters are. One more than it has says that its end is a choice too, because
            a longer key begins like it.
        """
        if key not in self.keys or not (self.is_closed or key in self.required):
            return len(key) + 1  # another key could have come in its place
        choices = num_choices(key, (other for other in self.keys if other not in used))
        return choices if self.is_closed else max(1, choices)  # or some other key before it


def num_choices(name: str, names: Iterable[str]) -> int:
    """
    How much of a name is a choice among several.

    Args:
        name (`str`):
            The name.
        names (`Iterable[str]`):
            All names that could stand in its place; it may be among them.

    Returns:
        `int`: How many of its first characters it takes to tell it from the others: none if there are no others, and one
        more than it has if a longer one begins like it.
    """
    return max((1 + num_shared(name, other) for other in names if other != name), default=0)


def referred(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """
    A schema, or the one that it refers to.

    Args:
        schema (`Any`):
            The schema, valid or not.
        root (`Mapping[str, Any]`):
            The schema it is a part of, which its references point into.

    Returns:
        `Mapping[str, Any]`: The schema; empty if there is none.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        if "$ref" not in schema:
            return schema
        schema = _target(schema["$ref"], root)
    return {}


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root if isinstance(reference, str) and reference.startswith("#/") else None
    for step in str(reference).split("/")[1:]:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


class OfferedTool:
    """
    A tool, as the syntax of a call of it depends on it.

    Args:
        name (`str`):
            Its name, spelled.
        parameters (`Mapping[str, Any]`):
            JSON schema of its arguments.
        num_choices (`int`):
            How many characters of its name tell it from the other tools.
        spell (`Callable[[str], str]`):
            How keys are spelled.
    """

    def __init__(self, name: str, parameters: Mapping[str, Any], num_choices: int, spell: Spell) -> None:
        self.name = name
        self.num_choices = num_choices
        self.shape = Shape(parameters, parameters, spell)
        try:
            self._validator = compiled(parameters)
        except SchemaError:
            self._validator = None

    def check(self, readings: Sequence[Mapping[str, Any]]) -> None:
        """
        Refuse arguments that are not valid.

        Args:
            readings (`Sequence[Mapping[str, Any]]`):
                Arguments, in each of the ways they can be read.

        Raises:
            [`Unreadable`]: If they are valid in none of them, or the schema is not one.
        """
        if self._validator is None or all(problems(self._validator, reading) for reading in readings):
            raise Unreadable


class Offer:
    """
    The tools that a turn was offered.

    Args:
        tools (`Sequence[Mapping[str, Any]]`):
            Schemas of the tools, in the form chat templates take.
        spell_name (`Callable[[str], str]`):
            How names of tools are spelled.
        spell_key (`Callable[[str], str]`):
            How keys of arguments are spelled.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], spell_name: Spell, spell_key: Spell) -> None:
        functions = {spell_name(tool["function"]["name"]): tool["function"] for tool in tools}
        self.tools = list(tools)
        self._by_name = {
            name: OfferedTool(name, function.get("parameters") or {}, num_choices(name, functions), spell_key)
            for name, function in functions.items()
        }

    def find(self, name: str) -> OfferedTool:
        """
        A tool by its name.

        Args:
            name (`str`):
                Its name, spelled.

        Returns:
            [`OfferedTool`]: The tool.

        Raises:
            [`Unreadable`]: If it was not offered.
        """
        if name not in self._by_name:
            raise Unreadable
        return self._by_name[name]
