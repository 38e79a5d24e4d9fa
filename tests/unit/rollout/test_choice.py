"""Which tasks a batch attempts, by how far the rewards of attempts were apart."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from datasets import Dataset

from mcp_grpo.rollout.choice import LEAST, TaskChoice, group_spreads
from mcp_grpo.tasks import task_from_row


NAN = float("nan")


def choice_of(families: Mapping[str, int], **columns: Any) -> TaskChoice:
    """A choice among tasks of some families: `easy-0`, `easy-1` and so on."""
    rows = [
        {"task_id": f"{family}-{number}", "family": family, **columns}
        for family, count in families.items()
        for number in range(count)
    ]
    return TaskChoice(Dataset.from_list(rows))


def learn(choice: TaskChoice, times: int = 20, **spreads: float) -> None:
    for number in range(times):
        names = [f"{family}-{number}" for family in spreads]
        choice.learn(names, list(spreads.values()))


def test_the_spread_of_a_group_is_the_variance_of_its_weighted_rewards() -> None:
    rewards = torch.tensor(
        [[1.0, 0.0], [0.0, 1.0], [1.0, NAN], [NAN, NAN], [0.5, 0.0], [0.5, NAN], [NAN, NAN], [NAN, NAN]]
    )
    assert group_spreads(rewards, torch.tensor([1.0, 1.0]), size=2) == [0.0, None, 0.0, None]
    assert group_spreads(rewards, torch.tensor([2.0, 1.0]), size=2)[0] == pytest.approx(0.25)
    assert group_spreads(rewards[:4], torch.tensor([2.0, 1.0]), size=4)[0] == pytest.approx(2 / 9)  # of 2, 1 and 2


def test_until_something_is_known_the_tasks_proposed_are_attempted() -> None:
    choice = choice_of({"easy": 5, "hard": 5})
    proposed = ["easy-1", "hard-2", "easy-3"]
    assert choice.choose(proposed, seed=1) == proposed
    choice.learn(["easy-1", "hard-2"], [None, 0.0])  # nobody knows, and nothing has spread yet
    assert choice.choose(proposed, seed=2) == proposed


def test_tasks_are_attempted_in_proportion_to_the_spread_of_their_kind_and_never_fewer_than_the_least() -> None:
    choice = choice_of({"flat": 200, "half": 200, "whole": 200})
    learn(choice, flat=0.0, half=0.1, whole=0.2)
    found = Counter[str]()
    for seed in range(400):
        proposed = [f"{family}-{100 + seed % 100}" for family in ("flat", "half", "whole")]
        chosen = choice.choose(proposed, seed)
        assert len(set(chosen)) == 3
        found.update(name.partition("-")[0] for name in chosen)
    total, chances = sum(found.values()), {"flat": LEAST, "half": 0.56, "whole": 1.0}
    for family, chance in chances.items():  # 0.56: what is known counts for eight groups, and what is hoped for one
        assert found[family] / total == pytest.approx(chance / sum(chances.values()), abs=0.04)


def test_a_kind_that_was_not_attempted_counts_as_the_best() -> None:
    choice = choice_of({"flat": 20, "known": 20, "new": 20})
    learn(choice, flat=0.0, known=0.2)
    assert [choice.chance(f"{family}-19") for family in ("flat", "known", "new")] == [
        pytest.approx(0.1, abs=0.03),
        pytest.approx(1.0),
        1.0,
    ]


def test_what_was_long_ago_is_forgotten() -> None:
    choice = choice_of({"was": 100, "other": 100})
    learn(choice, times=30, was=0.2, other=0.02)
    assert choice.chance("was-99") > 0.9 > 0.3 > choice.chance("other-99")
    learn(choice, times=30, was=0.0, other=0.2)
    assert choice.chance("other-99") > 0.9 > 0.3 > choice.chance("was-99")


def test_a_task_that_comes_again_is_known_by_itself() -> None:
    choice = choice_of({"kind": 10})
    for _ in range(10):
        choice.learn(["kind-0", "kind-1", "kind-2"], [0.0, 0.25, 0.25])
    assert choice.chance("kind-0") < choice.chance("kind-5") <= choice.chance("kind-1")


def test_kinds_are_families_else_difficulties_else_none() -> None:
    rows = [{"task_id": name, "difficulty": "easy" if name == "a" else None} for name in "abc"]
    assert TaskChoice(Dataset.from_list(rows)).num_kinds == 2
    assert TaskChoice(Dataset.from_list([{"task_id": name} for name in "abc"])).num_kinds == 1
    assert choice_of({"one": 1, "other": 1}, difficulty="easy").num_kinds == 2
    prompt = [{"role": "user", "content": "?"}]
    rows = [
        {"task_id": name, "prompt": prompt, "difficulty": "hard", "family": family}
        for name, family in (("a", "x"), ("b", None))
    ]
    choice = TaskChoice(Dataset.from_list(rows))
    choice.learn(["a", "b"], [0.2, 0.0])
    assert (
        sorted(choice.state_dict()["kinds"]) == sorted(str(task_from_row(row).kind) for row in rows) == ["hard", "x"]
    )


def test_where_there_are_no_other_tasks_the_last_one_drawn_is_taken() -> None:
    choice = choice_of({"flat": 2, "steep": 1})
    learn(choice, times=1, flat=0.0, steep=0.2)
    for seed in range(50):
        chosen = choice.choose(["flat-0", "flat-1", "steep-0"], seed)
        assert sorted(chosen) == ["flat-0", "flat-1", "steep-0"]


def test_no_task_is_drawn_that_the_batch_has() -> None:
    choice = choice_of({"flat": 10, "steep": 10})
    learn(choice, times=5, flat=0.0, steep=0.2)
    taken = [f"steep-{number}" for number in range(9)]
    drawn = {choice.choose(["flat-0"], seed, taken)[0] for seed in range(200)}
    assert "steep-9" in drawn
    assert not drawn & set(taken)


def test_the_same_history_and_seed_make_the_same_choice_also_after_a_checkpoint() -> None:
    proposed = [f"flat-{number}" for number in range(8)]
    choice = choice_of({"flat": 50, "steep": 50})
    learn(choice, flat=0.0, steep=0.2)
    choice.choose(proposed, seed=0)
    chosen = choice.choose(proposed, seed=2**64 - 1)
    assert chosen != proposed
    other = choice_of({"flat": 50, "steep": 50})
    assert other.choose(proposed, seed=2**64 - 1) == proposed
    other.load_state_dict(choice.state_dict())
    assert other.num_choices == choice.num_choices == 2
    assert other.choose(proposed, seed=2**64 - 1) == chosen
    assert choice.choose(proposed, seed=3) != chosen


def test_tasks_that_are_not_in_the_dataset_are_left_as_they_are() -> None:
    choice = choice_of({"flat": 5, "steep": 5})
    choice.learn(["elsewhere"], [0.25])
    assert choice.choose(["elsewhere"], seed=0) == ["elsewhere"]


def test_what_cannot_be_told_apart_is_said() -> None:
    alike = choice_of({"one": 10})
    assert "none comes twice in 10 groups" in str(alike.problem(10))
    assert alike.problem(11) is None
    assert choice_of({"one": 5, "other": 5}).problem(1) is None
