"""A terminal on which text from outside does nothing."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from mcp_grpo.inert import inert


class InertConsole(Console):
    """A console that shows control characters in what it prints; what `rich` itself adds, such as colours, is obeyed."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """See `rich.console.Console`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(inert(segment.text), segment.style)
