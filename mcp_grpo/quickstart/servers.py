"""The two servers of the quickstart, as files that are started by this interpreter."""

import sys
from pathlib import Path
from typing import Any


SERVERS: dict[str, Any] = {
    "mcpServers": {
        name: {"command": sys.executable, "args": [str(Path(__file__).with_name(f"{name}_server.py"))]}
        for name in ("people", "office")
    }
}
