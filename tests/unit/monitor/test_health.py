"""What a run is warned of, how often, what it is stopped for, and what is let pass."""

from typing import Any

import pytest

from mcp_grpo.monitor import Health, HealthNote


FINE: dict[str, float] = {
    "align/score": 1.0,
    "align/logp_mae": 0.0,
    "ratio/p50": 1.0,
    "mask/in_loss_fraction": 0.8,
    "frac_reward_zero_std": 0.5,
    "is_flat": 0.0,
    "reward": 0.5,
    "entropy": 0.3,
    "tools/call_frequency": 1.0,
    "tools/valid_rate": 0.9,
    "stop/answered": 0.5,
    "stop/max_tokens": 0.2,
    "stop/max_turns": 0.3,
    "kl/active": 0.1,
    "kl_target": 0.4,
    "value/explained_variance": 0.5,
}
FLAT = {"frac_reward_zero_std": 1.0, "is_flat": 1.0}
Series = list[dict[str, float]]


def notes_of(series: Series, reaction: str = "stop", patience: int = 3) -> list[HealthNote]:
    """What is said in the course of a run."""
    health = Health(reaction, patience)
    return [note for step, changes in enumerate(series, 1) for note in health.check(FINE | changes, step=step)]


@pytest.mark.parametrize(
    ("changes", "patience", "words"),
    [
        ({"ratio/p50": 1.03}, 1, ["1.030", "the template"]),
        ({"align/score": 0.94, "align/logp_mae": 0.25}, 1, ["94.0%", "0.250 nats", "cast_lm_head_to_fp32"]),
        ({"align/score": 0.47, "align/logp_mae": 9.97}, 1, ["10.0 nats per token", "`speculative_config`"]),
        ({"mask/in_loss_fraction": 0.4}, 3, ["40%", "schema_mask"]),
        (FLAT, 3, ["In 3 batches in a row", "same reward", "0.50", "dynamic_sampling"]),
        ({"tools/call_frequency": 0.0}, 3, ["No tool was called", "bootstrap_steps"]),
        ({"tools/valid_rate": 0.18}, 3, ["Less than half of the tool calls", "18%", "sft_warmup"]),
        ({"kl/active": 1.3}, 3, ["runs away", "1.30 nats", "`kl_target` (0.40)"]),
        (
            {"stop/max_tokens": 0.25, "frac_reward_zero_std": 0.75},
            3,
            ["cut before", "25% by `max_completion_length`, 30% by `max_turns`"],
        ),
    ],
)
def test_a_sign_is_told_once_after_as_many_steps_as_it_takes(
    changes: dict[str, float], patience: int, words: list[str]
) -> None:
    series = [changes] * (patience - 1) + [{}] + [changes] * 5  # not in a row at first
    (note,) = notes_of(series)
    assert note.step == 2 * patience
    assert all(word in note.sentence for word in words)


def trend(start: dict[str, float], now: dict[str, float], num_steps: int = 20) -> Series:
    """Metrics that move evenly from one value to another; entropy by equal factors, as it does."""
    shares = [step / (num_steps - 1) for step in range(num_steps)]
    steps = [{key: (1 - share) * start[key] + share * now[key] for key in start} for share in shares]
    if "entropy" not in start:
        return steps
    ratio = now["entropy"] / start["entropy"]
    return [step | {"entropy": start["entropy"] * ratio**share} for step, share in zip(steps, shares, strict=True)]


COLLAPSING = trend(
    {"entropy": 0.29, "stop/max_tokens": 0.0, "stop/max_turns": 0.02, "stop/answered": 0.98, "reward": 0.2},
    {"entropy": 0.02, "stop/max_tokens": 0.6, "stop/max_turns": 0.02, "stop/answered": 0.38, "reward": 0.1},
    num_steps=24,
)


