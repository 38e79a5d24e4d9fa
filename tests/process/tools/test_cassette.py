import json
import logging
import random
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from mcp_grpo.errors import CassetteError, ToolServerError
from mcp_grpo.tools import Cassette, ServerConfig, Tool, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall, ToolResult


pytestmark = pytest.mark.anyio

Tasks = Callable[..., Task]


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


class Library(MCPServer):
    """A server that counts what it is asked. `look_up` says that it changes nothing; `lend` does not."""

    def __init__(self) -> None:
        super().__init__("library")
        self.asked: list[str] = []

        @self.tool(annotations=ToolAnnotations(read_only_hint=True))
        async def look_up(title: str) -> str:
            """Where a book stands."""
            self.asked.append(title)
            await anyio.sleep(random.uniform(0, 0.02))  # so that calls end in another order than they began
            if title == "none":
                raise ToolError("There is no such book.")
            return f"{title}: shelf {len(self.asked)}"

        @self.tool()
        async def lend(title: str) -> dict[str, int]:
            """Lend a book."""
            self.asked.append(title)
            return {"number": len(self.asked)}


def recording(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


@pytest.fixture
def recorded(path: Path) -> Path:
    """A recording of two calls, made by hand."""
    lines = [
        {"cassette": 1, "mcp_grpo": "0.1.0", "hash": "x", "servers": {"library": []}},
        *(
            {"task": "t", "attempt": 0, "call": index, "server": "library", "tool": "look_up"}
            | {"arguments": {"title": title}, "result": {"text": f"{title}!"}}
            for index, title in enumerate(["Emma", "Ulysses"])
        ),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tool(name: str = "look_up", **fields: Any) -> Tool:
    return Tool(name=name, server="library", tool=name, description="", input_schema={"type": "object"}, **fields)


class OneAnswer:
    """A server that always answers the same."""

    def __init__(self, result: ToolResult | ToolServerError) -> None:
        self._result = result

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        if isinstance(self._result, ToolServerError):
            raise self._result
        return self._result


async def attempt(pool: ToolPool, task: Task, calls: list[list[ToolCall]]) -> list[ToolResult]:
    """One trajectory, with some calls in each turn."""
    results: list[ToolResult] = []
    async with pool.lease(task) as lease:
        for turn in calls:
            results += await lease.call_all(turn)
    return results


async def attempts(pool: ToolPool, make_task: Tasks) -> dict[int, list[ToolResult]]:
    """Trajectories that run at the same time and make calls of the same tools."""
    results: dict[int, list[ToolResult]] = {}

    async def one(index: int) -> None:
        turns = [[call("look_up", title=t) for t in ("Emma", f"Volume {index}", "Emma")], [call("lend", title="none")]]
        results[index] = await attempt(pool, make_task(), [*turns, [call("look_up", title="none")]])

    async with anyio.create_task_group() as tasks:
        for index in range(6):
            tasks.start_soon(one, index)
    return results


async def test_a_replayed_run_gives_every_trajectory_what_it_got_without_any_server(
    path: Path, make_task: Tasks
) -> None:
    async with ToolPool({"library": Library()}, cassette=Cassette(path, "record")) as pool:
        catalog, first = pool.catalog, await attempts(pool, make_task)
    async with ToolPool(None, cassette=Cassette(path, "replay")) as pool:
        assert pool.catalog == catalog
        assert await attempts(pool, make_task) == first
    assert {result.kind for results in first.values() for result in results} == {ResultKind.OK, ResultKind.TOOL_ERROR}
    assert len({result.text for results in first.values() for result in results}) > 10  # or equality would say little


async def test_a_recording_is_one_line_for_the_tools_and_one_for_each_call(path: Path, make_task: Tasks) -> None:
    async with ToolPool({"library": Library()}, cassette=Cassette(path, "record")) as pool:
        await attempt(pool, make_task(), [[call("lend", title="Emma"), call("no_such_tool"), call("lend")]])
        header, line = recording(path)  # while the pool is still open: each line is there as soon as it is written
        catalog_hash = pool.catalog.hash
    assert (header["cassette"], header["hash"]) == (1, catalog_hash)
    assert [tool["name"] for tool in header["servers"]["library"]] == ["look_up", "lend"]
    result = line.pop("result")
    assert line == {
        "task": "t",
        "attempt": 0,
        "call": 0,
        "server": "library",
        "tool": "lend",
        "arguments": {"title": "Emma"},
    }
    assert result.pop("seconds") > 0
    assert result == {"text": '{\n  "number": 1\n}', "structured": {"number": 1}}


async def test_what_a_server_could_not_answer_is_recorded_too(path: Path) -> None:
    cassette = Cassette(path, "record")
    cassette.open({}, (), "x")
    call = cassette.wrap("library", OneAnswer(ToolServerError("gone")).call, "t", 0, count())
    with pytest.raises(ToolServerError, match="gone"):
        await call(tool(), {})
    cassette.close()
    replayed = await Cassette(path, "replay").wrap("library", None, "t", 0, count())(tool(), {})
    assert replayed == ToolResult(text="gone", kind=ResultKind.SERVER_ERROR, server="library")


@pytest.mark.parametrize(
    ("place", "title", "words"),
    [
        ((0, 0), "Ulysses", 'recorded there is `look_up` of server \'library\' with {"title": "Emma"}'),
        ((0, 2), "Emma", "it has 2 calls of that attempt"),
        ((1, 0), "Emma", "it has 0 calls of that attempt"),
    ],
)
async def test_a_call_that_was_not_recorded_there_says_what_was(
    recorded: Path, place: tuple[int, int], title: str, words: str
) -> None:
    attempt, index = place
    call = Cassette(recorded, "replay").wrap("library", None, "t", attempt, count(index))
    result = await call(tool(), {"title": title})
    assert (result.kind, result.server) == (ResultKind.SERVER_ERROR, "library")
    assert f"no answer to call {index} of attempt {attempt} at task 't'" in result.text
    assert f'which is `look_up` of server \'library\' with {{"title": "{title}"}}' in result.text
    assert words in result.text


async def test_calls_are_matched_in_any_order_and_the_last_answer_is_repeated(path: Path, make_task: Tasks) -> None:
    async with ToolPool({"library": Library()}, cassette=Cassette(path, "record")) as pool:
        for title in ("Emma", "Ulysses", "Emma"):
            await attempt(pool, make_task(), [[call("look_up", title=title)]])
    async with ToolPool(None, cassette=Cassette(path, "match")) as pool:
        calls = [call("look_up", title=title) for title in ("Ulysses", "Emma", "Emma", "Emma")]
        results = await attempt(pool, make_task(), [[call] for call in calls])
        absent = await pool.call(call("look_up", title="Faust"))
    texts = ["Ulysses: shelf 2", "Emma: shelf 1", "Emma: shelf 3", "Emma: shelf 3"]
    assert [result.text for result in results] == texts
    assert absent.kind is ResultKind.SERVER_ERROR
    assert 'with {"title": "Faust"}' in absent.text
    assert "2 other arguments" in absent.text


async def test_the_order_of_arguments_does_not_matter(path: Path) -> None:
    cassette = Cassette(path, "record")
    cassette.open({}, (), "x")
    answer = ToolResult(text="yes", server="library")
    await cassette.wrap("library", OneAnswer(answer).call, "t", 0, count())(tool(), {"a": {"x": 1, "y": 2}, "b": 3})
    cassette.close()
    for mode in ("replay", "match"):
        call = Cassette(path, mode).wrap("library", None, "t", 0, count())
        assert await call(tool(), {"b": 3, "a": {"y": 2, "x": 1}}) == answer


async def test_a_cache_asks_only_what_it_does_not_know_in_this_run_and_the_next(path: Path) -> None:
    library = Library()
    async with ToolPool({"library": library}, cassette=Cassette(path, "cache")) as pool:
        first = [await pool.call(call("look_up", title=title)) for title in ("Emma", "none", "Emma", "none")]
    assert library.asked == ["Emma", "none"]
    assert first[:2] == first[2:]
    library.asked.clear()
    async with ToolPool({"library": library}, cassette=Cassette(path, "cache")) as pool:
        assert [await pool.call(call("look_up", title=title)) for title in ("Emma", "none")] == first[:2]
        await pool.call(call("look_up", title="Ulysses"))
    assert library.asked == ["Ulysses"]
    assert [line["arguments"]["title"] for line in recording(path)[1:]] == ["Emma", "none", "Ulysses"]


async def test_a_cache_always_asks_a_tool_that_may_change_something_and_does_not_record_it(path: Path) -> None:
    library = Library()
    async with ToolPool({"library": library}, cassette=Cassette(path, "cache")) as pool:
        results = [await pool.call(call("lend", title="Emma")) for _ in range(2)]
    assert [result.structured for result in results] == [{"number": 1}, {"number": 2}]
    assert len(recording(path)) == 1


async def test_a_cache_asks_once_when_many_ask_at_the_same_time(path: Path) -> None:
    library = Library()
    cassette = Cassette(path, "cache")
    async with ToolPool({"library": library}, cassette=cassette) as pool, anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(pool.call, call("look_up", title="Emma"))
    assert library.asked == ["Emma"]


async def test_a_cache_does_not_keep_failures_of_a_server(path: Path) -> None:
    cassette = Cassette(path, "cache")
    cassette.open({}, (), "x")
    results = [ToolResult(text="late", kind=ResultKind.TIMEOUT), ToolResult(text="yes"), ToolResult(text="no")]
    got = [
        await cassette.wrap("library", OneAnswer(result).call, "t", 0, count())(tool(is_read_only=True), {})
        for result in results
    ]
    cassette.close()
    assert [result.text for result in got] == ["late", "yes", "yes"]


@pytest.mark.parametrize("isolation", ["exclusive", "meta"])
async def test_a_cache_always_asks_where_each_trajectory_has_its_own_state(path: Path, isolation: Any) -> None:
    cassette = Cassette(path, "cache")
    config = ServerConfig(name="library", transport="stdio", command="x", isolation=isolation)
    cassette.open({}, [config], "x")
    got = [
        await cassette.wrap("library", OneAnswer(ToolResult(text=text)).call, "t", 0, count())(
            tool(is_read_only=True), {}
        )
        for text in ("before", "after")
    ]
    cassette.close()
    assert [result.text for result in got] == ["before", "after"]


async def test_those_who_wait_for_an_answer_that_does_not_come_ask_for_themselves_at_once(path: Path) -> None:
    cassette = Cassette(path, "cache")
    cassette.open({}, (), "x")
    num_asked = 0
    everyone_asked = anyio.Event()

    class Broken:
        async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                await anyio.wait_all_tasks_blocked()  # the others wait for this one
                raise ToolServerError("gone")
            if num_asked == 4:
                everyone_asked.set()
            await everyone_asked.wait()
            raise ToolServerError("gone")

    async def ask() -> None:
        with pytest.raises(ToolServerError):
            await cassette.wrap("library", Broken().call, "t", 0, count())(tool(is_read_only=True), {})

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
    cassette.close()
    assert num_asked == 4


async def test_a_cache_of_other_tools_is_refused(path: Path) -> None:
    async with ToolPool({"library": Library()}, cassette=Cassette(path, "cache")):
        pass
    changed = Library()
    changed.remove_tool("lend")
    with pytest.raises(CassetteError, match="have changed since"):
        async with ToolPool({"library": changed}, cassette=Cassette(path, "cache")):
            pass


async def test_secrets_are_not_written_and_calls_that_hold_them_are_found_again(path: Path) -> None:
    env = {"API_KEY": "s3cret-value"}
    config = ServerConfig(name="library", transport="stdio", command="true", env=env)
    answer = ToolResult(text="it is s3cret-value", structured={"key": ["s3cret-value"]}, server="library")
    cassette = Cassette(path, "record")
    cassette.open({}, [config], "x")
    arguments = {"where": {"s3cret-value": "key=s3cret-value"}}
    assert await cassette.wrap("library", OneAnswer(answer).call, "t", 0, count())(tool(), arguments) == answer
    cassette.close()
    assert "s3cret-value" not in path.read_text()
    for mode in ("replay", "match"):
        cassette = Cassette(path, mode)
        cassette.open({}, [config], "x")
        result = await cassette.wrap("library", None, "t", 0, count())(tool(), arguments)
        assert (result.text, result.structured) == ("it is ***", {"key": ["***"]})


async def test_a_secret_that_a_real_server_repeats_is_not_written(
    path: Path, rogue: Callable[..., ServerConfig]
) -> None:
    config = rogue(env={"API_KEY": "s3cret-value"})
    calls = [call("echo", text="my s3cret-value"), call("print_secret")]
    async with ToolPool([config], cassette=Cassette(path, "record")) as pool:
        first = [await pool.call(call) for call in calls]
    assert "s3cret-value" not in path.read_text()
    async with ToolPool([config], cassette=Cassette(path, "replay")) as pool:
        assert [await pool.call(call) for call in calls] == first
    assert [result.kind for result in first] == [ResultKind.OK, ResultKind.SERVER_ERROR]


async def test_a_recording_is_never_overwritten(recorded: Path) -> None:
    before = recorded.read_bytes()
    with pytest.raises(CassetteError, match=r"calls\.jsonl' already\. Delete it"):
        Cassette(recorded, "record")
    assert recorded.read_bytes() == before


async def test_an_empty_file_may_be_recorded_to_but_only_once(path: Path) -> None:
    path.touch()
    cassette = Cassette(path, "record")
    async with ToolPool({"library": Library()}, cassette=cassette):
        pass
    with pytest.raises(CassetteError, match="already"):
        async with ToolPool({"library": Library()}, cassette=cassette):
            pass


async def test_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "calls.jsonl"
    async with ToolPool({"library": Library()}, cassette=Cassette(path, "record")):
        pass
    assert path.exists()


async def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CassetteError, match="cannot be written"):
        async with ToolPool({"library": Library()}, cassette=Cassette(tmp_path / "file" / "calls.jsonl", "cache")):
            pass


@pytest.mark.parametrize("num_bytes", [1, 2, 50])
async def test_a_last_line_that_was_cut_off_is_left_out(
    recorded: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-num_bytes])
    with caplog.at_level(logging.WARNING):
        call = Cassette(recorded, "replay").wrap("library", None, "t", 0, count())
    assert "cut off" in caplog.text
    kinds = [(await call(tool(), {"title": title})).kind for title in ("Emma", "Ulysses")]
    assert kinds == [ResultKind.OK, ResultKind.SERVER_ERROR]


