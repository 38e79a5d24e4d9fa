"""Runs that learn nothing, or unlearn what they knew, stop by themselves and say so where one looks: in the terminal."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.shell import Said, Shell
from helpers.sums import ROWS, SERVERS, save_talking_model


Train = Callable[..., Said]

REWARD = '''
def letters(trajectory, trainer_state, **kwargs):
    """Pay nothing at first, and then for every "a", also if there is no end to them: what is rewarded is not the task."""
    is_paid = trainer_state.global_step >= 6
    return [is_paid * sum(str(m.get("content") or "").count("a") for m in t.messages if m["role"] == "assistant") / 24 for t in trajectory]
'''


@pytest.fixture
def train(shell: Shell, tmp_path: Path) -> Train:
    """The recipe, on a server of one's own, with few tokens."""
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": SERVERS}))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rewards_of_mine.py").write_text(REWARD)
    settings = {
        "use_cpu": True,
        "servers": str(tmp_path / "servers.json"),
        "tasks": str(tmp_path / "tasks.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "chat_template_kwargs": {"enable_thinking": False},
        "max_turns": 2,
        "max_completion_length": 24,
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "logging_steps": 1,
        "save_steps": 100,
        "gradient_checkpointing": False,
        "report_to": "none",
    }

    def run(**changes: Any) -> Said:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings | changes))
        command = ("recipes/grpo_qwen3.py", "--config", tmp_path / "config.yaml")
        return shell.run_forked(*command, timeout=280, OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))

    return run


@pytest.mark.full
def test_a_policy_that_never_calls_a_tool_stops_the_run(
    train: Train, tmp_path: Path, adding_tools: list[dict[str, Any]]
) -> None:
    model = save_talking_model(tmp_path / "model", adding_tools, ["no"], calls=False)
    said = train(
        model_name_or_path=model,
        rewards=["exact_answer"],
        max_steps=30,
        eval_strategy="steps",
        eval_steps=100,
        eval_on_start=True,
        eval_tasks=str(tmp_path / "tasks.jsonl"),
    )
    assert said.status == 1
    assert "WARNING: Step 5: In 5 batches in a row: The policy called no tool" in said.terminal
    assert "HealthError: In 5 batches in a row: The policy called no tool" in said.err.splitlines()[-1]
    assert "sft_warmup.py" in said.err.splitlines()[-1]
    assert "The run was stopped at step 5, with checkpoint-5" in said.terminal
    assert "Traceback" not in said.terminal
    assert (tmp_path / "run" / "checkpoint-5" / "trainer_state.json").exists()
    # The bar, the table, the log, the metrics: wherever one looks.
    assert "health=no signal" in said.err
    assert "reward, with 95 % interval" in said.out
    assert "Nothing was learnt: at step 5, the reward of every task is what it was before training." in said.terminal
    assert "Health, step 5: In 5 batches in a row: The policy called no tool" in said.terminal
    log = (tmp_path / "run" / "run.log").read_text()
    assert "WARNING mcp_grpo.trainer: Step 5: In 5 batches in a row: The policy called no tool" in log
    assert "Evaluation at step 0" in log
    assert '"max_steps": 30' in log
    assert "Server sums: 1 tools: add" in log
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("health/no_signal")] == [5]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [note["name"] for note in run["health"] if note["is_fatal"]] == ["no_signal"]
    assert {note["step"] for note in run["health"]} == {5}
    assert (run["state"], run["max_steps"]) == ("ended", 30)
    # What the run was made with.
    assert json.loads((tmp_path / "run" / "servers.json").read_text()) == {"mcpServers": SERVERS}
    assert len((tmp_path / "run" / "tasks" / "train.jsonl").read_text().splitlines()) == len(ROWS)
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["tasks"]["train"]["num_tasks"] == len(ROWS)


@pytest.mark.full
def test_a_policy_that_collapses_stops_the_run(
    train: Train, tmp_path: Path, adding_tools: list[dict[str, Any]]
) -> None:
    answers = ["ab", "ba", "b", "bb", "bab", "abb", "bba", "aab"]
    model = save_talking_model(tmp_path / "model", adding_tools, answers, calls=True)
    said = train(
        model_name_or_path=model,
        rewards=["rewards_of_mine:letters"],
        max_completion_length=90,
        max_steps=60,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        save_steps=2,
        save_total_limit=20,
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "entropy" in line]
    assert max(line["stop/max_tokens"] for line in steps[:6]) < 0.5 < 0.8 < steps[-1]["stop/max_tokens"]
    # It often rises at first, as the first update makes the policy look for what is paid.
    assert steps[-1]["entropy"] < 0.25 * max(line["entropy"] for line in steps)
    assert said.status == 1
    # Which of the two comes first differs by seed and processor. Both say what to do about it.
    ends = ("The policy has collapsed: its entropy fell from", "It called some before it was trained (")
    last = said.err.splitlines()[-1]
    assert any(each in last for each in ends)
    assert "Lower `learning_rate`" in last
    began, kept = map(int, re.findall(r"It began at about step (\d+): checkpoint-(\d+) is from before that", last)[0])
    assert 6 <= kept < began < steps[-1]["step"]
    assert steps[kept]["stop/max_tokens"] < 0.8  # of the batch that its policy sampled: at most 0.5 more than at first
    assert "More and more trajectories are cut before they end by themselves" in said.terminal
    assert "WARNING: Step" in said.terminal
    assert len(steps) < 60
    assert (tmp_path / "run" / f"checkpoint-{steps[-1]['step']}").is_dir()
