"""Several processes: a group may span them, figures are theirs together, and one that fails does not hang the others."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import launch


DEEPSPEED = find_spec("deepspeed") is not None


def run(
    folder: Path, model: str, dying_rank: str = "none", changes: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    return launch("train_ranks.py", model, folder, dying_rank, json.dumps(changes or {}))


def test_two_processes_train_one_policy_on_groups_that_span_them(tmp_path: Path, adding_model: str) -> None:
    finished = run(tmp_path, adding_model)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert len(set(first["tasks"] + second["tasks"])) == 1  # a group of eight, four on each
    history = [entry for entry in first["history"] if "reward" in entry]
    assert len(history) == 2
    assert history[0]["tools/call_frequency"] > 0.5
    for step, entry in enumerate(history):
        rewards = first["rewards"][step] + second["rewards"][step]
        assert len(rewards) == 8
        assert entry["reward"] == pytest.approx(sum(rewards) / 8)


def test_a_process_whose_server_breaks_stops_all_with_the_reason(tmp_path: Path, adding_model: str) -> None:
    finished = run(tmp_path, adding_model, dying_rank="1")
    assert finished.returncode != 0
    assert finished.stderr.count("of the trajectories failed for reasons the policy is not to blame for") >= 2
    assert "ended the connection" in finished.stderr


def test_with_everything_on_two_processes_keep_one_policy_one_value_head_and_one_reference(
    tmp_path: Path, adding_model: str
) -> None:
    changes = {
        "advantage_mode": "hybrid",
        "value_warmup_steps": 0,
        "value_learning_rate": 0.01,
        "beta": 0.05,
        "ref_sync": "ema",
        "ref_sync_steps": 1,
        "schema_mask": "syntax",
        "bootstrap_steps": 5,
        "dynamic_sampling": 1,
        "first_call_retries": 1,
    }
    finished = run(tmp_path, adding_model, changes=changes)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert {"value_head", "ref", "default"} <= {part for name in first["weights"] for part in name.split(".")}
    assert any(value for name, value in first["weights"].items() if "value_head" in name)
    assert len(set(first["tasks"] + second["tasks"])) == 1  # also where a group was replaced
    history = [entry for entry in first["history"] if "reward" in entry]
    assert history[0]["ratio/p50"] == pytest.approx(1, abs=1e-3)
    assert history[-1]["ref/distance"] > 0


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}
ZERO3 = {
    "deepspeed": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }
}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> dict[str, Any]:
    """What two processes come to that each have all weights."""
    return full_weights(tmp_path_factory.mktemp("ddp"), adding_model, {})


def full_weights(folder: Path, model: str, changes: dict[str, Any]) -> dict[str, Any]:
    finished = run(folder, model, changes={"peft": False, "learning_rate": 1e-3, **changes})
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads((folder / "rank0.json").read_text())


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(FSDP2, id="fsdp2"),
        # DeepSpeed compiles its own communication for CPUs when it is first used, which takes minutes.
        pytest.param(
            ZERO3, id="zero3", marks=[pytest.mark.slow, pytest.mark.skipif(not DEEPSPEED, reason="needs deepspeed")]
        ),
    ],
)
def test_shared_weights_are_trained_as_whole_ones_are(
    tmp_path: Path, adding_model: str, ddp: dict[str, Any], sharding: dict[str, Any]
) -> None:
    sharded = full_weights(tmp_path, adding_model, sharding)
    assert sharded["is_sharded"]
    assert not ddp["is_sharded"]
    for one, other in zip(ddp["history"], sharded["history"], strict=True):
        for key in {"loss", "grad_norm", "reward", "num_tokens"} & one.keys():
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6)
    assert ddp["weights"].keys() == sharded["weights"].keys()
    for name, weight in ddp["weights"].items():
        assert sharded["weights"][name] == pytest.approx(weight, abs=1e-3)
