"""Tavily's API."""

import os
from collections.abc import Mapping
from typing import Any, cast

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.servers.search.backend import ExtractDepth, Format, Record, SearchRequest
from mcp_grpo.servers.vendor import Limits, VendorClient, required_key


KEY = "TAVILY_API_KEY"

_RESULT = ("title", "url", "content", "score", "published_date")
_PAGE = ("url", "title", "raw_content")
_FAILED = ("url", "error")


class TavilyBackend:
    """
    The web as Tavily finds it, with the key in `TAVILY_API_KEY`.

    `TAVILY_BASE_URL` is another address than the vendor's.

    Args:
        limits ([`Limits`], *optional*):
            How long to wait and how much to ask.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        key = required_key(KEY, "recorded")
        url = os.environ.get("TAVILY_BASE_URL") or "https://api.tavily.com"
        headers = {"Authorization": f"Bearer {key}"}
        self._client = VendorClient(
            "Tavily", url, KEY, key, headers, limits or Limits(timeout=20.0, rate=1.5, burst=10)
        )

    async def search(self, request: SearchRequest) -> list[Record]:
        """See [`SearchBackend.search`]."""
        body = {
            "query": request.query,
            "max_results": request.max_results,
            "search_depth": request.search_depth,
            "topic": request.topic,
            "time_range": request.time_range,
            "start_date": request.start_date,
            "end_date": request.end_date,
            "include_domains": list(request.include_domains) or None,
            "exclude_domains": list(request.exclude_domains) or None,
        }
        answer = await self._post("search", body)
        return [_only(one, _RESULT) for one in self._list(answer, "results")[: request.max_results]]

    async def extract(
        self, urls: list[str], extract_depth: ExtractDepth, format: Format, query: str | None
    ) -> tuple[list[Record], list[Record]]:
        """See [`SearchBackend.extract`]."""
        body = {"urls": urls, "extract_depth": extract_depth, "format": format, "query": query}
        answer = await self._post("extract", body)
        read = [_only(one, _PAGE) for one in self._list(answer, "results")]
        failed = [_only(one, _FAILED) for one in self._list(answer, "failed_results")]
        return read, failed

    async def qna(self, query: str) -> Record:
        """See [`SearchBackend.qna`]. The source is the best page of the search that the answer is from."""
        answer = await self._post("search", {"query": query, "include_answer": True, "max_results": 5})
        results = self._list(answer, "results")
        text = answer.get("answer")
        if not isinstance(text, str) or not text.strip():
            raise ToolError("Tavily has no answer to this. Ask in other words, or use tavily_search.")
        return {"answer": text, "url": results[0].get("url") if results else None}

    async def close(self) -> None:
        """See [`SearchBackend.close`]."""
        await self._client.close()

    async def _post(self, path: str, body: Mapping[str, Any]) -> Record:
        answer = await self._client.post(path, body, is_read=True)
        if not isinstance(answer, dict):
            raise self._client.unexpected(answer)
        return cast(Record, answer)

    def _list(self, answer: Record, name: str) -> list[Record]:
        values = answer.get(name)
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in cast(list[Any], values)):
            raise self._client.unexpected(answer)
        return cast(list[Record], values)


def _only(record: Record, fields: tuple[str, ...]) -> Record:
    return {name: record[name] for name in fields if record.get(name) is not None}
