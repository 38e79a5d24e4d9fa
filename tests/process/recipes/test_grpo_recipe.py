"""The recipe for Qwen3: its configurations are right, it trains, goes on exactly, and says what it was told."""

import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import grpo_qwen3
import pytest
import sft_warmup
import yaml
from helpers.policies import save_tiny_model
from helpers.sums import ROWS, SERVERS
from recipe_parts.command_line import write_settings
from recipe_parts.desk import load_rewards
from recipe_parts.requirements import missing_requirements
from recipe_parts.run_folder import RunFolder
from safetensors.torch import load_file

import mcp_grpo.rewards
from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import build_tasks
from mcp_grpo.errors import SettingsError


pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
CLASSIC: dict[str, Any] = {
    "learning_rate": 5e-6,
    "warmup_steps": 100,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 3,
    "epsilon": 0.2,
    "beta": 0.01,
    "gamma": 0.99,
    "lam": 0.95,
    "value_loss_coef": 0.5,
    "ref_sync": "ema",
    "ref_sync_steps": 100,
    "ref_ema_decay": 0.99,
}
TUNED: dict[str, Any] = {
    **CLASSIC,
    "ref_sync_steps": 10,
    "schema_mask": "syntax",
    "min_unforced_fraction": 0.3,
    "bootstrap_steps": 100,
    "bootstrap_imitation_coef": 0.01,
    "bootstrap_entropy_coef": 0.001,
    "kl_target": 0.4,
    "kl_hard_cap": 3.0,
    "ratio_gate": 4.0,
}


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Arguments of a short run on servers and tasks of one's own."""
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": SERVERS}))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        "--config",
        str(ROOT / "recipes" / "configs" / "cpu_debug.yaml"),
        "--servers",
        str(tmp_path / "servers.json"),
        "--tasks",
        str(tmp_path / "tasks.jsonl"),
        "--rewards",
        "recipe_parts.stand_in:plain_text",
        "--max_completion_length",
        "16",
        "--max_steps",
        "2",
        "--disable_tqdm",
        "true",
    ]


built_tasks = cache(build_tasks)


def address(server: subprocess.Popen[str]) -> str:
    """What a server over HTTP says that it listens on."""
    assert server.stderr
    return next(line.strip() for line in server.stderr if line.startswith("http"))


@pytest.fixture(scope="module")
def desk() -> Iterator[dict[str, Any]]:
    """The desk's servers over HTTP, for all that ask: they take seconds to start."""
    servers = desk_servers()["mcpServers"]
    running = {}
    with ExitStack() as stack:
        for name, server in servers.items():
            command = [server["command"], *server["args"], "--transport", "http", "--port", "0"]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.terminate)
            running[name] = process
        urls = {name: address(process) for name, process in running.items()}
        options = {name: {"x-mcp-grpo": server["x-mcp-grpo"]} for name, server in servers.items()}
        yield {"mcpServers": {name: {"type": "http", "url": url} | options[name] for name, url in urls.items()}}


