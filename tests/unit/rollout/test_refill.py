"""Replacing groups that teach nothing, also where they lie on several ranks."""

from threading import Barrier, Thread

import pytest
import torch

from mcp_grpo.rollout.refill import flat_groups, other_rows, refill, slots_to_score


NAN = float("nan")


def test_a_group_is_flat_if_fewer_than_two_different_rewards_were_given() -> None:
    rewards = torch.tensor([[1.0], [1.0], [0.0], [1.0], [NAN], [NAN], [NAN], [1.0], [2.0], [2.0 + 1e-9]])
    assert flat_groups(rewards, torch.ones(1), size=2) == [0, 2, 3, 4]


def test_rewards_of_several_functions_are_weighted_before_they_are_compared() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, NAN], [NAN, 1.0]])
    assert flat_groups(rewards, torch.tensor([1.0, 1.0]), size=2) == [0, 1]
    assert flat_groups(rewards, torch.tensor([2.0, 1.0]), size=2) == []


def test_every_rank_scores_equally_many() -> None:
    assert slots_to_score([0], size=4, num_own=6, num_ranks=2) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert slots_to_score([1], size=4, num_own=6, num_ranks=2) == [[4, 5], [0, 1]]
    assert slots_to_score([2], size=4, num_own=6, num_ranks=2) == [[0, 1, 2, 3], [2, 3, 4, 5]]


def test_rows_are_drawn_from_those_that_are_free_without_repetition_while_there_are_enough() -> None:
    assert sorted(other_rows("abcde", "bd", 3, seed=2**64 - 1)) == [0, 2, 4]
    assert sorted(other_rows("ab", "ab", 2, seed=0)) == [0, 1]  # better a task that is there already than none
    assert len(other_rows("a", "", 3, seed=0)) == 3
    names = [str(i) for i in range(100)]
    assert other_rows(names, [], 5, seed=1) == other_rows(names, [], 5, seed=1) != other_rows(names, [], 5, seed=2)


@pytest.mark.parametrize("max_rounds", [1, 2, 3])
def test_ranks_agree_on_what_is_replaced(max_rounds: int) -> None:
    """Two ranks of six trajectories, groups of four: the middle one lies on both. Its task teaches in its third form."""
    size, num_own, barrier = 4, 6, Barrier(2)
    tasks = [[0, 0, 0, 0, 10, 10], [10, 10, 2, 2, 2, 2]]  # a task above 10 has been replaced that many times
    scored: list[list] = [[], []]
    shares: list[list[float]] = [[], []]

    def rewards_of(rank: int, slots: list[int]) -> torch.Tensor:
        spread = [tasks[rank][slot] not in (10, 11) for slot in slots]
        return torch.tensor([[float((rank * num_own + slot) % 2) * s] for slot, s in zip(slots, spread, strict=True)])

    def run(rank: int) -> None:
        def score(slots: list[int]) -> torch.Tensor:
            scored[rank] = slots
            barrier.wait(10)
            both = torch.cat([rewards_of(r, scored[r]) for r in (0, 1)])
            barrier.wait(10)
            return both

        def replace(groups: dict[int, int]) -> None:
            assert set(groups.values()) == {0}  # the first, and only, of those that are replaced
            for slot in groups:
                tasks[rank][slot] += 1

        shares[rank] = refill(
            num_own,
            size,
            max_rounds=max_rounds,
            flat=lambda rows: flat_groups(rows, torch.ones(1), size),
            rank=rank,
            num_ranks=2,
            score=score,
            replace=replace,
        )

    threads = [Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    replaced = 10 + min(max_rounds, 2)
    assert tasks == [[0, 0, 0, 0, replaced, replaced], [replaced, replaced, 2, 2, 2, 2]]
    expected = [1 / 3, 1 / 3, 0.0][: max_rounds + 1]
    assert shares == [pytest.approx(expected)] * 2
