"""`MCPGRPOTrainer`: TRL's GRPO, rolled out over real MCP servers."""

import logging
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from datasets import Dataset, IterableDataset
from peft.helpers import disable_input_dtype_casting
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import has_length

from mcp_grpo.build import (
    has_plain_adapter,
    make_cassette,
    make_collector,
    make_credit,
    make_kl_control,
    make_objective,
    make_reference,
    make_sampler,
    make_value_estimator,
    make_vision,
    make_vllm_backend,
    num_groups,
)
from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.config_checks import check_arguments, check_without_servers
from mcp_grpo.errors import HealthError, RolloutError, SettingsError
from mcp_grpo.evaluation import Evaluation, EvaluationHistory, Judged, check_replayed, check_solution_forms, is_solved
from mcp_grpo.learning import (
    AsSeen,
    BatchRows,
    Checkpointing,
    LabelledOnly,
    PromptSharing,
    SampledOnly,
    ScoredOnce,
    Seeing,
    SharedPrompts,
    TurnRewards,
    Unpadded,
    ValueRecorder,
    Views,
    depends_on_width,
    ends_cut,
    flat_turns,
    load_value_head,
    picture_columns,
    returns_to_go,
    rollout_columns,
    row_columns,
    sampled_column,
    save_value_head,
    to_tokens,
    token_columns,
    turn_columns,
    turns_of,
    without_value_head,
)
from mcp_grpo.masking import bootstrap_columns
from mcp_grpo.metrics import weigh_batches
from mcp_grpo.monitor import (
    METRICS_FILE,
    ROW,
    RUN_FILE,
    HealthNote,
    MetricsFile,
    RunFile,
    RunMonitor,
    ScoredBatch,
    TrackioScope,
    TrajectoryRecorder,
    any_text_in_terminal,
    pass_metrics,
    project_of_trackers,
    speak_in_terminal,
    table_messages,
    tell,
    trajectory_columns,
)
from mcp_grpo.precision import slowness_on_cpu
from mcp_grpo.publishing import (
    CURVES_FILE,
    POLICY_FILE,
    UNFINISHED,
    Publisher,
    begin_checkpoint,
    checked_checkpoint,
    complete_checkpoints,
    finish_checkpoint,
    load_state,
    save_state,
    shared_system,
)
from mcp_grpo.requirements import check_packages
from mcp_grpo.rewards.boundary import RewardBoundary
from mcp_grpo.rewards.checks import check_tasks, rewardable_tasks
from mcp_grpo.rollout import (
    Batch,
    BatchCollector,
    Renderer,
    RolloutEngine,
    check_failures,
    flat_groups,
    output_rows,
    set_call_format,
)
from mcp_grpo.sampling.vision import Vision
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tools import Catalog
from mcp_grpo.tools.users import User
from mcp_grpo.trl_compat import (
    COMPLETIONS,
    INTEGRATION_TO_CALLBACK,
    NO_TASKS,
    TRAINER_STATE_NAME,
    GRPOTrainer,
    LossDenominator,
    clip_limits,
    clipped_fraction,
    delete_old_checkpoints,
    disable_dropout_in_model,
    give_bias,
    inert_tables,
    loss_weights,
    policy_pass,
    save_checkpoint_apart,
    send_only,
    tables_as_text,
    vllm_made_by,
    without_bonuses,
)
from mcp_grpo.types import StopReason, Task, Trajectory


_OF_TEXT = (
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)  # what TRL asks of a model, beside images and the like
_UNKNOWN_TO_VLLM = ("value_head", "modules_to_save.ref.")  # weights that its engine does not have

logger = logging.getLogger(__name__)

Columns = dict[str, Any]


