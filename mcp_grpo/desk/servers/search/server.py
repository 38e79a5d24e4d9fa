"""The tools of the search server, with the names and parameters of Tavily's MCP server."""

import functools
from typing import Annotated, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field, WithJsonSchema

from mcp_grpo.desk.servers.search.backend import (
    ExtractDepth,
    Format,
    SearchBackend,
    SearchDepth,
    SearchRequest,
    TimeRange,
)
from mcp_grpo.desk.servers.serving import READ_ONLY, DeskServer, closing, compact, iso_day, words_of


MAX_URLS = 20
NO_DOMAINS: list[str] = []


Topic = Annotated[Literal["general"], WithJsonSchema({"type": "string", "enum": ["general"]})]
Since = Annotated[TimeRange | None, Field(description="Only pages this recent")]
MaxResults = Annotated[float, Field(ge=5, le=20)]
Start = Annotated[str, Field(description="Published on or after, YYYY-MM-DD")]
End = Annotated[str, Field(description="Published on or before, YYYY-MM-DD")]
Urls = Annotated[list[str], Field(description="Addresses, as tavily_search gives them")]


def make_server(backend: SearchBackend) -> MCPServer:
    """Make the search server."""
    server = DeskServer("search", lifespan=closing(backend))
    tool = functools.partial(server.tool, annotations=READ_ONLY, structured_output=False)

    @tool(
        name="tavily_search", description="Search the web. Returns titles, addresses, dates and excerpts, best first."
    )
    async def search(
        query: str,
        search_depth: SearchDepth = "basic",
        topic: Topic = "general",
        time_range: Since = None,
        start_date: Start = "",
        end_date: End = "",
        max_results: MaxResults = 5,
        include_domains: list[str] = NO_DOMAINS,
        exclude_domains: list[str] = NO_DOMAINS,
    ) -> str:
        request = SearchRequest(
            query=words_of(query, "query"),
            max_results=int(max_results),
            search_depth=search_depth,
            topic=topic,
            time_range=time_range,
            start_date=_day(start_date, "start_date"),
            end_date=_day(end_date, "end_date"),
            include_domains=tuple(include_domains),
            exclude_domains=tuple(exclude_domains),
        )
        found = await backend.search(request)
        return compact({"results": found} if found else {"results": [], "note": "No page matches. Try other words."})

    @tool(name="tavily_extract", description=f"Read pages by their addresses, at most {MAX_URLS}.")
    async def extract(
        urls: Urls,
        extract_depth: ExtractDepth = "basic",
        format: Format = "markdown",
        query: Annotated[str, Field(description="Return only what is about this")] = "",
    ) -> str:
        if not 1 <= len(urls) <= MAX_URLS:
            raise ToolError(f"`urls` must hold 1 to {MAX_URLS} addresses, got {len(urls)}.")
        read, failed = await backend.extract(urls, extract_depth, format, query.strip() or None)
        if not read:
            problems = "; ".join(
                f"{one.get('url', 'a page')}: {one.get('error', 'it was not read')}" for one in failed
            )
            raise ToolError(f"No page could be read. {problems}. Use addresses that tavily_search returned.")
        return compact({"results": read, "failed_results": failed} if failed else {"results": read})

    @tool(
        name="tavily_qna",
        description="A short answer from the best page found, and its address. It may be out of date.",
    )
    async def qna(query: str) -> str:
        return compact(await backend.qna(words_of(query, "query")))

    return server


def _day(value: str, name: str) -> str | None:
    return iso_day(value, name).isoformat() if value.strip() else None
