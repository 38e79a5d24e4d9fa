"""A run's policy as others see it: its card, its settings, its tokenizer, and what is uploaded."""

import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from accelerate.utils import is_peft_model
from datasets import Dataset
from huggingface_hub import get_token

from mcp_grpo.evaluation import Evaluation, Judged
from mcp_grpo.monitor import HealthNote, Results, plot_curves, results_content, write_results
from mcp_grpo.publishing.card import PACKAGES, RunSummary, installed_versions, rewrite_card
from mcp_grpo.publishing.command_line import run_command
from mcp_grpo.publishing.folder import PrivateValues, hub_name, publishable_copy
from mcp_grpo.publishing.policy_file import PolicySettings, quantization_of, write_policy_file
from mcp_grpo.publishing.serve import write_tool_parser
from mcp_grpo.rollout import Renderer, RolloutEngine
from mcp_grpo.trl_compat import upload_copies


CURVES_FILE = "curves.png"
KINDS = ("family", "difficulty")  # columns that say what kind of task a row is
MAX_KINDS = 40  # with more, a column names tasks rather than kinds


class Publisher:
    """
    Makes the folder of a policy fit to be shown to others.

    Args:
        args ([`MCPGRPOConfig`]):
            Settings of the run.
        engine ([`RolloutEngine`]):
            Knows the tools, and the secrets of their servers.
        renderer ([`Renderer`]):
            Has the chat template of training.
        policy (`PreTrainedModel` or `PeftModel`):
            The policy, unwrapped.
        system (`str`, *optional*):
            System message that every task begins with.
    """

    def __init__(
        self, args: Any, engine: RolloutEngine, renderer: Renderer, policy: Any, *, system: str | None = None
    ) -> None:
        self._args, self._engine, self._renderer, self._policy, self._system = args, engine, renderer, policy, system
        self._results = Results()
        self._evaluations: tuple[Evaluation, Evaluation] | None = None
        self._baselines: dict[str, float] = {}

    @property
    def folder(self) -> Path:
        """Return the output folder of the run."""
        return Path(self._args.output_dir)

    def add_results(
        self, before: Evaluation | Mapping[str, float], after: Evaluation | Mapping[str, float], title: str
    ) -> None:
        """Note how well the policy did before and after training, for the card."""
        if isinstance(before, Evaluation) and isinstance(after, Evaluation):
            self._results, self._evaluations = Results.of_evaluations(before, after, title), (before, after)
        else:
            first, last = cast("Mapping[str, float]", before), cast("Mapping[str, float]", after)
            self._results, self._evaluations = Results.of_metrics(first, last, title), None

    def add_baselines(self, baselines: Mapping[str, float]) -> None:
        """Note what others score on the same tasks, for the card."""
        self._baselines = dict(baselines)

    def write_card(
        self,
        *,
        model_name: str,
        model_id: str,
        dataset_name: str | None,
        dataset: Any,
        log_history: Sequence[Mapping[str, Any]],
        reward_names: Sequence[str],
        kept_step: int,
        num_steps: int,
        evaluations: Sequence[Judged],
        health: Sequence[HealthNote],
    ) -> None:
        """
        Add servers, tools, tasks, curves, results and the command to the card that TRL wrote, and the policy file and
        `results.json` beside it.
        """
        card = self.folder / "README.md"
        results = self._results if self._results.rows else Results.of_run(evaluations, kept_step)
        results = results.with_baselines(self._baselines)
        summary = RunSummary(
            num_tasks=len(dataset) if isinstance(dataset, Dataset) else None,
            kinds=_kinds_of(dataset),
            dataset_name=dataset_name,
            results=results,
            has_curves=self._plot(log_history, reward_names),
            num_steps=num_steps,
            command=run_command(),
            quantization=quantization_of(self._policy),
        )
        rewrite_card(
            card,
            self._engine.catalog,
            model_name=model_name,
            model_id=model_id,
            is_adapter=bool(is_peft_model(self._policy)),
            base_model=hub_name(self._policy.config._name_or_path),
            summary=summary,
            hide=self.private.hide,
        )
        card.write_text(self.private.hide(card.read_text()))
        facts = results_content(
            results,
            self._evaluations,
            baselines=self._baselines,
            kept_step=kept_step,
            num_steps=num_steps,
            health=[asdict(note) for note in health],
            versions=installed_versions(PACKAGES),
            settings=_settings(self._args),
            command=summary.command,
        )
        write_results(self.folder, self.private.hide_in(json.loads(json.dumps(facts, default=str))))
        self.write_policy_file(self.folder)

    def write_policy_file(self, folder: Path) -> None:
        """Write beside a policy what it needs to be served as it was trained."""
        settings = PolicySettings(
            chat_template_kwargs=self._renderer.chat_template_kwargs,
            tools=[tool.schema for tool in self._engine.catalog.tools],
            catalog_hash=self._engine.catalog.hash,
            quantization=quantization_of(self._policy),
            system=self._system,
        )
        write_policy_file(folder, settings)
        write_tool_parser(folder, self._renderer.tokenizer)

    @property
    def private(self) -> PrivateValues:
        """Return what must not leave this machine."""
        args, base = self._args, self._policy.config._name_or_path
        secrets = [args.hub_token, get_token(), *self._engine.secrets]
        return PrivateValues.of(secrets, [args.output_dir, args.cassette, base if Path(base).exists() else None])

    @contextmanager
    def clean_uploads(self) -> Generator[None]:
        """Upload only what makes up a policy, with nothing private in it, while active."""
        private = self.private

        def copy(folder: Path, target: Path) -> None:
            is_checkpoint = folder.resolve() != self.folder.resolve()
            publishable_copy(folder, target, private=private, is_checkpoint=is_checkpoint)

        with upload_copies(copy, beside=self.folder):
            yield

    @contextmanager
    def training_template(self, tokenizer: Any, processor: Any) -> Generator[None]:
        """
        Give a tokenizer and the processor it is of, if any, the template of training while active: with the stock one, a policy
        would see other histories.
        """
        stock = {id(each): (each, each.chat_template) for each in (tokenizer, processor)}
        template = self._renderer.chat_template or tokenizer.chat_template
        try:
            for each, _ in stock.values():
                each.chat_template = template
            yield
        finally:
            for each, own in stock.values():
                each.chat_template = own

    def _plot(self, history: Sequence[Mapping[str, Any]], reward_names: Sequence[str]) -> bool:
        """Draw the curves of a run, if there are any."""
        if not any("reward" in entry for entry in history):
            return False
        # The only reward function there is has the curve of the reward itself.
        same = {f"rewards/{name}/mean" for name in reward_names if len(reward_names) == 1}
        logged = {key for entry in history for key in entry if key.startswith("rewards/") and key.endswith("/mean")}
        panels = {
            "Reward": ["reward", *sorted(logged - same)],
            "Share of valid calls, of answers": ["tools/valid_rate", "stop/answered"],
            "Calls and turns of a trajectory": ["tools/call_frequency", "turns/mean"],
            "Entropy and divergence": ["entropy", "kl"],
        }
        plot_curves(cast(Any, history), panels, self.folder / CURVES_FILE)
        return True


def _settings(args: Any) -> dict[str, Any]:
    """Return the settings of a run that are not the default."""
    defaults = {each.name: each.default for each in fields(args)}
    given = args.to_dict()  # without tokens
    return {name: value for name, value in sorted(given.items()) if name in defaults and value != defaults[name]}


def _kinds_of(dataset: Any) -> dict[str, dict[str, int]]:
    """Return how many tasks there are of each kind, by the columns that say it."""
    columns = dataset.column_names if isinstance(dataset, Dataset) else ()
    kinds = {name: Counter(map(str, dataset[name])) for name in KINDS if name in columns}
    return {name: dict(sorted(counts.items())) for name, counts in kinds.items() if len(counts) <= MAX_KINDS}
