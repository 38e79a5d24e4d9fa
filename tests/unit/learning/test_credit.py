"""Which mode of advantages a run takes by itself, when, and why."""

from typing import Any

import pytest
import torch

from mcp_grpo.learning import Credit


NAMES = ["outcome", "steps"]
WHOLE = {0: [None, None]}
PENALTIES = {**WHOLE, 1: [[0.0, -0.1, 1.0], [1.0]]}
PAID = {**WHOLE, 1: [None, [0.2, -0.2, 0.0]]}


def auto(gamma: float | None = None, hindrance: str | None = None) -> Credit:
    return Credit("auto", gamma, NAMES, hindrance)


def alone(found: torch.Tensor) -> torch.Tensor:
    """What one process hears of all."""
    return found


def test_without_rewards_for_turns_it_is_trl_s_group() -> None:
    credit = auto()
    for given in ({}, WHOLE, {0: [None], 1: [None]}):
        credit.look(given, alone)
    assert (credit.mode, credit.gamma, credit.is_open) == ("group", 0.99, True)
    assert "no reward function rewards single turns" in str(credit.sentence)


def test_penalties_and_what_the_last_turn_gets_are_added_up() -> None:
    credit = auto()
    credit.look(PENALTIES, alone)
    assert (credit.mode, credit.is_open) == ("group", True)
    assert "'steps' has paid no turn before the last so far" in str(credit.sentence)


def test_a_turn_that_is_paid_has_each_judged_by_itself_from_then_on() -> None:
    credit = auto()
    for given in (PENALTIES, PAID, PENALTIES, WHOLE):
        credit.look(given, alone)
    assert (credit.mode, credit.gamma, credit.is_open) == ("group_turn", 0.5, False)
    assert "(`group_turn`, `gamma=0.5`), as 'steps' pays single turns" in str(credit.sentence)


@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_a_gamma_that_was_asked_for_is_kept(gamma: float) -> None:
    credit = auto(gamma)
    credit.look(PAID, alone)
    assert (credit.mode, credit.gamma) == ("group_turn", gamma)


def test_settings_that_do_not_allow_it_keep_the_group() -> None:
    credit = auto(hindrance="each is normalised by itself")
    credit.look(PAID, alone)
    assert (credit.mode, credit.gamma) == ("group", 0.99)
    assert str(credit.sentence).endswith("though 'steps' pays single turns: each is normalised by itself.")


@pytest.mark.parametrize("mode", ["group", "group_turn", "gae", "hybrid"])
def test_a_mode_that_was_asked_for_is_kept_without_a_word(mode: str) -> None:
    credit = Credit(mode, None, NAMES)
    credit.look(PAID, alone)
    credit.load_state_dict({"rewarding": "steps", "paying": "steps"})
    assert (credit.mode, credit.gamma, credit.sentence) == (mode, 0.99, None)


def test_processes_agree_though_one_alone_has_seen_a_paid_turn() -> None:
    seen: list[torch.Tensor] = []
    auto().look(PENALTIES, lambda found: seen.append(found) or found)
    auto().look(PAID, lambda found: seen.append(found) or found)
    ranks = [auto(), auto()]
    for credit, given in zip(ranks, (PENALTIES, PAID), strict=True):
        credit.look(given, lambda _: torch.cat(seen))
    assert {(credit.mode, credit.gamma, credit.sentence) for credit in ranks} == {
        ("group_turn", 0.5, ranks[0].sentence)
    }


@pytest.mark.parametrize("given", [WHOLE, PENALTIES, PAID], ids=["none", "penalties", "paid"])
def test_a_run_that_goes_on_goes_on_in_the_same_way(given: dict[int, Any]) -> None:
    before, after = auto(), auto()
    before.look(given, alone)
    after.load_state_dict(before.state_dict())
    assert (after.mode, after.gamma, after.sentence) == (before.mode, before.gamma, before.sentence)
