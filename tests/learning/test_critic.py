"""The value head at work: what it counts, what it learns from, and on how many ranks."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from mcp_grpo.learning.advantages import first_tokens, returns_to_go, to_tokens, turn_mask
from mcp_grpo.learning.critic import Critic, turn_columns
from mcp_grpo.learning.value_head import FusedValueOutput, ValueHead, ValueRecorder


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
        scale="batch",
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


def make_critic(mode: str = "hybrid", **changes: Any) -> Critic:
    return Critic(ValueHead(4), **{"mode": mode, "gamma": GAMMA, "lam": 0.95, "warmup_steps": 1, **changes})


def metrics_of(batch: Batch, values: torch.Tensor = VALUES) -> tuple[dict[str, float], Critic]:
    critic = make_critic()
    critic.settle(batch, recorder(values), learn=True)
    return critic.end_step(lambda sums: sums), critic


# What it counts


@pytest.mark.parametrize("is_cut", [False, True])
def test_explained_variances_and_the_weight_are_those_of_numpy(is_cut: bool) -> None:
    scored_batch = scored()
    batch = cut_off(scored_batch) if is_cut else scored_batch
    metrics, critic = metrics_of(dict(batch))

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
    assert critic.state_dict()["mixing"]["products"] == pytest.approx(np.sum(left * shift), rel=1e-5)


def test_a_cut_changes_the_targets_of_values_and_nothing_of_the_group() -> None:
    plain, cut = scored(), cut_off(scored())
    (metrics, critic), (metrics_of_cut, critic_of_cut) = metrics_of(plain), metrics_of(cut)
    assert critic_of_cut.state_dict() == critic.state_dict()
    assert metrics_of_cut["value/ev_vs_group"] == metrics["value/ev_vs_group"]
    assert metrics_of_cut["value/explained_variance"] != metrics["value/explained_variance"]
    assert not torch.equal(cut["turn_returns"], plain["turn_returns"])  # what the loss compares values with


def test_the_variance_of_large_returns_is_not_lost_to_rounding() -> None:
    rewards = 1000 + 0.01 * numbers(8, 1, seed=2)
    values = rewards + 0.005 * numbers(8, 1, seed=3)
    turn_ids = torch.zeros(8, 1, dtype=torch.long)
    batch = turn_columns(turn_ids, rewards, 4, gamma=GAMMA, scale="none", accelerator=Accelerator())
    metrics, _ = metrics_of(batch, values.expand(-1, 2))
    target, value = (np.asarray(each, dtype=np.float64) for each in (rewards, values))
    expected = 1 - np.var(target - value) / np.var(target)
    assert metrics["value/explained_variance"] == pytest.approx(expected, abs=1e-3)


def test_micro_batches_of_a_step_are_counted_as_one_batch() -> None:
    whole, _ = metrics_of(cut_off(scored()))
    critic, batch = make_critic(), cut_off(scored())
    for start in range(0, len(COUNTS), 3):
        rows = slice(start, start + 3)
        critic.settle(part(batch, rows), recorder(VALUES[rows]), learn=True)
    assert critic.end_step(lambda sums: sums) == pytest.approx(whole, rel=1e-12)
    assert critic.end_step(lambda sums: sums) == {}  # and once


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
    expected, critic = metrics_of(batch := scored())
    table, barrier = [None, None], threading.Barrier(2, timeout=60)
    assert COUNTS[:6].max() > COUNTS[6:].max()  # and the group in the middle is on both

    def step(rank: Rank) -> tuple[Batch, dict[str, float], dict[str, Any]]:
        rows = slice(6 * rank.process_index, 6 * rank.process_index + 6)
        own, critic = scored(rank, rows), make_critic()
        critic.settle(own, recorder(VALUES[rows]), learn=True)
        return own, critic.end_step(rank.add_up), critic.state_dict()["mixing"]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(step, [Rank(index, table, barrier) for index in range(2)]))
    for name in ("turn_rewards", "turn_returns", "turn_advantages", "turn_has_baseline", "advantages"):
        assert torch.equal(torch.cat([own[name] for own, _, _ in results]), batch[name])
    for own, metrics, mixing in results:
        assert own["advantage_scale"] == batch["advantage_scale"]
        assert own["num_turns"] == batch["num_turns"] == COUNTS.sum()
        assert metrics == pytest.approx(expected, rel=1e-12)
        assert mixing == pytest.approx(critic.state_dict()["mixing"], rel=1e-12)


# What it learns from


def test_a_batch_that_is_not_learnt_from_changes_nothing() -> None:
    learnt, critic = metrics_of(scored())
    state = critic.state_dict()
    for values in (VALUES, VALUES + 1):
        critic.settle(scored(), recorder(values), learn=False)
    assert critic.end_step(lambda sums: sums) == {}
    assert critic.state_dict() == state

    other = make_critic()
    other.settle(scored(), recorder(VALUES + 1), learn=False)
    other.settle(scored(), recorder(VALUES), learn=True)
    assert other.end_step(lambda sums: sums) == learnt
    assert other.state_dict() == state


def test_what_it_has_learnt_goes_through_a_checkpoint() -> None:
    _, critic = metrics_of(scored())
    resumed = make_critic()
    assert resumed.mixing.value != critic.mixing.value
    resumed.load_state_dict(json.loads(json.dumps(critic.state_dict())))
    assert resumed.state_dict() == critic.state_dict()
    batches = scored(), scored()
    for each, batch in zip((critic, resumed), batches, strict=True):
        each.settle(batch, recorder(VALUES), learn=True)
    assert torch.equal(batches[0]["advantages"], batches[1]["advantages"])
    assert critic.end_step(lambda sums: sums) == resumed.end_step(lambda sums: sums)


@pytest.mark.parametrize("mode", ["group", "group_turn"])
def test_a_head_that_is_only_trained_leaves_advantages_alone(mode: str) -> None:
    batch = {**scored(), "advantages": numbers(len(COUNTS), seed=3)}
    advantages = batch["advantages"].clone()
    critic = make_critic(mode)
    critic.settle(batch, recorder(VALUES), learn=True)
    assert torch.equal(batch["advantages"], advantages)
    assert "value/explained_variance" in critic.end_step(lambda sums: sums)


@pytest.mark.parametrize("has_cuts", [False, True])
def test_rows_that_failed_have_no_weight(has_cuts: bool) -> None:
    failed = COUNTS == 0
    spoilt = torch.where(failed[:, None], VALUES + 100, VALUES)
    found = []
    for values in (VALUES, spoilt):
        batch = cut_off(scored()) if has_cuts else scored()
        values = values.clone().requires_grad_()
        metrics, critic = metrics_of(batch, values)
        loss = critic.loss(batch, recorder(values), batch["num_turns"])
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
        batch, critic = cut_off(scored()) | more, make_critic("gae")
        critic.settle(batch, recorder(values), learn=True)
        results[name] = batch["advantages"], batch["turn_returns"], critic.end_step(lambda sums: sums)
    for kept_one, old_one, new_one in zip(*(results[name][:2] for name in ("kept", "old", "new")), strict=True):
        assert torch.equal(kept_one, old_one)
        assert not torch.equal(kept_one, new_one)
    assert results["kept"][2] == results["old"][2] != results["new"][2]


def test_the_loss_is_that_of_the_pass_and_is_clipped_around_values_that_are_kept() -> None:
    new = (VALUES + 0.5).requires_grad_()
    batch, critic = scored(), make_critic("gae", clip_range=0.1)
    critic.settle(batch, recorder(new), learn=False)
    expected = (new[:, :-1] - to_tokens(batch["turn_returns"], TURN_IDS)).square()[TURN_IDS >= 0].sum() / (2 * 5)
    plain = critic.loss(batch, recorder(new), torch.tensor(5.0))
    assert plain.item() == pytest.approx(expected.item(), rel=1e-5)  # two tokens to a turn; nothing to clip around

    batch["old_values"] = VALUES[:, :-1]
    clipped = critic.loss(batch, recorder(new), torch.tensor(5.0))
    assert clipped > plain
    assert (
        torch.autograd.grad(plain, new)[0].count_nonzero() > torch.autograd.grad(clipped, new)[0].count_nonzero() > 0
    )


def test_the_loss_of_a_step_is_the_mean_over_its_micro_batches_and_alone_teaches_no_weight() -> None:
    batch, critic = scored(), make_critic("gae")
    state = critic.state_dict()
    losses = []
    for shift in (0.0, 0.5):
        values = recorder(VALUES + shift)
        critic.loss(batch, values, torch.tensor(3.0), learn=False)
        losses.append(critic.loss(batch, values, torch.tensor(5.0)).item())
    assert critic.end_step(lambda sums: sums) == {"value/loss": pytest.approx(sum(losses) / 2, rel=1e-6)}
    assert critic.state_dict() == state
    assert critic.end_step(lambda sums: sums) == {}


def test_advantages_and_targets_have_no_gradient() -> None:
    batch = cut_off(scored())
    make_critic("gae").settle(batch, recorder(VALUES.clone().requires_grad_()), learn=True)
    assert not batch["advantages"].requires_grad
    assert not batch["turn_returns"].requires_grad


def test_the_weight_of_a_batch_is_the_one_it_was_scored_with() -> None:
    critic = make_critic("hybrid")
    found = []
    for products in (0.0, 1.0):  # what is learnt while the batch is used
        critic.mixing.update(products, 1.0)
        batch = {**scored(), "mixing_weight": torch.tensor(0.25)}
        critic.settle(batch, recorder(VALUES), learn=False)
        found.append(batch["advantages"])
    assert critic.mixing.value > 0
    assert torch.equal(*found)
