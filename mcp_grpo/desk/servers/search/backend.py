"""The face of a source of web pages: one method per tool."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol


Record = dict[str, Any]
SearchDepth = Literal["basic", "advanced", "fast", "ultra-fast"]
ExtractDepth = Literal["basic", "advanced"]
TimeRange = Literal["day", "week", "month", "year"]
Format = Literal["markdown", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A search: words and filters."""

    query: str
    max_results: int = 5
    search_depth: SearchDepth = "basic"
    topic: str = "general"
    time_range: TimeRange | None = None
    start_date: str | None = None
    end_date: str | None = None
    include_domains: tuple[str, ...] = ()
    exclude_domains: tuple[str, ...] = ()


class SearchBackend(Protocol):
    """
    Source of the search server's pages. Errors that the caller can correct are raised as `ToolError`.

    What the caller can mend is raised as `mcp.server.mcpserver.exceptions.ToolError` with a text that says what to do;
    the policy reads it.
    """

    async def search(self, request: SearchRequest) -> list[Record]:
        """Return pages, best first: `title`, `url`, `content` (an excerpt), `score`, and `published_date` if known."""
        ...

    async def extract(
        self, urls: list[str], extract_depth: ExtractDepth, format: Format, query: str | None
    ) -> tuple[list[Record], list[Record]]:
        """Return the pages read (`url`, `title` if known, `raw_content`) and those that failed (`url`, `error`)."""
        ...

    async def qna(self, query: str) -> Record:
        """Return a short `answer` and its `url`, which is `None` where the source does not say."""
        ...

    async def close(self) -> None:
        """Close the connections. Called once, when the server ends."""
        ...
