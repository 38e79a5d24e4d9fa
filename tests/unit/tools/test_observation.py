import base64

import pytest
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from mcp_grpo.tools import ServerConfig
from mcp_grpo.tools.observation import observed, with_repairs
from mcp_grpo.types import ResultKind, ToolResult


SERVER = ServerConfig(name="s", transport="stdio", command="server")


def seen(*content: object, config: ServerConfig = SERVER, **fields: object) -> ToolResult:
    result = CallToolResult.model_validate({"content": list(content), **fields})
    return observed(result, config=config, tool="look", seconds=0.5)


def text_of(*content: object, **fields: object) -> str:
    return seen(*content, **fields).text


def test_text_parts_are_joined() -> None:
    assert text_of(TextContent(text="a"), TextContent(text="b")) == "a\nb"


def test_structured_content_is_not_repeated_when_there_is_text() -> None:
    result = seen(TextContent(text='{"a": 1}'), structuredContent={"a": 1})
    assert (result.text, result.structured, result.seconds, result.server) == ('{"a": 1}', {"a": 1}, 0.5, "s")


def test_structured_content_is_the_text_when_there_is_no_other() -> None:
    assert text_of(structuredContent={"city": "Zürich"}) == '{"city": "Zürich"}'
    assert text_of(ImageContent(data="AAAA", mime_type="image/png"), structuredContent=[1]) == "[image/png, 3 B]\n[1]"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (ImageContent(data=base64.b64encode(bytes(12_000)).decode(), mime_type="image/png"), "[image/png, 12 kB]"),
        (AudioContent(data=base64.b64encode(bytes(7)).decode(), mime_type="audio/wav"), "[audio/wav, 7 B]"),
        (ResourceLink(name="log", uri="file:///log", mime_type="text/plain"), "[text/plain, log: file:///log]"),
        (EmbeddedResource(resource=TextResourceContents(uri="a://b", text="inside")), "inside"),
        (
            EmbeddedResource(resource=BlobResourceContents(uri="a://b", blob=base64.b64encode(bytes(3)).decode())),
            "[resource, 3 B: a://b]",
        ),
    ],
)
def test_parts_that_are_no_text_are_named(part: object, text: str) -> None:
    assert text_of(TextContent(text="see:"), part) == f"see:\n{text}"


def test_an_error_is_the_tools_answer_without_links_for_programmers() -> None:
    text = "1 validation error\n  For further information visit https://errors.pydantic.dev/2.14/v/missing\nmore"
    result = seen(TextContent(text=text), isError=True)
    assert (result.kind, result.text) == (ResultKind.TOOL_ERROR, "1 validation error\nmore")


def test_an_error_without_words_still_says_that_it_is_one() -> None:
    assert "error" in text_of(isError=True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Database error: no such table", ResultKind.TOOL_ERROR),
        ('{"ERROR": "fetch failed"}', ResultKind.TOOL_ERROR),
        ("No Database error: none", ResultKind.OK),
    ],
)
def test_a_text_that_an_error_pattern_finds_is_an_error_of_the_tool(text: str, kind: ResultKind) -> None:
    patterns = ("^Database error:", r'(?i)^\{"error":')
    config = ServerConfig(name="s", transport="stdio", command="server", error_patterns=patterns)
    result = seen(TextContent(text=text), config=config)
    assert (result.kind, result.text) == (kind, text)


def test_secrets_are_hidden_in_text_and_in_structured_content() -> None:
    config = ServerConfig(name="s", transport="stdio", command="server", env={"API_KEY": "s3cret-value"})
    echoed = {"url": "http://x/?k=s3cret-value", "seen": [{"s3cret-value": 1}, "s3cret-value", 2.5, None]}
    result = seen(TextContent(text="key=s3cret-value"), config=config, structuredContent=echoed)
    assert result.text == "key=***"
    assert result.structured == {"url": "http://x/?k=***", "seen": [{"***": 1}, "***", 2.5, None]}


def test_what_was_mended_is_said_before_the_result() -> None:
    result = with_repairs(ToolResult(text="4"), ("`x` was taken for `y`", "`y` was read as null, not as text"))
    assert result.text == "Note: `x` was taken for `y`; `y` was read as null, not as text.\n4"
    assert result.repairs == ("`x` was taken for `y`", "`y` was read as null, not as text")


def test_a_result_of_arguments_that_were_not_mended_stays_as_it_is() -> None:
    result = ToolResult(text="4")
    assert with_repairs(result, ()) is result
