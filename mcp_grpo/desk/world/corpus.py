"""The invented web: pages about the market, found by their words."""

import hashlib
import re
import sqlite3
from dataclasses import astuple, dataclass
from itertools import islice

from mcp_grpo.desk.world.market import Market
from mcp_grpo.desk.world.newsroom import Newsroom
from mcp_grpo.desk.world.pages import Fact, Page


STOP_WORDS = frozenset((
    "a", "about", "an", "and", "are", "as", "at", "be", "been", "by", "did", "do", "does", "for", "from", "had",
    "has", "have", "how", "in", "is", "it", "its", "many", "much", "of", "on", "or", "s", "tell", "that", "the",
    "their", "this", "to", "was", "were", "what", "when", "where", "which", "who", "whom", "whose", "why", "will",
    "with",
))  # fmt: skip
MAX_WORDS = 32
TITLE_WEIGHT = 2
NUM_RANKED = 80
"""Number of the best pages by BM25 that are ranked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A page found. `score` is relative to the best page, which has 1.0."""

    page: Page
    score: float


class Corpus:
    """The invented web, consistent with a market."""

    def __init__(self, market: Market) -> None:
        pages, self._facts = Newsroom(market).write()
        self._pages = sorted(pages, key=lambda page: (page.published, page.url))
        self._by_url = {page.url: page for page in self._pages}
        self._stems_by_place: dict[int, frozenset[str]] = {}
        self.today = market.today
        # A server may answer on another thread than the one that made it; never on two at the same time.
        self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._database.execute("CREATE VIRTUAL TABLE page USING fts5(title, text, tokenize = 'porter unicode61')")
        self._database.execute("BEGIN")
        self._database.executemany(
            "INSERT INTO page (rowid, title, text) VALUES (?, ?, ?)",
            ((place, page.title, page.text) for place, page in enumerate(self._pages)),
        )
        self._database.execute("COMMIT")

    def pages(self, kind: str | None = None) -> list[Page]:
        """Return all pages, or those of a kind, oldest first."""
        return [page for page in self._pages if kind is None or page.kind == kind]

    def page(self, url: str) -> Page | None:
        """Return a page by its address, or `None`."""
        return self._by_url.get(url) or self._by_url.get(url.rstrip("/"))

    def facts(self, kind: str | None = None) -> list[Fact]:
        """Return what the pages state, by kind, symbol, subject and weight; the last of a subject is right."""
        return [fact for fact in self._facts if kind in (None, fact.kind)]

    def search(
        self,
        query: str,
        limit: int = 5,
        start: str | None = None,
        end: str | None = None,
        include_domains: tuple[str, ...] = (),
        exclude_domains: tuple[str, ...] = (),
    ) -> list[Hit]:
        """Return pages that have any of the words, ranked by BM25 and by how many of the words they have."""
        words = key_words(query)
        if not words:
            return []
        # Rounded: the last digits of BM25 come from a logarithm, which machines do not compute alike.
        rows = self._database.execute(
            f"SELECT rowid, CAST(ROUND(-1000 * bm25(page, {TITLE_WEIGHT}.0, 1.0)) AS INTEGER) AS score FROM page "
            "WHERE page MATCH ? ORDER BY score DESC, rowid DESC",
            (" OR ".join(f'"{word}"' for word in words),),
        )
        within = (
            (place, score)
            for place, score in rows
            if _is_within(self._pages[place], start, end, include_domains, exclude_domains)
        )
        # BM25 hardly weighs frequent words such as `revenue`, so the number of matching words counts, too.
        wanted = {_stem(word) for word in words}
        ranked = [(score * len(wanted & self._stems(place)), place) for place, score in islice(within, NUM_RANKED)]
        ranked.sort(reverse=True)
        best = ranked[0][0] if ranked else 0
        return [
            Hit(page=self._pages[place], score=(200 * score + best) // max(1, 2 * best) / 100)
            for score, place in ranked[:limit]
        ]

    def answer(self, query: str) -> tuple[str, Page] | None:
        """
        Return the sentence of the best page that has the most words of a question, and the page.

        The page may be out of date.
        """
        hits = self.search(query, limit=1)
        if not hits:
            return None
        page = hits[0].page
        return best_sentences(page, query, 1), page

    def _stems(self, place: int) -> frozenset[str]:
        if place not in self._stems_by_place:
            page = self._pages[place]
            self._stems_by_place[place] = _stems_of(f"{page.title} {page.text}")
        return self._stems_by_place[place]

    def digest(self) -> str:
        """Return the SHA-256 of all pages and facts."""
        total = hashlib.sha256()
        for value in (*self._pages, *self._facts):
            total.update(repr(astuple(value)).encode())
        return total.hexdigest()


def key_words(query: str) -> list[str]:
    """Return the words of a query without stop words, each once."""
    words = dict.fromkeys(re.findall(r"\w+", query.lower()))
    return [word for word in words if word not in STOP_WORDS][:MAX_WORDS]


def best_sentences(page: Page, query: str, count: int) -> str:
    """Return the sentences of a page that have the most words of a query, in the order of the text."""
    wanted = {_stem(word) for word in key_words(query)}
    others = wanted - _stems_of(page.title)
    sentences = re.split(r"(?<=[.?!”])\s+(?=[A-Z“])", page.text)
    stems = [_stems_of(sentence) for sentence in sentences]
    weights = [(-len(others & one), -len(wanted & one)) for one in stems]
    best = sorted(range(len(sentences)), key=lambda place: (weights[place], place))[:count]
    return " ".join(sentences[place] for place in sorted(best))


def _stems_of(text: str) -> frozenset[str]:
    return frozenset(map(_stem, re.findall(r"\w+", text.lower())))


def _stem(word: str) -> str:
    """Stem a word well enough to equate `reports` and `reported`."""
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def _is_within(
    page: Page, start: str | None, end: str | None, include: tuple[str, ...], exclude: tuple[str, ...]
) -> bool:
    if (start and page.published < start) or (end and page.published > end):
        return False
    if include and not any(_is_of(page.domain, one) for one in include):
        return False
    return not any(_is_of(page.domain, one) for one in exclude)


def _is_of(domain: str, other: str) -> bool:
    other = other.lower().removeprefix("https://").removeprefix("www.").strip("/")
    return domain == other or domain.endswith(f".{other}")
