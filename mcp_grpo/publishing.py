"""What is written when a policy is saved, what a run goes on from, and what is shown to others."""

import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from huggingface_hub import get_token
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from mcp_grpo._trl import tables_as_text
from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.evaluation import (
    EVALUATIONS_FILE,
    Evaluation,
    Judged,
    best_of,
    change,
    comparison_rows,
    read_judged,
    write_judged,
)
from mcp_grpo.hub import (
    POLICY_FILE,
    PolicyFacts,
    PrivateValues,
    hub_name,
    publishable_copy,
    quantization_of,
    run_command,
    uploads_of,
    write_facts,
)
from mcp_grpo.learning import Health, HealthNote, load_value_head, save_value_head, without_value_head
from mcp_grpo.learning.value_head import VALUE_HEAD_FILE
from mcp_grpo.monitor import (
    METRICS_FILE,
    MetricsFile,
    RunSummary,
    TrackioScope,
    plot_curves,
    project_of_trackers,
    rewrite_card,
    trajectory_columns,
)
from mcp_grpo.objective import ObjectiveTrainer
from mcp_grpo.rollout import Renderer, RolloutEngine
from mcp_grpo.types import Trajectory


STATE_FILE = "objective-{rank}.pt"  # in a checkpoint, beside those of the optimizer and the random state
CURVES_FILE = "curves.png"
KINDS = ("family", "difficulty")  # columns that say what kind of task a row is
MAX_KINDS = 40  # with more, a column names tasks rather than kinds
FALLING = "falling_evaluation"  # the sign of ill health that evaluations show

logger = logging.getLogger(__name__)


