"""Evaluate a policy, wherever it is: a model or adapter of this machine or the Hub, a trainer, or an endpoint."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import torch
from anyio.from_thread import start_blocking_portal
from datasets import Dataset
from tqdm.auto import tqdm

from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import (
    NOTHING,
    Attempt,
    AttemptFile,
    Endpoint,
    Evaluation,
    Prices,
    Scripted,
    attempt_of,
    is_solved,
    markdown_report,
    missing,
    run_solutions,
)
from mcp_grpo.evaluation.trackers import check_trackers, send_evaluation
from mcp_grpo.precision import suited_to_cpu
from mcp_grpo.publishing import load_adapter, read_policy_file
from mcp_grpo.publishing.load import local_folder
from mcp_grpo.rewards import is_done
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tools import ToolPool
from mcp_grpo.tools.users import User
from mcp_grpo.trainer import MCPGRPOTrainer
from mcp_grpo.types import Task, Trajectory


ATTEMPTS_FILE, EVALUATION_FILE, REPORT_FILE = "attempts.jsonl", "evaluation.json", "report.md"
CHUNK = 64  # attempts of a local model that are rolled out, and kept, together
CHUNK_OF_VLLM = 128  # each waits for its slowest attempt, while vLLM has little to do
MAX_COMPLETION_LENGTH = 4096  # tokens of an attempt, tool results included, unless told

Success = Callable[[Trajectory], bool]


def evaluate(
    policy: Any,
    tasks: Dataset | Sequence[Task],
    servers: str | Path | Mapping[str, Any] | None = None,
    *,
    k: int = 1,
    is_success: Success = is_done,
    output_dir: str | Path | None = None,
    temperature: float | None = None,
    prices: Prices | None = None,
    max_concurrent: int = 16,
    report_to: str | Sequence[str] | None = None,
    project: str = "mcp-grpo",
    user: User | None = None,
    **settings: Any,
) -> Evaluation:
    """
    Attempt tasks with a policy, and sum up how well it does.

    With `output_dir`, every attempt is kept as it ends, and an evaluation that was interrupted goes on where it was.

    Args:
        policy (`str`, `Path`, [`Endpoint`], [`MCPGRPOTrainer`] or [`~mcp_grpo.evaluation.Scripted`]):
            Folder or Hub name of a model or an adapter, an OpenAI-compatible endpoint, a trainer with its servers, or a policy that
            follows scripts, such as [`~mcp_grpo.evaluation.GROUND_TRUTH`] and [`~mcp_grpo.evaluation.NOTHING`].
        tasks ([`~datasets.Dataset`] or `Sequence[Task]`):
            What to attempt.
        servers (`str`, `Path` or `Mapping[str, Any]`, *optional*):
            MCP servers, as [`MCPGRPOTrainer`] takes them. A trainer has its own.
        k (`int`, *optional*, defaults to `1`):
            Attempts at each task.
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            Whether a trajectory did its task; whether it gave the task's answer and left the state it asks for, if not given.
        output_dir (`str` or `Path`, *optional*):
            Folder for `attempts.jsonl`, `evaluation.json` and `report.md`.
        temperature (`float`, *optional*):
            Temperature of sampling; 1.0, or that of the trainer or endpoint, if not given.
        prices ([`Prices`], *optional*):
            Prices of tokens.
        max_concurrent (`int`, *optional*, defaults to `16`):
            Attempts under way at a time at an endpoint, or of a policy that follows scripts.
        report_to (`str` or `Sequence[str]`, *optional*):
            Trackers that get the summary and every attempt: some of `"wandb"`, `"trackio"` and `"weave"`.
        project (`str`, *optional*, defaults to `"mcp-grpo"`):
            Project at the trackers.
        user (`Callable`, *optional*):
            Says what users say next, as [`MCPGRPOTrainer`] takes it. A trainer has its own.
        settings (`Any`):
            Settings of [`MCPGRPOConfig`] for a model or adapter, such as `use_vllm`, `max_turns` and
            `max_completion_length`.

    Returns:
        [`Evaluation`]: The results.

    Example:

    ```python
    from mcp_grpo import evaluate
    from mcp_grpo.evaluation import compare

    before = evaluate("Qwen/Qwen3-0.6B", tasks, "mcp.json", k=4)
    after = evaluate("outputs/run", tasks, "mcp.json", k=4)
    print(compare(before, after))
    ```
    """
    if not isinstance(policy, str | Path | Endpoint | MCPGRPOTrainer | Scripted):
        raise SettingsError(
            f"`evaluate` takes a model, an adapter, an endpoint or a trainer, got {type(policy).__name__}. To sum up trajectories, "
            "use `summarize`."
        )
    trackers = check_trackers(report_to)
    if k < 1:
        raise SettingsError(f"`k`, the attempts at each task, must be at least 1, got {k}.")
    tasks = tasks_from_rows(tasks) if isinstance(tasks, Dataset) else list(tasks)
    folder = None if output_dir is None else Path(output_dir)
    done, file = _go_on(folder, tasks, k)
    left = missing(tasks, done, k)
    places = [(task, index) for index in range(k) for task in tasks if index in left.get(task.task_id, ())]

    def keep(attempts: Sequence[Attempt]) -> None:
        done.extend(attempts)
        bar.update(len(attempts))
        bar.set_postfix_str(f"success {sum(a.is_solved for a in done) / len(done):.1%}")
        if file is not None:
            file.add(attempts)

    with tqdm(total=len(tasks) * k, initial=len(done), desc="Evaluating", unit="attempt") as bar:
        if places and isinstance(policy, Endpoint):
            _ask_endpoint(policy, places, servers, is_success, keep, max_concurrent, user)
        elif places and isinstance(policy, Scripted):
            _follow_scripts(policy, places, servers, is_success, keep, max_concurrent, user)
        elif places:
            with local_policy(policy, servers, folder, settings, user=user) as trainer:
                _roll_out(trainer, places, is_success, keep, temperature)
    evaluation = Evaluation.of(done, prices)
    if folder is not None:
        (folder / EVALUATION_FILE).write_text(json.dumps(asdict(evaluation), indent=2) + "\n")
    send_evaluation(trackers, _name(policy), evaluation, done, project=project)
    return evaluation


def _name(policy: Any) -> str:
    if isinstance(policy, Endpoint | Scripted):
        return policy.model if isinstance(policy, Endpoint) else policy.name
    return Path(str(policy.args.output_dir if isinstance(policy, MCPGRPOTrainer) else policy)).name


def write_report(folder: Path, name: str, evaluation: Evaluation, baselines: Mapping[str, float]) -> Path:
    """Write `report.md` into the folder of an evaluation, and return where it is."""
    path = folder / REPORT_FILE
    path.write_text(markdown_report(name, evaluation, baselines), encoding="utf-8")
    return path


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of an evaluation that count."""
    return AttemptFile(folder / ATTEMPTS_FILE).read()


