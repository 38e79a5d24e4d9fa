"""Advantages per turn, against slow loops in float64, as the trainer makes them: some before the loss, some in it."""

import json
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from mcp_grpo.learning.advantages import (
    MixingWeight,
    first_tokens,
    flat_turns,
    returns_to_go,
    to_tokens,
    turn_baseline,
    turn_columns,
    turn_gae,
    turn_mask,
)
from mcp_grpo.learning.value_head import FusedValueOutput, ValueHead, ValueRecorder
from mcp_grpo.learning.values import ValueEstimator


EXACT = 1e-12
EQUAL = {"atol": EXACT, "rtol": EXACT}
MODES = ["group_turn", "gae", "hybrid"]

Batch = dict[str, Any]


def tensor(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of a batch, and what a value head says of them."""

    rewards: torch.Tensor  # (N, K)
    counts: torch.Tensor  # (N,)
    group_size: int
    values: torch.Tensor  # (N, K)
    bootstrap: torch.Tensor | None = None  # (N,)

    @property
    def mask(self) -> torch.Tensor:
        return turn_mask(self.counts, self.rewards.shape[1])


def random_turns(seed: int, *, groups: int = 3, group_size: int = 4, num_turns: int = 5, failed: float = 0.2) -> Turns:
    """Rewards and values of trajectories of all lengths, some of which are left out."""
    generator = torch.Generator().manual_seed(seed)
    rows = groups * group_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    counts = torch.randint(1, num_turns + 1, (rows,), generator=generator)
    counts[torch.rand(rows, generator=generator) < failed] = 0
    return Turns(
        rewards=random(rows, num_turns) * turn_mask(counts, num_turns),
        counts=counts,
        group_size=group_size,
        values=random(rows, num_turns),
        bootstrap=random(rows) * (torch.rand(rows, generator=generator) < 0.5),
    )


def random_turn_ids(counts: list[int], generator: torch.Generator) -> torch.Tensor:
    """Turns of 1 to 6 tokens, each followed by up to 5 tokens of a tool."""

    def length(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    rows = [[i for turn in range(count) for i in [turn] * length(1, 6) + [-1] * length(0, 5)] for count in counts]
    width = max(map(len, rows)) + 2
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def scored(turns: Turns, *, gamma: float = 0.99, scale: str = "none") -> tuple[Batch, ValueRecorder]:
    """A batch before its loss, and the values of the forward pass, which are no numbers where none must be read."""
    turn_ids = random_turn_ids(turns.counts.tolist(), torch.Generator().manual_seed(0))
    rows, num_tokens = turn_ids.shape
    batch = turn_columns(turn_ids, turns.rewards, turns.group_size, gamma=gamma, accelerator=Accelerator())
    if scale == "none":
        batch["advantage_scale"] = torch.ones_like(batch["advantage_scale"])
    first = first_tokens(torch.arange(num_tokens).expand(rows, -1), turn_ids, turns.rewards.shape[1])
    values = turns.values.new_full((rows, num_tokens + 1), torch.nan)
    for row, count in enumerate(turns.counts.tolist()):
        values[row, first[row, :count]] = turns.values[row, :count]
    if turns.bootstrap is not None:
        last = (turn_ids >= 0).int().cumsum(1).argmax(1)  # the last token that the policy wrote
        batch["completion_mask"] = (torch.arange(num_tokens) <= last[:, None]).long()
        batch["is_cut"] = (turns.bootstrap != 0).to(turns.rewards.dtype)
        values[torch.arange(rows), last + 1] = torch.where(turns.bootstrap != 0, turns.bootstrap, 9.0)
    recorder = ValueRecorder(lambda num_values: FusedValueOutput(value_preds=values), num_tokens)
    recorder()
    return batch, recorder


class Watching(ValueEstimator):
    """Leaves advantages to the group."""

    def settle(self, *args: Any, **kwargs: Any) -> Batch:
        return {"turn_returns": super().settle(*args, **kwargs)["turn_returns"]}


def make_estimator(
    mode: str, *, weight: float | None = 0.5, gamma: float = 0.99, lam: float = 0.95, warmup_steps: int = 0
) -> ValueEstimator:
    """One that trusts its values as far as it is told to, for the next batch."""
    kind, mode = (Watching, "gae") if mode == "group_turn" else (ValueEstimator, mode)
    estimator = kind(ValueHead(4), mode=mode, gamma=gamma, lam=lam, warmup=warmup_steps)
    if weight is not None:
        estimator.mixing.load_state_dict({"num_batches": warmup_steps, "products": weight, "squares": 1.0})
    return estimator


def settled(
    turns: Turns, estimator: ValueEstimator, *, scale: str = "none", gamma: float = 0.99, learn: bool = False
) -> Batch:
    """A batch as its loss sees it."""
    batch, recorder = scored(turns, gamma=gamma, scale=scale)
    batch["advantages"] = to_tokens(batch["turn_advantages"] / batch["advantage_scale"], batch["turn_ids"])
    batch |= estimator.settle(batch, recorder, learn=learn)
    return batch


def per_turn(batch: Batch) -> torch.Tensor:
    """Advantages of turns; those of a turn's tokens must all be the same."""
    advantages = first_tokens(batch["advantages"], batch["turn_ids"], batch["turn_rewards"].shape[1])
    assert torch.equal(to_tokens(advantages, batch["turn_ids"]), batch["advantages"])
    return advantages


def advantages_of(turns: Turns, mode: str, *, scale: str = "none", **settings: float) -> torch.Tensor:
    gamma = settings.get("gamma", 0.99)
    return per_turn(settled(turns, make_estimator(mode, **settings), scale=scale, gamma=gamma))


def learn_from(estimator: ValueEstimator, turns: Turns) -> dict[str, float]:
    """A whole step on one rank."""
    settled(turns, estimator, learn=True)
    return estimator.end_step(lambda sums: sums)


def slow_return(rewards: list[float], gamma: float, bootstrap: float = 0.0) -> float:
    return sum(gamma**n * reward for n, reward in enumerate([*rewards, bootstrap]))


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float, bootstrap: float) -> list[float]:
    """The definition: a sum over all later turns, each with the error of its own value."""
    values = [*values, bootstrap]
    advantages = []
    for turn in range(len(rewards)):
        later = range(turn, len(rewards))
        errors = [rewards[n] + gamma * values[n + 1] - values[n] for n in later]
        advantages.append(sum((gamma * lam) ** (n - turn) * error for n, error in zip(later, errors, strict=True)))
    return advantages


