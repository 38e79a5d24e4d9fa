"""Derive how a model writes tool calls from what its chat template renders."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import TemplateError
from mcp_grpo.masking.formats.call import CallSyntax, Reasoning
from mcp_grpo.masking.formats.cursor import Cursor, Unreadable, num_shared
from mcp_grpo.masking.formats.notation import Flat, Nested, Notation
from mcp_grpo.masking.formats.spelling import BLANKS, CONTROL, Spelling
from mcp_grpo.masking.vocabulary import Vocabulary
from mcp_grpo.types import Message


# Names, keys and values that no template has of its own. Keys in alphabetical order, because some templates sort them.
_NAME, _KEYS, _TEXTS, _NUMBERS = "probetool", ("probekeya", "probekeyb"), ("probetexta", "probetextb"), (1701, 1702)
_TEXT_ARGUMENTS = dict(zip(_KEYS, _TEXTS, strict=True))
_NUMBER_ARGUMENTS = dict(zip(_KEYS, _NUMBERS, strict=True))
_TOOL = {"type": "function", "function": {"name": _NAME, "parameters": {"type": "object"}}}

_OPENING = re.compile(f"{CONTROL}|<[^<>/{BLANKS}][^<>{BLANKS}]*>|```[a-z]+")
_CLOSING_TAG = re.compile(f"</[^<>{BLANKS}]+>")
_UNFINISHED_TAG = re.compile(r"(?:<[^<>]*)?\Z")


def detect_syntax(
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_of_turn_ids: Collection[int],
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> CallSyntax:
    """
    Derive how a model writes tool calls.

    The chat template renders some: without arguments, with texts, with numbers, and two at once. What differs is the
    content of a call; what stays is its syntax. Raises [`TemplateError`] if that is of no known kind.
    """

    def render(messages: Sequence[Message], **kwargs: Any) -> str:
        kwargs |= {"tokenize": False, "chat_template": chat_template, **(chat_template_kwargs or {})}
        return str(tokenizer.apply_chat_template(list(messages), **kwargs))

    named = repr(tokenizer.name_or_path) if tokenizer.name_or_path else "this tokenizer"
    try:
        texts = _rendered(render)
    except jinja2.TemplateError as error:
        raise TemplateError(
            f"The chat template of {named} refuses to write a plain tool call: {error}. So the format of its calls is "
            'not known. Set `schema_mask="off"`, and sample without a constraint.'
        ) from error
    vocabulary = Vocabulary(tokenizer)
    controls = {
        literal: token_id
        for literal, token_id in vocabulary.added.items()
        if token_id in vocabulary.special_ids
        or token_id in end_of_turn_ids
        or (len(literal.strip()) > 1 and any(literal in text for text in texts.values()))
    }
    spelling = Spelling(vocabulary, controls)
    try:
        return _derived({name: spelling.text(text) for name, text in texts.items()}, spelling, end_of_turn_ids)
    except (KeyError, ValueError):
        start = num_shared(texts["before"], texts["texts"])
        raise TemplateError(
            f"The format of the tool calls of {named} is not known. Its chat template writes one as "
            f'{texts["texts"][start : start + 300]!r}. Set `schema_mask="off"`, and sample without a constraint.'
        ) from None


def _rendered(render: Callable[..., str]) -> dict[str, str]:
    """Render conversations that end before a turn, and with turns that call a tool, as far as the template can."""
    question: Message = {"role": "user", "content": "question"}
    texts = {name: render([question], add_generation_prompt=name == "before") for name in ("before", "without header")}
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
            # With a result, because in some formats (GLM) the turn ends with the first token of the reply to it.
            texts[name] = render([question, turn, {"role": "tool", "name": _NAME, "content": "result"}])
        except jinja2.TemplateError:
            if len(arguments) == 1:
                raise
    return texts


def _derived(texts: dict[str, str], spelling: Spelling, end_of_turn_ids: Collection[int]) -> CallSyntax:
    before, without_header = texts.pop("before"), texts.pop("without header")
    header = before[num_shared(before, without_header) :]
    ends = re.compile("|".join(re.escape(spelling[i]) for i in end_of_turn_ids if spelling[i]))
    _, end = _turn(texts["empty"], before, ends)
    turns = {name: _turn(text, before, ends)[0] for name, text in texts.items()}
    reasoning = Reasoning(spelling, header)
    lead, empty = _split(turns["empty"], _NAME)
    lead = lead[reasoning.end(lead) :]
    joints = _joints(turns)
    trigger, is_bare = _trigger(lead, joints[0])
    before_name = lead.rpartition(trigger)[2]
    # If every call has a trigger of its own, what follows the last one may close more than the call itself.
    is_own = joints[0].endswith(trigger + before_name)
    until_next = joints[0].removesuffix(trigger + before_name) if is_own else empty
    num_closed = len(_shared(empty, until_next).rstrip(BLANKS))
    after_last = empty[num_closed:]
    notation = _notation(turns, empty[:num_closed], after_last, ("", "") if is_own else joints)
    # A control token that is written out in letters, or a tag in a value, would be taken for the real one by parsers
    # that look at text alone.
    marks_per_call = dict.fromkeys(spelling.literals(turns["texts"]), 0)
    if trigger.startswith("<"):
        marks_per_call |= dict.fromkeys([trigger, *_CLOSING_TAG.findall(notation.closing)], 1)
    found = CallSyntax(
        trigger=trigger,
        is_bare=is_bare,
        before_name=before_name,
        notation=notation,
        between=until_next[num_closed:] if is_own else None,
        after_last=after_last,
        header=header,
        reasoning=reasoning,
        end=end,
        marks_per_call=marks_per_call,
        spelling=spelling,
    )
    _check(found, turns)
    return found


def _turn(text: str, before: str, ends: re.Pattern[str]) -> tuple[str, str]:
    """Return the turn of a conversation, and the token that ends it."""
    start = num_shared(before, text)
    # The prompt may continue with `<think>` where the turn continues with `<tool_call>`.
    tag, end = _UNFINISHED_TAG.search(text, 0, start), ends.search(text, start)
    if tag is None or end is None:
        raise Unreadable
    return text[tag.start() : end.start()], end[0]


def _joints(turns: Mapping[str, str]) -> tuple[str, str]:
    """Return what is between the names of two calls, without arguments and with; nothing if a turn has one call."""
    try:
        _, empty, _ = _split(turns["two empty"], _NAME, _NAME)
        *_, closing, _ = _split(turns["two"], _NAME, *_parts(_TEXT_ARGUMENTS), _NAME)
    except (KeyError, Unreadable):
        return "", ""
    return empty, closing


def _trigger(lead: str, joint: str) -> tuple[str, bool]:
    """Return what opens a call, and whether that is neither a control token nor a tag."""
    num_repeated = num_shared(lead[::-1], joint[::-1])
    if own := _OPENING.search(lead, len(lead) - num_repeated):
        return own[0], False
    marks = _OPENING.findall(lead)
    return (marks[-1], False) if marks else (lead, True)


def _notation(turns: Mapping[str, str], empty: str, after_last: str, joints: tuple[str, str]) -> Notation:
    _, before_key, after_key, between, _, closing = _split(turns["texts"], _NAME, *_parts(_TEXT_ARGUMENTS))
    _, _, after_key_of_number, *_ = _split(turns["numbers"], _NAME, *_parts(_NUMBER_ARGUMENTS))
    quote = _without(after_key_of_number, after_key)
    between, closing = _without(quote, between), _without(quote, closing).removesuffix(after_last)
    empty_joint, joint = joints[0] or None, _without(quote, joints[1]) if joints[1] else None
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
    # A value ends at its closing tag; what follows the tag depends on whether another value comes.
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
    """Refuse a syntax that cannot read the calls it was derived from."""
    if not (found.trigger and found.end and found.notation.after_name):
        raise Unreadable
    for name in ("empty", "texts", "numbers"):
        cursor = Cursor(turns[name])
        cursor.position = found.find(cursor.text, 0) + len(found.trigger)
        if not found.read(cursor, found.offered([_TOOL])):
            raise Unreadable


def _parts(arguments: Mapping[str, Any]) -> list[str]:
    return [str(part) for item in arguments.items() for part in item]


def _split(text: str, *marks: str) -> list[str]:
    """Split a text at marks that follow each other."""
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
