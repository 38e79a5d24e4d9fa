"""Choose how a policy writes its tool calls: as its chat template does, or in fenced JSON that any chat model can write."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from mcp_grpo.errors import TemplateError
from mcp_grpo.trl_compat import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)


logger = logging.getLogger(__name__)

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_QUIET: Mapping[str, Any] = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}

OFFER = """\
You can call these tools. Each line has a tool's name, its description and a JSON schema of its arguments:
"""
ORDER = """

To call a tool, write a block like this, with the tool's name and arguments:

```json
{"name": "tool_name", "arguments": {"argument": "value"}}
```

You get the tool's result in the next message. Never guess what a tool could tell you: call it. Once you know enough, \
answer without such a block."""

_MARK = "{#- tool calls in fenced JSON -#}"

# Turns tools, calls and results into text of plain messages, then leaves them to the model's own template.
_PRELUDE = (
    _MARK
    + """
{%- set fenced = namespace(messages=[], results=[], text='', calls=[], offer='') -%}
{%- if tools -%}
    {%- set fenced.offer = OFFER -%}
    {%- for tool in tools -%}
        {%- set fenced.offer = fenced.offer ~ '\\n' ~ ((tool.function or tool) | tojson) -%}
    {%- endfor -%}
    {%- set fenced.offer = fenced.offer ~ ORDER -%}
{%- endif -%}
{%- if fenced.offer and messages[0].role == 'system' -%}
    {%- set fenced.offer = messages[0].content ~ '\\n\\n' ~ fenced.offer -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if fenced.offer and HAS_SYSTEM_ROLE -%}
    {%- set fenced.messages = [{'role': 'system', 'content': fenced.offer}] -%}
    {%- set fenced.offer = '' -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- set fenced.text = fenced.text ~ ('\\n' if fenced.text or fenced.results else '') ~ '```result\\n' -%}
        {%- for part in ([{'type': 'text', 'text': message.content}] if message.content is string else message.content) -%}
            {%- if part.type == 'text' -%}
                {%- set fenced.text = fenced.text ~ (part.text | replace('```', "'''")) -%}
            {%- else -%}
                {%- set fenced.results, fenced.text = fenced.results + [{'type': 'text', 'text': fenced.text}, part], '' -%}
            {%- endif -%}
        {%- endfor -%}
        {%- set fenced.text = fenced.text ~ '\\n```' -%}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {%- set results = fenced.results + [{'type': 'text', 'text': fenced.text}] if fenced.results else fenced.text -%}
            {%- set fenced.messages = fenced.messages + [{'role': 'user', 'content': results}] -%}
            {%- set fenced.results, fenced.text = [], '' -%}
        {%- endif -%}
    {%- elif message.role == 'assistant' and message.tool_calls -%}
        {%- set fenced.calls = [message.content] if message.content else [] -%}
        {%- for call in message.tool_calls -%}
            {%- set call = call.function or call -%}
            {%- set given = call.arguments if call.arguments is string else call.arguments | tojson -%}
            {%- set block = '```json\\n{"name": ' ~ (call.name | tojson) ~ ', "arguments": ' ~ given ~ '}\\n```' -%}
            {%- set fenced.calls = fenced.calls + [block] -%}
        {%- endfor -%}
        {%- set written = {'role': 'assistant', 'content': fenced.calls | join('\\n')} -%}
        {%- if message.reasoning_content -%}
            {%- set written = dict(written, reasoning_content=message.reasoning_content) -%}
        {%- endif -%}
        {%- set fenced.messages = fenced.messages + [written] -%}
    {%- elif message.role == 'user' and fenced.offer -%}
        {%- set fenced.messages = fenced.messages + [dict(message, content=fenced.offer ~ '\\n\\n' ~ message.content)] -%}
        {%- set fenced.offer = '' -%}
    {%- else -%}
        {%- set fenced.messages = fenced.messages + [message] -%}
    {%- endif -%}
{%- endfor -%}
{%- set messages, tools = fenced.messages, none -%}
"""
)

_OPENING = r'```(?:json)?\s*(?=\{\s*"name"\s*:)'
# A text in JSON has no line break, and is followed by its quotation mark: so what looks like this in a text closes nothing.
_CLOSING = rf'(?:\n```|(?<=\}})```(?=[^\n"`]*+(?:\n|\Z|{_OPENING})))\s*'

_ASKED = "it was asked for"
_CALL = {"type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
_TURN = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]

