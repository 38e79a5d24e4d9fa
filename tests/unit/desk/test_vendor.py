import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import anyio
import httpx2
import pytest
from helpers.vendor_api import Reply, VendorAPI, vendor_api
from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.desk.servers import vendor
from mcp_grpo.desk.servers.serving import DeskServer
from mcp_grpo.desk.servers.vendor import Limits, TokenBucket, VendorClient, VendorError, required_key
from mcp_grpo.errors import MCPGRPOError, SettingsError
from mcp_grpo.tools import ToolPool
from mcp_grpo.types import OUTAGE, ResultKind, ToolCall


pytestmark = pytest.mark.anyio

KEY = "sk-very/secret+1"
QUICK = Limits(timeout=5.0, connect_timeout=2.0, deadline=8.0, rate=1000.0, burst=1000)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "FIRST_DELAY", 0.01)


@asynccontextmanager
async def opened(url: str, limits: Limits = QUICK) -> AsyncGenerator[VendorClient, None]:
    client = VendorClient("Acme", url, "ACME_KEY", KEY, {"Authorization": f"Bearer {KEY}"}, limits)
    try:
        yield client
    finally:
        await client.close()


async def failure(api: VendorAPI, limits: Limits = QUICK) -> VendorError:
    async with opened(api.url, limits) as client:
        with pytest.raises(VendorError) as caught:
            await client.get("things", {"apikey": KEY})
    return caught.value


class TestAnswers:
    async def test_the_json_of_a_good_answer_is_returned(self) -> None:
        async with vendor_api(Reply([1, {"a": "ü"}])) as api, opened(api.url + "/v1/") as client:
            assert await client.get("things", {"b": 2, "none": None}) == [1, {"a": "ü"}]
        (seen,) = api.requests
        assert (seen.path, seen.query) == ("/v1/things", {"b": "2"})
        assert seen.headers["Authorization"] == f"Bearer {KEY}"

    @pytest.mark.parametrize(
        ("status", "word", "is_outage"),
        [
            (400, "arguments", False),
            (401, "ACME_KEY", True),
            (402, "plan", True),
            (403, "ACME_KEY", True),
            (404, "names", False),
            (422, "arguments", False),
            (432, "plan", True),
        ],
    )
    async def test_a_refusal_says_what_to_do_and_is_not_repeated(
        self, status: int, word: str, is_outage: bool
    ) -> None:
        async with vendor_api(Reply({"error": "because"}, status)) as api:
            error = await failure(api)
        assert len(api.requests) == 1
        assert str(status) in str(error)
        assert word in str(error)
        assert "because" in str(error)
        assert error.is_outage is is_outage

    @pytest.mark.parametrize(
        "body",
        [
            {"Error Message": "the reason"},
            {"error": "the reason"},
            {"message": "the reason"},
            {"detail": {"error": "the reason"}},
            {"error": {"message": "the\nreason"}},
            b"the reason",
        ],
    )
    async def test_what_the_vendor_says_is_passed_on_in_one_line(self, body: Any) -> None:
        async with vendor_api(Reply(body, 402)) as api:
            assert str(await failure(api)).endswith("It says: the reason")

    async def test_an_answer_that_is_not_json_is_quoted_in_part(self) -> None:
        async with vendor_api(Reply(b"<html>" + b"x" * 10_000)) as api:
            error = await failure(api)
        assert "not JSON: '<html>xxx" in str(error)
        assert len(str(error)) < 400
        assert error.is_outage

    @pytest.mark.parametrize("body", [b'{"price": NaN}', b"[-Infinity]", b"[" * 100_000])
    async def test_what_only_python_takes_for_json_is_none(self, body: bytes) -> None:
        async with vendor_api(Reply(body)) as api:
            assert "not JSON" in str(await failure(api))

    async def test_json_of_another_shape_is_quoted_and_an_error_in_it_is_read(self) -> None:
        async with opened("http://127.0.0.1:9") as client:
            assert 'unexpected shape: [{"a": 1}]' in str(client.unexpected([{"a": 1}]))
            assert str(client.unexpected({"Error Message": "no such symbol"})).endswith("no such symbol")

    async def test_an_answer_that_is_too_large_is_not_read_to_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vendor, "MAX_BODY_BYTES", 1 << 20)
        async with vendor_api(Reply(b"[" + b" " * (1 << 20) + b"]")) as api:
            assert "larger than 1 MiB. Ask for less" in str(await failure(api))

    async def test_a_redirection_is_an_error(self) -> None:
        async with vendor_api(Reply({}, 302, {"location": "/elsewhere"})) as api:
            assert "(302)" in str(await failure(api))
        assert len(api.requests) == 1


