"""The value head at work: what it counts, what it learns from, and on how many ranks."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from mcp_grpo.learning.advantages import first_tokens, returns_to_go, to_tokens, turn_columns, turn_mask
from mcp_grpo.learning.value_head import FusedValueOutput, ValueHead, ValueRecorder
from mcp_grpo.learning.values import ValueEstimator


GAMMA, GROUP_SIZE, NUM_TURNS = 0.9, 4, 3
# Rows of two tokens for each turn and one of a tool; the third and the last have failed, and no turns.
COUNTS = torch.tensor([3, 1, 0, 2, 2, 3, 1, 2, 1, 2, 2, 0])
MASK = turn_mask(COUNTS, NUM_TURNS)
TURN_IDS = torch.where(
    MASK.repeat_interleave(3, dim=1), torch.tensor([turn for k in range(NUM_TURNS) for turn in (k, k, -1)]), -1
)
LAST = 3 * COUNTS.clamp(min=1) - 1  # the last token of each row

Batch = dict[str, Any]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


REWARDS = numbers(*MASK.shape, seed=0) * MASK
VALUES = numbers(len(COUNTS), TURN_IDS.size(1) + 1, seed=1)  # before each token, and after the last
VALUES[:, :-1] += to_tokens(returns_to_go(REWARDS, COUNTS, GAMMA), TURN_IDS)


def recorder(values: torch.Tensor) -> ValueRecorder:
    """A forward pass that gave these values."""
    recorder = ValueRecorder(lambda num_values: FusedValueOutput(value_preds=values), TURN_IDS.size(1))
    recorder()
    return recorder


def scored(accelerator: Any = None, rows: slice = slice(None), rewards: torch.Tensor = REWARDS) -> Batch:
    """Rows of the batch as they are before the loss, no wider than they must be."""
    num_turns = int(COUNTS[rows].max())
    return turn_columns(
        TURN_IDS[rows],
        rewards[rows, :num_turns],
        GROUP_SIZE,
        gamma=GAMMA,
        accelerator=accelerator or Accelerator(),
    )


def cut_off(batch: Batch) -> Batch:
    """The same, with every second row cut short."""
    is_cut = torch.arange(len(COUNTS)) % 2
    completion_mask = torch.arange(TURN_IDS.size(1)) <= LAST[:, None]
    return {**batch, "is_cut": is_cut.float(), "completion_mask": completion_mask.long()}


def part(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, as TRL takes them."""
    return {name: column if column.ndim == 0 else column[rows] for name, column in batch.items()}


def make_estimator(mode: str = "hybrid", **changes: Any) -> ValueEstimator:
    return ValueEstimator(ValueHead(4), **{"mode": mode, "gamma": GAMMA, "lam": 0.95, "warmup": 1, **changes})


def metrics_of(batch: Batch, values: torch.Tensor = VALUES) -> tuple[dict[str, float], ValueEstimator]:
    estimator = make_estimator()
    batch |= estimator.settle(batch, recorder(values), learn=True)
    return estimator.end_step(lambda sums: sums), estimator


# What it counts


@pytest.mark.parametrize("is_cut", [False, True])
def test_explained_variances_and_the_weight_are_those_of_numpy(is_cut: bool) -> None:
    scored_batch = scored()
    batch = cut_off(scored_batch) if is_cut else scored_batch
    metrics, estimator = metrics_of(dict(batch))

    bootstrap = VALUES[torch.arange(len(COUNTS)), LAST + 1] * (torch.arange(len(COUNTS)) % 2) * is_cut
    targets = returns_to_go(REWARDS, COUNTS, GAMMA, bootstrap)
    values = first_tokens(VALUES[:, :-1], TURN_IDS, NUM_TURNS)
    target, value = (np.asarray(each[MASK], dtype=np.float64) for each in (targets, values))
    expected = {
        "value/explained_variance": 1 - np.var(target - value) / np.var(target),
        "value/mean": np.mean(value),
        "value/return_mean": np.mean(target),
    }
    # What is compared with the group's baselines is as the group saw it, whatever would have followed a cut.
    seen = batch["turn_has_baseline"]
    returns = returns_to_go(REWARDS, COUNTS, GAMMA)
    left, returned, value = (
        np.asarray(each[seen], dtype=np.float64) for each in (batch["turn_advantages"], returns, values)
    )
    shift = value - (returned - left)
    expected["value/ev_vs_group"] = 1 - np.mean((returned - value) ** 2) / np.mean(left**2)
    expected["value/mixing_weight"] = np.clip(np.sum(left * shift) / np.sum(shift**2), 0, 1)
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert 0 < metrics["value/mixing_weight"] < 1
    assert estimator.state_dict()["mixing"]["products"] == pytest.approx(np.sum(left * shift), rel=1e-5)


