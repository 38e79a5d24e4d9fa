"""The settings that a machine gets where no configuration is named: by what it has, and with flags first."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpo_qwen3
import pytest
import yaml
from recipe_parts.machine import Machine, choose, describe, fit_to_tasks
from recipe_parts.requirements import missing_weights
from transformers import Qwen3Config

from mcp_grpo.requirements import missing_packages
from mcp_grpo.train.settings import CONFIGS


LARGE = Machine(gpu="H200", memory=139.0, has_bf16=True, packages=frozenset({"vllm", "bitsandbytes"}))


def machine(**changes: Any) -> Machine:
    return Machine(**{**vars(LARGE), **changes})


@pytest.mark.parametrize(
    ("here", "config", "wanted", "reason"),
    [
        (LARGE, "qwen3_0.6b_lora_vllm", {"use_vllm": True, "per_device_train_batch_size": 16}, "by vLLM"),
        (machine(memory=15.0), "qwen3_0.6b_qlora", {"load_in_4bit": True, "per_device_train_batch_size": 4}, "4 bits"),
        (
            machine(memory=8.0, packages=frozenset({"vllm"})),
            "qwen3_0.6b_lora_vllm",
            {"use_vllm": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 32},
            "2 trajectories in a pass",
        ),
        (
            machine(packages=frozenset(), memory=24.0),
            "qwen3_0.6b_lora_vllm",
            {"use_vllm": False, "max_concurrent_trajectories": 11},
            "pip install 'mcp-grpo[vllm]'",
        ),
        (machine(has_bf16=False), "qwen3_0.6b_lora_vllm", {"dtype": "float32", "use_vllm": False}, "bf16"),
        (Machine(), "qwen3_0.6b_lora_vllm", {"use_cpu": True, "dtype": "float32", "use_vllm": False}, "no GPU"),
    ],
)
def test_settings_are_chosen_by_what_the_machine_has(
    here: Machine, config: str, wanted: dict[str, Any], reason: str
) -> None:
    choice = choose(here, {})
    assert choice.config == config
    assert wanted.items() <= choice.settings.items()
    assert reason in describe(choice)
    whole = choice.settings["per_device_train_batch_size"] * choice.settings["gradient_accumulation_steps"]
    assert whole % choice.settings["num_generations"] == 0
    assert choice.settings["use_vllm"] == any(name.startswith("vllm_") for name in choice.settings)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_settings_in_code_are_those_of_the_recipes(name: str) -> None:
    path = Path(grpo_qwen3.__file__).parent / "configs" / f"{name}.yaml"
    in_file = yaml.safe_load(path.read_text())
    in_file.pop("output_dir")
    assert in_file == CONFIGS[name]


def test_what_is_chosen_goes_with_the_flags() -> None:
    assert choose(LARGE, {"use_cpu": True}).settings["use_cpu"]
    assert "`use_cpu` is set" in describe(choose(LARGE, {"use_cpu": True}))
    assert choose(LARGE, {"use_vllm": False}).settings["max_concurrent_trajectories"]
    assert choose(LARGE, {"servers": "servers.json"}).settings["eval_strategy"] == "no"
    assert choose(LARGE, {"servers": "s.json", "eval_tasks": "t.jsonl"}).settings["eval_strategy"] == "steps"


@pytest.mark.parametrize(
    ("memory", "given", "share"),
    [
        (139.8, {}, 0.15),
        (79.1, {}, 0.27),
        (47.0, {}, None),
        (139.8, {"model_name_or_path": "somebody/else-70b"}, None),
        (139.8, {"vllm_gpu_memory_utilization": 0.7}, None),
        (139.8, {"vllm_enable_sleep_mode": True}, None),
        (139.8, {"vllm_mode": "server"}, None),
    ],
)
def test_vllm_stays_awake_where_there_is_room_for_it(
    memory: float, given: dict[str, Any], share: float | None
) -> None:
    choice = choose(machine(memory=memory), given)
    expected = (True, 0.5) if share is None else (False, share)
    assert (
        tuple(choice.settings[name] for name in ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization")) == expected
    )
    assert ("21 GiB of the GPU for vLLM" in describe(choice)) == (share is not None)


@pytest.mark.parametrize("given", [{"use_cpu": True}, {"use_cpu": True, "use_vllm": True}, {"use_vllm": False}])
def test_nothing_is_kept_for_vllm_where_it_is_not_on_the_gpu(given: dict[str, Any]) -> None:
    settings = choose(LARGE, given).settings
    assert settings.get("vllm_gpu_memory_utilization", 0.5) == 0.5
    assert settings.get("vllm_enable_sleep_mode", True)
    assert "for vLLM, which" not in describe(choose(LARGE, given))


def test_a_model_of_unknown_size_has_small_passes() -> None:
    assert choose(LARGE, {"model_name_or_path": "somebody/else-70b"}).settings["per_device_train_batch_size"] == 8


@pytest.mark.parametrize(
    ("width", "layers", "wanted"),
    [
        (512, 12, {"learning_rate": 5e-4, "beta": 0.0, "lora_r": 32}),
        (1024, 20, {"learning_rate": 1e-4, "beta": 0.0, "max_steps": 100}),
        (1536, 28, {"learning_rate": 1e-4, "beta": 0.0, "max_steps": 60}),
        (2560, 36, {"learning_rate": 2e-5, "beta": 0.05, "ref_sync": "ema", "lora_r": 16}),
    ],
)
def test_a_model_is_taught_by_its_size(tmp_path: Path, width: int, layers: int, wanted: dict[str, Any]) -> None:
    config = Qwen3Config(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, tie_word_embeddings=True
    )
    config.save_pretrained(tmp_path)
    choice = choose(LARGE, {"model_name_or_path": str(tmp_path)})
    assert wanted.items() <= choice.settings.items()
    assert f"at a rate of {wanted['learning_rate']:g}, for a model of" in describe(choice)


def test_a_model_of_unknown_size_is_taught_carefully() -> None:
    choice = choose(LARGE, {"model_name_or_path": "somebody/else-70b"})
    assert choice.settings["learning_rate"] == 2e-5
    assert "at a rate of 2e-05, for a model of unknown size" in describe(choice)


def test_all_weights_are_taught_slowly_and_without_a_reference() -> None:
    for model in ({}, {"model_name_or_path": "somebody/else-70b"}):
        choice = choose(LARGE, {"use_peft": False, **model})
        assert {"learning_rate": 1e-6, "beta": 0.0}.items() <= choice.settings.items()
        assert "ref_sync" not in choice.settings
        assert "at a rate of 1e-06, for all weights" in describe(choice)


def test_without_a_reference_none_follows() -> None:
    given = {"model_name_or_path": "somebody/else-70b", "beta": 0.0}
    assert not [name for name in choose(LARGE, given).settings if name.startswith("ref_")]


def test_a_rate_that_is_given_is_not_said_to_be_chosen() -> None:
    given = {"model_name_or_path": "somebody/else-70b", "learning_rate": 3e-4}
    assert "at a rate of" not in describe(choose(LARGE, given))


def test_a_step_is_no_larger_than_there_are_tasks() -> None:
    few = choose(LARGE, {})
    fit_to_tasks(few, 3, 1, {})
    assert few.settings["gradient_accumulation_steps"] == 3
    assert few.settings["per_device_train_batch_size"] == 8
    even = choose(LARGE, {})
    fit_to_tasks(even, 6, 1, {})
    assert even.settings["gradient_accumulation_steps"] == 3
    assert even.settings["per_device_train_batch_size"] == 16
    many = choose(LARGE, {})
    fit_to_tasks(many, 300, 1, {})
    assert many.settings["gradient_accumulation_steps"] == 4
    given = choose(LARGE, {})
    fit_to_tasks(given, 3, 1, {"gradient_accumulation_steps": 8})
    assert given.settings["gradient_accumulation_steps"] == 4  # as it was: what is given comes first


def test_flags_come_before_what_is_chosen_and_a_configuration_before_any_choice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipe_parts.machine.Machine.here", Machine)
    _, config, model, settings = grpo_qwen3.parse(["--model_name_or_path", "stand-in", "--lora_r=4", "--beta", "0.3"])
    assert (model.lora_r, config.beta, model.use_peft) == (4, 0.3, True)
    assert config.output_dir == settings["output_dir"] == "outputs/stand-in"
    assert "Chosen for this machine" in capsys.readouterr().out
    path = Path(grpo_qwen3.__file__).parent / "configs" / "cpu_debug.yaml"
    assert grpo_qwen3.parse(["--config", str(path)])[1].learning_rate == 1e-3
    assert "Chosen" not in capsys.readouterr().out


def test_a_vllm_server_needs_no_vllm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_grpo.requirements.find_spec", lambda name: None)
    settings = SimpleNamespace(
        use_vllm=True, vllm_mode="server", deepspeed=None, optim="adamw_torch", schema_mask="off"
    )
    assert missing_packages(settings) == []
    [sentence] = missing_packages(SimpleNamespace(**{**vars(settings), "vllm_mode": "colocate"}))
    assert "--use_vllm false" in sentence
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    [sentence] = missing_packages(settings)
    assert "mcp-grpo[deepspeed]" in sentence


def cached(folder: Path, files: dict[str, str]) -> Path:
    """A cache of the Hub that has these files of a model."""
    repo = folder / "models--somebody--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").mkdir(parents=True)
    for name, text in files.items():
        (repo / "snapshots" / "abc" / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "is_there"),
    [
        ({"config.json": "{}", "model.safetensors": ""}, True),
        ({"config.json": "{}"}, False),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
                ),
                "1.safetensors": "",
            },
            False,
        ),
    ],
)
def test_weights_are_looked_for_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], is_there: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached(tmp_path, files)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problem = missing_weights(SimpleNamespace(model_name_or_path="somebody/model", model_revision="main"))
    assert (problem is None) == is_there


def test_a_folder_without_a_model_and_a_name_that_is_none_are_told(tmp_path: Path) -> None:
    def problem(name: str) -> str | None:
        return missing_weights(SimpleNamespace(model_name_or_path=name, model_revision="main"))

    assert "has no `config.json`" in str(problem(str(tmp_path)))
    assert "There is no folder './no/such/folder' here" in str(problem("./no/such/folder"))
    (tmp_path / "config.json").write_text("{}")
    assert problem(str(tmp_path)) is None
    assert problem("stand-in") is None
