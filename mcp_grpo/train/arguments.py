"""Arguments of `mcp-grpo train`; light, as they are also read to show help."""

import argparse
import hashlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mcp_grpo.errors import SettingsError


MODEL = "Qwen/Qwen3-0.6B"
OUTPUTS = Path("outputs")
QUICKSTART = "quickstart-train"  # `make quickstart` has a folder of its own
FILES = ("servers", "tasks", "eval_tasks")  # arguments that may name a file, whose contents count


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArguments:
    """
    What `mcp-grpo train` is told.

    Args:
        servers (`str`, *optional*):
            `mcpServers` file; the quickstart's two servers, with its tasks, if not given.
        model (`str`, *optional*):
            Folder or Hub id of the model to train; Qwen3-0.6B, or on the quickstart's servers its own tiny model, if not given.
        tasks (`str`, *optional*):
            Tasks to train on; made by calling the servers' tools if not given.
        eval_tasks (`str`, *optional*):
            Tasks to judge by; some of the others are held out if not given.
        environment (`str`, *optional*):
            Environment to train in instead of `servers`, such as `"workbench"` or `module:function`; it brings its own tasks.
        data (`str`, *optional*):
            Folder with the environment's own files.
        options (`tuple[tuple[str, str], ...]`, *optional*):
            Names and values of the environment's options.
        num_tasks (`int`, *optional*, defaults to `200`):
            Most tasks that are made.
        num_eval_tasks (`int`, *optional*, defaults to `120`):
            Most tasks to judge by.
        eval_temperature (`float`, *optional*):
            Temperature of the attempts to judge by; that of training if not given. At 0, where all would be alike, there is one at each task.
        steps (`int`, *optional*):
            Steps of training; by the size of the model if not given.
        minutes (`float`, *optional*):
            Minutes that the command may take, about: a warm start and training end early enough for what follows them.
        learning_rate (`float`, *optional*):
            Learning rate; by the size of the model if not given.
        seed (`int`, *optional*, defaults to `0`):
            Seed of tasks, of the split and of training.
        allow_writes (`bool`, *optional*, defaults to `False`):
            Whether tools that may change things are called to make tasks.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Whether to compute on the CPU, also where there is a GPU.
    """

    servers: str | None = None
    model: str | None = None
    tasks: str | None = None
    eval_tasks: str | None = None
    environment: str | None = None
    data: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    num_tasks: int = 200
    num_eval_tasks: int = 120
    eval_temperature: float | None = None
    steps: int | None = None
    minutes: float | None = None
    learning_rate: float | None = None
    seed: int = 0
    allow_writes: bool = False
    use_cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("num_tasks", "num_eval_tasks", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"`{flag(name)}` must be at least 1, got {value}.")
        for name in ("learning_rate", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # also not a number
                raise SettingsError(f"`{flag(name)}` must be above 0, got {value}.")
        if self.eval_temperature is not None and self.eval_temperature < 0:
            raise SettingsError(f"`--eval-temperature` must be at least 0, got {self.eval_temperature}.")
        self._check_environment()
        if self.servers is None and self.tasks is not None:
            raise SettingsError("Name the servers that the tasks are for with `--servers`.")
        if self.eval_tasks is not None and self.tasks is None:
            raise SettingsError(
                "`--eval-tasks` are of no use without `--tasks`: where tasks are made, some of them are held out. Set "
                "both, or neither."
            )

    def _check_environment(self) -> None:
        """Refuse what an environment brings itself, and what only an environment has."""
        if self.environment is None:
            given = [flag(name) for name in ("data", "options") if getattr(self, name)]
            if given:
                raise SettingsError(
                    f"`{given[0]}` is for an environment. Name it with `--environment`, or leave `{given[0]}` out."
                )
            return
        given = [flag(name) for name in ("servers", "tasks", "eval_tasks", "allow_writes") if getattr(self, name)]
        if given:
            raise SettingsError(
                f"`--environment {self.environment}` has its own servers and tasks: leave {' and '.join(f'`{one}`' for one in given)} "
                "out."
            )

    def told(self) -> dict[str, Any]:
        """Return the arguments as they are written down, with digests of the files that they name."""
        given: dict[str, Any] = asdict(self)
        del given["minutes"]  # a run may go on with other time
        given["options"] = [list(option) for option in self.options] or None  # as JSON has it
        for name in FILES:
            path = None if given[name] is None else Path(given[name])
            if path is not None and path.is_file():
                given[f"contents of {given[name]}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return given


def flag(name: str) -> str:
    """Return the flag of an argument."""
    return {"use_cpu": "--cpu", "options": "--option"}.get(name, f"--{name.replace('_', '-')}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("--servers", help="mcpServers file (default: the quickstart's servers and tasks)")
    parser.add_argument(
        "--model", help=f"folder or Hub id of the model to train (default: {MODEL}, or the quickstart's tiny one)"
    )
    parser.add_argument(
        "--tasks",
        help="tasks to train on: JSON, JSONL or Parquet file, folder, or Hub id (default: they are made by calling the tools)",
    )
    parser.add_argument("--eval-tasks", help="tasks to judge by (default: some of the tasks are held out)")
    parser.add_argument(
        "--environment",
        metavar="NAME",
        help="train in an environment, with its own servers and tasks: workbench, bfcl, verifiers, or module:function of one "
        "of yours",
    )
    parser.add_argument("--data", help="folder with the environment's own files, such as a clone of its repository")
    parser.add_argument(
        "--option",
        nargs=2,
        action="append",
        default=[],
        dest="options",
        metavar=("NAME", "VALUE"),
        help="option of the environment",
    )
    parser.add_argument("--num-tasks", type=int, default=200, help="most tasks that are made (default: %(default)s)")
    parser.add_argument(
        "--num-eval-tasks", type=int, default=120, help="most tasks to judge by (default: %(default)s)"
    )
    parser.add_argument(
        "--eval-temperature",
        type=float,
        help="temperature of the attempts to judge by, such as 0 for what the policy is surest of (default: that of training)",
    )
    parser.add_argument("--steps", type=int, help="steps of training (default: by the size of the model)")
    parser.add_argument(
        "--minutes",
        type=float,
        help="about how long the command may take: a warm start and training end early enough for what follows them (default: no limit)",
    )
    parser.add_argument("--learning-rate", type=float, help="learning rate (default: by the size of the model)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of tasks, of the split and of training (default: %(default)s)"
    )
    parser.add_argument(
        "--allow-writes",
        action="store_true",
        help="make tasks with tools that may change things, too, on servers of which each trajectory has one to itself",
    )
    parser.add_argument(
        "--cpu", action="store_true", dest="use_cpu", help="compute on the CPU, although there is a GPU"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder of the run (default: outputs/SERVERS-MODEL or ENVIRONMENT-MODEL, or outputs/{QUICKSTART}); the same command again goes on there",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan, with a time for each stage, and stop")


def read_arguments(namespace: argparse.Namespace) -> tuple[TrainArguments, Path]:
    """Return what a command line says, and the folder of the run."""
    names = [field.name for field in fields(TrainArguments)]
    given: dict[str, Any] = {name: getattr(namespace, name) for name in names}
    given["options"] = tuple((name, value) for name, value in namespace.options)
    arguments = TrainArguments(**given)
    name, model = QUICKSTART, Path(arguments.model or MODEL).name
    if arguments.servers is not None:
        name = f"{Path(arguments.servers).stem}-{model}"
    elif arguments.environment is not None:
        name = f"{arguments.environment.partition(':')[2] or arguments.environment}-{model}"
    return arguments, namespace.out or OUTPUTS / name
