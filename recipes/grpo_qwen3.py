# /// script
# requires-python = ">=3.11"
# dependencies = ["mcp-grpo[vllm,quantization]"]
# ///
"""
Train Qwen3 to use the tools of MCP servers: the desk's, or your own.

    accelerate launch recipes/grpo_qwen3.py

    accelerate launch recipes/grpo_qwen3.py --config recipes/configs/qwen3_0.6b_lora_vllm.yaml \\
        --servers servers.json --tasks tasks.jsonl

Without `--config`, Qwen3-0.6B is trained with an adapter, and settings are chosen by what the machine has; it says which, and
why. Every field of `TrainArguments`, `MCPGRPOConfig` and TRL's `ModelConfig` is a flag and a key of the YAML file; a flag comes
first. `--preflight` checks everything that can be checked before the first step, and stops. `--resume` goes on from the last
checkpoint. `--minutes` ends training in time, and `--early_stopping_patience` where evaluations get no better. `README.md`
beside this file has the configurations, with hardware and memory.
"""

import os
import time


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to others; before torch comes
STARTED = time.monotonic()

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from recipe_parts.command_line import StrictParser, split_config
from recipe_parts.desk import TaskArguments, load_rewards
from recipe_parts.machine import Choice, Machine, choose, describe, fit_to_tasks
from recipe_parts.preflight import run_preflight
from recipe_parts.requirements import check_requirements
from recipe_parts.run_folder import RunFolder
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, TrainingProgress, Trajectory
from mcp_grpo.console import InertConsole
from mcp_grpo.desk.reward import is_solved
from mcp_grpo.doctor.limits import spread
from mcp_grpo.doctor.stand_in import STAND_IN, save_stand_in, tokenizer_of
from mcp_grpo.errors import HealthError, MCPGRPOError, SettingsError
from mcp_grpo.monitor import (
    METRICS_FILE,
    MetricsFile,
    TrajectoryLog,
    health_lines,
    kinds_report,
    learning_sentence,
    learning_table,
    profile_table,
    stuck_sentence,
    training_sentence,
)
from mcp_grpo.policy_evaluation import baselines
from mcp_grpo.rewards import is_done
from mcp_grpo.rollout.replay import COLUMN, limits_sentence
from mcp_grpo.tasks import load_tasks, tasks_from_rows
from mcp_grpo.train.deadline import Deadline


MOST_REPLAYED = 200  # solutions, before the first step
RESERVE = 60.0  # seconds to load the best policy, to start the servers once more, and to write the report

logger = logging.getLogger("recipes")


