"""A local policy is evaluated by a function and by a command, and two evaluations are compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import make_trainer
from helpers.sums import ROWS, SERVERS, TEMPLATE_KWARGS
from peft import LoraConfig
from servers.sums import server
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcp_grpo import evaluate
from mcp_grpo.cli import main
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import summarize
from mcp_grpo.policy_evaluation import local_policy
from mcp_grpo.tasks import tasks_from_rows


SMALL: dict[str, Any] = {"max_completion_length": 400, "max_turns": 3, "use_cpu": True, "bf16": False}


@pytest.fixture(scope="module")
def tasks() -> list[Any]:
    return tasks_from_rows(ROWS[:2])


def test_a_model_an_adapter_and_a_trainer_are_evaluated(tmp_path: Path, adding_model: str, tasks: list[Any]) -> None:
    template: Any = {"chat_template_kwargs": TEMPLATE_KWARGS}
    found = evaluate(adding_model, tasks, {"sums": server}, k=2, output_dir=tmp_path / "model", **SMALL, **template)
    assert (found.num_tasks, found.num_trajectories) == (2, 4)
    assert found.tools["add"].calls >= 2
    assert (tmp_path / "model" / "evaluation.json").is_file()
    adapter = LoraConfig(r=4, target_modules="all-linear")
    with make_trainer(tmp_path / "run", adding_model, peft_config=adapter, max_steps=1) as trainer:
        trainer.train()
        trainer.save_model()
        of_trainer = evaluate(trainer, tasks, temperature=0.0)
        assert of_trainer.outcomes == summarize(trainer.roll_out(tasks, temperature=0.0)).outcomes
        with pytest.raises(SettingsError, match="its own servers"):
            evaluate(trainer, tasks, {"sums": server})
    # The adapter is prompted as it was in training without being told how.
    of_adapter = evaluate(tmp_path / "run", tasks, {"sums": server}, temperature=0.0, **SMALL)
    assert of_adapter.outcomes == of_trainer.outcomes
    assert of_adapter.tokens == of_trainer.tokens


def test_on_a_cpu_without_instructions_for_16_bits_evaluation_goes_in_32_and_training_warns(
    tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(adding_model, dtype="bfloat16")
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(adding_model).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with local_policy(str(tmp_path / "model"), {"sums": server}, None, SMALL) as trainer:
        assert trainer.model.dtype == torch.float32
    assert "no instructions" not in caplog.text
    with make_trainer(tmp_path / "run", model):
        assert "This CPU has no instructions for bfloat16" in caplog.text


@pytest.mark.full
def test_the_command_writes_a_report_and_compares(
    tmp_path: Path, adding_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": SERVERS}))
    fixed = ["eval", str(tmp_path / "tasks.jsonl"), "--servers", str(tmp_path / "mcp.json"), "--max-tokens", "400"]
    for name in ("first", "second"):
        out = ["--out", str(tmp_path / name), "--max-turns", "3", "--temperature", "1"]
        assert main([*fixed, "--model", adding_model, *out]) == 0
    shown = capsys.readouterr().out
    assert "success of doing nothing | 0.0%" in shown
    assert (tmp_path / "first" / "report.md").read_text() in shown
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 0
    assert "tasks (95 % interval" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "nothing")]) == 1
    assert "There is no evaluation in" in capsys.readouterr().err
    assert main([*fixed, "--endpoint", "http://127.0.0.1:9/v1", "--out", str(tmp_path / "third")]) == 1
    assert "`--name`" in capsys.readouterr().err