@pytest.mark.parametrize(
    ("series", "name", "words"),
    [
        (
            trend({"entropy": 0.3, "reward": 0.2}, {"entropy": 0.01, "reward": 0.2}),
            "entropy",
            ["Entropy fell from 0.2", "does not rise", "entropy_coef"],
        ),
        (
            trend({"stop/max_tokens": 0.0, "stop/max_turns": 0.0}, {"stop/max_tokens": 0.5, "stop/max_turns": 0.0}),
            "rising_cuts",
            ["More and more trajectories are cut", "without an end"],
        ),
        (
            trend({"stop/context_full": 0.0}, {"stop/context_full": 0.5}),
            "rising_cuts",
            ["More and more trajectories are cut"],
        ),
        (
            trend({"reward": 0.2, "stop/answered": 0.9}, {"reward": 0.5, "stop/answered": 0.4}),
            "reward_without_answers",
            ["The reward rises", "fewer trajectories end with an answer", "--debug"],
        ),
    ],
)
def test_what_changes_for_the_worse_over_a_run_is_told_and_does_not_stop_it(
    series: Series, name: str, words: list[str]
) -> None:
    (note,) = notes_of(series)
    assert note.name == name
    assert not note.is_fatal
    assert all(word in note.sentence for word in words)


def test_a_policy_that_collapses_is_stopped_and_its_cuts_are_told_before() -> None:
    notes = notes_of(COLLAPSING)
    fatal = [note for note in notes if note.is_fatal]
    assert [note.name for note in fatal] == ["collapse"]
    assert "The policy has collapsed: its entropy fell from 0.2" in fatal[0].sentence
    assert min(note.step for note in notes if note.name == "rising_cuts") < fatal[0].step <= 24


def test_a_collapse_that_takes_one_update_is_one_too() -> None:
    # Most of the first five batches are cut, so that their mean says little; and it is paid for.
    fine = {"stop/max_tokens": 0.05, "stop/max_turns": 0.0, "stop/answered": 0.95}
    cut = {"stop/max_tokens": 0.75, "stop/max_turns": 0.0, "stop/answered": 0.25}
    courses = zip((0.4, 0.5, 0.2, 0.1, *[0.01] * 8), (*[0.1] * 4, *[0.9] * 8), strict=True)
    notes = notes_of([fine | {"reward": 0.1}, *(cut | {"entropy": e, "reward": r} for e, r in courses)])
    (fatal,) = (note for note in notes if note.is_fatal)
    assert fatal.name == "collapse"
    assert "cut trajectories went from 5% to 75%" in fatal.sentence
    assert fatal.since == 2
    assert "(5% at the start, now 75%)" in next(note.sentence for note in notes if note.name == "rising_cuts")


@pytest.mark.parametrize(
    ("changes", "name", "advice"),
    [
        ({}, "never_calls", "sft_warmup.py"),
        ({}, "no_calls", "train on calls first"),
        ({"reward": 0.0} | FLAT, "no_signal", "sft_warmup.py"),
    ],
)
def test_a_policy_that_has_unlearnt_to_call_is_told_from_one_that_never_could(
    changes: dict[str, float], name: str, advice: str
) -> None:
    silent = changes | {"tools/call_frequency": 0.0}
    never, unlearnt = (
        next(note for note in notes_of(before + [silent] * 6) if note.name == name)
        for before in ([], [{"tools/call_frequency": 1.3}])
    )
    assert advice in never.sentence
    assert "It called some before it was trained (1.3 calls a trajectory)" in unlearnt.sentence
    assert "Lower `learning_rate`" in unlearnt.sentence
    assert advice not in unlearnt.sentence
    assert never.since is None
    assert unlearnt.since == (None if name == "no_calls" else 2)  # which is no reason to stop


CUT = {"stop/max_tokens": 0.9, "stop/max_turns": 0.0}
SILENT = {"tools/call_frequency": 0.0}
GONE = {"entropy": 0.01, "reward": 0.0}


