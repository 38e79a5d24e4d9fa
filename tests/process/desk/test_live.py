"""Servers with live backends, against an API on this machine that behaves like the vendor's."""

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.vendor_api import Reply, Seen, VendorAPI, vendor_api
from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.desk.servers import vendor
from mcp_grpo.desk.servers.finance.fmp import FMPBackend
from mcp_grpo.desk.servers.finance.polygon import PolygonBackend
from mcp_grpo.desk.servers.search.backend import SearchRequest
from mcp_grpo.desk.servers.search.tavily import TavilyBackend
from mcp_grpo.desk.servers.slack.backend import Ledger, SlackError
from mcp_grpo.desk.servers.slack.live import LiveSlack
from mcp_grpo.desk.servers.vendor import Limits, VendorError
from mcp_grpo.errors import SettingsError
from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = [pytest.mark.anyio, pytest.mark.full]

ROOT = Path(__file__).parents[3]
TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))
QUICK = Limits(timeout=5.0, connect_timeout=2.0, deadline=8.0, rate=1000.0, burst=1000)
KEYS = {
    "FMP_API_KEY": "fmp-secret",
    "POLYGON_API_KEY": "polygon-secret",
    "TAVILY_API_KEY": "tvly-secret",
    "SLACK_BOT_TOKEN": "xoxb-secret",
}
URLS = ("FMP_BASE_URL", "POLYGON_BASE_URL", "TAVILY_BASE_URL", "SLACK_API_URL")
BACKENDS = {"fmp": FMPBackend, "polygon": PolygonBackend, "tavily": TavilyBackend, "slack": LiveSlack}
QUOTE = {"symbol": "ACME", "name": "Acme", "price": 12.5, "previousClose": 12.0, "timestamp": 1, "priceAvg50": 11.0}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "FIRST_DELAY", 0.01)


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[VendorAPI, None]:
    async with vendor_api() as api:
        for name, key in KEYS.items():
            monkeypatch.setenv(name, key)
        for name in URLS:
            monkeypatch.setenv(name, api.url)
        yield api


@asynccontextmanager
async def opened(name: str, limits: Limits = QUICK) -> AsyncGenerator[Any, None]:
    backend = BACKENDS[name](limits)
    try:
        yield backend
    finally:
        await backend.close()


def server(name: str, backend: str, api: VendorAPI, **options: Any) -> ServerConfig:
    return ServerConfig(
        name=name,
        transport="stdio",
        command=sys.executable,
        args=("-m", f"mcp_grpo.desk.servers.{name}", "--backend", backend),
        cwd=str(ROOT),
        env=KEYS | dict.fromkeys(URLS, api.url),
        **options,
    )


async def read(name: str, backend: Any) -> object:
    """One request that only reads."""
    if name == "tavily":
        return await backend.search(SearchRequest(query="acme"))
    return await (backend.users(10, None) if name == "slack" else backend.stock_splits("ACME", 5))


GOOD = {
    "fmp": [],
    "polygon": {"status": "OK"},
    "tavily": {"results": []},
    "slack": {"ok": True, "members": []},
}


