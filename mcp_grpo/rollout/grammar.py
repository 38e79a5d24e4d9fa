"""Grammars of assistant turns: free text, then tool calls as the chat template writes them, by the tools' own schemas."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import CatalogError, SettingsError
from mcp_grpo.rollout.call_format import REASONING, CallFormat, JsonArguments, TaggedArguments, call_format


if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TurnGrammar:
    """
    The grammar of an assistant turn with given tools, compiled.

    Args:
        text (`str`):
            The grammar in llguidance's dialect of Lark, which vLLM takes as well.
        vocab_size (`int`):
            Number of tokens it knows.
        compiled (`LLMatcher`):
            A matcher at the beginning of a turn. It is copied, never used.
    """

    text: str
    vocab_size: int
    compiled: "LLMatcher"

    def matcher(self) -> "LLMatcher":
        """
        Start a turn.

        Returns:
            `LLMatcher`: A matcher of its own for one turn; it takes microseconds.
        """
        return self.compiled.deep_copy()


class TurnGrammars:
    """
    Compiles a grammar for each set of tools, once.

    A turn is text without the opening of a tool call, reasoning included, and then either its end or tool calls and
    their end. A call is written exactly as the chat template writes it: no other whitespace, arguments in the order of
    the schema. A schema that does not forbid further arguments allows them. One thing that is allowed cannot be read: an
    argument that spells out the tag which closes a call.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The policy's tokenizer.
        end_of_turn_ids (`Sequence[int]`):
            Tokens at which the policy's turn ends.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed on to the template, such as `{"enable_thinking": False}`.

    Example:

    ```python
    grammars = TurnGrammars(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])
    sampling = Sampling(max_tokens=512, constraint=grammars.grammar(tools))
    roles = GrammarRoles(grammars).roles(token_ids, tools)
    ```
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_of_turn_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if find_spec("llguidance") is None:
            raise SettingsError(
                "Grammars of tool calls need `llguidance`, which is not installed. Install it by `pip install "
                '"mcp-grpo[grammar]"`, or set `schema_mask="syntax"` and sample without a constraint.'
            )
        if not tokenizer.is_fast:
            raise SettingsError(
                f"Grammars of tool calls need a fast tokenizer, got {type(tokenizer).__name__}. Load it by "
                '`AutoTokenizer`, or set `schema_mask="syntax"` and sample without a constraint.'
            )
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        self.num_compiled = 0
        self._backend: Any = tokenizer
        self._format = call_format(
            tokenizer, end_of_turn_ids=end_of_turn_ids, chat_template_kwargs=chat_template_kwargs
        )
        self._grammars: dict[str, TurnGrammar] = {}
        self._pieces: dict[int, bytes] = {}

    @property
    def opening(self) -> bytes:
        """What opens a tool call, as [`pieces`] spells it."""
        return self._writer.opening

    def grammar(self, tools: Sequence[Schema]) -> TurnGrammar:
        """
        The grammar of a turn with these tools.

        Args:
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools, in the form chat templates take.

        Returns:
            [`TurnGrammar`]: The grammar, compiled when these tools are first seen.
        """
        key = json.dumps(tools)  # unsorted: the order of arguments is part of the grammar
        if key not in self._grammars:
            self._grammars[key] = self._compile(tools)
        return self._grammars[key]

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """
        The bytes of each token, as matchers spell them: a control token has bytes that no text has.

        Args:
            token_ids (`Sequence[int]`):
                The tokens.

        Returns:
            `list[bytes]`: One entry per token.
        """
        unseen = set(token_ids).difference(self._pieces)
        for i in unseen:
            is_special = self._tokenizer.is_special_token(i)
            self._pieces[i] = _special_piece(i) if is_special else self._tokenizer.decode_bytes([i])
        return [self._pieces[i] for i in token_ids]

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer  # optional, and not for every run

        return from_tokenizer(self._backend, eos_token=sorted(self.end_of_turn_ids))

    @cached_property
    def _writer(self) -> "_Writer":
        added: dict[str, int] = self._backend.get_added_vocab()
        special = {literal: i for literal, i in added.items() if self._tokenizer.is_special_token(i)}
        return _Writer(self._format, special, self.end_of_turn_ids)

    def _compile(self, tools: Sequence[Schema]) -> TurnGrammar:
        text = self._writer.grammar(tools)
        matcher = self._matcher(text)
        self.num_compiled += 1
        if matcher.is_error() or matcher.get_grammar_warnings():
            self._complain(tools)
        if matcher.is_error():
            raise CatalogError(f"The grammar of the tools could not be compiled: {matcher.get_error()}")
        return TurnGrammar(text=text, vocab_size=self._tokenizer.vocab_size, compiled=matcher)

    def _matcher(self, text: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(text), log_level=0)

    def _complain(self, tools: Sequence[Schema]) -> None:
        """Refuse the first tool that there is no grammar for, and name those whose grammar allows too much."""
        for tool in tools:
            name = tool["function"]["name"]
            matcher = self._matcher(self._writer.grammar([tool]))
            if matcher.is_error():
                raise CatalogError(
                    f"No grammar can be made of the schema of the tool {name!r}: {matcher.get_error().splitlines()[0]}. "
                    'Leave the tool out with `allowed_tools`, or set `schema_mask="syntax"` and sample without a '
                    "constraint."
                )
            if warnings := matcher.get_grammar_warnings():
                logger.warning(
                    "The grammar of the tool %r allows more than its schema does: %s", name, "; ".join(warnings)
                )


