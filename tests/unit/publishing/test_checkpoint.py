"""The file that a run goes on from, on as many processes as wrote it, and on others."""

from pathlib import Path

import pytest
import torch

from mcp_grpo.errors import SettingsError
from mcp_grpo.publishing import begin_checkpoint, checked_checkpoint, finish_checkpoint, load_state, save_state


CPU = torch.device("cpu")


def save(folder: Path, num_processes: int, *, has_batch: bool) -> None:
    for rank in range(num_processes):
        batch = [{"column": torch.tensor([rank])}] if has_batch else None
        save_state(folder, {"step": 7, "batch": batch}, rank=rank, num_processes=num_processes)


def test_each_process_gets_its_own_batch_and_what_all_have_in_common(tmp_path: Path) -> None:
    save(tmp_path, 2, has_batch=True)
    state = load_state(tmp_path, rank=1, num_processes=2, device=CPU)
    assert state
    assert state["step"] == 7
    assert state["batch"][0]["column"].item() == 1


def test_another_number_of_processes_rolls_out_a_new_batch(tmp_path: Path) -> None:
    save(tmp_path, 2, has_batch=True)
    for num_processes in (1, 3):
        state = load_state(tmp_path, rank=num_processes - 1, num_processes=num_processes, device=CPU)
        assert state
        assert (state["step"], state["batch"]) == (7, None)


def test_there_may_be_no_batch_and_no_state(tmp_path: Path) -> None:
    assert load_state(tmp_path, rank=0, num_processes=1, device=CPU) is None
    save(tmp_path, 1, has_batch=False)
    state = load_state(tmp_path, rank=0, num_processes=1, device=CPU)
    assert state
    assert state["batch"] is None


def write_checkpoint(folder: Path, step: int) -> Path:
    written = begin_checkpoint(folder) / f"checkpoint-{step}"
    (written / "global_step").mkdir(parents=True)
    for name in ("trainer_state.json", "model.safetensors", "optimizer.pt", "global_step/part.pt"):
        (written / name).write_text("{}" * step)
    (written / "trainer_state.json").write_text("{}")
    finish_checkpoint(written, final := folder / written.name)
    return final


def test_a_checkpoint_is_there_under_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    written = begin_checkpoint(tmp_path) / "checkpoint-3"
    written.mkdir()
    (written / "trainer_state.json").write_text("{}")
    with pytest.raises(SettingsError, match="There is none at all"):
        checked_checkpoint(True, tmp_path)
    write_checkpoint(tmp_path, 3)  # what a killed run left is gone
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert checked_checkpoint(True, tmp_path)[0] == str(tmp_path / "checkpoint-3")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, 2) / "stray").write_text("")
    assert not (write_checkpoint(tmp_path, 2) / "stray").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("part", "content", "words"),
    [
        ("optimizer.pt", None, "has lost optimizer.pt"),
        ("global_step/part.pt", None, "has lost global_step/part.pt"),
        ("model.safetensors", "", "model.safetensors has 0 bytes instead of 20"),
        ("trainer_state.json", "{", "trainer_state.json cannot be read"),
        ("trainer_state.json", None, "has no trainer_state.json"),
        ("manifest.json", "[]", "manifest.json cannot be read"),
    ],
)
def test_one_that_lost_a_part_is_passed_over_and_named(
    tmp_path: Path, part: str, content: str | None, words: str
) -> None:
    for step in (9, 10):  # by number, not by name
        newest = write_checkpoint(tmp_path, step)
    if content is None:
        (newest / part).unlink()
    else:
        (newest / part).write_text(content)
    taken, sentence = checked_checkpoint(True, tmp_path)
    assert taken == str(tmp_path / "checkpoint-9")
    assert f"checkpoint-10 is not complete: {'its ' if 'cannot' in words else ''}" in sentence
    assert words in sentence
    assert f"The run goes on from {taken!r}." in sentence
    with pytest.raises(SettingsError, match="is not complete"):
        checked_checkpoint(str(newest), tmp_path)


def test_one_without_a_manifest_is_taken_if_it_has_what_every_checkpoint_has(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path, 4)
    (whole / "manifest.json").unlink()
    assert checked_checkpoint(str(whole), tmp_path)[0] == str(whole)
    (whole / "model.safetensors").unlink()
    (whole / "global_step" / "part.pt").unlink()
    (whole / "global_step").rmdir()
    with pytest.raises(SettingsError, match="it has no weights"):
        checked_checkpoint(True, tmp_path)
