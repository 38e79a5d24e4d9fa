"""The stages of `mcp-grpo train`. Each takes what earlier ones have left in the folder of the run, and leaves what later ones need."""

import gc
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import anyio
import torch
from datasets import disable_progress_bars
from peft import PeftModel
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.doctor import Subject, examine
from mcp_grpo.errors import HealthError, SettingsError
from mcp_grpo.evaluation import Evaluation, compare, comparison_table
from mcp_grpo.monitor import METRICS_FILE, MetricsFile, TrainingProgress, learning_sentence, stuck_sentence
from mcp_grpo.monitor.run_page import write_page
from mcp_grpo.policy_evaluation import baselines, evaluate, read_evaluation
from mcp_grpo.publishing import newest_checkpoint, serve_command
from mcp_grpo.publishing.load import load_base
from mcp_grpo.rollout.replay import limits_sentence
from mcp_grpo.synth import SynthSettings, make_tasks, write_tasks
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.train.arguments import TrainArguments
from mcp_grpo.train.deadline import Deadline, EndsInTime
from mcp_grpo.train.imitation import (
    GOOD_VALID_CALLS,
    MIN_VALID_CALLS,
    WarmupConfig,
    calls_sentence,
    imitate,
    tools_of,
    valid_calls,
    warm_model,
)
from mcp_grpo.train.ledger import Ledger
from mcp_grpo.train.plan import NUM_LOOKED_AT, WARM_START_SHARE, attempts_at
from mcp_grpo.train.settings import Choice, ModelSize, fit_step, warm_up_settings
from mcp_grpo.train.splits import TASKS_FOLDER, Splits, load_splits
from mcp_grpo.train.world import world_of
from mcp_grpo.trainer import MCPGRPOTrainer
from mcp_grpo.trl_compat import ModelConfig, get_peft_config, get_quantization_config
from mcp_grpo.types import Task, Trajectory


WARM_START = "warm_start"
UNTRAINED, BEFORE, AFTER = "untrained", "before", "after"
DOCTOR_FILE = "doctor.json"
OWN = ("num_eval_tasks",)  # of the recipes, not of the trainer


