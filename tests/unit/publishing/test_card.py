"""A model card shows what servers say about their tools, and does nothing that they say."""

import re
from pathlib import Path

import mcp.types as types
import pytest
from huggingface_hub import ModelCard

from mcp_grpo.inert import markdown_code
from mcp_grpo.monitor import Results
from mcp_grpo.publishing import RunSummary, rewrite_card
from mcp_grpo.tools import Catalog


LIVE = "<img src=x onerror=alert(1)> [click](javascript:alert(1)) ![i](https://track.test/p.png) | <!-- ``` https://a.test www.b.test"


@pytest.fixture
def card(tmp_path: Path) -> str:
    path = tmp_path / "README.md"
    path.write_text("---\ntags:\n- trl\n---\n# x\n")
    tool = types.Tool(name="t", description=f"{LIVE}\x1b[2J\nmore", input_schema={"type": "object"})
    summary = RunSummary(
        num_tasks=2,
        kinds={"family": {LIVE: 2}},
        dataset_name=f"evil) {LIVE}",
        results=Results(title=LIVE, rows=[(LIVE, LIVE, LIVE)], notes=[LIVE]),
        command=f"python a.py '```\n{LIVE}'",
    )
    rewrite_card(
        path,
        Catalog.from_servers({LIVE: (tool,)}, ()),
        model_name=LIVE,
        model_id='a"); import os',
        is_adapter=True,
        base_model=f"b](https://x.test) {LIVE}",
        summary=summary,
        hide=lambda text: text.replace("javascript", "***"),
    )
    return path.read_text()


def test_nothing_in_it_is_alive(card: str) -> None:
    body = ModelCard(card, ignore_metadata_errors=True).text
    before, block = body.split("````bash", 1)
    shown = before + block.split("````", 1)[1]
    for alive in ("<img", "<!--", "](", "![", "https://a.test", "www.b.test", "https://track"):
        assert alive not in shown.replace("[DeepSeekMath](https", "").replace("![Metrics over", ""), alive
    assert "\x1b" not in card
    assert "javascript" not in card
    assert 'load_adapter("a\\"); import os"' in card


def test_each_tool_is_one_row_of_four_cells(card: str) -> None:
    (row,) = [line for line in card.splitlines() if line.startswith("| `t` |")]
    assert row.replace("\\|", "").count("|") == 5
    assert "click" in row


@pytest.mark.parametrize("text", ["`<img>`", "a``<img>``b", "`", "a|b\n`c`"])
def test_code_does_not_end_before_its_end(text: str) -> None:
    """By the rule of CommonMark: a span of code ends at the next run of as many backticks as it began with."""
    span = markdown_code(text)
    fence = (re.match("`+", span) or [""])[0]
    runs = [found.span() for found in re.finditer("`+", span) if len(found[0]) == len(fence)]
    assert runs == [(0, len(fence)), (len(span) - len(fence), len(span))]
    assert "\n" not in span
    assert "|" not in span.replace("\\|", "")


def test_ordinary_names_are_shown_as_they_are_and_linked(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("---\ntags:\n- trl\n---\n# x\n")
    tool = types.Tool(name="read_file", description="Read a file.", input_schema={"type": "object"})
    catalog = Catalog.from_servers({"files": (tool,)}, ())
    rewrite_card(path, catalog, model_name="m", model_id="a/m", is_adapter=True, base_model="Qwen/Qwen3-0.6B")
    assert "| `read_file` | files | Read a file. |" in path.read_text()
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)" in path.read_text()
