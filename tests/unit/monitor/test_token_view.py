"""A token view shows every token of a trajectory once, whatever its bytes are, and harms neither a page nor a terminal."""

import ast
import io
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.families import family_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mcp_grpo.masking.vocabulary import Vocabulary
from mcp_grpo.monitor.token_view import TokenView, explain
from mcp_grpo.types import (
    Exchange,
    ResultKind,
    Segment,
    StopReason,
    Task,
    TokenRole,
    ToolCall,
    ToolResult,
    Trajectory,
)


class Pieces:
    """A vocabulary that learns a token for every piece it is given."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def ids(self, pieces: Sequence[str | bytes]) -> tuple[int, ...]:
        start = len(self._pieces)
        self._pieces += [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        return tuple(range(start, len(self._pieces)))

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        return [self._pieces[token_id] for token_id in ids]


class Page(HTMLParser):
    """What a page holds: elements, tokens with classes, tooltips and texts, keys of the legend, headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.tokens: list[tuple[set[str], str, str]] = []
        self.keys: list[str] = []
        self.open: list[bool] = []
        self.style = self.text = ""
        self._stack: list[set[str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        classes = set((attributes.get("class") or "").split())
        self.elements.add(tag)
        if tag != "meta":
            self._stack.append({tag, *classes})
        if "tv-token" in classes:
            self.tokens.append((classes, attributes["title"] or "", ""))
        if tag == "details":
            self.open.append("open" in attributes)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self._stack.pop()

    def handle_data(self, data: str) -> None:
        inside: set[str] = set().union(*self._stack)
        if "style" in inside:
            self.style += data
        elif "tv-token" in inside:
            classes, title, text = self.tokens[-1]
            self.tokens[-1] = (classes, title, text + data)
        else:
            self.text += data
            if "tv-key" in inside:
                self.keys.append(data)


CALL = ["<call>", '{"name": "', "add", '", "x": ', "4", "2}", "}"]
ROLES = ["trigger", "forced", "choice", "forced", "choice", "straddling", "forced"]
PROBABILITIES = [0.95, 0.999, 0.4, 0.97, 0.05, 0.8, 1.0]
REPLY = ["\n", "<script>", "alert(1)", "</script>", " & so\n"]
ANSWER = ["It", " is", " 42", "."]


def trajectory(
    parts: Sequence[tuple[Sequence[str | bytes], Sequence[float] | None]],
    prompt: Sequence[str | bytes] = ("user: ", "add\n"),
    **fields: Any,
) -> Trajectory:
    vocabulary = Pieces()
    segments = tuple(
        Segment(
            token_ids=vocabulary.ids(pieces),
            logprobs=None if probabilities is None else tuple(math.log(p) for p in probabilities),
        )
        for pieces, probabilities in parts
    )
    values: dict[str, Any] = {"stop_reason": StopReason.ANSWERED, "exchanges": (), **fields}
    return Trajectory(
        task=Task(task_id="sums/1", prompt=()),
        prompt_ids=vocabulary.ids(prompt),
        segments=segments,
        messages=(),
        vocabulary=vocabulary,
        **values,
    )


def exchange(name: str, kind: ResultKind, turn: int) -> Exchange:
    return Exchange(call=ToolCall(name=name, arguments={}), result=ToolResult(text="", kind=kind), turn=turn)


def adding(**fields: Any) -> Trajectory:
    """Calls a tool, reads what it says and answers; the syntax of its call is masked but for one token."""
    environment = [TokenRole.ENVIRONMENT] * len(REPLY)
    roles = [*(TokenRole(role) for role in ROLES), *environment, *[TokenRole.CHOICE] * len(ANSWER)]
    masked = [role is TokenRole.FORCED for role in roles]
    masked[3] = False
    values: dict[str, Any] = {
        "roles": tuple(roles),
        "masked": tuple(masked),
        "exchanges": (exchange("add", ResultKind.TOOL_ERROR, 0),),
        **fields,
    }
    return trajectory([(CALL, PROBABILITIES), (REPLY, None), (ANSWER, [1.0, 0.6, 0.995, 1.0])], **values)


def page(view: TokenView) -> Page:
    return Page(view._repr_html_())


def terminal(view: TokenView, width: int = 80, **settings: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=width, **{"force_terminal": True, "color_system": "standard", **settings}).print(view)
    return file.getvalue()


def test_every_token_is_one_element_and_its_text_is_there_once() -> None:
    shown = page(explain(adding()))
    assert [text for _, _, text in shown.tokens] == ["user: ", "add\n", *CALL, *REPLY, *ANSWER]
    assert "alert(1)" not in shown.text


def test_what_a_tool_says_does_not_become_an_element() -> None:
    elements = page(explain(adding())).elements
    assert elements == {"div", "style", "span", "b", "i", "details", "summary"}


def test_names_and_errors_do_not_become_elements_either() -> None:
    failed = trajectory(
        [(["a"], [1.0])],
        exchanges=(exchange("<u>", ResultKind.UNKNOWN_TOOL, 0),),
        stop_reason=StopReason.SERVER_FAILED,
        error="<u>&amp;",
    )
    shown = page(explain(failed))
    assert "u" not in shown.elements
    assert "<u> → unknown_tool" in shown.text
    assert "<u>&amp;" in shown.text


pieces = st.lists(
    st.one_of(st.binary(max_size=4), st.text(max_size=4).map(lambda text: text.encode(errors="replace"))),
    min_size=1,
    max_size=8,
)


@given(pieces, pieces, st.integers(1, 90))
def test_no_bytes_are_lost_and_none_break_a_page_or_a_terminal(
    written: list[bytes], sampled: list[bytes], width: int
) -> None:
    view = explain(trajectory([(sampled, [0.3] * len(sampled)), (written, None)], prompt=written))
    shown = page(view)
    spelt = [ast.literal_eval(title.split("\n")[0].split("  ", 1)[1]) for _, title, _ in shown.tokens]
    assert [text.encode() if isinstance(text, str) else text for text in spelt] == [*written, *sampled, *written]
    assert shown.elements <= {"div", "style", "span", "b", "i", "details", "summary"}
    for text in (view._repr_html_(), str(view), Text.from_ansi(terminal(view, width)).plain):
        assert all(char.isprintable() or char == "\n" for char in text)


@given(st.text(alphabet="a é😀梨", min_size=1, max_size=12), st.data())
def test_text_that_is_cut_inside_its_characters_is_shown_whole(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole)), max_size=6)) | {0, len(whole)})
    cut = [whole[start:end] for start, end in pairwise(cuts)]
    shown = page(explain(trajectory([(cut, [1.0] * len(cut))])))
    assert "".join(text for _, _, text in shown.tokens[2:]) == text