def test_a_cut_changes_the_targets_of_values_and_nothing_of_the_group() -> None:
    plain, cut = scored(), cut_off(scored())
    (metrics, estimator), (metrics_of_cut, estimator_of_cut) = metrics_of(plain), metrics_of(cut)
    assert estimator_of_cut.state_dict() == estimator.state_dict()
    assert metrics_of_cut["value/ev_vs_group"] == metrics["value/ev_vs_group"]
    assert metrics_of_cut["value/explained_variance"] != metrics["value/explained_variance"]
    assert not torch.equal(cut["turn_returns"], plain["turn_returns"])  # what the loss compares values with


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_row_cut_after_the_end_of_a_turn_is_continued_from_a_state_that_the_head_learns(is_kept: bool) -> None:
    ends_turn = (torch.arange(len(COUNTS)) % 3 == 0).float()
    kept = {"old_values": VALUES[:, :-1], "old_values_after": VALUES[:, 1:]} if is_kept else {}
    batch, estimator = cut_off(scored()) | kept | {"ends_turn": ends_turn}, make_estimator("gae")
    found = estimator.settle(batch, recorder(VALUES), learn=False)["turn_returns"]
    at = LAST + 1 - ends_turn.long()  # before the last token, or after it
    bootstrap = VALUES[torch.arange(len(COUNTS)), at] * batch["is_cut"]
    assert torch.equal(found, returns_to_go(REWARDS, COUNTS, GAMMA, bootstrap))


def test_the_variance_of_large_returns_is_not_lost_to_rounding() -> None:
    rewards = 1000 + 0.01 * numbers(8, 1, seed=2)
    values = rewards + 0.005 * numbers(8, 1, seed=3)
    turn_ids = torch.zeros(8, 1, dtype=torch.long)
    batch = turn_columns(turn_ids, rewards, 4, gamma=GAMMA, accelerator=Accelerator())
    metrics, _ = metrics_of(batch, values.expand(-1, 2))
    target, value = (np.asarray(each, dtype=np.float64) for each in (rewards, values))
    expected = 1 - np.var(target - value) / np.var(target)
    assert metrics["value/explained_variance"] == pytest.approx(expected, abs=1e-3)


def test_micro_batches_of_a_step_are_counted_as_one_batch() -> None:
    whole, _ = metrics_of(cut_off(scored()))
    estimator, batch = make_estimator(), cut_off(scored())
    for start in range(0, len(COUNTS), 3):
        rows = slice(start, start + 3)
        estimator.settle(part(batch, rows), recorder(VALUES[rows]), learn=True)
    assert estimator.end_step(lambda sums: sums) == pytest.approx(whole, rel=1e-12)
    assert estimator.end_step(lambda sums: sums) == {}  # and once


# Ranks


class Rank:
    """A rank of several that run in threads, with as much of an `accelerate.Accelerator` as is asked of it."""

    def __init__(self, process_index: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.process_index = process_index
        self._table, self._barrier = table, barrier

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.process_index] = tensor
        self._barrier.wait()
        tensors = list(self._table)
        self._barrier.wait()
        return tensors

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(tensor))

    def pad_across_processes(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 1
        widest = max(each.size(1) for each in self._all(tensor))
        return torch.nn.functional.pad(tensor, (0, widest - tensor.size(1)))

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor)).sum(dim=0)


def test_two_ranks_learn_what_one_rank_learns_from_all_rows() -> None:
    expected, estimator = metrics_of(batch := scored())
    table, barrier = [None, None], threading.Barrier(2, timeout=60)
    assert COUNTS[:6].max() > COUNTS[6:].max()  # and the group in the middle is on both

    def step(rank: Rank) -> tuple[Batch, dict[str, float], dict[str, Any]]:
        rows = slice(6 * rank.process_index, 6 * rank.process_index + 6)
        own, estimator = scored(rank, rows), make_estimator()
        own |= estimator.settle(own, recorder(VALUES[rows]), learn=True)
        return own, estimator.end_step(rank.add_up), estimator.state_dict()["mixing"]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(step, [Rank(index, table, barrier) for index in range(2)]))
    for name in ("turn_rewards", "turn_returns", "turn_advantages", "turn_has_baseline", "advantages"):
        assert torch.equal(torch.cat([own[name] for own, _, _ in results]), batch[name])
    for own, metrics, mixing in results:
        assert own["advantage_scale"] == batch["advantage_scale"]
        assert own["num_turns"] == batch["num_turns"] == COUNTS.sum()
        assert metrics == pytest.approx(expected, rel=1e-12)
        assert mixing == pytest.approx(estimator.state_dict()["mixing"], rel=1e-12)


# What it learns from


def test_a_batch_that_is_not_learnt_from_changes_nothing() -> None:
    learnt, estimator = metrics_of(scored())
    state = estimator.state_dict()
    for values in (VALUES, VALUES + 1):
        estimator.settle(scored(), recorder(values), learn=False)
    assert estimator.end_step(lambda sums: sums) == {}
    assert estimator.state_dict() == state

    other = make_estimator()
    other.settle(scored(), recorder(VALUES + 1), learn=False)
    other.settle(scored(), recorder(VALUES), learn=True)
    assert other.end_step(lambda sums: sums) == learnt
    assert other.state_dict() == state