class TestRepetition:
    async def test_a_fault_of_the_vendor_is_tried_again_for_a_reading_request(self) -> None:
        async with vendor_api(Reply({}, 500), Reply({}, 503), Reply({"a": 1})) as api, opened(api.url) as client:
            assert await client.get("things", {}) == {"a": 1}
            api.script(Reply({}, 502), Reply({"b": 2}))
            assert await client.post("things", {}, is_read=True) == {"b": 2}
        assert len(api.requests) == 5

    async def test_a_fault_that_lasts_is_an_error_after_a_few_attempts(self) -> None:
        async with vendor_api(Reply({}, 500)) as api:
            error = await failure(api, replace(QUICK, max_attempts=3))
        assert len(api.requests) == 3
        assert "fault of its own (500)" in str(error)
        assert error.is_outage

    async def test_a_writing_request_is_not_repeated_after_a_failure_that_leaves_open_what_was_done(self) -> None:
        async with vendor_api(Reply({}, 500)) as api, opened(api.url, replace(QUICK, timeout=0.2)) as client:
            with pytest.raises(VendorError, match=r"\(500\). It is not known whether it was done"):
                await client.post("things", {}, is_read=False)
            assert len(api.requests) == 1
            api.script(Reply({}, delay=600))
            with pytest.raises(VendorError, match=r"within 0.2 s. It is not known whether it was done"):
                await client.post("things", {}, is_read=False)
            assert len(api.requests) == 2

    @pytest.mark.parametrize("is_read", [True, False])
    async def test_too_many_requests_are_repeated_when_the_vendor_says_so(self, is_read: bool) -> None:
        limited = Reply({}, 429, {"Retry-After": "0.3"})
        async with vendor_api(limited, Reply({"a": 1})) as api, opened(api.url) as client:
            start = anyio.current_time()
            assert await client.post("things", {}, is_read=is_read) == {"a": 1}
            assert anyio.current_time() - start >= 0.3

    async def test_a_pause_that_is_asked_for_holds_for_the_other_requests_too(self) -> None:
        times: list[float] = []

        def answer(_: object) -> Reply:
            times.append(time.monotonic())
            return Reply({}, 429, {"Retry-After": "0.4"}) if len(times) == 1 else Reply({})

        async with vendor_api() as api, opened(api.url) as client, anyio.create_task_group() as tasks:
            api.answer = answer
            tasks.start_soon(client.get, "a", {})
            while not times:
                await anyio.sleep(0.01)
            await anyio.sleep(0.1)
            await client.get("b", {})
            assert times[1] - times[0] >= 0.35

    @pytest.mark.parametrize(
        "make", [lambda: "3600", lambda: format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)]
    )
    async def test_a_pause_that_is_too_long_is_an_error_that_says_how_long(self, make: Callable[[], str]) -> None:
        async with vendor_api(Reply({}, 429, {"Retry-After": make()})) as api:
            with anyio.fail_after(60):
                error = await failure(api)
        assert "Try again in 3.6e+03 s" in str(error)
        assert len(api.requests) == 1

    async def test_calls_during_a_long_pause_say_who_asked_for_it(self) -> None:
        limited = Reply({}, 429, {"Retry-After": "3600"})
        async with vendor_api(limited, Reply([])) as api, opened(api.url) as client:
            for words in (r"Try again in 3\.6e\+03 s", r"asked us to wait until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"):
                with pytest.raises(VendorError, match=words) as caught:
                    await client.get("things", {})
                assert caught.value.is_outage
            assert len(api.requests) == 1

    async def test_a_very_long_pause_is_cut_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vendor, "MAX_PAUSE", 0.2)
        async with vendor_api(Reply({}, 429, {"Retry-After": "3600"}), Reply([])) as api, opened(api.url) as client:
            with pytest.raises(VendorError):
                await client.get("things", {})
            assert await client.get("things", {}) == []

    @pytest.mark.parametrize("header", ["soon", "-5", "nan", "1e400"])
    async def test_a_nonsensical_pause_does_no_harm(self, header: str) -> None:
        async with vendor_api(Reply({}, 429, {"Retry-After": header}), Reply([])) as api, opened(api.url) as client:
            assert await client.get("things", {}) == []

    async def test_a_slow_answer_is_given_up_within_the_deadline(self) -> None:
        async with vendor_api(Reply({}, delay=600)) as api:
            with anyio.fail_after(60):
                error = await failure(api, replace(QUICK, timeout=0.2, deadline=0.5))
        assert "did not answer within 0." in str(error)
        assert error.is_outage

    async def test_a_vendor_that_cannot_be_reached_is_tried_again(self) -> None:
        async with opened("http://127.0.0.1:9", replace(QUICK, max_attempts=2)) as client:
            with pytest.raises(VendorError, match="could not be reached"):
                await client.post("things", {}, is_read=False)

    def test_the_deadline_is_shorter_than_that_of_a_pool(self) -> None:
        assert Limits().deadline < 30