# An output row is untrained if it is as near to those that no text can train as they are to each other.
MIN_UNUSED_ROWS = 8
MAX_RELATIVE_DISTANCE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """
    Hold the format of a policy's tool calls.

    Args:
        name (`str`):
            `"template"` or `"json"`.
        reason (`str`):
            Why it is this one.
        untrained (`tuple[str, ...]`, *optional*, defaults to `()`):
            Tokens of the format that the model was never trained to write.
        is_expected (`bool`, *optional*, defaults to `False`):
            Whether it is what the user asked for, or what the chat template was made for, such as by a warm start.
    """

    name: str
    reason: str
    untrained: tuple[str, ...] = ()
    is_expected: bool = False

    def say(self) -> None:
        """Tell what was chosen where it is not what one would expect, and what can be done about it."""
        if self.name == "json":
            level = logging.INFO if self.is_expected else logging.WARNING
            logger.log(level, "The policy writes tool calls in blocks of fenced JSON: %s.", self.reason)
        elif self.untrained:
            logger.warning(
                "This model was never trained to write %s: its output rows are like those of ids that are never used, and an "
                'adapter on linear layers cannot learn them. Set `call_format="json"`, train all weights, or warm it up with '
                "`recipes/sft_warmup.py`, whose adapter trains these rows, too.",
                " and ".join(self.untrained),
            )


def set_call_format(
    tokenizer: PreTrainedTokenizerBase, wanted: str, output_rows: torch.Tensor | None = None
) -> CallFormat:
    """
    Give a tokenizer the chat template of a format of tool calls, and what parses them.

    With `"json"` tools are offered in the system prompt, and calls are blocks of fenced JSON between which the policy may
    write as it likes. They are written by a template around the model's own, so that everything that reads or writes
    messages, also elsewhere, uses the same format.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Is changed where the format is not its template's own.
        wanted (`str`):
            `"template"`, `"json"`, or `"auto"`: the template's, unless it has none or the model never learnt its tags.
        output_rows (`torch.Tensor` of shape `(V, H)`, *optional*):
            The model's output matrix, which tells whether it learnt the tags; see [`output_rows`].

    Returns:
        [`CallFormat`]: What was chosen, and why.

    Raises:
        [`TemplateError`]: If the template has no format of its own and `"template"` is wanted, or fits no format.

    Example:

    ```python
    tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    set_call_format(tokenizer, "auto")
    # CallFormat(name='json', reason='its chat template knows no tools')
    ```
    """
    template = tokenizer.chat_template
    if isinstance(template, str) and template.startswith(_MARK):
        if wanted == "template":
            raise TemplateError(
                'This tokenizer\'s chat template writes tool calls in fenced JSON. Set `call_format="auto"`, or load the '
                "tokenizer of the base model."
            )
        _set_parser(tokenizer)
        return CallFormat(name="json", reason="its chat template was made for it", is_expected=True)
    if not isinstance(template, str):
        raise TemplateError(
            "The tokenizer has no chat template. Use an instruct model, or set `tokenizer.chat_template`."
        )
    problem = _template_problem(tokenizer)
    if wanted == "template":
        if problem:
            raise TemplateError(
                f'With `call_format="template"` tool calls are written by the chat template, but {problem}. Set '
                '`call_format="json"`, which needs no such template, or use another model.'
            )
        untrained = untrained_tokens(tokenizer, output_rows)
        return CallFormat(name="template", reason=_ASKED, untrained=untrained, is_expected=True)
    reason = problem
    if wanted == "auto" and not problem:
        untrained = untrained_tokens(tokenizer, output_rows)
        if not untrained:
            return CallFormat(name="template", reason="its chat template writes tool calls")
        reason = f"the model was never trained to write {' and '.join(untrained)}, the tags of its chat template"
    try:
        _wrap(tokenizer)
    except TemplateError:
        tokenizer.chat_template = template
        raise
    return CallFormat(name="json", reason=reason or _ASKED, is_expected=wanted == "json")


def output_rows(source: Any) -> torch.Tensor | None:
    """
    Return the output matrix of a model, or nothing where it cannot be had whole.

    Args:
        source (`PreTrainedModel`, `str` or `Path`):
            A model, or the folder or the name that one is loaded from, of which only this matrix is read.

    Returns:
        `torch.Tensor` of shape `(V, H)`, *optional*: One row per token id.
    """
    if not isinstance(source, str | Path):
        rows = getattr(source.get_output_embeddings(), "weight", None)
        return rows.detach() if rows is not None and rows.dim() == 2 and rows.is_floating_point() else None
    try:
        if (index := cached_file(str(source), WEIGHTS_INDEX, **_QUIET)) is not None:
            places: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        elif (file := cached_file(str(source), WEIGHTS, **_QUIET)) is not None:
            with safe_open(file, "pt") as weights:
                places = dict.fromkeys(weights.keys(), WEIGHTS)
        else:
            return None
    except OSError:  # no such folder or name, or none that can be reached; who loads the model says so
        return None
    for ending in ("lm_head.weight", "embed_tokens.weight"):  # the latter where they are tied
        for name, place in places.items():
            if name.endswith(ending) and (file := cached_file(str(source), place, **_QUIET)):
                with safe_open(file, "pt") as weights:
                    return weights.get_tensor(name)
    return None


