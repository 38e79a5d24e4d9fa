"""Many trajectories at once, each its own coroutine, driven from synchronous code."""

import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

from mcp_grpo.errors import CatalogError, RolloutError
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.rollout.garbage import GARBAGE
from mcp_grpo.rollout.loop import Limits, derived_seed, roll_out
from mcp_grpo.rollout.progress import RolloutProgress
from mcp_grpo.rollout.renderer import Renderer
from mcp_grpo.rollout.scheduling import TurnHistory
from mcp_grpo.sampling.generator import Generator
from mcp_grpo.tools import Cassette, Catalog, Lease, ServerConfig, Tool, ToolPool
from mcp_grpo.tools.users import User
from mcp_grpo.types import Task, ToolCall, ToolResult, Trajectory


logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_HEAVIEST = 3  # tools that are named when there are too many


class RolloutEngine:
    """
    The open servers and the event loop they live on, for code that is not asynchronous.

    One loop runs on one thread of its own; servers are opened and closed there, and every trajectory is a coroutine on
    it. Sampling runs on the caller's thread, which owns the model. The servers are closed by [`close`], when the engine
    is collected, and when the interpreter exits, whichever comes first.

    Args:
        servers (`str`, `Path`, `Mapping[str, Any]` or `ToolPool`, *optional*):
            MCP servers, as [`load_servers`] takes them, or a pool that is not open yet. Only a cassette that answers by itself can
            do without.
        cassette (`Cassette`, *optional*):
            Records the tool calls, or answers them.
        user (`Callable`, *optional*):
            Says what users say once the policy has answered; see [`MCPGRPOTrainer`].
    """

    def __init__(
        self,
        servers: str | Path | Mapping[str, Any] | ToolPool | None,
        cassette: Cassette | None = None,
        user: User | None = None,
    ) -> None:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="mcp-grpo"))
            pool = servers if isinstance(servers, ToolPool) else ToolPool(servers, cassette, user)
            self._pool = stack.enter_context(self._portal.wrap_async_context_manager(pool))
            self.turns = TurnHistory()
            """How long attempts at each task were; the order of rollouts follows it."""
            self._rollouts: set[Future[Any]] = set()
            stack.callback(_cancel, self._rollouts)  # first of all: they may wait for a generator nobody serves
            # `close` must not hold the engine, or it would never be collected.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    @property
    def catalog(self) -> Catalog:
        """Return the tools of the open servers."""
        return self._pool.catalog

    @property
    def state_servers(self) -> tuple[str, ...]:
        """Return the servers that say what a trajectory has left behind."""
        return self._pool.state_servers

    @property
    def setup_servers(self) -> tuple[str, ...]:
        """Return the servers that a task can set up."""
        return self._pool.setup_servers

    @property
    def configs(self) -> tuple[ServerConfig, ...]:
        """Return the configurations of the servers."""
        return self._pool.configs

    @property
    def secrets(self) -> tuple[str, ...]:
        """Keys and tokens that the servers were given, which nobody else is to see."""
        return tuple(secret for config in self._pool.configs for secret in config.secret_values)

    def schemas_for(self, task: Task) -> list[dict[str, Any]]:
        """Return the tools of a task at its beginning in the form that chat templates take."""
        return [tool.schema for tool in self.catalog.tools_for(task)]

    def all_schemas_for(self, task: Task) -> list[dict[str, Any]]:
        """Return the tools that a task has at any time in the form that chat templates take."""
        return [tool.schema for tool in self.catalog.all_tools_for(task)]

    def prompt_ids(self, tasks: Iterable[Task], renderer: Renderer) -> list[tuple[int, ...]]:
        """Return the tokens of the opening prompts of tasks."""
        return [renderer.prompt_ids(task.prompt, self.schemas_for(task)) for task in tasks]

    def close(self) -> None:
        """End every server. Safe to call more than once."""
        self._finalizer()

    def check_open(self) -> None:
        """
        Refuse to go on without servers.

        Raises:
            [`RolloutError`]: If the engine was closed.
        """
        if not self._finalizer.alive:
            raise RolloutError(
                "There is nothing left to roll out with: the trainer was closed, and its servers with it. Train, evaluate and "
                "roll out inside its `with` block, or before `close()`; for more, make a new trainer."
            )

    def check_prompts(self, tasks: Iterable[Task], renderer: Renderer, limits: Limits) -> None:
        """
        Refuse tools that leave no room in the model's context, and warn of those that leave little. One task of each
        set of tools is looked at.

        Args:
            tasks (`Iterable[Task]`):
                The tasks, of tools that exist.
            renderer (`Renderer`):
                Messages to tokens.
            limits (`Limits`):
                With the size of the context.

        Raises:
            [`CatalogError`]: If the prompt of a task fills the context; the message has its number of tokens and the
                tools that take most of them.
        """
        longest = None if limits.max_context is None else self.longest_prompt(tasks, renderer)
        if longest is None:
            return
        task, length = longest
        problem, is_fatal = room_problem(length, limits)
        if problem:
            size = self.prompt_size(task, length, renderer)
            if is_fatal:
                raise CatalogError(f"{size}{problem}")
            logger.warning("%s%s", size, problem)

    def longest_prompt(self, tasks: Iterable[Task], renderer: Renderer) -> tuple[Task, int] | None:
        """Return the task with the longest prompt and its tokens; one task of each set of tools is looked at."""
        sets = {tuple(tool.name for tool in self.catalog.tools_for(task)): task for task in tasks}
        lengths = [(task, _prompt_length(renderer, task, self.catalog.tools_for(task))) for task in sets.values()]
        return max(lengths, key=itemgetter(1), default=None)

    def prompt_size(self, task: Task, length: int, renderer: Renderer) -> str:
        """Return a sentence on how long a prompt is and which tools take most of it, without its full stop."""
        return _prompt_size(renderer, task, self.catalog.tools_for(task), length)

    def call(self, call: ToolCall) -> ToolResult:
        """Call a tool, as a trajectory of its own."""
        return self._portal.call(self._pool.call, call)

    def roll_out(self, tasks: Sequence[Task], *, generator: Generator, **how: Any) -> list[Trajectory]:
        """
        Attempt many tasks at the same time, and sample on this thread meanwhile.

        Args:
            tasks (`Sequence[Task]`):
                What to attempt; a task that stands there several times is attempted as often.
            generator (`Generator`):
                The policy.
            how:
                Everything else that [`attempt_all`] takes.

        Returns:
            `list[Trajectory]`: One per task, in their order.
        """
        return self.ask(generator, partial(self.attempt_all, tasks, generator=generator, **how))

    async def attempt_all(
        self,
        tasks: Sequence[Task],
        *,
        renderer: Renderer,
        generator: Generator,
        limits: Limits,
        temperature: float = 1.0,
        seed: int = 0,
        grammars: TurnGrammars | None = None,
        room: anyio.Semaphore | None = None,
        finish: Callable[[Trajectory, Sequence[Mapping[str, Any]]], Trajectory] | None = None,
        progress: RolloutProgress | None = None,
    ) -> list[Trajectory]:
        """
        Attempt many tasks at the same time, on the engine's thread; some other thread must serve the generator. Where not all of
        them may be under way at once, those that took most turns before start first. What is sampled does not depend on that.

        Args:
            tasks (`Sequence[Task]`):
                What to attempt; a task that stands there several times is attempted as often.
            renderer (`Renderer`):
                Messages to tokens and back.
            generator (`Generator`):
                The policy.
            limits (`Limits`):
                Where each trajectory ends at the latest.
            temperature (`float`, *optional*, defaults to `1.0`):
                Temperature of sampling.
            seed (`int`, *optional*, defaults to `0`):
                Seed of all of them; each gets its own.
            grammars (`TurnGrammars`, *optional*):
                Confine every turn to the grammar of its tools. `None` samples freely.
            room (`anyio.Semaphore`, *optional*):
                Has a place for each trajectory that may be under way at a time, of all rollouts that are given it; the others wait
                in a queue. If not given, all at once.
            finish (`Callable[[Trajectory, Sequence[Mapping[str, Any]]], Trajectory]`, *optional*):
                Called on the engine's thread as each trajectory ends, while others are still under way: gets it and the
                schemas of its tools, and returns what is to stand in its place.
            progress ([`RolloutProgress`], *optional*):
                Where it is counted how far the rollout is.

        Returns:
            `list[Trajectory]`: One per task, in their order.
        """
        progress = progress or RolloutProgress()
        trajectories: list[Trajectory | None] = [None] * len(tasks)
        start = time.monotonic()

        async def attempt(index: int) -> None:
            async with room or nullcontext():
                queue_seconds = time.monotonic() - start
                trajectory = await roll_out(
                    tasks[index],
                    pool=self._pool,
                    renderer=renderer,
                    generator=generator,
                    limits=limits,
                    temperature=temperature,
                    seed=derived_seed(seed, index),
                    grammars=grammars,
                    progress=progress,
                )
                trajectory = replace(trajectory, queue_seconds=queue_seconds)
                if finish is not None:
                    trajectory = finish(trajectory, self.all_schemas_for(trajectory.task))
            trajectories[index] = trajectory
            self.turns.add(trajectory)
            progress.num_done += 1

        with progress.rolling_out(len(tasks)):
            try:
                async with anyio.create_task_group() as group:
                    for index in self.turns.longest_first(tasks):
                        group.start_soon(attempt, index)
            except ExceptionGroup as error:
                raise error.exceptions[0] from error
        return [trajectory for trajectory in trajectories if trajectory is not None]

    def lease(self, task: Task) -> AbstractContextManager[Lease]:
        """Lease the servers for as long as the context lasts, to be called on the engine's thread."""
        return self._portal.wrap_async_context_manager(self._pool.lease(task))

    def ask(self, generator: Generator, question: Callable[[], Awaitable[T]]) -> T:
        """Wait for something that needs a generator, which is served on this thread meanwhile; return its result."""
        future = self.start(question)
        try:
            self.serve(generator, until=future)
            return future.result()
        finally:
            # After Ctrl-C or an error in the generator the trajectories are still waiting for it.
            future.cancel()

    def start(self, question: Callable[[], Awaitable[T]]) -> Future[T]:
        """Start something on the engine's thread that needs a generator, which some other thread serves."""
        future = self._portal.start_task_soon(question, name="rollout")
        self._rollouts.add(future)
        future.add_done_callback(self._rollouts.discard)
        return future

    def serve(self, generator: Generator, until: Future[Any]) -> None:
        """Sample on this thread for what was started."""
        with GARBAGE.only_new_objects():
            generator.serve(until=until)


