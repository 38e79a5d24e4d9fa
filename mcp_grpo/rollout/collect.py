"""The trajectories of a batch: attempted, replaced where they teach nothing, and masked."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset

from mcp_grpo.errors import RolloutError
from mcp_grpo.masking import SchemaMask, TurnGrammars
from mcp_grpo.metrics import Ratio, reduced, staleness_metrics, tool_metrics, trajectory_metrics
from mcp_grpo.rollout.choice import TaskChoice, group_spreads
from mcp_grpo.rollout.conversation import Conversation, Watch
from mcp_grpo.rollout.engine import RolloutEngine
from mcp_grpo.rollout.loop import Limits, derived_seed
from mcp_grpo.rollout.progress import RolloutProgress, progress_bar
from mcp_grpo.rollout.refill import other_rows, refill
from mcp_grpo.rollout.renderer import Renderer
from mcp_grpo.rollout.replay import COLUMN, ScriptedGenerator, scripted_turns, why_unfit
from mcp_grpo.rollout.stream import RolloutStream
from mcp_grpo.sampling.sampler import Sampler
from mcp_grpo.tasks import task_from_row
from mcp_grpo.types import StopReason, Task, Trajectory


logger = logging.getLogger(__name__)

Row = dict[str, Any]
Score = Callable[[list[int], list[Row], list[Trajectory]], torch.Tensor]


@dataclass(slots=True)
class Batch:
    """The rows of a batch, on this process, with the attempts at their tasks."""

    rows: list[Row]
    tasks: list[Task]
    trajectories: list[Trajectory]
    progress: RolloutProgress
    metrics: dict[str, float] = field(default_factory=dict)
    mask_metrics: dict[str, Ratio] = field(default_factory=dict)
    is_streamed: bool = False  # whether it was rolled out while another was trained on

    def reduced_metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of the batch over all processes."""
        own = [trajectory for trajectory in self.trajectories if not trajectory.is_scripted]
        ratios = trajectory_metrics(own) | self.progress.metrics() | self.mask_metrics
        staleness = staleness_metrics(own, gather_object) if self.is_streamed else {}
        return self.metrics | reduced(ratios, accelerator) | tool_metrics(own, gather_object) | staleness


