# pyright: reportMissingImports=false, reportUnknownMemberType=false
"""
Reads tool calls in blocks of fenced JSON for `vllm serve --tool-parser-plugin tool_parser.py --tool-call-parser fenced_json`.

This file is copied beside a policy that writes such calls, and needs nothing but vLLM. It is not imported by the library.
"""

import json
import re
from typing import Any

from vllm.tool_parsers import ToolParserManager  # noqa: TID251
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser  # noqa: TID251


_OPENING = re.compile(r'```(?:json)?\s*(?=\{\s*"name"\s*:)')
_CLOSING = re.compile(r"\s*```")
_CLOSING_OF_NO_JSON = re.compile(r"\n```")
# What may yet become an opening: some of its fence, or all of that and some of what must follow.
_UNFINISHED_OPENING = re.compile(r'`{1,2}\Z|```(?:j(?:s(?:on?)?)?)?\s*(?:\{\s*(?:"(?:n(?:a(?:me?"?)?)?)?\s*)?)?\Z')


class FencedJSONToolParser(Hermes2ProToolParser):
    """Finds calls between fences, where vLLM's own parser finds them between tags; all else is inherited from that."""

    structural_tag_model = None

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Return the calls of a whole turn and the text before them; a turn with a call that cannot be read is text."""
        found = self._extract_tool_call_jsons(model_output)
        if not found:
            return super().extract_tool_calls(model_output, request)  # which then returns it as text
        try:
            calls = [json.loads(text) for text, _ in found]
            tagged = "".join(f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls)
        except ValueError:
            return super().extract_tool_calls(model_output, request)
        before = model_output[: self._start(model_output)].rstrip()
        return super().extract_tool_calls(before + tagged, request)

    def _extract_content(self, current_text: str) -> str | None:
        end = self._start(current_text)
        if end < 0:
            unfinished = _UNFINISHED_OPENING.search(current_text)
            end = unfinished.start() if unfinished else len(current_text)
        content = current_text[self._sent_content_idx : end]
        self._sent_content_idx = max(end, self._sent_content_idx)
        return content or None

    def _extract_tool_call_jsons(self, text: str) -> list[tuple[str, bool]]:
        found, position = [], 0
        while opening := _OPENING.search(text, position):
            start = opening.end()
            end = _end_of_json(text, start)
            closing = _CLOSING_OF_NO_JSON.search(text, start) if end is None else _CLOSING.match(text, end)
            if closing is None:
                return [*found, (text[start:end].rstrip("`").strip(), end is not None)]
            found.append((text[start : closing.start()].strip(), True))
            position = closing.end()
        return found

    @staticmethod
    def _start(text: str) -> int:
        opening = _OPENING.search(text)
        return opening.start() if opening else -1


def _end_of_json(text: str, start: int) -> int | None:
    """Return where JSON ends that begins there, whatever its texts look like; nothing if it breaks off, or is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except ValueError:
        return None


ToolParserManager.register_module("fenced_json", module=FencedJSONToolParser)
