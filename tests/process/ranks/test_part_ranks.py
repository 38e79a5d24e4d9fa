"""Parts of the trainer on two processes: gradients, references and adapters are those of one process, and both end at one step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import launch
from helpers.references import KINDS
from safetensors.torch import load_file


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have written that did all of it, since it takes long to start them."""
    folder = tmp_path_factory.mktemp("parts")
    finished = launch("part_ranks.py", folder, "value_ranks", "reference_ranks", "sharded_export", "deadline_ranks")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "value_ranks" / f"rank{rank}.json").read_text()) for rank in (0, 1)]


ADAPTERS = (
    "ddp_lora",
    *(f"ddp_lora_{how}" for how in ("checkpointing", "kept_by_one", "kept_by_all", "out_of_memory")),
)


@pytest.mark.parametrize("variant", ["ddp", "ddp_unused", *ADAPTERS, "fsdp", "fsdp_lora"])
def test_gradients_of_policy_and_head_are_those_of_one_process(reports: list[dict[str, Any]], variant: str) -> None:
    for report in (report[variant] for report in reports):
        assert report["ranks"] == 0
        assert report["policy"] <= 1e-6
        assert report["head"] <= 1e-6
        assert min(report["policy_size"], report["head_size"]) > 1e-2


def test_a_sharded_head_takes_the_weights_of_a_whole_one(reports: list[dict[str, Any]]) -> None:
    assert all(report["loads_into_shards"] for report in reports)


def check_references(folder: Path) -> None:
    for what in KINDS:
        result = json.loads((folder / what / "result.json").read_text())
        assert result["num_syncs"] == 4
        for (distance, num_differing), (expected, expected_num) in result["differences"]:
            assert distance == pytest.approx(expected, rel=1e-5)
            assert distance > 0.01
            assert num_differing == expected_num > 0
        assert max(result["gaps"]) < 1e-5
        files = (folder / what / "reference.safetensors", folder / what / "whole" / "reference.safetensors")
        sharded, whole = map(load_file, files)
        assert sharded.keys() == whole.keys()
        assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_a_reference_of_sharded_parameters_moves_as_that_of_whole_ones(folder: Path) -> None:
    check_references(folder / "reference_ranks")


def test_a_reference_of_parameters_that_deepspeed_shares_out_moves_as_that_of_whole_ones(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    finished = launch("reference_ranks.py", tmp_path, "zero3")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    check_references(tmp_path)


def test_an_adapter_that_is_sharded_is_written_whole(folder: Path) -> None:
    files = [folder / "sharded_export" / kind / "adapter_model.safetensors" for kind in ("whole", "sharded")]
    whole, sharded = map(load_file, files)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    assert any(value.any() for name, value in whole.items() if "lora_B" in name)


def test_processes_whose_steps_differ_in_length_end_at_the_same_step_and_with_the_same_rates(folder: Path) -> None:
    first, second = (json.loads((folder / "deadline_ranks" / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["step"] == 20  # by the clock of the first process
    assert first == second
    assert first["rates"][-1] < 0.1 < first["rates"][0]
