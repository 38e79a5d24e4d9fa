"""What the README shows runs as it is written; only the model is replaced by one that needs no download."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from helpers.policies import save_tiny_model

from mcp_grpo.tools import ServerConfig, load_servers
from mcp_grpo.tools.config import OPTIONS


README = Path(__file__).parent.parent / "README.md"
FILES = dict(re.findall(r"^```\w+ title=(\S+)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = save_tiny_model(tmp_path / "model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("Qwen/Qwen3-0.6B", model))
    return tmp_path


def run(folder: Path, *command: str) -> str:
    # `python` in the server file is the one of the environment that is active, as it is for a reader of the README.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_the_readme_s_training_script_runs(folder: Path) -> None:
    script = folder / "train.py"
    # A hundred steps of five hundred random tokens would take minutes.
    script.write_text(script.read_text().replace("max_steps=100", "max_steps=1, max_completion_length=16"))
    accelerate = shutil.which("accelerate", path=str(Path(sys.executable).parent))
    assert accelerate
    run(folder, accelerate, "launch", "--num_processes", "1", "--cpu", "train.py")
    assert (folder / "outputs" / "shop" / "adapter_model.safetensors").exists()


def test_the_readme_s_look_at_trajectories_runs(folder: Path) -> None:
    script = folder / "look.py"
    script.write_text(script.read_text().replace('"outputs/shop"', '"outputs/shop", max_completion_length=16'))
    output = run(folder, sys.executable, "look.py")
    assert "Evaluation(" in output
    assert "num_trajectories=12" in output


def test_the_readme_s_reward_function_rewards() -> None:
    (code,) = re.findall(r"^```python\n(def fewer_calls.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(code, names)

    class Attempt:
        answer, exchanges = "5", (1, 2)

        class task:
            answer = "5"

    assert names["fewer_calls"]([Attempt]) == [pytest.approx(0.96)]


def test_the_readme_s_server_file_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "key")
    monkeypatch.setenv("WEB_TOKEN", "token")
    configs = {config.name: config for config in load_servers(folder / "servers.json")}
    assert configs["sandbox"].isolation == "exclusive"
    assert configs["web"].headers == {"Authorization": "Bearer token"}


def test_the_readme_names_every_option_of_a_server_with_its_default() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) ?\| .*\|$", README.read_text(), re.MULTILINE)
    named = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(OPTIONS) <= named.keys()
    defaults = {field.name: field.default for field in fields(ServerConfig)}
    for option in ("spares", "max_inflight", "retries", "max_result_bytes"):
        assert named[option] == str(defaults[option])