@pytest.mark.parametrize(
    ("series", "name", "since"),
    [
        ([{}] * 7 + [SILENT] * 6, "never_calls", 8),
        ([{"stop/max_tokens": 0.0}] * 4 + [CUT] * 3 + [CUT | SILENT] * 6, "never_calls", 5),
        # Few more cuts than in a first batch that happened to have none are no fall.
        ([{"stop/max_tokens": 0.0, "stop/max_turns": 0.0}] + [{}] * 30 + [SILENT] * 6, "never_calls", 32),
        ([{}] * 4 + [{"tools/call_frequency": each} for each in (0.9, 0.4, 0.1)] + [SILENT] * 6, "never_calls", 6),
        ([{}] * 7 + [SILENT] + [SILENT | {"reward": 0.0} | FLAT] * 3, "no_signal", 8),
        ([{}] * 2 + [GONE] * 11, "collapse", 2),
        ([{}] * 20 + [GONE] * 8, "collapse", 20),
    ],
)
def test_a_fall_is_told_with_the_step_that_it_began_at(series: Series, name: str, since: int) -> None:
    (fatal,) = (note for note in notes_of(series) if note.is_fatal)
    assert (fatal.name, fatal.since) == (name, since)


def test_a_fall_that_goes_on_after_a_checkpoint_began_before_it() -> None:
    health = Health(patience=3)
    for step in range(1, 18):
        health.check(FINE | (SILENT if step > 7 else {}), step=step)
    first = next(note for note in health.notes if note.is_fatal)
    health = resumed(health)
    for step in range(18, 30):
        health.check(FINE | SILENT, step=step)
    again = next(note for note in health.notes if note.is_fatal)
    assert (first.step, first.since, again.since) == (13, 8, 8)
    assert "called some before it was trained" in again.sentence


def test_a_policy_that_plays_all_its_turns_for_a_reward_that_rises_has_not_collapsed() -> None:
    before = {"entropy": 0.3, "reward": 0.1, "stop/max_tokens": 0.0, "stop/max_turns": 0.1}
    after = {"entropy": 0.01, "reward": 0.9, "stop/max_tokens": 0.0, "stop/max_turns": 1.0}
    assert not any(note.is_fatal for note in notes_of(trend(before, after, num_steps=30)))
    endless = after | {"stop/max_tokens": 1.0, "stop/max_turns": 0.0}
    assert any(note.is_fatal for note in notes_of(trend(before, endless, num_steps=30)))


def test_entropy_may_fall_to_nothing_while_the_reward_rises() -> None:
    assert notes_of(trend({"entropy": 0.3, "reward": 0.2}, {"entropy": 0.01, "reward": 0.95}, 40)) == []


def test_a_reward_that_rose_and_fell_again_while_entropy_vanished_is_a_collapse() -> None:
    rise = trend({"entropy": 0.3, "reward": 0.1}, {"entropy": 0.1, "reward": 0.8})
    notes = notes_of(rise + trend({"entropy": 0.1, "reward": 0.8}, {"entropy": 0.01, "reward": 0.1}))
    (fatal,) = (note for note in notes if note.is_fatal)
    assert fatal.name == "collapse"
    assert fatal.since is not None
    assert len(rise) < fatal.since < fatal.step


@pytest.mark.parametrize(
    ("changes", "name", "step"),
    [
        ({"tools/call_frequency": 0.0, "reward": 0.0} | FLAT, "no_signal", 3),
        ({"tools/call_frequency": 0.0}, "never_calls", 6),
        (FLAT, "no_spread", 12),
        ({"ratio/p50": 1.1}, "ratio", 1),
        ({"align/score": 0.94, "align/logp_mae": 0.6}, "other_policy", 1),
    ],
)
def test_what_a_run_is_stopped_for(changes: dict[str, float], name: str, step: int) -> None:
    fatal = [note for note in notes_of([changes] * step) if note.is_fatal]
    assert [(note.name, note.step) for note in fatal] == [(name, step)]
    assert not [note for note in notes_of([changes] * (step - 1)) if note.is_fatal]
    warned = notes_of([changes] * step, reaction="warn")
    assert name in [note.name for note in warned]
    assert not any(note.is_fatal for note in warned)


def test_a_strict_run_is_stopped_for_every_sign() -> None:
    (note,) = notes_of([{"align/score": 0.9, "align/logp_mae": 0.2}], reaction="strict")
    assert note.is_fatal


def test_a_healthy_run_is_not_warned() -> None:
    assert notes_of([{}] * 30, reaction="strict") == []
    assert Health().check({}) == []