def room_problem(length: int, limits: Limits) -> tuple[str, bool]:
    """Return how a sentence on the length of a prompt goes on where the context has too little room, and whether it has none."""
    max_context = limits.max_context
    if max_context is None:
        return "", False
    room = max_context - length
    # Without a `max_completion_length` the whole context stands for it, and the prompt always takes some of that.
    makes_room = limits.max_completion_length == max_context or limits.old_results != "keep"
    if room >= limits.max_completion_length or (room > 0 and makes_room):
        return "", False
    advice = "Allow fewer tools, by `allowed_tools` of a server or by the column `tools` of the tasks"
    if room < 1:
        return f", but the model's context holds {max_context}. {advice}, or shorten the prompt.", True
    return (
        f". In the model's context of {max_context} that leaves {room} for the completion, less than its "
        f"`max_completion_length` of {limits.max_completion_length}. {advice}, or lower `max_completion_length`.",
        False,
    )


def _cancel(futures: set[Future[Any]]) -> None:
    for future in list(futures):
        future.cancel()


def _prompt_length(renderer: Renderer, task: Task, tools: Sequence[Tool]) -> int:
    return len(renderer.prompt_ids(task.prompt, [tool.schema for tool in tools]))


def _prompt_size(renderer: Renderer, task: Task, tools: Sequence[Tool], length: int) -> str:
    """Return a sentence on how long a prompt is, without its full stop."""
    for_tools = length - _prompt_length(renderer, task, [])
    # What a second one adds is what the tool itself takes, without what the template says about tools in general.
    weights = {
        tool.name: _prompt_length(renderer, task, [tool, tool]) - _prompt_length(renderer, task, [tool])
        for tool in tools
    }
    heaviest = sorted(weights, key=weights.__getitem__, reverse=True)[:NUM_HEAVIEST]
    most = f" (most for {', '.join(f'`{name}`: {weights[name]}' for name in heaviest)})" if tools else ""
    return f"The prompt of task {task.task_id!r} has {length} tokens, {for_tools} of them for its {len(tools)} tools{most}"