class _Writer:
    """Writes grammars in llguidance's dialect of Lark."""

    def __init__(self, call: CallFormat, special: Mapping[str, int], end_of_turn_ids: frozenset[int]) -> None:
        self._call = call
        self._special = special
        self._ends = end_of_turn_ids
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        # A call opens with a control token, or else with the first word of its opening: some models write the rest
        # with other whitespace, and what they then write is still read as a call.
        found = self._split.match(call.opening)
        self._opener = found[0] if found else call.opening.split()[0]
        self._opens_by_token = bool(found)
        self.opening = _special_piece(special[self._opener]) if found else self._opener.encode()

    def grammar(self, tools: Sequence[Schema]) -> str:
        return "\n".join(["%llguidance {}", *self._turn(bool(tools)), *self._calls(tools)])

    def _turn(self, has_tools: bool) -> Iterator[str]:
        """Rules of a turn: what is free, and where calls may stand."""
        has_reasoning = all(marker in self._special for marker in REASONING)
        markers = [self._opener, *(REASONING if has_reasoning else ())]
        controls = set(self._special.values()) - self._ends - {self._special.get(marker) for marker in markers}
        yield "end: " + _one_of(self._ends)
        yield "ANY: /(?s:.*)/"
        # A marker is written as its token; spelt out, it would be read as the token is, but is not followed up.
        yield f"TEXT: /(?s:.+)/ & ~({_containing(markers)})"
        yield "plain: TEXT?" + (f" ({_one_of(controls)} TEXT?)*" if controls else "")
        endings = ["end", *(["calls"] if has_tools else [])]
        if not has_reasoning:
            yield "start: plain (" + " | ".join(endings) + ")"
            return
        opened, closed = (self._written(marker) for marker in REASONING)
        # What is called in the midst of reasoning is not read as a call.
        yield f"answer: plain ({opened} plain {closed} plain)* ({' | '.join([*endings, f'{opened} plain end'])})"
        yield "start: " + (f"plain (end | {closed} answer)" if self._call.in_reasoning else "answer")

    def _calls(self, tools: Sequence[Schema]) -> Iterator[str]:
        if not tools:
            return
        call, end = self._call, self._written(self._call.end)
        rest = self._written(call.opening.removeprefix(self._opener))
        if self._opens_by_token:
            first = again = self._written(self._opener)
        else:
            # One terminal with the text before it: text that may go on would swallow the opening.
            yield f"OPENED: (ANY & ~({_containing([self._opener])})) {json.dumps(self._opener)}"
            first, again = "OPENED", json.dumps(self._opener)
        between = "" if call.between is None else f" ({self._written(call.between)} {again} call)*"
        yield f"calls: {first} call{between} {end}"
        yield f"call: {rest} ({' | '.join(f'tool_{i}' for i in range(len(tools)))}) {self._written(call.closing)}"
        arguments = self._json if isinstance(call.arguments, JsonArguments) else self._tagged
        for i, tool in enumerate(tools):
            function = tool["function"]
            parameters = {"type": "object", **(function.get("parameters") or {})}
            yield f"tool_{i}: {self._written(function['name'] + call.after_name)} {arguments(parameters)}"
        if isinstance(call.arguments, TaggedArguments):
            yield from self._raw_value(call.arguments)

    def _json(self, schema: Schema) -> str:
        style = self._call.arguments
        if isinstance(style, TaggedArguments):
            style = JsonArguments(item_separator=", ", key_separator=": ")  # what Jinja's `tojson` writes
        options = {
            "item_separator": style.item_separator,
            "key_separator": style.key_separator,
            "whitespace_flexible": False,
            "lenient": True,
        }
        return "%json " + json.dumps({**schema, "x-guidance": options})

    def _tagged(self, schema: Schema) -> str:
        """Arguments one by one, in the order of the schema."""
        required = schema.get("required", ())
        arguments = [
            f"({self._argument(key, value, schema)}){'' if key in required else '?'}"
            for key, value in schema.get("properties", {}).items()
        ]
        return " ".join(arguments)

    def _argument(self, key: str, schema: Any, root: Schema) -> str:
        style: Any = self._call.arguments
        written = _resolved(schema, root)
        before = self._written(style.before_key + key + style.before_value)
        options = written.get("enum", [written["const"]] if "const" in written else [])
        types = _types(written, root)
        if options and all(isinstance(option, str) for option in options):
            value = " | ".join(map(json.dumps, options))
        elif not types or "string" in types:
            return f"{before} raw"
        else:
            definitions = {k: root[k] for k in ("$defs", "definitions") if k in root}
            # Some templates write Python's constants, and the parser takes both.
            constants = {"boolean": '"True" | "False"', "null": '"None"'}
            known = [constants[kind] for kind in constants if kind in types]
            value = " | ".join([self._json({**written, **definitions}), *known])
        return f"{before} ({value}) {self._written(style.after_value)}"

    def _raw_value(self, style: TaggedArguments) -> Iterator[str]:
        """A text without quotes, up to its closing tag."""
        tags = _containing((style.after_value + self._call.closing).split())
        ending, *rest = (part for part in self._split.split(style.after_value) if part)
        if ending in self._special:
            yield f"VALUE: /(?s:.+)/ & ~({tags})"
            yield f"raw: VALUE? {self._written(style.after_value)}"
        else:
            yield f"VALUE: (ANY & ~({tags})) {json.dumps(ending)}"
            yield f"raw: VALUE {self._written(''.join(rest))}"

    def _written(self, text: str) -> str:
        """A fixed text, its control tokens as tokens."""
        parts = (part for part in self._split.split(text) if part)
        return " ".join(_one_of({self._special[p]}) if p in self._special else json.dumps(p) for p in parts)


