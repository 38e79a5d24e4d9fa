"""A value head on two processes: the gradients are those of one process, for DDP and FSDP."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


SCRIPT = Path(__file__).parent.parent / "servers" / "value_ranks.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("value_ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finished = subprocess.run(
        [*command, str(SCRIPT), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("variant", ["ddp", "ddp_unused", "ddp_lora", "ddp_lora_checkpointing", "fsdp", "fsdp_lora"])
def test_gradients_of_policy_and_head_are_those_of_one_process(reports: list[dict[str, Any]], variant: str) -> None:
    for report in (report[variant] for report in reports):
        assert report["ranks"] == 0
        assert report["policy"] <= 1e-6
        assert report["head"] <= 1e-6
        assert min(report["policy_size"], report["head_size"]) > 1e-2


def test_a_sharded_head_takes_the_weights_of_a_whole_one(reports: list[dict[str, Any]]) -> None:
    assert all(report["loads_into_shards"] for report in reports)