def slow_baseline(returns: list[list[float]], row: int, turn: int) -> float | None:
    """`returns` are those of a group, with an empty list for a trajectory that is left out."""
    others = [other for n, other in enumerate(returns) if n != row and other]
    same_turn = [other[turn] for other in others if len(other) > turn]
    if len(same_turn) >= 2:
        return sum(same_turn) / len(same_turn)
    return sum(other[0] for other in others) / len(others) if others else None


def rows_of(figures: torch.Tensor, counts: torch.Tensor) -> list[list[float]]:
    return [row[:count] for row, count in zip(figures.tolist(), counts.tolist(), strict=True)]


def padded(rows: list[list[float]], num_turns: int) -> torch.Tensor:
    return tensor([row + [0.0] * (num_turns - len(row)) for row in rows])


shapes = {
    "seed": st.integers(0, 2**31),
    "groups": st.integers(1, 3),
    "group_size": st.integers(1, 5),
    "num_turns": st.integers(1, 7),
}
rate = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])


@given(gamma=rate, lam=rate, **shapes)
def test_estimates_are_the_double_sum_that_defines_them(
    gamma: float, lam: float, seed: int, groups: int, group_size: int, num_turns: int
) -> None:
    turns = random_turns(seed, groups=groups, group_size=group_size, num_turns=num_turns)
    rewards, values = rows_of(turns.rewards, turns.counts), rows_of(turns.values, turns.counts)
    ends = turns.bootstrap.tolist()
    expected = [slow_gae(r, v, gamma, lam, end) for r, v, end in zip(rewards, values, ends, strict=True)]
    got = turn_gae(turns.rewards, turns.values, turns.counts, gamma=gamma, lam=lam, bootstrap=turns.bootstrap)
    torch.testing.assert_close(got, padded(expected, num_turns), **EQUAL)

    totals = [
        [slow_return(r[turn:], gamma, end) for turn in range(len(r))] for r, end in zip(rewards, ends, strict=True)
    ]
    got = returns_to_go(turns.rewards, turns.counts, gamma, turns.bootstrap)
    torch.testing.assert_close(got, padded(totals, num_turns), **EQUAL)