def _special_piece(token_id: int) -> bytes:
    return b"\xff[%d]" % token_id  # no text has this byte


def _one_of(token_ids: Any) -> str:
    return f"<[{','.join(map(str, sorted(token_ids)))}]>"


def _containing(literals: Sequence[str]) -> str:
    return f"ANY ({' | '.join(map(json.dumps, literals))}) ANY"


def _resolved(schema: Any, root: Schema) -> dict[str, Any]:
    """A schema with its reference, if it is one, looked up in the schema it is part of."""
    if not isinstance(schema, Mapping):  # `true`: anything
        return {}
    if "$ref" not in schema:
        return dict(schema)
    found: Any = root
    for part in schema["$ref"].removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return {**(found if isinstance(found, Mapping) else {}), **{k: v for k, v in schema.items() if k != "$ref"}}


def _types(schema: Any, root: Schema, max_depth: int = 8) -> set[str]:
    """What a schema says its values may be; empty if it says nothing."""
    written = _resolved(schema, root) if max_depth else {}  # alternatives may refer to each other without end
    declared = written.get("type", [])
    types = {declared} if isinstance(declared, str) else set(declared)
    alternatives = [option for kind in ("anyOf", "oneOf") for option in written.get(kind, ())]
    return types.union(*(_types(option, root, max_depth - 1) for option in alternatives))
