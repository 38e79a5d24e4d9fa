"""What a run is warned of, how often, and what is let pass."""

import logging
from typing import Any

import pytest

from mcp_grpo.errors import HealthError
from mcp_grpo.learning import Health


FINE: dict[str, float] = {
    "align/score": 1.0,
    "align/logp_mae": 0.0,
    "ratio/p50": 1.0,
    "mask/in_loss_fraction": 0.8,
    "frac_reward_zero_std": 0.5,
    "reward": 0.5,
    "tools/call_frequency": 1.0,
    "tools/valid_rate": 0.9,
    "stop/max_tokens": 0.2,
    "stop/max_turns": 0.3,
    "value/explained_variance": 0.5,
}


@pytest.mark.parametrize(
    ("changes", "patience", "words"),
    [
        ({"ratio/p50": 1.03}, 1, ["1.030", "the template"]),
        ({"align/score": 0.98, "align/logp_mae": 0.25}, 1, ["98.0%", "0.250 nats", "cast_lm_head_to_fp32"]),
        ({"mask/in_loss_fraction": 0.4}, 3, ["40%", "schema_mask"]),
        ({"frac_reward_zero_std": 1.0}, 3, ["same reward", "0.50", "dynamic_sampling"]),
        ({"tools/call_frequency": 0.0}, 3, ["no tool was called", "first_call_retries"]),
        ({"tools/valid_rate": 0.18}, 3, ["less than half of the tool calls", "18%", "sft_warmup"]),
        (
            {"stop/max_tokens": 0.25, "frac_reward_zero_std": 0.75},
            3,
            ["cut before", "25% by `max_completion_length`, 30% by `max_turns`"],
        ),
    ],
)
def test_a_sign_is_told_once_after_as_many_steps_as_it_takes(
    changes: dict[str, float], patience: int, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    health = Health()
    for _ in range(patience - 1):
        health.check(FINE | changes)
    health.check(FINE)  # not in a row
    for step in range(5):
        assert len(caplog.records) == (step >= patience)
        health.check(FINE | changes)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(word in record.message for word in words)


def test_a_healthy_run_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(is_strict=True)
    for _ in range(30):
        health.check(FINE, is_on_policy=False)
    health.check({})
    assert not caplog.records


@pytest.mark.parametrize("changes", [{"stop/max_turns": 1.0}, {"frac_reward_zero_std": 0.9}])
def test_trajectories_may_be_cut_while_groups_have_spread_and_groups_be_flat_while_few_are_cut(
    changes: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(is_strict=True)
    for _ in range(5):
        health.check(FINE | changes)
    assert not caplog.records


def test_ratios_of_later_passes_may_be_anything(caplog: pytest.LogCaptureFixture) -> None:
    later = {key: value for key, value in FINE.items() if not key.startswith("align")} | {"ratio/p50": 1.3}
    Health(is_strict=True).check(later)
    assert not caplog.records


def falling(health: Health, steps: range) -> None:
    for step in steps:
        health.check({"value/explained_variance": 0.5 - 0.05 * step})


def test_values_that_explain_less_and_less_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    falling(health, range(19))
    assert not caplog.records
    falling(health, range(19, 40))
    (record,) = caplog.records
    assert "explains less and less of the returns (0.28, then -0.2" in record.message


def test_a_strict_one_raises_and_goes_on_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    first: Any = Health(is_strict=True)
    falling(first, range(19))
    resumed = Health(is_strict=True)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(HealthError, match="explains less and less"):
        falling(resumed, range(19, 20))


def test_a_step_that_rolls_nothing_out_neither_counts_nor_forgives(caplog: pytest.LogCaptureFixture) -> None:
    health, flat = Health(), FINE | {"frac_reward_zero_std": 1.0}
    for step in range(3):
        assert not caplog.records, step
        health.check(flat)
        health.check({"mask/in_loss_fraction": 0.8})  # the second pass over the same batch
    assert len(caplog.records) == 1