def test_the_tokens_of_a_real_vocabulary_read_as_the_text_they_were_made_of() -> None:
    tokenizer = family_tokenizer("qwen3")
    prompt, text = "Pears, please.\n", 'Two  😀 of "梨"?\n<tool_call>\n{"a": [1]}<|im_end|>'
    prompt_ids, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text))
    made = Trajectory(
        task=Task(task_id="pears", prompt=()),
        prompt_ids=tuple(prompt_ids),
        segments=(Segment(token_ids=tuple(ids), logprobs=(-0.1,) * len(ids)),),
        messages=(),
        exchanges=(),
        stop_reason=StopReason.MAX_TOKENS,
        vocabulary=Vocabulary(tokenizer),
    )
    assert "".join(text for _, _, text in page(explain(made)).tokens) == prompt + text


def test_a_byte_that_is_no_character_is_shown_as_an_escape() -> None:
    view = explain(trajectory([([b"ab\xe2\x82", b"c"], [1.0, 1.0])]))
    assert [text for _, _, text in page(view).tokens[2:]] == ["ab\\xe2\\x82", "c"]
    assert "ab\\xe2\\x82c" in str(view)


def test_a_character_does_not_go_on_from_one_author_to_the_next() -> None:
    view = explain(trajectory([([b"\xe2\x82"], [1.0]), ([b"\xac"], None)]))
    assert [text for _, _, text in page(view).tokens[2:]] == ["\\xe2\\x82", "\\xac"]


