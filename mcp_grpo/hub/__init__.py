"""What leaves this machine, and what comes back: folders that can be shown to others, and policies loaded from them."""

from mcp_grpo.hub.command import run_command
from mcp_grpo.hub.facts import POLICY_FILE, PolicyFacts, quantization_of, read_facts, write_facts
from mcp_grpo.hub.folder import PrivateValues, hub_name, publishable_copy
from mcp_grpo.hub.loading import load_adapter
from mcp_grpo.hub.serving import export_for_serving, serve_command, tool_parser
from mcp_grpo.hub.uploads import uploads_of


__all__ = [
    "POLICY_FILE",
    "PolicyFacts",
    "PrivateValues",
    "export_for_serving",
    "hub_name",
    "load_adapter",
    "publishable_copy",
    "quantization_of",
    "read_facts",
    "run_command",
    "serve_command",
    "tool_parser",
    "uploads_of",
    "write_facts",
]
