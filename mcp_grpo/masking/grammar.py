"""Grammars of assistant turns: free text, then tool calls as the chat template and the tools' schemas require."""

import json
import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import CatalogError, SettingsError, TemplateError
from mcp_grpo.masking.formats import REASONING_TAGS, CallSyntax, detect_syntax
from mcp_grpo.masking.formats.notation import Flat, Nested, Notation
from mcp_grpo.masking.formats.offered_tools import resolved
from mcp_grpo.masking.formats.spelling import parts, plain, spelled
from mcp_grpo.masking.vocabulary import Vocabulary


if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

Schema = Mapping[str, Any]

# Read as a call, although the template also names the language of the block.
_CALL_IN_PLAIN_FENCE = r'/```\s*\{\s*"name"\s*:/'


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TurnGrammar:
    """The compiled grammar of an assistant turn with given tools."""

    text: str  # in llguidance's dialect of Lark, which vLLM takes as well
    vocab_size: int
    compiled: "LLMatcher"  # at the beginning of a turn; it is copied, never used

    def matcher(self) -> "LLMatcher":
        """Return a matcher for one turn; it takes microseconds."""
        return self.compiled.deep_copy()


class TurnGrammars:
    """
    Compiles a grammar for each set of tools, once.

    A turn is text without the opening of a tool call, reasoning included, and then either its end or tool calls and their
    end. A call is written exactly as the chat template writes it: no other whitespace, arguments in the order of the
    schema. A schema that does not forbid further arguments allows them. One thing that is allowed cannot be read: an
    argument that spells out the tag that closes a call.

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
        self._vocabulary = Vocabulary(tokenizer)
        self._call = detect_syntax(
            tokenizer, end_of_turn_ids=end_of_turn_ids, chat_template_kwargs=chat_template_kwargs
        )
        if not _has_grammar(self._call.notation):
            call = self._call.trigger + self._call.before_name + "name" + self._call.notation.after_name
            raise TemplateError(
                f"No grammar is known for tool calls that begin like {self._call.spelling.shown(call)!r}, but for those whose "
                "arguments are one JSON object (Qwen, Llama, GPT-OSS) or between tags (Qwen3.5, Nemotron, GLM). Set "
                '`schema_mask="syntax"`, which needs no grammar, and sample without a constraint.'
            )
        self._grammars: dict[str, TurnGrammar] = {}

    def grammar(self, tools: Sequence[Schema]) -> TurnGrammar:
        """Return the grammar of a turn with these tools, compiled on first use."""
        key = json.dumps(tools)  # unsorted: the order of arguments is part of the grammar
        if key not in self._grammars:
            self._grammars[key] = self._compile(tools)
        return self._grammars[key]

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token as matchers spell them: a control token has bytes that no text has."""
        special, pieces = self._writer.special, self._vocabulary.pieces(token_ids)
        return [_special_piece(i) if i in special else piece for i, piece in zip(token_ids, pieces, strict=True)]

    def triggers(self, pieces: Sequence[bytes]) -> set[int]:
        """Return the indices of the tokens that open a call, at least in part."""
        ends = list(accumulate(map(len, pieces)))
        found: set[int] = set()
        for opening in self._writer.openings(b"".join(pieces)):
            found.update(range(bisect_right(ends, opening.start()), bisect_left(ends, opening.end()) + 1))
        return found

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer  # optional, and not for every run

        return from_tokenizer(self._backend, eos_token=sorted(self.end_of_turn_ids))

    @cached_property
    def _writer(self) -> "_Writer":
        added = {i: literal for literal, i in self._vocabulary.added.items()}
        controls = set(self._call.spelling.controls.values())
        special = {i: added[i] for i in added if i in controls or self._tokenizer.is_special_token(i)}
        return _Writer(self._call, special, self.end_of_turn_ids)

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
        """Raise for the first tool without a grammar, and warn of those whose grammar allows too much."""
        for tool in tools:
            name = tool["function"]["name"]
            matcher = self._matcher(self._writer.grammar([tool]))
            if matcher.is_error():
                raise CatalogError(
                    f"No grammar can be made of the schema of the tool {name!r}: {matcher.get_error().splitlines()[0]}. "
                    'Exclude the tool with `allowed_tools`, or set `schema_mask="syntax"` and sample without a '
                    "constraint."
                )
            if warnings := matcher.get_grammar_warnings():
                logger.warning(
                    "The grammar of the tool %r allows more than its schema does: %s", name, "; ".join(warnings)
                )


