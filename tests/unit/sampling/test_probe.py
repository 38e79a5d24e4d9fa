"""Whether the sampler has the weights that are trained: what is let pass, and what is found out."""

import math

import pytest

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling.weight_probe import WeightProbe, farthest


TRAINED = [-1.0, -2.0, -0.5, -3.0]


def moved(logps: list[float], by: float) -> list[float]:
    """Log-probabilities that differ by as much on average, in both directions."""
    return [logp + by * (-1) ** i for i, logp in enumerate(logps)]


def test_equal_log_probabilities_do_not_differ() -> None:
    probe = WeightProbe()
    for step in range(3):
        trained = moved(TRAINED, 0.3 * step)
        assert probe.check(trained, trained) == 0


def test_the_mean_difference_is_told() -> None:
    assert WeightProbe().check([-1.0, -2.02], [-1.0, -2.0]) == pytest.approx(0.01)


def test_a_difference_above_the_tolerance_is_refused_at_the_first_time() -> None:
    with pytest.raises(SamplerError, match=r"differ from the trainer's by 0\.11 nats.*the limit is 0\.1\."):
        WeightProbe().check(moved(TRAINED, 0.11), TRAINED)
    WeightProbe().check(moved(TRAINED, 0.09), TRAINED)


def test_a_difference_far_above_the_first_is_refused_below_the_tolerance() -> None:
    probe = WeightProbe()
    probe.check(moved(TRAINED, 1e-3), TRAINED)
    probe.check(moved(TRAINED, 9e-3), TRAINED)
    with pytest.raises(SamplerError, match=r"0\.011 nats per token, 0\.001 at first; the limit is 0\.01"):
        probe.check(moved(TRAINED, 0.011), TRAINED)


def test_a_thousandth_of_a_nat_is_let_pass_however_equal_they_were_at_first() -> None:
    probe = WeightProbe()
    probe.check(TRAINED, TRAINED)
    assert probe.check(moved(TRAINED, 9e-4), TRAINED) == pytest.approx(9e-4)
    with pytest.raises(SamplerError, match=r"the limit is 0\.001"):
        probe.check(moved(TRAINED, 1.1e-3), TRAINED)


def test_old_weights_are_found_out_below_the_tolerance() -> None:
    probe = WeightProbe()
    probe.check(moved(TRAINED, 1e-6), TRAINED)
    with pytest.raises(SamplerError, match="still has old weights"):
        probe.check(moved(TRAINED, 1e-6), moved(TRAINED, 5e-4))  # the policy has moved, the sampler has not


def test_noise_is_not_taken_for_old_weights() -> None:
    probe = WeightProbe()
    probe.check(moved(TRAINED, 1e-2), TRAINED)
    probe.check(moved(TRAINED, -1e-2), TRAINED)
    now = moved(TRAINED, 5e-3)
    assert probe.check(moved(now, -1e-2), now) == pytest.approx(1e-2)


def test_new_weights_are_not_taken_for_old_ones() -> None:
    probe = WeightProbe()
    probe.check(moved(TRAINED, 1e-6), TRAINED)
    now = moved(TRAINED, 5e-4)
    assert probe.check(moved(now, 1e-4), now) == pytest.approx(1e-4)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_number_is_refused(is_first: bool) -> None:
    probe = WeightProbe()
    if not is_first:
        probe.check(TRAINED, TRAINED)
    with pytest.raises(SamplerError, match="differ from the trainer's by nan"):
        probe.check([math.nan, *TRAINED[1:]], TRAINED)


def test_of_several_servers_the_one_that_is_farthest_off_counts() -> None:
    assert farthest([TRAINED, moved(TRAINED, 0.3), moved(TRAINED, -0.1)], TRAINED) == moved(TRAINED, 0.3)
    broken = [math.nan, *TRAINED[1:]]
    assert farthest([moved(TRAINED, 9.0), broken, TRAINED], TRAINED) is broken