class Stages:
    """
    The stages of a run, to be taken in their order.

    Args:
        arguments ([`TrainArguments`]):
            What the command was told, with servers and a model.
        choice ([`Choice`]):
            Settings for the machine and the model.
        size ([`ModelSize`]):
            The model.
        ledger ([`Ledger`]):
            What is done, and what stages have written down for later ones.
        console (`Console`):
            Where to say what is going on.
        end (`float`, *optional*):
            When everything is to be done, by `time.monotonic`.
    """

    def __init__(
        self,
        arguments: TrainArguments,
        choice: Choice,
        size: ModelSize,
        ledger: Ledger,
        console: Console,
        *,
        end: float | None = None,
    ) -> None:
        self._arguments, self._choice, self._size, self._ledger = arguments, choice, size, ledger
        self._end = math.inf if end is None else end
        self._console, self._folder = console, ledger.folder
        self._model, self._world = str(arguments.model), world_of(arguments)
        self._trainer: MCPGRPOTrainer | None = None
        disable_progress_bar()  # of loading and saving a file

    @property
    def all(self) -> dict[str, Callable[[], str]]:
        """Return the stages by name; each returns a sentence on what it came to."""
        return {
            "doctor": self.doctor,
            "tasks": self.tasks,
            "calls": self.calls,
            "before": self.before,
            "training": self.training,
            "after": self.after,
            "report": self.report,
        }

    def doctor(self) -> str:
        """Examine machine, servers, model and settings, and the tasks where there are some; refuse to go on with what is wrong."""
        has_tasks = self._brings_tasks
        subject = Subject(
            servers=lambda: self._world.servers,
            tasks=(lambda: self._splits.train) if has_tasks else None,
            eval_tasks=(lambda: self._splits.test) if has_tasks else None,
            rewards=lambda: list(self._world.reward_funcs),
            model=self._model_config(self._model),
            config=lambda: MCPGRPOConfig(**self._settings),
            settings=self._settings,
        )
        with self._console.status("examining ..."):
            report = examine(subject)
        (self._folder / DOCTOR_FILE).write_text(report.as_json() + "\n", encoding="utf-8")
        for one in report.findings:
            if one.status in ("wrong", "warning"):
                remedy = f"\n  -> {one.remedy}" if one.remedy else ""
                style = "red" if one.status == "wrong" else "yellow"
                self._console.print(Text.assemble((f"{one.status}: ", style), f"{one.name}: {one.found}{remedy}"))
        if report.problems:
            raise SettingsError(
                f"The doctor: {report.sentence} Mend it, and give the same command again. All checks are in "
                f"{self._folder / DOCTOR_FILE}."
            )
        return f"The doctor {report.sentence}"

    def tasks(self) -> str:
        """Make tasks by calling the servers' tools, where none are given, and hold some out."""
        if not self._brings_tasks:
            settings = SynthSettings(
                num_tasks=self._arguments.num_tasks,
                seed=self._arguments.seed,
                allow_writes=self._arguments.allow_writes,
            )
            with self._console.status("starting the servers ...") as status:
                made = anyio.run(make_tasks, self._arguments.servers, settings, lambda text: status.update(Text(text)))
            if not write_tasks(made, self._folder / TASKS_FOLDER):
                raise SettingsError(made.remedy)
            self._say(
                f"{len(made.tasks)} tasks from {made.num_calls} calls, each solved twice on the servers; "
                f"{self._folder / TASKS_FOLDER / 'README.md'} tells about them."
            )
        splits = self._splits
        if splits.note:
            self._say(splits.note)
        return f"{splits.sentence}."

    def calls(self) -> str:
        """See whether the policy calls tools well and ever succeeds, and warm it up on the solutions of tasks if not."""
        warm = self._folder / WARM_START
        if self._ledger["base"] is None:
            attempts = self._look()
            share, succeeds = valid_calls(attempts)[0], any(map(self._world.is_success, attempts))
            if (share >= GOOD_VALID_CALLS and succeeds) or (share >= MIN_VALID_CALLS and not self._solved):
                self._ledger.note(base=self._model)
                return calls_sentence(attempts)
            if not any(anyio.run(tools_of, [attempt.task for attempt in attempts], self._world.servers)):
                self._ledger.note(base=self._model)
                return "There are no tools to call."
            self._say(calls_sentence(attempts))
            solutions = self._solutions()
            self._say(f"The policy {_lack(share)}. How well it does as it is, to compare with:")
            self._evaluate(UNTRAINED)
            self.close()
            shutil.rmtree(warm, ignore_errors=True)
            cut = self._warm_up(solutions, warm)
            self._ledger.note(base=str(warm_model(warm)), cut=cut)
        attempts = self._look()
        if valid_calls(attempts)[0] < MIN_VALID_CALLS:
            if cut := self._ledger["cut"]:
                self._ledger.note(base=None)  # so that the next try has a warm start of its own
                raise SettingsError(
                    f"The warm start has not taught the policy to call tools: {calls_sentence(attempts)} {cut} Give the same command with more "
                    "minutes, or take a smaller model (`--model`, with another `--out`)."
                )
            raise SettingsError(
                f"The warm start has not taught the policy to call tools: {calls_sentence(attempts)} Training would only punish "
                "it. Give more tasks with solutions (`--num-tasks`, or a column `solution`), or a model that was trained on "
                f"tools (`--model`). What was learnt is in {warm}; `--out` with another folder begins anew."
            )
        return f"After a warm start: {calls_sentence(attempts)}"

    def before(self) -> str:
        """Attempt the tasks to judge by, after a look whether the limits of the run allow to do them."""
        scripted = [task for task in self._test if task.metadata.get("solution")]
        if said := limits_sentence(self._open().follow_scripts(scripted), self._world.is_success):
            self._console.print(Text.assemble(("warning: ", "yellow"), said))
        found = self._evaluate(BEFORE, attempts_at(self._arguments.eval_temperature))
        return f"Success before training: {found.interval.mean:.1%} ({found.interval.low:.1%} to {found.interval.high:.1%})."

    def training(self) -> str:
        """Train, from the last checkpoint if there is one, and keep the best policy."""
        trainer = self._open()
        checkpoint, _ = newest_checkpoint(self._folder)
        trainer.args.eval_on_start &= checkpoint is None  # a run that goes on was judged when it began
        stopped, deadline = "", Deadline(self._end, self._ledger.seconds("before"))
        trainer.add_callback(deadline)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except HealthError as error:  # what was learnt until then is kept
            stopped = str(error)
        trainer.remove_callback(deadline)
        trainer.save_state()
        trainer.save_model()
        self._ledger.note(stopped=stopped)
        if stopped:
            return stopped
        how = "the best on the tasks it is chosen by" if self._splits.validation is not None else "the last one"
        steps, why = f"{trainer.state.global_step}", ""
        if deadline.is_reached:
            steps += f" of {trainer.state.max_steps}"
            why = f", as the {self._arguments.minutes:g} minutes are nearly over"
        kept = f"{steps} steps{why}; the policy of step {trainer.kept_step}, {how}, is kept."
        evaluations = trainer.evaluations
        is_known = bool(evaluations) and evaluations[0].step == 0
        learnt = learning_sentence(evaluations, trainer.kept_step) if is_known else None
        return " ".join(filter(None, (kept, learnt, stuck_sentence(evaluations))))

    def after(self) -> str:
        """Attempt the tasks to judge by again, and measure what to compare with."""
        found = self._evaluate(AFTER, attempts_at(self._arguments.eval_temperature))
        with self._console.status("running what to compare with ..."):
            others = baselines(self._test, self._world.servers, self._world.is_success, self._world.user)
        if (self._folder / UNTRAINED).is_dir():
            others = {"the model before its warm start": read_evaluation(self._folder / UNTRAINED).success, **others}
        self._ledger.note(baselines=others)
        return f"Success after training: {found.interval.mean:.1%} ({found.interval.low:.1%} to {found.interval.high:.1%})."

    def report(self) -> str:
        """Write card and report page."""
        trainer, (before, after) = self._open(), self._results()
        trainer.add_baselines(self._ledger["baselines"])
        trainer.add_results(before, after, f"On tasks that were not trained on, with seed {self._arguments.seed}:")
        trainer.save_model()
        page, *_ = write_page(self._folder)
        return f"The report is {page}."

    def conclude(self) -> bool:
        """Say what was learnt, where everything is, and how to go on; return whether the run ended well."""
        before, after = self._results()
        self._console.print(comparison_table(before, after, title="Tasks that were not trained on"))
        self._say(compare(before, after).sentence("The trained policy"))
        others = ", ".join(f"{name} {value:.1%}" for name, value in self._ledger["baselines"].items())
        self._say(f"Success of others on the same tasks: {others}.")
        if stopped := self._ledger["stopped"]:
            self._say(f"Training was stopped: {stopped}")
        folder = self._folder
        self._say(
            f"\nAdapter and card: {folder} (README.md)\nReport:           {folder / 'report.html'}\n"
            f"Attempts:         {folder / BEFORE}, {folder / AFTER}"
        )
        try:
            serving = serve_command(folder)
        except SettingsError as error:
            serving = str(error)
        self._say(f"\nServe it with:\n  {serving}")
        self._say(f"Try it with:\n  {self._world.attempt(folder)}")
        return not stopped

    def close(self) -> None:
        """End the servers of the trainer, and what it holds."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
            gc.collect()  # the next trainer needs the memory
            torch.cuda.empty_cache()

    @cached_property
    def _splits(self) -> Splits:
        return load_splits(self._arguments, self._folder)

    @cached_property
    def _test(self) -> list[Task]:
        return tasks_from_rows(self._splits.test)

    @property
    def _brings_tasks(self) -> bool:
        """Tell whether there are tasks without making some."""
        return self._arguments.tasks is not None or self._world.environment is not None

    @property
    def _settings(self) -> dict[str, Any]:
        """Return the settings of the trainer; those of the model are taken out."""
        of_model = {field.name for field in fields(ModelConfig)}
        settings = {name: value for name, value in self._choice.settings.items() if name not in (*of_model, *OWN)}
        settings |= {"output_dir": str(self._folder), "seed": self._arguments.seed, "report_to": "none"}
        if self._ledger.is_done("tasks") or self._brings_tasks:
            splits = self._splits
            fit_step(settings, len(splits.train))
            settings |= _evaluations(settings, None if splits.validation is None else len(splits.validation))
            columns = splits.train.column_names
            settings["replay_solutions"] = "solution" in columns and any(splits.train["solution"])
        else:
            settings |= _evaluations(settings, None)
        return settings

    def _model_config(self, name: str) -> Any:
        of_model = {field.name for field in fields(ModelConfig)}
        given = {key: value for key, value in self._choice.settings.items() if key in of_model}
        return ModelConfig(**{**given, "model_name_or_path": name})

    def _open(self) -> MCPGRPOTrainer:
        """Return the trainer: on the model as it begins, or where training is done, with the adapter that was kept."""
        if self._trainer is not None:
            return self._trainer
        base = self._ledger["base"] or self._model
        is_trained = self._ledger.is_done("training")
        config, model = MCPGRPOConfig(**self._settings), self._model_config(base)
        loading = {"dtype": model.dtype}
        policy: Any = base
        if is_trained:
            loaded = load_base(self._folder, base, **loading)
            policy = PeftModel.from_pretrained(loaded, str(self._folder), is_trainable=True)
        else:
            config.model_init_kwargs = loading
        trainer = MCPGRPOTrainer(
            policy,
            list(self._world.reward_funcs),
            config,
            self._splits.train,
            eval_dataset=self._splits.validation,
            servers=self._world.servers,
            user=self._world.user,
            is_success=self._world.is_success,
            processing_class=AutoTokenizer.from_pretrained(base) if is_trained else None,
            peft_config=None if is_trained else get_peft_config(model),
            quantization_config=None if is_trained else get_quantization_config(model),
            callbacks=[MetricsFile(self._folder / METRICS_FILE)],
        )
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(TrainingProgress(success=self._world.reward_funcs[0].__name__))
        if is_trained:
            trainer.recall()
        self._trainer = trainer
        return trainer

    def _evaluate(self, name: str, k: int = 1) -> Evaluation:
        """Attempt the tasks to judge by; what comes of it has a folder of that name."""
        return evaluate(
            self._open(),
            self._test,
            k=k,
            is_success=self._world.is_success,
            output_dir=self._folder / name,
            temperature=self._arguments.eval_temperature,
        )

    def _look(self) -> list[Trajectory]:
        """Attempt a few of the tasks to train on."""
        train = self._splits.train
        number = min(NUM_LOOKED_AT, len(train))
        chosen = train.select([index * len(train) // number for index in range(number)])
        return self._open().roll_out(chosen)

    @property
    def _solved(self) -> list[Task]:
        """Return the tasks with a solution."""
        tasks = tasks_from_rows(self._splits.train)
        return [task for task in tasks if task.metadata.get("solution") or task.metadata.get("messages")]

    def _solutions(self) -> list[Task]:
        """Return the tasks that have a solution to imitate."""
        found = self._solved
        if not found and self._world.environment is not None:
            raise SettingsError(
                f"The policy cannot call tools, and {self._world.name} has no solutions to imitate. Name a model that was trained on "
                "tools with `--model`."
            )
        if not found:
            raise SettingsError(
                "The policy cannot call tools, and there are no solutions to imitate: no task has a column `solution` or "
                "`messages`. Leave `--tasks` out, so that tasks with solutions are made, write solutions "
                "(`docs/guides/making-tasks.md`), or name a model that was trained on tools with `--model`."
            )
        return found

    def _warm_up(self, tasks: Sequence[Task], folder: Path) -> str:
        """Let the policy imitate solutions; say what there was no time for."""
        is_cpu = bool(self._choice.settings.get("use_cpu"))
        settings = warm_up_settings(self._size, len(tasks), is_cpu=is_cpu)
        loading = {"dtype": settings.pop("dtype")}
        model = self._model_config(self._model)
        model.use_peft = settings.pop("use_peft")
        disable_progress_bars()  # of preparing a few rows
        self._say(f"Warming up on the solutions of {len(tasks)} tasks, {settings['max_steps']} steps.")
        config = WarmupConfig(
            output_dir=str(folder),
            use_cpu=is_cpu,
            bf16=self._choice.settings.get("bf16"),
            seed=self._arguments.seed,
            save_strategy="no",
            report_to="none",
            logging_steps=max(1, settings["max_steps"] // 4),
            **settings,
        )
        now = time.monotonic()
        limit = EndsInTime(now + WARM_START_SHARE * (self._end - now))
        imitate(
            self._model,
            AutoTokenizer.from_pretrained(self._model),
            config,
            tasks,
            self._world.servers,
            user=self._world.user,
            is_success=self._world.is_success,
            name=self._model,
            init_kwargs=loading,
            chat_template_kwargs=self._settings["chat_template_kwargs"],
            max_result_tokens=self._settings["max_result_tokens"],
            peft_config=get_peft_config(model),
            callbacks=[limit],
        )
        if not limit.num_left_out:
            return ""
        taken = settings["max_steps"] - limit.num_left_out
        said = f"There was time for {taken} of {settings['max_steps']} steps of the warm start, a third of what was left (`--minutes`)."
        self._say(said)
        return said

    def _results(self) -> tuple[Any, Any]:
        return read_evaluation(self._folder / BEFORE), read_evaluation(self._folder / AFTER)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _lack(share: float) -> str:
    """Say why a policy is warmed up that makes such a share of its calls so that they can be made."""
    if share < MIN_VALID_CALLS:
        return "cannot call tools yet"
    return "succeeded in none of these attempts" if share >= GOOD_VALID_CALLS else "often calls tools wrongly"


def _evaluations(settings: Mapping[str, Any], num_tasks: int | None) -> dict[str, Any]:
    """Return when the policy is evaluated during training: never, where there are no tasks for it."""
    if num_tasks is None:
        return {"eval_strategy": "no", "eval_on_start": False}
    # An evaluation is of whole batches, and no larger than there are attempts.
    attempts = num_tasks * settings["num_generations_eval"]
    return {"per_device_eval_batch_size": min(settings["per_device_eval_batch_size"], attempts)}