class _Writer:
    """Writes grammars in llguidance's dialect of Lark."""

    def __init__(self, call: CallSyntax, special: Mapping[int, str], end_of_turn_ids: frozenset[int]) -> None:
        self.special = special
        self._call = call
        self._ends = end_of_turn_ids
        # A call opens with a control token, or else with the first word of its opening: some models write the rest
        # with other whitespace, and what they then write is still read as a call.
        self._opens_by_token = isinstance(parts(call.trigger)[0], int)
        self._opener = call.trigger if self._opens_by_token else spelled(plain(call.trigger).split()[0])
        opener = call.spelling.shown(self._opener)
        self._markers = [json.dumps(opener)] + [_CALL_IN_PLAIN_FENCE] * opener.startswith("```")
        blanks, _, self._rest = (call.trigger + call.before_name).partition(self._opener)
        self._header = _piece(call.header + blanks)

    def openings(self, turn: bytes) -> Iterator[re.Match[bytes]]:
        """Find what opens calls. JSON arguments can look like it: then only at the start of a turn or message."""
        is_anywhere = not self._call.is_bare or self._call.between is not None
        for i, found in enumerate(re.finditer(re.escape(_piece(self._opener)), turn)):
            if is_anywhere or i == 0 or turn.endswith(self._header, 0, found.start()):
                yield found

    def grammar(self, tools: Sequence[Schema]) -> str:
        return "\n".join(["%llguidance {}", *self._turn(bool(tools)), *self._calls(tools)])

    def _turn(self, has_tools: bool) -> Iterator[str]:
        """Yield the rules of a turn: free text, and where calls may be."""
        ids = {literal: i for i, literal in self.special.items()}
        reasoning = next((tags for tags in REASONING_TAGS if all(tag in ids for tag in tags)), ())
        markers = {self._call.spelling.shown(self._opener), *reasoning}
        controls = self.special.keys() - self._ends - {ids.get(marker) for marker in markers}
        yield "end: " + _one_of(self._ends)
        yield "ANY: /(?s:.*)/"
        # A marker must be written as its token, not in letters.
        yield f"TEXT: /(?s:.+)/ & ~({_containing([*self._markers, *map(json.dumps, reasoning)])})"
        control = _one_of(controls) if controls else None
        yield "plain: TEXT?" + (f" ({control} TEXT?)*" if control else "")
        endings = ["plain end"]
        if has_tools and self._opens_by_token:
            endings.append("plain calls")
        elif has_tools:  # whose first terminal has the text before it
            endings.append(f"(TEXT? {control})* calls" if control else "calls")
        if not reasoning:
            yield "start: " + " | ".join(endings)
            return
        opened, closed = (_one_of({ids[tag]}) for tag in reasoning)
        # A call inside reasoning is not read as one.
        yield f"answer: (plain {opened} plain {closed})* ({' | '.join([*endings, f'plain {opened} plain end'])})"
        yield "start: " + (f"plain (end | {closed} answer)" if self._call.reasoning.is_open else "answer")

    def _calls(self, tools: Sequence[Schema]) -> Iterator[str]:
        if not tools:
            return
        call, notation = self._call, self._call.notation
        first = again = _written(self._opener)
        if not self._opens_by_token:
            # One terminal with the text before it, which would swallow the opening otherwise.
            yield f"OPENED: (ANY & ~({_containing(self._markers)})) {again}"
            first = "OPENED"
        between = "" if call.between is None else f" ({_written(call.between)} {again} call)*"
        yield f"calls: {first} call{between} {_written(call.after_last + call.end)}"
        joint = f" ({_written(notation.joint)} tool)*" if notation.joint else ""
        yield f"call: {_written(self._rest)} tool{joint} {_written(notation.closing)}"
        yield f"tool: {' | '.join(f'tool_{i}' for i in range(len(tools)))}"
        for i, tool in enumerate(tools):
            yield f"tool_{i}: {_tool(notation, tool['function'])}"
        if isinstance(notation, Flat):
            yield from self._raw_value(notation)

    def _raw_value(self, notation: Flat) -> Iterator[str]:
        """Yield the rules of a text without quotes, up to its closing tag."""
        after_value = notation.after_value or ""
        tags = _containing(map(json.dumps, self._call.spelling.shown(after_value + notation.closing).split()))
        ending = parts(after_value)[0]
        if isinstance(ending, int):
            yield f"VALUE: /(?s:.+)/ & ~({tags})"
            yield f"raw: VALUE? {_written(after_value)}"
        else:
            yield f"VALUE: (ANY & ~({tags})) {json.dumps(ending)}"
            yield f"raw: VALUE {_written(after_value.removeprefix(spelled(ending)))}"


