"""Servers that others wrote are opened, called and closed as they are, and a policy completes tasks on them."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import ScriptedGenerator
from peers.install import is_installed, program

from mcp_grpo.rollout import Limits, Renderer, RolloutEngine
from mcp_grpo.tools import ToolPool
from mcp_grpo.types import ResultKind, StopReason, Task, ToolCall


pytestmark = pytest.mark.peers

TOKENIZER = family_tokenizer("qwen3")
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3", TOKENIZER))
LIMITS = Limits(max_turns=8, max_completion_length=50_000)  # a token of this tokenizer is a byte
READY_TIMEOUT = 30.0
TASK = Task(task_id="peers", prompt=({"role": "user", "content": "Use the tools."},))

Entry = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a test takes place: a folder for the server's state, and the address of a small web."""

    folder: Path
    pages: str

    def fill(self, value: Any) -> Any:
        """Put the place's own values where a text names them."""
        if isinstance(value, str):
            return value.replace("{folder}", str(self.folder)).replace("{pages}", self.pages)
        if isinstance(value, Mapping):
            return {key: self.fill(item) for key, item in value.items()}
        return [self.fill(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Step:
    """A call, and a part of what comes back."""

    tool: str
    arguments: Mapping[str, Any]
    text: str
    kind: ResultKind = ResultKind.OK

    def call(self, place: Place) -> ToolCall:
        return ToolCall(name=self.tool, arguments=place.fill(self.arguments))


Serve = Callable[[Place], AbstractContextManager[Entry]]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server that others wrote. What is `right` may be called at any time; the `script` needs a fresh server."""

    name: str
    environment: str
    serve: Serve
    tools: set[str]
    right: Step
    wrong: Step
    script: tuple[Step, ...]


def over_stdio(environment: str, name: str, *args: str, **fields: Any) -> Serve:
    """A server that the pool starts by itself."""

    def serve(place: Place) -> AbstractContextManager[Entry]:
        entry = {"command": program(environment, name), "args": args, "cwd": "{folder}", **fields}
        return nullcontext(place.fill(entry))

    return serve


def in_a_repository(place: Place) -> AbstractContextManager[Entry]:
    """The git server, in a repository with one commit and one new file."""
    for command in (
        "init --quiet --initial-branch main",
        "config user.name Ada",
        "config user.email ada@localhost",
        "config commit.gpgsign false",
        "commit --quiet --allow-empty --message Beginning",
    ):
        subprocess.run(["git", *command.split()], cwd=place.folder, check=True)
    (place.folder / "notes.txt").write_text("The lamp was lit.\n")
    return over_stdio("git", "mcp-server-git", "--repository", "{folder}")(place)


@contextmanager
def over_http(place: Place) -> Iterator[Entry]:
    """The everything server, listening on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with everything_on(port, place):
        yield {"type": "http", "url": f"http://127.0.0.1:{port}/mcp"}


@contextmanager
def everything_on(port: int, place: Place) -> Iterator[None]:
    """The everything server, listening on this port."""
    log = place.folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [program("npm", "mcp-server-everything"), "streamableHttp"],
            env=os.environ | {"PORT": str(port)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_TIMEOUT
        while not is_listening(port):
            assert process.poll() is None, f"the server ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"the server does not listen: {log.read_text()}"
            time.sleep(0.05)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def thought(number: int, total: int) -> dict[str, Any]:
    return {
        "thought": f"Thought {number}.",
        "thoughtNumber": number,
        "totalThoughts": total,
        "nextThoughtNeeded": number < total,
    }


EVERYTHING = Peer(
    name="everything",
    environment="npm",
    serve=over_stdio("npm", "mcp-server-everything"),
    tools={"echo", "get-sum", "get-structured-content", "get-tiny-image", "trigger-long-running-operation"},
    right=Step("get-sum", {"a": 1, "b": 2}, "The sum of 1 and 2 is 3."),
    wrong=Step(
        "get-resource-reference",
        {"resourceType": "Text", "resourceId": -1},
        "Invalid resourceId: -1",
        ResultKind.TOOL_ERROR,
    ),
    script=(
        Step("get-sum", {"a": 20, "b": 22}, "is 42"),
        Step("get-structured-content", {"location": "Chicago"}, '"temperature"'),
        Step("echo", {"message": "42 in Chicago <|im_end|>"}, "42 in Chicago <|im_end|>"),
    ),
)

PEERS = (
    EVERYTHING,
    replace(EVERYTHING, name="everything over http", serve=over_http),
    Peer(
        name="filesystem",
        environment="npm",
        serve=over_stdio("npm", "mcp-server-filesystem", "{folder}"),
        tools={"read_text_file", "write_file", "edit_file", "list_directory", "move_file", "search_files"},
        right=Step("list_allowed_directories", {}, "{folder}"),
        wrong=Step("read_text_file", {"path": "/etc/hostname"}, "Access denied", ResultKind.TOOL_ERROR),
        script=(
            Step("write_file", {"path": "{folder}/log.txt", "content": "lit in 1874\n"}, "Successfully wrote"),
            Step("list_directory", {"path": "{folder}"}, "[FILE] log.txt"),
            Step("read_text_file", {"path": "{folder}/log.txt"}, "lit in 1874"),
        ),
    ),
    Peer(
        name="memory",
        environment="npm",
        serve=over_stdio("npm", "mcp-server-memory", env={"MEMORY_FILE_PATH": "{folder}/memory.jsonl"}),
        tools={"create_entities", "create_relations", "add_observations", "read_graph", "search_nodes", "open_nodes"},
        right=Step("read_graph", {}, '"entities"'),
        wrong=Step(
            "add_observations",
            {"observations": [{"entityName": "Nobody", "contents": ["is missing"]}]},
            "Nobody",
            ResultKind.TOOL_ERROR,
        ),
        script=(
            Step(
                "create_entities",
                {"entities": [{"name": "Ada", "entityType": "person", "observations": ["keeps the light"]}]},
                "Ada",
            ),
            Step("add_observations", {"observations": [{"entityName": "Ada", "contents": ["since 1874"]}]}, "1874"),
            Step("search_nodes", {"query": "light"}, "since 1874"),
        ),
    ),
    Peer(
        name="sequential-thinking",
        environment="npm",
        serve=over_stdio("npm", "mcp-server-sequential-thinking"),
        tools={"sequentialthinking"},
        right=Step("sequentialthinking", thought(1, 1), '"thoughtNumber": 1'),
        wrong=Step("sequentialthinking", thought(0, 1), "minimum of 1", ResultKind.INVALID_ARGUMENTS),
        script=(
            Step("sequentialthinking", thought(1, 2), '"thoughtHistoryLength": 1'),
            Step("sequentialthinking", thought(2, 2), '"thoughtHistoryLength": 2'),
        ),
    ),
    Peer(
        name="time",
        environment="time",
        serve=over_stdio("time", "mcp-server-time"),
        tools={"get_current_time", "convert_time"},
        right=Step("get_current_time", {"timezone": "UTC"}, "+00:00"),
        wrong=Step("get_current_time", {"timezone": "Moon/Base"}, "Moon/Base", ResultKind.TOOL_ERROR),
        script=(
            Step("get_current_time", {"timezone": "Asia/Tokyo"}, "+09:00"),
            Step(
                "convert_time",
                {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"},
                "T03:00:00+00:00",
            ),
        ),
    ),
    Peer(
        name="git",
        environment="git",
        serve=in_a_repository,
        tools={"git_status", "git_add", "git_commit", "git_log", "git_diff", "git_checkout", "git_branch"},
        right=Step("git_log", {"repo_path": "{folder}"}, "Beginning"),
        wrong=Step("git_checkout", {"repo_path": "{folder}", "branch_name": "gone"}, "gone", ResultKind.TOOL_ERROR),
        script=(
            Step("git_status", {"repo_path": "{folder}"}, "notes.txt"),
            Step("git_add", {"repo_path": "{folder}", "files": ["notes.txt"]}, "staged"),
            Step("git_commit", {"repo_path": "{folder}", "message": "Light the lamp"}, "committed"),
            Step("git_log", {"repo_path": "{folder}", "max_count": 1}, "Light the lamp"),
        ),
    ),
    Peer(
        name="fetch",
        environment="fetch",
        serve=over_stdio("fetch", "mcp-server-fetch", "--allow-private-ips"),
        tools={"fetch"},
        right=Step("fetch", {"url": "{pages}/log"}, "1874"),
        wrong=Step("fetch", {"url": "{pages}/none"}, "404", ResultKind.TOOL_ERROR),
        script=(
            Step("fetch", {"url": "{pages}/harbour"}, "/log"),
            Step("fetch", {"url": "{pages}/log", "raw": True}, "<p>The lamp was first lit in 1874.</p>"),
        ),
    ),
    Peer(
        name="sqlite",
        environment="sqlite",
        serve=over_stdio(
            "sqlite",
            "mcp-server-sqlite",
            "--db-path",
            "{folder}/lamps.db",
            # Its errors are not marked as such.
            **{"x-mcp-grpo": {"error_patterns": [r"\A(Database error|Error): "]}},
        ),
        tools={"read_query", "write_query", "create_table", "list_tables", "describe_table"},
        right=Step("read_query", {"query": "SELECT 6 * 7 AS answer"}, "[{'answer': 42}]"),
        wrong=Step("read_query", {"query": "SELECT * FROM candles"}, "no such table", ResultKind.TOOL_ERROR),
        script=(
            Step("create_table", {"query": "CREATE TABLE lamps (name TEXT, lit INTEGER)"}, "created"),
            Step("write_query", {"query": "INSERT INTO lamps VALUES ('harbour', 1874)"}, "'affected_rows': 1"),
            Step("read_query", {"query": "SELECT lit FROM lamps"}, "[{'lit': 1874}]"),
        ),
    ),
    Peer(
        name="calculator",
        environment="calculator",
        serve=over_stdio("calculator", "mcp-server-calculator"),
        tools={"calculate"},
        right=Step("calculate", {"expression": "2**10 + 1"}, "1025"),
        wrong=Step("calculate", {"expression": "1/0"}, "division by zero", ResultKind.TOOL_ERROR),
        script=(
            Step("calculate", {"expression": "2**10 + 1"}, "1025"),
            Step("calculate", {"expression": "1025 // 5"}, "205"),
        ),
    ),
    Peer(
        name="duckdb",
        environment="duckdb",
        serve=over_stdio(
            "duckdb",
            "mcp-server-duckdb",
            "--db-path",
            "{folder}/lamps.duckdb",
            # Its errors are not marked as such.
            **{"x-mcp-grpo": {"error_patterns": [r"\ADatabase error: "]}},
        ),
        tools={"query"},
        right=Step("query", {"query": "SELECT 6 * 7"}, "[(42,)]"),
        wrong=Step("query", {"query": "SELECT * FROM candles"}, "does not exist", ResultKind.TOOL_ERROR),
        script=(
            Step("query", {"query": "CREATE TABLE lamps AS SELECT 'harbour' AS name, 1874 AS lit"}, "[(1,)]"),
            Step("query", {"query": "SELECT name, lit FROM lamps"}, "[('harbour', 1874)]"),
        ),
    ),
)


def said(text: str) -> str:
    return f"<think>\n\n</think>\n\n{text}<|im_end|>"


def said_call(call: ToolCall) -> str:
    return said(f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>")


def skip_unless_installed(peer: Peer) -> None:
    if not is_installed(peer.environment):
        pytest.skip(f"the server {peer.name!r} is not installed; run `make peers`")


@pytest.fixture(params=PEERS, ids=lambda peer: peer.name)
def peer(request: pytest.FixtureRequest) -> Peer:
    skip_unless_installed(request.param)
    return request.param


@pytest.fixture
def place(tmp_path: Path, pages: str) -> Place:
    return Place(tmp_path, pages)


@pytest.fixture
def servers(peer: Peer, place: Place) -> Iterator[dict[str, Any]]:
    with peer.serve(place) as entry:
        yield {"mcpServers": {peer.name: entry}}


over_each_transport = pytest.mark.parametrize("peer", PEERS[:2], ids=lambda peer: peer.name, indirect=True)


@pytest.mark.anyio
async def test_a_peer_offers_the_tools_it_is_known_for(peer: Peer, servers: dict[str, Any]) -> None:
    async with ToolPool(servers) as pool:
        assert peer.tools <= {tool.name for tool in pool.catalog.tools}


@pytest.mark.anyio
async def test_a_right_call_is_answered(peer: Peer, place: Place, servers: dict[str, Any]) -> None:
    async with ToolPool(servers) as pool:
        result = await pool.call(peer.right.call(place))
    assert result.kind is ResultKind.OK, result.text
    assert place.fill(peer.right.text) in result.text


@pytest.mark.anyio
async def test_a_wrong_call_is_answered_in_words_and_the_next_one_as_ever(
    peer: Peer, place: Place, servers: dict[str, Any]
) -> None:
    async with ToolPool(servers) as pool:
        result = await pool.call(peer.wrong.call(place))
        following = await pool.call(peer.right.call(place))
    assert result.kind is peer.wrong.kind, result.text
    assert place.fill(peer.wrong.text) in result.text
    assert following.kind is ResultKind.OK, following.text


def test_a_scripted_policy_completes_a_task(peer: Peer, place: Place, servers: dict[str, Any]) -> None:
    turns = [*(said_call(step.call(place)) for step in peer.script), said("Done.")]
    engine = RolloutEngine(servers)
    try:
        generator = ScriptedGenerator(TOKENIZER, turns)
        (trajectory,) = engine.roll_out([TASK], renderer=RENDERER, generator=generator, limits=LIMITS)
    finally:
        engine.close()
    results = [exchange.result for exchange in trajectory.exchanges]
    assert [(result.kind, result.text) for result in results if result.is_error] == []
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    assert trajectory.answer == "Done."
    read = TOKENIZER.decode([i for segment in trajectory.segments if not segment.sampled for i in segment.token_ids])
    for step, result in zip(peer.script, results, strict=True):
        assert place.fill(step.text) in result.text
        assert result.text in read


@over_each_transport
@pytest.mark.anyio
async def test_calls_at_the_same_time_get_each_its_own_answer(servers: dict[str, Any]) -> None:
    texts = [f"call {number}" for number in range(50)]
    async with ToolPool(servers) as pool, pool.lease(TASK) as lease:
        results = await lease.call_all([ToolCall(name="echo", arguments={"message": text}) for text in texts])
    assert [result.text for result in results] == [f"Echo: {text}" for text in texts]


@over_each_transport
@pytest.mark.anyio
async def test_a_call_past_its_deadline_times_out_and_the_next_one_is_answered(
    peer: Peer, place: Place, servers: dict[str, Any]
) -> None:
    servers["mcpServers"][peer.name]["x-mcp-grpo"] = {"call_timeout": 1.0}
    slow = ToolCall(name="trigger-long-running-operation", arguments={"duration": 20, "steps": 2})
    async with ToolPool(servers) as pool:
        with anyio.fail_after(5):
            result = await pool.call(slow)
        following = await pool.call(peer.right.call(place))
    assert result.kind is ResultKind.TIMEOUT
    assert following.kind is ResultKind.OK, following.text


@pytest.mark.anyio
async def test_a_server_that_was_restarted_is_called_as_if_nothing_had_been(place: Place) -> None:
    skip_unless_installed(EVERYTHING)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ExitStack() as first:
        first.enter_context(everything_on(port, place))
        async with ToolPool({"everything": {"url": f"http://127.0.0.1:{port}/mcp"}}) as pool:
            await pool.call(EVERYTHING.right.call(place))
            first.close()
            with everything_on(port, place):
                result = await pool.call(EVERYTHING.right.call(place))
    assert result.kind is ResultKind.OK, result.text


@over_each_transport
@pytest.mark.anyio
async def test_an_image_is_named_where_it_stood_between_the_texts(servers: dict[str, Any]) -> None:
    async with ToolPool(servers) as pool:
        result = await pool.call(ToolCall(name="get-tiny-image", arguments={}))
    before, image, after = result.text.splitlines()
    assert image.startswith("[image/png, ")
    assert "image" in before
    assert "image" in after


@pytest.mark.anyio
async def test_all_peers_share_one_pool(place: Place) -> None:
    peers = [peer for peer in PEERS if peer.serve is not over_http]  # it offers the same tools as over stdio
    with ExitStack() as stack:
        for peer in peers:
            skip_unless_installed(peer)
        servers = {peer.name: stack.enter_context(peer.serve(place)) for peer in peers}
        async with ToolPool({"mcpServers": servers}) as pool, pool.lease(TASK) as lease:
            results = await lease.call_all([peer.right.call(place) for peer in peers])
    assert [(result.server, result.kind) for result in results] == [(peer.name, ResultKind.OK) for peer in peers]
