"""Real MCP servers for many concurrent trajectories."""

from mcp_grpo.tools.cassette import Cassette
from mcp_grpo.tools.catalog import Catalog, Tool
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.config_files import load_servers
from mcp_grpo.tools.differences import catalog_differences
from mcp_grpo.tools.pool import Lease, ToolPool


__all__ = ["Cassette", "Catalog", "Lease", "ServerConfig", "Tool", "ToolPool", "catalog_differences", "load_servers"]
