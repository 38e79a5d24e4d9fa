"""Training on trajectories in which old tool results gave way: every turn is learnt in the context that it was written in."""

from pathlib import Path
from typing import Any

import pytest
from helpers.runs import make_trainer
from helpers.sums import ROWS
from transformers import TrainerCallback

from mcp_grpo.learning import Views


TALKING = [{**row, "user_turns": ["Again?", "And again?"]} for row in ROWS]


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)


@pytest.fixture
def always_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old results give way to the next message, however much room there is."""
    monkeypatch.setattr("mcp_grpo.rollout.context.RESERVE", 1)
    monkeypatch.setattr("mcp_grpo.rollout.context.ROOM", 1)
    monkeypatch.setattr("mcp_grpo.rollout.context.DROPPED", "")  # those of this server are one digit


def run(folder: Path, model: str, **changes: Any) -> dict[str, Any]:
    logs = Logs()
    settings = {"old_results": "drop", "max_steps": 1, "max_completion_length": 800} | changes
    with make_trainer(folder, model, rows=TALKING, callbacks=[logs], **settings) as trainer:
        batches: list[Any] = []
        trainer.watch_batches(lambda batch: batches.append(batch.trajectories))
        trainer.train()
    assert all(len(t.views) > 1 for t in batches[0] if t.exchanges and t.num_turns > 2)
    return logs.logs[0]


@pytest.mark.usefixtures("always_short")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"old_logps": "trainer", "num_iterations": 2, "beta": 0.1, "advantage_mode": "gae"}, marks=pytest.mark.full
        ),
    ],
)
def test_sampler_and_trainer_agree_on_every_token(tmp_path: Path, adding_model: str, changes: dict[str, Any]) -> None:
    log = run(tmp_path, adding_model, **changes)
    assert log["rollout/shortened_fraction"] > 0.5
    assert log["align/score"] == 1
    assert log["align/logp_mae"] < 1e-4


@pytest.mark.usefixtures("always_short")
@pytest.mark.full
def test_without_its_contexts_they_would_not(
    tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Views, "of", lambda self, ids: None)
    assert run(tmp_path, adding_model)["align/logp_mae"] > 1e-3