@given(**shapes)
def test_baselines_are_means_of_the_others_that_reached_the_turn(
    seed: int, groups: int, group_size: int, num_turns: int
) -> None:
    turns = random_turns(seed, groups=groups, group_size=group_size, num_turns=num_turns, failed=0.3)
    baseline, has_baseline = turn_baseline(turns.rewards, turns.counts, group_size)
    returns = rows_of(turns.rewards, turns.counts)
    for row in range(len(returns)):
        group = row // group_size * group_size
        for turn in range(num_turns):
            expected = None
            if turn < len(returns[row]):
                expected = slow_baseline(returns[group : group + group_size], row - group, turn)
            assert has_baseline[row, turn].item() == (expected is not None)
            assert baseline[row, turn].item() == pytest.approx(expected or 0.0, abs=EXACT)


def test_a_baseline_by_hand_with_a_failed_row_and_short_rows() -> None:
    returns = tensor([[4, 3], [2, 1], [6, 0], [99, 99]])  # the last one failed: what stands there must not count
    baseline, has_baseline = turn_baseline(returns, torch.tensor([2, 2, 1, 0]), 4)
    assert baseline.tolist() == [[4, 4], [5, 5], [3, 0], [0, 0]]
    assert has_baseline.tolist() == [[True, True], [True, True], [True, False], [False, False]]


def test_two_others_at_a_turn_are_enough_and_one_is_not() -> None:
    returns = tensor([[10, 1], [20, 2], [60, 6]])
    assert turn_baseline(returns, torch.tensor([2, 2, 2]), 3)[0][0, 1].item() == (2 + 6) / 2
    assert turn_baseline(returns, torch.tensor([2, 2, 1]), 3)[0][0, 1].item() == (20 + 60) / 2