def read_evaluation(folder: str | Path) -> Evaluation:
    """
    Read an evaluation from its folder.

    Args:
        folder (`str` or `Path`):
            The `output_dir` of [`evaluate`].

    Returns:
        [`Evaluation`]: Made anew from the attempts.
    """
    attempts = read_attempts(Path(folder))
    if not attempts:
        raise SettingsError(
            f"There is no evaluation in {folder}: {ATTEMPTS_FILE} is not there, or has no attempt that counts."
        )
    return Evaluation.of(attempts)


def baselines(
    tasks: Sequence[Task], servers: Any, is_success: Success = is_done, user: User | None = None
) -> dict[str, float]:
    """
    Measure what a policy is to be compared with: saying that one does not know, and the scripted solutions where there are some.

    Args:
        tasks (`Sequence[Task]`):
            The tasks.
        servers (`Any`):
            What [`MCPGRPOTrainer`] takes as `servers`.
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            See [`evaluate`].
        user (`Callable`, *optional*):
            See [`evaluate`].

    Returns:
        `dict[str, float]`: Success by name.
    """
    idle, scripted = NOTHING.tasks(tasks), [task for task in tasks if task.metadata.get("solution") is not None]
    run = run_solutions([*idle, *scripted], servers, is_success=is_success, user=user)
    solved = [is_solved(one.trajectory, is_success) for one in run]
    found = {"doing nothing": sum(solved[: len(idle)]) / len(idle)}
    if scripted:
        found["scripted solutions"] = sum(solved[len(idle) :]) / len(scripted)
    return found


