from collections import Counter
from typing import Any

import pytest

from mcp_grpo.desk.world.corpus import Corpus, best_sentences, key_words
from mcp_grpo.desk.world.market import Market
from mcp_grpo.desk.world.pages import Fact, money


DIGEST = "0a2beaf867a3a4b9de74f50adeb76345b589625b6ccc3634fbb424cec4fb2c55"
"""Of all pages and facts with seed 0. It changes only when the world is meant to change."""


@pytest.fixture(scope="module")
def market() -> Market:
    return Market()


@pytest.fixture(scope="module")
def corpus(market: Market) -> Corpus:
    return Corpus(market)


def fiscal(fact: Fact) -> tuple[int, Any]:
    """Year and period of a fact about figures: its subject is `"FY2023"` or `"Q2 2024"`."""
    return int(fact.subject[-4:]), fact.subject[:2]


def test_the_pages_of_a_seed_are_the_same_to_the_last_byte(corpus: Corpus) -> None:
    assert corpus.digest() == DIGEST


def test_pages_are_of_the_past_and_of_invented_domains(corpus: Corpus) -> None:
    pages = corpus.pages()
    assert 1_000 < len(pages) < 5_000
    assert len({page.url for page in pages}) == len(pages)
    for page in pages:
        assert "2021-01-04" <= page.published <= corpus.today
        assert page.domain.endswith(".example")
        assert page.url.startswith(f"https://{page.domain}/")


def test_what_is_not_stale_agrees_with_the_market(market: Market, corpus: Corpus) -> None:
    num_checked: Counter[str] = Counter()
    for fact in corpus.facts():
        if fact.is_stale:
            continue
        if fact.kind in ("revenue", "net_income"):
            year, period = fiscal(fact)
            current = {one.fiscal_year: one for one in market.income_statements(fact.symbol, period)}
            assert fact.amount == getattr(current[year], fact.kind)
        elif fact.kind == "ceo":
            assert fact.value == market.company(fact.symbol).ceo
        elif fact.kind == "split":
            assert fact.value in {f"{one.numerator}-for-{one.denominator}" for one in market.splits(fact.symbol)}
        elif fact.kind == "halt":
            assert fact.date in market.halts(fact.symbol)
        elif fact.kind == "rename":
            assert (fact.subject, fact.value) in {(one.old_symbol, one.new_symbol) for one in market.symbol_changes()}
        else:
            continue
        num_checked[fact.kind] += 1
    assert min(num_checked.values()) >= 10
    assert set(num_checked) == {"revenue", "net_income", "ceo", "split", "halt", "rename"}


def test_stale_figures_are_those_before_the_restatement(market: Market, corpus: Corpus) -> None:
    stale = [fact for fact in corpus.facts("revenue") if fact.is_stale]
    assert len(stale) > 40
    for fact in stale:
        year, period = fiscal(fact)
        assert fact.amount == market.first_reported(fact.symbol, year, period).revenue
        assert fact.superseded_by
        page = corpus.page(fact.superseded_by)
        assert page
        assert page.kind == "restatement"


@pytest.mark.parametrize(
    "kind", ["ceo", "cfo", "headquarters", "plant_jobs", "contract", "product_price", "price_target", "takeover"]
)
def test_sources_contradict_each_other_and_one_is_right(kind: str, corpus: Corpus) -> None:
    facts = corpus.facts(kind)
    assert sum(fact.is_stale for fact in facts) >= 10
    right: dict[tuple[str, str], set[str]] = {}
    for fact in facts:
        if not fact.is_stale:
            right.setdefault((fact.symbol, fact.subject), set()).add(fact.value)
    assert all(len(values) == 1 for values in right.values())
    assert {(fact.symbol, fact.subject) for fact in facts} == set(right)
    for fact in facts:
        if fact.is_stale:
            assert {other.value for other in facts if other.url == fact.superseded_by} == right[
                fact.symbol, fact.subject
            ]


