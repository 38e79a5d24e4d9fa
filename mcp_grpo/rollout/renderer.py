"""Convert messages to tokens and back, by the model's own chat template."""

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import SettingsError, TemplateError
from mcp_grpo.masking.formats.cursor import num_shared
from mcp_grpo.masking.vocabulary import Vocabulary
from mcp_grpo.rollout.prompt_encoder import PromptEncoder
from mcp_grpo.rollout.recent import Recent
from mcp_grpo.rollout.well_formed import well_formed
from mcp_grpo.sampling.vision import Picture, Vision
from mcp_grpo.tools.images import split
from mcp_grpo.trl_compat import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from mcp_grpo.types import Message, ToolCall


NUM_PROMPTS, NUM_SUFFIXES = 256, 1024  # that are kept as tokens
NUM_COUNTS = 256  # texts whose number of tokens is kept
NUM_BEGUN = 32  # tokens at the end of a prompt, among which the policy's turn begins
NUM_QUOTED = 24  # characters of a call that cannot be read, around the place where it goes wrong
_QUOTED = re.compile(
    r'"(?:[^"\\]|\\.?)*("?)', re.DOTALL
)  # to the end where it is not closed, so that all is read once
_PLAIN = {"role", "name", "content"}  # all that most messages have

# More than any tokenizer puts into one token of ordinary text.
MAX_CHARACTERS_PER_TOKEN = 32

# Replaces a tool's text to find the frame around it. Plain ASCII letters: no template filter (`trim`, `tojson`, ...)
# changes it, and no tool returns it.
_PLACEHOLDER = "toolresultplaceholder{}stop"

# Comes before pictures where the chat template has them only in messages of the user.
_SHOWN = "Images that the tools returned, in order:\n"

# Where a long result was cut, and the same for a budget that is hardly longer than that.
_MARKER = "\n[... {} of {} characters cut; ask for less ...]\n"
_SHORT_MARKER = "\n[...]\n"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """Hold what the policy said in one turn."""

    message: Message
    calls: tuple[ToolCall, ...]
    malformed: str | None = None  # why it could not be read, if it looks like a tool call but is not one


