"""Propose questions for tools that take SQL: about the tables, columns and values that are there."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_grpo.synth.chains import Chain, Step
from mcp_grpo.synth.readings import is_scalar, read
from mcp_grpo.synth.run import CallTool
from mcp_grpo.synth.selectors import Selector
from mcp_grpo.synth.tame import is_tame, is_tame_key
from mcp_grpo.synth.values import required
from mcp_grpo.tools.catalog import Tool


MAX_TABLES = 12
MAX_ROWS = 60  # of a column that are looked at
MAX_PER_TABLE = 60  # questions
CELL = Selector(kind="cell")

_SPEAKS_SQL = re.compile(r"\bSQL\b|\bSELECT\b")
_WRITES = re.compile(r"\b(?:INSERT|UPDATE|DELETE|CREATE|DROP)\b")
_TABLES = (
    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name",
    "SELECT table_name FROM information_schema.tables WHERE table_schema NOT IN ('pg_catalog', 'information_schema') ORDER BY table_name",
)
_COLUMNS = (
    "SELECT name FROM pragma_table_info('{table}')",
    "SELECT column_name FROM information_schema.columns WHERE table_name = '{table}' ORDER BY ordinal_position",
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and its values in the first rows."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_number(self) -> bool:
        return all(isinstance(value, int | float) for value in self.values) and not re.search(
            r"(?:^|_)id$|year", self.name.lower()
        )

    @property
    def is_key(self) -> bool:
        return len(set(map(str, self.values))) == len(self.values) > 2

    @property
    def is_choice(self) -> bool:
        return 1 < len(set(self.values)) <= len(self.values) / 2 and all(
            isinstance(value, str) for value in self.values
        )


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its columns that can be read."""

    name: str
    columns: tuple[Column, ...]


def sql_argument(tool: Tool) -> str | None:
    """Return the argument of a tool that is a query, if it is its only one and the tool says that it reads SQL."""
    needed = required(tool)
    if len(needed) != 1:
        return None
    ((name, schema),) = needed.items()
    said = f"{tool.description} {schema.get('description', '') if isinstance(schema, dict) else ''}"
    only_writes = _WRITES.search(said) is not None and "SELECT" not in said
    return name if _SPEAKS_SQL.search(said) and not only_writes else None


def sql_write_argument(tool: Tool) -> str | None:
    """Return the argument of a tool that is a statement which changes rows, if it is its only one and the tool says so."""
    needed = required(tool)
    is_writer = re.search(r"\bUPDATE\b|\bDELETE\b", tool.description) is not None
    return next(iter(needed)) if len(needed) == 1 and is_writer else None


async def read_tables(tool: Tool, argument: str, call: CallTool) -> list[Table]:
    """Read the tables of a database, with the values of their first rows."""
    query = _Query(tool.name, argument, call)
    names: list[Any] = []
    for text in _TABLES:
        names = names or await query.column(text)
    tables: list[Table] = []
    for table in names[:MAX_TABLES]:
        if not _is_name(table):
            continue
        columns: list[Any] = []
        for text in _COLUMNS:
            columns = columns or await query.column(text.format(table=table))
        found = [
            Column(str(name), tuple(values))
            for name in columns
            if _is_name(name)
            and len(values := await query.column(f'SELECT "{name}" FROM "{table}" ORDER BY 1 LIMIT {MAX_ROWS}')) > 2
            and all(is_scalar(value) for value in values)
        ]
        if found:
            tables.append(Table(table, tuple(found)))
    return tables