def test_a_page_states_what_its_fact_says(corpus: Corpus) -> None:
    for fact in corpus.facts():
        page = corpus.page(fact.url)
        assert page
        text = f"{page.title} {page.text}"
        if fact.kind in ("takeover", "delisting"):
            continue
        exact = "" if fact.amount is None else f"{abs(fact.amount) // 1_000:,}"
        assert fact.value.lstrip("-") in text or (page.domain == "filings.example" and exact in text)


def test_before_a_rename_pages_use_the_old_name(market: Market, corpus: Corpus) -> None:
    for change in market.symbol_changes():
        own = [page for page in corpus.pages("earnings") if f": {change.old_symbol})" in page.text]
        new = [page for page in corpus.pages("earnings") if f": {change.new_symbol})" in page.text]
        assert own
        assert all(page.published < change.date and change.old_name in page.title for page in own)
        assert all(page.published >= change.date and change.new_name in page.title for page in new)


def test_what_is_looked_for_is_found_first_or_nearly(corpus: Corpus) -> None:
    for fact in corpus.facts("contract")[:40]:
        urls = [hit.page.url for hit in corpus.search(f"contract {fact.subject} {fact.symbol}", limit=10)]
        assert fact.url in urls


def test_dates_and_domains_narrow_a_search(corpus: Corpus) -> None:
    found = corpus.search("Northwind Logistics revenue", 20, "2023-01-01", "2023-12-31", ("filings.example",))
    assert found
    assert all(hit.page.published[:4] == "2023" and hit.page.domain == "filings.example" for hit in found)
    rest = corpus.search("Northwind Logistics revenue", 20, exclude_domains=("filings.example", "tickerpost.example"))
    assert rest
    assert not {"filings.example", "tickerpost.example"} & {hit.page.domain for hit in rest}


def test_hits_are_ranked_and_scored_against_the_best(corpus: Corpus) -> None:
    scores = [hit.score for hit in corpus.search("Voltaris Foods headquarters", 20)]
    assert scores[0] == 1.0
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    "query", ['"', "NEAR( AND OR NOT", "a* -b ^c", "title:revenue", "'; DROP TABLE page; --", "the of"]
)
def test_no_query_is_a_syntax_error(query: str, corpus: Corpus) -> None:
    corpus.search(query)
    corpus.answer(query)


def test_an_answer_is_a_sentence_of_the_best_page(corpus: Corpus) -> None:
    for company in ("Voltaris Foods", "Northwind Logistics", "Northwind Logic"):
        answer = corpus.answer(f"Where are the headquarters of {company}?")
        assert answer
        sentence, page = answer
        assert sentence in page.text
        assert page == corpus.search(f"Where are the headquarters of {company}?")[0].page
    assert corpus.answer("the of") is None


def test_some_answers_are_stale(market: Market, corpus: Corpus) -> None:
    wrong = 0
    for fact in [one for one in corpus.facts("ceo") if one.is_stale]:
        answer = corpus.answer(f"Who is the CEO of {market.company(fact.symbol).short_name}?")
        wrong += bool(answer) and fact.value in answer[0]
    assert wrong >= 10


def test_words_that_say_nothing_are_left_out() -> None:
    assert key_words("What was the revenue of the Revenue, in 2023?") == ["revenue", "2023"]


def test_words_of_the_title_do_not_hide_the_sentence_that_is_asked_for(corpus: Corpus) -> None:
    page = next(page for page in corpus.pages("plant") if "opens" in page.title)
    assert "jobs" in best_sentences(page, f"{page.title} jobs", 1)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (948_561_000, "$948.6 million"),
        (-948_549_999, "-$948.5 million"),
        (999_949_999, "$999.9 million"),
        (999_950_000, "$1.00 billion"),
        (2_485_000_000, "$2.49 billion"),
    ],
)
def test_money_is_rounded_half_up(amount: int, text: str) -> None:
    assert money(amount, "USD") == text
