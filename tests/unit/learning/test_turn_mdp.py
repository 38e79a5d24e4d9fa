"""
Advantages, as the trainer makes them, against the exact gradient of a small decision process that can be solved by recursion.

A task has a difficulty. In each turn the policy makes a right call, makes a wrong call, or answers. A right call moves
on with a probability that the difficulty sets; a wrong call costs something. An answer ends the trajectory, and is right
more often the easier the task and the further the policy had moved on. The last turn ends it, too. The policy knows the
difficulty and how far it got: its logits are the sum of a row for each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from mcp_grpo.learning.advantages import turn_columns, turn_mask
from mcp_grpo.learning.value_head import FusedValueOutput, ValueHead, ValueRecorder
from mcp_grpo.learning.values import ValueEstimator


# The tasks are far apart: were they alike, a constant would foretell as well as a group of eight, and be trusted.
MOVES = torch.tensor([0.95, 0.8, 0.2, 0.05], dtype=torch.float64)  # probability that a right call does, per task
SUCCESS = torch.tensor(  # probability that an answer is right, per task and progress
    [[0.9, 1.0, 1.0], [0.2, 0.9, 1.0], [0.0, 0.1, 0.9], [0.0, 0.0, 0.6]], dtype=torch.float64
)
NUM_TASKS, NUM_STATES = SUCCESS.shape
NUM_ACTIONS, MAX_TURNS, GROUP_SIZE = 3, 5, 8
RIGHT, WRONG, ANSWER = range(NUM_ACTIONS)
TURN_COST, WRONG_COST = 0.02, 0.1
ROWS = NUM_TASKS * GROUP_SIZE  # of a batch
NUM_DRAWS, CHUNK = 5_000, 500  # batches in all, and at a time
WARMUP_STEPS = 20
KINDS = ["oracle", "noisy", "constant", "anti"]


def parameters() -> torch.Tensor:
    """Those of the policy: a row for each difficulty, then one for each state of progress."""
    generator = torch.Generator().manual_seed(5)
    rows = 0.3 * torch.randn(NUM_TASKS + NUM_STATES, NUM_ACTIONS, generator=generator, dtype=torch.float64)
    rows[:, WRONG] -= 0.6
    rows[NUM_TASKS:, ANSWER] += torch.tensor([-1.5, 0.0, 1.5], dtype=torch.float64)  # it answers once it got far
    return rows


def policy(theta: torch.Tensor) -> torch.Tensor:
    """Probabilities of the actions, of shape `(NUM_TASKS, NUM_STATES, NUM_ACTIONS)`."""
    return (theta[:NUM_TASKS, None] + theta[None, NUM_TASKS:]).softmax(-1)


def solved(theta: torch.Tensor) -> torch.Tensor:
    """The exact value of each state, of shape `(NUM_TASKS, MAX_TURNS, NUM_STATES)`."""
    after = torch.zeros(NUM_TASKS, NUM_STATES, dtype=torch.float64)
    further = [min(state + 1, NUM_STATES - 1) for state in range(NUM_STATES)]
    values = []
    for _ in range(MAX_TURNS):
        right = MOVES[:, None] * after[:, further] + (1 - MOVES[:, None]) * after
        outcomes = torch.stack([right, after - WRONG_COST, SUCCESS], dim=-1) - TURN_COST
        after = (policy(theta) * outcomes).sum(-1)
        values.append(after)
    return torch.stack(values[::-1], dim=1)


@cache
def exact_values() -> torch.Tensor:
    return solved(parameters())


@cache
def exact_gradient() -> torch.Tensor:
    theta = parameters().requires_grad_()
    (gradient,) = torch.autograd.grad(solved(theta)[:, 0, 0].mean(), theta)
    return gradient.flatten()


@cache
def foretold(kind: str) -> torch.Tensor:
    """Values of each state: right, or wrong in a certain way."""
    exact = exact_values()
    mean = exact[:, 0, 0].mean()
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return {
        "oracle": exact,
        "noisy": exact + 0.12 * noise,
        "constant": torch.full_like(exact, mean.item()),
        "anti": mean - 3 * (exact - mean),
    }[kind]


@dataclass(frozen=True)
class Draws:
    """Batches of trajectories, one after the other."""

    rewards: torch.Tensor  # (N, K)
    counts: torch.Tensor  # (N,)
    tasks: torch.Tensor  # (N,)
    states: torch.Tensor  # (N, K)
    scores: torch.Tensor  # (N, K, A): gradient of the log-probability with respect to the logits

    def values(self, table: torch.Tensor) -> torch.Tensor:  # (N, K)
        return table[self.tasks[:, None], torch.arange(MAX_TURNS), self.states]

    def batch(self) -> dict[str, Any]:
        """As it is before the loss. A turn has one token."""
        turn_ids = torch.where(turn_mask(self.counts, MAX_TURNS), torch.arange(MAX_TURNS), -1)
        columns = turn_columns(turn_ids, self.rewards, GROUP_SIZE, gamma=1.0, accelerator=Accelerator())
        return {**columns, "advantage_scale": torch.ones(())}  # which would bias a mean over batches

    def recorder(self, table: torch.Tensor) -> ValueRecorder:
        """A forward pass that gave these values."""
        values = torch.nn.functional.pad(self.values(table), (0, 1))
        recorder = ValueRecorder(lambda num_values: FusedValueOutput(value_preds=values), MAX_TURNS)
        recorder()
        return recorder

    def advantages(self, estimator: ValueEstimator, table: torch.Tensor) -> torch.Tensor:  # (N, K)
        batch = self.batch()
        batch |= estimator.settle(batch, self.recorder(table), learn=False)
        return batch["advantages"]

    def gradients(self, advantages: torch.Tensor) -> torch.Tensor:
        """Of each batch, for advantages of shape `(E, N, K)`; of shape `(E, batches, parameters)`."""
        rows = torch.cat(
            [
                (self.tasks[:, None, None] == torch.arange(NUM_TASKS)).expand(-1, MAX_TURNS, -1),
                self.states[..., None] == torch.arange(NUM_STATES),
            ],
            dim=-1,
        )
        features = (rows[..., None] * self.scores[:, :, None]).reshape(-1, ROWS * MAX_TURNS, exact_gradient().numel())
        batches = advantages.reshape(len(advantages), -1, ROWS * MAX_TURNS).transpose(0, 1)
        return torch.bmm(batches, features).transpose(0, 1) / ROWS


def drawn(num_batches: int, generator: torch.Generator) -> Draws:
    probabilities = policy(parameters())
    tasks = torch.arange(NUM_TASKS).repeat_interleave(GROUP_SIZE).repeat(num_batches)
    state, alive = torch.zeros_like(tasks), torch.ones_like(tasks)
    columns = []
    for _ in range(MAX_TURNS):
        chances = probabilities[tasks, state]
        uniform = torch.rand(len(tasks), 3, generator=generator, dtype=torch.float64)
        action = (uniform[:, :1] > chances.cumsum(-1)[:, :-1]).sum(-1)
        succeeded = (action == ANSWER) & (uniform[:, 1] < SUCCESS[tasks, state])
        reward = succeeded.double() - TURN_COST - WRONG_COST * (action == WRONG)
        score = torch.nn.functional.one_hot(action, NUM_ACTIONS) - chances
        columns.append((reward * alive, alive, state, score * alive[:, None]))
        moved = (action == RIGHT) & (uniform[:, 2] < MOVES[tasks])
        state = (state + moved).clamp(max=NUM_STATES - 1)
        alive = alive * (action != ANSWER)
    rewards, lived, states, scores = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return Draws(rewards=rewards, counts=lived.sum(1), tasks=tasks, states=states, scores=scores)


def chunks(seed: int) -> Iterator[Draws]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_DRAWS // CHUNK):
        yield drawn(CHUNK, generator)


def undiscounted(mode: str) -> ValueEstimator:
    return ValueEstimator(ValueHead(1), mode=mode, gamma=1.0, lam=1.0, warmup=WARMUP_STEPS)


def learn_from(estimator: ValueEstimator, draws: Draws, table: torch.Tensor) -> dict[str, float]:
    """A step."""
    estimator.settle(draws.batch(), draws.recorder(table), learn=True)
    return estimator.end_step(lambda sums: sums)


@cache
def measured_weights(kind: str) -> tuple[ValueEstimator, list[float]]:
    """One that has seen a hundred batches, and its weights since the end of the warm-up."""
    estimator = undiscounted("hybrid")
    generator = torch.Generator().manual_seed(2)
    metrics = [learn_from(estimator, drawn(1, generator), foretold(kind)) for _ in range(100)]
    return estimator, [figures["value/mixing_weight"] for figures in metrics[WARMUP_STEPS - 1 :]]


def centred(draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns of whole trajectories less the group's mean, and the group's standard deviation, per turn."""
    groups = draws.rewards.sum(1).view(-1, GROUP_SIZE)
    figures = groups - groups.mean(1, keepdim=True), groups.std(1, keepdim=True).expand_as(groups)
    differences, stds = (figure.reshape(-1, 1).expand(-1, MAX_TURNS) for figure in figures)
    return differences, stds


