"""Rolling the next batch out while the current one trains: one update off-policy, and not more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.runs import make_trainer, settings
from helpers.sums import ROWS, SERVERS
from peft import LoraConfig
from transformers import TrainerCallback

from mcp_grpo import MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.errors import SettingsError


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
def distance(trainer: Any, weights: dict[str, torch.Tensor], attempts: list[Trajectory]) -> float:
    """How far the log-probabilities of attempts are from those that some weights give them."""
    for name, parameter in trainer.model.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
    differences = []
    for attempt in attempts:
        ids = torch.tensor([*attempt.prompt_ids, *attempt.completion_ids])
        logps = trainer.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        end = len(attempt.prompt_ids)
        for segment in attempt.segments:
            start, end = end, end + len(segment.token_ids)
            if segment.sampled:
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


@pytest.mark.vllm
def test_evaluation_waits_for_what_was_begun_before(tmp_path: Path, wide_adding_model: str) -> None:
    rows = Dataset.from_list(ROWS[:2])
    args = settings(
        tmp_path,
        max_staleness=1,
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
            settings(tmp_path, max_staleness=1, **changes),
            Dataset.from_list(ROWS),
            servers=SERVERS,
        )