def _has_grammar(notation: Notation) -> bool:
    """Return whether arguments are one JSON object, or each between the same tags."""
    if isinstance(notation, Nested):
        return notation.key_quote == notation.quote == '"'
    after_name = notation.before_key.removesuffix(notation.between)
    return notation.after_value is not None and notation.empty == after_name + notation.closing


def _tool(notation: Notation, function: Mapping[str, Any]) -> str:
    """Return the rule of a call, from the tool's name to its closing. Tagged arguments are in the order of the schema."""
    name = spelled(function["name"])
    schema = {"type": "object", **(function.get("parameters") or {})}
    if isinstance(notation, Nested):
        return f"{_written(name + notation.after_name[:-1])} {_json(schema, notation.comma, notation.colon)}"
    required = schema.get("required", ())
    arguments = [
        f"({_argument(notation, key, value, schema)}){'' if key in required else '?'}"
        for key, value in schema.get("properties", {}).items()
    ]
    return " ".join([_written(name + notation.before_key.removesuffix(notation.between)), *arguments])


def _argument(notation: Flat, key: str, schema: Any, root: Schema) -> str:
    written = resolved(schema, root)
    before = _written(notation.between + spelled(key) + notation.after_key)
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
        value = " | ".join([_json({**written, **definitions}), *known])
    return f"{before} ({value}) {_written(notation.after_value or '')}"


def _written(spelling: str) -> str:
    """Return the rule of a fixed text, with its control tokens as tokens."""
    return " ".join(_one_of({part}) if isinstance(part, int) else json.dumps(part) for part in parts(spelling))


def _json(schema: Schema, item_separator: str = ", ", key_separator: str = ": ") -> str:
    """Return the rule of a JSON value; the separators are those of Jinja's `tojson`."""
    separators = {"item_separator": item_separator, "key_separator": key_separator}
    return "%json " + json.dumps(
        {**schema, "x-guidance": {**separators, "whitespace_flexible": False, "lenient": True}}
    )


def _piece(spelling: str) -> bytes:
    return b"".join(_special_piece(part) if isinstance(part, int) else part.encode() for part in parts(spelling))


def _special_piece(token_id: int) -> bytes:
    return b"\xff[%d]" % token_id  # no text has this byte


def _one_of(token_ids: Any) -> str:
    return f"<[{','.join(map(str, sorted(token_ids)))}]>"


def _containing(terminals: Iterable[str]) -> str:
    return f"ANY ({' | '.join(terminals)}) ANY"


def _types(schema: Any, root: Schema, max_depth: int = 8) -> set[str]:
    """Return the types that a schema allows; empty if it does not say."""
    written = resolved(schema, root) if max_depth else {}  # alternatives may refer to each other in a loop
    declared = written.get("type", [])
    types = {declared} if isinstance(declared, str) else set(declared)
    alternatives = [option for kind in ("anyOf", "oneOf") for option in written.get(kind, ())]
    return types.union(*(_types(option, root, max_depth - 1) for option in alternatives))