def estimates(draws: Draws) -> dict[str, torch.Tensor]:
    differences, stds = centred(draws)
    advantages = {
        "group_turn": draws.batch()["turn_advantages"],
        "grpo": differences / (stds + 1e-4),
        "own mean": differences,
    }
    for kind in KINDS:
        advantages[f"hybrid {kind}"] = draws.advantages(measured_weights(kind)[0], foretold(kind))
        advantages[f"gae {kind}"] = draws.advantages(undiscounted("gae"), foretold(kind))
    return advantages


@cache
def sampled_gradients() -> dict[str, torch.Tensor]:
    """Gradients of all batches by each estimator, of shape `(NUM_DRAWS, parameters)`."""
    parts: dict[str, list[torch.Tensor]] = {}
    for draws in chunks(seed=3):
        advantages = estimates(draws)
        for name, gradients in zip(advantages, draws.gradients(torch.stack([*advantages.values()])), strict=True):
            parts.setdefault(name, []).append(gradients)
    return {name: torch.cat(gradients) for name, gradients in parts.items()}


def standard_errors_off(name: str) -> torch.Tensor:
    gradients = sampled_gradients()[name]
    errors = gradients.std(0) / NUM_DRAWS**0.5
    return ((gradients.mean(0) - exact_gradient()) / errors).abs()


