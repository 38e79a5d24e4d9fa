"""From rows to the trajectories of a batch."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from mcp_grpo.errors import HealthError, SettingsError
from mcp_grpo.learning import Ratio, SchemaMask, check_groups, other_rows, refill
from mcp_grpo.monitor import project_of_trackers
from mcp_grpo.publishing import PublishingTrainer
from mcp_grpo.rollout import Background, Renderer, RolloutProgress, derived_seed
from mcp_grpo.tasks import task_from_row
from mcp_grpo.tools import Catalog
from mcp_grpo.types import Task, Trajectory


DROP_TIME = 60.0  # seconds for a rollout to end that is of no use any more


@dataclass(frozen=True, slots=True)
class RolloutAhead:
    """A batch that is rolled out while the one before it is trained on."""

    tasks: list[Task]
    progress: RolloutProgress
    rollout: Background[list[Trajectory]]


class BatchingTrainer(PublishingTrainer):
    """Batches of trajectories: attempted, replaced where nothing can be learnt from them, and masked."""

    _tasks: list[Task]
    _trajectories: list[Trajectory]
    _progress: RolloutProgress
    _schema_mask: SchemaMask | None
    _mask_metrics: dict[str, Ratio]
    _renderer: Renderer
    _sampler: Any
    _is_first_phase = False  # whether the batch at hand is of the first phase of sampling
    _ahead: RolloutAhead | None = None
    _upcoming: tuple[Any, list[Any]] = (None, [])  # what an epoch gives for the next update, and whose it is

    def _attempt(
        self, tasks: Sequence[Task], temperature: float | None = None, retries: int = 0, is_batch: bool = False
    ) -> list[Trajectory]:
        """Attempt each task once, with the policy as it is now."""
        raise NotImplementedError

    def _attempt_ahead(self, tasks: list[Task]) -> RolloutAhead:
        """Begin to attempt each task once, with the policy as it is now."""
        raise NotImplementedError

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """
        See [`~transformers.Trainer`]. Where the GPU runs out of memory, the error says in which phase of a step.

        Raises:
            [`HealthError`]: If the run was stopped because it cannot learn any more. All that follows training has been done
            by then: trackers are closed, a checkpoint is written, and the best policy that was evaluated is loaded.
        """
        if self.train_dataset is None:
            raise SettingsError("There are no tasks to train on. Pass `train_dataset` to the trainer.")
        self._drop_ahead()
        self._upcoming = (None, [])
        self._last_loaded_step = -1  # another run may have been at the same step, with other weights
        self._kept_step = None
        if self.state.global_step:  # a run after a run
            self._begin_anew()
        with self._phases("other"), project_of_trackers(self.args.project), self._gpu_watch:
            output = super().train(*args, **kwargs)
        stopped = [note for note in self.health_notes if note.is_fatal]
        if stopped:
            raise HealthError(f"{stopped[0].sentence} {self._after_stop(stopped[0].step)}")
        return output

    def _after_stop(self, step: int) -> str:
        """Say where a run was stopped, and how to go on."""
        saved = f"checkpoint-{step} in {self.args.output_dir}" if self.args.save_strategy != "no" else "no checkpoint"
        kept = (
            f"; step {self._kept_step}, the best that was evaluated, is the policy that is kept"
            if self._kept_step
            else ""
        )
        return (
            f"The run was stopped at step {step}, with {saved}{kept}. To train on all the same, set "
            '`on_unhealthy="warn"`.'
        )

    def measure_phases(self) -> None:
        """Log the seconds and, on a GPU, the largest memory of each phase of a step, as `profile/<phase>_seconds` and so on."""
        self._phases.measure()

    @property
    def catalog(self) -> Catalog:
        """The tools of the open servers."""
        if self._engine is None:
            raise SettingsError("There are no tools: pass `servers` to the trainer.")
        return self._engine.catalog

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """See [`~transformers.Trainer`]. With `rollout_ahead`, the samples of the next update are fetched as well."""
        if not self.args.rollout_ahead:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        whose, samples = self._upcoming
        if whose is not epoch_iterator:
            samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._upcoming = epoch_iterator, super().get_batch_samples(epoch_iterator, num_batches, device)[0]
        return samples, None  # there are no labels to count

    def _roll_out_batch(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Attempt the tasks of a batch, and others instead of those that nothing can be learnt from."""
        assert self._engine
        self._is_first_phase = self.model.training and self.state.global_step < self.args.first_phase_steps
        self.temperature = self.args.temperature_at(0 if self._is_first_phase else None)  # also of scoring and loss
        self._tasks = [task_from_row(row) for row in rows]
        self._engine.catalog.check(*self._tasks)  # those of a stream have not been seen before
        size, rank = self._group_size, self.accelerator.process_index
        check_groups([task.task_id for task in self._tasks], size, offset=rank * len(rows))
        self._trajectories = self._batch()
        if self.args.dynamic_sampling and self.model.training:
            shares = refill(
                len(rows),
                size,
                max_rounds=self.args.dynamic_sampling,
                weights=self.reward_weights,
                rank=rank,
                num_ranks=self.accelerator.num_processes,
                score=lambda slots: self._score(rows, slots),
                replace=lambda groups: self._replace(rows, groups),
            )
            self._record({"groups/flat_fraction": shares[0], "groups/flat_fraction_refilled": shares[-1]})
        self._look_ahead()
        if self.args.truncation == "mask":
            self._trajectories = [replace(t, left_out=t.is_cut) for t in self._trajectories]
        if self._schema_mask is not None:
            self._trajectories, self._mask_metrics = self._schema_mask(
                self._trajectories, self._engine.schemas_for, gather_object, rank
            )
        return [{**row, "prompt": list(task.prompt)} for row, task in zip(rows, self._tasks, strict=True)]

    def _batch(self) -> list[Trajectory]:
        """Attempts at the tasks at hand: those that were begun before, or else new ones."""
        ahead = self._ahead if self.model.training else None
        if ahead is not None and ahead.tasks == self._tasks:
            start, self._progress = time.monotonic(), ahead.progress
            trajectories = ahead.rollout.result()
            self._ahead = None
            self._record({"rollout/wait_seconds": time.monotonic() - start})
            return trajectories
        if ahead is not None:
            self._drop_ahead()
        self._progress = RolloutProgress()
        return self._attempt(self._tasks, retries=self._retries, is_batch=True)

    def _drop_ahead(self) -> None:
        """End what was begun before and is of no use."""
        ahead, deadline = self._ahead, time.monotonic() + DROP_TIME
        while ahead is not None and self._engine is not None and not ahead.rollout.is_done:
            self._engine.cancel()
            ahead.rollout.wait(timeout=0.2)
            if time.monotonic() > deadline:
                break
        self._ahead = None

    def _look_ahead(self) -> None:
        """Begin with the next batch, if there will be one."""
        _, samples = self._upcoming
        if self.model.training and samples and self.state.global_step + 1 < self.state.max_steps:
            self._ahead = self._attempt_ahead([task_from_row(row) for row in samples[0]])

    def _sleepless(self, rows: list[dict[str, Any]]) -> AbstractContextManager[Any]:
        """In which an engine that sleeps while the policy trains does not do so between the rollouts of one batch."""
        if not self.use_vllm or not self.args.vllm_enable_sleep_mode:
            return nullcontext()
        assert self._engine
        prompts = partial(self._engine.prompt_ids, [task_from_row(row) for row in rows], self._renderer)
        return self._sampler.awake(prompts)

    def _replace(self, rows: list[dict[str, Any]], groups: dict[int, int]) -> None:
        """Attempt other tasks in some places of the batch, the same one for all places of a group."""
        dataset, taken = cast(Dataset, self.train_dataset), gather_object([row["task_id"] for row in rows])
        seed = derived_seed(self.args.seed, gather_object([self._num_rollouts])[0], "refill")  # the same on all ranks
        drawn = other_rows(dataset["task_id"], taken, len(taken), seed)
        for slot, group in groups.items():
            rows[slot] = dataset[drawn[group]]
            self._tasks[slot] = task_from_row(rows[slot])
        attempts = self._attempt([self._tasks[slot] for slot in groups], retries=self._retries, is_batch=True)
        for slot, trajectory in zip(groups, attempts, strict=True):
            self._trajectories[slot] = trajectory

    def _score(self, rows: list[dict[str, Any]], slots: list[int]) -> torch.Tensor:
        """Rewards of some of the trajectories at hand, and nothing of what their functions log: that comes later."""
        chosen = [self._trajectories[slot] for slot in slots]
        inputs = [{**rows[slot], "trajectory": t} for slot, t in zip(slots, chosen, strict=True)]
        prompts, ids = [list(t.task.prompt) for t in chosen], [list(t.completion_ids) for t in chosen]
        everything, self._trajectories = self._trajectories, chosen
        try:
            return self._calculate_rewards(inputs, prompts, self._completions(), ids)
        finally:
            self._trajectories = everything
            self._pending_extra_logs.clear()
            self._pending_metrics.clear()

    def _completions(self) -> list[list[dict[str, Any]]]:
        return [list(t.messages) or [{"role": "assistant", "content": ""}] for t in self._trajectories]
