"""Whether the sampler has the weights that are trained: what is let pass, and what is found out."""

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from helpers.families import family_tokenizer
from helpers.policies import tiny_model

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling.sampler import VLLMSampler
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


@pytest.mark.parametrize("whose", ["sampler", "trainer"])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_number_is_refused_by_whose_it_is(is_first: bool, number: float, whose: str) -> None:
    probe = WeightProbe()
    if not is_first:
        probe.check(TRAINED, TRAINED)
    broken = [number, *TRAINED[1:]]
    with pytest.raises(
        SamplerError, match=f"1 of the {whose}'s {len(TRAINED)} log-probabilities of held tokens are not finite"
    ):
        probe.check(*((broken, TRAINED) if whose == "sampler" else (TRAINED, broken)))


def test_of_several_servers_the_one_that_is_farthest_off_counts() -> None:
    assert farthest([TRAINED, moved(TRAINED, 0.3), moved(TRAINED, -0.1)], TRAINED) == moved(TRAINED, 0.3)
    broken = [math.nan, *TRAINED[1:]]
    assert farthest([moved(TRAINED, 9.0), broken, TRAINED], TRAINED) is broken


class Engine:
    """Stands for vLLM: scores with weights of its own, of which a share of each change arrives, to three decimals."""

    max_context, is_asleep, bytes_sent, rounded_away = 1024, False, 0, None

    def __init__(self, policy: Any, arriving: float) -> None:
        self._policy, self._own, self._arriving = policy, copy.deepcopy(policy), arriving

    def make_generator(self, end_of_turn_ids: Any) -> Any:
        return SimpleNamespace(alone=nullcontext, score=self.score)

    @torch.no_grad()
    def sync_weights(self) -> None:
        for own, sent in zip(self._own.parameters(), self._policy.parameters(), strict=True):
            own.lerp_(sent, self._arriving)

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> list[list[float]]:
        ids = torch.tensor([token_ids])
        logps = self._own(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return [logps.squeeze(1).double().round(decimals=3).tolist()]

    def wake_up(self) -> None:
        pass

    def sleep(self) -> None:
        pass


@pytest.mark.parametrize("arriving", [1.0, 0.7])
def test_a_run_logs_how_far_the_sampler_is_from_the_policy_beyond_noise(arriving: float) -> None:
    policy: Any = tiny_model(family_tokenizer("qwen3")).eval()
    engine, logs, step = Engine(policy, arriving), list[dict[str, float]](), 0
    sampler = VLLMSampler(
        backend=cast("Any", engine),
        model=lambda: policy,
        accelerator=Accelerator(cpu=True),
        end_of_turn_ids=[0],
        num_reserved=0,
        sleeps=False,
        turn_timeout=1.0,
        step=lambda: step,
        ask=lambda generator, request: request(),
        record=logs.append,
        phase=lambda name: nullcontext(),
    )
    torch.manual_seed(0)
    for step in range(3):  # noqa: B007  the sampler asks for it
        with sampler.awake(lambda: [list(range(5, 45)), list(range(50, 90))]):
            pass
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(torch.randn_like(weight), alpha=2e-4)
    assert all(entry["sampler/weight_mismatch"] > 1e-4 for entry in logs)  # noise alone, if all of it arrives
    beyond = [entry["sampler/beyond_noise"] for entry in logs]
    assert beyond[0] == 0
    if arriving == 1:
        assert max(beyond) < 5e-5
    else:
        assert min(beyond[1:]) > 2e-4
