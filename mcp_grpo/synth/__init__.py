"""Make tasks for any MCP server: call its tools, find what can be asked, and keep what holds when it is run again."""

from mcp_grpo.synth.pipeline import Made, SynthSettings, make_tasks
from mcp_grpo.synth.rate import rated
from mcp_grpo.synth.write import write_tasks


__all__ = ["Made", "SynthSettings", "make_tasks", "rated", "write_tasks"]
