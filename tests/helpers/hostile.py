"""What a policy under training writes sooner or later, for tests that nothing trips over it."""

import json
from typing import Any

from hypothesis import strategies as st


PIECES = (
    *(
        "\ud83d",
        "\udc00",
        "\x00",
        "\x1b[31m",
        "\x1b]8;;x\x07",
        "\u202e",
        "\ufeff",
        "\ufffd",
        "e\u0301" * 5,
        "ſ",
        "İ",
        "ı",
        "\u212a",
    ),
    *(
        "1" * 310,
        "9" * 4400,
        "1e999",
        "-1e-999",
        "1,111," * 40,
        "٣٤٥",
        "²",
        "½",
        "1.",
        ".5",
        "NaN",
        "Infinity",
        "$(5)",
        "5 uſd",
        "5 ınr",
    ),
    *("ſep 5, 2024", "2024-13-45", "0000-00-00", "March 5, 2024", "5 of may 2024", "99/99/9999"),
    *(
        "Answer:",
        "final answer : ",
        "\\boxed{",
        "\\text{5}",
        "{,}",
        "**5**",
        "`",
        "___",
        "> - # ",
        "[/bold]",
        "[link=",
        "```json\n",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "[" * 400 + "]" * 400,
        '{"a":' * 300,
        '"',
        "\\u",
        "\\ud800",
        ",",
        "\n" * 30,
        "\r\n",
        "\t",
        " " * 40,
    ),
    *(
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<script>alert(1)</script>",
        "&lt;",
        "{{ 7 * 7 }}",
        "%s",
    ),
    *(
        "no data",
        "not available",
        "The CEO is A. B. Cc & Dd",
        "Inc.",
        "or",
        "is wrong",
        "yes",
        "halted",
        "Q3",
        "a loss of 5 %",
    ),
)
"""Pieces of text that have raised somewhere, here or elsewhere."""

# By number, and large numbers by their bits, so that what hypothesis tells of them can be read.
pieces = st.integers(0, len(PIECES) - 1).map(lambda number: PIECES[number])
texts = st.lists(pieces | st.text(max_size=8), max_size=8).map("".join)
"""Texts, also such as no file can hold."""

_numbers = st.floats() | st.integers(-9, 9) | st.integers(0, 14_000).map(lambda bits: -(2**bits) + 1)
values = st.recursive(
    st.none() | st.booleans() | _numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=6,
) | st.integers(1, 900).map(lambda depth: json.loads("[" * depth + "]" * depth))
"""What JSON as Python reads it can hold, NaN and halves of surrogate pairs included."""


def call(name: Any, arguments: Any) -> str:
    """A tool call as Qwen3 writes it; escapes keep what no text can hold."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
