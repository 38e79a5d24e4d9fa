"""The value loss: each turn weighs the same, and no split into micro-batches matters."""

import pytest
import torch

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning.value_loss import turn_weights, value_loss


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


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(TURN_IDS.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor | None = None, clip: float | None = None
) -> float:
    total = 0.0
    for row, turns in enumerate(TURN_IDS.tolist()):
        for turn in set(turns) - {-1}:
            errors = []
            for t in [t for t, k in enumerate(turns) if k == turn]:
                value, target = values[row, t].item(), returns[row, t].item()
                errors.append((value - target) ** 2)
                if old_values is not None:
                    old = old_values[row, t].item()
                    near = min(max(value, old - clip), old + clip)
                    errors[-1] = max(errors[-1], (near - target) ** 2)
            total += sum(errors) / len(errors)
    return total / NUM_TURNS


def test_the_loss_is_the_mean_over_turns_of_the_mean_over_their_tokens() -> None:
    values, returns = numbers(0), numbers(1)
    loss = value_loss(values, returns, TURN_IDS, num_turns=NUM_TURNS)
    assert loss.item() == pytest.approx(slow_loss(values, returns), rel=1e-14)


def test_clipping_takes_the_greater_of_both_errors() -> None:
    values, returns, old_values = numbers(0), numbers(1), numbers(2)
    loss = value_loss(values, returns, TURN_IDS, num_turns=NUM_TURNS, old_values=old_values, clip_range=0.3)
    assert loss.item() == pytest.approx(slow_loss(values, returns, old_values, 0.3), rel=1e-14)
    assert loss.item() > slow_loss(values, returns)


def test_a_value_that_has_moved_too_far_towards_its_target_has_no_gradient() -> None:
    values = torch.tensor([[0.5, 0.1, -0.5]], requires_grad=True)
    loss = value_loss(
        values,
        torch.ones(1, 3),
        torch.zeros(1, 3, dtype=torch.long),
        num_turns=1,
        old_values=torch.zeros(1, 3),
        clip_range=0.2,
    )
    loss.backward()
    assert values.grad[0, 0] == 0  # beyond the range, towards the target
    assert values.grad[0, 1] == pytest.approx(2 * (0.1 - 1) / 3)  # within the range
    assert values.grad[0, 2] == pytest.approx(2 * (-0.5 - 1) / 3)  # beyond the range, away from the target


def test_clipping_without_old_values_is_refused() -> None:
    with pytest.raises(SettingsError, match="old_values"):
        value_loss(numbers(0), numbers(1), TURN_IDS, num_turns=NUM_TURNS, clip_range=0.2)


@pytest.mark.parametrize("clip_range", [None, 0.3])
def test_gradients_are_those_of_finite_differences(clip_range: float | None) -> None:
    def loss(values: torch.Tensor) -> torch.Tensor:
        return value_loss(
            values, numbers(1), TURN_IDS, num_turns=NUM_TURNS, old_values=numbers(2), clip_range=clip_range
        )

    assert torch.autograd.gradcheck(loss, numbers(0).requires_grad_())


def test_every_turn_weighs_one_and_other_tokens_nothing() -> None:
    weights = turn_weights(TURN_IDS)
    assert weights.dtype == torch.float32
    assert weights.sum().item() == pytest.approx(NUM_TURNS)
    assert torch.equal(weights == 0, TURN_IDS == -1)
    assert weights[5].tolist() == pytest.approx([1 / 2, 0, 1 / 2, 1 / 3, 1 / 3, 0, 1 / 3, 0])


def test_weights_do_not_depend_on_how_many_turns_there_may_be() -> None:
    assert torch.equal(turn_weights(TURN_IDS, max_turns=8), turn_weights(TURN_IDS))
    assert torch.equal(turn_weights(TURN_IDS, max_turns=20), turn_weights(TURN_IDS))


def test_tool_tokens_do_not_count_even_where_they_are_not_numbers() -> None:
    values, returns = numbers(0).requires_grad_(), numbers(1)
    expected = value_loss(values, returns, TURN_IDS, num_turns=NUM_TURNS)
    (gradient,) = torch.autograd.grad(expected, values)
    changed = returns.masked_fill(TURN_IDS == -1, torch.nan)
    loss = value_loss(values, changed, TURN_IDS, num_turns=NUM_TURNS, old_values=values.detach(), clip_range=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    torch.testing.assert_close(values.grad, gradient)
    assert torch.equal(gradient == 0, TURN_IDS == -1)


@pytest.mark.parametrize("size", [1, 4])
def test_the_gradient_of_an_update_is_the_same_for_every_split_into_micro_batches(size: int) -> None:
    whole, parts = numbers(0).requires_grad_(), numbers(0).requires_grad_()
    value_loss(whole, numbers(1), TURN_IDS, num_turns=NUM_TURNS).backward()
    for rows in torch.arange(len(TURN_IDS)).split(size):
        value_loss(parts[rows], numbers(1)[rows], TURN_IDS[rows], num_turns=torch.tensor(NUM_TURNS)).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-14, atol=0)


def test_a_micro_batch_without_turns_gives_a_zero_that_has_a_gradient() -> None:
    values = numbers(0)[-1:].requires_grad_()
    loss = value_loss(values, numbers(1)[-1:], TURN_IDS[-1:], num_turns=NUM_TURNS)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(values.grad, torch.zeros_like(values))
