from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from mcp.types import JSONRPCError, JSONRPCResponse

from mcp_grpo.tools.transports.framing import LineSplitter, Oversized, parse


@given(
    lines=st.lists(st.binary().map(lambda b: b.replace(b"\n", b"")), max_size=8), cuts=st.lists(st.integers(0, 200))
)
def test_lines_come_out_as_they_went_in_however_the_stream_is_cut(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = LineSplitter(max_bytes=10_000)
    out = [line for start, end in pairwise(edges) for line in splitter.feed(stream[start:end])]
    assert out == lines


@given(size=st.integers(11, 2000), chunk=st.integers(1, 300))
def test_a_line_over_the_limit_is_dropped_and_the_next_one_is_kept(size: int, chunk: int) -> None:
    stream = b"x" * size + b"\nnext\n"
    splitter = LineSplitter(max_bytes=10)
    out = [line for i in range(0, len(stream), chunk) for line in splitter.feed(stream[i : i + chunk])]
    assert [type(line) for line in out] == [Oversized, Oversized, bytes]
    assert out[-1] == b"next"


def test_a_line_of_just_the_limit_is_kept() -> None:
    assert list(LineSplitter(max_bytes=3).feed(b"abc\n")) == [b"abc"]


def test_an_endless_line_takes_no_more_memory_than_the_limit() -> None:
    splitter = LineSplitter(max_bytes=1000)
    for _ in range(1000):
        list(splitter.feed(b"x" * 500))
    assert sum(map(len, splitter._pieces)) + len(splitter._tail) <= 1000


def test_an_oversized_reply_becomes_an_error_for_its_request_wherever_its_id_is() -> None:
    for reply in (
        b'{"jsonrpc":"2.0","id":7,"result":{"id":1,"text":"xxxxxxxxxxxxxxxxxxxx"}}\n',
        b'{"result":{"id":1,"text":"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"},"jsonrpc":"2.0","id":7}\n',
    ):
        found = [parse(line, 20) for line in LineSplitter(max_bytes=20).feed(reply)]
        errors = [message for message in found if isinstance(message, JSONRPCError)]
        assert errors
        assert {error.id for error in errors} == {7}


def test_an_id_inside_a_result_is_not_taken_for_the_id_of_the_reply() -> None:
    reply = b'{"result":{"items":[{"id":1,"text":"' + b"x" * 2000 + b'"}]}}\n'
    assert [parse(line, 100) for line in LineSplitter(max_bytes=100).feed(reply)] == [None, None]


def test_a_banner_is_nobodys_reply() -> None:
    for line in (b"", b"Server ready", b"[1, 2", b'{"level": "info"}', b"\xff\x00"):
        assert parse(line, 100) is None


def test_undecodable_bytes_are_replaced() -> None:
    message = parse(b'{"jsonrpc":"2.0","id":1,"result":{"text":"a\xffb"}}', 100)
    assert isinstance(message, JSONRPCResponse)
    assert message.result == {"text": "a�b"}