async def test_a_cache_that_was_cut_off_is_continued_on_a_new_line(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-9])
    cassette = Cassette(recorded, "cache")
    cassette.open({}, (), "x")
    call = cassette.wrap("library", OneAnswer(ToolResult(text="new")).call, "t", 0, count())
    assert (await call(tool(is_read_only=True), {"title": "Ulysses"})).text == "new"
    cassette.close()
    assert [line["result"]["text"] for line in recording(recorded)[1:]] == ["Emma!", "new"]


@pytest.mark.parametrize(
    "line",
    ["", "[1]", "{}", "null", '{"task": ', '{"cassette": 1}', b"\xff"]
    + [
        json.dumps({"task": "t", "attempt": 0, "call": 0, "server": "s", "tool": "t", "arguments": {}} | fields)
        for fields in (
            {},
            {"result": {}},
            {"result": {"text": "x", "kind": "odd"}},
            {"result": {"text": "x"}, "more": 1},
        )
    ],
)
def test_a_line_that_is_no_call_is_refused_by_its_number(recorded: Path, line: str | bytes) -> None:
    lines = recorded.read_bytes().splitlines()
    lines.insert(2, line if isinstance(line, bytes) else line.encode())
    recorded.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CassetteError, match=r"Line 3 of the recording '.*calls\.jsonl'"):
        Cassette(recorded, "replay")