@pytest.mark.parametrize("size", [1.0, 1e18])
def test_a_trajectory_never_enters_its_own_baseline(size: float) -> None:
    turns = random_turns(1, failed=0.1)
    baseline, _ = turn_baseline(turns.rewards, turns.counts, turns.group_size)
    for row in range(len(turns.counts)):
        moved = turns.rewards.clone()
        moved[row] += size
        changed, _ = turn_baseline(moved, turns.counts, turns.group_size)
        assert torch.equal(changed[row], baseline[row])  # to the last bit, however large the return
        group = slice(row // 4 * 4, row // 4 * 4 + 4)
        outside = torch.ones(len(turns.counts), dtype=torch.bool)
        outside[group] = False
        assert torch.equal(changed[outside], baseline[outside])
        if turns.counts[row] and (turns.counts[group] > 0).sum() > 1:
            assert not torch.equal(changed[group], baseline[group])


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_with_one_turn_and_no_discount_group_turn_is_leave_one_out(group_size: int) -> None:
    rewards = torch.randn(3 * group_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    counts = torch.ones(len(rewards), dtype=torch.long)
    turns = Turns(
        rewards=rewards[:, None], counts=counts, group_size=group_size, values=torch.zeros_like(rewards)[:, None]
    )
    got = advantages_of(turns, "group_turn", gamma=1.0)
    groups = rewards.view(-1, group_size)
    expected = (groups - groups.mean(1, keepdim=True)) * group_size / (group_size - 1)
    torch.testing.assert_close(got.view(-1, group_size), expected, **EQUAL)


def test_at_lambda_one_an_estimate_is_the_return_less_the_value() -> None:
    turns = random_turns(3)
    batch = settled(turns, make_estimator("gae", gamma=0.9, lam=1.0), gamma=0.9)
    torch.testing.assert_close(per_turn(batch), (batch["turn_returns"] - turns.values) * turns.mask, **EQUAL)


def test_at_lambda_zero_an_estimate_looks_one_turn_ahead() -> None:
    got = turn_gae(tensor([[1, 2, 4]]), tensor([[10, 20, 40]]), torch.tensor([3]), gamma=0.5, lam=0.0)
    assert got.tolist() == [[1 + 10 - 10, 2 + 20 - 20, 4 - 40]]


@pytest.mark.parametrize("mode", MODES)
def test_what_went_before_a_turn_does_not_count_for_it(mode: str) -> None:
    turns = random_turns(4)
    before = advantages_of(turns, mode)
    for row in turns.counts.nonzero().flatten().tolist():
        rewards = turns.rewards.clone()
        rewards[row, 0] -= 7
        after = advantages_of(replace(turns, rewards=rewards), mode)
        assert torch.equal(after[row, 1:], before[row, 1:])
        assert after[row, 0].item() == pytest.approx(before[row, 0].item() - 7)


def test_generalised_estimates_are_those_of_the_values_at_first_tokens() -> None:
    turns = random_turns(5)
    expected = turn_gae(turns.rewards, turns.values, turns.counts, gamma=0.99, lam=0.95, bootstrap=turns.bootstrap)
    assert torch.equal(advantages_of(turns, "gae"), expected)


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_hybrid_is_the_weighted_mean_of_its_parents(weight: float) -> None:
    turns = random_turns(5)
    group, gae = (advantages_of(turns, mode) for mode in ("group_turn", "gae"))
    hybrid = advantages_of(turns, "hybrid", weight=weight)
    torch.testing.assert_close(hybrid, (1 - weight) * group + weight * gae, **EQUAL)


def test_only_values_bootstrap() -> None:
    turns = random_turns(6, failed=0.0)
    ended = replace(turns, bootstrap=None)
    assert turns.bootstrap.any()
    batch, batch_of_ended = (settled(each, make_estimator("hybrid", weight=0.0)) for each in (turns, ended))
    assert torch.equal(per_turn(batch), per_turn(batch_of_ended))
    assert torch.equal(batch["turn_advantages"], batch_of_ended["turn_advantages"])

    expected = returns_to_go(turns.rewards, turns.counts, 0.99, turns.bootstrap)
    assert torch.equal(batch["turn_returns"], expected)
    assert not torch.equal(batch_of_ended["turn_returns"], expected)
    assert not torch.equal(advantages_of(turns, "gae"), advantages_of(ended, "gae"))


# Tokens


def token_gae(
    rewards: list[float], values: list[float], gammas: list[float], lams: list[float], bootstrap: float
) -> list[float]:
    """Token by token, over the tokens that the policy wrote, with the rates that hold after each."""
    advantages, advantage, value = [], 0.0, bootstrap
    for t in reversed(range(len(rewards))):
        advantage = rewards[t] + gammas[t] * value - values[t] + gammas[t] * lams[t] * advantage
        value = values[t]
        advantages.append(advantage)
    return advantages[::-1]


@given(seed=st.integers(0, 2**31), num_turns=st.integers(1, 6), gamma=rate, lam=rate)
def test_turns_spread_over_tokens_are_token_estimates_with_rates_at_turn_ends(
    seed: int, num_turns: int, gamma: float, lam: float
) -> None:
    turns = random_turns(seed, num_turns=num_turns)
    turn_ids = random_turn_ids(turns.counts.tolist(), torch.Generator().manual_seed(seed))
    per_turn = turn_gae(turns.rewards, turns.values, turns.counts, gamma=gamma, lam=lam, bootstrap=turns.bootstrap)
    expected = torch.zeros(turn_ids.shape, dtype=torch.float64)
    for row, ids in enumerate(turn_ids.tolist()):
        places = [t for t, turn in enumerate(ids) if turn >= 0]
        written = [ids[t] for t in places]
        ends = [written[n : n + 2] != [turn, turn] for n, turn in enumerate(written)]
        rewards = [turns.rewards[row, k].item() if end else 0.0 for k, end in zip(written, ends, strict=True)]
        values = [turns.values[row, turn].item() for turn in written]
        gammas, lams = ([each if end else 1.0 for end in ends] for each in (gamma, lam))
        expected[row, places] = tensor(token_gae(rewards, values, gammas, lams, turns.bootstrap[row].item()))
    torch.testing.assert_close(to_tokens(per_turn, turn_ids), expected, **EQUAL)


def test_negative_control_gamma_and_lambda_per_token_lose_the_credit_of_early_turns() -> None:
    num_turns, num_tokens = 5, 40
    rewards = tensor([[0, 0, 0, 0, 1]])
    turn_ids = torch.arange(num_turns).repeat_interleave(num_tokens)[None]
    per_turn = turn_gae(rewards, torch.zeros_like(rewards), torch.tensor([num_turns]), gamma=0.99, lam=0.95)
    by_turn = to_tokens(per_turn, turn_ids)[0]

    length = num_turns * num_tokens
    rates = [0.99] * length, [0.95] * length
    by_token = tensor(token_gae([0.0] * (length - 1) + [1.0], [0.0] * length, *rates, bootstrap=0.0))

    assert by_turn[:num_tokens].tolist() == pytest.approx([(0.99 * 0.95) ** 4] * num_tokens)
    assert by_turn.min() > 0.75
    assert by_token[: -2 * num_tokens].max() < 0.01  # three turns of five get less than a hundredth
    assert by_token[:num_tokens].max() < 1e-4
    assert torch.cosine_similarity(by_turn, by_token, dim=0) < 0.5


def test_a_reward_on_a_turn_that_is_masked_whole_reaches_the_turns_before_it() -> None:
    turn_ids = torch.tensor([[0, 0, -1, 1, -1, -1, 2, 2, 2]])
    loss_mask = torch.tensor([[1, 1, 0, 1, 0, 0, 0, 0, 0]])
    per_turn = turn_gae(tensor([[0, 0, 1]]), tensor([[0, 0, 0]]), torch.tensor([3]), gamma=0.5, lam=1.0)
    learnt = to_tokens(per_turn, turn_ids) * loss_mask
    assert learnt.tolist() == [[0.25, 0.25, 0, 0.5, 0, 0, 0, 0, 0]]


def test_values_are_read_at_the_first_token_of_each_turn() -> None:
    values = tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18]])
    turn_ids = torch.tensor([[0, 0, -1, 1, 1, -1], [-1, 0, -1, 2, -1, 3], [-1] * 6])
    assert first_tokens(values, turn_ids, 4).tolist() == [[1, 4, 0, 0], [8, 0, 10, 12], [0, 0, 0, 0]]


