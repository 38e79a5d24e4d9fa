"""What a solution could not know is found in its calls."""

from typing import Any

import pytest

from mcp_grpo.tasks import unseen_values
from mcp_grpo.types import Message


ASKED: list[Message] = [
    {"role": "system", "content": "It is 2031-05-04."},
    {"role": "user", "content": "Mail Ann the\n 'Plan  for June', and file it under 4711."},
]


def calls(*arguments: Any) -> Message:
    made = [{"type": "function", "function": {"name": "send", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


@pytest.mark.parametrize(
    ("arguments", "unseen"),
    [
        ({"to": "ann@our.example"}, ["ann@our.example"]),
        ({"title": "plan for june", "on": "2031-05-04"}, []),
        ({"number": 4711, "other": 4712, "few": 12, "is_new": True, "none": None}, [4712]),
        ({"lists": [{"deep": "made up"}, "abc"]}, ["made up"]),
        ('{"to": "bob@our.example"}', ["bob@our.example"]),
    ],
)
def test_only_what_nothing_has_shown_is_unseen(arguments: Any, unseen: list[Any]) -> None:
    assert unseen_values(ASKED, [calls(arguments)]) == unseen


def test_results_and_calls_before_count_and_those_after_do_not() -> None:
    use, found = calls({"to": "ann@our.example"}), result("['ann@our.example']")
    assert unseen_values(ASKED, [calls({"name": "Ann"}), found, use]) == []
    assert unseen_values(ASKED, [use, found, use, use]) == ["ann@our.example"]


def test_what_the_policy_says_itself_shows_nothing() -> None:
    said: Message = {"role": "assistant", "content": "It must be ann@our.example."}
    assert unseen_values(ASKED, [said, calls({"to": "ann@our.example"})]) == ["ann@our.example"]


def test_what_tools_are_told_to_take_is_seen() -> None:
    schema = {"type": "object", "properties": {"list": {"enum": ["In Review"], "description": 'Or "Backlog".'}}}
    use = calls({"list": "In Review"}, {"list": "backlog"}, {"list": "Archive"})
    assert unseen_values(ASKED, [use], [schema]) == ["Archive"]


def test_escapes_do_not_matter() -> None:
    asked: list[Message] = [{"role": "user", "content": "Say 'Dear Ann,\\n\\nit\\'s done'"}]
    assert unseen_values(asked, [calls({"body": "Dear Ann,\n\nit's done"})]) == []