@pytest.mark.parametrize(
    ("first_line", "words"),
    [
        (
            '{"cassette": 2, "mcp_grpo": "9.0"}',
            r"version 2; .* reads 1\. Use the mcp_grpo that made it, '9\.0'",
        ),
        ('{"mcpServers": {}}', "not a recording"),
        ("[]", "not a recording"),
        ('{"cassette": 1}', "Line 1"),
        ('{"cassette": 1, "hash": "x", "servers": {"s": [{}]}}', "Line 1"),
        ("mcp", "Line 1"),
    ],
)
def test_a_file_that_is_no_recording_of_a_known_version_is_refused(path: Path, first_line: str, words: str) -> None:
    path.write_text(first_line + "\n")
    for mode in ("replay", "match", "cache"):
        with pytest.raises(CassetteError, match=words):
            Cassette(path, mode)


@pytest.mark.parametrize("content", [None, "", '{"cassette": 1'])
def test_there_must_be_something_to_replay(path: Path, content: str | None) -> None:
    if content is not None:
        path.write_text(content)
    with pytest.raises(CassetteError, match=r"calls\.jsonl' (cannot be read: No such file|holds nothing)"):
        Cassette(path, "replay")


def test_an_unknown_mode_is_refused(path: Path) -> None:
    with pytest.raises(CassetteError, match=r"one of \('record', 'replay', 'match', 'cache'\), got 'play'"):
        Cassette(path, "play")  # type: ignore[arg-type]


