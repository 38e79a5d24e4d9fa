"""MCP servers of the desk: financial data, web search, Python and Slack."""

import sys
from collections.abc import Mapping
from typing import Any

from mcp_grpo.errors import SettingsError


def desk_servers(*, seed: int = 0, backends: Mapping[str, str] | None = None, pool_size: int = 1) -> dict[str, Any]:
    """
    Describe the desk's servers (financial data, web search, Python, Slack) in the form that `servers` takes.

    By default nothing needs a key or the network: finance and search answer from an invented market and its news, and Slack
    is an embedded workspace, separate for each trajectory.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the invented world, which must be that of the tasks.
        backends (`Mapping[str, str]`, *optional*):
            Another source for a server: `{"finance": "fmp"}` or `"polygon"`, `{"search": "tavily"}`, `{"slack": "live"}`.
            Its key is read from the environment or a file `.env`; the result holds only its name:
            `"env": {"FMP_API_KEY": "${FMP_API_KEY}"}`. Proxy and certificate variables are passed on.
        pool_size (`int`, *optional*, defaults to `1`):
            Processes of each server.

    Returns:
        `dict[str, Any]`: An `mcpServers` file, which may also be written to disk with `json.dump`.

    Example:

    ```python
    MCPGRPOTrainer(..., servers=desk_servers())
    ```
    """
    # Imported here, because the server processes do not need them.
    from mcp_grpo.desk.servers.environment import LIVE_SOURCES, server_environment
    from mcp_grpo.desk.servers.python.states import MAX_LIVE, calls_at_once

    world = ["--seed", str(seed)]
    options: dict[str, dict[str, Any]] = {
        "finance": {},
        "search": {},
        "python": {
            "isolation": "meta",
            "reset_tool": "python_reset",
            "max_inflight": calls_at_once(),  # other calls wait in the pool, where waiting does not count as their time
            "max_trajectories": MAX_LIVE,
            "argument_aliases": {"python_code": "code"},
        },
        "slack": {"isolation": "meta", "reset_tool": "slack_reset", "state_tool": "slack_state"},
    }
    chosen = dict(backends or {})
    if unknown := sorted(chosen.keys() - LIVE_SOURCES.keys()):
        raise SettingsError(
            f"`backends` names {', '.join(map(repr, unknown))}, which has no other source. The servers that have one are "
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
        arguments = ["-m", f"mcp_grpo.desk.servers.{name}"]
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
