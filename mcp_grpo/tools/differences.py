"""Compare the tools of two catalogs."""

from collections.abc import Mapping
from typing import Any, cast

from mcp_grpo.tools.catalog import Catalog, Tool


def catalog_differences(ours: Catalog, theirs: Catalog) -> list[str]:
    """
    Compare the tools that a policy was trained with to those of another catalog.

    Args:
        ours ([`Catalog`]):
            The catalog that tasks were made for, or that a policy was trained with.
        theirs ([`Catalog`]):
            The one that replaces it.

    Returns:
        `list[str]`: A sentence for each tool that is missing or takes other arguments. Additional tools and optional
        arguments come last; descriptions do not count.
    """
    known = {tool.name: tool for tool in theirs.tools}
    found: list[str] = []
    for tool in ours.tools:
        if tool.name not in known:
            found.append(f"`{tool.name}` of server {tool.server!r} is missing.")
        else:
            found += _argument_differences(tool, known[tool.name])
    if more := [name for name in known if name not in {tool.name for tool in ours.tools}]:
        found.append(f"{len(more)} tools more: {', '.join(f'`{name}`' for name in more)}.")
    return found


def _argument_differences(ours: Tool, theirs: Tool) -> list[str]:
    name = f"`{theirs.name}` of server {theirs.server!r}"
    mine, other = _arguments(ours), _arguments(theirs)
    required, now_required = _required(ours), _required(theirs)
    found: list[str] = []
    if lost := [one for one in mine if one not in other]:
        found.append(f"{name} does not take {_listed(lost)}.")
    if wanted := [one for one in now_required if one not in required]:
        found.append(f"{name} requires {_listed(wanted)}.")
    for argument in mine.keys() & other.keys():
        if (before := _kind(mine[argument])) != (after := _kind(other[argument])):
            found.append(f"{name} takes `{argument}` as {after}, not as {before}.")
    if more := [one for one in other if one not in mine and one not in now_required]:
        found.append(f"{name} also takes {_listed(more)}.")
    return found


def _arguments(tool: Tool) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", tool.input_schema.get("properties") or {})


def _required(tool: Tool) -> list[str]:
    return cast("list[str]", tool.input_schema.get("required") or [])


def _kind(schema: Any) -> str:
    """Describe the type of an argument; whether it may be null makes no difference."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    kinds = {str(one.get("type", "anything")) for one in options}
    values = sorted(str(value) for one in options for value in one.get("enum", []))
    return " or ".join(sorted(kinds)) + (f" of {', '.join(values)}" if values else "")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
