import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mcp_grpo.desk.servers.slack import Workspace
from mcp_grpo.desk.servers.slack.backend import MAX_ADDED, Ledgers
from mcp_grpo.desk.servers.slack.embedded import MAX_TEXT_LENGTH
from mcp_grpo.desk.servers.slack.workspace import QUESTIONS
from mcp_grpo.desk.world.market import Market
from mcp_grpo.tools import Lease, ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))
WORKSPACE = Workspace()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def config(*args: str, **options: Any) -> ServerConfig:
    command = ("-m", "mcp_grpo.desk.servers.slack", *args)
    return ServerConfig(
        **{
            "name": "slack",
            "transport": "stdio",
            "command": sys.executable,
            "args": command,
            "cwd": str(ROOT),
            "isolation": "meta",
            "reset_tool": "slack_reset",
        }
        | options
    )


@pytest.fixture(scope="module")
async def pool() -> AsyncGenerator[ToolPool, None]:
    """One real process for the tests of this module; each test is a trajectory of its own."""
    async with ToolPool([config()]) as pool:
        yield pool


@pytest.fixture
async def lease(pool: ToolPool) -> AsyncGenerator[Lease, None]:
    async with pool.lease(TASK) as lease:
        yield lease


async def ask(lease: Lease | ToolPool, tool: str, /, **arguments: Any) -> Any:
    result = await lease.call(ToolCall(name=tool, arguments=arguments))
    assert result.kind is ResultKind.OK, result.text
    return json.loads(result.text)


async def refused(lease: Lease, tool: str, /, **arguments: Any) -> str:
    result = await lease.call(ToolCall(name=tool, arguments=arguments))
    assert result.kind is ResultKind.TOOL_ERROR, result
    return result.text


def channel_id(name: str) -> str:
    channel = WORKSPACE.channel(name)
    assert channel
    return channel.id


class TestTools:
    async def test_every_tool_has_the_parameters_of_the_reference_server(self, pool: ToolPool) -> None:
        real = json.loads((ROOT / "tests" / "data" / "slack_tools.json").read_text())
        listed = {tool.name: tool.input_schema for tool in pool.catalog.tools if tool.name != "slack_state"}
        assert listed.keys() == real.keys() - {"slack_get_user_profile"}
        for name, schema in listed.items():
            assert {key: value["type"] for key, value in schema["properties"].items()} == real[name]["properties"]
            assert set(schema.get("required", ())) == set(real[name]["required"])

    async def test_only_tools_that_read_say_so(self, pool: ToolPool) -> None:
        writing = {tool.name for tool in pool.catalog.tools if not tool.is_read_only}
        assert writing == {"slack_post_message", "slack_reply_to_thread", "slack_add_reaction"}

    async def test_schemas_hold_nothing_that_only_costs_tokens(self, pool: ToolPool) -> None:
        text = json.dumps([tool.schema for tool in pool.catalog.tools])
        assert '"title"' not in text
        assert "null" not in text


class TestReading:
    async def test_channels_are_listed_page_by_page_without_loss(self, lease: Lease) -> None:
        first = await ask(lease, "slack_list_channels", limit=7)
        second = await ask(lease, "slack_list_channels", limit=7, cursor=first["next_cursor"])
        assert "next_cursor" not in second
        names = [channel["name"] for channel in first["channels"] + second["channels"]]
        assert names == [channel.name for channel in WORKSPACE.channels]

    async def test_channels_that_are_archived_or_closed_are_marked(self, lease: Lease) -> None:
        channels = (await ask(lease, "slack_list_channels"))["channels"]
        assert [one["name"] for one in channels if one.get("is_archived")] == ["earnings-archive"]
        assert [one["name"] for one in channels if one.get("is_member") is False] == ["compliance", "deals"]

    async def test_users_who_have_left_and_the_bot_are_marked(self, lease: Lease) -> None:
        users = (await ask(lease, "slack_get_users"))["members"]
        assert [user["real_name"] for user in users if user.get("deleted")] == ["Karl Brandt"]
        assert [user["id"] for user in users if user.get("is_bot")] == [WORKSPACE.bot.id]

    async def test_history_is_newest_first_and_without_replies(self, lease: Lease) -> None:
        seen = await ask(lease, "slack_get_channel_history", channel_id=channel_id("earnings"), limit=100)
        assert not seen["has_more"]
        assert [one["ts"] for one in seen["messages"]] == [
            message.ts for message in WORKSPACE.history(channel_id("earnings"))
        ]
        stamps = [float(one["ts"]) for one in seen["messages"]]
        assert stamps == sorted(stamps, reverse=True)
        assert not any("thread_ts" in one for one in seen["messages"])

    async def test_history_is_ten_messages_unless_more_are_asked_for(self, lease: Lease) -> None:
        seen = await ask(lease, "slack_get_channel_history", channel_id=channel_id("earnings"))
        assert (len(seen["messages"]), seen["has_more"]) == (10, True)

    async def test_a_thread_is_its_first_message_and_the_replies_in_order(self, lease: Lease) -> None:
        thread = next(thread for thread in WORKSPACE.threads if len(thread.replies) == 2)
        channel, ts = thread.parent.channel_id, thread.parent.ts
        seen = (await ask(lease, "slack_get_thread_replies", channel_id=channel, thread_ts=ts))["messages"]
        assert [one["text"] for one in seen] == [thread.parent.text, *(reply.text for reply in thread.replies)]
        assert seen[0]["reply_count"] == 2
        assert [one["thread_ts"] for one in seen[1:]] == [ts, ts]


