"""The launch line: it trains by itself, says what it chose, and what is missing or wrong in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.shell import Said, Shell
from helpers.sums import ROWS, SERVERS


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # what is chosen does not depend on the machine of the tests


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Servers and tasks of one's own."""
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": SERVERS}))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:1]))
    return ["--servers", str(tmp_path / "servers.json"), "--tasks", str(tmp_path / "tasks.jsonl")]


@pytest.fixture
def without_extras(tmp_path: Path) -> dict[str, str]:
    """Variables of a Python that has none of the extras' packages, whatever is installed."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "hidden = ('vllm', 'deepspeed', 'bitsandbytes', 'llguidance')\n"
        "importlib.util.find_spec = lambda name, package=None: None if name in hidden else find(name, package)\n"
    )
    return {"PYTHONPATH": str(tmp_path / "hidden"), **NO_GPU}


def lines(said: Said) -> list[str]:
    """What was said, without what libraries say when they are imported."""
    return [line for line in said.err.splitlines() if line.strip() and "Warning" not in line]


@pytest.mark.full
def test_the_launch_line_alone_says_what_it_chose_and_that_there_are_no_weights(shell: Shell) -> None:
    said = shell.run("accelerate", "launch", "--quiet", "recipes/grpo_qwen3.py", **NO_GPU)
    assert said.status == 1
    chosen, choice = said.out.split("Choose otherwise with flags")
    assert "from recipes/configs/qwen3_0.6b_lora_vllm.yaml" in chosen
    assert "Qwen/Qwen3-0.6B with a LoRA adapter, on the desk" in chosen
    assert "on the CPU, in float32, 8 trajectories a step: there is no GPU" in chosen
    assert "by Transformers: vLLM needs a GPU" in chosen
    assert "--config recipes/configs/NAME.yaml: classic, classic_tuned, cpu_debug" in choice
    assert len(said.out.splitlines()) <= 6
    [sentence] = [line for line in said.err.splitlines() if line.startswith("SettingsError")]
    assert "weights of 'Qwen/Qwen3-0.6B' are neither a folder here nor in the cache" in sentence
    assert "offline (`HF_HUB_OFFLINE` is set)" in sentence
    for way in ("`--model_name_or_path FOLDER`", "`make quickstart`", "recipes/quickstart.py", "cpu_debug.yaml"):
        assert way in sentence
    assert "Traceback" not in said.terminal
    assert not (shell.folder / "outputs").exists()  # nothing was started


@pytest.mark.full
def test_it_trains_a_model_in_a_folder_on_servers_and_a_single_task(
    shell: Shell, own: list[str], adding_model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = ["--model_name_or_path", adding_model, *own, "--output_dir", str(run), "--learning_rate", "1e-3"]
    short = ["--max_steps", "1", "--max_completion_length", "64"]
    said = shell.run_forked("recipes/grpo_qwen3.py", *flags, *short, **NO_GPU)
    assert said.status == 0, said.terminal[-3000:]
    assert f"{adding_model} with a LoRA adapter, on servers of" in said.out
    assert "4 trajectories instead of 8: there are only 1 tasks" in said.out
    assert "evaluate never: name tasks to judge by with --eval_tasks" in said.terminal
    assert (run / "adapter_model.safetensors").exists()
    [step] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "grad_norm" in line]
    assert step["tools/call_frequency"] > 0
    settings = (run / "config.yaml").read_text()
    assert "learning_rate: 0.001" in settings  # a flag comes first
    assert "warmup_steps: 2\n" in settings  # by the size of the model
    assert "epsilon_high: 0.28" in settings  # from the configuration
    assert "use_vllm: false" in settings


@pytest.mark.full
def test_it_trains_on_the_desk(shell: Shell, tmp_path: Path) -> None:
    make = f"from mcp_grpo.doctor.stand_in import *; save_stand_in({str(tmp_path / 'model')!r}, tokenizer_of(STAND_IN)[0])"
    assert shell.run("python", "-c", make, PYTHONPATH="recipes").status == 0
    small = ["--max_steps", "1", "--num_tasks", "16", "--max_completion_length", "48", "--eval_strategy", "no"]
    where = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "run")]
    said = shell.run("accelerate", "launch", "recipes/grpo_qwen3.py", *where, *small, **NO_GPU)
    assert said.status == 0, said.terminal[-3000:]
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


@pytest.mark.full
def test_packages_that_are_not_installed_are_all_named_before_anything_starts(
    shell: Shell, without_extras: dict[str, str], adding_model: str
) -> None:
    config = ["--config", "recipes/configs/qwen3_8b_zero3.yaml", "--model_name_or_path", adding_model]
    wanted = ["--load_in_4bit", "true", "--optim", "paged_adamw_8bit", "--schema_mask", "grammar"]
    said = shell.run("python", "recipes/grpo_qwen3.py", *config, *wanted, **without_extras)
    assert said.status == 1
    assert "Traceback" not in said.terminal
    for setting, package, extra, instead in (
        ("`use_vllm: true`", "vllm", "vllm", "--use_vllm false"),
        ("`load_in_4bit: true`", "bitsandbytes", "quantization", "--load_in_4bit false"),
        ("`optim: paged_adamw_8bit`", "bitsandbytes", "quantization", "--optim adamw_torch"),
        ("`schema_mask: grammar`", "llguidance", "grammar", "--schema_mask syntax"),
        ("launched with `recipes/accelerate/zero3.yaml`, which", "deepspeed", "deepspeed", "FSDP2"),
    ):
        assert f"{setting} needs `{package}`, which is not installed: `pip install 'mcp-grpo[{extra}]'`" in said.err
        assert instead in said.err


@pytest.mark.full
def test_deepspeed_that_is_asked_for_by_a_flag_is_named(shell: Shell, without_extras: dict[str, str]) -> None:
    flags = ["--model_name_or_path", "stand-in", "--deepspeed", "ds.json"]
    said = shell.run("python", "recipes/grpo_qwen3.py", *flags, **without_extras)
    assert said.status == 1
    assert "`deepspeed` needs `deepspeed`, which is not installed: `pip install 'mcp-grpo[deepspeed]'`" in said.err
    assert "Traceback" not in said.terminal


@pytest.mark.full
def test_a_trainer_in_python_names_vllm_before_it_starts_a_server(
    shell_in: Callable[[Path], Shell], without_extras: dict[str, str], adding_model: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "from datasets import Dataset\n"
        "from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer\n"
        "rows = Dataset.from_list([{'task_id': str(i), 'prompt': 'a'} for i in range(8)])\n"
        "servers = {'mcpServers': {'none': {'command': 'no-such-program'}}}\n"
        f"model, args = {adding_model!r}, MCPGRPOConfig('out', use_vllm=True)\n"
        "MCPGRPOTrainer(model, lambda **_: [0.0], args, rows, servers=servers)\n"
    )
    said = shell_in(tmp_path).run("python", "train.py", **without_extras)
    assert said.status == 1
    assert lines(said)[-1].startswith("mcp_grpo.errors.SettingsError: `use_vllm: true` needs `vllm`, which is not")


@pytest.mark.parametrize("recipe", ["grpo_qwen3.py", "sft_warmup.py", "quickstart.py"])
def test_a_wrong_flag_is_one_sentence_without_usage(shell: Shell, recipe: str) -> None:
    said = shell.run_forked(f"recipes/{recipe}", "--max_step", "3", "--kl_penalty_coef", "1", "--gibberish", "1")
    assert said.status == 1
    assert said.out in ("", "Loading torch, transformers and TRL ...\n")
    [sentence] = lines(said)
    assert "There is no setting `max_step` (on the command line). Did you mean `max_steps`?" in sentence
    assert "There is no setting `gibberish` (on the command line), and none has a name like it" in sentence
    if recipe == "grpo_qwen3.py":
        assert "`kl_penalty_coef` (on the command line): it is `beta` here." in sentence


def test_help_is_by_subject(shell: Shell) -> None:
    said = shell.run_forked("recipes/grpo_qwen3.py", "--help", COLUMNS="100")
    assert said.status == 0
    wanted = {
        "This recipe": ("--servers", "--tasks", "--resume", "--preflight"),
        "Model and adapter": ("--model_name_or_path", "--lora_r", "--load_in_4bit"),
        "Rollout": ("--max_turns", "--max_completion_length", "--temperature"),
        "Sampling": ("--use_vllm", "--vllm_mode", "--weight_sync"),
        "Mask": ("--schema_mask", "--bootstrap_imitation_coef"),
        "Guards": ("--epsilon", "--beta", "--ratio_gate"),
        "Learning": ("--learning_rate", "--max_steps"),
        "Evaluation, saving, tracking": ("--eval_steps", "--save_steps", "--report_to"),
        "Everything else of TRL and Transformers": ("--ddp_timeout",),
    }
    rest = said.out
    for subject, flags in reversed(wanted.items()):
        rest, title, text = rest.partition(f"\n{subject}\n")
        assert title, subject
        listed = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
        assert set(flags) <= listed, subject
    assert len(rest.splitlines()) < 20  # what it does, and how it is called
    assert max(map(len, said.out.splitlines())) < 130