def _go_on(folder: Path | None, tasks: Sequence[Task], k: int) -> tuple[list[Attempt], AttemptFile | None]:
    """Return the attempts that were made before, and the file that further ones go to."""
    if folder is None:
        return [], None
    file, ids = AttemptFile(folder / ATTEMPTS_FILE), {task.task_id for task in tasks}
    done = [attempt for attempt in file.read() if attempt.task_id in ids and attempt.index < k]
    file.write(done)
    return done, file


def _ask_endpoint(
    endpoint: Endpoint,
    places: Sequence[tuple[Task, int]],
    servers: Any,
    is_success: Success,
    keep: Callable[[Sequence[Attempt]], None],
    max_concurrent: int,
    user: User | None,
) -> None:
    async def attempt_all() -> None:
        room = anyio.CapacityLimiter(max_concurrent)

        async def attempt(task: Task, index: int) -> None:
            async with room:
                trajectory, tokens = await endpoint.attempt(task, pool, client)
            keep([attempt_of(trajectory, index, is_solved=is_solved(trajectory, is_success), tokens=tokens)])

        await endpoint.check()
        pool = ToolPool(servers, user=user)
        async with pool, endpoint.client() as client, anyio.create_task_group() as group:
            pool.catalog.check(*(task for task, _ in places))
            for task, index in places:
                group.start_soon(attempt, task, index)

    with start_blocking_portal(name="mcp-grpo-evaluation") as portal:  # a notebook has a loop in this thread already
        portal.call(attempt_all)


def _follow_scripts(
    policy: Scripted,
    places: Sequence[tuple[Task, int]],
    servers: Any,
    is_success: Success,
    keep: Callable[[Sequence[Attempt]], None],
    max_concurrent: int,
    user: User | None,
) -> None:
    tasks = policy.tasks(task for task, _ in places)
    run = run_solutions(tasks, servers, is_success=is_success, max_concurrent=max_concurrent, user=user)
    for one, (_, index) in zip(run, places, strict=True):
        keep([attempt_of(one.trajectory, index, is_solved=is_solved(one.trajectory, is_success))])


def _roll_out(
    trainer: MCPGRPOTrainer,
    places: Sequence[tuple[Task, int]],
    is_success: Success,
    keep: Callable[[Sequence[Attempt]], None],
    temperature: float | None,
) -> None:
    size = CHUNK_OF_VLLM if trainer.args.use_vllm else CHUNK
    for start in range(0, len(places), size):
        chunk = places[start : start + size]
        trajectories = trainer.roll_out([task for task, _ in chunk], temperature=temperature)
        keep(
            [
                attempt_of(trajectory, index, is_solved=is_solved(trajectory, is_success))
                for trajectory, (_, index) in zip(trajectories, chunk, strict=True)
            ]
        )


@contextmanager
def local_policy(
    policy: Any,
    servers: Any,
    folder: Path | None,
    settings: Mapping[str, Any],
    base: str | None = None,
    user: User | None = None,
) -> Iterator[MCPGRPOTrainer]:
    """Give a trainer that samples from the policy; one that is made here is closed again."""
    if isinstance(policy, MCPGRPOTrainer):
        if servers is not None or user is not None or settings:
            raise SettingsError("A trainer has its own servers, user and settings: leave those of `evaluate` out.")
        yield policy
        return
    source = local_folder(policy)
    model, tokenizer = load_adapter(source, base=base, dtype="auto")
    if settings.get("use_cpu") or not torch.accelerator.is_available():
        model = suited_to_cpu(model)
    defaults = {"max_completion_length": MAX_COMPLETION_LENGTH, "disable_tqdm": True}
    if kwargs := read_policy_file(source).chat_template_kwargs:  # as it was prompted in training
        defaults["chat_template_kwargs"] = kwargs
    with TemporaryDirectory() as scratch:
        args = MCPGRPOConfig(
            output_dir=str(folder or scratch), report_to="none", save_strategy="no", **{**defaults, **settings}
        )
        with MCPGRPOTrainer(
            model, _no_reward, args, servers=servers, user=user, processing_class=tokenizer
        ) as trainer:
            yield trainer


def _no_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Stand for the reward that nothing is trained on."""
    return [0.0] * len(completions)