class TestWriting:
    async def test_what_was_added_is_seen_and_is_the_state(self, lease: Lease) -> None:
        where = channel_id("earnings")
        post = await ask(lease, "slack_post_message", channel_id=where, text="Up 4 %.")
        question = WORKSPACE.history(where)[0]
        reply = await ask(lease, "slack_reply_to_thread", channel_id=where, thread_ts=question.ts, text="12")
        await ask(lease, "slack_add_reaction", channel_id=where, timestamp=post["ts"], reaction="tada")

        seen = (await ask(lease, "slack_get_channel_history", channel_id=where, limit=2))["messages"]
        assert seen[0] == {
            "ts": post["ts"],
            "user": WORKSPACE.bot.id,
            "text": "Up 4 %.",
            "reactions": [{"name": "tada", "count": 1}],
        }
        thread = (await ask(lease, "slack_get_thread_replies", channel_id=where, thread_ts=question.ts))["messages"]
        assert (thread[-1]["text"], thread[-1]["ts"]) == ("12", reply["ts"])
        assert (await ask(lease, "slack_state"))["added"] == [
            {"kind": "post", "channel": "earnings", "channel_id": where, "ts": post["ts"], "text": "Up 4 %."},
            {
                "kind": "reply",
                "channel": "earnings",
                "channel_id": where,
                "thread_ts": question.ts,
                "ts": reply["ts"],
                "text": "12",
            },
            {"kind": "reaction", "channel": "earnings", "channel_id": where, "ts": post["ts"], "reaction": "tada"},
        ]

    async def test_trajectories_do_not_see_each_other(self, pool: ToolPool) -> None:
        where = channel_id("random")
        async with pool.lease(TASK) as one, pool.lease(TASK) as other:
            first = await ask(one, "slack_post_message", channel_id=where, text="mine")
            assert (await ask(other, "slack_state"))["added"] == []
            second = await ask(other, "slack_post_message", channel_id=where, text="yours")
            assert first["ts"] == second["ts"]  # the same calls have the same results in every trajectory
            seen = (await ask(other, "slack_get_channel_history", channel_id=where, limit=3))["messages"]
            assert [message["text"] for message in seen[:1]] == ["yours"]
            assert "mine" not in {message["text"] for message in seen}

    @pytest.mark.full
    async def test_a_reset_makes_the_workspace_as_new(self) -> None:
        # A trajectory that the server is not told of.
        alone = config(isolation="exclusive", reset_tool=None, pool_size=1, spares=0)
        async with ToolPool([alone]) as pool, pool.lease(TASK) as lease:
            await ask(lease, "slack_post_message", channel_id=channel_id("random"), text="hello")
            assert len((await ask(lease, "slack_state"))["added"]) == 1
            await ask(lease, "slack_reset")
            assert (await ask(lease, "slack_state"))["added"] == []

    async def test_a_reaction_of_others_is_joined(self, lease: Lease) -> None:
        message = next(
            message
            for message in WORKSPACE.history(channel_id("earnings"))
            if message.reactions and not message.thread_ts
        )
        emoji, where = message.reactions[0].name, message.channel_id
        await ask(lease, "slack_add_reaction", channel_id=where, timestamp=message.ts, reaction=emoji)
        seen = (await ask(lease, "slack_get_channel_history", channel_id=where, limit=100))["messages"]
        joined = next(one for one in seen if one["ts"] == message.ts)
        assert joined["reactions"] == [{"name": emoji, "count": 2}]

    @pytest.mark.parametrize(
        ("code", "tool", "arguments"),
        [
            ("channel_not_found", "slack_post_message", {"channel_id": "earnings", "text": "x"}),
            ("channel_not_found", "slack_get_channel_history", {"channel_id": "#earnings"}),
            ("not_in_channel", "slack_get_channel_history", {"channel_id": channel_id("deals")}),
            ("not_in_channel", "slack_post_message", {"channel_id": channel_id("compliance"), "text": "x"}),
            ("is_archived", "slack_post_message", {"channel_id": channel_id("earnings-archive"), "text": "x"}),
            ("no_text", "slack_post_message", {"channel_id": channel_id("random"), "text": " \n"}),
            ("msg_too_long", "slack_post_message", {"channel_id": channel_id("random"), "text": "x" * 4001}),
            (
                "thread_not_found",
                "slack_reply_to_thread",
                {"channel_id": channel_id("random"), "thread_ts": "1.000000", "text": "x"},
            ),
            (
                "message_not_found",
                "slack_add_reaction",
                {"channel_id": channel_id("random"), "timestamp": "1.000000", "reaction": "tada"},
            ),
            ("invalid_cursor", "slack_list_channels", {"cursor": "99"}),
            ("invalid_cursor", "slack_get_users", {"cursor": "abc"}),
            ("invalid_cursor", "slack_get_users", {"cursor": "1" * 5000}),
            ("invalid_limit", "slack_list_channels", {"limit": 0}),
        ],
    )
    async def test_a_refusal_has_the_code_of_slack_and_changes_nothing(
        self, lease: Lease, code: str, tool: str, arguments: dict[str, Any]
    ) -> None:
        text = await refused(lease, tool, **arguments)
        assert text.startswith(f"{code}: ")
        assert text.endswith(".")
        assert len(text) < 250
        assert (await ask(lease, "slack_state"))["added"] == []

    async def test_the_longest_message_is_posted(self, lease: Lease) -> None:
        await ask(lease, "slack_post_message", channel_id=channel_id("random"), text="x" * MAX_TEXT_LENGTH)

    async def test_a_message_of_another_channel_is_not_found(self, lease: Lease) -> None:
        ts = WORKSPACE.history(channel_id("earnings"))[0].ts
        arguments = {"channel_id": channel_id("earnings-eu"), "thread_ts": ts, "text": "x"}
        assert (await refused(lease, "slack_reply_to_thread", **arguments)).startswith("thread_not_found: ")

    async def test_a_reply_to_a_reply_names_the_thread(self, lease: Lease) -> None:
        reply = next(thread.replies[0] for thread in WORKSPACE.threads if thread.replies)
        arguments = {"channel_id": reply.channel_id, "thread_ts": reply.ts, "text": "x"}
        assert str(reply.thread_ts) in await refused(lease, "slack_reply_to_thread", **arguments)

    async def test_an_emoji_must_exist_and_counts_once(self, lease: Lease) -> None:
        message = {"channel_id": channel_id("random"), "timestamp": WORKSPACE.history(channel_id("random"))[0].ts}
        for name in (":tada:", "nonsense", ""):
            text = await refused(lease, "slack_add_reaction", **message, reaction=name)
            assert text.startswith("invalid_name: ")
        await ask(lease, "slack_add_reaction", **message, reaction="bug")
        text = await refused(lease, "slack_add_reaction", **message, reaction="bug")
        assert text.startswith("already_reacted: ")

    async def test_a_trajectory_cannot_post_without_end(self, lease: Lease) -> None:
        call = ToolCall(name="slack_post_message", arguments={"channel_id": channel_id("random"), "text": "x"})
        results = await lease.call_all([call] * (MAX_ADDED + 2))
        assert [result.kind for result in results].count(ResultKind.TOOL_ERROR) == 2
        assert len((await ask(lease, "slack_state"))["added"]) == MAX_ADDED