def test_every_rank_has_a_file_of_its_own(path: Path) -> None:
    names = [Cassette.for_rank(path, "record", rank).path.name for rank in (0, 1, 12)]
    assert names == ["calls.jsonl", "calls.rank1.jsonl", "calls.rank12.jsonl"]


# JSON holds lone halves of surrogate pairs, but two that fit are always one character.
texts = st.text(st.characters(codec=None, exclude_categories=())).filter(
    lambda text: json.loads(json.dumps(text)) == text
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
results = st.builds(
    ToolResult,
    text=texts,
    kind=st.sampled_from(ResultKind),
    structured=values,
    server=st.just("library"),
    seconds=st.floats(min_value=0, allow_infinity=False),
    num_attempts=st.integers(1, 9),
    repairs=st.lists(texts, max_size=2).map(tuple),
    num_cut=st.integers(0, 9),
)


@given(result=results, arguments=st.dictionaries(texts, values, max_size=3), task_id=texts)
def test_whatever_is_recorded_is_replayed(
    tmp_path_factory: pytest.TempPathFactory, result: ToolResult, arguments: dict[str, Any], task_id: str
) -> None:
    async def record_and_replay() -> tuple[ToolResult, ToolResult]:
        path = tmp_path_factory.mktemp("any") / "calls.jsonl"
        cassette = Cassette(path, "record")
        cassette.open({}, (), "x")
        await cassette.wrap("library", OneAnswer(result).call, task_id, 0, count())(tool(), arguments)
        cassette.close()
        calls = (Cassette(path, mode).wrap("library", None, task_id, 0, count()) for mode in ("replay", "match"))
        replayed, matched = [await call(tool(), arguments) for call in calls]
        return replayed, matched

    assert anyio.run(record_and_replay) == (result, result)