@pytest.fixture
def shared_desk(desk: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's desk is the one that runs already, and tasks are not built anew."""

    def running(**options: Any) -> dict[str, Any]:
        asked = desk_servers(**options)["mcpServers"]
        assert {n: s["args"] for n, s in asked.items()} == {
            n: s["args"] for n, s in desk_servers()["mcpServers"].items()
        }
        return desk

    monkeypatch.setattr("recipe_parts.desk.desk_servers", running)
    monkeypatch.setattr("recipe_parts.desk.build_tasks", built_tasks)


def test_there_is_a_configuration_for_everything_promised() -> None:
    names = {path.stem for path in CONFIGS}
    assert names == {
        "qwen3_0.6b_lora_vllm",
        "qwen3_0.6b_qlora",
        "qwen3_1.7b_lora_vllm",
        "qwen3_4b_lora_server",
        "qwen3_8b_zero3",
        "qwen3_8b_fsdp2",
        "smollm2_135m",
        "qwen2.5_coder_0.5b",
        "qwen2.5_coder_1.5b",
        "cpu_debug",
        "classic",
        "classic_tuned",
    }
    readme = (ROOT / "recipes" / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in names)
    for path in (ROOT / "recipes" / "accelerate").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
        assert f"`{path.name}`" in readme


def test_every_command_of_the_recipes_readme_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where its paths begin
    text = (ROOT / "recipes" / "README.md").read_text()
    parsers = {"grpo_qwen3.py": grpo_qwen3.parse, "sft_warmup.py": sft_warmup.parse}
    found = dict.fromkeys(parsers, 0)
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            for position, word in enumerate(words):
                if (name := Path(word).name) in parsers:
                    parsers[name](words[position + 1 :])
                    found[name] += 1
    assert all(count > 1 for count in found.values()), found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_passes_its_pre_flight_without_a_gpu_and_without_weights(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if path.stem != "cpu_debug":  # which starts all for itself
        request.getfixturevalue("shared_desk")
    arguments = ["--config", str(path), "--preflight", "--num_tasks", "16", "--num_eval_tasks", "4", "--minutes", "1"]
    if "coder" in path.stem:  # only Qwen3's chat template is known by heart; the tokens of a tiny model are bytes
        tiny = save_tiny_model(tmp_path, max_position_embeddings=16384)
        arguments += ["--model_name_or_path", tiny, "--vllm_max_model_length", "16384"]
    _, config, model, _ = grpo_qwen3.parse(arguments)
    if missing := missing_requirements(config, model):  # packages, which are all that may be wrong
        with pytest.raises(SettingsError) as caught:
            grpo_qwen3.main(arguments)
        found = str(caught.value)
        assert found.count("  wrong ") == len(missing)
        assert all(f"  wrong   packages: {each}" in found for each in missing)
    else:
        assert grpo_qwen3.main(arguments) is None
        found = capsys.readouterr().out
        assert "found nothing wrong" in found
    assert "not run" not in found
    assert "finance, python, search, slack" in found
    if "vllm" in path.stem:
        assert "vLLM in process: needs a GPU" in found


@pytest.mark.parametrize(("name", "wanted"), [("classic", CLASSIC), ("classic_tuned", TUNED)])
def test_the_earlier_hyperparameters_are_kept(name: str, wanted: dict[str, Any]) -> None:
    _, config, _, _ = grpo_qwen3.parse(["--config", str(ROOT / "recipes" / "configs" / f"{name}.yaml")])
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.advantage_mode == "gae"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rat", "1"], r"`learning_rat` \(on the command line\). Did you mean `learning_rate`\?"),
        (["--max-turn=3"], r"Did you mean `max_turns`"),
        (["--lora_alfa", "4"], r"Did you mean `lora_alpha`"),
        (["--steps_max", "4"], r"Did you mean `max_steps`"),
        (["--kl_penalty_coef", "1"], r"`kl_penalty_coef` \(on the command line\): it is `beta` here\.$"),
        (["--batch_size", "4"], "it may count tasks, trajectories or rows"),
        (["--gibberish", "4"], "none has a name like it; `--help`"),
        (["--gibberish", "4", "--learning_rat", "1"], "gibberish.*`learning_rate`"),
        (["stray"], "stray"),
        (["--max_steps"], "`--max_steps` needs a value"),
        (["--max_steps", "many"], "`--max_steps` must be a whole number, got 'many'"),
        (["--learning_rate", "fast"], "`--learning_rate` must be a number, got 'fast'"),
        (["--use_vllm", "maybe"], "`--use_vllm` must be true or false, got 'maybe'"),
        (["--schema_mask", "syntx"], r"one of off, syntax, grammar, got 'syntx'. Did you mean syntax\?"),
        (["--num_generations", "3", "--per_device_train_batch_size", "8"], "divisible by num_generations"),
        (["--minutes", "0"], "`minutes` must be above 0, got 0"),
        (["--minutes=-5"], "`minutes` must be above 0, got -5"),
        (["--minutes", "nan"], "`minutes` must be above 0, got nan"),
    ],
)
def test_a_wrong_flag_is_refused_in_a_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        grpo_qwen3.parse(["--model_name_or_path", "stand-in", "--use_cpu", "true", *arguments])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_generation: 4", r"`num_generation` \(in .*mine.yaml\). Did you mean `num_generations`\?"),
        ("kl_penalty_coef: 0.1", "it is `beta` here"),
        (
            "schema_mask: syntx",
            r"must be one of off, syntax, grammar, got 'syntx'. Did you mean syntax\?",
        ),
        ("learning_rate: fast", "must be a number, got 'fast'"),
        ("minutes: 0", "`minutes` must be above 0, got 0"),
        ("beta: [", "mine.yaml is not a YAML file"),
        ("mcpServers: {shop: {command: python}}", r"is a file of its own; .*`servers: FILE.json`"),
    ],
)
def test_a_wrong_key_of_a_file_is_refused_in_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"model_name_or_path: stand-in\nuse_cpu: true\n{text}\n")
    with pytest.raises(SettingsError, match=message):
        grpo_qwen3.parse(["--config", str(path)])


