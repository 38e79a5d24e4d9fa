"""Many trajectories at once, each its own coroutine, driven from synchronous code."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from mcp_grpo.errors import CatalogError
from mcp_grpo.rollout.generator import Generator
from mcp_grpo.rollout.loop import Limits, derived_seed, roll_out
from mcp_grpo.rollout.renderer import Renderer
from mcp_grpo.tools import Catalog, ToolPool
from mcp_grpo.types import Task, Trajectory


class RolloutEngine:
    """
    The open servers and the event loop they live on, for code that is not asynchronous.

    One loop runs on one thread of its own; servers are opened and closed there, and every trajectory is a coroutine on
    it. Sampling runs on the caller's thread, which owns the model. The servers are closed by [`close`], when the engine
    is collected, and when the interpreter exits, whichever comes first.

    Args:
        servers (`str`, `Path` or `Mapping[str, Any]`):
            MCP servers, as [`load_servers`] takes them.
    """

    def __init__(self, servers: str | Path | Mapping[str, Any]) -> None:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="mcp-grpo"))
            self._pool = stack.enter_context(self._portal.wrap_async_context_manager(ToolPool(servers)))
            self._rollouts: list[Future[None]] = []
            stack.callback(_cancel, self._rollouts)  # first of all: they may wait for a generator nobody serves
            # `close` must not hold the engine, or it would never be collected.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    @property
    def catalog(self) -> Catalog:
        """The tools of the open servers."""
        return self._pool.catalog

    def close(self) -> None:
        """End every server. Safe to call more than once."""
        self._finalizer()

    def check_prompts(self, tasks: Iterable[Task], renderer: Renderer, limits: Limits) -> None:
        """
        Refuse tools that leave no room in the model's context. One task of each set of tools is looked at.

        Args:
            tasks (`Iterable[Task]`):
                The tasks, of tools that exist.
            renderer (`Renderer`):
                Messages to tokens.
            limits (`Limits`):
                With the size of the context.

        Raises:
            [`CatalogError`]: If the prompt of a task fills the context; the message has its number of tokens.
        """
        sets = {tuple(tool.name for tool in self.catalog.tools_for(task)): task for task in tasks}
        for names, task in sets.items():
            schemas = [tool.schema for tool in self.catalog.tools_for(task)]
            length = len(renderer.prompt_ids(task.prompt, schemas))
            if limits.max_context is not None and length >= limits.max_context:
                without = len(renderer.prompt_ids(task.prompt, []))
                raise CatalogError(
                    f"The prompt of task {task.task_id!r} has {length} tokens, {length - without} of them for its "
                    f"{len(names)} tools, but the model's context holds {limits.max_context}. Allow fewer tools: by "
                    "`allowed_tools` of a server, or by the column `tools` of the tasks."
                )

    def roll_out(
        self,
        tasks: Sequence[Task],
        *,
        renderer: Renderer,
        generator: Generator,
        limits: Limits,
        temperature: float = 1.0,
        seed: int = 0,
        max_concurrent: int | None = None,
        on_done: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """
        Attempt many tasks at the same time.

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
            max_concurrent (`int`, *optional*):
                How many may be under way at a time; all of them, if not given.
            on_done (`Callable[[Trajectory], None]`, *optional*):
                Called on the engine's thread as each trajectory ends.

        Returns:
            `list[Trajectory]`: One per task, in their order.
        """
        trajectories: list[Trajectory | None] = [None] * len(tasks)
        under_way = anyio.CapacityLimiter(max_concurrent or max(1, len(tasks)))

        async def attempt(index: int) -> None:
            async with under_way:
                trajectory = await roll_out(
                    tasks[index],
                    pool=self._pool,
                    renderer=renderer,
                    generator=generator,
                    limits=limits,
                    temperature=temperature,
                    seed=derived_seed(seed, index),
                )
            trajectories[index] = trajectory
            if on_done is not None:
                on_done(trajectory)

        async def attempt_all() -> None:
            try:
                async with anyio.create_task_group() as group:
                    for index in range(len(tasks)):
                        group.start_soon(attempt, index)
            except ExceptionGroup as error:
                raise error.exceptions[0] from error

        try:
            future = self._portal.start_task_soon(attempt_all, name="rollout")
            self._rollouts.append(future)
            generator.serve(until=future)
            future.result()
        finally:
            # After Ctrl-C or an error in the generator the trajectories are still waiting for it.
            _cancel(self._rollouts)
        return [trajectory for trajectory in trajectories if trajectory is not None]


def _cancel(futures: list[Future[None]]) -> None:
    while futures:
        futures.pop().cancel()