def cosine(name: str) -> float:
    return torch.cosine_similarity(sampled_gradients()[name].mean(0), exact_gradient(), dim=0).item()


def deviation(name: str) -> float:
    return sampled_gradients()[name].var(0).sum().sqrt().item()


def test_the_process_has_the_values_that_its_trajectories_show() -> None:
    draws = drawn(NUM_DRAWS // 10, torch.Generator().manual_seed(1))
    returns = draws.rewards.sum(1).view(-1, NUM_TASKS, GROUP_SIZE).mean(2)
    errors = returns.std(0) / len(returns) ** 0.5
    assert ((returns.mean(0) - exact_values()[:, 0, 0]).abs() < 4 * errors).all()


@pytest.mark.parametrize("name", ["group_turn", *(f"{mode} {kind}" for mode in ("hybrid", "gae") for kind in KINDS)])
def test_the_mean_gradient_is_the_exact_one_in_every_coordinate(name: str) -> None:
    assert (standard_errors_off(name) < 4).all()


def test_negative_control_a_baseline_that_holds_the_own_return_is_visibly_biased() -> None:
    assert standard_errors_off("own mean").max() > 12


def test_negative_control_dividing_by_the_std_of_the_group_turns_the_gradient_away() -> None:
    assert cosine("group_turn") > 0.99
    assert cosine("grpo") < 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_the_hybrid_varies_no_more_than_the_better_of_its_parents(kind: str) -> None:
    assert deviation(f"hybrid {kind}") <= 1.05 * min(deviation("group_turn"), deviation(f"gae {kind}"))


def test_the_worse_parent_is_far_worse_so_that_the_weight_matters() -> None:
    assert deviation("gae anti") > 3 * deviation("group_turn")
    assert deviation("group_turn") > 1.1 * deviation("gae oracle")


def test_exact_values_are_trusted() -> None:
    weights = measured_weights("oracle")[1]
    assert sum(weights) / len(weights) > 0.9


def test_noisy_values_are_half_trusted() -> None:
    assert all(0.3 < weight < 0.9 for weight in measured_weights("noisy")[1])


def test_constant_values_are_hardly_trusted() -> None:
    assert all(weight < 0.15 for weight in measured_weights("constant")[1])


def test_values_that_are_upside_down_are_never_trusted() -> None:
    assert set(measured_weights("anti")[1]) == {0.0}


@pytest.mark.full
def test_values_fitted_to_the_returns_foretell_as_well_as_exact_ones() -> None:
    estimator = undiscounted("gae")
    fitted = torch.zeros_like(exact_values()).requires_grad_()
    optimizer = torch.optim.Adam([fitted], lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=400)
    generator = torch.Generator().manual_seed(4)
    for _ in range(400):
        draws = drawn(2, generator)
        batch = draws.batch()
        optimizer.zero_grad()
        estimator.loss(batch, draws.recorder(fitted), batch["num_turns"]).backward()
        optimizer.step()
        schedule.step()

    unseen = drawn(1_000, generator)

    def foresight(table: torch.Tensor) -> float:
        return learn_from(estimator, unseen, table)["value/ev_vs_group"]

    assert foresight(torch.zeros_like(exact_values())) < 0 < foresight(exact_values())
    assert foresight(fitted.detach()) == pytest.approx(foresight(exact_values()), abs=0.05)