def test_a_figure_that_goes_to_the_tokens_comes_back_from_the_first() -> None:
    turns = random_turns(7)
    turn_ids = random_turn_ids(turns.counts.tolist(), torch.Generator().manual_seed(7))
    assert torch.equal(first_tokens(to_tokens(turns.rewards, turn_ids), turn_ids, 5), turns.rewards)


# Scale and metrics


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_is_the_deviation_of_what_the_group_leaves_for_the_whole_batch(mode: str) -> None:
    turns = random_turns(12, groups=6, group_size=2, failed=0.3)
    batch = scored(turns)[0]
    has_baseline = batch["turn_has_baseline"]
    assert has_baseline.sum() < turns.mask.sum()  # some are alone in their groups, and count for nothing here
    figures = batch["turn_advantages"][has_baseline].tolist()
    mean = sum(figures) / len(figures)
    std = sqrt(sum((figure - mean) ** 2 for figure in figures) / len(figures))
    plain, scaled = (advantages_of(turns, mode, scale=scale) for scale in ("none", "batch"))
    torch.testing.assert_close(scaled, plain / std, **EQUAL)


def test_small_advantages_are_not_blown_up() -> None:
    nothing = tensor([[0], [0]])
    turns = Turns(rewards=tensor([[0.01], [0]]), counts=torch.tensor([1, 1]), group_size=2, values=nothing)
    got = advantages_of(turns, "group_turn", scale="batch")
    assert got.flatten().tolist() == pytest.approx([0.1, -0.1])


