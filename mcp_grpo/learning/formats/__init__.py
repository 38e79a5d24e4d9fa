"""
How a model writes tool calls, and which parts of that are forced.

A turn is read as *spelling*: a string with one character per byte and one per control token, so that neither half a
character nor a control token written out in letters can be mistaken for anything else. [`detect_syntax`] finds out from
the chat template how calls are written; a [`CallSyntax`] reads them.
"""

from mcp_grpo.learning.formats.call import CallSyntax
from mcp_grpo.learning.formats.cursor import Cursor
from mcp_grpo.learning.formats.detection import detect_syntax
from mcp_grpo.learning.formats.offer import Offer


__all__ = ["CallSyntax", "Cursor", "Offer", "detect_syntax"]