def test_a_tooltip_says_all_there_is_to_know() -> None:
    view = explain(adding())
    titles = [title for _, title, _ in page(view).tokens]
    assert (
        titles[0]
        == f"token {view.tokens[0].token_id}  'user: '\nprompt · environment\nnot sampled: not in the policy loss"
    )
    assert titles[3] == (
        """token 1  '{"name": "'\npolicy · forced · turn 0\np = 0.999  (log-prob -0.001001)\n"""
        "masked: not in the policy loss"
    )
    assert titles[4].endswith("p = 0.4  (log-prob -0.9163)\nnot masked: in the policy loss")
    assert titles[9] == "token 7  '\\n'\nenvironment · environment · turn 0\nnot sampled: not in the policy loss"


def test_a_token_is_coloured_by_author_role_probability_and_mask() -> None:
    classes = [classes - {"tv-token"} for classes, _, _ in page(explain(adding())).tokens]
    assert classes[1:10] == [
        {"tv-prompt", "tv-p0"},
        {"tv-trigger", "tv-p1"},
        {"tv-forced", "tv-p0", "tv-masked"},
        {"tv-choice", "tv-p3"},
        {"tv-forced", "tv-p1"},
        {"tv-choice", "tv-p4"},
        {"tv-straddling", "tv-p2"},
        {"tv-forced", "tv-p0", "tv-masked"},
        {"tv-environment", "tv-p0"},
    ]


def test_without_roles_what_the_policy_sampled_is_a_choice() -> None:
    view = explain(trajectory([(["a"], [0.5]), (["b"], None)]))
    assert [(token.author, token.role, token.masked) for token in view.tokens[2:]] == [
        ("policy", "choice", False),
        ("environment", "environment", False),
    ]


def test_the_legend_counts_tokens_by_role() -> None:
    shown = page(explain(adding()))
    assert shown.keys[:7] == [
        "prompt 2",
        "environment 5",
        "choice 6",
        "trigger 1",
        "straddling 1",
        "forced 3",
        "masked",
    ]
    assert shown.keys[7:] == ["p ≥ .99", "p < .99", "p < .9", "p < .5", "p < .1"]


def test_the_head_says_how_it_went() -> None:
    shown = page(explain(adding(), reward=0.25))
    for fact in (
        "sums/1",
        "answered",
        "reward 0.25",
        "2 turns",
        "11 policy tokens",
        "18% masked",
        "1 forced in the loss",
    ):
        assert fact in shown.text
    assert "reward" not in page(explain(adding())).text


def test_a_turn_says_what_its_calls_came_to() -> None:
    text = page(explain(adding())).text
    assert "turn 07 policy tokens · 29% masked · mean log-prob -0.60 · 5 environment tokensadd → tool_error" in text
    assert text.endswith("turn 14 policy tokens · 0% masked · mean log-prob -0.13")


def test_a_long_prompt_is_folded() -> None:
    prompt = [f"line {number}\n" for number in range(100)]
    view = explain(trajectory([(["a"], [1.0])], prompt=prompt))
    assert page(view).open == [False, True]
    assert page(explain(adding())).open == [True, True, True]
    assert [line for line in str(view).splitlines() if line.startswith(("┆", "⋮"))] == [
        *(f"┆ line {number}⏎" for number in (0, 1, 2)),
        "⋮ 94 more lines",
        *(f"┆ line {number}⏎" for number in (97, 98, 99)),
    ]


def test_text_has_marks_in_place_of_colours() -> None:
    assert str(explain(adding())).splitlines()[7:] == [
        "turn 0  7 policy tokens · 29% masked · mean log-prob -0.60 · 5 environment tokens · add → tool_error",
        '┃ <call>{"name": "add", "x": 42}}',
        "  ▁▁▁▁▁▁----------▅▅▅▁▁▁▁▁▁▁▁█▃▃-",
        "│ ⏎",
        "│ <script>alert(1)</script> & so⏎",
        "",
        "turn 1  4 policy tokens · 0% masked · mean log-prob -0.13",
        "┃ It is 42.",
        "    ▃▃▃",
    ]


