"""
How a model writes tool calls, and which parts of them are forced.

A turn is read as its *spelling*: a string with one character per byte and one per control token, so that neither half a
character nor a control token written out in letters can be mistaken for anything else. [`detect_syntax`] derives a
[`CallSyntax`] from the chat template, which reads calls.
"""

from mcp_grpo.masking.formats.call import REASONING_TAGS, CallSyntax
from mcp_grpo.masking.formats.cursor import Cursor
from mcp_grpo.masking.formats.detection import detect_syntax
from mcp_grpo.masking.formats.offered_tools import OfferedTools


__all__ = ["REASONING_TAGS", "CallSyntax", "Cursor", "OfferedTools", "detect_syntax"]
