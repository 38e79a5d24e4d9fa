"""The quickstart's small world: two MCP servers, tasks about them, and a model small enough to train on a laptop."""
