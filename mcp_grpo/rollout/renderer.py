"""Messages to tokens and back, by the model's own chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcp_grpo._trl import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from mcp_grpo.errors import SettingsError, TemplateError
from mcp_grpo.types import Message, ToolCall
from mcp_grpo.vocabulary import Vocabulary


# More than any tokenizer puts into one token of ordinary text.
MAX_CHARACTERS_PER_TOKEN = 32

# Stands in for a tool's text while the frame around it is worked out. Plain ASCII letters: no template filter
# (`trim`, `tojson`, ...) changes it, and no tool returns it.
_PLACEHOLDER = "toolresultplaceholder{}stop"

# What stands where a long result was cut, and what stands there if the budget is hardly longer than that.
_MARKER = "\n[... {} of {} characters cut; ask for less ...]\n"
_SHORT_MARKER = "\n[...]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """
    What the policy said in one turn.

    Args:
        message (`Message`):
            The turn as an assistant message.
        calls (`tuple[ToolCall, ...]`):
            The tool calls in it, in order.
        malformed (`str`, *optional*):
            Why the turn could not be read, when it looks like a tool call but is not one.
    """

    message: Message
    calls: tuple[ToolCall, ...]
    malformed: str | None = None


class Renderer:
    """
    Turns messages into tokens and sampled tokens into messages, without ever tokenising the same thing twice.

    The opening prompt is rendered by the chat template. From then on tokens are only appended: what the policy
    sampled, as it was sampled, then the *suffix*, which is what the template puts after an assistant turn for the
    tool messages and the next generation prompt. A template that rewrites earlier turns is replaced by TRL's
    prefix-preserving version of it, or refused.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The policy's tokenizer. If it has no `response_template`, the one of its family is set on it.
        end_of_turn_ids (`Sequence[int]`):
            Tokens at which the policy's turn ends.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed on to the template, such as `{"enable_thinking": False}`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_of_turn_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer: Any = tokenizer  # its type hints allow much that it never returns
        self.end_of_turn_ids = tuple(end_of_turn_ids)
        try:
            self.vocabulary: Vocabulary | None = Vocabulary(tokenizer)
        except SettingsError:
            self.vocabulary = None  # only the view of a trajectory and the schema mask need it
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        # What depends on the tools' names alone is rendered once.
        self._turns: dict[tuple[str, int], tuple[list[Message], str, str]] = {}
        self._framed: dict[tuple[str, ...], list[str]] = {}
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
        # Runs of spaces, which some tokenizers add as tokens too, control nothing. Longest first, so that of two
        # literals that start at the same place the longer one is seen; a lookahead, so that overlapping ones are too.
        literals = [literal for literal in self.tokenizer.get_added_vocab() if len(literal.strip()) > 1]
        literals.sort(key=len, reverse=True)
        self._control = re.compile("(?=(" + "|".join(map(re.escape, literals)) + "))") if literals else None
        self._turn_ends: list[str] = [self.tokenizer.convert_ids_to_tokens(i) for i in self.end_of_turn_ids]
        self._check_template()

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """
        Tokens of an opening prompt, up to where the policy's first turn begins.

        Args:
            messages (`Sequence[Message]`):
                Opening messages.
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools, in the form chat templates take.

        Returns:
            `tuple[int, ...]`: The tokens.
        """
        text = self._render(messages, tools=tools, add_generation_prompt=True)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """
        Refuse tools whose names, descriptions or schemas would put control tokens into the prompt.

        Args:
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools.

        Raises:
            [`TemplateError`]: If there is one; the message names it and the control token.
        """
        for tool in tools:
            found = self._control.search(json.dumps(tool, ensure_ascii=False)) if self._control else None
            if found:
                raise TemplateError(
                    f"The tool {tool['function']['name']!r} describes itself with {found[1]!r}, which is a control token of "
                    "this model: its server could speak for the system or the user. Leave the tool out with "
                    "`allowed_tools`, or have its description changed."
                )

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        """
        Tokens of a turn that somebody else wrote, as the policy would write it: from the end of the prompt to the token
        that ends the turn.

        Args:
            message (`Message`):
                A message of role `"assistant"`, with `content`, and `tool_calls` if it calls tools.

        Returns:
            `tuple[int, ...]`: The tokens.

        Raises:
            [`TemplateError`]: If the chat template does not write such a turn after its own prompt for one.
        """
        opening: list[Message] = [{"role": "user", "content": "question"}]
        before, text = self._render(opening, add_generation_prompt=True), self._render([*opening, message])
        ends = [(text.find(end, len(before)), end) for end in self._turn_ends]
        position, end = min(((i, end) for i, end in ends if i >= 0), default=(-1, ""))
        if position < 0 or not text.startswith(before):
            raise TemplateError(
                f"The chat template asks for a turn with {before[-80:]!r}, but writes one as {text[-200:]!r}, which does not "
                f"begin like that or has no end of turn ({self._turn_ends}). Set `chat_template_kwargs` to what the policy is "
                'to be sampled with, such as `{"enable_thinking": false}`.'
            )
        return tuple(self.tokenizer(text[len(before) : position + len(end)], add_special_tokens=False)["input_ids"])

    def suffix_ids(self, tool_messages: Sequence[Message]) -> tuple[int, ...]:
        """
        Tokens that follow an assistant turn: its tool results and the opening of the next turn.

        Text of a tool never becomes a control token, whatever it contains: where it holds the literal of one, it is
        encoded in two pieces that meet inside the literal. It still decodes to the same text, and text without such
        literals is tokenised exactly as the template's own rendering of it would be.

        Args:
            tool_messages (`Sequence[Message]`):
                Messages of role `"tool"`, with `name` and `content`.

        Returns:
            `tuple[int, ...]`: The tokens.
        """
        # A lone surrogate, which JSON can carry but no text can, would stop the tokenizer.
        tool_messages = [{**m, "content": m["content"].encode("utf-8", "replace").decode()} for m in tool_messages]
        frames = self._frames(tool_messages)
        contents = [self._rendered_content(tool_messages, frames, i) for i in range(len(tool_messages))]
        text, spans = frames[0], []
        for content, frame in zip(contents, frames[1:], strict=True):
            spans.append((len(text), len(text) + len(content)))
            text += content + frame
        return tuple(self._encoded(text, spans))

    def shortened(self, text: str, max_tokens: int) -> tuple[str, int]:
        """
        A tool's text within a number of tokens, cut in the middle if it is longer.

        Three quarters of what is kept are the beginning, where most tools say what follows; one quarter is the end,
        where others say how it ended. A line between them says how much is missing.

        Args:
            text (`str`):
                What the tool returned.
            max_tokens (`int`):
                Tokens it may take, at least 16.

        Returns:
            `tuple[str, int]`: The text, and how many characters were cut out of it.

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
        # What is certainly too long is not tokenised as a whole: that would hold up every other trajectory.
        is_far_too_long = len(text) > max_tokens * MAX_CHARACTERS_PER_TOKEN
        num_kept, shrinkage = max_tokens * 8 if is_far_too_long else len(text), 0.95
        shown = _with_middle_cut(text, num_kept, marker)
        while num_kept and (num_tokens := self._num_tokens(shown)) > max_tokens:
            num_kept = int(num_kept * max_tokens / num_tokens * shrinkage)
            shrinkage **= 2  # tokens are not spread evenly, so the estimate becomes ever more cautious
            shown = _with_middle_cut(text, num_kept, marker)
        return shown, len(text) - num_kept

    def parse(
        self, history_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> ParsedTurn:
        """
        Read a sampled turn.

        Args:
            history_ids (`Sequence[int]`):
                Everything the policy saw before it.
            sampled_ids (`Sequence[int]`):
                What it sampled.
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools it was offered.

        Returns:
            [`ParsedTurn`]: The message, its tool calls, and what is wrong with it, if anything.
        """
        history, sampled = list(history_ids), list(sampled_ids)
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        try:
            message = parse_response(self.tokenizer, sampled, prefix=history, tools=offered)
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
            malformed = self._why_malformed(sampled, history, offered)
        return ParsedTurn(message=message, calls=() if malformed else tuple(calls), malformed=malformed)

    def _why_malformed(self, sampled: list[int], history: list[int], tools: list[dict] | None) -> str | None:
        # TRL's parser falls back to plain text when a tool call cannot be read, without saying so. The parser beneath
        # it does say so: by an error, or by calls that TRL then found to lack a name. Where a family writes calls as
        # bare JSON (Llama), one that breaks off early cannot be told from text, and is an answer.
        try:
            parsed = self.tokenizer.parse_response(sampled, prefix=history, tools=tools)
        except (ValueError, TypeError) as error:
            return str(error).splitlines()[0]
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

    def _suffix_text(self, tool_messages: Sequence[Message], rounds: int = 1) -> str:
        """What the template appends to a turn that called tools, from the end of the turn on."""
        opening, before, after_turn = self._turn(tool_messages[0]["name"], rounds)
        text = self._render([*opening, *tool_messages], add_generation_prompt=True)
        # The turn begins where the generation prompt and the rendered turn part ways, and ends at the first token
        # that stops generation; for some templates (GLM) that token already belongs to the tool message.
        start = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        ends = [(text.find(end, start), end) for end in self._turn_ends]
        position, end = min(((i, end) for i, end in ends if i >= 0), default=(-1, ""))
        if position < 0:
            raise TemplateError(
                f"The chat template ends an assistant turn with {text[start:][:80]!r}, which holds none of the "
                f"end-of-turn tokens {self._turn_ends}. Set `model.generation_config.eos_token_id` to the token that "
                "ends a turn."
            )
        if text[: min(len(after_turn), position)] != after_turn[:position]:
            raise TemplateError(
                "The chat template is not prefix-preserving: an assistant turn is rendered differently once a tool "
                "message follows it, so the policy would be trained on other histories than it sampled from. Use the "
                "model's stock template, for which a training version is known, or make it prefix-preserving."
            )
        return text[position + len(end) :]

    def _turn(self, name: str, rounds: int) -> tuple[list[Message], str, str]:
        """A conversation that ends with a call of a tool, and its text before and after that turn."""
        if (name, rounds) not in self._turns:
            # Any conversation will do, as long as its last turn is a tool call: the template only appends. The real
            # tool's name, because some templates (GPT-OSS) build the result's header from it.
            call = {"type": "function", "function": {"name": name, "arguments": {}}}
            turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            earlier: list[Message] = [turn, {"role": "tool", "name": name, "content": "result"}]
            opening: list[Message] = [{"role": "user", "content": "question"}, *earlier * (rounds - 1)]
            before, after = self._render(opening, add_generation_prompt=True), self._render([*opening, turn])
            self._turns[name, rounds] = [*opening, turn], before, after
        return self._turns[name, rounds]

    def _frames(self, tool_messages: Sequence[Message]) -> list[str]:
        """What the template puts before, between and after the contents of the tool messages."""
        names = tuple(message["name"] for message in tool_messages)
        if names not in self._framed:
            placeholders = [_PLACEHOLDER.format(i) for i in range(len(names))]
            text = self._suffix_text([{**m, "content": p} for m, p in zip(tool_messages, placeholders, strict=True)])
            frames = []
            for placeholder in placeholders:
                frame, found, text = text.partition(placeholder)
                if not found:
                    raise TemplateError("The chat template drops or rewrites the content of tool messages.")
                frames.append(frame)
            self._framed[names] = [*frames, text]
        return self._framed[names]

    def _rendered_content(self, tool_messages: Sequence[Message], frames: list[str], index: int) -> str:
        """The content of one tool message as the template writes it: escaped, trimmed or as it is."""
        messages = [
            {**m, "content": m["content"] if i == index else _PLACEHOLDER.format(i)}
            for i, m in enumerate(tool_messages)
        ]
        text = self._suffix_text(messages)
        before = "".join(frame + _PLACEHOLDER.format(i) for i, frame in enumerate(frames[:index])) + frames[index]
        after = frames[index + 1] + "".join(
            _PLACEHOLDER.format(i) + frames[i + 1] for i in range(index + 1, len(tool_messages))
        )
        if not (text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)):
            raise TemplateError(
                f"The chat template frames the tool result {messages[index]['content'][:80]!r} in a way of its own, "
                "so that it cannot be told apart from the template's control tokens."
            )
        return text[len(before) : len(text) - len(after)]

    @cached_property
    def _marker_length(self) -> int:
        return self._num_tokens(_MARKER.format(10**7, 10**7))

    def _num_tokens(self, text: str) -> int:
        """How many tokens a tool's text takes, as the template writes it."""
        message = {"role": "tool", "name": "probe", "content": text.encode("utf-8", "replace").decode()}
        content = self._rendered_content([message], self._frames([message]), 0)
        return len(self._encoded(content, [(0, len(content))]))

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Tokens of a text, none of them a control token that a tool wrote in the given spans."""
        cuts = [0, *self._cuts(text, spans), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        return [i for piece in pieces for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]

    def _cuts(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Positions inside every control literal that a tool wrote, at least in part."""
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


def _with_middle_cut(text: str, num_kept: int, marker: str) -> str:
    if num_kept == len(text):
        return text
    num_last = num_kept // 4
    head, tail = text[: num_kept - num_last], text[len(text) - num_last :]
    return head + marker.format(len(text) - num_kept, len(text)) + tail