@pytest.mark.parametrize("name", BACKENDS)
class TestEveryVendor:
    async def test_a_missing_key_is_refused_by_name(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for variable in KEYS:
            monkeypatch.delenv(variable, raising=False)
        with pytest.raises(SettingsError, match=f"{name.upper()}_.* is not set.*leave --backend out"):
            BACKENDS[name]()

    async def test_a_wrong_key_names_the_variable_and_not_the_key(self, name: str, api: VendorAPI) -> None:
        api.script(Reply({"error": "bad key tvly-secret fmp-secret polygon-secret xoxb-secret"}, 401))
        async with opened(name) as backend:
            with pytest.raises(VendorError, match=r"\(401\).*" + name.upper()) as caught:
                await read(name, backend)
        variable = next(variable for variable in KEYS if variable.startswith(name.upper()))
        assert KEYS[variable] not in str(caught.value)
        assert caught.value.is_outage

    async def test_a_plan_that_does_not_cover_it_says_so(self, name: str, api: VendorAPI) -> None:
        api.script(Reply(b"Premium Query Parameter: upgrade", 402))
        async with opened(name) as backend:
            with pytest.raises(VendorError, match=r"plan.*Premium Query Parameter"):
                await read(name, backend)

    async def test_a_pause_is_kept_and_the_request_repeated(self, name: str, api: VendorAPI) -> None:
        api.script(Reply({}, 429, {"Retry-After": "0.1"}), Reply({}, 500), Reply(GOOD[name]))
        async with opened(name) as backend:
            await read(name, backend)
        assert len(api.requests) == 3

    async def test_a_slow_answer_is_given_up(self, name: str, api: VendorAPI) -> None:
        api.script(Reply(GOOD[name], delay=600))
        limits = Limits(timeout=0.1, deadline=0.3)
        async with opened(name, limits) as backend:
            with pytest.raises(VendorError, match="did not answer"):
                await read(name, backend)

    @pytest.mark.parametrize("body", [b"{", b"", b"<html></html>"])
    async def test_malformed_json_is_an_outage(self, name: str, api: VendorAPI, body: bytes) -> None:
        api.script(Reply(body))
        async with opened(name) as backend:
            with pytest.raises(VendorError, match="not JSON") as caught:
                await read(name, backend)
        assert caught.value.is_outage

    @pytest.mark.parametrize("body", [None, 3, "text", {"results": 3, "members": 3, "status": "OK"}, [3], {}])
    async def test_json_of_another_shape_is_an_outage(self, name: str, api: VendorAPI, body: Any) -> None:
        api.script(Reply(body))
        async with opened(name) as backend:
            with pytest.raises(VendorError, match="unexpected shape") as caught:
                await read(name, backend)
        assert caught.value.is_outage


class TestFMP:
    async def test_a_trajectory_reads_quotes_and_prices_through_the_server(self, api: VendorAPI) -> None:
        bars = [
            {
                "symbol": "ACME",
                "date": f"2025-06-2{day}",
                "open": 1.0,
                "high": 2.0,
                "low": 0.5,
                "close": 1.5,
                "volume": 9,
            }
            for day in (3, 4)
        ]

        def answer(seen: Seen) -> Reply:
            return Reply([QUOTE] if seen.path == "/quote" else bars)

        api.answer = answer
        async with ToolPool([server("finance", "fmp", api)]) as pool, pool.lease(TASK) as lease:
            quote = await lease.call(ToolCall(name="getQuote", arguments={"symbol": "acme"}))
            arguments = {"symbol": "ACME", "from": "2025-06-23", "to": "2025-06-24"}
            chart = await lease.call(ToolCall(name="getFullChart", arguments=arguments))
            api.script(Reply({"Error Message": "Invalid API KEY fmp-secret"}, 401))
            refused = await lease.call(ToolCall(name="getQuote", arguments={"symbol": "ACME"}))
        assert json.loads(quote.text) == {name: value for name, value in QUOTE.items() if name != "priceAvg50"}
        assert "2025-06-24" in chart.text
        assert [request.headers["apikey"] for request in api.requests][:2] == ["fmp-secret"] * 2
        assert api.requests[1].path == "/historical-price-eod/full"
        assert api.requests[1].query == {"symbol": "ACME", "from": "2025-06-23", "to": "2025-06-24"}
        assert refused.kind is not ResultKind.OK
        assert "FMP_API_KEY" in refused.text
        assert "secret" not in refused.text

    async def test_prices_as_traded_have_the_same_names_as_adjusted_ones(self, api: VendorAPI) -> None:
        bar = {"date": "2024-06-06", "adjOpen": 1.0, "adjHigh": 4.0, "adjLow": 0.5, "adjClose": 2.0, "volume": 7}
        api.script(Reply([bar, bar | {"date": "2024-06-07"}]))
        async with opened("fmp") as backend:
            bars = await backend.unadjusted_chart("ACME", "2024-06-06", "2024-06-07")
        assert bars[1] == {"date": "2024-06-06", "open": 1.0, "high": 4.0, "low": 0.5, "close": 2.0, "volume": 7}
        assert [bar["date"] for bar in bars] == ["2024-06-07", "2024-06-06"]
        assert api.requests[0].path == "/historical-price-eod/non-split-adjusted"

    async def test_a_price_that_is_missing_is_not_made_up(self, api: VendorAPI) -> None:
        api.script(Reply([{"date": "2024-06-06", "open": 1.0, "high": 4.0, "low": 0.5, "volume": 7}]))
        async with opened("fmp") as backend:
            with pytest.raises(VendorError, match="unexpected shape"):
                await backend.full_chart("ACME", "2024-06-06", "2024-06-07")

    async def test_an_unknown_symbol_is_an_error_that_the_policy_can_mend(self, api: VendorAPI) -> None:
        api.script(Reply([]))
        async with opened("fmp") as backend:
            for call in (
                backend.quote("X"),
                backend.company_profile("X"),
                backend.income_statement("X", 4, "FY"),
                backend.key_metrics("X", 4, "FY"),
                backend.full_chart("X", "2024-01-01", "2024-01-02"),
            ):
                with pytest.raises(ToolError, match="searchSymbol") as caught:
                    await call
                assert not isinstance(caught.value, VendorError)
            assert await backend.stock_splits("X", 4) == []
            assert await backend.search_name("X", 4, None) == []

    async def test_an_error_in_a_good_answer_is_an_error(self, api: VendorAPI) -> None:
        api.script(Reply({"Error Message": "Limit Reach . Please upgrade your plan"}))
        async with opened("fmp") as backend:
            with pytest.raises(VendorError, match="Limit Reach"):
                await backend.quote("ACME")

    async def test_arguments_are_those_of_the_api(self, api: VendorAPI) -> None:
        api.script(Reply([{"symbol": "ACME"}]))
        async with opened("fmp") as backend:
            await backend.search_symbol("AC", 3, "NYSE")
            await backend.search_name("acme", 3, None)
            await backend.income_statement("ACME", 2, "Q3")
            await backend.key_metrics("ACME", 2, "annual")
            await backend.stock_splits("ACME", 5)
            await backend.company_profile("ACME")
        assert [(seen.path, seen.query) for seen in api.requests] == [
            ("/search-symbol", {"query": "AC", "limit": "3", "exchange": "NYSE"}),
            ("/search-name", {"query": "acme", "limit": "3"}),
            ("/income-statement", {"symbol": "ACME", "limit": "2", "period": "Q3"}),
            ("/key-metrics", {"symbol": "ACME", "limit": "2", "period": "annual"}),
            ("/splits", {"symbol": "ACME", "limit": "5"}),
            ("/profile", {"symbol": "ACME"}),
        ]


def bar(day: date, close: float) -> dict[str, Any]:
    stamp = datetime(day.year, day.month, day.day, 4, tzinfo=UTC).timestamp()
    return {"t": int(stamp * 1000), "o": 1.0, "h": close + 1, "l": close - 1, "c": close, "v": 100}


class TestPolygon:
    async def test_a_trajectory_reads_a_quote_through_the_server(self, api: VendorAPI) -> None:
        today = datetime.now(UTC).date()
        bars = [bar(today - timedelta(days=days), close) for days, close in ((1, 11.0), (2, 10.0), (200, 30.0))]
        company = {"name": "Acme", "primary_exchange": "XNAS", "market_cap": 5e9}

        def answer(seen: Seen) -> Reply:
            return Reply({"status": "OK", "results": bars if "aggs" in seen.path else company})

        api.answer = answer
        async with ToolPool([server("finance", "polygon", api)]) as pool, pool.lease(TASK) as lease:
            quote = json.loads((await lease.call(ToolCall(name="getQuote", arguments={"symbol": "ACME"}))).text)
            metrics = await lease.call(ToolCall(name="getKeyMetrics", arguments={"symbol": "ACME"}))
        assert (quote["price"], quote["change"], quote["changePercentage"]) == (11.0, 1.0, 10.0)
        assert (quote["yearHigh"], quote["yearLow"], quote["exchange"]) == (31.0, 9.0, "NASDAQ")
        assert metrics.kind is ResultKind.TOOL_ERROR
        assert "no key metrics" in metrics.text
        assert {seen.headers["Authorization"] for seen in api.requests} == {"Bearer polygon-secret"}

    @pytest.mark.parametrize(("kind", "adjusted"), [("full_chart", "true"), ("unadjusted_chart", "false")])
    async def test_prices_are_adjusted_or_not(self, api: VendorAPI, kind: str, adjusted: str) -> None:
        api.script(Reply({"status": "DELAYED", "results": [bar(date(2025, 1, 3), 5.0), bar(date(2025, 7, 2), 4.0)]}))
        async with opened("polygon") as backend:
            bars = await getattr(backend, kind)("BRK.A", "2025-01-01", "2025-07-03")
        assert [(one["date"], one["close"]) for one in bars] == [("2025-01-03", 5.0), ("2025-07-02", 4.0)]
        assert api.requests[0].path == "/v2/aggs/ticker/BRK.A/range/1/day/2025-01-01/2025-07-03"
        assert (api.requests[0].query["adjusted"], api.requests[0].query["sort"]) == (adjusted, "desc")

    async def test_a_quarter_is_picked_from_the_reports(self, api: VendorAPI) -> None:
        lines = {"revenues": {"value": 7, "unit": "USD"}, "net_income_loss": {"value": -1}}
        reports = [
            {"fiscal_period": f"Q{number}", "fiscal_year": "2024", "financials": {"income_statement": lines}}
            for number in (3, 2, 1)
        ]
        api.script(Reply({"status": "OK", "results": reports}))
        async with opened("polygon") as backend:
            (report,) = await backend.income_statement("ACME", 1, "Q2")
            assert report["period"] == "Q2"
            assert (report["revenue"], report["netIncome"], report["reportedCurrency"]) == (7, -1, "USD")
            assert "eps" not in report
            with pytest.raises(ToolError, match="no income statement"):
                await backend.income_statement("ACME", 1, "Q4")

    async def test_a_split_has_the_new_shares_above_the_old(self, api: VendorAPI) -> None:
        split = {"execution_date": "2020-08-31", "split_from": 1, "split_to": 4}
        api.script(Reply({"status": "OK", "results": [split]}))
        async with opened("polygon") as backend:
            (record,) = await backend.stock_splits("ACME", 3)
        assert record == {"symbol": "ACME", "date": "2020-08-31", "numerator": 4, "denominator": 1}

    async def test_listings_are_found_by_the_start_of_their_symbol_or_by_name(self, api: VendorAPI) -> None:
        listing = {"ticker": "ACME", "name": "Acme", "currency_name": "usd", "primary_exchange": "XNYS"}
        api.script(Reply({"status": "OK", "results": [listing]}))
        async with opened("polygon") as backend:
            (found,) = await backend.search_symbol("ac", 3, "NYSE")
            await backend.search_name("acme", 3, None)
        assert found == {"symbol": "ACME", "name": "Acme", "currency": "USD", "exchange": "NYSE"}
        by_symbol, by_name = (seen.query for seen in api.requests)
        assert (by_symbol["ticker.gte"], by_symbol["ticker.lt"], by_symbol["exchange"]) == ("AC", "AC~", "XNYS")
        assert by_name["search"] == "acme"

    async def test_an_unknown_symbol_is_an_error_that_the_policy_can_mend(self, api: VendorAPI) -> None:
        api.script(Reply({"status": "OK", "resultsCount": 0}))
        async with opened("polygon") as backend:
            with pytest.raises(ToolError, match="searchSymbol"):
                await backend.full_chart("X", "2024-01-01", "2024-01-02")
            api.script(Reply({"status": "NOT_FOUND", "message": "Ticker not found."}, 404))
            with pytest.raises(VendorError, match="Ticker not found") as caught:
                await backend.company_profile("X")
        assert not caught.value.is_outage

    async def test_a_symbol_cannot_leave_its_place_in_the_path(self, api: VendorAPI) -> None:
        api.script(Reply({"status": "OK", "results": {}}))
        async with opened("polygon") as backend:
            await backend.company_profile("../X?a=1")
        assert api.requests[0].query == {}
        assert api.requests[0].path == "/v3/reference/tickers/../X?a=1"  # decoded again: it was one segment


class TestTavily:
    async def test_a_trajectory_searches_reads_and_asks_through_the_server(self, api: VendorAPI) -> None:
        page = {"title": "Acme", "url": "https://a.test/1", "content": "Acme grew.", "score": 0.9, "raw_content": None}

        def answer(seen: Seen) -> Reply:
            if seen.path == "/extract":
                failed = [{"url": "https://a.test/2", "error": "gone"}]
                return Reply(
                    {"results": [{"url": page["url"], "raw_content": "All of it."}], "failed_results": failed}
                )
            return Reply({"answer": "It grew." if seen.body.get("include_answer") else None, "results": [page]})

        api.answer = answer
        async with ToolPool([server("search", "tavily", api)]) as pool, pool.lease(TASK) as lease:
            found = await lease.call(ToolCall(name="tavily_search", arguments={"query": "acme", "time_range": "week"}))
            urls = ["https://a.test/1", "https://a.test/2"]
            extracted = await lease.call(ToolCall(name="tavily_extract", arguments={"urls": urls}))
            answered = await lease.call(ToolCall(name="tavily_qna", arguments={"query": "did acme grow?"}))
        assert "Acme grew." in found.text
        assert "All of it." in extracted.text
        assert "gone" in extracted.text
        assert "It grew." in answered.text
        assert "https://a.test/1" in answered.text
        assert api.requests[0].body["time_range"] == "week"
        assert {seen.headers["Authorization"] for seen in api.requests} == {"Bearer tvly-secret"}

    async def test_pages_that_failed_without_a_reason_are_still_an_error_of_the_arguments(
        self, api: VendorAPI
    ) -> None:
        api.script(Reply({"results": [], "failed_results": [{"url": "https://a.test/2"}]}))
        async with ToolPool([server("search", "tavily", api)]) as pool, pool.lease(TASK) as lease:
            result = await lease.call(ToolCall(name="tavily_extract", arguments={"urls": ["https://a.test/2"]}))
        assert result.kind == ResultKind.TOOL_ERROR
        assert "https://a.test/2: it was not read" in result.text

    async def test_only_what_was_asked_for_is_sent(self, api: VendorAPI) -> None:
        api.script(Reply({"results": []}))
        request = SearchRequest(query="acme", start_date="2025-01-01", include_domains=("a.test",))
        async with opened("tavily") as backend:
            assert await backend.search(request) == []
        assert api.requests[0].body == {
            "query": "acme",
            "max_results": 5,
            "search_depth": "basic",
            "topic": "general",
            "start_date": "2025-01-01",
            "include_domains": ["a.test"],
        }

    async def test_a_question_without_an_answer_is_an_error_that_the_policy_can_mend(self, api: VendorAPI) -> None:
        api.script(Reply({"answer": None, "results": []}))
        async with opened("tavily") as backend:
            with pytest.raises(ToolError, match="tavily_search"):
                await backend.qna("?")


class TestSlack:
    async def test_a_trajectory_reads_and_posts_through_the_server(self, api: VendorAPI) -> None:
        channel = {"id": "C1", "name": "general", "purpose": {"value": "All"}, "is_archived": False, "is_member": True}
        message = {
            "ts": "1.000001",
            "user": "U1",
            "text": "hi",
            "thread_ts": "1.000001",
            "reply_count": 2,
            "reactions": [{"name": "tada", "count": 1, "users": ["U2"]}],
        }
        answers = {
            "/conversations.list": {"channels": [channel], "response_metadata": {"next_cursor": "abc"}},
            "/users.list": {"members": [{"id": "U1", "name": "ann", "real_name": "Ann", "profile": {"title": "CEO"}}]},
            "/conversations.history": {"messages": [message], "has_more": False},
            "/conversations.replies": {
                "messages": [message, {"ts": "2.0", "bot_id": "B1", "text": "x", "thread_ts": "1"}]
            },
            "/chat.postMessage": {"channel": "C1", "ts": "3.000001"},
            "/reactions.add": {},
        }
        api.answer = lambda seen: Reply({"ok": True} | answers[seen.path])
        options = {"isolation": "meta", "reset_tool": "slack_reset"}
        async with ToolPool([server("slack", "live", api, **options)]) as pool, pool.lease(TASK) as lease:

            async def ask(name: str, **arguments: Any) -> Any:
                return json.loads((await lease.call(ToolCall(name=name, arguments=arguments))).text)

            assert await ask("slack_list_channels") == {
                "channels": [{"id": "C1", "name": "general", "purpose": "All"}],
                "next_cursor": "abc",
            }
            assert (await ask("slack_get_users"))["members"][0]["title"] == "CEO"
            seen = {"ts": "1.000001", "user": "U1", "text": "hi", "reply_count": 2}
            seen |= {"reactions": [{"name": "tada", "count": 1}]}
            assert (await ask("slack_get_channel_history", channel_id="C1"))["messages"] == [seen]
            thread = await ask("slack_get_thread_replies", channel_id="C1", thread_ts="1.000001")
            assert thread["messages"][1] == {"ts": "2.0", "user": "B1", "text": "x", "thread_ts": "1"}
            posted = await ask("slack_reply_to_thread", channel_id="C1", thread_ts="1.000001", text="yes")
            assert posted == {"ok": True, "channel": "C1", "ts": "3.000001"}
            await ask("slack_add_reaction", channel_id="C1", timestamp="1.000001", reaction="tada")
            state = await ask("slack_state")
        assert [(one["kind"], one["channel"]) for one in state["added"]] == [
            ("reply", "general"),
            ("reaction", "general"),
        ]
        body = next(seen.body for seen in api.requests if seen.path == "/chat.postMessage")
        assert body == {"channel": "C1", "thread_ts": "1.000001", "text": "yes"}
        assert {seen.headers["Authorization"] for seen in api.requests} == {"Bearer xoxb-secret"}

    async def test_a_refusal_has_the_code_and_advice(self, api: VendorAPI) -> None:
        api.script(Reply({"ok": False, "error": "is_archived"}))
        ledger = Ledger()
        async with opened("slack") as backend:
            with pytest.raises(SlackError, match=r"^is_archived: .*another channel"):
                await backend.post(ledger, "C1", "x", None)
            api.script(Reply({"ok": False, "error": "never_heard_of"}))
            with pytest.raises(SlackError, match=r"^never_heard_of: "):
                await backend.react(ledger, "C1", "1.0", "tada")
        assert ledger.added == []

    async def test_the_name_of_a_channel_that_was_not_listed_is_asked_for_once(self, api: VendorAPI) -> None:
        answers = {
            "/chat.postMessage": {"ok": True, "channel": "C1", "ts": "3.000001"},
            "/reactions.add": {"ok": True},
            "/conversations.info": {"ok": True, "channel": {"id": "C1", "name": "general"}},
        }
        api.answer = lambda seen: Reply(answers[seen.path])
        ledger = Ledger()
        async with opened("slack") as backend:
            await backend.post(ledger, "C1", "x", None)
            await backend.react(ledger, "C1", "1.0", "tada")
            assert [one.channel for one in ledger.added] == ["general", "general"]
            assert [seen.path for seen in api.requests].count("/conversations.info") == 1
            answers["/conversations.info"] = {"ok": False, "error": "missing_scope"}
            await backend.post(ledger, "C2", "x", None)
            assert ledger.added[-1].channel is None

    async def test_a_token_that_may_not_is_an_outage_that_names_the_scope(self, api: VendorAPI) -> None:
        api.script(Reply({"ok": False, "error": "missing_scope", "needed": "channels:read"}))
        async with opened("slack") as backend:
            with pytest.raises(VendorError, match=r"channels:read.*SLACK_BOT_TOKEN") as caught:
                await backend.channels(10, None)
        assert caught.value.is_outage

    async def test_a_post_is_not_repeated_after_an_unclear_failure(self, api: VendorAPI) -> None:
        api.script(Reply({}, 500))
        ledger = Ledger()
        async with opened("slack") as backend:
            with pytest.raises(VendorError, match="not known whether it was done"):
                await backend.post(ledger, "C1", "x", None)
        assert len(api.requests) == 1
        assert ledger.added == []

    async def test_only_the_channels_that_were_named_are_used(
        self, api: VendorAPI, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLACK_CHANNEL_IDS", "C1, C2")
        api.answer = lambda seen: Reply({"ok": True, "channel": {"id": seen.query["channel"], "name": "x"}})
        async with opened("slack") as backend:
            assert [one["id"] for one in (await backend.channels(10, None))["channels"]] == ["C1", "C2"]
            with pytest.raises(SlackError, match="channel_not_found"):
                await backend.post(Ledger(), "C3", "x", None)
        assert len(api.requests) == 2

    async def test_a_token_of_another_kind_is_refused(self, api: VendorAPI, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLACK_BOT_TOKEN", "nonsense")
        with pytest.raises(SettingsError, match="xoxb-") as caught:
            LiveSlack()
        assert "nonsense" not in str(caught.value)