class TestWorkspace:
    def test_a_seed_is_one_workspace_on_every_machine(self) -> None:
        text = repr((WORKSPACE.channels, WORKSPACE.users, WORKSPACE.messages))
        assert sha256(text.encode()).hexdigest()[:16] == "b53a330bd531965b"

    def test_another_seed_is_another_workspace(self) -> None:
        other = Workspace(1)
        assert {channel.id for channel in other.channels}.isdisjoint(channel.id for channel in WORKSPACE.channels)
        assert [message.text for message in other.messages] != [message.text for message in WORKSPACE.messages]

    @pytest.mark.parametrize("seed", range(5))
    def test_a_question_is_named_by_channel_company_and_user_or_topic(self, seed: int) -> None:
        parents = [thread.parent for thread in Workspace(seed).threads]
        assert len(parents) > 50
        assert len({(one.channel_id, one.company, one.user_id) for one in parents}) == len(parents)
        assert len({(one.channel_id, one.company, one.topic) for one in parents}) == len(parents)

    def test_a_company_and_a_channel_alone_do_not_name_a_question(self) -> None:
        parents = [thread.parent for thread in WORKSPACE.threads]
        assert len({(one.channel_id, one.company) for one in parents}) < len(parents)

    @pytest.mark.parametrize("seed", range(5))
    def test_messages_of_a_channel_are_in_order_and_before_now(self, seed: int) -> None:
        workspace = Workspace(seed)
        for channel in workspace.channels:
            stamps = [float(one.ts) for one in workspace.messages if one.channel_id == channel.id]
            assert stamps == sorted(set(stamps))
            assert stamps[-1] < 1751302800

    def test_questions_are_about_the_companies_of_the_market(self) -> None:
        names = {company.short_name for company in Market().companies()}
        asked = [thread.parent for thread in WORKSPACE.threads]
        assert {one.company for one in asked} <= names
        assert all(one.text == QUESTIONS[str(one.topic)].format(company=one.company) for one in asked)


