"""A run that is evaluated before and after says in its card what it was worth, and whether that means anything."""

import json
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from datasets import Dataset
from helpers.recorded_run import EVIL, make_run
from helpers.runs import settings
from helpers.sums import ROWS, SERVERS
from peft import LoraConfig
from servers.sums import server

from mcp_grpo import MCPGRPOTrainer, exact_answer
from mcp_grpo.monitor.run_page import write_page
from mcp_grpo.policy_evaluation import baselines
from mcp_grpo.rewards import is_answered
from mcp_grpo.tasks import tasks_from_rows


EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_on_start": True,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 8,
    "report_to": None,
}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SOLUTION = {"steps": [{"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}], "final": "5"}


@pytest.mark.full
def test_the_card_has_success_before_and_after_with_intervals_and_what_others_score(
    tmp_path: Path, adding_model: str
) -> None:
    rows = [{**row, "family": "sums"} for row in ROWS]
    with MCPGRPOTrainer(
        adding_model,
        exact_answer,
        settings(tmp_path, **EVALUATED),
        Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        servers={"sums": server},
        is_success=is_answered,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    ) as trainer:
        trainer.train()
        tasks = tasks_from_rows([{**row, "solution": SOLUTION} for row in rows])
        trainer.add_baselines(baselines(tasks, SERVERS, is_answered))
        trainer.save_model()
        evaluations = trainer.evaluations
    # The reward is success here, so the two must agree, attempt by attempt.
    for each in evaluations:
        assert {task: [float(one) for one in found] for task, found in each.solved.items()} == each.rewards
        assert each.metrics["success"] == each.reward.mean
    card = (tmp_path / "README.md").read_text().replace("\\", "")
    before, after = (each.success for each in evaluations)
    assert before
    assert after
    assert (
        f"| success, with 95 % interval | {before.mean:.1%} ({before.low:.1%} to {before.high:.1%}) | "
        f"{after.mean:.1%} ({after.low:.1%} to {after.high:.1%}) |" in card
    )
    assert "4 tasks, 2 attempts each, at step 0 and at step 2." in card
    assert "By success: " in card
    assert "of 4 tasks (95 % interval" in card
    assert "Success of others on the same tasks: doing nothing 0.0%, scripted solutions 100.0%." in card
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["baselines"] == {"doing nothing": 0.0, "scripted solutions": 1.0}
    assert content["settings"]["learning_rate"] == 1e-3
    assert str(tmp_path) not in json.dumps(content)
    page = write_page(tmp_path)[0].read_text()
    assert "scripted solutions 100.0%" in page
    assert "success, with 95 % interval" in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome")
def test_a_browser_shows_hostile_text_and_obeys_none_of_it(tmp_path: Path) -> None:
    page = write_page(make_run(tmp_path / "run", text=EVIL))[0]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # a browser may write to it as it goes
        done = subprocess.run(
            [*command, f"--user-data-dir={profile}", page.as_uri()], capture_output=True, timeout=120, check=True
        )
    shown = done.stdout.decode()
    assert "<title>run</title>" in shown
    assert "<img" not in shown
    assert "&lt;img src=https://evil.test" in shown