@pytest.mark.parametrize("changes", [{"stop/max_turns": 1.0}, {"frac_reward_zero_std": 0.9}])
def test_trajectories_may_be_cut_while_groups_have_spread_and_groups_be_flat_while_few_are_cut(
    changes: dict[str, float],
) -> None:
    assert notes_of([changes] * 5) == []


def test_ratios_of_later_passes_may_be_anything() -> None:
    later = {key: value for key, value in FINE.items() if not key.startswith("align")} | {"ratio/p50": 1.3}
    assert Health("strict").check(later) == []


def falling(health: Health, steps: range) -> list[HealthNote]:
    return [note for step in steps for note in health.check({"value/explained_variance": 0.5 - 0.05 * step})]


def test_values_that_explain_less_and_less_are_told_of() -> None:
    health = Health()
    assert falling(health, range(19)) == []
    (note,) = falling(health, range(19, 40))
    assert "explains less and less of the returns (0.28, then -0.2" in note.sentence


def resumed(health: Health, reaction: str = "stop") -> Health:
    """One that goes on from what another has written."""
    other = Health(reaction, patience=3)
    other.load_state_dict(health.state_dict())
    return other


def test_health_goes_on_where_it_was() -> None:
    first: Any = Health()
    falling(first, range(19))
    (note,) = falling(resumed(first), range(19, 20))
    assert "explains less and less" in note.sentence
    health, said = Health("warn", patience=3), []
    for step, changes in enumerate(COLLAPSING, 1):
        said += health.check(FINE | changes, step=step)
        health = resumed(health, "warn")
    assert said == health.notes == notes_of(COLLAPSING, "warn")
    assert "collapse" in [note.name for note in said]


def test_health_goes_on_from_a_checkpoint_that_knows_less() -> None:
    health = Health(patience=1)
    health.load_state_dict({"counts": {"no_calls": 1}, "explained": [0.5]})
    assert [note.name for note in health.check(FINE | {"tools/call_frequency": 0.0})] == ["no_calls"]


def test_what_a_run_was_stopped_for_may_stop_it_again_but_not_at_once() -> None:
    silent = FINE | FLAT | {"tools/call_frequency": 0.0}
    health = Health(patience=3)
    for _ in range(3):
        health.check(silent)
    assert any(note.is_fatal for note in health.notes)
    health = resumed(health)
    assert [any(note.is_fatal for note in health.check(silent)) for _ in range(3)] == [False, False, True]


def test_groups_that_mostly_teach_nothing_are_told_of_and_counted_over_a_checkpoint() -> None:
    mostly = [{"frac_reward_zero_std": share} for share in (0.5, 1.0) * 10]  # 75 % on average, and never for long
    (note,) = notes_of(mostly)
    assert (note.name, note.step, note.is_fatal) == ("mostly_flat", 12, False)  # ten to average over, three in a row
    for word in ("75%", "mean 0.50", '`task_choice="spread"`', "`family` or `difficulty`", "`dynamic_sampling`"):
        assert word in note.sentence
    assert notes_of([{"frac_reward_zero_std": share} for share in (0.5, 0.8) * 20]) == []  # 65 %
    assert "mostly_flat" not in [note.name for note in notes_of([FLAT] * 20)]  # of which others tell
    health = Health(patience=3)
    for changes in mostly[:11]:
        assert health.check(FINE | changes) == []
        health = resumed(health)
    assert [note.name for note in health.check(FINE | mostly[11])] == ["mostly_flat"]


def test_signs_show_as_long_as_they_last() -> None:
    health = Health(patience=1)
    health.check(FINE | {"tools/call_frequency": 0.0})
    assert health.showing == ["no_calls"]
    health.check(FINE)
    assert health.showing == []


def test_a_step_that_rolls_nothing_out_neither_counts_nor_forgives() -> None:
    health, said = Health(patience=3), []
    for step in range(3):
        assert not said, step
        said += health.check(FINE | FLAT)
        said += health.check({"mask/in_loss_fraction": 0.8})  # the second pass over the same batch
    assert len(said) == 1
