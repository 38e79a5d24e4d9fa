"""Real MCP servers for many concurrent trajectories: opened once, called by anyone, closed without a trace."""

from mcp_grpo.tools.cassette import Cassette
from mcp_grpo.tools.catalog import Catalog, Tool
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.differences import catalog_differences
from mcp_grpo.tools.loading import load_servers
from mcp_grpo.tools.pool import Lease, ToolPool


__all__ = ["Cassette", "Catalog", "Lease", "ServerConfig", "Tool", "ToolPool", "catalog_differences", "load_servers"]
