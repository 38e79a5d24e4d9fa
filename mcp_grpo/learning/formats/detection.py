"""Finds out from a chat template how a model writes tool calls."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jinja2 import TemplateError

from mcp_grpo.learning.formats.call import CallSyntax
from mcp_grpo.learning.formats.cursor import Cursor, Unreadable, num_shared
from mcp_grpo.learning.formats.notation import Flat, Nested, Notation
from mcp_grpo.learning.formats.reasoning import Reasoning
from mcp_grpo.learning.formats.spelling import CONTROL, Spelling
from mcp_grpo.types import Message
from mcp_grpo.vocabulary import Vocabulary


# Names, keys and values that no template has of its own. Keys in alphabetical order, because some templates sort them.
_NAME, _KEYS, _TEXTS, _NUMBERS = "probetool", ("probekeya", "probekeyb"), ("probetexta", "probetextb"), (1701, 1702)
_TEXT_ARGUMENTS = dict(zip(_KEYS, _TEXTS, strict=True))
_NUMBER_ARGUMENTS = dict(zip(_KEYS, _NUMBERS, strict=True))
_TOOL = {"type": "function", "function": {"name": _NAME, "parameters": {"type": "object"}}}

_BLANKS = " \t\r\n"
_OPENING = re.compile(f"{CONTROL}|<[^<>/{_BLANKS}][^<>{_BLANKS}]*>")
_CLOSING_TAG = re.compile(f"</[^<>{_BLANKS}]+>")

# Messages, and `add_generation_prompt`, to what the chat template makes of them.
Render = Callable[..., str]


def detect_syntax(
    render: Render, vocabulary: Vocabulary, end_of_turn_ids: Collection[int]
) -> tuple[CallSyntax | None, Spelling]:
    """
    Find out how a model writes tool calls.

    The chat template is asked to render some: with no arguments, with texts, with numbers, and two at once. What differs
    is the part of a call that says something; what stays is the format.

    Args:
        render (`Callable[..., str]`):
            Renders messages by the model's chat template; takes `add_generation_prompt`, too.
        vocabulary (`Vocabulary`):
            The model's tokens.
        end_of_turn_ids (`Collection[int]`):
            Tokens at which a turn ends.

    Returns:
        `tuple[CallSyntax | None, Spelling]`: The format, or `None` if it is of no kind that can be read; and how turns
        are spelled.
    """
    rendered = _rendered(render)
    controls = {
        literal: token_id
        for literal, token_id in vocabulary.added.items()
        if token_id in vocabulary.special_ids
        or token_id in end_of_turn_ids
        or (len(literal.strip()) > 1 and any(literal in text for text in rendered.values()))
    }
    spelling = Spelling(vocabulary, controls)
    try:
        turns = {name: spelling.text(text) for name, text in rendered.items()}
        return _derived(turns, spelling, {spelling[token_id] for token_id in end_of_turn_ids}), spelling
    except (KeyError, ValueError):
        return None, spelling


def _rendered(render: Render) -> dict[str, str]:
    """Turns that call a tool, as far as the template can render them, and what stands before a turn."""
    opening: list[Message] = [{"role": "user", "content": "question"}]
    before, without = (render(opening, add_generation_prompt=each) for each in (True, False))
    turns = {"header": before[num_shared(before, without) :]}
    probes: dict[str, list[Mapping[str, Any]]] = {
        "empty": [{}],
        "texts": [_TEXT_ARGUMENTS],
        "numbers": [_NUMBER_ARGUMENTS],
        "two empty": [{}, {}],
        "two": [_TEXT_ARGUMENTS, {}],
    }
    for name, arguments in probes.items():
        calls = [{"type": "function", "function": {"name": _NAME, "arguments": dict(each)}} for each in arguments]
        turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            text = render([*opening, turn, {"role": "tool", "name": _NAME, "content": "result"}])
        except TemplateError:
            continue  # some allow one call at a time
        turns[name] = text[num_shared(before, text) :]
    return turns


def _derived(turns: dict[str, str], spelling: Spelling, ends: Collection[str]) -> CallSyntax:
    header = turns.pop("header")
    end = next((character for character in turns["empty"] if character in ends), "")
    turns = {name: re.split(f"[{''.join(ends)}]", turn)[0].rstrip(_BLANKS) for name, turn in turns.items()}
    lead, empty = _split(turns["empty"], _NAME)
    reasoning = Reasoning(spelling, header)
    lead = lead[reasoning.end(lead) :]
    marks = list(_OPENING.finditer(lead))
    trigger, before_name = (marks[-1][0], lead[marks[-1].end() :]) if marks else (lead, "")
    notation = _notation(turns, trigger, empty)
    # A control token that is written out in letters, or a tag in a value, would be taken for the real one by parsers
    # that look at text alone.
    marks_per_call = dict.fromkeys(spelling.literals(turns["texts"]), 0)
    if trigger.startswith("<"):
        marks_per_call |= dict.fromkeys([trigger, *_CLOSING_TAG.findall(notation.closing)], 1)
    found = CallSyntax(
        trigger=trigger,
        is_bare=not marks,
        before_name=before_name,
        notation=notation,
        header=header,
        reasoning=reasoning,
        end=end,
        marks_per_call=marks_per_call,
    )
    _check(found, turns)
    return found


def _notation(turns: Mapping[str, str], trigger: str, empty: str) -> Notation:
    _, before_key, after_key, between, _, closing = _split(turns["texts"], _NAME, *_parts(_TEXT_ARGUMENTS))
    _, _, after_key_of_number, *_ = _split(turns["numbers"], _NAME, *_parts(_NUMBER_ARGUMENTS))
    quote = _without(after_key_of_number, after_key)
    between, closing = _without(quote, between), _without(quote, closing)
    try:
        _, empty_joint, _ = _split(turns["two empty"], _NAME, _NAME)
        *_, joint, _ = _split(turns["two"], _NAME, *_parts(_TEXT_ARGUMENTS), _NAME)
        joint = _without(quote, joint)
    except (KeyError, Unreadable):
        empty_joint = joint = None
    if empty_joint and joint and trigger in joint:
        # Every call has a trigger of its own. What follows the last one may close more than the call itself.
        empty, closing = (_shared(a, b.partition(trigger)[0]) for a, b in ((empty, empty_joint), (closing, joint)))
        empty_joint = joint = None
    if _NAME in before_key + empty:
        raise Unreadable  # the name is repeated
    if not quote:
        return _tagged(before_key, after_key, between, closing, empty)
    if before_key.endswith("("):
        return Flat(
            after_name=_shared(before_key, empty),
            before_key=before_key,
            after_key=after_key_of_number,
            after_value=None,
            between=between,
            closing=closing,
            empty=empty,
            joint=joint,
            empty_joint=empty_joint,
        )
    after_name, brace, key_quote = before_key.rpartition("{")
    return Nested(
        after_name=after_name + brace,
        key_quote=key_quote,
        colon=_without(key_quote, after_key_of_number),
        comma=between.removesuffix(key_quote),
        quote=quote,
        closing=_without("}", closing),
        joint=None if joint is None else _without("}", joint),
    )


def _tagged(before_key: str, after_key: str, between: str, closing: str, empty: str) -> Flat:
    # A value is over where its closing tag is; what follows the tag depends on whether another value comes.
    shared = re.match(f"(?s:.*)(?:>|{CONTROL})", _shared(between, closing))
    if shared is None:
        raise Unreadable
    return Flat(
        after_name=_shared(before_key, empty),
        before_key=before_key,
        after_key=after_key,
        after_value=shared[0],
        between=between[shared.end() :],
        closing=closing[shared.end() :],
        empty=empty,
    )


def _check(found: CallSyntax, turns: Mapping[str, str]) -> None:
    """Refuse a format in which the very calls that it was derived from cannot be read."""
    if not (found.trigger and found.end and found.notation.after_name):
        raise Unreadable
    for name in ("empty", "texts", "numbers"):
        cursor = Cursor(turns[name])
        cursor.position = found.find(cursor.text, 0) + len(found.trigger)
        if not found.read(cursor, found.offer([_TOOL])):
            raise Unreadable


def _parts(arguments: Mapping[str, Any]) -> list[str]:
    return [str(part) for item in arguments.items() for part in item]


def _split(text: str, *marks: str) -> list[str]:
    """What stands before, between and after marks that follow each other."""
    parts: list[str] = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found:
            raise Unreadable
        parts.append(part)
    return [*parts, text]


def _shared(one: str, other: str) -> str:
    return one[: num_shared(one, other)]


def _without(prefix: str, text: str) -> str:
    if not text.startswith(prefix):
        raise Unreadable
    return text[len(prefix) :]
