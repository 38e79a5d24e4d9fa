"""A table of what was measured, for a terminal, for Markdown, and for a page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mcp_grpo.inert import inert, markdown


_EDGE = 3  # what a column has beside its text: a line, and a space on both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """
    A table, before it is known where it is shown. Names in it may be from outside: they do nothing there.

    Args:
        title (`str`):
            What it is about.
        columns (`Sequence[str]`):
            What the columns are called.
        rows (`Sequence[tuple[str, Sequence[str]]]`):
            A label, and a text for each column.
        head (`str`, *optional*, defaults to `""`):
            What the labels are.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    head: str = ""

    def markdown(self) -> str:
        """Return it as Markdown, below its title."""
        lines = [(self.head, *self.columns), ["---"] * (1 + len(self.columns))]
        lines += [(markdown(label), *cells) for label, cells in self.rows]
        return "\n".join([f"{self.title}:", "", *("| " + " | ".join(line) + " |" for line in lines)])

    def table(self) -> Table:
        """Return it for a terminal."""
        table = Table(title=Text(self.title))
        table.add_column(Text(self.head))
        for column in self.columns:
            table.add_column(Text(column), justify="right")
        for label, cells in self.rows:
            table.add_row(Text(inert(label)), *map(Text, cells))
        return table

    def tables(self, width: int) -> list[Table]:
        """Return it for a terminal of some width: where it is wider, intervals get lines of their own, and columns are shared out."""
        if self._width <= width:
            return [self.table()]
        rows = [
            (label.replace(", ", ",\n"), [cell.replace(" (", "\n(") for cell in cells]) for label, cells in self.rows
        ]
        high, starts = replace(self, rows=rows), [0]
        for end in range(2, 1 + len(self.columns)):
            if high._between(starts[-1], end)._width > width:
                starts.append(end - 1)
        ends = [*starts[1:], len(self.columns)]
        return [high._between(start, end).table() for start, end in zip(starts, ends, strict=True)]

    @property
    def _width(self) -> int:
        texts = [(self.head, *self.columns), *((inert(label), *cells) for label, cells in self.rows)]
        return 1 + sum(_EDGE + max(map(_cells, column)) for column in zip(*texts, strict=True))

    def _between(self, start: int, end: int) -> "Grid":
        return replace(
            self, columns=self.columns[start:end], rows=[(label, cells[start:end]) for label, cells in self.rows]
        )


def _cells(text: str) -> int:
    return max(map(cell_len, text.split("\n")))
