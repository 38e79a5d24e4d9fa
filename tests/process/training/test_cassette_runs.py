"""A run is recorded, and replayed without its servers."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.sums import ROWS, SERVER, TEMPLATE_KWARGS
from transformers import TrainerCallback

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.errors import CassetteError, RolloutError


SECRET = "s3cret-value-of-this-run"
SERVERS = {"sums": {"command": sys.executable, "args": [str(SERVER)], "env": {"API_KEY": "${SUMS_KEY}"}}}


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run(
    model: str, folder: Path, servers: Any, cassette: Path, mode: str, seed: int = 0
) -> tuple[list[Trajectory], list[torch.Tensor]]:
    trajectories: list[Trajectory] = []

    def reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        trajectories.extend(trajectory)
        return exact_answer(trajectory)

    args = MCPGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=400,
        max_steps=2,
        max_turns=3,
        seed=seed,
        learning_rate=1e-3,
        report_to="none",
        save_steps=1,
        log_completions=True,
        chat_template_kwargs=TEMPLATE_KWARGS,
        cassette=str(cassette),
        cassette_mode=mode,
    )
    watch = Gradients()
    with MCPGRPOTrainer(model, reward, args, Dataset.from_list(ROWS), servers=servers, callbacks=[watch]) as trainer:
        trainer.train()
    return trajectories, watch.seen


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMS_KEY", SECRET)


@pytest.mark.full
def test_a_replayed_run_needs_no_server_and_is_the_same_token_by_token(
    tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    cassette = tmp_path / "calls.jsonl"
    with caplog.at_level(logging.DEBUG):
        first, gradients = run(adding_model, tmp_path / "first", SERVERS, cassette, "record")
    again, same_gradients = run(adding_model, tmp_path / "again", None, cassette, "replay")
    assert sum(len(attempt.exchanges) for attempt in first) > 8
    assert [attempt.completion_ids for attempt in first] == [attempt.completion_ids for attempt in again]
    assert [attempt.exchanges for attempt in first] == [attempt.exchanges for attempt in again]
    assert gradients
    for gradient, same in zip(gradients, same_gradients, strict=True):
        # Which trajectories are sampled together depends on the clock, and the last digits of the model with it.
        torch.testing.assert_close(gradient, same, rtol=1e-3, atol=1e-5)

    # Nothing that was written anywhere holds the server's secret.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".jsonl", ".safetensors", ".bin", ".parquet"}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in caplog.text


@pytest.mark.full
def test_a_run_that_leaves_the_recording_is_not_trained_on_and_is_told_where(
    tmp_path: Path, adding_model: str
) -> None:
    cassette = tmp_path / "calls.jsonl"
    run(adding_model, tmp_path / "first", SERVERS, cassette, "record")
    lines = cassette.read_text().splitlines()
    cassette.write_text("\n".join([line.replace('"a": 2', '"a": 4') for line in lines]) + "\n")
    with pytest.raises(RolloutError, match="recorded"):
        run(adding_model, tmp_path / "again", None, cassette, "replay")


def test_a_recording_is_not_written_over(tmp_path: Path, adding_model: str) -> None:
    cassette = tmp_path / "calls.jsonl"
    cassette.write_text("precious\n")
    with pytest.raises(CassetteError, match=r"calls\.jsonl"):
        run(adding_model, tmp_path / "run", SERVERS, cassette, "record")
    assert cassette.read_text() == "precious\n"
