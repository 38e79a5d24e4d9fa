"""Examine everything that can be wrong before the first step; each part where what it needs is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.doctor.environment import examine_environment
from mcp_grpo.doctor.findings import Findings, Report
from mcp_grpo.doctor.machine import Machine
from mcp_grpo.requirements import missing_packages


@dataclass(kw_only=True)
class Subject:
    """
    What is examined. Functions are called once, and what they raise is a finding; `None` is not examined.

    Args:
        servers (`Callable`, *optional*):
            Returns the servers, as [`MCPGRPOTrainer`] takes them.
        tasks (`Callable`, *optional*):
            Returns the tasks to train on.
        eval_tasks (`Callable`, *optional*):
            Returns the tasks to judge by, or `None`.
        rewards (`Callable`, *optional*):
            Returns the reward functions; [`task_outcome`] if not given.
        model (`ModelConfig`, *optional*):
            Which model, and how it is loaded.
        config (`Callable`, *optional*):
            Returns the settings.
        settings (`Mapping[str, Any]`, *optional*):
            The settings as they were given.
        packages (`Callable`, *optional*):
            Returns a sentence for each package that is missing for these settings and model.
        uses_weights (`bool`, *optional*, defaults to `True`):
            Whether the weights are looked for, and used where they are.
    """

    servers: Callable[[], Any] | None = None
    tasks: Callable[[], Any] | None = None
    eval_tasks: Callable[[], Any] | None = None
    rewards: Callable[[], list[Callable[..., Any]]] | None = None
    model: Any = None
    config: Callable[[], MCPGRPOConfig] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    packages: Callable[[Any, Any], list[str]] = missing_packages
    uses_weights: bool = True


def examine(subject: Subject, machine: Machine | None = None) -> Report:
    """Examine what is given, and report."""
    return _Examination(subject, machine or Machine.here()).run()


class _Examination:
    """One examination, part by part."""

    def __init__(self, subject: Subject, machine: Machine) -> None:
        self.subject, self.machine, self.findings = subject, machine, Findings()
        self.engine: Any = None
        self.servers: Any = None
        self.datasets: tuple[Any, Any] = (None, None)
        self.rewards: list[Callable[..., Any]] | None = None
        self.tasks: list[Any] = []
        self.parts: Any = None

    def run(self) -> Report:
        """Make all checks."""
        subject, findings = self.subject, self.findings
        given = findings.run("settings", subject.config, remedy="Change the setting.") if subject.config else None
        # Where no settings are given or can be read, defaults show what can be shown.
        self.config = given or MCPGRPOConfig(
            "outputs", bf16=False, use_cpu=not torch.cuda.is_available(), report_to="none"
        )
        examine_environment(findings, self.machine, Path(str(self.config.output_dir or "outputs")))
        self._load()
        if given is not None:
            self._examine_settings()
        try:
            self._examine_servers()
            self._examine_tasks()
            self._examine_model()
            if subject.model is not None and self.engine is not None:
                self._attempt()
        finally:
            if self.engine is not None:
                self.engine.close()
        if given is not None and subject.model is not None:
            self._examine_memory()
            self._build()
        return findings.report()

    def _load(self) -> None:
        from mcp_grpo.rewards import task_outcome

        subject, findings = self.subject, self.findings
        advice = "`mcp-grpo tasks import` turns files of another form into tasks."
        rows = findings.run("tasks", subject.tasks, remedy=advice) if subject.tasks else None
        held_out = findings.run("tasks to judge by", subject.eval_tasks, remedy=advice) if subject.eval_tasks else None
        self.datasets = (rows, held_out)
        load = subject.rewards or (lambda: [task_outcome])
        self.rewards = findings.run("rewards", load, remedy="Name one of `mcp_grpo.rewards`, or `module:function`.")
        if subject.servers is not None:
            self.servers = findings.run("servers", subject.servers)

    def _examine_settings(self) -> None:
        from mcp_grpo.doctor.trial import check_settings, leave_out

        subject, findings, config = self.subject, self.findings, self.config
        for problem in subject.packages(config, subject.model):
            findings.fail("packages", problem, "Install it, or change the setting.")
        is_right = findings.run(
            "settings",
            lambda: check_settings(config, subject.model, *self.datasets) or True,
            remedy="Change the settings that it names.",
        )
        if is_right:
            findings.ok(
                "settings",
                f"{config.per_device_train_batch_size} trajectories per device and pass, "
                f"{config.generation_batch_size} per batch in groups of {config.num_generations}",
            )
        leave_out(findings, config, subject.model, self.rewards or [])

    def _examine_servers(self) -> None:
        from mcp_grpo.build import make_cassette
        from mcp_grpo.doctor.servers import open_servers

        cassette = make_cassette(self.config) if self.config.replays else None
        if self.findings.has_failed("servers") or (self.servers is None and cassette is None):
            return
        self.engine = open_servers(self.findings, self.servers, cassette)

    def _examine_tasks(self) -> None:
        from mcp_grpo.doctor.tasks import examine_tasks

        if self.subject.tasks is None or self.findings.has_failed("tasks"):
            return
        if self.engine is None and self.subject.servers is not None:
            self.findings.run("tools", lambda: None, needs=("servers",))
        self.tasks = examine_tasks(self.findings, self.datasets, self.rewards, self.engine)

    def _examine_model(self) -> None:
        from mcp_grpo.doctor.model import examine_model, examine_prompts
        from mcp_grpo.doctor.weights import missing_weights

        subject, findings = self.subject, self.findings
        if subject.model is None:
            return
        name = subject.model.model_name_or_path
        if not subject.uses_weights:
            findings.leave(f"weights of {name}", "a tiny random Qwen3 stands in for them")
        elif problem := missing_weights(subject.model):
            findings.fail("weights", problem, "Fetch them, or name another model.")
        else:
            findings.ok("weights", f"{name}: found, here or on the Hub")
        self.parts = examine_model(findings, subject.model, self.config)
        if self.engine is not None:
            examine_prompts(findings, self.parts, self.config, self.engine, self.tasks)

    def _attempt(self) -> None:
        from mcp_grpo.doctor.dry_run import run_dry
        from mcp_grpo.doctor.limits import examine_limits
        from mcp_grpo.doctor.weights import is_here

        name = str(self.subject.model.model_name_or_path)
        is_usable = self.subject.uses_weights and is_here(name, self.subject.model.model_revision)
        self.findings.run(
            "dry trajectory",
            lambda: run_dry(
                self.findings,
                self.parts,
                self.engine,
                self.tasks,
                weights=name if is_usable else None,
                machine=self.machine,
            ),
            needs=("tokenizer", "chat template", "tools"),
            remedy="See what the server says in the rows above.",
        )
        self.findings.run(
            "limits",
            lambda: examine_limits(self.findings, self.parts, self.engine, self.tasks, self.config),
            needs=("settings", "tokenizer", "chat template", "tools", "solutions"),
            remedy="See what the server says in the rows above.",
        )

    def _examine_memory(self) -> None:
        from mcp_grpo.doctor.memory import compare_memory, estimate_memory, is_sharded

        policy = None if self.parts is None else self.parts.config
        if policy is None:
            self.findings.leave("gpu memory", "the shapes of the model's weights are not known here")
            return

        def compare() -> None:
            estimate = estimate_memory(policy, self.config, self.subject.model, self.parts.prompt_tokens)
            compare_memory(self.findings, estimate, self.machine, is_sharded=is_sharded(self.config))

        self.findings.run("gpu memory", compare, remedy="See the settings of the adapter.")

    def _build(self) -> None:
        from mcp_grpo.doctor.trial import build_trainer, check_room

        subject, findings, config = self.subject, self.findings, self.config
        if subject.tasks is None or (subject.servers is None and not config.replays):
            return
        needs = ("settings", "tokenizer", "tasks", "tasks to judge by", "rewards", "servers", "tools", "setup")
        length = findings.run(
            "trainer",
            lambda: build_trainer(
                findings,
                config,
                subject.model,
                subject.settings,
                self.parts,
                *self.datasets,
                self.servers,
                self.rewards or [],
            ),
            needs=needs,
            remedy="Do what it says.",
        )
        findings.run(
            "room for prompts",
            lambda: check_room(findings, config, length or 0, self.parts.is_real),
            needs=("trainer",),
            remedy="Raise the context, or lower the completion.",
        )