def test_a_file_that_is_not_there_or_names_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no configuration file"):
        grpo_qwen3.parse(["--config", str(tmp_path / "other.yaml")])
    (tmp_path / "mine.yaml").write_text("use_cpu: true\n")
    with pytest.raises(SettingsError, match="names no model"):
        grpo_qwen3.parse(["--config", str(tmp_path / "mine.yaml")])


def test_a_pre_flight_finds_what_is_wrong(own: list[str]) -> None:
    with pytest.raises(SettingsError, match="There is no reward 'nonsense'"):
        grpo_qwen3.main([*own, "--preflight", "--rewards", "nonsense"])
    with pytest.raises(SettingsError, match="Qwen3"):
        grpo_qwen3.main([*own, "--preflight", "--model_name_or_path", "somebody/else"])
    tight = ["--use_vllm", "true", "--vllm_max_model_length", "20"]
    with pytest.raises(SettingsError, match="vllm_max_model_length"):
        grpo_qwen3.main([*own, "--preflight", *tight, "--model_name_or_path", "Qwen/Qwen3-0.6B"])


def test_a_pre_flight_goes_on_after_what_is_wrong_and_names_what_it_could_not_check(
    own: list[str], tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "prompt": "?", "tools": ["ad"]}')
    with pytest.raises(SettingsError) as caught:
        grpo_qwen3.main([*own, "--preflight", "--rewards", "nonsense", "--model_name_or_path", "somebody/else"])
    found = str(caught.value)
    for words in (
        "settings: A batch holds",
        "rewards: There is no reward 'nonsense'",
        "tokenizer: The tokenizer of",
        "tool 'ad' (1 task: 'a')",
    ):
        assert words in found
    assert "not run trainer: needs settings and tokenizer and rewards and tools" in found
    assert "not run room for prompts: needs trainer" in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora_target_modules", "no_such_layer"], "no_such_layer"),
        (["--weight_sync", "adapter", "--use_dora", "true"], "`use_dora` is on"),
        (["--weight_sync", "adapter", "--lora_modules_to_save", "q_norm"], "`modules_to_save` are whole layers"),
        (["--load_in_4bit", "true", "--use_dora", "true"], "base model is quantised.*`use_dora` is on"),
        (["--load_in_4bit", "true", "--bnb_4bit_quant_type", "fp4"], "fp4 without it"),
        (["--load_in_4bit", "true", "--use_peft", "false"], "cannot be trained"),
    ],
)
def test_a_pre_flight_looks_at_the_adapter_of_the_run(own: list[str], arguments: list[str], message: str) -> None:
    real = ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--use_vllm", "true"]
    with pytest.raises(SettingsError, match=message):
        grpo_qwen3.main([*own, "--preflight", *real, *arguments])


