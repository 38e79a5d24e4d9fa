"""What a source of web pages has to answer: one method per tool."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol


Record = dict[str, Any]
SearchDepth = Literal["basic", "advanced", "fast", "ultra-fast"]
ExtractDepth = Literal["basic", "advanced"]
TimeRange = Literal["day", "week", "month", "year"]
Format = Literal["markdown", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """
    What to search for.

    Args:
        query (`str`):
            Words to look for; not empty.
        max_results (`int`):
            Most pages to return, 5 to 20.
        search_depth (`str`, *optional*, defaults to `"basic"`):
            `"advanced"` returns longer excerpts.
        topic (`str`, *optional*, defaults to `"general"`):
            The only one there is.
        time_range (`str`, *optional*):
            Only pages of the last day, week, month or year.
        start_date (`str`, *optional*):
            Only pages published on this ISO date or later.
        end_date (`str`, *optional*):
            Only pages published on this ISO date or earlier.
        include_domains (`tuple[str, ...]`, *optional*, defaults to `()`):
            Only pages of these domains.
        exclude_domains (`tuple[str, ...]`, *optional*, defaults to `()`):
            No pages of these domains.
    """

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
    Where the search server has its pages from.

    What the caller can mend is raised as `mcp.server.mcpserver.exceptions.ToolError` with a text that says what to do;
    the policy reads it.
    """

    async def search(self, request: SearchRequest) -> list[Record]:
        """Pages, best first: `title`, `url`, `content` (an excerpt), `score`, and `published_date` where it is known."""
        ...

    async def extract(
        self, urls: list[str], extract_depth: ExtractDepth, format: Format, query: str | None
    ) -> tuple[list[Record], list[Record]]:
        """Pages that were read (`url`, `title` where it is known, `raw_content`), and those that were not (`url`, `error`)."""
        ...

    async def qna(self, query: str) -> Record:
        """A short answer and where it is from: `answer`, `url`. `url` is `None` where the source does not say."""
        ...

    async def close(self) -> None:
        """Let go of connections. Called once, when the server ends."""
        ...
