"""Which checkpoint a run that was stopped names as one from before its policy fell."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.monitor import HealthNote
from mcp_grpo.publishing.checkpoint import finish_checkpoint


def write_checkpoints(folder: Path, *steps: int) -> None:
    """Complete checkpoints, and one that lost its files."""
    for step in steps:
        made = folder / "unfinished" / f"checkpoint-{step}"
        made.mkdir(parents=True)
        for name in ("trainer_state.json", "model.safetensors"):
            (made / name).write_text("{}")
        finish_checkpoint(made, folder / made.name)
    (folder / "checkpoint-9").mkdir()


def said_of(folder: Path, since: int | None, **changes: Any) -> str:
    """What is said after a run was stopped at step 20."""
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(folder), save_strategy="steps", max_staleness=0),
        _kept_step=None,
        _updates_per_batch=1,
        _checkpoint_folder=folder,
        _begun_at_step=0,
        _saved={4, 8, 12, 20},
    )
    staleness = changes.pop("max_staleness", 0)
    trainer.args.max_staleness = staleness
    vars(trainer).update(changes)
    trainer._own_checkpoints = lambda: MCPGRPOTrainer._own_checkpoints(trainer)
    note = HealthNote(step=20, name="collapse", sentence="It fell.", is_fatal=True, since=since)
    return MCPGRPOTrainer._after_stop(trainer, note)


@pytest.mark.parametrize(
    ("since", "changes", "named"),
    [
        (14, {}, 12),
        (13, {}, 8),  # whose batch is the policy's of step 12
        (14, {"max_staleness": 1}, 8),
        (17, {"_updates_per_batch": 8}, 8),
        (16, {"_updates_per_batch": 8}, 4),
        (14, {"_saved": {4, 20}}, 4),  # the others are of another run in the same folder
        (14, {"_saved": {20}, "_begun_at_step": 8}, 8),
        (4, {}, None),
        (14, {"_saved": {20}}, None),
    ],
)
def test_the_newest_checkpoint_of_a_policy_that_is_known_to_be_good_is_named(
    tmp_path: Path, since: int, changes: dict[str, Any], named: int | None
) -> None:
    write_checkpoints(tmp_path, 4, 8, 12, 20)
    said = said_of(tmp_path, since, **changes)
    wanted = (
        ", and no checkpoint is from before that." if named is None else f": checkpoint-{named} is from before that."
    )
    assert f"It began at about step {since}{wanted}" in said
    assert f"with checkpoint-20 in {tmp_path}." in said


def test_nothing_is_named_where_nothing_fell_or_the_best_policy_is_kept(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 4, 20)
    assert "It began" not in said_of(tmp_path, None)
    said = said_of(tmp_path, 14, _kept_step=4)
    assert "It began" not in said
    assert "step 4, the best that was evaluated, is the policy that is kept" in said
