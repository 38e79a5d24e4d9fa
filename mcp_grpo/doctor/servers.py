"""The servers: keys, starting, tools, schemas, and calls that can do no harm."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mcp_grpo.doctor.findings import Findings, counted
from mcp_grpo.errors import CatalogError, SettingsError, ToolServerError
from mcp_grpo.rollout import RolloutEngine
from mcp_grpo.tools import Cassette, Tool, ToolPool
from mcp_grpo.tools.catalog import ALL
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.config_files import UnsetVariableError, load_servers
from mcp_grpo.types import ToolCall


MAX_NAMES = 8  # of tools in one row
MAX_CALLS = 10  # harmless ones, of each server


def open_servers(findings: Findings, servers: Any, cassette: Cassette | None = None) -> RolloutEngine | None:
    """
    Start every server and report how that went; return the open servers, which the caller closes. If some do not start, the
    others are looked at all the same, and nothing is returned.
    """
    if cassette is not None:
        return findings.run("servers", lambda: RolloutEngine(servers, cassette), remedy="Record again.")
    configs = read_servers(findings, servers)
    if not configs:
        return None
    pool, engine = ToolPool(configs), None
    try:
        engine = RolloutEngine(pool)
    except (ToolServerError, CatalogError) as error:
        for name, failure in pool.failures.items():
            remedy = "Run its `command` by hand, or ask its `url`; `mcp-grpo tasks check` starts it again."
            findings.fail(f"server {name}", f"{failure}", remedy)
        if not pool.failures:  # names that mean two tools
            findings.fail("servers", str(error), "Rename a server, or exclude a tool with `allowed_tools`.")
        findings.block("servers")
        started = tuple(config for config in configs if config.name not in pool.failures)
        if started and pool.failures:
            pool = ToolPool(started)
            engine = findings.run("servers", lambda: RolloutEngine(pool))
            if engine is not None:
                examine_servers(findings, engine, pool)
                engine.close()
        return None
    examine_servers(findings, engine, pool)
    return engine


def read_servers(findings: Findings, servers: Any) -> tuple[ServerConfig, ...]:
    """Read a file of servers, with all keys that are missing told at once; one session of each is enough here."""
    try:
        configs = load_servers(servers)
    except UnsetVariableError as error:
        findings.fail("keys", str(error), "Export them, or write them into a `.env` beside the file.")
        findings.block("servers")
        return ()
    except (SettingsError, ValueError, OSError) as error:
        findings.fail("servers", str(error), "Mend the file; `mcpServers` maps names to commands or addresses.")
        return ()
    named = sorted({name for config in configs for name in config.secrets})
    findings.ok("keys", f"all that is asked for is set: {', '.join(named)}" if named else "none is asked for")
    return tuple(
        replace(config, pool_size=1, **({"spares": 0} if config.isolation == "exclusive" else {}))
        for config in configs
    )


def examine_servers(findings: Findings, engine: RolloutEngine, pool: ToolPool) -> None:
    """Look at the tools of open servers."""
    for config in pool.configs:
        tools = [tool for tool in engine.catalog.tools if tool.server == config.name]
        seconds = pool.seconds.get(config.name, 0.0)
        said = f"{counted(len(tools), 'tool')}, listed after {seconds:.1f} s"
        if tools:
            findings.ok(f"server {config.name}", said)
        else:
            findings.warn(f"server {config.name}", said, "See whether `allowed_tools` leaves any.")
    examine_schemas(findings, engine.catalog.tools)
    unsafe = [tool.name for tool in engine.catalog.tools if not tool.is_repeatable]
    number = len(engine.catalog.tools) - len(unsafe)
    said = f"{number} of {counted(len(engine.catalog.tools), 'tool')} can safely be called twice"
    findings.ok("calling twice", f"{said}; not, or not said to be: {_few(unsafe)}" if unsafe else said)
    call_harmless(findings, engine, pool.configs)


def examine_schemas(findings: Findings, tools: Sequence[Tool]) -> None:
    """Compile the schema of every tool; where that fails, only the server checks arguments."""
    invalid = [f"{tool.server}: {tool.tool}" for tool in tools if not tool.is_checked]
    if invalid:
        findings.fail(
            "schemas",
            f"The input schemas of {len(invalid)} tools are not valid: {_few(invalid)}. Their arguments are not checked, and "
            "`constrained_decoding` cannot use them.",
            "Mend the server, or exclude the tools with `allowed_tools`.",
        )
    else:
        findings.ok("schemas", f"valid, of {counted(len(tools), 'tool')}")


def read_only_tools(tools: Sequence[Tool], configs: Sequence[ServerConfig]) -> list[Tool]:
    """Return the tools that declare to change nothing, by themselves: not those that only the user vouches for."""
    vouched = {config.name: config.read_only_tools for config in configs}
    return [
        tool for tool in tools if tool.is_read_only and {tool.tool, ALL}.isdisjoint(vouched.get(tool.server, (ALL,)))
    ]


def harmless_tools(tools: Sequence[Tool], configs: Sequence[ServerConfig]) -> list[Tool]:
    """Return the tools that declare to change nothing, by themselves, and that can be called without arguments."""
    return [
        tool
        for tool in read_only_tools(tools, configs)
        if not tool.input_schema.get("required") and tool.is_checked and tool.prepare({}).refusal is None
    ]


def call_harmless(findings: Findings, engine: RolloutEngine, configs: Sequence[ServerConfig]) -> None:
    """Call the harmless tools once each, and report how long they take and which fail."""
    harmless = harmless_tools(engine.catalog.tools, configs)
    chosen = [tool for name in engine.catalog.servers for tool in _of(name, harmless)[:MAX_CALLS]]
    if not chosen:
        findings.skip("harmless calls", "no tool declares `readOnlyHint` and takes no arguments: none was called")
        return
    times: dict[str, float] = {}
    failed: list[str] = []
    for tool in chosen:
        start = time.monotonic()
        result = engine.call(ToolCall(name=tool.name, arguments={}))
        times[tool.name] = time.monotonic() - start
        if result.is_error:
            failed.append(f"`{tool.name}` ({result.kind.value}): {result.text[:200]}")
    slowest = max(times, key=times.__getitem__)
    said = f"{counted(len(times), 'tool')} answered, the slowest (`{slowest}`) after {times[slowest]:.2f} s"
    if failed:
        findings.warn(
            "harmless calls",
            f"{len(failed)} of {len(times)} calls without arguments failed: {'; '.join(failed[:MAX_NAMES])}",
            "See what the server says; a key may be wrong, or what it asks may be down.",
        )
    else:
        findings.ok("harmless calls", said)


def _of(server: str, tools: Sequence[Tool]) -> list[Tool]:
    return [tool for tool in tools if tool.server == server]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
