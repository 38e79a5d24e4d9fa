"""MCP servers that ship with the library: financial data, web search, Python, Slack."""