def test_without_any_baseline_there_is_no_scale() -> None:
    turns = replace(random_turns(8), group_size=1)
    assert torch.equal(advantages_of(turns, "gae", scale="batch"), advantages_of(turns, "gae"))


def test_metrics_by_hand() -> None:
    turns = Turns(
        rewards=tensor([[0, 1], [0, 0], [1, 0], [5, 0]]),
        counts=torch.tensor([2, 2, 0, 1]),  # the third one failed, so the fourth has no peers in its group of two
        group_size=2,
        values=tensor([[0.5, 0.75], [0.25, 0.0], [9, 9], [4, 9]]),
    )
    estimator = make_estimator("hybrid", gamma=1.0, weight=None, warmup_steps=1)
    settled(turns, estimator, gamma=1.0, learn=True)
    metrics = estimator.end_step(lambda sums: sums)
    returns, values = [1, 1, 0, 0, 5], [0.5, 0.75, 0.25, 0, 4]

    def variance(figures: list[float]) -> float:
        return sum((figure - sum(figures) / len(figures)) ** 2 for figure in figures) / len(figures)

    errors = [g - v for g, v in zip(returns, values, strict=True)]
    # The baselines are 0, 0, 1 and 1.
    products = 1 * 0.5 + 1 * 0.75 + -1 * -0.75 + -1 * -1
    squares = 0.5**2 + 0.75**2 + 0.75**2 + 1
    assert metrics == pytest.approx(
        {
            "value/explained_variance": 1 - variance(errors) / variance(returns),
            "value/ev_vs_group": 1 - (0.5**2 + 0.25**2 + 0.25**2) / 4,
            "value/mixing_weight": min(products / squares, 1),
            "value/mean": sum(values) / 5,
            "value/return_mean": 7 / 5,
        }
    )


@pytest.mark.parametrize("spread", [0.0, 5e-5])
def test_metrics_that_are_undefined_are_left_out(spread: float) -> None:
    rewards = 2.1 + spread * torch.linspace(-1, 1, 800).view(8, 100).T.reshape(800, 1)
    alike = Turns(rewards=rewards, counts=torch.ones(800).long(), group_size=8, values=torch.full((800, 1), 0.3))
    assert learn_from(make_estimator("gae"), alike).keys() == {
        "value/mixing_weight",
        "value/mean",
        "value/return_mean",
    }


def test_values_are_not_compared_with_baselines_that_are_not_there() -> None:
    metrics = learn_from(make_estimator("gae"), replace(random_turns(9), group_size=1))
    assert "value/explained_variance" in metrics
    assert "value/ev_vs_group" not in metrics


# What is left out


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_failed_whole_gives_zeros(mode: str) -> None:
    nothing = torch.zeros(4, 3, dtype=torch.float64)
    turns = Turns(
        rewards=nothing, counts=torch.zeros(4).long(), group_size=2, values=nothing, bootstrap=tensor([1, 1, 1, 1])
    )
    estimator = make_estimator(mode)
    batch = settled(turns, estimator, scale="batch", learn=True)
    assert not batch["advantages"].any()
    assert torch.equal(batch["turn_returns"], nothing)
    assert estimator.end_step(lambda sums: sums) == {"value/mixing_weight": 0.5}
    assert estimator.mixing.value == 0.5


