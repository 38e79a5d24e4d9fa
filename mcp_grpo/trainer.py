"""`MCPGRPOTrainer`: TRL's GRPO, rolled out over real MCP servers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset

from mcp_grpo._trl import COMPLETIONS, NO_TASKS, add_lm_head_of, disable_dropout_in_model, heads_made_by, vllm_made_by
from mcp_grpo.batching import BatchingTrainer, RolloutAhead
from mcp_grpo.config import MCPGRPOConfig, check_arguments, check_without_servers
from mcp_grpo.errors import RolloutError, SettingsError
from mcp_grpo.learning import (
    Ratio,
    SchemaMask,
    check_failures,
    pace_metrics,
    reduced,
    rollout_columns,
    row_columns,
    token_columns,
    tool_metrics,
    trajectory_metrics,
)
from mcp_grpo.monitor import speak_in_terminal
from mcp_grpo.requirements import check_packages
from mcp_grpo.rewards.checks import check_tasks, rewardable_tasks
from mcp_grpo.rollout import Background, Renderer, RolloutEngine, RolloutProgress, derived_seed, progress_bar
from mcp_grpo.sampler import Sampler, TransformersSampler, VLLMSampler, vllm_backend
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.types import Task, Trajectory


class MCPGRPOTrainer(BatchingTrainer):
    """
    Trainer for Group Relative Policy Optimization (GRPO) on tools of MCP servers.

    Each completion is a trajectory: the policy generates, its tool calls are made on real servers, what they return is
    appended, and so on until it answers. The tokens that were sampled are the tokens that are trained on, with the
    log-probabilities they were sampled with; what tools wrote is masked. A trajectory that a server failed enters
    neither the loss nor its group's baseline.

    Without `servers` it is [`~trl.GRPOTrainer`], with equal losses and equal gradients.

    The servers are started and every task is checked against their tools and the rewards before training begins (those of
    an iterable dataset as they come). They are ended by [`close`], by leaving a `with` block, or when the interpreter exits.
    Dropout is turned off, as the sampler has none.

    Args:
        model (`str` or `PreTrainedModel` or `PeftModel`):
            Model to train; see [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc | list[RewardFunc]`, *optional*):
            Reward functions. Beside what TRL passes (`prompts`, `completions`, every column of the dataset), they get
            `trajectory`, a list of [`Trajectory`] with messages, tool calls, results and stop reason.
        args ([`MCPGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Tasks, one per row, with at least the columns `task_id` and `prompt`; see [`task_from_row`]. With `servers`, it
            may be left out to roll out and to evaluate only.
        servers (`str`, `Path` or `Mapping[str, Any]`, *optional*):
            MCP servers: a JSON file in the `mcpServers` form, or a mapping of the same form. A run that replays a
            cassette needs none.
        kwargs (`Any`):
            Everything else that [`~trl.GRPOTrainer`] takes: `eval_dataset`, `processing_class`, `peft_config`,
            `callbacks` and so on.

    Example:

    ```python
    from datasets import load_dataset
    from peft import LoraConfig

    from mcp_grpo import MCPGRPOTrainer, exact_answer

    with MCPGRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=exact_answer,
        train_dataset=load_dataset("json", data_files="tasks.jsonl", split="train"),
        servers="mcp.json",
        peft_config=LoraConfig(),
    ) as trainer:
        trainer.train()
    ```
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: MCPGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        *,
        servers: str | Path | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MCPGRPOConfig(f"{Path(name).name}-MCP-GRPO")
        if args.process_index == 0:
            speak_in_terminal("mcp_grpo")
        self._engine: RolloutEngine | None = None
        self._sampler: Sampler | None = None
        self._tasks: list[Task] = []
        self._trajectories: list[Trajectory] = []
        self._num_rollouts = 0
        self._progress = RolloutProgress()  # of the batch at hand
        self._schema_mask: SchemaMask | None = None
        self._mask_metrics: dict[str, Ratio] = {}
        if servers is None and not args.replays:
            check_without_servers(args)
            super().__init__(model, reward_funcs, args, train_dataset, **kwargs)
            return
        check_arguments(args, train_dataset, kwargs)
        check_packages(args)
        tasks = rewardable_tasks(reward_funcs, train_dataset, kwargs.get("eval_dataset"))
        # The servers before the model: what is wrong with a server or a task shows in seconds.
        self._engine = RolloutEngine(servers, args.make_cassette())
        try:
            check_tasks(tasks, reward_funcs, self._engine.catalog, self._engine.state_servers)
            args.vllm_importance_sampling_correction = False  # `old_logps` says what is corrected
            heads = add_lm_head_of({args.temperature_at(0)}, lambda: self.temperature)
            with vllm_made_by(vllm_backend(args)), heads_made_by(heads if args.first_phase_steps else None):
                rows = NO_TASKS if train_dataset is None else train_dataset
                super().__init__(model, reward_funcs, args, rows, **kwargs)
            if train_dataset is None:
                self.train_dataset = None  # so that `train` can say so
            self._sampler = VLLMSampler(self, self._engine) if self.use_vllm else TransformersSampler(self)
            self._renderer = Renderer(
                self._tokenizer, end_of_turn_ids=self.eos_token_ids, chat_template_kwargs=self.chat_template_kwargs
            )
            self._renderer.check_tools([tool.schema for tool in self._engine.catalog.tools])
            self._limits = args.limits(self.model.config, self._sampler.max_context)
            self._engine.check_prompts(tasks, self._renderer, self._limits)
            self._grammars = args.make_grammars(self._renderer)
            self._schema_mask = args.make_schema_mask(self._renderer, self._grammars)
            # The sampler has none, so that with dropout every ratio would be off before the first step.
            disable_dropout_in_model(self.model)
            self._is_guarded = True
        except BaseException:
            self.close()
            raise
        self.rollout_func = lambda prompts, trainer: rollout_columns(
            trainer._trajectories, trainer._tokenizer.eos_token_id, is_soft=args.schema_mask_weight > 0
        )

    def close(self) -> None:
        """End every server, what is still rolled out, and vLLM in process. Safe to call more than once."""
        try:
            self._drop_ahead()
            if self._sampler is not None:
                self._sampler.close()
        finally:
            if self._engine is not None:
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def roll_out(
        self, tasks: Dataset | Sequence[Task], *, num_generations: int = 1, temperature: float | None = None
    ) -> list[Trajectory]:
        """
        Attempt tasks with the policy as it is now, without training on them.

        Args:
            tasks ([`~datasets.Dataset`] or `Sequence[Task]`):
                What to attempt.
            num_generations (`int`, *optional*, defaults to `1`):
                How often to attempt each.
            temperature (`float`, *optional*):
                Temperature of sampling; that of training if not given.

        Returns:
            `list[Trajectory]`: `num_generations` trajectories per task, in the order of the tasks.
        """
        if self._engine is None:
            raise SettingsError("There are no tools to roll out with: pass `servers` to the trainer.")
        self._engine.check_open()
        tasks = tasks_from_rows(tasks) if isinstance(tasks, Dataset) else tasks
        self._engine.catalog.check(*tasks)
        if not tasks:
            return []
        return self._attempt([task for task in tasks for _ in range(num_generations)], temperature=temperature)

    def _attempt(
        self, tasks: Sequence[Task], temperature: float | None = None, retries: int = 0, is_batch: bool = False
    ) -> list[Trajectory]:
        assert self._engine
        assert self._sampler
        if self._ahead is not None:
            self._ahead.rollout.wait()  # it goes on with the weights it began with
        progress = self._progress if is_batch else RolloutProgress()
        bar = progress_bar(
            progress,
            total=progress.num_trajectories + len(tasks),
            disable=self.args.disable_tqdm or not self.is_world_process_zero(),
        )
        prompts = partial(self._engine.prompt_ids, tasks, self._renderer)
        step = self.state.global_step if is_batch and self.model.training else None
        rollout = self._rollout(tasks, progress, step, retries, temperature, is_batch)
        with self._sampler.awake(prompts) as generator, bar:
            return rollout(generator=generator)

    def _attempt_ahead(self, tasks: list[Task]) -> RolloutAhead:
        assert self._engine
        assert self._sampler
        self._engine.catalog.check(*tasks)
        progress = RolloutProgress()
        rollout = self._rollout(tasks, progress, self.state.global_step + 1, self._retries)
        with self._sampler.awake(partial(self._engine.prompt_ids, tasks, self._renderer)) as generator:
            background = Background(partial(rollout, generator=generator), self.accelerator.device)
            return RolloutAhead(tasks, progress, background)

    def _rollout(
        self,
        tasks: Sequence[Task],
        progress: RolloutProgress,
        step: int | None,
        retries: int,
        temperature: float | None = None,
        is_batch: bool = True,
    ) -> Callable[..., list[Trajectory]]:
        """A rollout that only lacks its generator. To be made before that: a sampler may set the policy to evaluation."""
        assert self._engine
        self._num_rollouts += 1
        return partial(
            self._engine.roll_out,
            tasks,
            renderer=self._renderer,
            limits=self.args.limits_at(step, self._limits),
            temperature=self.args.temperature_at(step) if temperature is None else temperature,
            seed=derived_seed(
                self.args.seed, self.accelerator.process_index, self.state.global_step, self._num_rollouts
            ),
            grammars=self._grammars if self.args.constrained_decoding else None,
            first_call_retries=retries,
            schedule=self.args.schedule(is_batch=is_batch, is_training=self.model.training),
            finish=self._schema_mask and self._schema_mask.mark,
            progress=progress,
        )

    def _generate(self, prompts: list) -> tuple:
        if self._engine is None:
            return super()._generate(prompts)
        # TRL would parse each completion as one message. If prompts are no messages it only decodes, and gets real ones.
        output = super()._generate([task.task_id for task in self._tasks])
        return (*output[:COMPLETIONS], self._completions(), *output[COMPLETIONS + 1 :])

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._engine is None:
            return rewards
        left_out = [not t.is_learnt_from or (t.is_cut and self.args.truncation == "mask") for t in self._trajectories]
        is_left_out = self.accelerator.gather(torch.tensor(left_out, device=rewards.device))
        rewards = rewards.masked_fill(is_left_out.unsqueeze(1), torch.nan)
        if not self.model.training:
            self._judge(rewards)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._engine is None:
            return super()._generate_and_score_completions(inputs)
        self._engine.check_open()
        with self._phases("rollout"), self._sleepless(inputs):
            rows = self._roll_out_batch(list(inputs))
        return super()._generate_and_score_completions(rows)

    def _add_columns(self, batch: dict[str, Any]) -> None:
        if self._engine is None:
            return
        if self.args.first_phase_steps:
            batch["is_first_phase"] = torch.tensor(self._is_first_phase, device=self.accelerator.device)
        if self.args.old_logps == "sampler":
            batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        ratios = trajectory_metrics(self._trajectories) | pace_metrics(self._progress) | self._mask_metrics
        metrics = reduced(ratios, self.accelerator)
        self._record(metrics | tool_metrics(self._trajectories, gather_object))
        # Gathered, so that every rank stops, and for the same reasons.
        reasons = gather_object([f"{t.stop_reason}: {t.error or ''}" for t in self._trajectories if t.is_failed])
        try:
            check_failures(reasons, metrics["rollout/failed_fraction"], self.args.max_failed_fraction)
        except RolloutError:
            self._save_before_stopping()
            raise
        batch |= token_columns(self._trajectories, like=batch["completion_ids"])
        batch |= row_columns(
            self._trajectories,
            metrics["rollout/left_out_fraction"],
            loss_type=self.loss_type,
            truncation=self.args.truncation,
            device=self.accelerator.device,
        )
        if self.args.bootstrap_steps:
            batch |= self._bootstrap_columns(batch, metrics)
