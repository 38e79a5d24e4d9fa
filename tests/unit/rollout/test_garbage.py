"""What is left out of the search for garbage, and by whom."""

import gc
from collections.abc import Iterator

import pytest

from mcp_grpo.rollout import garbage
from mcp_grpo.rollout.garbage import GarbageWatch


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Garbage is looked for as in any program; tests have what they imported left out."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_old_objects_are_left_out_until_the_last_context_is_closed() -> None:
    watch = GarbageWatch()
    with watch.only_new_objects():
        with watch.only_new_objects():
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_an_error_closes_it_too() -> None:
    watch = GarbageWatch()
    with pytest.raises(LookupError), watch.only_new_objects():
        raise LookupError
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_leaves_out_stays_left_out() -> None:
    watch = GarbageWatch()
    gc.freeze()
    with watch.only_new_objects():
        pass
    assert gc.get_freeze_count() > 10_000


def test_objects_are_counted_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = GarbageWatch()
    gc.freeze()
    counts: list[int] = []
    real = gc.get_freeze_count
    monkeypatch.setattr("mcp_grpo.rollout.garbage.gc.get_freeze_count", lambda: counts.append(1) or real())
    for _ in range(3):
        with watch.only_new_objects():
            pass
    assert len(counts) == 1
    monkeypatch.setattr(garbage, "LOOK_EVERY", -1.0)
    with watch.only_new_objects():
        pass
    assert len(counts) == 2
