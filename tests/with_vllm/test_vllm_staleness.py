"""Rolling out while the policy trains: as many updates off-policy as was allowed, and each turn by one version of the policy."""

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.processes import left_behind
from helpers.runs import make_trainer, settings
from helpers.sums import ROWS, SERVER, SERVERS
from peft import LoraConfig
from transformers import TrainerCallback

from mcp_grpo import MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.errors import SamplerError, SettingsError


LORA = LoraConfig(r=8, target_modules="all-linear")
ENGINE = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
IN_PROCESS = {"use_vllm": True, "vllm_max_model_length": 2048, "vllm_engine_kwargs": ENGINE}


class Versions(TrainerCallback):
    """The adapter as it was before each update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n})


@torch.no_grad()
def distance(
    trainer: Any, weights: dict[str, torch.Tensor], attempts: list[Trajectory], turn: int | None = None
) -> float:
    """How far the log-probabilities of attempts, or of one turn, are from those that some weights give them."""
    for name, parameter in trainer.model.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
    differences = []
    for attempt in attempts:
        ids = torch.tensor([*attempt.prompt_ids, *attempt.completion_ids])
        logps = trainer.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        end, number = len(attempt.prompt_ids), -1
        for segment in attempt.segments:
            start, end = end, end + len(segment.token_ids)
            number += segment.sampled
            if segment.sampled and turn in (None, number):
                differences.append(logps[start - 1 : end - 1] - torch.tensor(segment.logprobs))
    return torch.cat(differences).abs().mean().item()


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["colocate", pytest.param("server", marks=pytest.mark.full)])
def test_a_batch_is_sampled_by_the_policy_of_one_update_before(
    tmp_path: Path, wide_adding_model: str, request: pytest.FixtureRequest, mode: str
) -> None:
    where = IN_PROCESS
    if mode == "server":
        url = request.getfixturevalue("vllm_server")
        where = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    batches: list[list[Trajectory]] = []
    versions = Versions()

    def reward(trajectory: list[Trajectory], **kwargs: Any) -> Any:
        batches.append(list(trajectory))
        return [float(i % 2) for i in range(len(trajectory))]  # so that every update moves the policy

    with make_trainer(
        tmp_path,
        wide_adding_model,
        reward=reward,
        peft_config=LORA,
        callbacks=[versions],
        max_staleness=1,
        max_steps=4,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        **where,
    ) as trainer:
        trainer.train()
        assert not trainer._collector._stream.groups  # nothing is begun that will not be trained on
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(batches) == len(versions.weights) == len(logs) == 4
        assert distance(trainer, versions.weights[0], batches[0]) < 1e-5
        for step in range(1, 4):
            assert distance(trainer, versions.weights[step - 1], batches[step]) < 1e-5
            assert distance(trainer, versions.weights[step], batches[step]) > 1e-4
        assert all("rollout/wait_seconds" in entry for entry in logs[1:])
        assert all("align/score" not in entry for entry in logs)  # it is for what is on-policy
        assert logs[0]["ratio/p90"] == pytest.approx(1, abs=1e-4)


MANY = [{**ROWS[0], "task_id": f"sum-{i}"} for i in range(12)]
PAIRS = {"num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 6}  # an epoch of two groups a step


class Held:
    """
    A run on a server that answers its first call only when it is told to: the attempt that makes it is the slow one. Keeps the
    attempts of each batch.

    Args:
        folder (`Path`):
            Where the server is told.
        free_after (`int`, *optional*):
            Batches after which it is told, when training waits for the next one.
    """

    def __init__(self, folder: Path, free_after: int | None = None) -> None:
        self.folder = folder
        self.batches: list[list[Trajectory]] = []
        self._free_after = free_after
        folder.mkdir()

    def reward(self, trajectory: list[Trajectory], **kwargs: Any) -> Any:
        self.batches.append(list(trajectory))
        if len(self.batches) == self._free_after:
            threading.Timer(3.0, (self.folder / "go").touch).start()
        return [float(i % 2) for i in range(len(trajectory))]  # so that every update moves the policy

    def trainer(self, model: str, callbacks: Any = (), **changes: Any) -> MCPGRPOTrainer:
        server = {"command": sys.executable, "args": [str(SERVER), "--hold", str(self.folder)]}
        return MCPGRPOTrainer(
            model,
            self.reward,
            settings(self.folder, **{**PAIRS, **IN_PROCESS, **changes}),
            Dataset.from_list(MANY),
            servers={"sums": server},
            peft_config=LORA,
            callbacks=list(callbacks),
        )

    @property
    def task_ids(self) -> list[str]:
        return [attempt.task.task_id for batch in self.batches for attempt in batch]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("mode", "weight_sync"),
    [
        ("colocate", "merge"),
        pytest.param("colocate", "adapter", marks=pytest.mark.full),
        pytest.param("server", "adapter", marks=pytest.mark.full),
    ],
)
def test_a_slow_group_goes_on_with_new_weights_until_it_is_waited_for(
    tmp_path: Path, wide_adding_model: str, request: pytest.FixtureRequest, mode: str, weight_sync: str
) -> None:
    held, versions = Held(tmp_path / "held", free_after=3), Versions()
    where: dict[str, Any] = {"weight_sync": weight_sync}
    if mode == "server":
        where |= {"vllm_mode": "server", "vllm_server_base_url": request.getfixturevalue("vllm_server")}
    with held.trainer(
        wide_adding_model,
        [versions],
        max_staleness=3,
        **where,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
    ) as trainer:
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert Counter(held.task_ids) == {row["task_id"]: 2 for row in MANY}  # each once
        slow = max((attempt for batch in held.batches for attempt in batch), key=lambda attempt: attempt.seconds)
        assert [len({attempt.task.task_id for attempt in batch}) for batch in held.batches] == [2] * 6
        assert slow in held.batches[3]
        assert slow.staleness == max(attempt.staleness for batch in held.batches for attempt in batch) == 3
        assert [entry["rollout/staleness_max"] for entry in logs] == [
            max(attempt.staleness for attempt in batch) for batch in held.batches
        ]
        assert logs[3]["rollout/carried_fraction"] >= 0.5
        assert logs[3]["rollout/wait_seconds"] >= 0  # how long depends on how busy the machine is
        # Its first turn is of the weights it began with, its second one of those that were sent three updates later.
        assert slow.num_turns >= 2
        assert distance(trainer, versions.weights[0], [slow], turn=0) < 1e-5
        assert distance(trainer, versions.weights[3], [slow], turn=1) < 1e-5
        assert distance(trainer, versions.weights[0], [slow], turn=1) > 1e-4
        assert not trainer._collector._stream.groups


@pytest.mark.vllm
@pytest.mark.parametrize("max_staleness", [1, pytest.param(2, marks=pytest.mark.full)])
def test_tasks_are_chosen_when_they_are_begun(tmp_path: Path, wide_adding_model: str, max_staleness: int) -> None:
    batches: list[list[str]] = []

    def by_family(trajectory: list[Trajectory], **kwargs: Any) -> Any:
        assert [attempt.task.task_id for attempt in trajectory] == kwargs[
            "task_id"
        ]  # rows and attempts belong together
        batches.append([attempt.task.metadata["family"] for attempt in trajectory])
        return [0.0 if family == "flat" else float(i % 2) for i, family in enumerate(batches[-1])]

    families = ("flat", "steep")
    rows = [{**ROWS[0], "task_id": f"{name}-{i}", "family": name} for i in range(12) for name in families]
    changes = {**PAIRS, **IN_PROCESS, "max_staleness": max_staleness, "shuffle_dataset": False}
    with make_trainer(
        tmp_path, wide_adding_model, reward=by_family, rows=rows, peft_config=LORA, task_choice="spread", **changes
    ) as trainer:
        trainer.train()
        exchanged = [entry["tasks/exchanged_fraction"] for entry in trainer.state.log_history if "loss" in entry]
    assert batches[0] == batches[1] == ["flat"] * 2 + ["steep"] * 2  # begun before anything was known
    assert sum(batch.count("steep") for batch in batches[2:]) > 2 * len(batches[2:])
    assert exchanged[0] == 0 < max(exchanged)
    assert exchanged[-1] == exchanged[-2]  # no batch was begun beside the last one


@pytest.mark.vllm
def test_a_resumed_run_begins_with_what_was_under_way_and_attempts_no_task_twice(
    tmp_path: Path, wide_adding_model: str
) -> None:
    first, second = Held(tmp_path / "first", free_after=3), Held(tmp_path / "second")
    saving: dict[str, Any] = {"max_staleness": 4, "save_strategy": "steps", "save_steps": 2}
    with first.trainer(wide_adding_model, **saving) as trainer:
        trainer.train()
    (tmp_path / "second" / "go").touch()
    with second.trainer(wide_adding_model, **saving) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert len(second.batches) == 4
    before = [attempt.task.task_id for batch in first.batches[:2] for attempt in batch]
    slow = max((attempt for batch in first.batches for attempt in batch), key=lambda attempt: attempt.seconds)
    assert slow.task.task_id not in before  # it was begun with the first batches
    assert slow.staleness > 2
    assert Counter(before + second.task_ids) == {row["task_id"]: 2 for row in MANY}


@pytest.mark.vllm
def test_what_is_under_way_ends_with_the_run(tmp_path: Path, wide_adding_model: str) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    held = Held(tmp_path / "held")
    trainer = held.trainer(wide_adding_model, [Stop()], max_staleness=8)
    engine = trainer.vllm_generation.llm.llm_engine
    with pytest.raises(KeyboardInterrupt), trainer:
        trainer.train()
    assert (held.folder / "held").exists()
    assert not trainer._collector._stream.groups
    assert not engine.has_unfinished_requests()
    assert not [thread for thread in threading.enumerate() if thread.name == "mcp-grpo-stream"]
    assert not left_behind()


@pytest.mark.vllm
def test_an_engine_that_fails_while_the_policy_trains_stops_the_run(tmp_path: Path, wide_adding_model: str) -> None:
    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            def step() -> Any:
                raise RuntimeError("device lost")

            trainer.vllm_generation.llm.llm_engine.step = step
            (held.folder / "go").touch()

    held = Held(tmp_path / "held")
    with held.trainer(wide_adding_model, [Break()], max_staleness=8) as trainer:
        with pytest.raises(SamplerError, match="device lost"):
            trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.vllm
def test_an_engine_that_hangs_while_the_policy_trains_stops_the_run(
    tmp_path: Path, wide_adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("gate.END_TIME", "vllm_generator._STEP_SECONDS"):
        monkeypatch.setattr(f"mcp_grpo.sampling.{limit}", 1.0)
    monkeypatch.setattr("mcp_grpo.rollout.stream.DROP_TIME", 1.0)
    hangs, may_end = threading.Event(), threading.Event()

    class Hang(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            def step() -> list[Any]:
                hangs.set()
                may_end.wait(120)
                return []

            trainer.vllm_generation.llm.llm_engine.step = step
            (held.folder / "go").touch()
            assert hangs.wait(60)

    held = Held(tmp_path / "held")
    try:
        with held.trainer(wide_adding_model, [Hang()], max_staleness=8, trajectory_timeout=20.0) as trainer:
            with pytest.raises(SamplerError, match="A step of the vLLM engine has not ended"):
                trainer.train()
            assert trainer.state.global_step == 1
    finally:
        may_end.set()
    for thread in threading.enumerate():
        if thread.name == "mcp-grpo-stream":
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.vllm
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_an_evaluation_is_of_the_policy_as_it_is_then(
    tmp_path: Path, wide_adding_model: str, max_staleness: int
) -> None:
    rows = Dataset.from_list(ROWS[:2])
    args = settings(
        tmp_path,
        max_staleness=max_staleness,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=2,
        **IN_PROCESS,
    )
    with MCPGRPOTrainer(
        wide_adding_model, exact_answer, args, Dataset.from_list(ROWS), servers=SERVERS, eval_dataset=rows
    ) as trainer:
        trainer.train()
        evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
        assert len(evaluated) == 2
        assert all(entry["eval_align/logp_mae"] < 1e-5 for entry in evaluated)  # by the policy as it is then


@pytest.mark.vllm
def test_a_run_that_breaks_off_leaves_no_rollout_behind(tmp_path: Path, wide_adding_model: str) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, wide_adding_model, callbacks=[Stop()], max_staleness=1, max_steps=4, **IN_PROCESS)
    engine = trainer.vllm_generation.llm.llm_engine
    with pytest.raises(KeyboardInterrupt), trainer:
        trainer.train()
    assert not trainer._collector._stream.groups
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "`max_staleness=1` is for sampling with vLLM"),
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, "`vllm_enable_sleep_mode` puts it to sleep"),
        ({"use_vllm": True, "num_iterations": 2}, r"needs one update per batch: `num_iterations` \(2\) must be 1"),
    ],
)
def test_settings_that_cannot_sample_ahead_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        MCPGRPOTrainer(
            "no/model",
            exact_answer,
            settings(tmp_path, **{"max_staleness": 1, **changes}),
            Dataset.from_list(ROWS),
            servers=SERVERS,
        )
