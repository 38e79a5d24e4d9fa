"""Training with a queue, and with trajectories that run out of time."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.processes import left_behind
from helpers.runs import settings
from helpers.sums import ROWS

from mcp_grpo import MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.errors import RolloutError
from mcp_grpo.types import StopReason


DATASET = Dataset.from_list(ROWS)
SERVER = Path(__file__).parents[2] / "servers" / "slow.py"


class Spy(MCPGRPOTrainer):
    """Keeps what was attempted, and what it was worth."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[tuple[list[Trajectory], torch.Tensor]] = []
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self.batches.append(([row["trajectory"] for row in args[0]], rewards))
        return rewards


def make(folder: Path, model: str, **changes: Any) -> Spy:
    """A trainer on a server whose first call never comes back."""
    server = {"command": sys.executable, "args": [str(SERVER), "--hang-once", str(folder / "called")]}
    servers = {"sums": {**server, "x-mcp-grpo": {"allowed_tools": ["add"], "call_timeout": 240}}}
    return Spy(model, exact_answer, settings(folder, **changes), DATASET, servers=servers)


@pytest.mark.full
def test_a_trajectory_that_ran_out_of_time_is_not_learnt_from_and_its_session_answers_again(
    tmp_path: Path, adding_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"trajectory_timeout": 8.0, "max_concurrent_trajectories": 4, "max_completion_length": 120}
    with make(tmp_path, adding_model, **schedule) as trainer:
        trainer.train()
    assert (tmp_path / "called").exists()
    (first, rewards), (second, _) = trainer.batches
    stopped = [trajectory.stop_reason for trajectory in first]
    assert stopped.count(StopReason.DEADLINE) == 1
    assert rewards.isnan().squeeze(1).tolist() == [reason is StopReason.DEADLINE for reason in stopped]
    assert sum(bool(trajectory.exchanges) for trajectory in second) > 4
    logged = trainer.state.log_history[0]
    assert logged["rollout/failed_fraction"] == logged["rollout/left_out_fraction"] == 1 / 8
    assert logged["rollout/seconds"] > 0
    assert logged["rollout/tokens_per_second"] > 0
    assert logged["rollout/queue_seconds"] > 0
    assert "Rolling out: " in capsys.readouterr().err
    assert not left_behind()


@pytest.mark.full
def test_a_run_with_too_many_that_ran_out_of_time_stops_and_says_what_to_do(tmp_path: Path, adding_model: str) -> None:
    schedule = {"trajectory_timeout": 8.0, "max_completion_length": 120, "disable_tqdm": True}
    with (
        make(tmp_path, adding_model, max_failed_fraction=0.0, **schedule) as trainer,
        pytest.raises(RolloutError, match="12% of the trajectories failed") as caught,
    ):
        trainer.train()
    assert "1 times deadline" in str(caught.value)
    assert "`trajectory_timeout`" in str(caught.value)
