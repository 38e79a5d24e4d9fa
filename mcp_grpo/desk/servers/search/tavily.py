"""Tavily's API."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.desk.servers.search.backend import ExtractDepth, Format, Record, SearchRequest
from mcp_grpo.desk.servers.vendor import Limits, VendorClient, only, required_key


KEY = "TAVILY_API_KEY"

_RESULT = ("title", "url", "content", "score", "published_date")
_PAGE = ("url", "title", "raw_content")
_FAILED = ("url", "error")


class TavilyBackend:
    """Tavily's search, with the key in `TAVILY_API_KEY`; `TAVILY_BASE_URL` overrides the address."""

    def __init__(self, limits: Limits | None = None) -> None:
        key = required_key(KEY, "recorded")
        url = os.environ.get("TAVILY_BASE_URL") or "https://api.tavily.com"
        headers = {"Authorization": f"Bearer {key}"}
        self._client = VendorClient(
            "Tavily", url, KEY, key, headers, limits or Limits(timeout=20.0, rate=1.5, burst=10)
        )

    async def search(self, request: SearchRequest) -> list[Record]:
        fields = asdict(request)
        body = {name: list(value) or None if isinstance(value, tuple) else value for name, value in fields.items()}
        answer = await self._post("search", body)
        return [only(one, _RESULT) for one in self._client.records(answer, "results")[: request.max_results]]

    async def extract(
        self, urls: list[str], extract_depth: ExtractDepth, format: Format, query: str | None
    ) -> tuple[list[Record], list[Record]]:
        body = {"urls": urls, "extract_depth": extract_depth, "format": format, "query": query}
        answer = await self._post("extract", body)
        read = [only(one, _PAGE) for one in self._client.records(answer, "results")]
        failed = [only(one, _FAILED) for one in self._client.records(answer, "failed_results")]
        return read, failed

    async def qna(self, query: str) -> Record:
        """Return Tavily's answer, with the best page of its search as the source."""
        answer = await self._post("search", {"query": query, "include_answer": True, "max_results": 5})
        results = self._client.records(answer, "results")
        text = answer.get("answer")
        if not isinstance(text, str) or not text.strip():
            raise ToolError("Tavily has no answer to this. Ask in other words, or use tavily_search.")
        return {"answer": text, "url": results[0].get("url") if results else None}

    async def close(self) -> None:
        await self._client.close()

    async def _post(self, path: str, body: Mapping[str, Any]) -> Record:
        answer = await self._client.post(path, body, is_read=True)
        if not isinstance(answer, dict):
            raise self._client.unexpected(answer)
        return cast(Record, answer)
