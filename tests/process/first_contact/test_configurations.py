"""Configurations: those of other trainers are translated or explained, and those of old are there."""

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import grpo_qwen3
import pytest
import yaml
from helpers.shell import ROOT, Shell
from helpers.sums import ROWS, SERVERS
from recipe_parts.other_names import EXPLAINED, RENAMED, WITH, nearest
from trl import ModelConfig

from mcp_grpo import MCPGRPOConfig


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
KNOWN = {
    name for kind in (grpo_qwen3.TrainArguments, MCPGRPOConfig, ModelConfig) for name in kind.__dataclass_fields__
}
PAGE = (ROOT / "docs" / "guides" / "moving.md").read_text()

CERTAIN = """
model: {name: nobody/nothing, dtype: float32}
lora: {r: 8, alpha: 16}
training: {lr: 1.0e-5, num_epochs: 2, device: cpu, save_interval: 50, use_wandb: false}
grpo: {clip_ratio: 0.2, kl_penalty_coef: 0.05, group_size: 4, gae_lambda: 0.95, ema_decay: 0.99}
rollout: {max_turns: 7, temperature: 0.9, force_rate: 0.0}
"""
BECAME = {
    "model.name": "model_name_or_path: nobody/nothing",
    "lora.r": "lora_r: 8",
    "training.lr": "learning_rate: 1e-05",
    "training.num_epochs": "num_train_epochs: 2",
    "training.device": "use_cpu: true",
    "training.save_interval": "save_steps: 50",
    "training.use_wandb": "report_to: none",
    "grpo.clip_ratio": "epsilon: 0.2",
    "grpo.kl_penalty_coef": "beta: 0.05",
    "grpo.group_size": "num_generations: 4",
    "grpo.gae_lambda": "lam: 0.95",
    "grpo.ema_decay": "ref_ema_decay: 0.99",
    "rollout.max_turns": "max_turns: 7",
}
UNCERTAIN = """
model: {name: nobody/nothing}
grpo: {kl_penalty_coef: 0.05, batch_size: 4, num_generation: 8, strange_thing: 1}
rollout: {max_new_tokens: 256, force_rate: 0.3}
"""


def test_a_configuration_with_sections_is_translated_and_it_is_said_how(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(CERTAIN)
    said = shell.run_forked("recipes/grpo_qwen3.py", "--config", str(tmp_path / "old.yaml"), **NO_GPU)
    for there, here in BECAME.items():
        assert f"`{there}` is `{here}`" in said.out
    assert "`use_peft: true` goes with `lora_r`" in said.out
    assert "`ref_sync: ema` goes with `ref_ema_decay`" in said.out
    assert "`rollout.force_rate: 0.0` needs no setting" in said.out
    # It was read: the only thing that is wrong is the model.
    assert said.status == 1
    assert "The weights of 'nobody/nothing'" in said.err
    assert "Traceback" not in said.terminal


def test_what_is_not_certain_is_explained_all_at_once_and_nothing_starts(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(UNCERTAIN)
    said = shell.run_forked("recipes/grpo_qwen3.py", "--config", str(tmp_path / "old.yaml"), **NO_GPU)
    assert said.status == 1
    assert "`grpo.batch_size` is no setting: it may count tasks, trajectories or rows" in said.err
    assert "`grpo.num_generation` is no setting. Did you mean `num_generations`?" in said.err
    assert "`grpo.strange_thing` is no setting, and none has a name like it" in said.err
    assert "`rollout.max_new_tokens` is no setting: it may limit one turn (`max_turn_tokens`)" in said.err
    assert "`rollout.force_rate` is no setting: it has no counterpart" in said.err
    assert "The others are:" in said.err
    assert "`grpo.kl_penalty_coef` is `beta: 0.05`" in said.err
    assert "entropy_coef" not in said.terminal
    assert "Traceback" not in said.terminal


@pytest.mark.full
def test_the_tuned_set_trains(shell: Shell, adding_model: str, tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": SERVERS}))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    where = {"servers": tmp_path / "servers.json", "tasks": tmp_path / "tasks.jsonl", "output_dir": tmp_path / "run"}
    here = {"model_name_or_path": adding_model, "use_vllm": "false", "use_cpu": "true", "dtype": "float32"}
    short = {"max_steps": 1, "eval_strategy": "no", "report_to": "none", "max_completion_length": 64}
    flags = [f"--{name}={value}" for name, value in {**where, **here, **short}.items()]
    said = shell.run_forked(
        "recipes/grpo_qwen3.py", "--config", "recipes/configs/classic_tuned.yaml", *flags, **NO_GPU
    )
    assert said.status == 0, said.terminal[-3000:]
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (settings["bootstrap_imitation_coef"], settings["bootstrap_entropy_coef"]) == (0.01, 0.001)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = set().union(*logged)
    assert {"mask/masked_fraction", "bootstrap/is_needed", "kl/beta", "ratio/gated_fraction", "value/loss"} <= metrics


def test_every_name_of_another_trainer_leads_to_a_setting_or_a_sentence_about_settings() -> None:
    assert not set(RENAMED.values()) - KNOWN
    assert not {name for name in RENAMED if "." not in name} & KNOWN
    assert not (RENAMED.keys() & EXPLAINED.keys())
    assert not {name for each in WITH.values() for name in each} - KNOWN
    named = {word for text in EXPLAINED.values() for word in re.findall(r"`([a-z_0-9]+)[`:=]", text)}
    assert not named - KNOWN - {"module", "ema", "hard", "none", "group", "gae", "group_turn", "hybrid", "num_processes", "prompt", "tools"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("learning_rat", ["learning_rate"]),
        ("steps_max", ["max_steps"]),
        ("kl_penalty_coef", []),
        ("reward_threshold", []),
        ("lora_alfa", ["lora_alpha"]),
    ],
)
def test_only_what_is_really_near_is_a_hint(name: str, near: list[str]) -> None:
    assert nearest(name, KNOWN) == near


def section(title: str) -> list[list[str]]:
    """Rows of the table below a title of the page."""
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_page_of_names_leads_to_what_there_is() -> None:
    words = {word for _, here in section("Settings") for word in re.findall(r"`([a-z_0-9]+)[`:]", here)}
    values = {"auto", "group", "group_turn", "gae", "hybrid"}
    assert not words - KNOWN - values
    for there, here in section("Settings"):  # what the page says is what the recipe does
        for name in re.findall(r"`([a-z_.]+)`", there):
            if name in RENAMED:
                assert f"`{RENAMED[name]}`" in here or f"`{RENAMED[name]}:" in here, name
    groups = tomllib.loads((ROOT / "docs" / "metrics.toml").read_text())["group"]
    described = [name for group in groups for name in group["metrics"]]
    upstream = {"rewards/*", "eval_rewards/*", "evaluate"}
    metrics = {word for _, here in section("Metrics") for word in re.findall(r"`([a-z_0-9/*]+)`", here)}
    assert not {name for name in metrics - upstream if not any(fnmatch(name, each) for each in described)}
    servers = "".join(path.read_text() for path in (ROOT / "mcp_grpo" / "desk" / "servers").rglob("server.py"))
    tools = {word for _, here in section("Tools") for word in re.findall(r"`(\w+)`", here)} - {"code"}
    assert not {name for name in tools if name not in servers}
    for name in (
        "DEVICE_TYPE",
        "FORCE_RATE",
        "STRICT_TRAJ_KEYS",
        "send_slack_message",
        "tavily_qna_search",
        "python_code",
    ):
        assert f"`{name}`" in PAGE
    assert "(docs/guides/moving.md)" in (ROOT / "README.md").read_text()
