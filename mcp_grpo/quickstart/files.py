"""The quickstart as files, for commands that take files: servers, tasks, and the model that it starts from."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from mcp_grpo.quickstart.servers import SERVERS
from mcp_grpo.quickstart.tasks import build_tasks, with_solutions
from mcp_grpo.quickstart.warm_start import WARM_START


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldFiles:
    """Files of the quickstart: its servers, tasks and model."""

    servers: str
    tasks: str
    eval_tasks: str
    model: str


def write_world(folder: Path) -> WorldFiles:
    """
    Write servers, tasks and the warm start into a folder; the same on every machine but for the interpreter's path.

    Args:
        folder (`Path`):
            The folder; it is created.

    Returns:
        [`WorldFiles`]: The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = build_tasks()
    (folder / "mcp.json").write_text(json.dumps(SERVERS, indent=2) + "\n")
    for name, rows in (("tasks.jsonl", train), ("held_out.jsonl", with_solutions(held_out))):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shutil.copytree(WARM_START, folder / "model", dirs_exist_ok=True)
    return WorldFiles(
        servers=str(folder / "mcp.json"),
        tasks=str(folder / "tasks.jsonl"),
        eval_tasks=str(folder / "held_out.jsonl"),
        model=str(folder / "model"),
    )
