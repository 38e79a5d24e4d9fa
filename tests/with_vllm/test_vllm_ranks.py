"""vLLM on several processes: each has its own engine, and all train one policy."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import launch
from helpers.vllm_server import metric, serve_sums


ENGINE = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
SAMPLED = "vllm:generation_tokens_total"


@pytest.mark.vllm
@pytest.mark.parametrize("weight_sync", ["merge", pytest.param("adapter", marks=pytest.mark.full)])
def test_two_processes_sample_with_an_engine_each_and_train_one_policy(
    tmp_path: Path, wide_adding_model: str, weight_sync: str
) -> None:
    changes = {
        "use_vllm": True,
        "vllm_max_model_length": 2048,
        "vllm_engine_kwargs": ENGINE,
        "weight_sync": weight_sync,
    }
    finished = launch("train_ranks.py", wide_adding_model, tmp_path, json.dumps({"run": changes}))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = (json.loads((tmp_path / "run" / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    history = [entry for entry in first["history"] if "reward" in entry]
    assert all(entry["sampler/weight_mismatch"] < 1e-4 for entry in history)
    assert all(entry["align/logp_mae"] < 1e-4 for entry in history)


@pytest.mark.vllm
@pytest.mark.full
def test_two_processes_sample_from_two_servers_and_train_one_policy(
    tmp_path: Path, wide_adding_model: str, vllm_server: str
) -> None:
    with serve_sums(wide_adding_model, tmp_path / "log.txt") as second_server:
        urls = [vllm_server, second_server.wait()]
        before = [metric(url, SAMPLED) for url in urls]
        changes = {"use_vllm": True, "vllm_mode": "server", "vllm_server_urls": urls, "weight_sync": "adapter"}
        finished = launch("train_ranks.py", wide_adding_model, tmp_path, json.dumps({"run": changes}))
        assert finished.returncode == 0, finished.stdout + finished.stderr
        sampled = [metric(url, SAMPLED) - first for url, first in zip(urls, before, strict=True)]
    assert min(sampled) > 0.2 * sum(sampled)  # both have done their share
    first, second = (json.loads((tmp_path / "run" / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    history = [entry for entry in first["history"] if "reward" in entry]
    assert len(history) == 2
    assert all(entry["sampler/weight_mismatch"] < 1e-4 for entry in history)  # of the server that is farthest
    assert all(entry["align/logp_mae"] < 1e-4 for entry in history)


@pytest.mark.vllm
@pytest.mark.full
def test_each_process_passes_its_own_slow_groups_over_and_all_train_one_policy(
    tmp_path: Path, wide_adding_model: str
) -> None:
    changes = {
        "use_vllm": True,
        "vllm_max_model_length": 2048,
        "vllm_engine_kwargs": ENGINE,
        "max_staleness": 3,
        "num_generations": 4,
        "max_steps": 4,
    }
    finished = launch("train_ranks.py", wide_adding_model, tmp_path, json.dumps({"run": changes}))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = (json.loads((tmp_path / "run" / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    history = [entry for entry in first["history"] if "reward" in entry]
    assert len(history) == 4
    assert history[1]["rollout/staleness"] > 0
    assert all(entry["rollout/staleness_max"] <= 3 for entry in history)


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.parametrize("num_groups", [1, 2])
def test_what_was_under_way_is_shared_among_another_number_of_processes(
    tmp_path: Path, wide_adding_model: str, num_groups: int
) -> None:
    common: dict[str, Any] = {
        "use_vllm": True,
        "vllm_max_model_length": 2048,
        "vllm_engine_kwargs": ENGINE,
        "max_staleness": 4,
        "num_generations": 2,
        "num_tasks": 12,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    first = {**common, "per_device_train_batch_size": 2, "holds_until": 4}
    finished = launch("train_ranks.py", wide_adding_model, tmp_path, json.dumps({"first": first}))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    before: list[str] = []
    for rank in (0, 1):
        batches = json.loads((tmp_path / "first" / f"rank{rank}.json").read_text())["attempted"]
        assert len(batches) == 6
        before += [task for batch in batches[:2] for task in batch]
    second = {
        **common,
        "per_device_train_batch_size": 2 * num_groups,
        "resumes": str(tmp_path / "first" / "checkpoint-2"),
    }
    changed = launch("train_ranks.py", wide_adding_model, tmp_path, json.dumps({"second": second}), num_processes=1)
    assert changed.returncode == 0, changed.stdout + changed.stderr
    batches = json.loads((tmp_path / "second" / "rank0.json").read_text())["attempted"]
    assert len(batches) == 4
    said = "goes on with the next batch"
    if num_groups == 2:  # as many groups in a batch as before, on one process
        assert Counter(before + [task for batch in batches for task in batch]) == {f"sum-{i}": 2 for i in range(12)}
        assert said not in changed.stderr
    else:
        assert said in changed.stderr