def test_what_it_has_learnt_goes_through_a_checkpoint() -> None:
    _, estimator = metrics_of(scored())
    resumed = make_estimator()
    assert resumed.mixing.value != estimator.mixing.value
    resumed.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    assert resumed.state_dict() == estimator.state_dict()
    batches = scored(), scored()
    for each, batch in zip((estimator, resumed), batches, strict=True):
        batch |= each.settle(batch, recorder(VALUES), learn=True)
    assert torch.equal(batches[0]["advantages"], batches[1]["advantages"])
    assert estimator.end_step(lambda sums: sums) == resumed.end_step(lambda sums: sums)


@pytest.mark.parametrize("has_cuts", [False, True])
def test_rows_that_failed_have_no_weight(has_cuts: bool) -> None:
    failed = COUNTS == 0
    spoilt = torch.where(failed[:, None], VALUES + 100, VALUES)
    found = []
    for values in (VALUES, spoilt):
        batch = cut_off(scored()) if has_cuts else scored()
        values = values.clone().requires_grad_()
        metrics, estimator = metrics_of(batch, values)
        loss = estimator.loss(batch, recorder(values), batch["num_turns"])
        loss.backward()
        found.append((metrics, loss.item(), values.grad, batch["advantages"]))
        assert batch["num_turns"] == MASK.sum()
        assert not batch["turn_returns"][failed].any()
        assert not batch["advantages"][failed].any()
        assert not values.grad[failed].any()
        assert values.grad[~failed].any(dim=1).all()
    (metrics, loss, gradient, advantages), (metrics_of_spoilt, *rest) = found
    assert metrics_of_spoilt == metrics
    assert rest[0] == loss
    assert torch.equal(rest[1], gradient)
    assert torch.equal(rest[2], advantages)


# Values


def test_values_that_are_kept_in_the_batch_come_before_those_of_the_pass() -> None:
    old, new = VALUES, VALUES + numbers(*VALUES.shape, seed=4)
    kept = {"old_values": old[:, :-1], "old_values_after": old[:, 1:]}
    results = {}
    for name, values, more in (("old", old, {}), ("new", new, {}), ("kept", new, kept)):
        batch, estimator = cut_off(scored()) | more, make_estimator("gae")
        batch |= estimator.settle(batch, recorder(values), learn=True)
        results[name] = batch["advantages"], batch["turn_returns"], estimator.end_step(lambda sums: sums)
    for kept_one, old_one, new_one in zip(*(results[name][:2] for name in ("kept", "old", "new")), strict=True):
        assert torch.equal(kept_one, old_one)
        assert not torch.equal(kept_one, new_one)
    assert results["kept"][2] == results["old"][2] != results["new"][2]


def test_the_loss_is_that_of_the_pass() -> None:
    new = VALUES + 0.5
    batch, estimator = scored(), make_estimator("gae")
    batch |= estimator.settle(batch, recorder(new), learn=False)
    expected = (new[:, :-1] - to_tokens(batch["turn_returns"], TURN_IDS)).square()[TURN_IDS >= 0].sum() / (2 * 5)
    loss = estimator.loss({**batch, "old_values": VALUES[:, :-1]}, recorder(new), torch.tensor(5.0))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)  # two tokens to a turn


def test_the_loss_of_a_step_is_the_mean_over_its_micro_batches_and_alone_teaches_no_weight() -> None:
    batch, estimator = scored(), make_estimator("gae")
    state = estimator.state_dict()
    losses = []
    for shift in (0.0, 0.5):
        values = recorder(VALUES + shift)
        estimator.loss(batch, values, torch.tensor(3.0), learn=False)
        losses.append(estimator.loss(batch, values, torch.tensor(5.0)).item())
    assert estimator.end_step(lambda sums: sums) == {"value/loss": pytest.approx(sum(losses) / 2, rel=1e-6)}
    assert estimator.state_dict() == state
    assert estimator.end_step(lambda sums: sums) == {}


def test_advantages_and_targets_have_no_gradient() -> None:
    batch = cut_off(scored())
    batch |= make_estimator("gae").settle(batch, recorder(VALUES.clone().requires_grad_()), learn=True)
    assert not batch["advantages"].requires_grad
    assert not batch["turn_returns"].requires_grad


def test_the_weight_of_a_batch_is_the_one_it_was_scored_with() -> None:
    estimator = make_estimator("hybrid")
    found = []
    for products in (0.0, 1.0):  # what is learnt while the batch is used
        estimator.mixing.update(products, 1.0)
        batch = {**scored(), "mixing_weight": torch.tensor(0.25)}
        batch |= estimator.settle(batch, recorder(VALUES), learn=False)
        found.append(batch["advantages"])
    assert estimator.mixing.value > 0
    assert torch.equal(*found)
