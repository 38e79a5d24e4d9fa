"""Find what a solution could not know: values in its calls that nothing before them has shown."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from mcp_grpo.types import Message


_MIN_LENGTH = 4  # characters of a text or digits of a number, below which a value may well be a guess


def unseen_values(prompt: Sequence[Message], messages: Sequence[Message], tools: Iterable[Any] = ()) -> list[Any]:
    """
    Find the values in calls that could not be known when the calls were made.

    A policy that imitates them learns to make values up. Values that can be worked out from what was seen, such as a date from
    "tomorrow", are among them: only the same characters count, whatever their case.

    Args:
        prompt (`Sequence[Message]`):
            Opening messages.
        messages (`Sequence[Message]`):
            Messages that followed, such as those of a [`Trajectory`].
        tools (`Iterable[Any]`, *optional*):
            What is told about the tools, such as their descriptions and input schemas: anything that JSON can hold.

    Returns:
        `list[Any]`: Texts of 4 or more characters and numbers of 4 or more digits that are in no earlier message of the user or a tool,
        no earlier call and nothing told about the tools, each once, in the order of the calls.

    Example:

    ```python
    asked = [{"role": "user", "content": "Mail Ann."}]
    call = {"function": {"name": "send", "arguments": {"to": "ann@our.example"}}}
    unseen_values(asked, [{"role": "assistant", "content": "", "tool_calls": [call]}])  # ['ann@our.example']
    ```
    """
    seen = [_plain(json.dumps(told, ensure_ascii=False, default=str)) for told in tools]
    seen += [_plain(_text(message)) for message in prompt]
    unseen: list[Any] = []
    for message in messages:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        values = [value for arguments in calls for value in _values(_read(arguments))]
        for value in values:
            text = _plain(str(value))
            if not any(text in one for one in seen):
                unseen.append(value)
                seen.append(text)  # to be reported once
        if message["role"] != "assistant":
            seen.append(_plain(_text(message)))
    return unseen


def _values(arguments: Any) -> list[Any]:
    """Return the values in arguments, however deep, that are long enough to be no guess."""
    if isinstance(arguments, Mapping):
        arguments = list(cast("Mapping[str, Any]", arguments).values())
    if isinstance(arguments, list | tuple):
        return [value for inner in cast("Sequence[Any]", arguments) for value in _values(inner)]
    if isinstance(arguments, bool) or not isinstance(arguments, str | int | float):
        return []
    length = len(arguments.strip()) if isinstance(arguments, str) else len(re.sub(r"\D", "", str(arguments)))
    return [arguments] if length >= _MIN_LENGTH else []


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def _plain(text: str) -> str:
    """Return a text in small letters, with single spaces, and without the escapes that its way through JSON or Python gave it."""
    text = re.sub(r"\\+[nrt]", " ", text)
    return " ".join(re.sub(r"\\+(['\"\\/])", r"\1", text).lower().split())
