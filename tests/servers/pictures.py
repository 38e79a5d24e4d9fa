"""A real stdio MCP server whose tools return pictures."""

import base64
import sys
from io import BytesIO

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent
from PIL import Image


server = MCPServer("pictures", log_level="ERROR")
colours = sys.argv[1:] or ["red", "green", "blue", "white"]
num_looks = 0


def picture(colour: str, size: tuple[int, int] = (24, 16)) -> ImageContent:
    file = BytesIO()
    shade = Image.linear_gradient("L").resize(size)
    Image.composite(Image.new("RGB", size, colour), Image.new("RGB", size), shade).save(file, "PNG")
    return ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png")


@server.tool(structured_output=False)
def look() -> list[TextContent | ImageContent]:
    """Look at the next picture."""
    global num_looks
    num_looks += 1
    colour = colours[num_looks % len(colours)]
    return [TextContent(type="text", text="Here it is:"), picture(colour), TextContent(type="text", text="Done.")]


@server.tool(structured_output=False)
def album(count: int = 20) -> list[ImageContent]:
    """Look at many pictures."""
    return [picture("red", (16, 16))] * count


@server.tool(structured_output=False)
def broken() -> list[TextContent | ImageContent]:
    """Look at something that is no picture."""
    data = base64.b64encode(b"no picture").decode()
    return [TextContent(type="text", text="Here:"), ImageContent(type="image", data=data, mime_type="image/png")]


if __name__ == "__main__":
    server.run("stdio")
