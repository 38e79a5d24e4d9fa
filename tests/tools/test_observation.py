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

from mcp_grpo.tools.observation import observed
from mcp_grpo.types import ResultKind


def text_of(*content: object, **fields: object) -> str:
    result = CallToolResult.model_validate({"content": list(content), **fields})
    return observed(result, server="s", seconds=0.0).text


def test_text_parts_are_joined() -> None:
    assert text_of(TextContent(text="a"), TextContent(text="b")) == "a\nb"


def test_structured_content_is_not_repeated_when_there_is_text() -> None:
    result = CallToolResult(content=[TextContent(text='{"a": 1}')], structured_content={"a": 1})
    seen = observed(result, server="s", seconds=0.5)
    assert (seen.text, seen.structured, seen.seconds, seen.server) == ('{"a": 1}', {"a": 1}, 0.5, "s")


def test_structured_content_is_the_text_when_there_is_no_other() -> None:
    assert text_of(structuredContent={"city": "Zürich"}) == '{"city": "Zürich"}'


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
    seen = observed(CallToolResult(content=[TextContent(text=text)], is_error=True), server="s", seconds=0.0)
    assert (seen.kind, seen.text) == (ResultKind.TOOL_ERROR, "1 validation error\nmore")


def test_an_error_without_words_still_says_that_it_is_one() -> None:
    assert "error" in text_of(isError=True)
