"""Pages of the invented web."""

from datetime import date, timedelta

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.desk.servers.search.backend import ExtractDepth, Format, Record, SearchRequest
from mcp_grpo.desk.world.corpus import Corpus, best_sentences
from mcp_grpo.desk.world.pages import Page


DAYS = {"day": 1, "week": 7, "month": 31, "year": 366}
NUM_SENTENCES = {"basic": 2, "fast": 2, "ultra-fast": 1, "advanced": 4}


class RecordedSearch:
    """A [`SearchBackend`] that answers from the invented web, always the same."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    async def search(self, request: SearchRequest) -> list[Record]:
        start = request.start_date
        if request.time_range:
            since = date.fromisoformat(self._corpus.today) - timedelta(days=DAYS[request.time_range])
            start = max(start or "", since.isoformat())
        hits = self._corpus.search(
            request.query,
            request.max_results,
            start,
            request.end_date,
            request.include_domains,
            request.exclude_domains,
        )
        return [
            {
                "title": hit.page.title,
                "url": hit.page.url,
                "content": best_sentences(hit.page, request.query, NUM_SENTENCES[request.search_depth]),
                "score": hit.score,
                "published_date": hit.page.published,
            }
            for hit in hits
        ]

    async def extract(
        self, urls: list[str], extract_depth: ExtractDepth, format: Format, query: str | None
    ) -> tuple[list[Record], list[Record]]:
        """Return whole pages at either depth: they are short."""
        read: list[Record] = []
        failed: list[Record] = []
        for url in dict.fromkeys(urls):
            page = self._corpus.page(url)
            if page is None:
                failed.append({"url": url, "error": "there is no such page"})
            else:
                read.append({"url": page.url, "raw_content": _content(page, format, query)})
        return read, failed

    async def qna(self, query: str) -> Record:
        """Return a sentence of the best page, whether that page is right or not."""
        answer = self._corpus.answer(query)
        if answer is None:
            raise ToolError("No page has any of these words. Ask with other words, or use tavily_search.")
        sentence, page = answer
        return {"answer": sentence, "url": page.url, "published_date": page.published}

    async def close(self) -> None: ...


def _content(page: Page, format: Format, query: str | None) -> str:
    text = best_sentences(page, query, 3) if query else page.text
    if format == "text":
        return f"{page.title}\nPublished {page.published}\n{text}"
    return f"# {page.title}\n*Published {page.published}*\n\n{text}"
