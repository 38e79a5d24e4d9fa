"""
The ways in which a home-made trainer once learnt nothing for a month, put back one by one: each must be noticed.

Servers that do not start, tools that do not exist and groups that are not formed are in `test_trainer.py`; gamma and lambda
by token in `unit/learning/test_advantages.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import IMPATIENT, Attempting, make_trainer

from mcp_grpo import MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.errors import HealthError, RolloutError
from mcp_grpo.masking import MaskRule, SchemaMask
from mcp_grpo.rollout import loop
from mcp_grpo.rollout.renderer import ParsedTurn, Renderer
from mcp_grpo.trl_compat import policy_pass
from mcp_grpo.types import TokenRole


pytestmark = pytest.mark.full


def train(folder: Path, model: str, kind: type[MCPGRPOTrainer] = MCPGRPOTrainer, **changes: Any) -> MCPGRPOTrainer:
    with make_trainer(folder, model, kind, **{"on_unhealthy": "strict", "constants": IMPATIENT, **changes}) as trainer:
        trainer.train()
    return trainer


def test_without_any_of_them_a_strict_run_goes_through(tmp_path: Path, adding_model: str) -> None:
    assert train(tmp_path, adding_model, max_steps=4, reward=spread).state.global_step == 4


def spread(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """Different rewards in every group, so that only what is put back can be amiss."""
    return [a + i / 100 for i, a in enumerate(exact_answer(trajectory))]


def test_a_tool_loop_that_never_runs(tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse: Callable[..., ParsedTurn] = Renderer.parse
    monkeypatch.setattr(Renderer, "parse", lambda *args: replace(parse(*args), calls=(), malformed=None))
    with pytest.raises(HealthError, match="No tool was called"):
        train(tmp_path, adding_model, max_steps=4, reward=spread)


def test_history_that_is_tokenised_anew(tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append = loop.Attempt._append

    def append_anew(self: Any, segment: Any) -> None:
        append(self, segment)
        tokenizer = self._renderer.tokenizer
        text = tokenizer.decode(self._history).replace("\n", " ")  # as some decoders clean up
        self._history = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    monkeypatch.setattr(loop.Attempt, "_append", append_anew)
    with pytest.raises(RolloutError, match="does not begin with what the policy saw and sampled"):
        train(tmp_path, adding_model)


def test_prompts_that_differ_between_sampling_and_training(tmp_path: Path, adding_model: str) -> None:
    class OtherPrompts(Attempting):
        def attempt(self, *args: Any, **kwargs: Any) -> list[Trajectory]:
            return [replace(t, prompt_ids=t.prompt_ids[-20:]) for t in super().attempt(*args, **kwargs)]

    with pytest.raises(HealthError, match="sampler and the trainer do not see the same"):
        train(tmp_path, adding_model, OtherPrompts)


def test_log_probabilities_that_are_recomputed_after_the_update(tmp_path: Path, adding_model: str) -> None:
    class Recomputed(MCPGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            with torch.no_grad():
                logps = policy_pass(self, model, inputs)[0]
            now = {"sampling_per_token_logps": logps, "old_per_token_logps": logps}
            return super()._compute_loss(model, inputs | now)

    settings = {"num_iterations": 2, "learning_rate": 1e-2, "reward": spread}
    found = {}
    for kind in (MCPGRPOTrainer, Recomputed):
        trainer = train(tmp_path, adding_model, kind, **settings)
        history = [entry for entry in trainer.state.log_history if "ratio/p10" in entry]
        found[kind] = [(entry["ratio/p10"], entry["ratio/p90"]) for entry in history]
    assert found[Recomputed][1] == pytest.approx((1, 1), abs=1e-6)  # stuck at 1, though the policy has moved
    first, second = found[MCPGRPOTrainer]
    assert first == pytest.approx((1, 1), abs=1e-4)
    assert second != pytest.approx((1, 1), abs=1e-3)


def test_masks_over_whole_turns(tmp_path: Path, adding_model: str) -> None:
    class WholeTurns(MCPGRPOTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            everything = SchemaMask(
                lambda segment, tools: (TokenRole.FORCED,) * len(segment.token_ids),
                MaskRule(min_prob=0.0, min_unforced_tokens=0, min_unforced_fraction=0.0),
            )
            assert self._collector
            self._collector.schema_mask = everything
            return super().train(*args, **kwargs)

    with pytest.raises(HealthError, match="The policy loss sees only"):
        train(tmp_path, adding_model, WholeTurns, max_steps=4, reward=spread, schema_mask="syntax")


def test_a_reference_that_never_moves(tmp_path: Path, adding_model: str) -> None:
    class Still(MCPGRPOTrainer):
        def _end_step(self) -> None:
            assert self._reference
            self._reference.sync = lambda: None
            super()._end_step()

    found = []
    for kind in (MCPGRPOTrainer, Still):
        settings = {"beta": 0.05, "ref_sync": "hard", "ref_sync_steps": 1, "learning_rate": 1e-2, "reward": spread}
        trainer = train(tmp_path, adding_model, kind, **settings)
        found.append(trainer.state.log_history[0]["ref/num_differing"])
    moved, still = found
    assert moved == 0
    assert still > 0


def test_rewards_that_are_all_the_same(tmp_path: Path, adding_model: str) -> None:
    with pytest.raises(HealthError, match="the same reward"):
        train(tmp_path, adding_model, max_steps=4, reward=lambda trajectory, **kwargs: [1.0] * len(trajectory))