@dataclass(kw_only=True)
class BatchCollector:
    """
    Attempts tasks with the policy as it is now, and makes batches of the attempts.

    Args:
        engine ([`RolloutEngine`]):
            Has the servers, and runs many trajectories at once.
        sampler ([`Sampler`]):
            Samples from the policy.
        renderer ([`Renderer`]):
            Messages to tokens and back.
        limits ([`Limits`]):
            Where a trajectory ends at the latest.
        accelerator (`accelerate.Accelerator`):
            Knows the other ranks.
        grammars ([`TurnGrammars`], *optional*):
            Confine what is sampled.
        schema_mask ([`SchemaMask`], *optional*):
            Takes syntax of tool calls out of the loss.
        seed (`int`):
            Seed of the run.
        temperature (`float`):
            Temperature of sampling.
        max_concurrent (`int`):
            Trajectories under way at a time.
        max_staleness (`int`):
            Updates between the beginning of a group and its use, at most. With 1, the next batch is rolled out while one is trained
            on; with more, slow groups are passed over until they are that old.
        choice ([`TaskChoice`], *optional*):
            Chooses which tasks are attempted. If not given, those that come.
        max_refills (`int`):
            How many times groups that teach nothing are replaced.
        is_solved (`Callable[[Trajectory], bool]`, *optional*):
            Tells whether an attempt solved its task. If given, scripted solutions are replayed where none did.
        masks_cuts (`bool`):
            Whether trajectories that ran out of turns or tokens are left out.
        shows_progress (`bool`):
            Whether a bar is shown.
    """

    engine: RolloutEngine
    sampler: Sampler
    renderer: Renderer
    limits: Limits
    accelerator: Accelerator
    grammars: TurnGrammars | None
    schema_mask: SchemaMask | None
    seed: int
    temperature: float
    max_concurrent: int
    max_staleness: int
    choice: TaskChoice | None
    max_refills: int
    is_solved: Callable[[Trajectory], bool] | None
    masks_cuts: bool
    shows_progress: bool
    num_rollouts: int = 0
    _room: anyio.Semaphore = field(init=False)
    _stream: RolloutStream = field(init=False)
    _announced: list[Task] = field(init=False, default_factory=list[Task])  # the next batch, which was begun
    _resumed: list[Row] = field(init=False, default_factory=list[Row])
    _left: dict[int, list[str]] = field(init=False, default_factory=dict[int, list[str]])
    _coming: list[Task] = field(init=False, default_factory=list[Task])  # of later batches of an evaluation
    _ahead: list[Trajectory] = field(init=False, default_factory=list[Trajectory])  # at these, once they were made
    _ahead_progress: RolloutProgress = field(init=False, default_factory=RolloutProgress)
    _has_told_unfit: bool = False
    _exchanged: float = field(init=False, default=0.0)  # share of the groups begun last that are at other tasks

    def __post_init__(self) -> None:
        self._room = anyio.Semaphore(self.max_concurrent)
        self._stream = RolloutStream(self.engine, self.accelerator.device, self.max_staleness)

    def collect(
        self,
        rows: Sequence[Row],
        *,
        step: int,
        group_size: int,
        is_training: bool,
        score: Score,
        flat: Callable[[torch.Tensor], list[int]],
        dataset: Any = None,
        next_rows: Sequence[Row] = (),
    ) -> Batch:
        """
        Attempt the tasks of a batch, and others instead of those that nothing can be learnt from.

        Args:
            rows (`Sequence[dict[str, Any]]`):
                Rows of the dataset, those of a group one after another.
            step (`int`):
                Optimizer steps done, which the seed depends on.
            group_size (`int`):
                Attempts per group.
            is_training (`bool`):
                Whether the batch is trained on: only then are groups replaced.
            score (`Callable`):
                Returns what trajectories are compared by, of all ranks, given their places in the batch and their rows.
            flat (`Callable`):
                Returns the groups that teach nothing, from what `score` has returned.
            dataset ([`~datasets.Dataset`], *optional*):
                Where other tasks come from.
            next_rows (`Sequence[dict[str, Any]]`, *optional*):
                Rows of the next batch, to be rolled out meanwhile. With `max_staleness` above 1, groups of both may be taken.
        """
        self.engine.check_open()
        proposed, is_begun = rows, False
        if is_training:
            rows = self._resumed_in_place_of(rows, step, group_size)
            is_begun = bool(self.max_staleness) and [task_from_row(row) for row in rows] == self._announced
        if is_training and rows is proposed and not is_begun:  # what goes on has been chosen
            rows = self._chosen(rows, group_size)
        tasks = [task_from_row(row) for row in rows]
        self.engine.catalog.check(*tasks)  # those of a stream have not been seen before
        rank = self.accelerator.process_index
        check_groups([task.task_id for task in tasks], group_size, offset=rank * len(tasks))
        batch = Batch(list(rows), tasks, [], RolloutProgress())
        is_ahead = not is_training and self._take_ahead(batch, step)
        # An engine that sleeps while the policy trains stays awake between the rollouts of one batch.
        with self._awake(tasks) if self.sampler.sleeps and not is_ahead else nullcontext():
            if is_training and self.max_staleness:
                self._take(batch, next_rows, step, group_size, is_begun=is_begun)
            elif not is_ahead:
                batch.trajectories = self.attempt(batch.tasks, step=step, progress=batch.progress)
            if self.is_solved is not None and is_training:
                self._replay(batch, group_size, step, self.is_solved)
            if self.max_refills and is_training:
                shares = refill(
                    len(rows),
                    group_size,
                    max_rounds=self.max_refills,
                    flat=flat,
                    rank=rank,
                    num_ranks=self.accelerator.num_processes,
                    score=lambda slots: score(
                        slots, [batch.rows[slot] for slot in slots], [batch.trajectories[slot] for slot in slots]
                    ),
                    replace=lambda groups: self._replace(batch, groups, step, dataset),
                )
                batch.metrics |= {"groups/flat_fraction": shares[0], "groups/flat_fraction_refilled": shares[-1]}
        if is_training and self.choice is not None:
            batch.metrics["tasks/exchanged_fraction"] = self._exchanged
        if self.masks_cuts:
            batch.trajectories = [replace(t, left_out=t.is_cut) for t in batch.trajectories]
        if self.schema_mask is not None:
            batch.trajectories, batch.mask_metrics = self.schema_mask(
                batch.trajectories, self.engine.all_schemas_for, gather_object, rank
            )
        return batch

    @contextmanager
    def all_at_once(self, batches: Sequence[Sequence[Row]]) -> Generator[None]:
        """
        Let the batches of an evaluation, which come meanwhile, not wait for each other: with the first, the tasks of all are attempted.

        Args:
            batches (`Sequence[Sequence[dict[str, Any]]]`):
                Rows of the batches that are to come, on this process, in their order.
        """
        self._coming = [task_from_row(row) for rows in batches for row in rows]
        try:
            yield
        finally:
            self._coming, self._ahead = [], []

    def _take_ahead(self, batch: Batch, step: int) -> bool:
        """
        Give a batch of an evaluation its attempts, which are made with those of all others; return whether there are any. All
        processes must call it together.
        """
        num_own = len(batch.tasks)
        is_expected = [task.task_id for task in self._coming[:num_own]] == [task.task_id for task in batch.tasks]
        if not all(gather_object([is_expected])):  # as on any of them: sampling may need all processes
            if self._coming:
                logger.warning(
                    "A batch of the evaluation has other tasks than it had when they were read before it: the rest is attempted batch by "
                    "batch, which takes longer. Keep the order of the tasks to judge by the same each time they are read."
                )
            self._coming, self._ahead = [], []
            return False
        if not self._ahead:
            self.engine.catalog.check(*self._coming)
            self._ahead_progress = RolloutProgress()
            self._ahead = self.attempt(self._coming, step=step, progress=self._ahead_progress)
        batch.trajectories, batch.progress = self._ahead[:num_own], self._ahead_progress
        self._coming, self._ahead = self._coming[num_own:], self._ahead[num_own:]
        return True

    def attempt(
        self,
        tasks: Sequence[Task],
        *,
        step: int,
        temperature: float | None = None,
        progress: RolloutProgress | None = None,
    ) -> list[Trajectory]:
        """Attempt each task once, with the policy as it is now."""
        progress = progress or RolloutProgress()
        bar = progress_bar(progress, total=progress.num_trajectories + len(tasks), disable=not self.shows_progress)
        how = self._how(progress, step, temperature)
        with self._awake(tasks) as generator, bar:
            return self.engine.roll_out(tasks, generator=generator, **how)

    def follow_scripts(self, tasks: Sequence[Task], *, step: int) -> list[Trajectory]:
        """Attempt tasks by their scripted solutions, within the limits of the run, with the tokens that the policy would write."""
        how = self._how(RolloutProgress(), step)
        turns = [scripted_turns(task, self.renderer) for task in tasks]
        seeds = [derived_seed(how["seed"], index) for index in range(len(tasks))]
        generator = ScriptedGenerator(dict(zip(seeds, turns, strict=True)))
        how["finish"] = self._scripted
        return self.engine.roll_out(tasks, generator=generator, **how) if tasks else []

    @contextmanager
    def converse(
        self, opening: Task, watch: Watch, *, temperature: float | None = None
    ) -> Generator[Callable[[str], tuple[StopReason, str | None]]]:
        """
        Hold a conversation, with servers of its own: give what says something to the policy, and returns why the reply ended
        and what broke. Only the model's context limits it; `watch` sees each turn and each call, on the engine's thread.
        """
        limits = replace(
            self.limits, max_completion_length=self.limits.max_context or self.limits.max_completion_length
        )
        temperature = self.temperature if temperature is None else temperature
        self.num_rollouts += 1
        seed = derived_seed(self.seed, "conversation", self.num_rollouts)
        with self._awake([opening]) as generator, self.engine.lease(opening) as lease:
            conversation = Conversation(
                opening,
                self.renderer,
                generator,
                limits,
                temperature,
                seed,
                self.grammars,
                RolloutProgress(),
                watch=watch,
            )

            def say(text: str) -> tuple[StopReason, str | None]:
                return self.engine.ask(generator, partial(conversation.say, text, lease)), conversation.error

            yield say

    def under_way(self, step: int) -> list[str]:
        """
        Return the tasks of the groups that were under way when a step began, on any process, and are trained on in no earlier one.
        All processes must ask together.
        """
        return gather_object(self._left.get(step, [])) if self.max_staleness > 1 else []

    def resume(self, rows: Sequence[Row]) -> None:
        """Attempt these rows, which were under way on any process, in place of those of the next batch, each process its share."""
        self._resumed = list(rows)

    def drop_stream(self) -> None:
        """End what was begun for later batches and is of no use."""
        self._stream.drop()
        self._announced, self._resumed = [], []
        self._left.clear()

    def close(self) -> None:
        """End every server, what is still rolled out, and vLLM in process. Safe to call more than once."""
        try:
            self.drop_stream()
            self.sampler.close()
        finally:
            self.engine.close()

    def _resumed_in_place_of(self, rows: Sequence[Row], step: int, size: int) -> Sequence[Row]:
        """Return what was under way when a run was stopped, in the first batch of one that goes on; else the rows themselves."""
        resumed, self._resumed = self._resumed, []
        if not resumed:
            return rows
        rank, num_rows = self.accelerator.process_index, len(rows) * self.accelerator.num_processes
        if len(resumed) != num_rows:
            if rank == 0:
                num_groups = len(resumed) // size
                logger.warning(
                    "%d tasks were under way at the checkpoint, but batches have %d tasks now, so that the data comes in another order. "
                    "The run goes on with the next batch: in this epoch, some tasks are left out, or trained on twice. To train on "
                    "each once, choose `per_device_train_batch_size` and `steps_per_generation` such that the batches of all "
                    "processes together have %d tasks.",
                    num_groups,
                    num_rows // size,
                    num_groups,
                )
            return rows
        own = resumed[rank * len(rows) : (rank + 1) * len(rows)]
        self._left[step] = [str(row["task_id"]) for row in own[::size]]
        return own

    def learn(self, batch: Batch, rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> None:
        """
        Note what a batch earned, for the choice of later tasks. All processes must call it together.

        Args:
            batch ([`Batch`]):
                The batch, on this process.
            rewards (`torch.Tensor`):
                Rewards of shape `(N, F)` of all processes, NaN where there is none.
            weights (`torch.Tensor`):
                Weights of the reward functions.
            group_size (`int`):
                Attempts per group.
        """
        if self.choice is not None:
            names = gather_object([task.task_id for task in batch.tasks])
            self.choice.learn(names[::group_size], group_spreads(rewards, weights, group_size))

    def _chosen(self, rows: Sequence[Row], group_size: int) -> Sequence[Row]:
        """Return the rows to attempt in the places of those that come."""
        if self.choice is None:
            return rows
        names = gather_object([str(row["task_id"]) for row in rows])
        proposed = names[::group_size]
        chosen = self.choice.choose(proposed, derived_seed(self.seed, "choice", self.choice.num_choices))
        changes = sum(new != old for new, old in zip(chosen, proposed, strict=True))
        self._exchanged = changes / len(chosen)
        first = self.accelerator.process_index * len(rows)
        own = [chosen[(first + place) // group_size] for place in range(len(rows))]
        return [row if row["task_id"] == name else self.choice.row(name) for name, row in zip(own, rows, strict=True)]

    def _take(self, batch: Batch, next_rows: Sequence[Row], step: int, group_size: int, *, is_begun: bool) -> None:
        """Begin the next batch, and make this one of groups that have ended."""
        size = group_size if self.max_staleness > 1 else len(batch.rows)  # with 1, a batch is what was begun for it
        if not is_begun:  # the first one, and one that nobody told of
            self._stream.drop()
            self._begin(batch.rows, batch.tasks, step, size)
        start = time.monotonic()
        if self.max_staleness == 1:
            self._stream.wait()
        waited = time.monotonic() - start
        self._announced = [task_from_row(row) for row in next_rows]
        if next_rows:
            rows = self._chosen(next_rows, group_size)
            self._begin(rows, [task_from_row(row) for row in rows], step, size)
        start = time.monotonic()
        groups = self._stream.take(len(batch.rows) // size, step)
        batch.metrics["rollout/wait_seconds"] = waited + time.monotonic() - start
        batch.rows = [row for group in groups for row in group.rows]
        batch.tasks = [task for group in groups for task in group.tasks]
        batch.trajectories = [
            replace(trajectory, staleness=step - group.begun)
            for group in groups
            for trajectory in group.trajectories.result()
        ]
        batch.progress = RolloutProgress.of(group.progress for group in groups)
        batch.is_streamed = True
        if self.max_staleness > 1:
            left = [group.tasks[0].task_id for group in self._stream.groups]
            self._left = {step: self._left.get(step, []), step + 1: left}

    def _begin(self, rows: Sequence[Row], tasks: Sequence[Task], step: int, size: int) -> None:
        """Begin groups, those first that will take most turns."""
        self.engine.catalog.check(*tasks)
        starts = range(0, len(rows), size)
        with self._awake(tasks) as generator:
            for index in self.engine.turns.longest_first([tasks[start] for start in starts]):
                own, progress = slice(starts[index], starts[index] + size), RolloutProgress()
                how = self._how(progress, step)
                attempts = partial(self.engine.attempt_all, tasks[own], generator=generator, **how)
                self._stream.begin(rows[own], tasks[own], attempts, step=step, generator=generator, progress=progress)

    def _replay(self, batch: Batch, size: int, step: int, is_solved: Callable[[Trajectory], bool]) -> None:
        """Put a task's scripted solution in the place of the last attempt of each group in which none succeeded."""
        num_own, rank = len(batch.tasks), self.accelerator.process_index
        solved = gather_object([is_solved(trajectory) for trajectory in batch.trajectories])
        lost = [end - 1 for end in range(size, len(solved) + 1, size) if not any(solved[end - size : end])]
        slots = [place - rank * num_own for place in lost if rank * num_own <= place < (rank + 1) * num_own]
        slots = [slot for slot in slots if batch.tasks[slot].metadata.get(COLUMN)]
        found = self.follow_scripts([batch.tasks[slot] for slot in slots], step=step)
        unfit = Counter[str]()
        for slot, trajectory in zip(slots, found, strict=True):
            if problem := why_unfit(trajectory, is_solved):
                unfit[problem] += 1
            else:
                batch.trajectories[slot] = trajectory
        num_run, num_unfit = (
            sum(counts) for counts in zip(*gather_object([(len(found), unfit.total())]), strict=True)
        )
        batch.metrics |= {
            "solutions/solved_fraction": sum(solved) / len(solved),
            "solutions/lost_groups": len(lost) * size / len(solved),
            "solutions/replayed_fraction": (num_run - num_unfit) / len(solved),
        }
        if num_run:
            batch.metrics["solutions/unfit_fraction"] = num_unfit / num_run
        if unfit and not self._has_told_unfit:
            self._has_told_unfit = True
            reasons = "; ".join(f"{count} because {problem}" for problem, count in unfit.most_common())
            logger.warning(
                "%d of %d scripted solutions of a batch could not be replayed: %s. An attempt meets the same limits, so that the "
                "policy may never solve these tasks. It is said once; `solutions/unfit_fraction` tells of every batch.",
                unfit.total(),
                len(found),
                reasons,
            )

    def _scripted(self, trajectory: Trajectory, tools: Sequence[Mapping[str, Any]]) -> Trajectory:
        scripted = replace(trajectory, is_scripted=True)
        return scripted if self.schema_mask is None else self.schema_mask.mark(scripted, tools)

    def _replace(self, batch: Batch, groups: Mapping[int, int], step: int, dataset: Dataset) -> None:
        """Attempt other tasks in some places of the batch, the same one for all places of a group."""
        taken = gather_object([row["task_id"] for row in batch.rows])
        seed = derived_seed(self.seed, gather_object([self.num_rollouts])[0], "refill")  # the same on all ranks
        names = dataset["task_id"]
        drawn = [names[row] for row in other_rows(names, taken, len(taken), seed)]
        if self.choice is not None:
            drawn = self.choice.choose(drawn, seed, taken)
        rows = {name: row for row, name in enumerate(names)}
        for slot, group in groups.items():
            batch.rows[slot] = dataset[rows[drawn[group]]]
            batch.tasks[slot] = task_from_row(batch.rows[slot])
        attempts = self.attempt([batch.tasks[slot] for slot in groups], step=step, progress=batch.progress)
        for slot, trajectory in zip(groups, attempts, strict=True):
            batch.trajectories[slot] = trajectory

    def _how(self, progress: RolloutProgress, step: int, temperature: float | None = None) -> dict[str, Any]:
        """Return how tasks are attempted, as [`RolloutEngine.attempt_all`] takes it, with a seed of its own."""
        self.num_rollouts += 1
        return {
            "renderer": self.renderer,
            "limits": self.limits,
            "temperature": self.temperature if temperature is None else temperature,
            "seed": derived_seed(self.seed, self.accelerator.process_index, step, self.num_rollouts),
            "grammars": self.grammars,
            "room": self._room,
            "finish": self.schema_mask and self.schema_mask.mark,
            "progress": progress,
        }

    def _awake(self, tasks: Sequence[Task]) -> AbstractContextManager[Any]:
        if self.max_staleness == 1 and self.sampler.is_behind:
            self._stream.wait()  # what is under way ends with the weights it began with
        return self.sampler.awake(partial(self.engine.prompt_ids, tasks, self.renderer))


def check_groups(task_ids: Sequence[str], size: int, offset: int = 0) -> None:
    """Refuse a batch in which a group of `size` attempts, counted from `offset` in the whole batch, has several tasks."""
    groups: dict[int, set[str]] = {}
    for index, task_id in enumerate(task_ids, offset):
        groups.setdefault(index // size, set()).add(task_id)
    if mixed := [sorted(found) for found in groups.values() if len(found) > 1]:
        raise RolloutError(
            f"A group must hold {size} attempts at one task, but one holds the tasks {mixed[0]}. Do not replace the "
            "trainer's sampler or data loader, and keep `dispatch_batches` off."
        )


def check_failures(trajectories: Sequence[Trajectory], fraction: float, limit: float) -> None:
    """Stop a run in which too many trajectories fail: `fraction` of those of all ranks, more than `limit`."""
    # Gathered, so that every rank stops, and for the same reasons.
    reasons = gather_object([f"{t.stop_reason}: {t.error or ''}" for t in trajectories if t.is_failed])
    if fraction <= limit:
        return
    listed = "\n".join(f"  - {count} times {reason}" for reason, count in Counter(reasons).most_common(5))
    raise RolloutError(
        f"{fraction:.0%} of the trajectories failed for reasons the policy is not to blame for, more than "
        f"`max_failed_fraction` ({limit:.0%}):\n{listed}\n"
        "Mend the servers, give them more time (`call_timeout`, `trajectory_timeout`), or raise the limit."
    )
