"""A run that was stopped and goes on ends where it would have ended, and what is saved is what it should be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import full
from helpers.runs import BRIEF, RELYING_AT_ONCE, OneByOne, make_trainer
from helpers.sums import ROWS
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers import trainer as transformers_trainer

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.learning import value_head_from_pretrained
from mcp_grpo.publishing import PrivateValues, publishable_copy


pytestmark = pytest.mark.usefixtures("undrawn")

EVERYTHING: dict[str, Any] = {
    **BRIEF,
    "advantage_mode": "hybrid",
    "constants": RELYING_AT_ONCE,
    "value_learning_rate": 1e-2,
    "learning_rate": 1e-2,
    "beta": 0.05,
    "kl_target": 1e-6,  # so that the weight of the KL term moves
    "ref_sync": "ema",
    "ref_sync_steps": 1,
    "ref_ema_decay": 0.5,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
}
LORA = LoraConfig(r=4, target_modules="all-linear")
REUSING: dict[str, Any] = {
    "peft_config": LORA,
    "num_iterations": 2,
    "max_steps": 3,
    "dynamic_sampling": 1,
    "task_choice": "spread",
}


def train(
    folder: Path, model: str, kind: type = OneByOne, checkpoint: Path | bool | None = None, **changes: Any
) -> MCPGRPOTrainer:
    with make_trainer(folder, model, kind, **{**EVERYTHING, **changes}) as trainer:
        trainer.train(resume_from_checkpoint=str(checkpoint) if isinstance(checkpoint, Path) else checkpoint)
    return trainer


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> MCPGRPOTrainer:
    return train(tmp_path_factory.mktemp("adapter"), adding_model, peft_config=LORA)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> MCPGRPOTrainer:
    return train(tmp_path_factory.mktemp("full"), adding_model)


@pytest.fixture(scope="module")
def reusing_run(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> MCPGRPOTrainer:
    """Each batch is for two steps: the first checkpoint is in the middle of one, the second at its end."""
    return train(tmp_path_factory.mktemp("reusing"), adding_model, **REUSING)


@pytest.fixture(scope="module")
def half_run(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> MCPGRPOTrainer:
    return train(tmp_path_factory.mktemp("half"), adding_model, **REUSING, bf16=True)


def checkpoint_of(trainer: MCPGRPOTrainer, step: int) -> Path:
    return Path(trainer.args.output_dir, f"checkpoint-{step}")


def weights(trainer: MCPGRPOTrainer) -> dict[str, torch.Tensor]:
    """Those of the policy, the value head and the reference."""
    found = dict(trainer.model.named_parameters())
    if trainer.ref_model is not None:
        found |= {f"reference.{name}": p for name, p in trainer.ref_model.named_parameters()}
    return found


@pytest.mark.full
def test_a_checkpoint_that_lost_a_part_is_passed_over_and_the_run_says_so(
    reusing_run: MCPGRPOTrainer, tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(str(reusing_run.args.output_dir), tmp_path / "run")
    assert not (tmp_path / "run" / "_unfinished").exists()
    (tmp_path / "run" / "checkpoint-3" / "optimizer.pt").write_bytes(b"half")
    (tmp_path / "run" / "checkpoint-2" / "objective-0.pt").unlink()
    resumed = train(tmp_path / "run", adding_model, checkpoint=True, **REUSING)
    assert resumed.state.global_step == 3
    assert "checkpoint-3 is not complete: optimizer.pt has 4 bytes instead of" in caplog.text
    assert "checkpoint-2 is not complete: it has lost objective-0.pt" in caplog.text
    assert f"goes on from {str(tmp_path / 'run' / 'checkpoint-1')!r}" in caplog.text


@pytest.mark.full
def test_a_run_that_dies_while_it_saves_leaves_no_checkpoint_of_that_step(tmp_path: Path, adding_model: str) -> None:
    class Dying(OneByOne):
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 2:
                raise OSError("no space left on device")
            super()._save_rng_state(output_dir)

    with pytest.raises(OSError, match="no space left"):
        train(tmp_path, adding_model, Dying, save_total_limit=1)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["global_step"] == 1
    resumed = train(tmp_path, adding_model, checkpoint=True, save_total_limit=1)
    assert resumed.state.global_step == 2
    assert [path.name for path in tmp_path.glob("*check*")] == ["checkpoint-2"]  # the limit holds


@pytest.mark.parametrize(
    ("run", "step", "changes"),
    [
        full("adapter_run", 1, {"peft_config": LORA}),
        full("full_run", 1, {}),
        ("reusing_run", 1, REUSING),
        full("reusing_run", 2, REUSING),
        full("half_run", 1, {**REUSING, "bf16": True}),
    ],
    ids=["adapter", "full weights", "within a batch", "between batches", "bf16"],
)
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_weights_of_the_one_that_wrote_it(
    request: pytest.FixtureRequest, tmp_path: Path, adding_model: str, run: str, step: int, changes: dict[str, Any]
) -> None:
    whole = request.getfixturevalue(run)
    resumed = train(tmp_path, adding_model, checkpoint=checkpoint_of(whole, step), **changes)
    assert resumed.state.global_step == whole.state.global_step > step
    expected, found = weights(whole), weights(resumed)
    assert expected.keys() == found.keys()
    assert any("value_head" in name for name in found)
    assert any("ref" in name for name in found)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert resumed.beta == whole.beta > 0.05
    assert resumed._values.state_dict() == whole._values.state_dict()
    assert resumed._collector.num_rollouts == whole._collector.num_rollouts
    assert resumed._reference.num_syncs == whole.state.global_step
    for name, average in whole._reference.state_dict().items():
        assert torch.equal(resumed._reference.state_dict()[name], average), name


@pytest.mark.full
@pytest.mark.parametrize(("run", "dtype"), [("adapter_run", torch.float32), full("half_run", torch.bfloat16)])
def test_the_reference_of_an_adapter_is_averaged_in_float32_and_computes_in_the_dtype_of_autocast(
    request: pytest.FixtureRequest, run: str, dtype: torch.dtype
) -> None:
    trainer = request.getfixturevalue(run)
    factors = {name: p for name, p in trainer.model.named_parameters() if "lora" in name}
    assert {p.dtype for name, p in factors.items() if ".ref." in name} == {dtype}
    assert {p.dtype for name, p in factors.items() if ".default." in name} == {torch.float32}
    saved = load_file(checkpoint_of(trainer, 2) / "reference.safetensors")
    assert {value.dtype for name, value in saved.items() if name != "num_syncs"} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for name, value in saved.items() if "lora" in name)


class Counting(MCPGRPOTrainer):
    """Counts the batches that it rolls out."""

    batches = 0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self.batches += 1
        return super()._generate(*args, **kwargs)


@pytest.mark.full
def test_a_published_checkpoint_holds_no_batch_and_goes_on_with_a_new_one(
    tmp_path: Path, adding_model: str, reusing_run: MCPGRPOTrainer
) -> None:
    checkpoint, published = checkpoint_of(reusing_run, 1), tmp_path / "checkpoint-1"
    publishable_copy(checkpoint, published, private=PrivateValues.of([], []), is_checkpoint=True)
    state, copied = (torch.load(each / "objective-0.pt", weights_only=True) for each in (checkpoint, published))
    assert state["batch"] is not None
    assert copied == {**state, "batch": None}
    for name in ("reference.safetensors", "value_head.safetensors"):
        shutil.copy(checkpoint / name, published)
    changes = {**REUSING, "max_steps": 3, "dynamic_sampling": 0}
    resumed = train(tmp_path, adding_model, Counting, published, **changes)
    assert resumed.state.global_step == 3
    assert resumed.batches == 1  # a whole one, for the two steps that were left


@pytest.mark.full
def test_with_another_number_of_processes_a_batch_that_was_not_used_up_is_rolled_out_anew(
    tmp_path: Path, adding_model: str, reusing_run: MCPGRPOTrainer
) -> None:
    """The files are those that two processes write: each has its random state and its part of the batch."""
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(checkpoint_of(reusing_run, 1), checkpoint)
    state = torch.load(checkpoint / "objective-0.pt", weights_only=True)
    assert state["batch"] is not None
    (checkpoint / "manifest.json").unlink()  # it is that of one process
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    for rank in (0, 1):
        torch.save({**state, "num_processes": 2}, checkpoint / f"objective-{rank}.pt")

    resumed = train(tmp_path, adding_model, Counting, checkpoint, **{**REUSING, "max_steps": 2, "dynamic_sampling": 0})
    assert resumed.state.global_step == 2
    assert resumed.batches == 1  # the other run learnt from one batch for two steps
    assert resumed._collector.num_rollouts > state["num_rollouts"]
    assert resumed._reference.num_syncs == 2
    assert resumed.beta > state["kl_control"]["beta"]


@pytest.mark.full
def test_the_best_checkpoint_is_loaded_with_its_value_head(tmp_path: Path, adding_model: str) -> None:
    class Worsening(MCPGRPOTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_quality": -float(self.state.global_step)}

        def _load_best_model(self) -> None:
            self.last = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            super()._load_best_model()

    settings = {
        "eval_rows": ROWS,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "quality",
        "greater_is_better": True,
    }
    trainer = train(
        tmp_path, adding_model, Worsening, peft_config=LORA, load_best_model_at_end=True, max_steps=2, **settings
    )
    best = checkpoint_of(trainer, 1)
    assert trainer.state.best_model_checkpoint == str(best)
    head, adapter = (load_file(best / f"{name}.safetensors") for name in ("value_head", "adapter_model"))
    now = dict(trainer.model.named_parameters())
    for name, weight in trainer._values.head.named_parameters():
        assert torch.equal(weight, head[name]), name
    for name, weight in adapter.items():
        assert torch.equal(now[name.replace(".weight", ".default.weight")], weight), name
    for part in ("value_head", ".default."):
        assert any(not torch.equal(now[name], weight) for name, weight in trainer.last.items() if part in name)


def test_a_checkpoint_holds_the_adapter_and_beside_it_the_value_head_and_the_reference(
    adding_model: str, reusing_run: MCPGRPOTrainer
) -> None:
    folder = checkpoint_of(reusing_run, 3)
    assert not (folder / "ref").exists()
    assert not any("ref" in name or "value_head" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert {"value_head.safetensors", "reference.safetensors"} <= {file.name for file in folder.iterdir()}
    loaded = value_head_from_pretrained(AutoModelForCausalLM.from_pretrained(adding_model), folder)
    for name, weight in reusing_run._values.head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert any(weight.abs().max() > 0 for weight in loaded.state_dict().values())


@pytest.mark.full
def test_full_weights_are_saved_without_the_value_head(tmp_path: Path, full_run: MCPGRPOTrainer) -> None:
    full_run.save_model(str(tmp_path))
    assert not any("value_head" in name for name in load_file(tmp_path / "model.safetensors"))
    assert (tmp_path / "value_head.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_value_head_is_not_pushed(
    tmp_path: Path, reusing_run: MCPGRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: set[str] = set()

    class Hub:
        def upload_folder(self, folder_path: str, **kwargs: Any) -> None:
            pushed.update(file.name for file in Path(folder_path).iterdir())

    monkeypatch.setattr(transformers_trainer, "hf_api", Hub)
    monkeypatch.setattr(reusing_run, "hub_model_id", "somebody/sums")
    monkeypatch.setattr(reusing_run.args, "output_dir", str(tmp_path))
    reusing_run.save_model()
    reusing_run.push_to_hub()
    assert "adapter_model.safetensors" in pushed
    assert "value_head.safetensors" not in pushed
    assert (tmp_path / "value_head.safetensors").exists()
