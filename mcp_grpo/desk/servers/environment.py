"""Environment variables of the desk's servers: keys of live sources, proxies, and the path of the library."""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class Source:
    """Variables that a live source reads."""

    key: str
    options: tuple[str, ...] = ()


LIVE_SOURCES: Mapping[str, Mapping[str, Source]] = {
    "finance": {
        "fmp": Source("FMP_API_KEY", ("FMP_BASE_URL",)),
        "polygon": Source("POLYGON_API_KEY", ("POLYGON_BASE_URL",)),
    },
    "search": {"tavily": Source("TAVILY_API_KEY", ("TAVILY_BASE_URL",))},
    "slack": {"live": Source("SLACK_BOT_TOKEN", ("SLACK_TEAM_ID", "SLACK_CHANNEL_IDS", "SLACK_API_URL"))},
}
"""Live sources by server and name."""

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
NETWORK = (*_PROXIES, *(name.lower() for name in _PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that the HTTP client of live sources reads."""

ASK_SECONDS = 60.0  # for Python to start and find two packages

_PACKAGES = ("mcp_grpo", "mcp")
_FIND_PACKAGES = (
    "import importlib.util, sys\n"
    "for name in sys.argv[1:]:\n"
    "    spec = importlib.util.find_spec(name)\n"
    "    print(spec.origin if spec else '')\n"
)


def server_environment(server: str, source: str | None) -> dict[str, str]:
    """Name the variables that a server of the desk needs, as `env` of its entry."""
    environment: dict[str, str] = {}
    if source is not None:
        live = LIVE_SOURCES[server][source]
        environment[live.key] = f"${{{live.key}}}"
        environment |= {name: f"${{{name}:-}}" for name in (*live.options, *NETWORK)}
    if (path := _python_path()) is not None:
        environment["PYTHONPATH"] = path
    return environment


@functools.cache
def _python_path() -> str | None:
    """Return the folders that a server needs to import what we import; `None` if its Python finds them by itself."""
    from mcp.client.stdio import get_default_environment  # not needed by the server processes

    # Asked of a process like the server's: packages may be installed, linked, found by a hook, or for one user only.
    asked = subprocess.run(
        [sys.executable, "-P", "-c", _FIND_PACKAGES, *_PACKAGES],
        env=get_default_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=ASK_SECONDS,
    )
    ours = [spec.origin or "" if (spec := find_spec(name)) else "" for name in _PACKAGES]
    if [os.path.realpath(path) for path in asked.stdout.splitlines()] == [os.path.realpath(path) for path in ours]:
        return None
    inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    library = os.path.dirname(os.path.dirname(ours[0]))
    return os.pathsep.join(dict.fromkeys(os.path.abspath(folder) for folder in (library, *inherited)))