@dataclass
class TrainArguments(TaskArguments):
    """The servers and tasks of this recipe, the tasks to judge by, and how to look at a run."""

    eval_tasks: str | None = field(
        default=None,
        metadata={
            "help": "Tasks to judge by, where `eval_strategy` asks for it: a file, a folder, or a Hub id. "
            "If `None`, the desk's validation split."
        },
    )
    num_eval_tasks: int = field(default=64, metadata={"help": "How many tasks to judge by."})
    rewards: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: names in `mcp_grpo.rewards`, or `module:function`. If `None`, `desk_reward`."
        },
    )
    server_processes: int = field(default=1, metadata={"help": "Processes of each server of the desk."})
    launch_with: str | None = field(
        default=None,
        metadata={
            "help": "File of recipes/accelerate/ that the configuration is launched with. Only to find "
            "out what must be installed."
        },
    )
    minutes: float | None = field(
        default=None,
        metadata={
            "help": "End training early enough that all is done within so many minutes of the start: the last evaluation, "
            "saving, what the policy is compared with, the report. With `warmup_stable_decay`, the learning rate falls over the "
            "last steps that there is time for."
        },
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "End training after so many evaluations in a row without a better one than the best, which is kept. Needs "
            "`keep_best`, evaluations and checkpoints."
        },
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in `output_dir`."})
    debug_trajectory: bool = field(
        default=False,
        metadata={
            "help": "Write every decision of one trajectory per batch to `debug/`. `--debug` alone means "
            "this, too; with a word after it, it is that of Transformers."
        },
    )
    profile: bool = field(
        default=False,
        metadata={
            "help": "Measure seconds and memory of each phase of a step. It waits for the device between "
            "phases, which costs a little time."
        },
    )
    preflight: bool = field(
        default=False,
        metadata={
            "help": "Check everything that can be checked before the first step, and stop. Needs no GPU "
            "and no weights."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minutes is not None and not self.minutes > 0:
            raise SettingsError(f"`minutes` must be above 0, got {self.minutes:g}.")
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise SettingsError(f"`early_stopping_patience` must be at least 1, got {self.early_stopping_patience}.")

    def load_train(self) -> Dataset:
        """Load the tasks to train on."""
        return self.load(self.tasks, "train", self.num_tasks)

    def load_eval(self, config: MCPGRPOConfig) -> Dataset | None:
        """Load the tasks to judge by, if the configuration asks for any."""
        if config.eval_strategy == "no":
            return None
        if self.eval_tasks is None and not self.is_desk:
            raise SettingsError("`eval_strategy` asks for tasks to judge by. Set `eval_tasks`.")
        return self.load(self.eval_tasks, "validation", self.num_eval_tasks)

    def early_stopping(self, config: MCPGRPOConfig) -> list[TrainerCallback]:
        """Return what ends training where evaluations get no better, if that is asked for."""
        if self.early_stopping_patience is None:
            return []
        if not config.keeps_best(()):
            raise SettingsError(
                "`early_stopping_patience` goes by the best evaluation. Set `keep_best`, and `eval_strategy` and `save_strategy` "
                'other than "no", or leave it out.'
            )
        return [EarlyStoppingCallback(self.early_stopping_patience)]

    def is_success(self, dataset: Any) -> Callable[[Trajectory], bool] | None:
        """Return what tells whether a task was done; `None` where some of the tasks to judge by do not say what that is."""
        if not isinstance(dataset, Dataset):
            return None
        tasks = tasks_from_rows(dataset)
        can_tell = all(task.answer is not None or task.metadata.get("expected_state") is not None for task in tasks)
        return (is_solved if self.is_desk else is_done) if can_tell else None


def parse(arguments: list[str]) -> tuple[TrainArguments, MCPGRPOConfig, ModelConfig, dict[str, Any]]:
    """Read the command line: what it says, and all settings as they were given."""
    following = [*arguments[1:], "--"] if arguments else []
    arguments = [
        "--debug_trajectory" if each == "--debug" and after.startswith("--") else each
        for each, after in zip(arguments, following, strict=True)
    ]
    parser = StrictParser([TrainArguments, MCPGRPOConfig, ModelConfig], __doc__ or "")
    choice = chosen_settings(parser, arguments)
    script, config, model, settings = parser.parse(arguments, choice.settings if choice else None)
    if choice and config.process_index == 0:
        print(describe(choice))
    if model.model_name_or_path is None:
        raise SettingsError(
            "The configuration names no model. Set `model_name_or_path` in it, or add `--model_name_or_path Qwen/Qwen3-0.6B`."
        )
    config.launch_with = script.launch_with  # for `missing_requirements`
    if config.eval_strategy == "no":
        config.eval_on_start = settings["eval_on_start"] = False  # there are no tasks to judge by
    if settings["output_dir"] is None:
        name = Path(model.model_name_or_path).name
        config.output_dir = settings["output_dir"] = f"outputs/{name}"
        if settings["project"] == "huggingface":  # as it is where nobody names one
            config.project = name
    return script, config, model, settings


def chosen_settings(parser: StrictParser, arguments: list[str]) -> Choice | None:
    """Choose settings by what this machine has, if no configuration is named."""
    flags, file = split_config(arguments)
    if file is not None:
        return None
    given = parser.given(flags)
    choice = choose(Machine.here(), given)
    if given.get("tasks"):
        number = len(load_tasks(given["tasks"]))
        fit_to_tasks(
            choice, min(number, given.get("num_tasks") or number), int(os.environ.get("WORLD_SIZE", "1")), given
        )
    return choice


def main(arguments: list[str], started: float | None = None) -> MCPGRPOTrainer | None:
    """
    Train, or only check: return the trainer, closed, or `None` after a pre-flight.

    `minutes` count from `started`, by `time.monotonic`; from now if that is `None`.
    """
    started = time.monotonic() if started is None else started
    script, config, model, settings = parse(arguments)
    if script.preflight:
        found = run_preflight(
            config,
            model,
            settings=settings,
            train_dataset=script.load_train,
            eval_dataset=lambda: script.load_eval(config),
            servers=lambda: script.load_servers(script.server_processes),
            rewards=lambda: load_rewards(script.rewards),
        )
        if found.problems:
            raise SettingsError(str(found))
        print(found)
        return None
    check_requirements(config, model)  # before anything that takes time
    callbacks = script.early_stopping(config)
    train_dataset, eval_dataset = script.load_train(), script.load_eval(config)
    servers, rewards = script.load_servers(script.server_processes), load_rewards(script.rewards)
    folder = RunFolder(Path(config.output_dir), settings, is_main=config.process_index == 0)
    with folder.logging():
        checkpoint = folder.checkpoint()
        with MCPGRPOTrainer(
            load_model(config, model),
            rewards,
            config,
            train_dataset,
            eval_dataset=eval_dataset,
            servers=servers,
            is_success=script.is_success(eval_dataset),
            peft_config=get_peft_config(model),
            quantization_config=get_quantization_config(model),
            callbacks=callbacks + ([] if config.writes_metrics else [MetricsFile(folder.path / METRICS_FILE)]),
        ) as trainer:
            folder.write(trainer, servers)
            if trainer.is_world_process_zero() and checkpoint is None:
                say_limits(trainer, script)
            train(trainer, script, folder.path, checkpoint, started)
    return trainer


def load_model(config: MCPGRPOConfig, model: ModelConfig) -> str:
    """Return the name or folder of the model, and set `model_init_kwargs` for the trainer to load it."""
    if model.model_name_or_path == STAND_IN:
        path = Path(config.output_dir) / STAND_IN
        with config.main_process_first(local=False):
            if not (path / "model.safetensors").exists():
                save_stand_in(str(path), tokenizer_of(STAND_IN)[0], seed=config.seed)
        return str(path)
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    return model.model_name_or_path


def train(
    trainer: MCPGRPOTrainer, script: TrainArguments, folder: Path, checkpoint: str | None, started: float
) -> None:
    """Train and write what is to be kept."""
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(TrainingProgress())
    if script.debug_trajectory:
        trainer.watch_batches(TrajectoryLog(folder / "debug"))
    if script.profile:
        trainer.measure_phases()
    end = math.inf if script.minutes is None else started + 60 * script.minutes
    deadline = Deadline(end, RESERVE)
    trainer.add_callback(deadline)
    stopped: HealthError | None = None
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except HealthError as error:
        stopped = error  # what was learnt until then is kept
    ended = early_end(trainer, script) if deadline.is_reached else None
    if ended is not None:
        logger.info("%s", ended)
    if trainer.evaluations and trainer.is_world_process_zero():
        add_baselines(trainer, script)
    trainer.save_model()
    if trainer.args.push_to_hub and stopped is None:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        report(trainer, script, folder, ended)
    if stopped is not None:
        raise stopped


def say_limits(trainer: MCPGRPOTrainer, script: TrainArguments) -> None:
    """Say which of the tasks to judge by cannot be done within the limits of the run, as far as solutions show it."""
    dataset = trainer.eval_dataset
    tasks = tasks_from_rows(dataset) if isinstance(dataset, Dataset) else []
    scripted = [task for task in tasks if isinstance(task.metadata.get(COLUMN), Mapping)]
    is_success = script.is_success(dataset) or (lambda _: True)
    tried = spread(scripted, MOST_REPLAYED)
    if tried:
        logger.info(
            "The solutions of %d of %d tasks to judge by are replayed, to see whether they fit into the limits.",
            len(tried),
            len(tasks),
        )
    try:
        said = limits_sentence(trainer.follow_scripts(tried), is_success)
    except MCPGRPOError as error:  # the policy may do without
        logger.warning("The solutions of the tasks to judge by could not be replayed: %s", error)
        return
    if said is not None:
        logger.warning("%s", said)
    elif tried:
        logger.info("They all fit.")


def add_baselines(trainer: MCPGRPOTrainer, script: TrainArguments) -> None:
    """Note in the card what doing nothing and the scripted solutions score on the tasks to judge by."""
    is_success = script.is_success(trainer.eval_dataset)
    if is_success is None:
        return
    try:
        trainer.add_baselines(
            baselines(tasks_from_rows(trainer.eval_dataset), script.load_servers(script.server_processes), is_success)
        )
    except MCPGRPOError as error:  # the policy is worth more than what it is compared with
        logger.warning("The card has nothing to compare with: %s", error)


def early_end(trainer: MCPGRPOTrainer, script: TrainArguments) -> str:
    """Say that training was ended in time for what follows it."""
    steps = f"{trainer.state.global_step} of {trainer.state.max_steps} steps"
    return f"Training ended after {steps}, as its {script.minutes:g} minutes are nearly over."


def report(trainer: MCPGRPOTrainer, script: TrainArguments, folder: Path, ended: str | None) -> None:
    """Say why training ended early, what was learnt, what was found wrong, and what was kept."""
    console = InertConsole(record=True)
    if ended is not None:
        console.print(ended, soft_wrap=True, highlight=False)
    if script.profile:
        table = profile_table(trainer.state.log_history)
        (folder / "profile.md").write_text(table + "\n")
        print(table)
    evaluations, kept = trainer.evaluations, trainer.kept_step
    if evaluations:
        console.print(learning_table(evaluations, kept))
        if (kinds := kinds_report(evaluations, kept)) is not None:
            console.print(kinds.table())
        console.print(learning_sentence(evaluations, kept), soft_wrap=True, highlight=False)
        if (stuck := stuck_sentence(evaluations)) is not None:
            console.print(stuck, soft_wrap=True, highlight=False, markup=False)
    else:
        console.print(training_sentence(trainer.state.log_history), soft_wrap=True, highlight=False)
    for line in health_lines(trainer.health_notes):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if evaluations:
        console.print(
            f"All evaluations: mcp-grpo report {folder} --text", soft_wrap=True, highlight=False, markup=False
        )
    what = "adapter" if is_peft_model(trainer.model) else "model"
    console.print(
        f"The {what} of step {kept} is in {folder}. Metrics: metrics.jsonl; curves: curves.png; settings: config.yaml; "
        "this report: report.txt.",
        soft_wrap=True,
        highlight=False,
    )
    (folder / "report.txt").write_text(console.export_text())


if __name__ == "__main__":
    try:
        main(sys.argv[1:], STARTED)
    except MCPGRPOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
