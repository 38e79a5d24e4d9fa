"""The loss as a function, on tensors: what TRL's loss is given, what is added to it, and that nothing is changed in place."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from mcp_grpo.learning.loss import Objective
from mcp_grpo.learning.token_metrics import ratio_edges
from mcp_grpo.masking import Bootstrap
from mcp_grpo.trl_compat import LossDenominator


ROWS, TOKENS = 2, 4
OBJECTIVE = Objective(
    accelerator=Accelerator(),
    values=None,
    is_guarded=True,
    old_logps="sampler",
    ratio_gate=4.0,
    ratio_edges=ratio_edges(0.25, 4.0),
    kl_hard_cap=3.0,
    is_kl_corrected=False,
    importance_sampling_level="token",
    value_loss_coef=0.5,
    bootstrap=Bootstrap(num_steps=10, imitation_coef=0.1, entropy_coef=0.0),
)
DENOMINATOR = LossDenominator(
    loss_type="dapo", accumulation=1.0, max_completion_length=TOKENS, num_items=torch.tensor(8.0)
)
LOGPS = torch.full((ROWS, TOKENS), -1.0)


@pytest.fixture(autouse=True)
def state_of_accelerate() -> None:
    """All accelerators share one state, which each `TrainingArguments` that another test makes takes away."""
    Accelerator()


def inputs(**changes: Any) -> dict[str, Any]:
    """A micro-batch whose tokens were sampled with the probabilities that the policy gives them."""
    ones = torch.ones(ROWS, TOKENS, dtype=torch.long)
    return {
        "completion_mask": ones,
        "tool_mask": ones,
        "advantages": torch.tensor([1.0, -1.0]),
        "sampling_per_token_logps": LOGPS.clone(),
        "old_per_token_logps": LOGPS.clone(),
        **changes,
    }


def settle(objective: Objective = OBJECTIVE, **changes: Any) -> Any:
    given = inputs(**changes)
    kept = {name: value.clone() for name, value in given.items()}
    settled = objective.settle(given, LOGPS, None, learn=True, is_on_policy=True)
    assert given.keys() == kept.keys()
    for name, value in kept.items():  # nothing is changed in place
        torch.testing.assert_close(given[name], value, rtol=0, atol=0, equal_nan=True)
    return settled


def test_on_policy_nothing_is_held_back() -> None:
    settled = settle()
    assert torch.equal(settled.inputs["advantages"], torch.tensor([[1.0], [-1.0]]).expand(-1, TOKENS))
    assert torch.equal(settled.inputs["old_per_token_logps"], LOGPS)
    assert settled.sums["idle"] == 0
    assert settled.quantiles == {f"ratio/p{q}": 1.0 for q in (10, 50, 90)}
    assert settled.metrics == {}  # without a reference there is no divergence


@pytest.mark.parametrize("shift", [2.0, -2.0, 1000.0, torch.nan])
def test_a_token_outside_the_gate_loses_its_advantage_and_its_ratio(shift: float) -> None:
    sampled = LOGPS.clone()
    sampled[0, 1] += shift
    settled = settle(sampling_per_token_logps=sampled, old_per_token_logps=sampled)
    assert settled.inputs["advantages"][0].tolist() == [1, 0, 1, 1]
    assert settled.inputs["old_per_token_logps"][0, 1] == LOGPS[0, 1]
    assert settled.sums["idle"] == 1


def test_with_old_log_probabilities_of_the_trainer_the_difference_is_a_weight() -> None:
    sampled = LOGPS.clone()
    sampled[:, 0] -= torch.tensor(2.0).log()
    settled = settle(replace(OBJECTIVE, old_logps="trainer"), sampling_per_token_logps=sampled)
    assert settled.inputs["advantages"].tolist() == [[2, 1, 1, 1], [-2, -1, -1, -1]]


def test_far_from_the_reference_there_is_no_policy_term_and_the_pull_is_bounded() -> None:
    near, far = settle(ref_per_token_logps=LOGPS + 1), settle(ref_per_token_logps=LOGPS + 5)
    assert near.metrics == {"kl/hard_cap_hits": 0.0}
    assert near.inputs["advantages"].abs().min() == 1
    assert far.metrics == {"kl/hard_cap_hits": 1.0}
    assert not far.inputs["advantages"].any()
    assert torch.equal(far.inputs["ref_per_token_logps"], LOGPS + OBJECTIVE.kl_hard_cap)
    assert far.sums["idle"] == far.sums["active"] == ROWS * TOKENS


def test_one_rare_token_does_not_drop_the_policy_term_and_a_policy_that_has_moved_does() -> None:
    # The policy gives one token 1e-5 and the reference gives it 0.1: a true divergence of 0.105. Among 2,000 tokens it comes up
    # once in 50 batches, and its k3 is 10,000.
    logps = torch.full((1, 2000), 1 - 1e-5).log()
    reference = torch.full((1, 2000), 0.9).log()
    logps[0, 7], reference[0, 7] = torch.tensor([1e-5, 0.1]).log()
    ones = torch.ones(1, 2000, dtype=torch.long)

    def hits(**changes: Any) -> float:
        given = {"completion_mask": ones, "tool_mask": ones, "advantages": torch.ones(1), **changes}
        given |= dict.fromkeys(("sampling_per_token_logps", "old_per_token_logps"), logps)
        return OBJECTIVE.settle(given, logps, None, learn=True, is_on_policy=True).metrics["kl/hard_cap_hits"]

    assert hits(ref_per_token_logps=reference) == 0
    assert hits(ref_per_token_logps=logps - 4.5) == 1  # all of what it writes now, the reference would not
    assert hits(ref_per_token_logps=torch.full_like(logps, torch.nan)) == 1


def test_rows_that_are_left_out_are_made_up_for() -> None:
    assert settle(row_scale=torch.tensor(2.0)).inputs["advantages"].abs().max() == 2


def test_terms_are_there_only_where_something_asks_for_them() -> None:
    logps = LOGPS.clone().requires_grad_()

    def terms(beta: float = 0.0, strength: float = 0.0, **changes: Any) -> dict[str, torch.Tensor]:
        settled = settle(**changes).inputs
        return OBJECTIVE.terms(settled, logps, None, beta=beta, denominator=DENOMINATOR, strength=strength, learn=True)

    masked = torch.zeros(ROWS, TOKENS)
    masked[:, 0] = 1
    reference = LOGPS + 1
    assert terms() == terms(beta=0.1, ref_per_token_logps=reference) == terms(masked=masked) == {}
    kl = terms(beta=0.1, masked=masked, ref_per_token_logps=reference)["kl_of_masked"]
    assert kl.item() == pytest.approx(0.1 * 2 * (torch.e - 2) / 8)  # k3 of 1 nat, at two tokens of eight
    imitation = terms(strength=0.5, imitated=masked, num_imitated=torch.tensor(2.0))["imitation"]
    assert imitation.item() == pytest.approx(0.1 * 0.5 * 1.0)


def test_the_policy_term_is_the_loss_without_kl() -> None:
    settled = settle(ref_per_token_logps=LOGPS + 1).inputs
    kl = 8 * (torch.e - 2) / 8
    found = OBJECTIVE.policy_term(torch.tensor(1.0), LOGPS, settled, beta=0.1, denominator=DENOMINATOR)
    assert found.item() == pytest.approx(1.0 - 0.1 * kl)
    assert OBJECTIVE.policy_term(torch.tensor(1.0), LOGPS, settled, beta=0.0, denominator=DENOMINATOR) == 1.0


def test_without_anything_of_its_own_it_is_plain() -> None:
    assert replace(OBJECTIVE, is_guarded=False).is_plain
    assert not OBJECTIVE.is_plain