def propose_statements(
    tool: Tool, argument: str, reader: Tool, query: str, tables: Sequence[Table], seed: int
) -> list[Chain]:
    """Propose changes of single rows; all rows of the table show what came of it."""
    chains: list[Chain] = []
    for table in tables:
        chance = random.Random(f"{seed} {tool.name} {table.name} changes")
        rows = Step(tool=reader.name, arguments={query: f'SELECT * FROM "{table.name}" ORDER BY 1'})
        found: list[Chain] = []
        for key in (one for one in table.columns if one.is_key):
            for value in chance.sample(key.values, min(4, len(key.values))):
                where = f'WHERE "{key.name}" = {_quoted(value)}'
                deleting = f'DELETE FROM "{table.name}" {where}'
                words = f"Delete the row of the table `{table.name}` whose `{key.name}` is `{value}`."
                found.append(_change(tool, argument, deleting, words, rows, f"delete {table.name}.{key.name}"))
                for column in (one for one in table.columns if one.is_choice or one.is_number):
                    others = list(dict.fromkeys(column.values))
                    new = others[chance.randrange(len(others))]
                    setting = f'UPDATE "{table.name}" SET "{column.name}" = {_quoted(new)} {where}'
                    words = f"In the table `{table.name}`, set the `{column.name}` of the row whose `{key.name}` is `{value}` to `{new}`."
                    found.append(
                        _change(tool, argument, setting, words, rows, f"update {table.name}.{key.name}.{column.name}")
                    )
        chance.shuffle(found)
        chains += found[:12]
    return chains


def _change(tool: Tool, argument: str, statement: str, words: str, rows: Step, shape: str) -> Chain:
    step = Step(tool=tool.name, arguments={argument: statement})
    return Chain(family="change", steps=(step,), shape=f"sql {shape}", outcome="state", question=words, reads=(rows,))


def propose_queries(tool: Tool, argument: str, tables: Sequence[Table], seed: int) -> list[Chain]:
    """Propose questions about tables, of each kind in turn."""
    chains: list[Chain] = []
    for table in tables:
        chance = random.Random(f"{seed} {tool.name} {table.name}")
        of_table = [
            _chain(tool, argument, *one)
            for one in (
                *_counts(table),
                *_lookups(table, chance),
                *_totals(table),
                *_extremes(table),
                *_joins(table, tables, chance),
            )
        ]
        of_table += [*_absent(tool, argument, table, chance), *_misspelt(tool, argument, table, tables, chance)]
        chance.shuffle(of_table)
        chains += of_table[:MAX_PER_TABLE]
    return chains


class _Query:
    def __init__(self, tool: str, argument: str, call: CallTool) -> None:
        self._tool, self._argument, self._call = tool, argument, call

    async def column(self, text: str) -> list[Any]:
        """Return the first column of a query's rows; nothing if it fails."""
        result = await self._call(self._tool, {self._argument: text})
        if result is None or result.is_error:
            return []
        rows = read(result.text).value
        if isinstance(rows, dict):
            rows = next(
                (inner for key in ("rows", "data", "results", "result") if isinstance(inner := rows.get(key), list)),
                [],
            )
        firsts = [
            next(iter(row.values()), None)
            if isinstance(row, dict)
            else row[0]
            if isinstance(row, list) and row
            else None
            for row in rows
        ]
        return firsts if all(first is not None for first in firsts) else []


_Proposal = tuple[str, str, str, int | None]  # shape, query, question, digits