class MCPGRPOTrainer(GRPOTrainer):
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
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            Whether a trajectory did its task, such as [`~mcp_grpo.rewards.is_done`]. With it, evaluations during training have
            `eval_success`, and the model card says success before and after. `replay_solutions` goes by it, too, and by
            [`~mcp_grpo.rewards.is_done`] without it.
        user (`Callable`, *optional*):
            Says what the user says next, once the policy has answered: a function (`async` or not) of the [`Trajectory`] so far
            that returns a text, a [`UserTurn`], or `None` at the end, such as a [`SimulatedUser`]. A second parameter, if it has
            one, is the [`~mcp_grpo.tools.users.UserTools`] of the trajectory. It comes after the task's own `user_turns`.
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

    # Narrower, or wider, than `transformers` has them: what they are here.
    args: MCPGRPOConfig
    accelerator: Any
    model: Any
    ref_model: Any
    optimizer: Any
    num_generations: int
    num_generations_eval: int
    reward_weights: torch.Tensor
    chat_template_kwargs: dict[str, Any]

    _tag_names = ["trl", "grpo", "mcp-grpo"]  # noqa: RUF012 (TRL's own attribute)
    _name = "MCP-GRPO"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: MCPGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        *,
        servers: str | Path | Mapping[str, Any] | None = None,
        is_success: Callable[[Trajectory], bool] | None = None,
        user: User | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MCPGRPOConfig(f"{Path(name).name}-MCP-GRPO")
        if args.process_index == 0:
            speak_in_terminal("mcp_grpo")
        is_alone = servers is None and not args.replays
        if is_alone:
            check_without_servers(args)
        else:
            check_arguments(args, train_dataset, kwargs)
            check_packages(args)
        self._monitor = RunMonitor(args)
        self._evaluations = EvaluationHistory(Path(cast("str", args.output_dir)))
        self._kept_step: int | None = None
        self._begun_at_step = 0  # of the checkpoint that was gone on from
        self._saved: set[int] = set()  # steps of the checkpoints that were written since
        self._is_success = is_success
        self._has_user = user is not None
        self._engine: RolloutEngine | None = None
        self._collector: BatchCollector | None = None
        self._publisher: Publisher | None = None
        self._batch: Batch | None = None  # the one at hand
        self._views = Views()
        self._watchers: list[Callable[[ScoredBatch], None]] = []
        self._records: TrajectoryRecorder | None = None
        self._run_file: RunFile | None = None
        self._upcoming: tuple[Any, list[Any]] = (None, [])  # what an epoch gives for the next update, and whose it is
        self._recorder: ValueRecorder | None = None  # of the pass at hand
        self._records_values = False  # whether the next pass is to give values
        self._skips_pass = False  # whether nobody reads what the next pass gives
        self._boundary = RewardBoundary()
        self._scored = ScoredOnce()  # the batch at hand, where groups are replaced
        self._is_scoring = False
        self._sampled: torch.Tensor | None = (
            None  # which completion tokens of the pass at hand the policy wrote, if known
        )
        self._vision: Vision | None = None
        self._pictures: Columns = {}  # of the batch that is scored
        self._pass: Any = None  # what TRL's loss is given instead of a pass of its own
        if is_alone:
            super().__init__(model, reward_funcs, args, train_dataset, **kwargs)
            self._add_parts()
            return
        tasks = rewardable_tasks(reward_funcs, train_dataset, kwargs.get("eval_dataset"))
        # The servers before the model: what is wrong with a server or a task shows in seconds.
        self._engine = RolloutEngine(servers, make_cassette(args), user)
        try:
            engine = self._engine
            check_tasks(tasks, reward_funcs, engine.catalog, engine.state_servers, engine.setup_servers)
            if args.replay_solutions:
                check_replayed(tasks)
            args.vllm_importance_sampling_correction = False  # `old_logps` says what is corrected
            if args.keeps_best(kwargs.get("eval_dataset")):
                args.load_best_model_at_end = True
                args.metric_for_best_model = args.metric_for_best_model or "eval_reward"
                args.greater_is_better = args.greater_is_better is not False
            with vllm_made_by(make_vllm_backend(args)):
                rows = NO_TASKS if train_dataset is None else train_dataset
                super().__init__(model, reward_funcs, args, rows, **kwargs)
            if train_dataset is None:
                self.train_dataset = None  # so that `train` can say so
            self._add_rollout(self._engine, tasks)
            self._add_parts()
        except BaseException:
            self.close()
            raise

    def _add_rollout(self, engine: RolloutEngine, tasks: Sequence[Task]) -> None:
        """Add what rolls out and what publishes, and check prompts and tools against the chat template."""
        rows = output_rows(self.accelerator.unwrap_model(self.model))
        if self._tokenizer.chat_template is None:  # some models have it at their processor only
            self._tokenizer.chat_template = cast(Any, self.processing_class).chat_template
        call_format = set_call_format(self._tokenizer, self.args.call_format, rows)
        if self.is_world_process_zero():
            call_format.say()
            if slowness := slowness_on_cpu(
                self.accelerator.unwrap_model(self.model), self.accelerator.mixed_precision
            ):
                logger.warning("%s", slowness)
        vision, blindness = make_vision(self)
        renderer = Renderer(
            self._tokenizer,
            end_of_turn_ids=self.eos_token_ids,
            chat_template_kwargs=self.chat_template_kwargs,
            vision=vision,
        )
        self._vision, blindness = renderer.vision, blindness or renderer.blindness
        if blindness and self.is_world_process_zero():
            logger.warning("Images that tools return are named to the policy, not shown: %s.", blindness)
        sampler = make_sampler(self, engine, self._vision, record=self._record, phase=self._monitor.phases)
        try:
            self._collector = make_collector(
                self.args,
                engine,
                sampler,
                renderer,
                model_config=self.model.config,
                accelerator=self.accelerator,
                train_dataset=self.train_dataset,
                is_success=self._is_success,
                shows_progress=not self.args.disable_tqdm and self.is_world_process_zero(),
            )
            if self._collector.choice is not None and self.is_world_process_zero():
                problem = self._collector.choice.problem(num_groups(self.args, self.train_dataset))
                if problem:
                    logger.warning("%s", problem)
        except BaseException:
            sampler.close()  # what vLLM in process holds; from here on, the collector does
            raise
        renderer.check_tools([tool.schema for tool in engine.catalog.tools])
        if self._has_user or any(task.user_turns for task in tasks):
            renderer.check_user_turns()
        engine.check_prompts(tasks, renderer, self._collector.limits)
        # The sampler has none, so that with dropout every ratio would be off before the first step.
        disable_dropout_in_model(self.model)
        self.rollout_func = lambda prompts, trainer: rollout_columns(
            trainer._batch.trajectories, trainer._tokenizer.eos_token_id
        )
        policy = self.accelerator.unwrap_model(self.model)
        self._publisher = Publisher(self.args, engine, renderer, policy, system=shared_system(tasks))
        if self.args.record_trajectories:
            self._records = TrajectoryRecorder(Path(cast("str", self.args.output_dir)), self.accelerator.process_index)

    def _add_parts(self) -> None:
        """Add what learns, and what records."""
        args, policy = self.args, self.accelerator.unwrap_model(self.model)
        give_bias(policy)
        self._turn_rewards = TurnRewards(self._bounded_rewards(), self.reward_func_names)
        self._credit = make_credit(args, self.reward_func_names)
        self.reward_funcs = self._turn_rewards.functions
        self._depends_on_width = depends_on_width(policy.config)
        self._sharing = PromptSharing()
        self._checkpointing = Checkpointing.of(self.accelerator)
        self._chosen: dict[str, str] = {}  # what the run chose by itself, and why, as it was told
        self._values = make_value_estimator(args, policy, gamma=self._credit.gamma)
        self._reference = make_reference(self, policy)
        self._kl_control = make_kl_control(args)
        self._objective = make_objective(self, self._values, is_guarded=self._engine is not None)
        if self.use_vllm:
            send_only(self.vllm_generation, lambda name: not any(other in name for other in _UNKNOWN_TO_VLLM))
        self.add_callback(_StepEnd(self))
        if args.writes_metrics:
            self.add_callback(MetricsFile(Path(cast("str", args.output_dir)) / METRICS_FILE))
        if args.writes_metrics or self._records is not None:
            path, is_main = Path(cast("str", args.output_dir)) / RUN_FILE, self.is_world_process_zero()
            self._run_file = RunFile(path, clip_limits(self), lambda: self.health_notes, is_main=is_main)
            self.add_callback(self._run_file)
        self.add_callback(TrackioScope(args))

    def _bounded_rewards(self) -> list[Any]:
        """Return the reward functions, which stop a run on MCP servers only after a checkpoint."""
        if self._engine is None:
            return list(self.reward_funcs)
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        return [f if isinstance(f, torch.nn.Module) else self._boundary.around(f, name) for f, name in named]

    # ---- What a user calls ----

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """
        See [`~transformers.Trainer`]. Where the GPU runs out of memory, the error says in which phase of a step. With
        `resume_from_checkpoint=True`, the run goes on from the newest checkpoint that is complete, and says which one that is.

        Raises:
            [`HealthError`]: If the run was stopped because it cannot learn any more. All that follows training has been done
            by then: trackers are closed, a checkpoint is written, and the best policy that was evaluated is loaded.
        """
        if self.train_dataset is None:
            raise SettingsError("There are no tasks to train on. Pass `train_dataset` to the trainer.")
        resume_from_checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        self._upcoming, self._kept_step = (None, []), None
        self._saved.clear()
        if self._collector is not None:
            self._collector.drop_stream()
            self._collector.sampler.forget_weights()  # another run may have been at the same step, with other weights
        if self.state.global_step:  # a run after a run
            self._monitor.begin_anew()
            self._evaluations.all = []
        with self._monitor.phases("other"), project_of_trackers(self.args.project), self._monitor.gpu:
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                if self._records is not None:
                    self._records.close()
        if stopped := next((note for note in self.health_notes if note.is_fatal), None):
            raise HealthError(f"{stopped.sentence} {self._after_stop(stopped)}")
        return output

    def _after_stop(self, stopped: HealthNote) -> str:
        """Say where a run was stopped, and how to go on."""
        folder, best, since = self.args.output_dir, self._kept_step, stopped.since
        saved = f"checkpoint-{stopped.step} in {folder}" if self.args.save_strategy != "no" else "no checkpoint"
        kept = f"; step {best}, the best that was evaluated, is the policy that is kept" if best else ""
        said = [f"The run was stopped at step {stopped.step}, with {saved}{kept}."]
        if since is not None and not best:
            # That step's batch is the first that is known to be worse; the one before it was sampled by a policy that is older by so much.
            before = since - self._updates_per_batch - (self.args.max_staleness or 0)
            earlier = max((step for step in self._own_checkpoints() if step < before), default=None)
            said.append(
                f"It began at about step {since}, and no checkpoint is from before that."
                if earlier is None
                else f"It began at about step {since}: checkpoint-{earlier} is from before that."
            )
        return " ".join([*said, 'To train on all the same, set `on_unhealthy="warn"`.'])

    def _own_checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints of this run, and of those that it went on from."""
        begun = self._begun_at_step
        return [step for step in complete_checkpoints(self._checkpoint_folder) if step <= begun or step in self._saved]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See [`~transformers.Trainer`]. With `servers`, rewards by task are also kept in `evaluations.jsonl`."""
        self._evaluations.begin()
        metrics = super().evaluate(*args, **kwargs)
        numbers = {name.removeprefix("eval_"): value for name, value in metrics.items() if isinstance(value, float)}
        judged = self._evaluations.end(self.state.global_step, numbers) if self._engine is not None else None
        if judged is None:
            return metrics
        sentence = self._evaluations.fall(judged, is_best_kept=self.args.load_best_model_at_end)
        note = self._monitor.note_fall(sentence, judged.step) if sentence else None
        if note is not None:
            self._say([note])
            self.control.should_training_stop |= note.is_fatal
        if self.is_world_process_zero():
            logger.info("Evaluation at step %d: reward %s, %s", judged.step, judged.reward, numbers)
        self._evaluations.keep(judged, is_main=self.is_world_process_zero())
        return metrics

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """See [`~transformers.Trainer`]. With `servers`, no batch waits for the slowest trajectory of the one before."""
        # An iterable dataset has no end that is known, and persistent workers draw another order each time.
        is_known = has_length(dataloader.dataset) and not self.args.dataloader_persistent_workers
        if self._collector is None or not is_known:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        batches = list(self.get_eval_dataloader(cast("Any", dataloader.dataset)))
        with self._collector.all_at_once(batches):
            return super().evaluation_loop(dataloader, *args, **kwargs)

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
        if self._collector is None:
            raise SettingsError("There are no tools to roll out with: pass `servers` to the trainer.")
        self._collector.engine.check_open()
        tasks = tasks_from_rows(tasks) if isinstance(tasks, Dataset) else tasks
        self.catalog.check(*tasks)
        repeated = [task for task in tasks for _ in range(num_generations)]
        if not repeated:
            return []
        return self._collector.attempt(repeated, step=self.state.global_step, temperature=temperature)

    def follow_scripts(self, tasks: Dataset | Sequence[Task]) -> list[Trajectory]:
        """
        Attempt tasks by their scripted solutions instead of the policy, within the limits of the run.

        What cannot be done so, such as for a tool result that is cut, the policy cannot do either:
        [`~mcp_grpo.rollout.replay.why_unfit`] tells.

        Args:
            tasks ([`~datasets.Dataset`] or `Sequence[Task]`):
                Tasks with a column `solution`.

        Returns:
            `list[Trajectory]`: One per task, in their order.
        """
        if self._collector is None:
            raise SettingsError("There are no tools to follow scripts with: pass `servers` to the trainer.")
        self._collector.engine.check_open()
        tasks = tasks_from_rows(tasks) if isinstance(tasks, Dataset) else tasks
        check_solution_forms(tasks)
        self.catalog.check(*tasks)
        return self._collector.follow_scripts(tasks, step=self.state.global_step)

    def converse(
        self, opening: Task, watch: Callable[[Any], None], *, temperature: float | None = None
    ) -> AbstractContextManager[Callable[[str], tuple[StopReason, str | None]]]:
        """
        Hold a conversation with the policy as it is now, token by token as in training.

        Args:
            opening ([`Task`]):
                Its prompt comes before what the user says, such as a system message; its servers and tools are offered.
            watch (`Callable[[Message | Exchange], None]`):
                Sees each turn of the policy and each call, as they come.
            temperature (`float`, *optional*):
                Temperature of sampling; that of training if not given.

        Returns:
            `AbstractContextManager[Callable[[str], tuple[StopReason, str | None]]]`: Holds the servers while active. Gives what
            says something to the policy, and returns why its reply ended, and what broke.
        """
        if self._collector is None:
            raise SettingsError("There are no tools to talk with: pass `servers` to the trainer.")
        self._collector.engine.check_open()
        self.catalog.check(opening)
        return self._collector.converse(opening, watch, temperature=temperature)

    def measure_phases(self) -> None:
        """Log the seconds and, on a GPU, the largest memory of each phase of a step, as `profile/<phase>_seconds` and so on."""
        self._monitor.phases.measure()

    def watch_batches(self, watcher: Callable[[ScoredBatch], None]) -> None:
        """
        Show every batch that is trained on to a function, before it is learnt from.

        Args:
            watcher (`Callable[[ScoredBatch], None]`):
                Is called on the main process, with what that process has of the batch; [`TrajectoryLog`] is one.
        """
        self._watchers.append(watcher)

    def add_results(
        self,
        before: Evaluation | Mapping[str, float],
        after: Evaluation | Mapping[str, float],
        title: str = "On tasks that were not trained on:",
    ) -> None:
        """
        Note how well the policy did before and after training, for the model card.

        Without it, the card has the first and the last metrics of [`~transformers.Trainer.evaluate`], if there are any.

        Args:
            before (`Evaluation` or `Mapping[str, float]`):
                What [`evaluate`] returned before training, or metrics by name.
            after (`Evaluation` or `Mapping[str, float]`):
                The same, after it.
            title (`str`, *optional*, defaults to `"On tasks that were not trained on:"`):
                What was measured on, in a sentence.
        """
        if self._publisher is not None:
            self._publisher.add_results(before, after, title)

    def add_baselines(self, baselines: Mapping[str, float]) -> None:
        """
        Note what others score on the tasks that the policy is judged by, for the model card.

        Args:
            baselines (`Mapping[str, float]`):
                Success by name, such as [`~mcp_grpo.policy_evaluation.baselines`] returns.
        """
        if self._publisher is not None:
            self._publisher.add_baselines(baselines)

    def recall(self) -> None:
        """
        Take up the record of a run that has ended in the output folder, after [`~transformers.Trainer.save_state`]: what was logged, its
        evaluations and the step that was kept, so that the card tells of it. The weights are those that the trainer was given.
        """
        folder = Path(cast("str", self.args.output_dir))
        self.state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        self._kept_step = self.state.best_global_step if self.args.load_best_model_at_end else None
        self._evaluations.load(up_to=self.state.global_step)

    def without_secrets(self, text: str) -> str:
        """
        Hide what is private in a text: keys of servers and of the environment, and folders of this machine.

        Args:
            text (`str`):
                The text.

        Returns:
            `str`: The text without them.
        """
        return text if self._publisher is None else self._publisher.private.hide(text)

    @property
    def catalog(self) -> Catalog:
        """Return the tools of the open servers."""
        if self._engine is None:
            raise SettingsError("There are no tools: pass `servers` to the trainer.")
        return self._engine.catalog

    @property
    def evaluations(self) -> list[Judged]:
        """Return the evaluations of the run so far, with the rewards of each task."""
        return self._evaluations.all

    @property
    def health_notes(self) -> list[HealthNote]:
        """Return what was said about the health of the run so far."""
        return list(self._monitor.health.notes)

    @property
    def kept_step(self) -> int:
        """Return the step of the policy as it is now: that of the best evaluation where training has ended with it."""
        return self.state.global_step if self._kept_step is None else self._kept_step

    def close(self) -> None:
        """End every server, what is still rolled out, and vLLM in process. Safe to call more than once."""
        if self._records is not None:
            self._records.close()
        if self._collector is not None:
            self._collector.close()
        elif self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- A batch: rolled out, scored, and given what the loss needs ----

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """See [`~transformers.Trainer`]. With `max_staleness`, the samples of the next update are fetched as well."""
        if not self.args.max_staleness:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        whose, samples = self._upcoming
        if whose is not epoch_iterator:
            samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._upcoming = epoch_iterator, super().get_batch_samples(epoch_iterator, num_batches, device)[0]
        return samples, None  # there are no labels to count

    def _prepare_inputs(self, generation_batch: Any) -> Columns:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        batches = self._buffered_inputs
        if batches is before or "pixel_values" in inputs or not self._is_trimming or not self._is_sum_of_rows:
            return inputs
        rows = BatchRows(batches)  # all of one update: see `check_arguments`
        self._buffered_inputs = rows.by_prompt() if self._shares_prompts(self.model) else rows.by_length()
        return self._buffered_inputs[self._step % len(batches)]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Columns:
        if self._collector is not None:
            with self._monitor.phases("rollout"):
                self._batch = self._collector.collect(
                    inputs,
                    step=self.state.global_step,
                    group_size=self._group_size,
                    is_training=self.model.training,
                    score=self._score,
                    flat=self._flat_groups,
                    dataset=self.train_dataset,
                    next_rows=self._next_rows,
                )
            self._views.replace(self._batch.trajectories, is_training=self.model.training)
            rows = zip(self._batch.rows, self._batch.tasks, strict=True)
            inputs = [{**row, "prompt": list(task.prompt)} for row, task in rows]
        self._recorder = None
        # Only then does TRL run the policy on the batch before its loss does; the values of that pass come for free.
        self._records_values = self._values is not None and not self._is_on_policy
        if self._batch is not None:
            self._skips_pass = not self._is_on_policy and not self._reads_own_logps(self._batch)
            self._sampled = sampled_column(self._batch.trajectories, self.accelerator.device)
            self._pictures = picture_columns(self._batch.trajectories, self._vision, self.accelerator.device)
        try:
            with self._monitor.phases("scoring"):
                columns = super()._generate_and_score_completions(inputs) | self._pictures
        finally:
            self._records_values, self._skips_pass, self._sampled, self._pictures = False, False, None, {}
        if self.model.training:
            seen = ("reward", "frac_reward_zero_std")
            self._monitor.seen |= {key: self._metrics["train"][key][-1] for key in seen}
        if self._batch is not None:
            columns |= self._rollout_columns(self._batch, columns)
        if self._credit.mode != "group":
            columns |= self._turn_columns(columns)
        if self._batch is not None and self._collector is not None and self.model.training:
            self._monitor.seen["is_flat"] = float(self._is_flat())
            self._collector.learn(self._batch, self._rewards, self.reward_weights, self._group_size)
            self._log_batch()
            self._show_batch(self._batch.trajectories, columns)
            columns[ROW] = torch.arange(len(self._batch.trajectories), device=self.accelerator.device)
        return columns

    def _reads_own_logps(self, batch: Batch) -> bool:
        """Return whether something reads what the policy itself gives for a batch before its loss does; the same on all processes."""
        if self.args.old_logps == "trainer" or self._values is not None:
            return True
        if not self.args.replay_solutions:
            return False
        return any(gather_object([any(trajectory.is_scripted for trajectory in batch.trajectories)]))

    def _show_batch(self, trajectories: Sequence[Trajectory], columns: Columns) -> None:
        """Show a batch to what records it and, on the main process, to those who watch."""
        size = len(trajectories)
        rewards = self._rewards[self.accelerator.process_index * size :][:size].tolist()
        batch = ScoredBatch(
            step=self.state.global_step,
            trajectories=trajectories,
            rewards=[dict(zip(self.reward_func_names, row, strict=True)) for row in rewards],
            columns=columns,
        )
        if self._records is not None:
            self._records.begin(batch)
        for watcher in self._watchers if self.is_world_process_zero() else []:
            watcher(batch)

    @property
    def _next_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the next batch, if it is to be rolled out meanwhile."""
        _, samples = self._upcoming
        is_last = self.state.global_step + 1 >= self.state.max_steps
        return samples[0] if self.model.training and samples and not is_last else []

    def _generate(self, prompts: list) -> tuple:
        if self._batch is None:
            return super()._generate(prompts)
        self._last_loaded_step = (
            self.state.global_step
        )  # or TRL would send the weights, too, perhaps while others sample
        # TRL would parse each completion as one message. If prompts are no messages it only decodes, and gets real ones.
        output = super()._generate([task.task_id for task in self._batch.tasks])
        return (*output[:COMPLETIONS], _messages(self._batch.trajectories), *output[COMPLETIONS + 1 :])

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        if self._scored and not self._is_scoring:
            rewards = self._recalled_rewards()
        else:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards = rewards
        if self.model.training and not (self._is_scoring and self._scored):  # a batch is compared in one way only
            self._credit.look(
                self._turn_rewards.given, lambda found: self.accelerator.gather(found.to(rewards.device))
            )
        if self._collector is None:
            return rewards
        self._boundary.check(gather_object, self._save_before_stop)
        trajectories = [row["trajectory"] for row in inputs]
        if self.log_completions:
            for name, values in trajectory_columns(trajectories).items():
                self._pending_extra_logs[name].extend(values)
        left_out = [not t.is_learnt_from or (t.is_cut and self.args.truncation == "mask") for t in trajectories]
        is_left_out = self.accelerator.gather(torch.tensor(left_out, device=rewards.device))
        rewards = rewards.masked_fill(is_left_out.unsqueeze(1), torch.nan)
        if not self.model.training:
            attempts = gather_object([(each.task.task_id, each.task.kind, each.is_cut) for each in trajectories])
            task_ids, kinds, cut = zip(*attempts, strict=True)
            self._evaluations.add(task_ids, rewards, self.reward_weights, self._solved(trajectories), kinds, cut)
        return rewards

    def _solved(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """Return whether each attempt of all ranks did its task, where it is known what that is, and record the share."""
        if self._is_success is None:
            return []
        own = [(is_solved(trajectory, self._is_success), trajectory.is_failed) for trajectory in trajectories]
        found: list[tuple[bool, bool]] = gather_object(own)
        counted = [is_done for is_done, is_failed in found if not is_failed]
        if counted:
            self._record({"success": sum(counted) / len(counted)})
        return [is_done for is_done, _ in found]

    def _score(self, slots: list[int], rows: list[dict[str, Any]], trajectories: list[Trajectory]) -> torch.Tensor:
        """Return what groups are compared by, of all ranks: rewards, or with advantages of turns their returns."""
        inputs = [{**row, "trajectory": t} for row, t in zip(rows, trajectories, strict=True)]
        prompts, ids = [list(t.task.prompt) for t in trajectories], [list(t.completion_ids) for t in trajectories]
        self._is_scoring, size = True, len(slots)
        try:
            rewards = self._calculate_rewards(inputs, prompts, _messages(trajectories), ids)
            own = slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)
            turns, extra = self._turn_rewards.given, self._pending_extra_logs
            self._scored.keep(slots, trajectories, self._rewards[own], turns, extra, self._pending_metrics)
        finally:
            self._is_scoring = False
            self._pending_extra_logs.clear()
            self._pending_metrics.clear()
        if self._credit.mode == "group":
            return rewards
        is_left_out = rewards[own].isnan().all(dim=1).tolist()
        counts = [0 if left_out else t.num_turns for left_out, t in zip(is_left_out, trajectories, strict=True)]
        given = self._turn_rewards.per_turn(rewards[own], self.reward_weights, counts)
        lengths = torch.tensor(counts, device=given.device)
        returns = returns_to_go(given, lengths, self._credit.gamma)
        returns = returns.masked_fill(torch.arange(given.shape[1], device=given.device) >= lengths[:, None], torch.nan)
        return self.accelerator.gather(self.accelerator.pad_across_processes(returns, dim=1, pad_index=torch.nan))

    def _flat_groups(self, rows: torch.Tensor) -> list[int]:
        """Return the groups that teach nothing, from what [`_score`] has returned."""
        if self._credit.mode == "group":
            return flat_groups(rows, self.reward_weights, self._group_size)
        return flat_turns(rows, self._group_size)

    def _recalled_rewards(self) -> torch.Tensor:
        """Return the rewards of the batch at hand as they were when its groups were compared, and log what came with them."""
        rewards, self._turn_rewards.given, extra, metrics = self._scored.take()
        for pending, found in ((self._pending_extra_logs, extra), (self._pending_metrics, metrics)):
            for name, values in found.items():
                pending[name].extend(values)
        return self.accelerator.gather(rewards)

    def _rollout_columns(self, batch: Batch, columns: Columns) -> Columns:
        """Return what the loss needs to know of a batch beside what TRL tells it, and record what happened in it."""
        metrics = batch.reduced_metrics(self.accelerator)
        self._record(metrics)
        if not self.catalog.tools:  # that none is called says nothing
            self._monitor.seen.pop("tools/call_frequency", None)
        try:
            check_failures(batch.trajectories, metrics["rollout/failed_fraction"], self.args.max_failed_fraction)
        except RolloutError:
            self._save_before_stop()
            raise
        added = token_columns(batch.trajectories, like=columns["completion_ids"])
        added["is_sampled"] = sampled_column(batch.trajectories, self.accelerator.device)
        added |= row_columns(
            batch.trajectories,
            metrics["rollout/left_out_fraction"],
            loss_type=self.loss_type,
            truncation=self.args.truncation,
            device=self.accelerator.device,
        )
        if "is_scripted" in added and "old_per_token_logps" in columns:
            added["trainer_logps"] = columns["old_per_token_logps"]
        if self.args.old_logps == "sampler":
            added["old_per_token_logps"] = columns["sampling_per_token_logps"]
        if self.args.bootstrap_steps:
            added |= bootstrap_columns(columns | added, metrics.get("tools/valid_rate"), self.accelerator)
            self._record({"bootstrap/is_needed": added["needs_bootstrap"].item()})
        return added

    def _save_before_stop(self) -> str:
        """Save a checkpoint to go on from once what is wrong has been mended, and say where it is."""
        if not self.is_in_train or not self.state.global_step or self.args.save_strategy == "no":
            return "There is no checkpoint to go on from."
        self._save_checkpoint(self.model, trial=None)
        return (
            f"The run was stopped with checkpoint-{self.state.global_step} in {self.args.output_dir}: mend what is wrong, and "
            "resume from it."
        )

    def _turn_columns(self, columns: Columns) -> Columns:
        """Return what is known of each turn before the loss, and advantages by it."""
        args, size = self.args, len(columns["completion_ids"])
        rewards = self._rewards[self.accelerator.process_index * size :][:size]
        turn_ids = columns.get("turn_ids")
        if turn_ids is None:
            turn_ids = turns_of(columns["completion_mask"], columns.get("tool_mask", 1))
        turn_ids = turn_ids.masked_fill(rewards.isnan().all(dim=1, keepdim=True), -1)
        counts = (turn_ids.amax(dim=1) + 1).tolist()
        added: Columns = turn_columns(
            turn_ids,
            self._turn_rewards.per_turn(rewards, self.reward_weights, counts),
            self._group_size,
            gamma=self._credit.gamma,
            accelerator=self.accelerator,
            is_scaled=self.scale_rewards != "none",
            value_weight=0.0 if self._values is None else self._values.weight,
        )
        if self.model.training:
            # Turns may teach though all totals are the same, and values without others to compare with.
            del self._monitor.seen["frac_reward_zero_std"]
            if self._values is None:
                is_flat = self.accelerator.gather(added["turn_advantages"].abs().max()).max() == 0
                self._monitor.seen["frac_reward_zero_std"] = float(is_flat)
        if args.truncation == "bootstrap":
            lacks_end = ends_cut(columns["completion_ids"], columns["completion_mask"], self.eos_token_ids)
            added |= {"is_cut": columns.get("is_cut", lacks_end), "ends_turn": 1 - lacks_end}
        if self._values is not None:  # fixed now: what is learnt from a batch must not change its own weight
            added["mixing_weight"] = torch.tensor(self._values.mixing.value, device=turn_ids.device)
        if self._recorder is not None:
            added["old_values"] = self._recorder.values()
            added["old_values_after"] = self._recorder.values_after()
        added["advantages"] = to_tokens(added["turn_advantages"] / added["advantage_scale"], turn_ids)
        return added

    def _is_flat(self) -> bool:
        """Return whether no attempt of a batch did better than the others it is compared with."""
        if "frac_reward_zero_std" in self._monitor.seen:
            return self._monitor.seen["frac_reward_zero_std"] == 1
        # A value head compares all attempts with each other, and turns with turns.
        totals = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        return not self._turn_rewards.given and bool((totals == totals[0]).all())

    # ---- The loss ----

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Under autocast an adapter's float32 is cast to bfloat16, and so is what peft casts to float32 for it, bit by bit
        # what it was. Without dropout, that there and back is only time.
        is_bf16 = self.accelerator.mixed_precision == "bf16"
        is_idle = self._objective.is_guarded and is_bf16 and has_plain_adapter(self.model)
        with self._monitor.phases("loss"), disable_input_dtype_casting(self.model, active=is_idle):
            return super().training_step(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Columns) -> torch.Tensor:
        objective, is_training = self._objective, self.model.training
        if objective.is_plain:
            return super()._compute_loss(model, inputs)
        self._records_values = self._values is not None
        self._sampled = inputs.get("is_sampled")
        try:
            output = policy_pass(self, model, inputs)
        finally:
            self._sampled = None
        logps, recorder = output[0], self._recorder
        settled = objective.settle(
            inputs,
            logps,
            recorder,
            learn=is_training and self._is_first_pass,
            is_on_policy=self._is_first_pass and not (is_training and self.args.max_staleness),
        )
        if self._records is not None and is_training and self._is_first_pass:
            self._records.add_pass(settled.inputs, logps, None if recorder is None else recorder.values())
        strength = objective.bootstrap.strength(self.state.global_step) if is_training else 0.0
        if strength and not inputs.get("needs_bootstrap"):  # in this order: reading a tensor waits for the device
            strength = 0.0
        # The policy term and the KL term are means over rows for some losses; the entropy bonus is not.
        beta = float(self.beta * inputs.get("row_scale", 1.0))
        with (
            loss_weights(self, beta=beta, more_entropy=objective.bootstrap.entropy_coef * strength),
            self._given(output),
        ):
            loss = super()._compute_loss(model, settled.inputs)
            without_bonus = without_bonuses(self, loss.detach())
            denominator = LossDenominator.of(self, settled.inputs)
        if objective.is_guarded:
            policy_loss = objective.policy_term(
                without_bonus, logps, settled.inputs, beta=beta, denominator=denominator
            )
            # What is gated has an advantage of 0 and is never clipped as well.
            sums = settled.sums | {"idle": settled.sums["idle"] + clipped_fraction(self) * settled.sums["active"]}
            self._record(settled.metrics)
            if is_training:
                entropy = self._metrics["train"]["entropy"][-1]
                self._monitor.add_pass(sums, settled.quantiles, policy_loss=policy_loss, entropy=entropy)
            else:
                self._record(pass_metrics(sums, settled.quantiles, policy_loss, self.accelerator))
        terms = objective.terms(
            settled.inputs,
            logps,
            recorder,
            beta=beta,
            denominator=denominator,
            strength=strength,
            learn=is_training,
        )
        if "value" in terms and not is_training:
            value_loss = terms["value"].detach() / objective.value_loss_coef if objective.value_loss_coef else 0.0
            self._record({"value/loss": self.accelerator.reduce(torch.as_tensor(value_loss), "mean").item()})
        return loss + sum(terms.values())

    @contextmanager
    def _given(self, output: Any) -> Generator[None]:
        """Give TRL's loss the output of a pass instead of letting it run another one."""
        self._pass = output
        try:
            yield
        finally:
            self._pass = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self._pass is not None:
            return self._pass
        if self._skips_pass:
            self._skips_pass = False
            return None, None, None
        kwargs |= self._pictures
        is_text = not any(value is not None for name, value in kwargs.items() if name not in _OF_TEXT)
        if self._is_trimming and is_text:
            make = self._made_rows(model)
        else:
            called = self._made_whole(model, is_text=is_text)
            make = lambda num_tokens: called  # noqa: E731
        model = AsSeen(make, self._views, logits_to_keep) if self._views else make(logits_to_keep)
        if self._sampled is not None:
            model = SampledOnly(model, self._sampled, logits_to_keep)
        if self._records_values:
            self._records_values = False
            model = self._recorder = ValueRecorder(model, logits_to_keep)
        return super()._get_per_token_logps_and_entropies(
            cast(Any, model), input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _made_whole(self, model: Any, *, is_text: bool) -> Any:
        """Return what to call instead of a model on rows as they are."""
        if (
            self._vision is not None and not is_text
        ):  # what pictures take is not known, so checkpointing stays as it is
            return Seeing(model, self._vision, cast("int", self._tokenizer.pad_token_id))
        return self._checkpointing.around(model) if self._objective.is_guarded else model

    def _made_rows(self, model: Any) -> Callable[[int], Any]:
        """Return what makes a model that spends no time on padding and shared prompts, given the width of completions."""
        called = LabelledOnly(model, self._checkpointing.around(model))
        unpadded = Unpadded(called, multiple=int(self.pad_to_multiple_of or 1))
        is_shared = self._shares_prompts(model)
        return lambda num_tokens: SharedPrompts(called, unpadded, num_tokens) if is_shared else unpadded

    def _shares_prompts(self, model: Any) -> bool:
        """Return whether a model runs what several rows of a pass begin with once."""
        with self.accelerator.autocast():
            return not self.pad_to_multiple_of and self._sharing.is_possible(model)

    @property
    def _is_trimming(self) -> bool:
        """Return whether passes are only as wide as their longest row."""
        return self._objective.is_guarded and not self._depends_on_width

    @property
    def _is_sum_of_rows(self) -> bool:
        """Return whether an update is the same however its rows are spread over passes, unless one is over `kl_hard_cap`."""
        args = self.args
        has_means = self.loss_type == "bnpo" or self._entropy_bonus_enabled or args.bootstrap_steps > 0
        looks_around = args.top_entropy_quantile < 1 or self.aux_loss_enabled
        return not has_means and not looks_around

    @property
    def _generate_every(self) -> int:
        """Return the micro-batches from one generation to the next."""
        return cast("int", self.args.steps_per_generation) * self.num_iterations

    @property
    def _updates_per_batch(self) -> int:
        return max(1, self._generate_every // self.args.gradient_accumulation_steps)

    @property
    def _is_on_policy(self) -> bool:
        """Return whether each batch is used for one update only."""
        return self.args.gradient_accumulation_steps % self._generate_every == 0

    @property
    def _is_first_pass(self) -> bool:
        """Return whether the batch at hand is used for the first time."""
        steps = cast("int", self.args.steps_per_generation)
        return not self.model.training or self._step % self._generate_every < steps

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    # ---- The optimizer, and the end of a step ----

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if self._values is not None and isinstance(optimizer, torch.optim.Optimizer):
            own = list(self._values.head.parameters())
            ids = {id(parameter) for parameter in own}
            if {id(parameter) for parameter in optimizer.param_groups[-1]["params"]} == ids:
                return optimizer  # made before
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
            optimizer.add_param_group({"params": own, "lr": self.args.value_learning_rate, "weight_decay": 0.0})
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._values is None:
            return super()._clip_grad_norm(model)
        # By itself: clipped together, a large gradient of the value head would shrink the policy's step.
        own = list(self._values.head.parameters())
        torch.nn.utils.clip_grad_norm_(own, self.args.max_grad_norm)
        gradients = [parameter.grad for parameter in own]
        try:
            for parameter in own:
                parameter.grad = None
            return super()._clip_grad_norm(model)
        finally:
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient

    def _end_step(self) -> bool:
        """Do what follows an update: KL control, the mixing weight, the reference. Return whether to train on."""
        step = self.state.global_step
        if self._values is not None:
            self._record(self._values.end_step(lambda sums: self.accelerator.reduce(sums, reduction="sum")))
        of_passes = self._monitor.end_passes(self.accelerator)
        self._record(of_passes)
        if self._kl_control is not None and "kl/active" in of_passes:
            self._kl_control.update(of_passes["kl/active"])
            self.beta = self._kl_control.beta
            self._record({"kl/beta": self.beta})
        if self._reference is not None and step % self.args.ref_sync_steps == 0:
            self._reference.sync()
            distance, num_differing = self._reference.difference()
            self._record({"ref/distance": distance, "ref/num_differing": num_differing})
        self._record(self._monitor.end_step())
        self._tell_choices()
        self._recorder = None  # and with it what is left of the graph
        if self._records is not None and self._step % self._generate_every == 0:
            self._records.end()
        if not self._objective.is_guarded:
            self._monitor.seen.clear()
            return True
        notes = self._monitor.check_health(
            step,
            is_on_policy=self._is_on_policy and not self.args.max_staleness,
            is_learning_calls=self._objective.bootstrap.strength(step) > 0,
        )
        self._say(notes)
        self._record({f"health/{name}": 1.0 for name in self._monitor.health.showing}, is_seen=False)
        return not any(note.is_fatal for note in notes)

    def _tell_choices(self) -> None:
        """Say what the run has chosen by itself, and why, after the first step and where that has changed."""
        found = {"advantages": self._credit.sentence, "prompts": self._sharing.sentence}
        chosen = {about: sentence for about, sentence in found.items() if sentence is not None}
        chosen |= self._checkpointing.sentences
        if chosen == self._chosen:
            return
        new = [sentence for about, sentence in chosen.items() if sentence != self._chosen.get(about)]
        self._chosen = chosen
        if self.is_world_process_zero():
            tell(logger, f"Step {self.state.global_step}: {' '.join(new)}")
        if self._run_file is not None:
            self._run_file.note(chosen)

    def _record(self, metrics: Mapping[str, float], *, is_seen: bool = True) -> None:
        """Log metrics with those of TRL, as means over `logging_steps`."""
        for key, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][key].append(value)
        if self.model.training and is_seen:
            self._monitor.seen |= metrics

    def _say(self, notes: Sequence[HealthNote]) -> None:
        """Say what is wrong with the run, once for all processes."""
        for note in notes if self.is_world_process_zero() else []:
            logger.warning("Step %d: %s", note.step, note.sentence)
        if notes and self._run_file is not None:
            self._run_file.write()

    def _log_batch(self) -> None:
        """Send the metrics of a batch to trackers at once: the step takes as long again, and may fail."""
        # After it, they are logged as means over `logging_steps`; so these have names of their own.
        metrics = {f"batch/{name}": values[-1] for name, values in self._metrics["train"].items() if values}
        trackers = (MetricsFile, *INTEGRATION_TO_CALLBACK.values())
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, trackers):
                callback.on_log(self.args, self.state, self.control, logs=dict(metrics), model=self.model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See [`~trl.GRPOTrainer`]."""
        for name in ("prompt", "completion") if self.log_completions else ():
            shown = self._logs[name]
            for index, messages in enumerate(shown):
                shown[index] = table_messages(messages)
        if not self.model.training:
            weigh_batches(self._metrics["eval"], self._evaluations.batch_sizes)
        with tables_as_text(), inert_tables(), project_of_trackers(self.args.project), any_text_in_terminal():
            super().log(logs, start_time)

    # ---- What a run goes on from ----

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(cast("str", output_dir or self.args.output_dir))
        policy, own = self.accelerator.unwrap_model(self.model), None
        if self._values is not None and (state_dict is not None or not is_peft_model(policy)):
            # In a file of its own: what serves the policy does not know it.
            state_dict, own = without_value_head(self.model.state_dict() if state_dict is None else state_dict)
        with self._training_template():
            super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        if self._publisher is not None:
            self._publisher.write_policy_file(folder)
        if self._values is not None:
            save_value_head(self._values.head, folder, own)
        if "ref" in getattr(policy, "peft_config", {}):
            # In a folder beside the adapter, it is all that a resumed run would load: the policy would silently start
            # from zero. The reference is made anew from the adapter one starts with, and moved by its own file.
            shutil.rmtree(folder / "ref", ignore_errors=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:  # a search over settings has folders of its own
            return super()._save_checkpoint(model, trial)
        if self.accelerator.is_local_main_process:
            begin_checkpoint(self._checkpoint_folder)
        self.accelerator.wait_for_everyone()
        folder = self._checkpoint_folder / UNFINISHED
        self._saved.add(self.state.global_step)
        final = save_checkpoint_apart(self, lambda: super(MCPGRPOTrainer, self)._save_checkpoint(model, trial), folder)
        self.accelerator.wait_for_everyone()
        # First where the weights are; then on machines that do not see that disk, and have files of their own processes.
        for is_finishing in (self.args.should_save, self.accelerator.is_local_main_process):
            if is_finishing and (folder / final.name).is_dir():
                finish_checkpoint(folder / final.name, final)
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            delete_old_checkpoints(self)

    @property
    def _checkpoint_folder(self) -> Path:
        return Path(cast("str", self.args.output_dir))

    def _checkpoint_to_resume(self, resume_from: Any) -> Any:
        """Choose the checkpoint to go on from, the same on every process, and say which one it is."""
        found, sentence = checked_checkpoint(resume_from, self._checkpoint_folder)
        if sentence and self.is_world_process_zero():
            logger.warning("%s", sentence)
        return broadcast_object_list([found])[0]

    def _training_template(self) -> Any:
        if self._publisher is None:
            return nullcontext()
        return self._publisher.training_template(self._tokenizer, self.processing_class)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._values is not None:
            load_value_head(self._values.head, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._values is not None and self.state.best_model_checkpoint:
            load_value_head(self._values.head, self.state.best_model_checkpoint)
        self._kept_step = self.state.best_global_step
        if self._collector is not None:
            self._collector.sampler.forget_weights()  # it has the last one's

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self._engine is not None and self.args.load_best_model_at_end:
            self.control.should_save = True  # also between two checkpoints
        return is_best

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._reference is not None:
            self._reference.save(output_dir)
        state = {
            "step": self._step,
            "global_step": self.state.global_step,
            "num_rollouts": self._collector and self._collector.num_rollouts,
            "turns": self._engine and self._engine.turns.state_dict(),
            "choice": self._collector and self._collector.choice and self._collector.choice.state_dict(),
            "under_way": self._collector and self._collector.under_way(self.state.global_step),
            "health": self._monitor.health.state_dict(),
            "kl_control": self._kl_control and self._kl_control.state_dict(),
            "values": self._values and self._values.state_dict(),
            "credit": self._credit.state_dict(),
            # A batch that is still to be learnt from: rolled out again, it would be another one.
            "batch": self._buffered_inputs if self._step % self._generate_every else None,
        }
        accelerator = self.accelerator
        save_state(output_dir, state, rank=accelerator.process_index, num_processes=accelerator.num_processes)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._reference is not None:
            self._reference.load(checkpoint)
        accelerator = self.accelerator
        state = load_state(
            checkpoint,
            rank=accelerator.process_index,
            num_processes=accelerator.num_processes,
            device=accelerator.device,
        )
        if state is None:
            return
        self._step, self._buffered_inputs = state["step"], state["batch"]
        if state["batch"] is None:  # none, or one that does not fit, or was not published: a new one is rolled out
            self._step -= self._step % self._generate_every
        if self._collector is not None and state["turns"]:
            self._collector.num_rollouts = state["num_rollouts"]
            self._collector.engine.turns.load_state_dict(state["turns"])
            self._collector.resume(self._rows_of(state.get("under_way") or []))
            if self._collector.choice is not None and state.get("choice"):
                self._collector.choice.load_state_dict(state["choice"])
        self._monitor.health.load_state_dict(state["health"])
        self._evaluations.load(up_to=state["global_step"])
        if self._kl_control is not None and state["kl_control"]:
            self._kl_control.load_state_dict(state["kl_control"])
            self.beta = self._kl_control.beta
        if self._values is not None and state["values"]:
            self._values.load_state_dict(state["values"])
        if "credit" in state:  # not in those of earlier versions
            self._credit.load_state_dict(state["credit"])

    def _rows_of(self, task_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of a group for each task; none if the dataset does not have them all."""
        if not task_ids:
            return []
        dataset = cast("Dataset", self.train_dataset)
        places = {str(task_id): place for place, task_id in enumerate(dataset["task_id"])}
        if missing := [task_id for task_id in task_ids if task_id not in places]:
            if self.is_world_process_zero():
                logger.warning(
                    "Tasks that were under way at the checkpoint are not in the dataset any more, so that the run goes on with the "
                    "next batch: %s.",
                    ", ".join(missing),
                )
            return []
        rows = [dataset[places[task_id]] for task_id in task_ids]
        return [dict(row) for row in rows for _ in range(self.num_generations)]

    # ---- What others see ----

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """See [`~trl.GRPOTrainer`]. The card names servers, tools and tasks, and shows curves, results and the command."""
        super().create_model_card(model_name, dataset_name, *args, **kwargs)
        if self._publisher is None or not self.is_world_process_zero():
            return
        self._publisher.write_card(
            model_name=model_name or self._publisher.folder.name,
            model_id=self.hub_model_id or self._publisher.folder.name,
            dataset_name=dataset_name,
            dataset=self.train_dataset,
            log_history=self.state.log_history,
            reward_names=self.reward_func_names,
            kept_step=self.kept_step,
            num_steps=self.state.global_step,
            evaluations=self.evaluations,
            health=self.health_notes,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See [`~transformers.Trainer`]. The model card and its curves are written, too."""
        super().save_model(output_dir, _internal_call)
        if _internal_call or self._publisher is None or not self.is_world_process_zero():
            return
        folder = self._publisher.folder
        self.create_model_card(model_name=(self.args.hub_model_id or folder.name).split("/")[-1])
        if output_dir is not None and Path(output_dir).resolve() != folder.resolve():
            for name in ("README.md", CURVES_FILE, POLICY_FILE):
                if (folder / name).is_file():
                    shutil.copy(folder / name, output_dir)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """
        See [`~transformers.Trainer`]. Uploaded are the policy, its tokenizer with the chat template of training, and the card
        with its curves; nothing else that is in the folder.
        """
        with self._clean_uploads():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with self._clean_uploads(), self._training_template():
            super()._push_from_checkpoint(checkpoint_folder)

    def _clean_uploads(self) -> Any:
        return nullcontext() if self._publisher is None else self._publisher.clean_uploads()


class _StepEnd(TrainerCallback):
    """Tells the trainer how far a run and its updates are."""

    def __init__(self, trainer: MCPGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begun_at_step = state.global_step
        if self._trainer._records is not None:
            self._trainer._records.forget_from(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._monitor.phases.begin("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._monitor.phases.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer._end_step():
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
        if self._trainer._objective.is_guarded and control.should_training_stop and args.eval_strategy != "no":
            control.should_evaluate = True  # or nobody would know how well the last policy does


def _messages(trajectories: Sequence[Trajectory]) -> list[list[dict[str, Any]]]:
    return [list(t.messages) or [{"role": "assistant", "content": ""}] for t in trajectories]
