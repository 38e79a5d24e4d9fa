"""The value loss: each turn weighs the same, and no split into micro-batches matters."""

import pytest
import torch

from mcp_grpo.learning.values import turn_weights, value_loss


# Rows of turns and tool output; the last has no turn at all.
TURN_IDS = torch.tensor(
    [
        [1, 1, 1, -1, -1, 2, -1, -1],
        [1, -1, 2, 2, -1, 3, 3, 3],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [-1, 1, 1, -1, -1, -1, -1, -1],
        [0, 0, -1, 1, -1, -1, 2, -1],
        [1, -1, 1, 2, 2, -1, 2, -1],
        [7, 7, -1, -1, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1, -1, -1],
    ]
)
NUM_TURNS = 13
MAX_TURNS = 8  # more than the greatest


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(TURN_IDS.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_loss(values: torch.Tensor, returns: torch.Tensor) -> float:
    total = 0.0
    for row, turns in enumerate(TURN_IDS.tolist()):
        for turn in set(turns) - {-1}:
            errors = [(values[row, t] - returns[row, t]).item() ** 2 for t, k in enumerate(turns) if k == turn]
            total += sum(errors) / len(errors)
    return total / NUM_TURNS


def test_the_loss_is_the_mean_over_turns_of_the_mean_over_their_tokens() -> None:
    values, returns = numbers(0), numbers(1)
    loss = value_loss(values, returns, TURN_IDS, num_turns=NUM_TURNS, max_turns=MAX_TURNS)
    assert loss.item() == pytest.approx(slow_loss(values, returns), rel=1e-14)


def test_gradients_are_those_of_finite_differences() -> None:
    def loss(values: torch.Tensor) -> torch.Tensor:
        return value_loss(values, numbers(1), TURN_IDS, num_turns=NUM_TURNS, max_turns=MAX_TURNS)

    assert torch.autograd.gradcheck(loss, numbers(0).requires_grad_())


def test_every_turn_weighs_one_and_other_tokens_nothing() -> None:
    weights = turn_weights(TURN_IDS, MAX_TURNS)
    assert weights.dtype == torch.float32
    assert weights.sum().item() == pytest.approx(NUM_TURNS)
    assert torch.equal(weights == 0, TURN_IDS == -1)
    assert weights[5].tolist() == pytest.approx([1 / 2, 0, 1 / 2, 1 / 3, 1 / 3, 0, 1 / 3, 0])


def test_weights_do_not_depend_on_how_many_turns_there_may_be() -> None:
    assert torch.equal(turn_weights(TURN_IDS, 20), turn_weights(TURN_IDS, MAX_TURNS))


def test_tool_tokens_do_not_count_even_where_they_are_not_numbers() -> None:
    values, returns = numbers(0).requires_grad_(), numbers(1)
    expected = value_loss(values, returns, TURN_IDS, num_turns=NUM_TURNS, max_turns=MAX_TURNS)
    (gradient,) = torch.autograd.grad(expected, values)
    changed = returns.masked_fill(TURN_IDS == -1, torch.nan)
    loss = value_loss(values, changed, TURN_IDS, num_turns=NUM_TURNS, max_turns=MAX_TURNS)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    torch.testing.assert_close(values.grad, gradient)
    assert torch.equal(gradient == 0, TURN_IDS == -1)


@pytest.mark.parametrize("size", [1, 4])
def test_the_gradient_of_an_update_is_the_same_for_every_split_into_micro_batches(size: int) -> None:
    whole, parts = numbers(0).requires_grad_(), numbers(0).requires_grad_()
    value_loss(whole, numbers(1), TURN_IDS, num_turns=NUM_TURNS, max_turns=MAX_TURNS).backward()
    for rows in torch.arange(len(TURN_IDS)).split(size):
        value_loss(
            parts[rows], numbers(1)[rows], TURN_IDS[rows], num_turns=torch.tensor(NUM_TURNS), max_turns=MAX_TURNS
        ).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-14, atol=0)


def test_a_micro_batch_without_turns_gives_a_zero_that_has_a_gradient() -> None:
    values = numbers(0)[-1:].requires_grad_()
    loss = value_loss(values, numbers(1)[-1:], TURN_IDS[-1:], num_turns=NUM_TURNS, max_turns=MAX_TURNS)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(values.grad, torch.zeros_like(values))
