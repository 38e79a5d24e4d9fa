"""
How a model writes tool calls, and which parts of that are forced.

A turn is read as *spelling*: a string with one character per byte and one per control token, so that neither half a
character nor a control token written out in letters can be mistaken for anything else. [`detect_syntax`] finds out from
the chat template how calls are written; a [`CallSyntax`] says so, and reads them.
"""

from mcp_grpo.rollout.formats.call import CallSyntax
from mcp_grpo.rollout.formats.cursor import Cursor
from mcp_grpo.rollout.formats.detection import detect_syntax
from mcp_grpo.rollout.formats.offer import Offer
from mcp_grpo.rollout.formats.reasoning import REASONING_TAGS


__all__ = ["REASONING_TAGS", "CallSyntax", "Cursor", "Offer", "detect_syntax"]