class Renderer:
    """
    Converts messages to tokens and sampled tokens to messages, without ever tokenising the same thing twice.

    The opening prompt is rendered by the chat template. From then on tokens are only appended: what the policy sampled, as
    it was sampled, then the *suffix*, which the template puts after an assistant turn for the tool messages and the next
    generation prompt. A template that rewrites earlier turns is replaced by TRL's prefix-preserving version of it, or
    refused. If the tokenizer has no `response_template`, the one of its family is set on it.

    Messages of tools may have pictures under `images`. The template writes them where their notes are, or, if it has them only in
    messages of the user, in one that follows. With a template that has none at all, `vision` is `None`: see `blindness`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_of_turn_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        vision: Vision | None = None,
    ) -> None:
        self.tokenizer: Any = tokenizer  # its type hints are too wide
        self.vision: Vision | None = None
        self.end_of_turn_ids = tuple(end_of_turn_ids)
        try:
            self.vocabulary: Vocabulary | None = Vocabulary(tokenizer)
        except SettingsError:
            self.vocabulary = None  # only the token view and the schema mask need it
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        # Rendered once, since they depend on the tools' names alone.
        self._turns: dict[tuple[str | None, int], tuple[list[Message], str, str]] = {}
        self._framed: dict[tuple[tuple[Any, ...], bool], list[str]] = {}
        # The attempts at a task begin alike, and often ask and are told the same.
        self._prompts: Recent[tuple[int, ...]] = Recent(NUM_PROMPTS)
        self._suffixes: Recent[tuple[int, ...]] = Recent(NUM_SUFFIXES)
        self._counts: Recent[int] = Recent(NUM_COUNTS)
        if not supports_tool_calling(tokenizer):
            raise TemplateError(
                "The tokenizer's chat template cannot render tool calls and tool results. Use a model with a "
                "tool-calling template, or set `tokenizer.chat_template` to one (TRL's `clone_chat_template` copies it "
                "from another model)."
            )
        self.chat_template = self._training_template()
        if getattr(tokenizer, "response_template", None) is None:
            try:
                add_response_schema(tokenizer)
            except ValueError as error:
                raise TemplateError(
                    "No parser is known for this tokenizer's tool calls. Set `tokenizer.response_template`, as "
                    "Transformers' guide on response parsing describes, before you build the trainer."
                ) from error
        # Runs of spaces, which some tokenizers add as tokens too, control nothing. Longest first, to find the longer of two
        # literals that start at the same place; a lookahead, to find overlapping ones.
        literals = [literal for literal in self.tokenizer.get_added_vocab() if len(literal.strip()) > 1]
        literals.sort(key=len, reverse=True)
        self._control = re.compile("(?=(" + "|".join(map(re.escape, literals)) + "))") if literals else None
        self._turn_ends: list[str] = [self.tokenizer.convert_ids_to_tokens(i) for i in self.end_of_turn_ids]
        self._prompt_encoder = PromptEncoder(self.tokenizer, self._turn_ends)
        self._check_template()
        self.blindness: str | None = None
        """Why pictures are not shown although the policy could see them."""
        self._images_in: Literal["tool", "user"] = "tool"
        if vision is not None:
            self._open_eyes(vision)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of an opening prompt, up to where the policy's first turn begins."""

        def encode() -> tuple[int, ...]:
            text = self._render(messages, tools=tools, add_generation_prompt=True)
            ids = self._prompt_encoder.encode(text)
            if self.vision is not None and not set(ids).isdisjoint(self.vision.token_ids):
                raise TemplateError(
                    f"The prompt that begins with {text[:80]!r} has a token that stands for a picture. Only tools can show pictures to "
                    "the policy: take it out of the prompt, and let a tool return it."
                )
            return ids

        try:
            key = json.dumps([list(messages), list(tools)])
        except TypeError:  # something that is not JSON
            return encode()
        return self._prompts.get(key, encode)

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise [`TemplateError`] for a tool whose name, description or schema holds a control token."""
        for tool in tools:
            found = self._control.search(json.dumps(tool, ensure_ascii=False)) if self._control else None
            if found:
                raise TemplateError(
                    f"The tool {tool['function']['name']!r} describes itself with {found[1]!r}, which is a control token of "
                    "this model: its server could speak for the system or the user. Exclude the tool with "
                    "`allowed_tools`, or have its description changed."
                )

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        """
        Return the tokens of a given assistant message as the policy would write it: from the end of the prompt to the token
        that ends the turn.
        """
        opening: list[Message] = [{"role": "user", "content": "question"}]
        before, text = self._render(opening, add_generation_prompt=True), self._render([*opening, message])
        position, end = self._find_end(text, len(before))
        if position < 0 or not text.startswith(before):
            raise TemplateError(
                f"The chat template asks for a turn with {before[-80:]!r}, but writes one as {text[-200:]!r}, which does not "
                f"begin like that or has no end of turn ({self._turn_ends}). Set `chat_template_kwargs` to what the policy is "
                'to be sampled with, such as `{"enable_thinking": false}`; where another token ends a turn, set the tokenizer\'s '
                "`eos_token` to it."
            )
        return tuple(self.tokenizer(text[len(before) : position + len(end)], add_special_tokens=False)["input_ids"])

    def suffix_ids(self, messages: Sequence[Message], *, is_cut: bool = False) -> tuple[int, ...]:
        """
        Return the tokens that follow an assistant turn: its tool results, or what the user says next, and the opening of the
        next turn. Where the turn was cut, the token that ends it comes first.

        Text of a tool or user never becomes a control token: where it holds the literal of one, it is encoded in two pieces
        that meet inside the literal. It still decodes to the same text, and other text is tokenised exactly as the template's
        own rendering of it. The token that the template writes for a picture is replaced as the processor does it, once.
        """
        if any(message.keys() - _PLAIN for message in messages):
            return self._suffix(messages, is_cut=is_cut)
        key = (*((message["role"], message.get("name"), message["content"]) for message in messages), is_cut)
        return self._suffixes.get(key, lambda: self._suffix(messages, is_cut=is_cut))

    def _suffix(self, messages: Sequence[Message], *, is_cut: bool) -> tuple[int, ...]:
        # A lone surrogate, which JSON can carry but no text can, would stop the tokenizer.
        messages = [{**m, "content": m["content"].encode("utf-8", "replace").decode()} for m in messages]
        messages, pictures = self._with_pictures(messages)
        texts = _texts(messages)
        frames = self._frames(messages, is_cut=is_cut)
        contents = [self._rendered_content(messages, frames, i, is_cut=is_cut) for i in range(len(texts))]
        frames = self._expanded(frames, pictures)
        text, spans = frames[0], []
        for content, frame in zip(contents, frames[1:], strict=True):
            spans.append((len(text), len(text) + len(content)))
            text += content + frame
        return tuple(self._encoded(text, spans))

    def without_control(self, text: str) -> str:
        """Return a text without the literals of control tokens."""
        while self._control is not None and (found := self._control.search(text)):
            text = text[: found.start()] + text[found.start() + len(found[1]) :]
        return text

    def check_user_turns(self) -> None:
        """Raise [`TemplateError`] if nothing can follow an answer token by token."""
        self.suffix_ids([{"role": "user", "content": "And then?"}])

    def shortened(self, text: str, max_tokens: int) -> tuple[str, int]:
        """
        Cut a tool's text in the middle to a number of tokens (at least 16); return it and how many characters were cut.

        Three quarters of what is kept are the beginning, where most tools say what follows; one quarter is the end, where
        others say how it ended. A line between them says how much is missing.

        Example:

        ```python
        text, num_cut = renderer.shortened("word " * 5000, max_tokens=100)
        # word word word word word word word word word
        # [... 24600 of 25000 characters cut; ask for less ...]
        #  word word word
        ```
        """
        if len(text.encode("utf-8", "replace")) <= max_tokens:  # no token is shorter than a byte
            return text, 0
        marker = _MARKER if 2 * self._marker_length <= max_tokens else _SHORT_MARKER
        # A text that is certainly too long is not tokenised as a whole, which would hold up the other trajectories.
        is_far_too_long = len(text) > max_tokens * MAX_CHARACTERS_PER_TOKEN
        num_kept, shrinkage = max_tokens * 8 if is_far_too_long else len(text), 0.95
        shown = _with_middle_cut(text, num_kept, marker)
        while num_kept and (num_tokens := self._num_tokens(shown)) > max_tokens:
            num_kept = int(num_kept * max_tokens / num_tokens * shrinkage)
            shrinkage **= 2  # tokens are not spread evenly, so be ever more cautious
            shown = _with_middle_cut(text, num_kept, marker)
        return shown, len(text) - num_kept

    def parse(
        self, history_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> ParsedTurn:
        """Parse a sampled turn, given everything the policy saw before it and the tools it was offered."""
        before, sampled = self._begun_turn(history_ids), list(sampled_ids)
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        try:
            message = parse_response(self.tokenizer, sampled, prefix=before, tools=offered)
        except RecursionError:
            text = self.tokenizer.decode(sampled, skip_special_tokens=True)
            return ParsedTurn(
                message={"role": "assistant", "content": text}, calls=(), malformed="it is nested too deeply"
            )
        calls, malformed = [], None
        for tool_call in message.get("tool_calls") or ():
            function = tool_call.get("function", tool_call)
            if not isinstance(function["arguments"], Mapping):
                malformed = "the arguments are not an object"
                break
            calls.append(ToolCall(name=function["name"], arguments=function["arguments"]))
        if not message.get("tool_calls"):
            malformed = self._why_malformed(sampled, before, offered) or _why_bare(message.get("content"), tools)
        # The calls stay as they were written: those that cannot be sent are refused, and the policy is told.
        return ParsedTurn(message=well_formed(message), calls=() if malformed else tuple(calls), malformed=malformed)

    def _begun_turn(self, history_ids: Sequence[int]) -> list[int]:
        """Return the end of what the policy saw, with what the template has written of its turn; all of it if that is not found."""
        # The parser reads on from the last place where a turn of the policy begins, and would decode everything before it.
        anchor = self.tokenizer.response_template.get("start_anchor")
        anchors: list[str] = [anchor] if isinstance(anchor, str) else anchor or []
        ending = list(history_ids[-NUM_BEGUN:])
        text = self.tokenizer.decode(ending)
        return ending if any(literal in text for literal in anchors) else list(history_ids)

    def _why_malformed(self, sampled: list[int], before: list[int], tools: list[dict] | None) -> str | None:
        # TRL's parser silently falls back to plain text when a tool call cannot be read. The parser beneath it does not: it
        # raises, or returns calls without a name. Where a family writes calls as bare JSON (Llama), one that breaks off
        # early cannot be told from text, and is an answer.
        try:
            parsed = self.tokenizer.parse_response(sampled, prefix=before, tools=tools)
        except (ValueError, TypeError) as error:
            return _why_unread(error)
        return "the tool call has no name" if parsed and parsed.get("tool_calls") else None

    def _training_template(self) -> str | None:
        if is_chat_template_prefix_preserving(self.tokenizer):
            return None
        try:
            return get_training_chat_template(self.tokenizer)
        except ValueError as error:
            raise TemplateError(
                "The tokenizer's chat template changes how earlier turns are rendered once later ones follow, so the "
                "policy would be trained on other histories than it sampled from, and no prefix-preserving version of "
                "it is known. Change `tokenizer.chat_template` so that appending messages only appends text."
            ) from error

    def _render(self, messages: Sequence[Message], **kwargs: Any) -> str:
        if "tools" in kwargs:
            kwargs["tools"] = [dict(tool) for tool in kwargs["tools"]] or None
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, chat_template=self.chat_template, **kwargs, **self.chat_template_kwargs
            )
        )

    def _suffix_text(self, messages: Sequence[Message], rounds: int = 1, *, is_cut: bool = False) -> str:
        """Return what the template appends to a turn that called tools, or to an answer."""
        opening, before, after_turn = self._turn(messages[0].get("name"), rounds)
        text = self._render([*opening, *messages], add_generation_prompt=True)
        # The turn begins where it differs from the generation prompt, and ends at the first token that stops generation; for
        # some templates (GLM) that token already belongs to the next message.
        start = num_shared(before, text)
        position, end = self._find_end(text, start)
        is_said = messages[-1]["role"] == "user"
        if position < 0 and is_said:
            raise TemplateError(
                f"The chat template ends an answer in another way once a message follows ({text[start:][:80]!r}), so the "
                "conversation cannot go on token by token. Begin a new one for each question, or use another model where tasks have "
                "further messages of the user."
            )
        if position < 0:
            raise TemplateError(
                f"The chat template ends an assistant turn with {text[start:][:80]!r}, which holds none of the "
                f"end-of-turn tokens {self._turn_ends}. Set `model.generation_config.eos_token_id` to the token that "
                "ends a turn."
            )
        # Some templates drop reasoning from earlier turns once the user speaks; what was sampled stays as it is all the same.
        if not is_said and text[: min(len(after_turn), position)] != after_turn[:position]:
            raise TemplateError(
                "The chat template is not prefix-preserving: an assistant turn is rendered differently once a tool "
                "message follows it, so the policy would be trained on other histories than it sampled from. Use the "
                "model's stock template, for which a training version is known, or make it prefix-preserving."
            )
        return text[position if is_cut else position + len(end) :]

    def _find_end(self, text: str, start: int) -> tuple[int, str]:
        """Return the position of the first end-of-turn token, -1 if there is none, and its text."""
        ends = ((text.find(end, start), end) for end in self._turn_ends)
        return min(((i, end) for i, end in ends if i >= 0), default=(-1, ""))

    def _turn(self, name: str | None, rounds: int) -> tuple[list[Message], str, str]:
        """Return a conversation that ends with a call of a tool, or an answer, and its text before and after that turn."""
        if (name, rounds) not in self._turns:
            # Any conversation will do, as long as its last turn is of that kind: the template only appends. The real
            # tool's name, because some templates (GPT-OSS) build the result's header from it.
            call = {"type": "function", "function": {"name": name, "arguments": {}}}
            turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            if name is None:
                turn = {"role": "assistant", "content": "answer"}
            earlier: list[Message] = [turn, {"role": "tool", "name": name, "content": "result"}]
            opening: list[Message] = [{"role": "user", "content": "question"}, *earlier * (rounds - 1)]
            before, after = self._render(opening, add_generation_prompt=True), self._render([*opening, turn])
            self._turns[name, rounds] = [*opening, turn], before, after
        return self._turns[name, rounds]

    def _frames(self, messages: Sequence[Message], *, is_cut: bool = False) -> list[str]:
        """Return what the template puts before, between and after the texts of messages."""
        # Those of the user have no name.
        shape = tuple((m.get("name"), _kinds(m["content"])) for m in messages)
        if (shape, is_cut) not in self._framed:
            placeholders = [_PLACEHOLDER.format(i) for i in range(len(_texts(messages)))]
            text = self._suffix_text(_filled(messages, placeholders), is_cut=is_cut)
            frames = []
            for placeholder in placeholders:
                frame, found, text = text.partition(placeholder)
                if not found:
                    raise TemplateError("The chat template drops or rewrites the content of messages.")
                frames.append(frame)
            self._framed[shape, is_cut] = [*frames, text]
        return self._framed[shape, is_cut]

    def _rendered_content(
        self, messages: Sequence[Message], frames: list[str], index: int, *, is_cut: bool = False
    ) -> str:
        """Return one text of the messages as the template writes it: escaped, trimmed or as it is."""
        texts = _texts(messages)
        replaced = [text if i == index else _PLACEHOLDER.format(i) for i, text in enumerate(texts)]
        text = self._suffix_text(_filled(messages, replaced), is_cut=is_cut)
        before = "".join(frame + _PLACEHOLDER.format(i) for i, frame in enumerate(frames[:index])) + frames[index]
        after = frames[index + 1] + "".join(
            _PLACEHOLDER.format(i) + frames[i + 1] for i in range(index + 1, len(texts))
        )
        if not (text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)):
            raise TemplateError(
                f"The chat template frames the message {texts[index][:80]!r} differently from "
                "others, so that it cannot be told apart from the template's control tokens."
            )
        return text[len(before) : len(text) - len(after)]

    def _with_pictures(self, messages: Sequence[Message]) -> tuple[list[Message], list[Picture]]:
        """Return messages whose content is text, or texts with `None` where a picture is; and the pictures, in order."""
        shown: list[Message] = []
        pictures: list[Picture] = []
        for message in messages:
            message, own = {**message}, list[Picture](message.pop("images", ()) if "images" in message else ())
            pictures += own
            if own and self._images_in == "tool":
                parts = split(message["content"], [picture.image for picture in own])
                # Blanks between pictures, which some templates take away with what is around them, are left out.
                message["content"] = [
                    part if isinstance(part, str) else None
                    for part in parts
                    if not isinstance(part, str) or part.strip()
                ]
            shown.append(message)
        if pictures and self._images_in == "user":
            # What the user says next comes after them, in the same message.
            said = [m["content"] for m in shown if m["role"] == "user"]
            shown = [m for m in shown if m["role"] != "user"]
            shown.append({"role": "user", "content": [_SHOWN, *[None] * len(pictures), *said]})
        return shown, pictures

    def _expanded(self, frames: Sequence[str], pictures: Sequence[Picture]) -> list[str]:
        """Put what stands for pictures in the place of the token that the template writes for each."""
        if not pictures or self.vision is None:
            return list(frames)
        token, left = re.escape(self.vision.token), iter(pictures)
        if sum(len(re.findall(token, frame)) for frame in frames) != len(pictures):
            raise TemplateError(f"The chat template does not write {self.vision.token!r} once for each picture.")
        return [re.sub(token, lambda _: next(left).placeholder, frame) for frame in frames]

    def _open_eyes(self, vision: Vision) -> None:
        """Find out where the chat template has pictures, if it has any."""
        self.vision = vision
        seen = vision.probe
        result: Message = {"role": "tool", "name": "probe", "content": "before[probe]after", "images": [seen]}
        for self._images_in in ("tool", "user"):
            try:
                self._suffix([result, {**result, "images": [seen, seen]}], is_cut=False)
            except (TemplateError, jinja2.TemplateError, TypeError) as error:
                self.blindness = f"its chat template has none in messages of tools or of the user ({error})"
            else:
                self.blindness = None
                return
        self.vision = None

    @cached_property
    def _marker_length(self) -> int:
        return self._num_tokens(_MARKER.format(10**7, 10**7))

    def _num_tokens(self, text: str) -> int:
        """Return how many tokens a tool's text takes, as the template writes it."""
        return self._counts.get(text, lambda: self._counted(text))

    def _counted(self, text: str) -> int:
        message = {"role": "tool", "name": "probe", "content": text.encode("utf-8", "replace").decode()}
        content = self._rendered_content([message], self._frames([message]), 0)
        return len(self._encoded(content, [(0, len(content))]))

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Encode a text without control tokens from the given spans, which tools wrote."""
        cuts = [0, *self._cuts(text, spans), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        return [i for piece in pieces for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]

    def _cuts(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Return a position inside every control literal that a tool wrote, at least in part."""
        if self._control is None:
            return []
        literals = [match.span(1) for match in self._control.finditer(text)]
        return [first + 1 for first, last in literals if any(begin < last and first < end for begin, end in spans)]

    def _check_template(self) -> None:
        message = {"role": "tool", "name": "probe", "content": "result"}
        if self._suffix_text([message]) != self._suffix_text([message], rounds=2):
            raise TemplateError(
                "The chat template renders a second tool result differently from the first, so turns cannot be "
                "appended token by token. Use the model's stock template, for which a training version is known."
            )


