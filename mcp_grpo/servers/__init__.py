"""MCP servers that ship with the library: financial data, web search, Python, Slack."""

import sys
from collections.abc import Mapping
from typing import Any

from mcp_grpo.errors import SettingsError


def desk_servers(*, seed: int = 0, backends: Mapping[str, str] | None = None, pool_size: int = 1) -> dict[str, Any]:
    """
    The desk: financial data, web search, Python and Slack, as `servers` takes them.

    By default nothing needs a key or the network: finance and search answer from an invented market and what is written
    about it, Slack is an embedded workspace that each trajectory has to itself.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Which invented world it is. Tasks must come from the same one.
        backends (`Mapping[str, str]`, *optional*):
            Another source for a server: `{"finance": "fmp"}` or `"polygon"`, `{"search": "tavily"}`, `{"slack": "live"}`.
            Each reads its key from the environment or a file `.env`, of which only the name is written here:
            `"env": {"FMP_API_KEY": "${FMP_API_KEY}"}`. Proxies and certificates of the environment are passed on.
        pool_size (`int`, *optional*, defaults to `1`):
            Processes of each server.

    Returns:
        `dict[str, Any]`: An `mcpServers` file, which may also be written to disk with `json.dump`.

    Example:

    ```python
    MCPGRPOTrainer(..., servers=desk_servers())
    ```
    """
    # The servers themselves need not load these.
    from mcp_grpo.servers.environment import LIVE_SOURCES, server_environment
    from mcp_grpo.servers.python.states import calls_at_once

    world = ["--seed", str(seed)]
    options: dict[str, dict[str, Any]] = {
        "finance": {},
        "search": {},
        "python": {
            "isolation": "meta",
            "reset_tool": "python_reset",
            "max_inflight": calls_at_once(),  # the others wait in the pool, where that is not counted as their time
            "argument_aliases": {"python_code": "code"},
        },
        "slack": {"isolation": "meta", "reset_tool": "slack_reset", "state_tool": "slack_state"},
    }
    chosen = dict(backends or {})
    if unknown := sorted(chosen.keys() - LIVE_SOURCES.keys()):
        raise SettingsError(
            f"`backends` names {', '.join(map(repr, unknown))}, which is no server with another source. Those are "
            "'finance', 'search' and 'slack'."
        )
    for name, source in chosen.items():
        if source not in LIVE_SOURCES[name]:
            known = " or ".join(map(repr, LIVE_SOURCES[name]))
            raise SettingsError(
                f"`backends` asks for {source!r} as the source of {name!r}, which can be {known}. Leave it out for the one "
                "that needs no key."
            )
    servers: dict[str, Any] = {}
    for name, extra in options.items():
        arguments = ["-m", f"mcp_grpo.servers.{name}"]
        if name in chosen:
            arguments += ["--backend", chosen[name]]
        elif name != "python":
            arguments += world
        environment = server_environment(name, chosen.get(name))
        servers[name] = {
            "command": sys.executable,
            "args": arguments,
            **({"env": environment} if environment else {}),
            "x-mcp-grpo": {"pool_size": pool_size, "max_inflight": 64, **extra},
        }
    return {"mcpServers": servers}