class TestRateLimit:
    def test_tokens_come_back_at_the_rate(self) -> None:
        bucket = TokenBucket(rate=2.0, burst=2)
        assert [bucket.take(10.0) for _ in range(4)] == [0.0, 0.0, 0.5, 1.0]
        assert bucket.take(12.0) == 0.0
        assert bucket.take(100.0) == bucket.take(100.0) == 0.0
        assert bucket.take(100.0) == 0.5

    def test_nothing_is_sent_in_a_pause_and_not_all_at_once_after_it(self) -> None:
        bucket = TokenBucket(rate=2.0, burst=5)
        bucket.take(10.0)
        bucket.pause(13.0)
        assert [bucket.take(11.0) for _ in range(3)] == [2.0, 2.5, 3.0]

    async def test_requests_are_spread(self) -> None:
        async with vendor_api() as api, opened(api.url, replace(QUICK, rate=20.0, burst=1)) as client:
            start = anyio.current_time()
            for _ in range(6):
                await client.get("things", {})
            assert anyio.current_time() - start >= 0.25

    async def test_a_request_whose_turn_comes_too_late_is_not_sent(self) -> None:
        async with vendor_api() as api, opened(api.url, replace(QUICK, rate=0.01, burst=1)) as client:
            await client.get("things", {})
            with pytest.raises(VendorError, match="Too many requests to Acme are waiting"):
                await client.get("things", {})
        assert len(api.requests) == 1


class TestKeys:
    @pytest.mark.parametrize(
        "said",
        [
            f"Invalid key {KEY}",
            "see https://x.test/a?apikey=another&b=1",
            "see https://x.test/a?api_key=sk-very%2Fsecret%2B1",
        ],
    )
    async def test_no_error_holds_a_key(self, said: str) -> None:
        for reply in (Reply({"error": said}, 401), Reply(said.encode()), Reply({"error": said}, 500)):
            async with vendor_api(reply) as api:
                text = str(await failure(api))
            assert "***" in text
            assert "secret" not in text
            assert "another" not in text

    async def test_nothing_is_logged_that_holds_a_key(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        async with vendor_api(Reply({"error": KEY}, 500)) as api:
            await failure(api)
        assert KEY not in caplog.text

    def test_a_missing_key_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for value in (None, "", "  "):
            monkeypatch.delenv("ACME_KEY", raising=False)
            if value is not None:
                monkeypatch.setenv("ACME_KEY", value)
            with pytest.raises(
                SettingsError, match=r"ACME_KEY is not set.* leave --backend out to use the recorded one"
            ):
                required_key("ACME_KEY", "recorded")

    def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACME_KEY", "hunter\n2")
        with pytest.raises(SettingsError, match="ACME_KEY") as caught:
            required_key("ACME_KEY", "recorded")
        assert "hunter" not in str(caught.value)

    @pytest.mark.parametrize("url", ["acme.test", "http://acme.test:port"])
    def test_an_address_that_is_none_is_refused(self, url: str) -> None:
        with pytest.raises(SettingsError, match="address of Acme"):
            VendorClient("Acme", url, "ACME_KEY", KEY, {})

    @pytest.mark.parametrize(
        ("name", "value"), [("ALL_PROXY", "gopher://user:hunter2@acme.test"), ("SSL_CERT_FILE", "/no/such/file")]
    )
    def test_a_proxy_or_a_certificate_that_cannot_be_used_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=f"cannot be used.*{name}") as caught:
            VendorClient("Acme", "https://acme.test", "ACME_KEY", KEY, {})
        assert "hunter2" not in str(caught.value)


async def test_an_outage_is_marked_and_a_refusal_is_not() -> None:
    server = DeskServer("acme")

    @server.tool(structured_output=False)
    async def fail(is_outage: bool) -> str:
        """Fails."""
        raise VendorError("Acme is closed.", is_outage=is_outage)

    result = await server.call_tool("fail", {"is_outage": True})
    assert result.is_error
    assert (result.meta or {}).get(OUTAGE) is True
    with pytest.raises(ToolError, match=r"^Acme is closed\.$"):
        await server.call_tool("fail", {"is_outage": False})
    async with ToolPool({"acme": server}) as pool:
        results = [await pool.call(ToolCall(name="fail", arguments={"is_outage": one})) for one in (True, False)]
    assert [result.text for result in results] == ["Acme is closed."] * 2
    assert [result.kind for result in results] == [ResultKind.SERVER_ERROR, ResultKind.TOOL_ERROR]


async def test_a_mistake_of_ours_is_an_outage_and_does_not_tell_what_is_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = DeskServer("acme")

    @server.tool(structured_output=False)
    async def stumble() -> str:
        """Fails."""
        return {}["inside"]

    async with ToolPool({"acme": server}) as pool:
        result = await pool.call(ToolCall(name="stumble", arguments={}))
    assert result.kind == ResultKind.SERVER_ERROR
    assert "inside" not in result.text
    assert "KeyError: 'inside'" in caplog.text


def test_a_vendor_error_is_one_of_the_library_and_one_of_a_tool() -> None:
    assert issubclass(VendorError, MCPGRPOError)
    assert issubclass(VendorError, ToolError)
    assert not issubclass(VendorError, httpx2.HTTPError)


async def test_a_mistake_in_a_tool_is_logged_without_keys_and_control_characters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACME_KEY", KEY)
    server = DeskServer("acme")

    @server.tool()
    async def quote() -> str:
        raise RuntimeError(f"\x1b]0;refused {KEY}")

    result = await server.call_tool("quote", {})
    assert result.is_error
    text = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert "RuntimeError: ␛]0;refused ***" in text
    assert KEY not in text
    assert "\x1b" not in text