Content = str | list[str | None]  # of a message: a text, or texts with `None` where a picture is


def _texts(messages: Sequence[Message]) -> list[str]:
    """Return the texts of messages, in order."""
    contents: list[Content] = [message["content"] for message in messages]
    return list(chain.from_iterable([c] if isinstance(c, str) else [t for t in c if t is not None] for c in contents))


def _kinds(content: Content) -> tuple[bool, ...] | None:
    """Return which parts of a content are pictures; `None` for a plain text."""
    return None if isinstance(content, str) else tuple(part is None for part in content)


def _filled(messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """Return messages for the template, with other texts."""
    left = iter(texts)
    return [
        {
            **message,
            "content": next(left)
            if isinstance(message["content"], str)
            else [
                {"type": "image"} if part is None else {"type": "text", "text": next(left)}
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def _why_unread(error: BaseException) -> str:
    """Say why a parser could not read a call: what is wrong with its JSON, where that is what it stumbled over."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, json.JSONDecodeError):
        cause = cause.__cause__
    if cause is None:
        return next(iter(str(error).splitlines()), "it is not in the required format").rstrip(".")
    signs = Counter(_QUOTED.sub(lambda found: "" if found[1] else '"', cause.doc))
    if signs['"']:
        return "a quotation mark is missing in its JSON"
    for first, last in ("{}", "[]"):
        if signs[first] != signs[last]:
            return f"its JSON has {signs[first]} `{first}` and {signs[last]} `{last}`"
    where = cause.doc[max(0, cause.pos - NUM_QUOTED) : cause.pos + NUM_QUOTED]
    return f"its JSON is wrong near {where!r}: {cause.msg}"


def _why_bare(text: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Tell a message that is a call, but for what the format puts around one, from an answer."""
    written = text.strip() if isinstance(text, str) else ""
    if not (written.startswith("{") and written.endswith("}")):
        return None
    try:
        call = json.loads(written)
    except (ValueError, RecursionError):
        return None
    names = [tool["function"]["name"] for tool in tools]
    is_call = isinstance(call.get("arguments"), Mapping) and call.get("name") in names
    return "it stands there as bare JSON" if is_call else None


def _with_middle_cut(text: str, num_kept: int, marker: str) -> str:
    if num_kept == len(text):
        return text
    num_last = num_kept // 4
    head, tail = text[: num_kept - num_last], text[len(text) - num_last :]
    return head + marker.format(len(text) - num_kept, len(text)) + tail