def test_the_ledger_that_was_not_used_for_longest_is_forgotten() -> None:
    ledgers = Ledgers(max_ledgers=2)
    first, second = ledgers.of("a"), ledgers.of("b")
    assert ledgers.of("a") is first
    ledgers.of("c")
    assert len(ledgers) == 2
    assert ledgers.of("a") is first
    assert ledgers.of("b") is not second


@contextmanager
def started(*args: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "mcp_grpo.desk.servers.slack", *args]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes, **options) as process:
        try:
            yield process
        finally:
            process.kill()


class TestProcess:
    @pytest.mark.full
    async def test_http_serves_the_workspace_of_the_seed_until_sigterm(self) -> None:
        with started("--transport", "http", "--port", "0", "--seed", "3") as process:
            assert process.stderr
            url = process.stderr.readline().strip()
            server = ServerConfig(name="slack", transport="http", url=url, isolation="meta", reset_tool="slack_reset")
            async with ToolPool([server]) as pool, pool.lease(TASK) as one, pool.lease(TASK) as other:
                where = (await ask(one, "slack_list_channels"))["channels"][1]["id"]
                await ask(one, "slack_post_message", channel_id=where, text="x")
                assert len((await ask(one, "slack_state"))["added"]) == 1
                assert (await ask(other, "slack_state"))["added"] == []
            channel = Workspace(3).channel("random")
            assert channel
            assert where == channel.id
            process.send_signal(signal.SIGTERM)
            process.wait(20)

    @pytest.mark.full
    def test_sigterm_ends_it_although_stdin_is_open(self) -> None:
        with started() as process:
            assert process.stdin
            assert process.stdout
            message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0

    @pytest.mark.full
    def test_the_end_of_stdin_ends_it_and_stdout_has_only_the_protocol(self) -> None:
        with started() as process:
            output, _ = process.communicate("this is no JSON\n", timeout=30)
            assert process.returncode == 0
            assert all(json.loads(line)["jsonrpc"] == "2.0" for line in output.splitlines())

    @pytest.mark.full
    def test_a_live_backend_without_a_token_says_what_is_missing(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "SLACK_BOT_TOKEN"}
        with started("--backend", "live", env=env) as process:
            _, text = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "SLACK_BOT_TOKEN is not set" in text
        assert "leave --backend out to use the embedded one" in text
        assert "Traceback" not in text
