"""From servers to an adapter with one command: the stages of `mcp-grpo train`, and what recipes share with them."""
