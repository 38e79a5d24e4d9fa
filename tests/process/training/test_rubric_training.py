"""A rubric in a run: its parts are logged, and they add up."""

from pathlib import Path

import pytest
from helpers.runs import make_trainer

from mcp_grpo.rewards import Rubric, answer_match, call_penalty, format_reward


@pytest.mark.full
def test_a_run_logs_what_was_paid_for_what(tmp_path: Path, adding_model: str) -> None:
    rubric = Rubric(
        {"answer": answer_match, "form": format_reward(answer_line=False, max_length=50), "calls": call_penalty()},
        weights={"form": 0.1},
        gates={"form": "answer"},
    )
    with make_trainer(tmp_path, adding_model, reward=rubric, max_steps=1) as trainer:
        trainer.train()
        logged = trainer.state.log_history[0]
    parts = {name: logged[f"rewards/{name}/mean"] for name in ("answer", "form", "calls")}
    assert 0 < parts["answer"] <= 1
    assert parts["form"] <= parts["answer"]
    total = parts["answer"] + 0.1 * parts["form"] + parts["calls"]
    assert logged["rewards/rubric/mean"] == pytest.approx(total, abs=1e-5)
    assert logged["reward"] == pytest.approx(total, abs=1e-5)
