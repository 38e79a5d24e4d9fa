"""Start the Python server: `python -m mcp_grpo.desk.servers.python`."""

import argparse
import dataclasses
import logging
import math
import sys
from typing import get_args

from mcp_grpo.desk.servers.python.process import Limits
from mcp_grpo.desk.servers.python.sandbox import Level, open_sandbox
from mcp_grpo.desk.servers.python.server import python_server
from mcp_grpo.desk.servers.python.states import MAX_LIVE
from mcp_grpo.desk.servers.serving import parser, serve
from mcp_grpo.errors import ToolServerError


_HELP = {
    "timeout": "seconds that a call may take, and of CPU time",
    "max_memory_mib": "memory of a trajectory's process",
    "max_files_mib": "size of a trajectory's files",
    "max_files": "number of a trajectory's files",
    "max_open_files": "number of files open at a time",
    "max_threads": "number of threads of a trajectory's process",
    "max_output": "characters of a result",
    "max_code": "characters of the code of a call",
}

logger = logging.getLogger("mcp_grpo.desk.servers.python")


def main() -> None:
    """Read the options, and serve."""
    options = parser("python", "Runs Python code in a sandbox, with a state for each trajectory.")
    options.add_argument(
        "--sandbox",
        choices=get_args(Level),
        default="auto",
        help="what keeps the code in; auto takes the strongest that this system has, any other refuses to run with less",
    )
    for field in dataclasses.fields(Limits):
        number = _positive_float if isinstance(field.default, float) else _positive_int
        option = f"--{field.name.replace('_', '-')}"
        options.add_argument(option, type=number, default=field.default, help=_HELP[field.name])
    options.add_argument(
        "--max-live",
        type=_positive_int,
        default=MAX_LIVE,
        help="trajectories whose state is kept; others wait until one of them is reset",
    )
    options.add_argument(
        "--max-idle",
        type=_positive_float,
        default=600.0,
        help="seconds after which a state that is not used is given up",
    )
    chosen = options.parse_args()
    limits = Limits(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(Limits)})
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    try:
        sandbox = open_sandbox(chosen.sandbox, limits)
    except ToolServerError as error:
        sys.exit(str(error))
    logger.info("sandbox: %s", sandbox.description)
    try:
        serve(python_server(sandbox, max_live=chosen.max_live, max_idle=chosen.max_idle), chosen)
    finally:
        sandbox.close()


def _positive_int(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return number


def _positive_float(text: str) -> float:
    number = float(text)
    if not (0 < number < math.inf):
        raise argparse.ArgumentTypeError(f"must be greater than 0 and finite, got {text}")
    return number


if __name__ == "__main__":
    main()