def untrained_tokens(tokenizer: PreTrainedTokenizerBase, rows: torch.Tensor | None) -> tuple[str, ...]:
    """
    Return the tokens of the template's tool calls that a model was never trained to write.

    Their rows of the output matrix are then like those of ids that the tokenizer does not have, which no text has ever
    trained: an adapter on linear layers cannot tell them apart.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Its template writes a call.
        rows (`torch.Tensor` of shape `(V, H)`, *optional*):
            The model's output matrix.

    Returns:
        `tuple[str, ...]`: The tokens' texts; none where the matrix cannot tell, as it has hardly a row too many.
    """
    added: dict[str, int] = cast("Any", tokenizer).get_added_vocab()
    known = max(len(tokenizer), *(i + 1 for i in added.values()), 0)
    if rows is None or rows.shape[0] - known < MIN_UNUSED_ROWS:
        return ()
    opening = str(tokenizer.apply_chat_template(_TURN[:1], tokenize=False, add_generation_prompt=True))
    turn = str(tokenizer.apply_chat_template(_TURN, tokenize=False))[len(opening) :]
    tags = {text: i for text, i in added.items() if len(text.strip()) > 1 and text in turn}
    unused, used = rows[known:].float(), rows[: min(known, 4096)].float()
    middle, scale = unused.mean(dim=0), used.norm(dim=1).median().item()
    spread = (unused - middle).norm(dim=1).max().item()
    # Where they are copies of one row, rounding is all that sets them apart.
    limit = max(MAX_RELATIVE_DISTANCE * spread, 0.02 * scale)
    if limit > 0.5 * scale:
        return ()  # spread like rows that are used: nothing can be told
    return tuple(text for text, i in tags.items() if (rows[i].float() - middle).norm().item() <= limit)


def _template_problem(tokenizer: Any) -> str | None:
    """Say why a chat template cannot write tool calls that are understood, if so."""
    if not supports_tool_calling(tokenizer):
        return "its chat template knows no tools"
    if getattr(tokenizer, "response_template", None) is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:
            return "no parser is known for the tool calls of its chat template"
    return None


def _wrap(tokenizer: Any) -> None:
    """Put the template that writes fenced JSON around a tokenizer's own."""
    own = tokenizer.chat_template
    try:
        if supports_tool_calling(tokenizer) and not is_chat_template_prefix_preserving(tokenizer):
            own = get_training_chat_template(tokenizer) or own
    except ValueError:
        pass  # it may preserve the plain messages that it gets; if not, the renderer refuses it
    tokenizer.chat_template = own
    values = {"OFFER": OFFER, "ORDER": ORDER, "HAS_SYSTEM_ROLE": _has_system_role(tokenizer)}
    prelude = re.sub("|".join(values), lambda name: json.dumps(values[name[0]], ensure_ascii=False), _PRELUDE)
    tokenizer.chat_template = prelude + own
    if not supports_tool_calling(tokenizer):
        raise TemplateError(
            "Tool calls in fenced JSON need a chat template that writes the messages of user and assistant as they are; this "
            'one changes them. Set `call_format="template"`.'
        )
    _set_parser(tokenizer)


def _has_system_role(tokenizer: Any) -> bool:
    messages = [{"role": "system", "content": "systemprobe"}, {"role": "user", "content": "question"}]
    try:
        return "systemprobe" in tokenizer.apply_chat_template(messages, tokenize=False)
    except jinja2.TemplateError:
        return False


def _set_parser(tokenizer: Any) -> None:
    """Have Transformers read the blocks as calls."""
    plain = [{"role": "user", "content": "question"}]
    asked, answered = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        for messages, opens in ((plain, True), ([*plain, {"role": "assistant", "content": "answerprobe"}], False))
    )
    without = tokenizer.apply_chat_template(plain, tokenize=False)
    header = asked[len(without) :] if asked.startswith(without) else ""
    ending = answered.partition("answerprobe")[2].strip()
    if not header or not ending:
        raise TemplateError(
            f"The chat template asks for a turn with {header!r} and ends it with {ending!r}. Tool calls in fenced JSON need "
            "both. Use an instruct model with its own chat template."
        )
    endings = sorted({ending, tokenizer.eos_token or ending}, key=len, reverse=True)
    fields: dict[str, Any] = {
        "tool_calls": {
            "open_pattern": _OPENING,
            "close_pattern": _CLOSING,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": rf"(?:{'|'.join(map(re.escape, endings))})\s*", "content": "text"},
    }
    if "<think>" in tokenizer.chat_template:
        fields = {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            **fields,
        }
    # A template may open the reasoning in the header.
    anchor = header.partition("<think>")[0]
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}