class PublishingTrainer(ObjectiveTrainer):
    """Checkpoints that hold all that a run goes on from, trackers, and folders that can be shown to others."""

    _tag_names = ["trl", "grpo", "mcp-grpo"]  # noqa: RUF012 (TRL's own attribute)
    _name = "MCP-GRPO"

    _engine: RolloutEngine | None
    _renderer: Renderer
    _tokenizer: Any
    _num_rollouts: int
    _trajectories: list[Trajectory]
    _results: tuple[str, list[tuple[str, float, float]]] = ("", [])

    def __init__(self, model: Any, reward_funcs: Any, args: MCPGRPOConfig, train_dataset: Any, **kwargs: Any) -> None:
        if self._engine is not None and args.keeps_best(kwargs.get("eval_dataset")):
            args.load_best_model_at_end = True
            args.metric_for_best_model = args.metric_for_best_model or "eval_reward"
            args.greater_is_better = args.greater_is_better is not False
        self._rewards_by_task: dict[str, list[float]] = defaultdict(list)  # of the evaluation under way
        self.evaluations: list[Judged] = []
        self._kept_step: int | None = None
        super().__init__(model, reward_funcs, args, train_dataset, **kwargs)
        if args.writes_metrics:
            self.add_callback(MetricsFile(Path(cast("str", args.output_dir)) / METRICS_FILE))
        self.add_callback(TrackioScope(args))

    # ---- What others see ----

    def add_results(
        self,
        before: Evaluation | Mapping[str, float],
        after: Evaluation | Mapping[str, float],
        title: str = "On tasks that were not trained on:",
    ) -> None:
        """
        Note how well the policy did before and after training, for the model card.

        Without it, the card has the first and the last figures of [`~transformers.Trainer.evaluate`], if there are any.

        Args:
            before (`Evaluation` or `Mapping[str, float]`):
                What [`evaluate`] returned before training, or figures by name.
            after (`Evaluation` or `Mapping[str, float]`):
                The same, after it.
            title (`str`, *optional*, defaults to `"On tasks that were not trained on:"`):
                What the figures were measured on, in a sentence.
        """
        if isinstance(before, Evaluation) and isinstance(after, Evaluation):
            rows = comparison_rows(before, after)
        else:
            first, last = cast("Mapping[str, float]", before), cast("Mapping[str, float]", after)
            rows = [(name, first[name], last[name]) for name in first if name in last]
        self._results = title, rows

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """See [`~trl.GRPOTrainer`]. The card names servers, tools and tasks, and shows curves, results and the command."""
        super().create_model_card(model_name, dataset_name, *args, **kwargs)
        if self._engine is None or not self.is_world_process_zero():
            return
        folder = Path(cast("str", self.args.output_dir))
        card = folder / "README.md"
        rewrite_card(
            card,
            self._engine.catalog,
            model_name=model_name or folder.name,
            model_id=self.hub_model_id or folder.name,
            is_adapter=bool(is_peft_model(self.model)),
            base_model=hub_name(self.model.config._name_or_path),
            summary=self._summary(folder, dataset_name),
        )
        card.write_text(self._private_values.hide(card.read_text()))
        write_facts(folder, self._facts)

    def _summary(self, folder: Path, dataset_name: str | None) -> RunSummary:
        rows, history = self.train_dataset, self.state.log_history
        title, results = self._results
        evaluations = [entry for entry in history if "eval_reward" in entry]
        if not results and len(evaluations) > 1:
            first = evaluations[0]
            last = next((entry for entry in evaluations[1:] if entry["step"] == self.kept_step), evaluations[-1])
            names = [
                "eval_reward",
                *(name for name in first if name.startswith("eval_rewards/") and name.endswith("/mean")),
            ]
            results = [(name.removeprefix("eval_"), first[name], last[name]) for name in names if name in last]
            title = f"On the evaluation set, at step {first['step']} and at step {last['step']}:"
        # The only reward function there is has the curve of the reward itself.
        same = {f"rewards/{name}/mean" for name in self.reward_func_names if len(self.reward_func_names) == 1}
        logged = {key for entry in history for key in entry if key.startswith("rewards/") and key.endswith("/mean")}
        panels = {
            "Reward": ["reward", *sorted(logged - same)],
            "Share of valid calls, of answers": ["tools/valid_rate", "stop/answered"],
            "Calls and turns of a trajectory": ["tools/call_frequency", "turns/mean"],
            "Entropy and divergence": ["entropy", "kl"],
        }
        if has_curves := any("reward" in entry for entry in history):
            plot_curves(history, panels, folder / CURVES_FILE)
        columns = rows.column_names if isinstance(rows, Dataset) else ()
        kinds = {name: Counter(map(str, cast(Any, rows)[name])) for name in KINDS if name in columns}
        return RunSummary(
            num_tasks=len(rows) if isinstance(rows, Dataset) else None,
            kinds={name: dict(sorted(counts.items())) for name, counts in kinds.items() if len(counts) <= MAX_KINDS},
            dataset_name=dataset_name,
            results=results,
            results_title=title,
            has_curves=has_curves,
            num_steps=self.state.global_step,
            command=run_command(),
            quantization=quantization_of(self.accelerator.unwrap_model(self.model)),
        )

    @property
    def _facts(self) -> PolicyFacts:
        assert self._engine
        return PolicyFacts(
            chat_template_kwargs=self._renderer.chat_template_kwargs,
            tools=[tool.schema for tool in self._engine.catalog.tools],
            catalog_hash=self._engine.catalog.hash,
            quantization=quantization_of(self.accelerator.unwrap_model(self.model)),
        )

    @property
    def _private_values(self) -> PrivateValues:
        assert self._engine
        args, base = self.args, self.model.config._name_or_path
        secrets = [args.hub_token, get_token(), *self._engine.secrets]
        return PrivateValues.of(secrets, [args.output_dir, args.cassette, base if Path(base).exists() else None])

    def without_secrets(self, text: str) -> str:
        """
        Hide what is private in a text: keys of servers and of the environment, and folders of this machine.

        Args:
            text (`str`):
                The text.

        Returns:
            `str`: The text without them.
        """
        return text if self._engine is None else self._private_values.hide(text)

    @contextmanager
    def _clean_uploads(self) -> Iterator[None]:
        """In which only what makes up a policy is uploaded, with nothing private in it."""
        if self._engine is None:
            yield
            return
        output_dir, private = Path(cast("str", self.args.output_dir)), self._private_values

        def copy(folder: Path, target: Path) -> None:
            is_checkpoint = folder.resolve() != output_dir.resolve()
            publishable_copy(
                folder,
                target,
                private=private,
                is_checkpoint=is_checkpoint,
                with_value_head=self.args.push_value_head,
            )

        with uploads_of(copy, beside=output_dir):
            yield

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """
        See [`~transformers.Trainer`]. Uploaded are the policy, its tokenizer with the chat template of training, and the card
        with its curves; the value head with `push_value_head=True`; nothing else that is in the folder.
        """
        with self._clean_uploads():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        head, output_dir = Path(checkpoint_folder) / VALUE_HEAD_FILE, Path(cast("str", self.args.output_dir))
        if self.args.push_value_head and head.is_file() and self.is_world_process_zero():
            shutil.copy(head, output_dir)
        with self._clean_uploads(), self._training_template():
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See [`~transformers.Trainer`]. The model card and its curves are written, too."""
        super().save_model(output_dir, _internal_call)
        if _internal_call or self._engine is None or not self.is_world_process_zero():
            return
        folder = Path(cast("str", self.args.output_dir))
        self.create_model_card(model_name=(self.args.hub_model_id or folder.name).split("/")[-1])
        if output_dir is not None and Path(output_dir).resolve() != folder.resolve():
            for name in ("README.md", CURVES_FILE, POLICY_FILE):
                if (folder / name).is_file():
                    shutil.copy(folder / name, output_dir)

    # ---- Evaluations ----

    @property
    def health_notes(self) -> list[HealthNote]:
        """Return what was said about the health of the run so far."""
        return list(self._health.notes)

    @property
    def kept_step(self) -> int:
        """Return the step of the policy as it is now: that of the best evaluation where training has ended with it."""
        return self.state.global_step if self._kept_step is None else self._kept_step

    def _begin_anew(self) -> None:
        """Forget what was seen and said of an earlier run."""
        self.evaluations, self._health = [], Health(self.args.on_unhealthy, self.args.health_patience)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See [`~transformers.Trainer`]. With `servers`, rewards by task are also kept in `evaluations.jsonl`."""
        self._rewards_by_task.clear()
        metrics = super().evaluate(*args, **kwargs)
        if self._engine is None or not self._rewards_by_task:
            return metrics
        rewards = dict(self._rewards_by_task)
        self._rewards_by_task.clear()  # of several datasets, the first to be evaluated is the one that counts
        step = self.state.global_step
        if any(each.step == step for each in self.evaluations):
            return metrics
        figures = {name.removeprefix("eval_"): value for name, value in metrics.items() if isinstance(value, float)}
        judged = Judged(step=step, rewards=rewards, metrics=figures)
        self._check_fall(judged)
        self.evaluations.append(judged)
        if self.is_world_process_zero():
            logger.info("Evaluation at step %d: reward %s, %s", step, judged.reward, figures)
            write_judged(self.evaluations, Path(cast("str", self.args.output_dir)) / EVALUATIONS_FILE)
        return metrics

    def _judge(self, rewards: torch.Tensor) -> None:
        """Note the rewards of an evaluation's batch, of all processes, by task."""
        totals = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1).tolist()
        is_judged = (~rewards.isnan().all(dim=1)).tolist()
        task_ids = gather_object([trajectory.task.task_id for trajectory in self._trajectories])
        for task_id, total, counts in zip(task_ids, totals, is_judged, strict=True):
            if counts:
                self._rewards_by_task[task_id].append(total)

    def _check_fall(self, judged: Judged) -> None:
        """Say so if a policy does worse on the same tasks than it did before, by more than chance."""
        if not self.evaluations or any(note.name == FALLING for note in self._health.notes):
            return
        best = best_of(self.evaluations)
        fall = change(best, judged)
        if fall is None or fall.high >= 0:
            return
        kept = f" The policy of step {best.step} is kept." if self.args.load_best_model_at_end and best.step else ""
        sentence = (
            f"The policy does worse on the tasks it is judged by: reward {best.reward.mean:.3f} at step {best.step}, "
            f"{judged.reward.mean:.3f} now (change {fall.mean:+.3f}, 95 % interval {fall.low:+.3f} to {fall.high:+.3f}).{kept} "
            "Lower `learning_rate`, raise `beta`, train on more tasks, or end the run earlier."
        )
        note = self._health.note(FALLING, sentence, self.state.global_step)
        self._say([note])
        self.control.should_training_stop |= note.is_fatal

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self._engine is not None and self.args.load_best_model_at_end:
            self.control.should_save = True  # also between two checkpoints
        return is_best

    # ---- Trackers ----

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._engine is not None and self.log_completions:
            for name, values in trajectory_columns(self._trajectories).items():
                self._pending_extra_logs[name].extend(values)
        return rewards

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See [`~trl.GRPOTrainer`]."""
        with tables_as_text(), project_of_trackers(self.args.project):
            super().log(logs, start_time)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self._engine is not None and self.model.training:
            # At once, because the step takes as long again, and may fail. After it, they are logged as means over
            # `logging_steps`; so these have names of their own.
            figures = {f"batch/{name}": values[-1] for name, values in self._metrics["train"].items() if values}
            trackers = (MetricsFile, *INTEGRATION_TO_CALLBACK.values())
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, trackers):
                    callback.on_log(self.args, self.state, self.control, logs=dict(figures), model=self.model)
        return batch

    # ---- What a run goes on from ----

    @contextmanager
    def _training_template(self) -> Iterator[None]:
        """In which the tokenizer is saved with the template of training: with the stock one, the policy would see other histories."""
        stock = self._tokenizer.chat_template
        if self._engine is not None:
            self._tokenizer.chat_template = self._renderer.chat_template or stock
        try:
            yield
        finally:
            self._tokenizer.chat_template = stock

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(cast("str", output_dir or self.args.output_dir))
        policy, own = self.accelerator.unwrap_model(self.model), None
        if self._critic is not None and (state_dict is not None or not is_peft_model(policy)):
            # In a file of its own: what serves the policy does not know it.
            state_dict, own = without_value_head(self.model.state_dict() if state_dict is None else state_dict)
        with self._training_template():
            super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        if self._engine is not None:
            write_facts(folder, self._facts)
        if self._critic is not None:
            save_value_head(self._critic.head, folder, own)
        if "ref" in getattr(policy, "peft_config", {}):
            # In a folder beside the adapter, it is all that a resumed run would load: the policy would silently start
            # from zero. The reference is made anew from the adapter one starts with, and moved by its own file.
            shutil.rmtree(folder / "ref", ignore_errors=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._critic is not None:
            load_value_head(self._critic.head, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._critic is not None and self.state.best_model_checkpoint:
            load_value_head(self._critic.head, self.state.best_model_checkpoint)
        self._kept_step = self.state.best_global_step
        self._last_loaded_step = -1  # the sampler has the last one's weights

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._reference is not None:
            self._reference.save(output_dir)
        state = {
            "num_processes": self.accelerator.num_processes,
            "step": self._step,
            "global_step": self.state.global_step,
            "num_rollouts": self._num_rollouts,
            "turns": self._engine and self._engine.turns.state_dict(),
            "health": self._health.state_dict(),
            "kl_control": self._kl_control and self._kl_control.state_dict(),
            "critic": self._critic and self._critic.state_dict(),
            # A batch that is still to be learnt from: rolled out again, it would be another one.
            "batch": self._buffered_inputs if self._step % self._generate_every else None,
        }
        torch.save(state, Path(output_dir) / STATE_FILE.format(rank=self.accelerator.process_index))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._reference is not None:
            self._reference.load(checkpoint)
        # What all ranks have in common is read by all from the first one's file, also if there are more or fewer now.
        file, own_file = (
            Path(checkpoint) / STATE_FILE.format(rank=rank) for rank in (0, self.accelerator.process_index)
        )
        if not file.is_file():
            return
        state = torch.load(file, map_location=self.accelerator.device, weights_only=True)
        self._step, self._num_rollouts, self._buffered_inputs = state["step"], state["num_rollouts"], None
        if state["batch"] is not None and state["num_processes"] == self.accelerator.num_processes:
            own = torch.load(own_file, map_location=self.accelerator.device, weights_only=True)
            self._buffered_inputs = own["batch"]
        else:  # parts of a batch that do not fit, or that were not published: a new one is rolled out
            self._step -= self._step % self._generate_every
        if self._engine is not None and state["turns"]:
            self._engine.turns.load_state_dict(state["turns"])
        self._health.load_state_dict(state["health"])
        file = Path(cast("str", self.args.output_dir)) / EVALUATIONS_FILE
        self.evaluations = read_judged(file, up_to=state.get("global_step", 0))
        if self._kl_control is not None and state["kl_control"]:
            self._kl_control.load_state_dict(state["kl_control"])
            self.beta = self._kl_control.beta
        if self._critic is not None and state["critic"]:
            self._critic.load_state_dict(state["critic"])
