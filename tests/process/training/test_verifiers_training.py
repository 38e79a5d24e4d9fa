"""Environments of the library `verifiers` are trained on: with tools, without any, and with answers of their own."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.runs import settings
from helpers.verifiers_envs import write_environments

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.environments import load_environment


@pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")
@pytest.mark.full
@pytest.mark.parametrize("name", ["vf_jar", "vf_single", "vf_guess"])
def test_a_step_is_trained(
    name: str, tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(write_environments(tmp_path / "environments")))
    environment = load_environment("verifiers", env=name)
    with MCPGRPOTrainer(
        adding_model,
        list(environment.reward_funcs),
        settings(tmp_path / "run", max_turns=environment.max_turns, max_steps=1),
        environment.tasks(),
        servers=environment.servers,
        user=environment.user,
    ) as trainer:
        batches: list[object] = []
        trainer.watch_batches(lambda batch: batches.extend(batch.trajectories))
        trainer.train()
    assert batches
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