def test_a_terminal_has_a_style_for_author_role_probability_and_mask() -> None:
    printed = terminal(explain(adding()))
    for style, text in [
        ("90", "user: "),
        ("3;35", "<call>"),  # italic: not quite certain
        ("2;9;32", '{"name": "'),  # dim, and struck through: masked
        ("1;4;39", "add"),
        ("3;32", '", "x": '),
        ("1;7;39", "4"),  # reversed: unlikely
        ("4;31", "2}"),
        ("34", "<script>"),
    ]:
        assert f"\x1b[{style}m{text}\x1b[0m" in printed


def test_no_line_in_a_terminal_is_too_wide_and_none_controls_it() -> None:
    long = ["a梨 "] * 60
    printed = terminal(explain(trajectory([(long, [0.05] * 60), (["\x1b[2J\u202e", "    x"], None)])))
    assert "\x1b[1;7" in printed
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert max(cell_len(line) for line in plain.splitlines()) == 80
    assert "\\x1b[2J\\u202e····x" in plain


def test_a_terminal_without_colours_gets_the_marks() -> None:
    printed = terminal(explain(adding()), force_terminal=False, color_system=None)
    assert "\x1b" not in printed
    assert "  ▁▁▁▁▁▁----------▅▅▅▁▁▁▁▁▁▁▁█▃▃-" in printed


def test_a_trajectory_without_a_completion_is_its_prompt() -> None:
    view = explain(trajectory([], stop_reason=StopReason.MAX_TOKENS))
    assert [text for _, _, text in page(view).tokens] == ["user: ", "add\n"]
    assert str(view).startswith("sums/1  max_tokens · 0 turns\n")
    assert terminal(view)


def test_a_failed_trajectory_says_why_and_that_all_of_it_is_masked() -> None:
    view = explain(adding(stop_reason=StopReason.SERVER_FAILED, error="`add`: gone\x07"))
    assert all(token.masked == (token.author == "policy") for token in view.tokens)
    for text in (page(view).text, str(view), terminal(view, width=200)):
        assert "Failed, so in neither the loss nor the baseline of its group. `add`: gone\\x07" in text


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    explain(adding()).save(tmp_path / "view.html")
    html = (tmp_path / "view.html").read_text(encoding="utf-8")
    shown = Page(html)
    assert html.startswith("<!doctype html>")
    assert "sums/1" in shown.text
    assert not shown.elements & {"script", "link", "img"}
    assert "url(" not in shown.style
    assert "prefers-color-scheme:dark" in shown.style


def test_its_style_does_not_reach_the_rest_of_a_notebook() -> None:
    style = re.sub(r"@media\([^)]*\)\{(.*?\})\}", r"\1", page(explain(adding())).style)
    selectors = [selector for rule in re.findall(r"([^{}]+)\{[^{}]*\}", style) for selector in rule.split(",")]
    assert len(selectors) > 20
    assert [selector for selector in selectors if not selector.strip().startswith(".tv")] == []


def test_a_trajectory_without_a_vocabulary_says_where_to_get_one() -> None:
    made = Trajectory(
        task=Task(task_id="t", prompt=()),
        prompt_ids=(1,),
        segments=(),
        messages=(),
        exchanges=(),
        stop_reason=StopReason.ANSWERED,
    )
    with pytest.raises(ValueError, match=r"MCPGRPOTrainer\.roll_out"):
        explain(made)


@pytest.mark.parametrize("fields", [{"roles": (TokenRole.CHOICE,)}, {"masked": (True, False, True)}])
def test_roles_and_masks_of_another_length_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one entry per completion token"):
        trajectory([(["a"], [0.5]), (["b"], None)], **fields)
