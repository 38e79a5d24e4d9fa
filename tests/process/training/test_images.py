"""Training on pictures that tools return: the policy sees them where it samples, where it is scored and where it learns."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from helpers.fixtures import shared
from helpers.runs import settings
from helpers.vision import LOOKING, ROWS, save_looking_policy, vision_processor
from peft import LoraConfig
from transformers import Qwen3VLForConditionalGeneration

from mcp_grpo import MCPGRPOTrainer, ToolPool, Trajectory
from mcp_grpo.learning import picture_columns
from mcp_grpo.monitor.recorder import FOLDER
from mcp_grpo.sampling.vision import decode
from mcp_grpo.types import Image


PROCESSOR = vision_processor()
TOLERANCE = 2e-5  # of log-probabilities
SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_turns": 2,
    "max_turn_tokens": 60,
    "beta": 0.1,
    "chat_template_kwargs": None,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a policy that asks for a picture, and says something about it."""

    async def schemas() -> list[dict[str, Any]]:
        async with ToolPool(LOOKING) as pool:
            return [tool.schema for tool in pool.catalog.tools]

    tools = anyio.run(schemas)
    return shared(tmp_path_factory, "looking", lambda folder: save_looking_policy(folder, tools))


def make_trainer(
    folder: Path, model: str, processor: Any = None, servers: Any = LOOKING, peft_config: Any = None, **changes: Any
) -> MCPGRPOTrainer:
    def reward(trajectory: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        return [float(len(each.completion_ids) % 7) for each in trajectory]

    return MCPGRPOTrainer(
        model,
        reward,
        settings(folder, **{**SETTINGS, **changes}),
        Dataset.from_list(ROWS),
        servers=servers,
        processing_class=processor or vision_processor(),
        peft_config=peft_config,
    )


@torch.no_grad()
def seen_logps(model: Any, trajectory: Trajectory, images: Sequence[Image]) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by Transformers alone, given pictures."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
    pictures: dict[str, Any] = {}
    if images:
        pictures = dict(PROCESSOR.image_processor(images=[decode(each) for each in images], return_tensors="pt"))
        pictures["mm_token_type_ids"] = torch.tensor(PROCESSOR.create_mm_token_type_ids(ids.tolist()))
    logps = model(input_ids=ids, attention_mask=torch.ones_like(ids), **pictures).logits[:, :-1].log_softmax(-1)
    found = logps.gather(2, ids[:, 1:, None])[0, len(trajectory.prompt_ids) - 1 :, 0]
    return found[torch.tensor(trajectory.sampled_mask) > 0]


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / FOLDER).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 1},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"old_logps": "trainer", "num_iterations": 2}, marks=pytest.mark.full),
        pytest.param({"advantage_mode": "gae"}, marks=pytest.mark.full),
        pytest.param({"peft_config": LoraConfig(r=4, target_modules="all-linear")}, marks=pytest.mark.full),
    ],
)
def test_sampler_trainer_and_reference_see_the_same_pictures_and_really_see_them(
    tmp_path: Path, policy: str, changes: dict[str, Any]
) -> None:
    batches: list[list[Trajectory]] = []
    columns: list[dict[str, Any]] = []
    with make_trainer(tmp_path, policy, **changes) as trainer:
        trainer.watch_batches(
            lambda batch: (batches.append(list(batch.trajectories)), columns.append(dict(batch.columns)))
        )
        trainer.train()
        check_that_pictures_are_seen(trainer, [attempt for batch in batches for attempt in batch])
        logs = [entry for entry in trainer.state.log_history if "align/logp_mae" in entry]
    assert logs[0]["align/logp_mae"] < 1e-5
    assert logs[0]["align/score"] == 1
    assert all(torch.tensor(entry["loss"]).isfinite() for entry in logs)
    seeing = [trajectory for batch in batches for trajectory in batch if trajectory.images]
    assert seeing
    rows = recorded(tmp_path)
    attempts = [attempt for batch in batches for attempt in batch]
    model = Qwen3VLForConditionalGeneration.from_pretrained(policy).eval()
    for number, (row, attempt) in enumerate(zip(rows, attempts, strict=True)):
        # What was sampled is what is trained on, tokens of pictures included.
        assert tuple(row["token_ids"]) == attempt.completion_ids
        grids = [
            PROCESSOR.image_processor(images=[decode(i)], return_tensors="pt")["image_grid_thw"]
            for i in attempt.images
        ]
        environment = [i for i, s in zip(attempt.completion_ids, attempt.sampled_mask, strict=True) if not s]
        assert environment.count(PROCESSOR.image_token_id) == sum(int(grid.prod()) // 4 for grid in grids)
        assert [references["sha256"] for m in json.loads(row["messages"]) for references in m.get("images", ())] == [
            image.sha256 for image in attempt.images
        ]
        assert "base64" not in row["messages"]
        assert len(row["messages"]) < 5000
        if number >= len(batches[0]) or attempt.completion_ids[-1] == PROCESSOR.image_token_id:
            continue  # of a policy that has learnt, or cut off by what nobody can show
        is_sampled = torch.tensor(attempt.sampled_mask) > 0
        expected = seen_logps(model, attempt, attempt.images)
        assert torch.tensor(attempt.logprobs)[is_sampled].sub(expected).abs().max() < TOLERANCE
        assert torch.tensor(row["trainer_logp"])[is_sampled].sub(expected).abs().max() < TOLERANCE
        of_reference = columns[0]["ref_per_token_logps"][number, : len(is_sampled)][is_sampled]
        assert of_reference.sub(expected).abs().max() < TOLERANCE


def check_that_pictures_are_seen(trainer: MCPGRPOTrainer, found: Sequence[Trajectory]) -> None:
    """Check that another picture gives other probabilities, by Transformers alone and through the trainer's columns and pass."""
    seeing = next(each for each in found if each.images and each.num_turns > 1)
    other = next(image for each in found for image in each.images if image.sha256 != seeing.images[0].sha256)
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    own, changed = (seen_logps(model, seeing, [image]) for image in (seeing.images[0], other))
    num_before = len(seeing.segments[0].token_ids)
    assert own[:num_before].equal(changed[:num_before])
    # The policy is nearly certain of what it says, so that little changes, but far more than sampler and trainer may differ by.
    assert own[num_before:].sub(changed[num_before:]).abs().max() > 10 * TOLERANCE
    swapped = replace(seeing, segments=tuple(replace(s, images=(other,)) if s.images else s for s in seeing.segments))
    for attempt, expected in ((seeing, own), (swapped, changed)):
        assert trainer_logps(trainer, attempt).sub(expected).abs().max() < TOLERANCE


@torch.no_grad()
def trainer_logps(trainer: Any, trajectory: Trajectory) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by the pass of the trainer, beside a row without pictures."""
    ids, mask = (
        torch.zeros(2, len(trajectory.prompt_ids + trajectory.completion_ids), dtype=torch.long) for _ in "ab"
    )
    ids[0], mask[0] = torch.tensor(trajectory.prompt_ids + trajectory.completion_ids), 1
    ids[1, -9:], mask[1, -9:] = torch.arange(9), 1
    pictures = picture_columns([trajectory], trainer._vision, ids.device)
    pictures["num_images"] = [*pictures["num_images"], 0]
    num_tokens = len(trajectory.completion_ids)
    logps, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, num_tokens, batch_size=1, **pictures
    )
    return logps[0][torch.tensor(trajectory.sampled_mask) > 0]


@pytest.mark.full
def test_a_run_with_pictures_is_replayed_without_its_server_and_saved_whole(tmp_path: Path, policy: str) -> None:
    runs: list[list[Trajectory]] = []
    for mode, servers in (("record", LOOKING), ("replay", None)):
        cassette = {"cassette": str(tmp_path / "calls.jsonl"), "cassette_mode": mode, "max_concurrent_trajectories": 1}
        batch: list[Trajectory] = []
        with make_trainer(tmp_path / mode, policy, servers=servers, **cassette) as trainer:
            trainer.watch_batches(lambda scored, batch=batch: batch.extend(scored.trajectories))
            trainer.train()
            trainer.save_model()
        runs.append(batch)
    first, second = runs
    assert [t.completion_ids for t in first] == [t.completion_ids for t in second]
    assert [t.images for t in first] == [t.images for t in second]
    assert any(t.images for t in first)
    template = (tmp_path / "record" / "chat_template.jinja").read_text()
    assert "<|image_pad|>" in template


@pytest.mark.full
def test_a_run_goes_on_in_the_middle_of_a_batch_with_pictures(tmp_path: Path, policy: str) -> None:
    changes = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    found: list[torch.Tensor] = []
    num_seen: list[int] = []
    for is_resumed in (False, True):
        with make_trainer(tmp_path, policy, **changes) as trainer:
            before = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
            trainer.watch_batches(lambda batch: num_seen.append(sum(len(each.images) for each in batch.trajectories)))
            trainer.train(resume_from_checkpoint=is_resumed)
            found.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
        shutil.rmtree(tmp_path / "checkpoint-4")  # the one before it has half of the second batch
    assert len(num_seen) == 2
    assert num_seen[1] > 0
    assert not found[0].equal(before)
    assert found[0].equal(found[1])