@pytest.mark.parametrize("num_turns", [0, 3])
def test_rows_without_turns_have_nothing_at_any_turn(num_turns: int) -> None:
    turn_ids = torch.full((4, 2), -1)
    assert to_tokens(torch.ones(4, num_turns), turn_ids).tolist() == [[0, 0]] * 4
    assert first_tokens(torch.ones(4, 2), turn_ids, num_turns).tolist() == [[0] * num_turns] * 4


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_beyond_the_last_turn_is_ignored(mode: str) -> None:
    turns = random_turns(10)
    assert (turns.counts == 0).any()
    spoilt = replace(turns, rewards=turns.rewards.masked_fill(~turns.mask, torch.nan))
    estimators = [make_estimator(mode) for _ in range(2)]
    clean, ignored = (
        settled(each, estimator, scale="batch", learn=True)
        for each, estimator in zip((turns, spoilt), estimators, strict=True)
    )
    assert torch.equal(ignored["advantages"], clean["advantages"])
    assert torch.equal(ignored["turn_returns"], clean["turn_returns"])
    metrics, metrics_of_spoilt = (estimator.end_step(lambda sums: sums) for estimator in estimators)
    assert metrics_of_spoilt == metrics
    assert not clean["turn_returns"][~turns.mask].any()


@pytest.mark.parametrize("mode", ["group_turn", "hybrid"])
def test_the_only_one_left_of_a_group_has_no_group_advantage(mode: str) -> None:
    turns = Turns(rewards=tensor([[1], [7]]), counts=torch.tensor([1, 0]), group_size=2, values=tensor([[0.5], [0]]))
    got = advantages_of(turns, mode, weight=0.25)
    assert got.tolist() == [[0.25 * 0.5 if mode == "hybrid" else 0], [0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_precision_stays_what_it_was(mode: str, dtype: torch.dtype) -> None:
    turns = random_turns(11)
    turns = replace(
        turns, rewards=turns.rewards.to(dtype), values=turns.values.to(dtype), bootstrap=turns.bootstrap.to(dtype)
    )
    for scale in ("batch", "none"):
        batch = settled(turns, make_estimator(mode), scale=scale)
        assert {batch[name].dtype for name in ("advantages", "turn_returns", "advantage_scale", "num_turns")} == {
            dtype
        }


# The weight of the values


def test_the_weight_is_the_decayed_regression_over_past_batches() -> None:
    generator = torch.Generator().manual_seed(12)
    mixing = MixingWeight(warmup=3)
    batches = []
    for number in range(8):
        y = torch.randn(50, generator=generator, dtype=torch.float64)
        x = 0.5 * y + torch.randn(50, generator=generator, dtype=torch.float64)
        mixing.update((x * y).sum().item(), y.square().sum().item())
        batches.append((x.tolist(), y.tolist()))
        fades = [0.9 ** (number - n) for n in range(number + 1)]
        past = list(zip(fades, batches, strict=True))
        products = sum(fade * a * b for fade, (xs, ys) in past for a, b in zip(xs, ys, strict=True))
        squares = sum(fade * b * b for fade, (_, ys) in past for b in ys)
        assert mixing.value == pytest.approx(0.0 if number < 2 else products / squares, abs=EXACT)


@pytest.mark.parametrize(("slope", "weight"), [(-1.0, 0.0), (0.25, 0.25), (3.0, 1.0)])
def test_the_weight_lies_between_none_and_all(slope: float, weight: float) -> None:
    mixing = MixingWeight(warmup=0)
    mixing.update(slope * 14.0, 14.0)
    assert mixing.value == weight


def test_values_are_not_trusted_during_the_warm_up() -> None:
    estimator = make_estimator("hybrid", weight=None, warmup_steps=3)
    turns = random_turns(13, failed=0.0)
    turns = replace(turns, values=returns_to_go(turns.rewards, turns.counts, 0.99), bootstrap=None)
    group, gae = (advantages_of(turns, mode) for mode in ("group_turn", "gae"))
    for step in range(5):
        used = per_turn(settled(turns, estimator))
        torch.testing.assert_close(used, group if step < 3 else gae, **EQUAL)
        assert learn_from(estimator, turns)["value/mixing_weight"] == pytest.approx(0 if step < 2 else 1)


def test_a_weight_that_has_seen_nothing_is_none() -> None:
    assert MixingWeight(warmup=0).value == 0


def test_a_batch_does_not_influence_its_own_weight() -> None:
    following = []
    for seed in (14, 15):
        estimator, turns = make_estimator("hybrid"), random_turns(seed)
        for rows in torch.arange(12).split(4):  # one part after the other, none of which influences the next
            part = Turns(
                rewards=turns.rewards[rows],
                counts=turns.counts[rows],
                group_size=4,
                values=turns.values[rows],
                bootstrap=turns.bootstrap[rows],
            )
            assert torch.equal(per_turn(settled(part, estimator, learn=True)), advantages_of(part, "hybrid"))
        following.append(estimator.end_step(lambda sums: sums)["value/mixing_weight"])
    assert following[0] != following[1]  # but it does influence the next


def test_evaluation_leaves_the_weight_alone() -> None:
    estimator, turns = make_estimator("hybrid"), random_turns(17)
    before = estimator.state_dict()
    evaluated = settled(turns, estimator)
    assert estimator.end_step(lambda sums: sums) == {}
    assert estimator.state_dict() == before
    assert torch.equal(evaluated["advantages"], settled(turns, estimator, learn=True)["advantages"])
    estimator.end_step(lambda sums: sums)
    assert estimator.state_dict() != before


def test_the_weight_goes_on_from_a_checkpoint() -> None:
    straight, resumed = (make_estimator("hybrid", weight=None, warmup_steps=2) for _ in range(2))
    for seed in range(3):
        learn_from(straight, random_turns(seed))
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.mixing.value == straight.mixing.value > 0
    for seed in range(3, 6):
        first, second = (settled(random_turns(seed), estimator, learn=True) for estimator in (straight, resumed))
        assert torch.equal(first["advantages"], second["advantages"])
        assert straight.end_step(lambda sums: sums) == resumed.end_step(lambda sums: sums)
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("share", [0.5, 0.98])
def test_all_modes_divide_by_the_same_number_where_groups_have_spread(share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    rewards = (torch.rand(512, 1, generator=generator) < share).double()
    turn_ids = torch.zeros(512, 1, dtype=torch.long)
    scales = [
        turn_columns(turn_ids, rewards, 8, gamma=1.0, accelerator=Accelerator(), value_weight=weight)[
            "advantage_scale"
        ]
        for weight in (0.0, 0.3, 1.0)
    ]
    assert scales[0] > 0.1
    assert scales[0] == scales[1] == scales[2]


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_no_mode_divides_where_rewards_are_not_scaled(weight: float) -> None:
    rewards = torch.tensor([[3.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    turn_ids = torch.zeros(4, 1, dtype=torch.long)
    found = turn_columns(
        turn_ids, rewards, 4, gamma=1.0, accelerator=Accelerator(), is_scaled=False, value_weight=weight
    )
    assert found["advantage_scale"] == 1
    assert found["turn_advantages"].flatten().tolist() == [3, -1, -1, -1]


def test_values_are_not_blown_up_where_all_groups_did_the_same_and_the_group_alone_is_as_ever() -> None:
    rewards = torch.ones(64, 1, dtype=torch.float64)
    turn_ids = torch.zeros(64, 1, dtype=torch.long)
    scales = [
        turn_columns(turn_ids, rewards, 8, gamma=1.0, accelerator=Accelerator(), value_weight=weight)[
            "advantage_scale"
        ]
        for weight in (0.0, 1.0)
    ]
    assert [scale.item() for scale in scales] == [0.1, 1.0]


def test_groups_are_flat_where_no_turn_differs_from_its_baseline() -> None:
    nan = torch.nan
    returns = torch.tensor(
        [
            *([1.0, 0.8], [1.0, 0.8], [1.0, 0.8]),  # the same in every turn
            *([1.0, 0.8], [1.0, 0.8], [1.0, 0.2]),  # the same total, earned in another turn
            *([1.0, nan], [1.0, nan], [1.0, 0.9]),  # a turn that the others did not reach, against their whole returns
            *([1.0, 0.5], [nan, nan], [nan, nan]),  # nobody to compare with
            *([1.0, nan], [1.0 + 1e-9, nan], [nan, nan]),
        ]
    )
    assert flat_turns(returns, 3) == [0, 3, 4]
