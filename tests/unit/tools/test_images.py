"""Pictures in recordings: files beside them, each once, and there again when a run is replayed."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent

from mcp_grpo import ToolPool
from mcp_grpo.errors import CassetteError
from mcp_grpo.tools import Cassette
from mcp_grpo.types import ToolCall, ToolResult


PICTURE = b"\x89PNG" + bytes(range(256)) * 40


@pytest.fixture
def server() -> MCPServer:
    made = MCPServer("pictures", log_level="ERROR")

    @made.tool(structured_output=False)
    def look() -> list[Any]:
        """Look."""
        image = ImageContent(type="image", data=base64.b64encode(PICTURE).decode(), mime_type="image/png")
        return [TextContent(type="text", text="Here:"), image, TextContent(type="text", text="and"), image]

    @made.tool(structured_output=False)
    def garbled() -> list[Any]:
        """Look at something that is not even base64."""
        return [ImageContent(type="image", data="?!", mime_type="image/png")]

    return made


async def looked(servers: Any, path: Path, mode: Any) -> ToolResult:
    async with ToolPool(servers, Cassette(path, mode)) as pool:
        return await pool.call(ToolCall(name="look", arguments={}))


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["replay", "match"])
async def test_pictures_are_replayed_from_files_beside_the_recording(
    tmp_path: Path, server: MCPServer, mode: str
) -> None:
    path = tmp_path / "calls.jsonl"
    first = await looked({"pictures": server}, path, "record")
    assert [image.data for image in first.images] == [PICTURE] * 2
    assert first.text == "Here:\n[image/png, 10 kB]\nand\n[image/png, 10 kB]"
    second = await looked(None, path, mode)
    assert (second.text, second.images) == (first.text, first.images)
    assert [file.name for file in (tmp_path / "calls.images").iterdir()] == [first.images[0].sha256]
    line = json.loads(path.read_text().splitlines()[1])
    assert len(json.dumps(line)) < 1000
    assert line["result"]["images"][0]["bytes"] == len(PICTURE)


@pytest.mark.anyio
@pytest.mark.parametrize("harm", ["unlink", "change"])
async def test_a_recording_without_its_pictures_is_refused_in_words(
    tmp_path: Path, server: MCPServer, harm: str
) -> None:
    path = tmp_path / "calls.jsonl"
    await looked({"pictures": server}, path, "record")
    [file] = (tmp_path / "calls.images").iterdir()
    if harm == "unlink":
        file.unlink()
    else:
        file.write_bytes(b"another")
    with pytest.raises(CassetteError, match="Keep the folder beside the recording"):
        Cassette(path, "replay")


@pytest.mark.anyio
async def test_a_recording_cannot_name_other_files(tmp_path: Path, server: MCPServer) -> None:
    path = tmp_path / "calls.jsonl"
    first = await looked({"pictures": server}, path, "record")
    path.write_text(path.read_text().replace(first.images[0].sha256, "../../etc/passwd"))
    with pytest.raises(CassetteError, match="names a picture"):
        Cassette(path, "replay")


@pytest.mark.anyio
async def test_what_is_not_even_base64_is_a_note(server: MCPServer) -> None:
    async with ToolPool({"pictures": server}) as pool:
        result = await pool.call(ToolCall(name="garbled", arguments={}))
    assert result.text == "[image/png, 1 B]"
    assert result.images == ()