def test_a_run_leaves_what_is_needed_to_repeat_it_and_goes_on_exactly(own: list[str], tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trainer = grpo_qwen3.main([*own, "--output_dir", str(whole), "--debug", "--profile", "--hub_token", "secret"])
    assert trainer is not None
    # What it was told gives the same settings again.
    given = [*own, "--output_dir", str(whole), "--debug", "--profile"]
    script, config, model, _ = grpo_qwen3.parse(["--config", str(whole / "config.yaml")])
    assert "secret" not in (whole / "config.yaml").read_text()
    for found, wanted in zip((script, config, model), grpo_qwen3.parse(given), strict=False):
        differing = {
            n for n, v in vars(wanted).items() if n != "hub_token" and getattr(found, n) != v and not _is_state(v)
        }
        assert not differing
    facts = json.loads((whole / "versions.json").read_text())
    assert facts["catalog_hash"] == trainer.catalog.hash
    assert facts["packages"]["trl"]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in lines if "grad_norm" in line)
    assert "| rollout |" in (whole / "profile.md").read_text()
    assert "== Outcome ==" in (whole / "debug" / "step-1.txt").read_text()
    for name in ("adapter_model.safetensors", "chat_template.jinja", "curves.png", "run.log", "checkpoint-1"):
        assert (whole / name).exists()
    with pytest.raises(SettingsError, match="--resume"):
        grpo_qwen3.main([*own, "--output_dir", str(whole)])

    resumed.mkdir()
    for name in ("checkpoint-1", "stand-in", "config.yaml", "metrics.jsonl"):
        source = whole / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, resumed / name)
    again = grpo_qwen3.main([*own, "--output_dir", str(resumed), "--resume"])
    assert again is not None
    assert again.state.global_step == 2
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (whole, resumed))
    before = load_file(whole / "checkpoint-1" / "adapter_model.safetensors")
    for name, weight in expected.items():
        assert found[name].equal(weight), name
    assert any(not weight.equal(before[name]) for name, weight in expected.items())
    logged = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "grad_norm" in line] == [1, 2]
    assert "Settings have changed" not in (resumed / "run.log").read_text()


