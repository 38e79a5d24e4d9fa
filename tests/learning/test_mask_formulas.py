"""
What masking does to the expected gradient, by exact enumeration of a small softmax.

At one position, one token is the right syntax and all others break the call. Its logit is the format logit: the
gradient on it is what teaches the format. `p` is the probability of the right token, the two returns are what follows
the right token and what follows any other.
"""

from collections.abc import Callable

import pytest
import torch


VOCABULARY = 6
RIGHT = 2  # index of the token that the syntax asks for

CASES = [  # p, return after the right token, return after another
    (0.01, 1.0, 0.0),
    (0.5, 1.0, 0.0),
    (0.9, 1.0, -0.5),
    (0.9, 0.2, 0.7),
    (0.999, 1.0, 0.0),
]


def logits(p: float) -> torch.Tensor:
    """Logits that give the right token probability `p`, and the others different shares of the rest."""
    rest = torch.arange(1, VOCABULARY, dtype=torch.float64)
    probabilities = torch.empty(VOCABULARY, dtype=torch.float64)
    probabilities[torch.arange(VOCABULARY) != RIGHT] = (1 - p) * rest / rest.sum()
    probabilities[RIGHT] = p
    return probabilities.log().requires_grad_()


def expected_gradient(
    z: torch.Tensor,
    sampled: Callable[[torch.Tensor], torch.Tensor],
    trained: Callable[[torch.Tensor], torch.Tensor],
    advantages: torch.Tensor,
) -> float:
    """Expectation of `advantage * d log(trained probability) / d logit of the right token` over the sampled tokens."""
    total = 0.0
    for token, probability in enumerate(sampled(z).detach().tolist()):
        if probability > 0:
            (gradient,) = torch.autograd.grad(trained(z)[token].log(), z)
            total += probability * advantages[token].item() * gradient[RIGHT].item()
    return total


def policy(z: torch.Tensor) -> torch.Tensor:
    return z.softmax(-1)


def constrained(z: torch.Tensor) -> torch.Tensor:
    """The policy on the tokens that the grammar allows, of which there is one."""
    allowed = torch.full_like(z, -torch.inf)
    allowed[RIGHT] = 0.0
    return (z + allowed).softmax(-1)


def returns(right: float, other: float) -> torch.Tensor:
    values = torch.full((VOCABULARY,), other, dtype=torch.float64)
    values[RIGHT] = right
    return values


@pytest.mark.parametrize(("p", "right", "other"), CASES)
@pytest.mark.parametrize("baseline", [0.0, 0.3, -2.0])
def test_masking_the_position_loses_the_signal_that_teaches_the_format(
    p: float, right: float, other: float, baseline: float
) -> None:
    unmasked = expected_gradient(logits(p), policy, policy, returns(right, other) - baseline)
    assert unmasked == pytest.approx(p * (1 - p) * (right - other), abs=1e-12)  # whatever the baseline


@pytest.mark.parametrize(("p", "right", "other"), CASES)
@pytest.mark.parametrize("baseline", [0.0, 0.3, -2.0])
def test_masking_only_the_right_token_leaves_a_signal_that_depends_on_the_baseline(
    p: float, right: float, other: float, baseline: float
) -> None:
    advantages = returns(right, other) - baseline
    advantages[RIGHT] = 0.0  # masked where it was sampled
    left = expected_gradient(logits(p), policy, policy, advantages)
    assert left == pytest.approx(-p * (1 - p) * (other - baseline), abs=1e-12)
    lost = expected_gradient(logits(p), policy, policy, returns(right, other) - baseline) - left
    assert abs(lost) <= (1 - p) * abs(right - baseline) + 1e-12  # what the threshold on `p` bounds


@pytest.mark.parametrize(("p", "right", "other"), CASES)
def test_with_the_value_as_baseline_a_share_p_of_the_signal_is_left(p: float, right: float, other: float) -> None:
    value = p * right + (1 - p) * other
    advantages = returns(right, other) - value
    advantages[RIGHT] = 0.0
    left = expected_gradient(logits(p), policy, policy, advantages)
    assert left == pytest.approx(p * p * (1 - p) * (right - other), abs=1e-12)


@pytest.mark.parametrize(("p", "right", "other"), CASES)
def test_under_a_constraint_a_forced_token_has_no_gradient_to_mask(p: float, right: float, other: float) -> None:
    z = logits(p)
    (gradient,) = torch.autograd.grad(constrained(z)[RIGHT].log(), z)
    assert torch.equal(gradient, torch.zeros_like(z))
    assert expected_gradient(z, constrained, constrained, returns(right, other)) == 0.0


@pytest.mark.parametrize(("p", "outcome", "bias"), [(0.9, 1.0, 0.05), (0.5, 0.0, -0.25)])
def test_a_forced_token_scored_by_the_free_policy_pushes_its_logit_by_the_outcome(
    p: float, outcome: float, bias: float
) -> None:
    # The token was sampled with probability 1, whatever comes of it: the true gradient is 0.
    pushed = expected_gradient(logits(p), constrained, policy, returns(outcome, outcome) - 0.5)
    assert pushed == pytest.approx(bias, abs=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_forced_token_scored_by_the_free_policy_is_unbiased_only_with_the_value_as_baseline(p: float) -> None:
    outcome = 0.7
    assert expected_gradient(logits(p), constrained, policy, returns(outcome, outcome) - outcome) == 0.0
    assert expected_gradient(logits(p), constrained, policy, returns(outcome, outcome)) > 0.0