def _counts(table: Table) -> Iterator[_Proposal]:
    yield (
        f"count {table.name}",
        f'SELECT COUNT(*) FROM "{table.name}"',
        f"How many rows does the table `{table.name}` have?",
        None,
    )
    for column in table.columns:
        if column.is_choice:
            yield (
                f"kinds {table.name}.{column.name}",
                f'SELECT COUNT(DISTINCT "{column.name}") FROM "{table.name}"',
                f"How many different values of `{column.name}` are there in the table `{table.name}`?",
                None,
            )
            for value in dict.fromkeys(column.values):
                yield (
                    f"count {table.name}.{column.name}",
                    f'SELECT COUNT(*) FROM "{table.name}" WHERE "{column.name}" = {_quoted(value)}',
                    f"How many rows of the table `{table.name}` have `{column.name}` equal to `{value}`?",
                    None,
                )
        elif column.is_number and len(set(column.values)) > 4:
            limit = sorted(column.values)[len(column.values) // 2]
            yield (
                f"above {table.name}.{column.name}",
                f'SELECT COUNT(*) FROM "{table.name}" WHERE "{column.name}" > {limit}',
                f"How many rows of the table `{table.name}` have a `{column.name}` greater than {limit}?",
                None,
            )


def _lookups(table: Table, chance: random.Random) -> Iterator[_Proposal]:
    for key in (one for one in table.columns if one.is_key):
        for column in table.columns:
            if column.name != key.name and len(set(column.values)) > 1:
                for value in chance.sample(key.values, min(3, len(key.values))):
                    yield (
                        f"lookup {table.name}.{key.name}.{column.name}",
                        f'SELECT "{column.name}" FROM "{table.name}" WHERE "{key.name}" = {_quoted(value)}',
                        f"In the table `{table.name}`, what is the `{column.name}` of the row whose `{key.name}` is `{value}`?",
                        None,
                    )


def _totals(table: Table) -> Iterator[_Proposal]:
    for column in (one for one in table.columns if one.is_number):
        for name, words in (("SUM", "sum"), ("AVG", "average")):
            yield from _aggregate(table, column, name, words, "", "")
        for choice in (one for one in table.columns if one.is_choice):
            for value in list(dict.fromkeys(choice.values))[:4]:
                condition = f' WHERE "{choice.name}" = {_quoted(value)}'
                said = f" over the rows whose `{choice.name}` is `{value}`"
                for name, words in (
                    ("SUM", "sum"),
                    ("AVG", "average"),
                    ("MAX", "highest value"),
                    ("MIN", "lowest value"),
                ):
                    yield from _aggregate(table, column, name, words, condition, said)


def _aggregate(table: Table, column: Column, name: str, words: str, condition: str, said: str) -> Iterator[_Proposal]:
    rounded = " Round it to two digits after the point." if name == "AVG" else ""
    yield (
        f"{name} {table.name}.{column.name}{' where' if condition else ''}",
        f'SELECT {name}("{column.name}") FROM "{table.name}"{condition}',
        f"In the table `{table.name}`, what is the {words} of `{column.name}`{said}?{rounded}",
        2 if name == "AVG" else None,
    )


def _extremes(table: Table) -> Iterator[_Proposal]:
    for column in (one for one in table.columns if one.is_number):
        for best, words in (("MAX", "highest"), ("MIN", "lowest")):
            for key in (one for one in table.columns if one.is_key and one.name != column.name):
                # All rows that have it: where there are several, the answer is not the only one, and is dropped.
                yield (
                    f"{best} row {table.name}.{column.name}.{key.name}",
                    f'SELECT "{key.name}" FROM "{table.name}" WHERE "{column.name}" = (SELECT {best}("{column.name}") FROM "{table.name}")',
                    f"In the table `{table.name}`, what is the `{key.name}` of the row with the {words} `{column.name}`?",
                    None,
                )
    for choice in (one for one in table.columns if one.is_choice):
        inner = f'SELECT COUNT(*) AS n FROM "{table.name}" GROUP BY "{choice.name}"'
        yield (
            f"mode {table.name}.{choice.name}",
            f'SELECT "{choice.name}" FROM "{table.name}" GROUP BY "{choice.name}" HAVING COUNT(*) = (SELECT MAX(n) FROM ({inner}) AS counts)',
            f"Which value of `{choice.name}` do most rows of the table `{table.name}` have?",
            None,
        )


def _joins(table: Table, tables: Sequence[Table], chance: random.Random) -> Iterator[_Proposal]:
    """Follow a column such as `customer_id` to the table `customers`."""
    for other in tables:
        stem = re.sub(r"s$", "", other.name)
        link = next(
            (one.name for one in table.columns if one.name in (f"{stem}_id", f"{stem}Id", f"{other.name}_id")), None
        )
        target = next(
            (one.name for one in other.columns if one.name in ("id", f"{stem}_id", f"{stem}Id", f"{other.name}_id")),
            None,
        )
        if other.name == table.name or link is None or target is None:
            continue
        join = f'"{table.name}" AS a JOIN "{other.name}" AS b ON a."{link}" = b."{target}"'
        for key in (
            one for one in other.columns if one.is_key and all(isinstance(value, str) for value in one.values)
        ):
            for value in chance.sample(key.values, min(3, len(key.values))):
                said = f"belong to the row of `{other.name}` whose `{key.name}` is `{value}`"
                where = f'WHERE b."{key.name}" = {_quoted(value)}'
                yield (
                    f"join count {table.name}.{other.name}.{key.name}",
                    f"SELECT COUNT(*) FROM {join} {where}",
                    f"How many rows of the table `{table.name}` {said}, by their `{link}`?",
                    None,
                )
                for column in (one for one in table.columns if one.is_number):
                    yield (
                        f"join sum {table.name}.{column.name}.{other.name}.{key.name}",
                        f'SELECT SUM(a."{column.name}") FROM {join} {where}',
                        f"What is the sum of `{column.name}` over the rows of the table `{table.name}` that {said}, by their `{link}`?",
                        None,
                    )


def _absent(tool: Tool, argument: str, table: Table, chance: random.Random) -> Iterator[Chain]:
    for key in (one for one in table.columns if one.is_key and all(isinstance(value, str) for value in one.values)):
        for column in (one for one in table.columns if one.name != key.name):
            word = ("Harbour", "Meadow", "Lantern", "Orchard")[chance.randrange(4)]
            value = f"{word} {chance.randrange(100, 999)}"
            query = f'SELECT "{column.name}" FROM "{table.name}" WHERE "{key.name}" = {_quoted(value)}'
            yield Chain(
                family="refusal",
                steps=(Step(tool=tool.name, arguments={argument: query}),),
                shape=f"sql absent {table.name}.{key.name}.{column.name}",
                outcome="nothing",
                question=f"In the table `{table.name}`, what is the `{column.name}` of the row whose `{key.name}` is `{value}`?",
                subject=value,
            )


def _misspelt(
    tool: Tool, argument: str, table: Table, tables: Sequence[Table], chance: random.Random
) -> Iterator[Chain]:
    """Misspell the name of a table: the query fails, and the tables that there are tell the right name."""
    name = table.name
    spots = [
        at
        for at in range(1, len(name) - 1)
        if name[at].isalpha() and name[at + 1].isalpha() and name[at] != name[at + 1]
    ]
    if len(name) < 5 or not spots:
        return
    at = spots[chance.randrange(len(spots))]
    wrong = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    if wrong in {one.name for one in tables}:
        return
    for shape, query, question, digits in [*_counts(table), *list(_totals(table))[:4]][:6]:
        yield Chain(
            family="recovery",
            steps=(
                Step(tool=tool.name, arguments={argument: query.replace(f'"{name}"', f'"{wrong}"')}, fails=True),
                Step(tool=tool.name, arguments={argument: query}),
            ),
            shape=f"sql misspelt {shape}",
            answer=CELL,
            digits=digits,
            question=f"{question.replace(f'`{name}`', f'`{wrong}`')} The name of the table may be misspelt: if there is no such table, take "
            "the one whose name differs from it only in two neighbouring letters that are swapped.",
        )


def _chain(tool: Tool, argument: str, shape: str, query: str, question: str, digits: int | None) -> Chain:
    step = Step(tool=tool.name, arguments={argument: query})
    return Chain(family="query", steps=(step,), shape=f"sql {shape}", answer=CELL, question=question, digits=digits)


def _quoted(value: Any) -> str:
    return str(value) if not isinstance(value, str) else "'" + value.replace("'", "''") + "'"


def _is_name(name: Any) -> bool:
    return is_tame_key(name) and is_tame(name, 40) and re.fullmatch(r"[A-Za-z_]\w*", name) is not None