@pytest.mark.parametrize("every", ["1", "3"])
def test_the_last_step_is_judged_once(own: list[str], tmp_path: Path, every: str) -> None:
    judging = ["--eval_strategy", "steps", "--eval_steps", every, "--num_eval_tasks", "2"]
    judging += ["--eval_tasks", own[own.index("--tasks") + 1], "--per_device_eval_batch_size", "2"]
    grpo_qwen3.main(
        [*own, *judging, "--num_generations_eval", "1", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_reward" in line] == [1]


def test_a_run_says_that_solutions_fit_or_cannot_be_replayed(own: list[str], tmp_path: Path) -> None:
    script = {"steps": [{"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}], "final": "5"}
    endless = script | {"final": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'}
    room = ["--max_completion_length", "600", "--max_result_tokens", "200", "--max_turns", "4", "--max_steps", "1"]
    judging = ["--eval_strategy", "steps", "--eval_steps", "1", "--num_generations_eval", "1"]
    said = {}
    for name, solution in {"fits": script, "reads as a call": endless, "text": "Add them."}.items():
        tasks = tmp_path / f"{name}.jsonl"
        tasks.write_text("".join(json.dumps({**row, "solution": solution}) + "\n" for row in ROWS[:2]))
        folder = tmp_path / name
        grpo_qwen3.main([*own, *room, *judging, "--eval_tasks", str(tasks), "--output_dir", str(folder)])
        said[name] = (folder / "run.log").read_text()
    assert "The solutions of 2 of 2 tasks to judge by are replayed" in said["fits"]
    assert "They all fit." in said["fits"]
    assert "could not be replayed: A scripted solution was to go on after its last turn" in said["reads as a call"]
    assert "are replayed" not in said["text"]


def test_a_run_judges_itself_before_and_after_and_its_card_says_so(own: list[str], tmp_path: Path) -> None:
    script = {"steps": [{"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}], "final": "5"}
    tasks = tmp_path / "judged.jsonl"
    kinds = ("[red]", "[red]", "sums", "sums")
    rows = [{**row, "solution": script, "family": kind} for row, kind in zip(ROWS, kinds, strict=True)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judging = ["--eval_strategy", "steps", "--eval_steps", "1", "--eval_on_start", "true", "--eval_tasks", str(tasks)]
    judging += ["--per_device_eval_batch_size", "4", "--num_generations_eval", "1", "--max_steps", "1"]
    grpo_qwen3.main([*own, *judging, "--output_dir", str(tmp_path / "run")])
    card = (tmp_path / "run" / "README.md").read_text().replace("\\", "")
    assert "| success, with 95 % interval | 0.0% (" in card
    assert "4 tasks, 1 attempts each, at step 0 and at step 1." in card
    assert "By success: No difference is shown" in card
    assert "Success of others on the same tasks: doing nothing 0.0%, scripted solutions 100.0%." in card
    report = (tmp_path / "run" / "report.txt").read_text()
    assert "success, with 95 %" in report
    assert re.search(r"│ \[red\] │ 0 of 2(, \d cut)? │ 0 of 2(, \d cut)? │", " ".join(report.split()))
    assert "No attempt at `[red]`, `sums` succeeded in any evaluation" in report
    assert (
        "4 of 4 tasks to judge by cannot be done as their solutions do within the limits of this run: 4 because "
        "it is longer than `max_completion_length`, or a turn of it than `max_turn_tokens` (`[red]`, `sums`)."
    ) in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.full
def test_a_run_ends_in_time_with_its_rate_fallen_and_goes_on_with_new_time(
    own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_qwen3, "RESERVE", 15.0)  # of a tiny model, to be done sooner
    folder, tasks = tmp_path / "run", own[own.index("--tasks") + 1]
    judging = ["--eval_strategy", "steps", "--eval_steps", "1000", "--eval_on_start", "true", "--eval_tasks", tasks]
    judging += ["--per_device_eval_batch_size", "4", "--num_generations_eval", "1", "--save_steps", "1000"]
    falling = ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", '{"num_decay_steps": 6}']
    given = [*own, *judging, *falling, "--max_steps", "1000", "--on_unhealthy", "warn", "--output_dir", str(folder)]
    steps = []
    for minutes, more in (("0.8", []), ("0.81", ["--resume"])):
        began = time.monotonic()
        trainer = grpo_qwen3.main([*given, "--minutes", minutes, *more])
        assert time.monotonic() - began < 48
        assert trainer is not None
        steps.append(trainer.state.global_step)
        said = f"Training ended after {steps[-1]} of 1000 steps, as its {minutes} minutes are nearly over."
        assert capsys.readouterr().out.count(said) == 1
        assert (folder / "report.txt").read_text().startswith(said)
        assert said in (folder / "run.log").read_text()
    assert "Settings have changed" not in (folder / "run.log").read_text()
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in logged if "learning_rate" in line}
    assert set(steps) <= {line["step"] for line in logged if "eval_reward" in line}
    assert all((folder / f"checkpoint-{step}").is_dir() for step in steps)
    for first, last in ((1, steps[0]), (steps[0] + 1, steps[1])):
        assert last - first > 8
        assert rates[first] == rates[first + 2] == 1e-3
        assert rates[last] < 5e-4


def test_a_token_of_the_command_line_is_written_nowhere(own: list[str], tmp_path: Path) -> None:
    folder, token = tmp_path / "run", "hf_canaryofthehub"
    command = [sys.executable, "recipes/grpo_qwen3.py", *own, "--max_steps", "1", "--output_dir", str(folder)]
    finished = subprocess.run(
        [*command, "--hub_token", token],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    told = json.loads((folder / "versions.json").read_text())["command"]
    assert told.startswith("python recipes/grpo_qwen3.py --config cpu_debug.yaml")
    assert told.endswith("--hub_token '***'")
    # `training_args.bin` holds the arguments themselves; it is never uploaded.
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "training_args.bin"]
    assert not [file.name for file in files if token.encode() in file.read_bytes()]


def _is_state(value: Any) -> bool:
    """Whether it is an object of this process, not a setting."""
    return type(value).__name__ in ("AcceleratorConfig", "PartialState", "device", "DistributedType")


def test_resuming_with_other_settings_or_without_a_checkpoint_is_not_silent(
    own: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SettingsError, match="no checkpoint"):
        grpo_qwen3.main([*own, "--output_dir", str(tmp_path / "none"), "--resume"])
    _, _, _, settings = grpo_qwen3.parse([*own, "--output_dir", str(tmp_path / "run"), "--resume"])
    for name in ("checkpoint-3", "checkpoint-4"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in ("trainer_state.json", "adapter_model.safetensors"):
        (tmp_path / "run" / "checkpoint-3" / name).write_text("{}")
    before = {**settings, "beta": 0.5}
    write_settings(before, tmp_path / "run" / "config.yaml")
    folder = RunFolder(tmp_path / "run", settings)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-3")
    assert "checkpoint-4 is not complete" in caplog.text
    assert "beta (0.5 -> 0.0)" in caplog.text


@pytest.mark.full
def test_the_debug_configuration_trains_on_the_desk_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "recipes/grpo_qwen3.py", "--config", "recipes/configs/cpu_debug.yaml"]
    finished = subprocess.run(
        [*command, "--debug", "--profile", "--output_dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 for line in lines if "grad_norm" in line)
    refused = subprocess.run([*command, "--gibberish", "1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "There is no setting `gibberish`" in refused.stderr
    assert "Traceback" not in refused.stderr


def _free_port() -> int:
    """The first of two ports that nobody listens on."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        try:
            two.bind(("127.0.0.1", one.getsockname()[1] + 1))
        except OSError:
            return _free_port()
        return one.getsockname()[1]


FAKES = {
    # A cluster of two nodes that are both this machine.
    "scontrol": "echo localhost; echo localhost",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; export SLURM_PROCID=0; exec "$@"',
    "vllm": 'echo vllm "$@" >>"$CALLS"; exec {python} -m http.server 8000 --bind 127.0.0.1',
    "accelerate": 'echo accelerate "$@" >>"$CALLS"; {training}',
    "mcp-fake": "exec {python} -m http.server {port} --bind 127.0.0.1",
}


@pytest.mark.parametrize(
    ("training", "status"), [("sleep 0.2; exit 0", 0), ("sleep 0.2; exit 7", 7), ("exec sleep 600", 143)]
)
def test_the_slurm_script_starts_everything_and_ends_everything(tmp_path: Path, training: str, status: int) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    port = _free_port()
    for name, body in FAKES.items():
        text = body.replace("{python}", sys.executable).replace("{training}", training).replace("{port}", str(port))
        text = text.replace("8000", str(port + 1)) if name == "vllm" else text
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod((programs / name).stat().st_mode | stat.S_IXUSR)
    script = (ROOT / "recipes" / "slurm" / "train.sbatch").read_text()
    assert "sleep 2" in script
    script = script.replace("VLLM_PORT=8000", f"VLLM_PORT={port + 1}").replace("sleep 2", "sleep 0.2")
    (tmp_path / "train.sbatch").write_text(script)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VENV"},  # `make` may have set it
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_GPUS_ON_NODE": "8",
        "VLLM_MODEL": "Qwen/Qwen3-4B",
        "MCP_SERVERS": "mcp-fake\n",
        "MCP_PORTS": str(port),
        "STARTUP_SECONDS": "60",
        **({} if status else {"SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}),
    }
    job = subprocess.Popen(
        ["bash", str(tmp_path / "train.sbatch"), "--config", "a file.yaml"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if status == 143:
        deadline = time.monotonic() + 60
        while "accelerate" not in (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job.terminate()
    output, _ = job.communicate(timeout=120)
    assert job.returncode == status, output
    calls = (tmp_path / "calls").read_text()
    assert "vllm serve Qwen/Qwen3-4B" in calls
    assert "--num_machines 1 --num_processes 8" in calls
    assert f"--config a file.yaml --vllm_mode server --vllm_server_base_url http://localhost:{port + 1}" in calls
    assert re.findall(r"--minutes (\S+) --config", calls) in ([[]] if status else [["55"], ["56"]])
    left = subprocess.run(["pgrep", "-f", str(programs)], capture_output=True, text=True, check=False).stdout
    listening = subprocess.run(
        ["pgrep", "-f", f"http.server {port}"], capture_output=True, text=True, check=False
    ).stdout
    assert not left
    assert not listening


def test_rewards_of_all_kinds_are_loaded_and_only_makers_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_of_mine.py").write_text(
        "def plain(prompts, completions, **kwargs): return [1.0]\n"
        "def ours(trajectory, **kwargs): return [2.0]\n"
        "def maker(weight=3.0): return lambda trajectory, **kwargs: [weight]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ["task_outcome", "desk_reward", *(f"rewards_of_mine:{name}" for name in ("plain", "ours", "maker"))]
    outcome, desk, plain, ours, made = load_rewards(names)
    assert outcome is mcp_grpo.rewards.task_outcome
    assert isinstance(desk, mcp_grpo.rewards.Rubric)
    assert [plain([], []), ours([]), made([])] == [[1.0], [2.0], [3.0]]
    with pytest.raises(SettingsError, match="There is no reward 'nothing'"):
        load_rewards(["nothing"])


def test_trackers_show_a_run_in_a_project_named_like_its_folder(own: list[str], tmp_path: Path) -> None:
    for arguments, project in [
        ([*own, "--output_dir", str(tmp_path / "my_run")], "my_run"),
        ([*own, "--output_dir", str(tmp_path / "my_run"), "--project", "mine"], "mine"),
        ([*own[2:], "--model_name_or_path", "org/Model-1B"], "Model-1B"),
    ]:
        _, config, _, _ = grpo_qwen3.parse(arguments)
        assert config.project == project


def test_the_log_of_a_failed_run_has_its_traceback_without_secrets(
    own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_API_KEY", "canary-of-a-key-1")
    _, _, _, settings = grpo_qwen3.parse([*own, "--output_dir", str(tmp_path)])
    with pytest.raises(RuntimeError), RunFolder(tmp_path, settings).logging():
        raise RuntimeError("refused: canary-of-a-key-1, \x1b]0;Bearer 0123456789abcdef")
    log = (tmp_path / "run.log").read_text()
    assert "RuntimeError: refused: ***, ␛]0;Bearer ***" in log
    assert "Traceback" in log
    assert "canary-of-a-key-1" not in log


def test_training_ends_where_evaluations_get_no_better_and_the_best_is_kept(own: list[str], tmp_path: Path) -> None:
    tasks = own[own.index("--tasks") + 1]
    judged = ["--eval_strategy", "steps", "--eval_steps", "1", "--eval_tasks", tasks, "--num_eval_tasks", "1"]
    saved = ["--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(tmp_path / "out")]
    flags = ["--max_steps", "4", "--rewards", "exact_answer", "--early_stopping_patience", "1"]
    trainer = grpo_qwen3.main([*own, *judged, *saved, *flags])
    assert trainer is not None
    assert (trainer.state.global_step, trainer.state.best_global_step) == (2, 1)
    with pytest.raises(SettingsError, match=r"goes by the best evaluation\. Set `keep_best`"):
        grpo_qwen3.main([*own, *judged, *saved, *flags, "--keep_best", "false"])
