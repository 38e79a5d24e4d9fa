"""Publish policies (cards, clean folders, uploads), load them, and serve them."""

from mcp_grpo.publishing.card import RunSummary, installed_versions, rewrite_card
from mcp_grpo.publishing.checkpoint import (
    UNFINISHED,
    begin_checkpoint,
    checked_checkpoint,
    complete_checkpoints,
    finish_checkpoint,
    load_state,
    newest_checkpoint,
    save_state,
)
from mcp_grpo.publishing.command_line import run_command
from mcp_grpo.publishing.folder import PrivateValues, hub_name, publishable_copy
from mcp_grpo.publishing.load import load_adapter
from mcp_grpo.publishing.policy_file import (
    POLICY_FILE,
    PolicySettings,
    quantization_of,
    read_policy_file,
    shared_system,
    write_policy_file,
)
from mcp_grpo.publishing.publisher import CURVES_FILE, Publisher
from mcp_grpo.publishing.serve import export_for_serving, serve_command, tool_parser


__all__ = [
    "CURVES_FILE",
    "POLICY_FILE",
    "UNFINISHED",
    "PolicySettings",
    "PrivateValues",
    "Publisher",
    "RunSummary",
    "begin_checkpoint",
    "checked_checkpoint",
    "complete_checkpoints",
    "export_for_serving",
    "finish_checkpoint",
    "hub_name",
    "installed_versions",
    "load_adapter",
    "load_state",
    "newest_checkpoint",
    "publishable_copy",
    "quantization_of",
    "read_policy_file",
    "rewrite_card",
    "run_command",
    "save_state",
    "serve_command",
    "shared_system",
    "tool_parser",
    "write_policy_file",
]
