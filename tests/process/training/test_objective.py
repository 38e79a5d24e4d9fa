"""The loss as a whole: what is added to TRL's, what is held back, and that nothing else changes."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import full
from helpers.runs import BRIEF, IMPATIENT, RELYING_AT_ONCE, OneByOne
from helpers.runs import make_trainer as make_any_trainer
from helpers.sums import ROWS
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM, TrainerCallback

from mcp_grpo import MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.errors import HealthError, SettingsError
from mcp_grpo.learning.loss import Objective, Settled


EVERYTHING: dict[str, Any] = {
    "advantage_mode": "hybrid",
    "constants": RELYING_AT_ONCE,
    "value_learning_rate": 1e-2,
    "beta": 0.05,
    "ref_sync": "ema",
    "ref_sync_steps": 1,
    "ref_ema_decay": 0.5,
    "schema_mask": "syntax",
    "bootstrap_steps": 2,
}
LORA = LoraConfig(r=4, target_modules="all-linear")
make_trainer = partial(make_any_trainer, **BRIEF)
PAIR = {"num_generations": 2, "per_device_train_batch_size": 2}  # enough, where it does not matter what is sampled


class Spy(MCPGRPOTrainer):
    """Keeps what its losses were computed from."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.batches = [*getattr(self, "batches", []), inputs]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        is_own = self._pass is None
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if is_own:
            self.logps = output[0]
        return output


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> list[Settled]:
    """What TRL's losses were given."""
    found, settle = [], Objective.settle

    def kept(self: Objective, *args: Any, **kwargs: Any) -> Settled:
        found.append(settle(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(Objective, "settle", kept)
    return found


class Replay(MCPGRPOTrainer):
    """Learns from the batch of the trainer before it, if there was one: what is sampled has no part in a comparison."""

    kept: dict[str, Any] | None = None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        kind = type(self)
        if kind.kept is None:
            kind.kept = super()._generate_and_score_completions(inputs)
        return dict(kind.kept)


@pytest.fixture(scope="module")
def held_trainer(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> Spy:
    """It has seen a batch, is held to a reference, and has not moved."""
    changes = {"max_steps": 1, "learning_rate": 0.0, "beta": 0.1}
    with make_trainer(tmp_path_factory.mktemp("held"), adding_model, Spy, **changes) as trainer:
        trainer.train()
    return trainer


@pytest.fixture
def free_trainer(held_trainer: Spy, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The same, without a KL term."""
    monkeypatch.setattr(held_trainer, "beta", 0.0)
    return held_trainer


def gradients(of: Spy, **changes: Any) -> dict[str, torch.Tensor]:
    """Those of the loss of the first batch that was seen."""
    of.model.train()
    of.model.zero_grad()
    of._compute_loss(of.model, {**of.batches[0], **changes}).backward()
    return {name: p.grad.clone() for name, p in of.model.named_parameters() if p.grad is not None}


def faulty_turns(trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
    """One reward per turn: the first is worth a little, the last the answer."""
    return [
        [0.25] + [0.0] * (t.num_turns - 2) + [a] for t, a in zip(trajectory, exact_answer(trajectory), strict=True)
    ]


def token_sums(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Rewards that differ wherever attempts do."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def steps(trainer: MCPGRPOTrainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def test_everything_at_once_trains_an_adapter_and_says_how_it_goes(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, peft_config=LORA, max_steps=2, **EVERYTHING) as trainer:
        trainer.train()
    first, *_, last = steps(trainer)
    assert first["ratio/p50"] == pytest.approx(1, abs=1e-4)
    assert first["align/score"] == 1
    assert first["ratio/ess"] == pytest.approx(1, abs=1e-3)
    assert first["ratio/gated_fraction"] == 0
    assert 0 < first["mask/in_loss_fraction"] < 1
    assert first["kl/all"] == pytest.approx(0, abs=1e-6)
    assert last["kl/all"] > 0
    assert last["ref/distance"] > 0
    assert last["ref/num_differing"] > 0
    assert first["value/loss"] > last["value/loss"] > 0
    assert {"kl/forced", "kl/active", "kl/beta", "value/mixing_weight", "value/ev_vs_group"} <= last.keys()
    assert {"loss/policy", "loss/active_fraction", "ratio/mean", "ratio/std"} <= last.keys()
    bins = [value for name, value in last.items() if name.startswith("ratio/histogram/")]
    assert (len(bins), sum(bins)) == (11, pytest.approx(1))
    assert first["tools/by_name/add/calls"] >= 4
    assert first["tools/by_name/add/error_rate"] == 0


@pytest.mark.parametrize("mode", ["group_turn", "gae", full("hybrid")])
def test_each_turn_has_an_advantage_of_its_own(
    tmp_path: Path, adding_model: str, mode: str, settled: list[Settled]
) -> None:
    trainer = make_trainer(
        tmp_path,
        adding_model,
        Spy,
        faulty_turns,
        max_steps=1,
        advantage_mode=mode,
        constants=RELYING_AT_ONCE,
        gamma=0.5,
    )
    with trainer:
        trainer.train()
    batch = trainer.batches[0]
    turn_ids, advantages = batch["turn_ids"], settled[0].inputs["advantages"]
    assert turn_ids.max() == 1
    for row in range(len(turn_ids)):
        for turn in (0, 1):
            found = advantages[row][turn_ids[row] == turn]
            assert len(found.unique()) <= 1  # one for all tokens of a turn
    assert (advantages[turn_ids == -1] == 0).all()
    returns = batch["turn_returns"]
    torch.testing.assert_close(returns[:, 0], 0.25 + 0.5 * batch["turn_rewards"][:, 1])
    if mode == "group_turn":  # the value head's first values are 0: with them, the advantage is the return itself
        first = returns[:, 0] - (returns[:, 0].sum() - returns[:, 0]) / 7
        torch.testing.assert_close(batch["turn_advantages"][:, 0], first)
    if mode == "gae":
        last = advantages.gather(1, (turn_ids == 1).int().argmax(1, keepdim=True)).squeeze(1)
        torch.testing.assert_close(last * batch["advantage_scale"], batch["turn_rewards"][:, 1])


@pytest.mark.parametrize("scaling", ["none", "batch"])
def test_turns_of_one_reward_have_the_advantages_of_their_trajectories_where_those_are_not_scaled(
    tmp_path: Path, adding_model: str, scaling: str
) -> None:
    def alternating(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [10.0 * (i % 2) for i in range(len(trajectory))]

    changes = {"advantage_mode": "group_turn", "gamma": 1.0, "scale_rewards": scaling}
    with make_trainer(tmp_path, adding_model, Spy, alternating, max_steps=1, **changes) as trainer:
        trainer.train()
    [batch] = trainer.batches
    rewards = trainer._rewards[:, 0]
    as_group = (
        (rewards - rewards.mean()).float().sort().values * 8 / 7
    )  # with a baseline of the seven others, not of all eight
    first = batch["advantages"][:, 0].sort().values  # rows were put into another order
    if scaling == "none":
        torch.testing.assert_close(first, as_group)
    else:
        torch.testing.assert_close(first, as_group / batch["advantage_scale"])
        assert batch["advantage_scale"] > 5


@pytest.mark.full
def test_rewards_by_turn_add_up_to_what_trl_logs(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, reward=[faulty_turns, exact_answer], max_steps=1) as trainer:
        trainer.train()
    entry = steps(trainer)[0]
    assert entry["rewards/faulty_turns/mean"] == pytest.approx(entry["rewards/exact_answer/mean"] + 0.25)


@pytest.mark.full
def test_a_list_of_rewards_must_have_one_for_each_turn(tmp_path: Path, adding_model: str) -> None:
    def wrong(trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
        return [[0.0] * 5 for _ in trajectory]

    with (
        make_trainer(tmp_path, adding_model, reward=wrong, advantage_mode="group_turn") as trainer,
        pytest.raises(SettingsError, match=r"'wrong' returned 5 rewards for a trajectory of 2 turns"),
    ):
        trainer.train()


@pytest.mark.full
def test_a_reward_function_may_be_asynchronous_and_by_turn(tmp_path: Path, adding_model: str) -> None:
    async def later(trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
        return faulty_turns(trajectory)

    trainer = make_trainer(tmp_path, adding_model, Spy, later, max_steps=1, advantage_mode="group_turn")
    with trainer:
        trainer.train()
    assert (trainer.batches[0]["turn_rewards"][:, 0] == 0.25).all()


def test_the_value_head_leaves_the_policy_s_gradient_alone_and_its_clipping_too(
    tmp_path: Path, adding_model: str
) -> None:
    class Weights(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    class Once(Replay):
        pass

    found = {}
    for coef in (0.5, 0.0):
        watch = Weights()
        with make_trainer(
            tmp_path,
            adding_model,
            Once,
            callbacks=[watch],
            max_steps=1,
            advantage_mode="gae",
            value_loss_coef=coef,
            max_grad_norm=0.01,
            learning_rate=1e-2,
            optim="sgd",
            value_learning_rate=1.0,
        ) as trainer:
            trainer.train()
        found[coef] = watch.weights
    for name, weight in found[0.5].items():
        assert torch.equal(weight, found[0.0][name]) == ("value_head" not in name), name


@pytest.mark.full
def test_finite_differences_agree_with_the_gradient_of_the_whole_loss(tmp_path: Path, adding_model: str) -> None:
    # Without the value loss, whose gradient does not reach the model by design.
    changes = {
        **EVERYTHING,
        "value_loss_coef": 0.0,
        "entropy_coef": 0.01,
        "bootstrap_steps": 1000,
        "learning_rate": 1e-4,
    }
    changes |= {"schema_mask_min_prob": 0.0, "min_unforced_fraction": 0.0}
    with make_trainer(tmp_path, adding_model, Spy, max_steps=1, **changes) as trainer:
        trainer.train()
        model = trainer.model.double().train()
        batch = {k: v.double() if torch.is_floating_point(v) else v for k, v in trainer.batches[0].items()}
        batch["needs_bootstrap"] = torch.tensor(1.0)
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] - 0.3
        # Off the kink of the clipped ratio, where there is no derivative, and within the gate.
        trainer._compute_loss(model, batch)
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] = trainer.logps.detach() - 0.05
        batch["advantages"] = torch.linspace(-1, 1, 8).double()
        # From values that are given: an advantage is a number, though it is computed from weights.
        batch["old_values"] = torch.zeros_like(batch["turn_ids"], dtype=torch.float64)
        trainer.batches = [batch]
        torch.manual_seed(0)
        torch.nn.init.normal_(trainer._values.head.out.weight, std=0.1)
        found = gradients(trainer)
        assert batch["imitated"].sum() > 0
        assert batch["masked"].sum() > 0
        for name in (
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.mlp.down_proj.weight",
            "model.norm.weight",
        ):
            # TRL's log-probabilities are those of float32, whatever the model is: the steps must not be too small.
            parameter = model.get_parameter(name)
            direction = torch.randn(parameter.shape, dtype=torch.float64)
            losses = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter += sign * 1e-3 * direction
                    losses.append(trainer._compute_loss(model, batch).item())
                    parameter -= sign * 1e-3 * direction
            expected = (losses[0] - losses[1]) / 2e-3
            assert (found[name] * direction).sum().item() == pytest.approx(expected, rel=1e-3, abs=3e-5)


@pytest.mark.parametrize("mode", [full("group"), "hybrid"])
@pytest.mark.full
def test_splitting_an_update_into_micro_batches_changes_nothing(tmp_path: Path, adding_model: str, mode: str) -> None:
    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    class Once(Replay):
        pass

    found = []
    for size, accumulation in ((8, 1), (2, 4)):
        watch = Watch()
        with make_trainer(
            tmp_path,
            adding_model,
            Once,
            callbacks=[watch],
            advantage_mode=mode,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=1e9,
        ) as trainer:
            trainer.train()
        found.append(watch.gradients)
    whole, split = found
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_token_whose_ratio_is_far_off_leaves_the_policy_term_but_not_the_denominator(free_trainer: Spy) -> None:
    batch = free_trainer.batches[0]
    logps = batch["sampling_per_token_logps"].clone()
    logps[:, :3] -= 2  # ratios of e^2
    loss = free_trainer._compute_loss(
        free_trainer.model.train(), {**batch, "sampling_per_token_logps": logps, "advantages": torch.ones(8)}
    )
    (gradient,) = torch.autograd.grad(loss, free_trainer.logps)
    plain = free_trainer._compute_loss(free_trainer.model.train(), {**batch, "advantages": torch.ones(8)})
    (expected,) = torch.autograd.grad(plain, free_trainer.logps)
    assert (gradient[:, :3] == 0).all()
    assert torch.equal(gradient[:, 3:], expected[:, 3:])
    assert (expected[:, :3] != 0).all()


def test_with_all_tokens_gated_nothing_is_learnt(free_trainer: Spy) -> None:
    far = free_trainer.batches[0]["sampling_per_token_logps"] - 2
    found = gradients(free_trainer, sampling_per_token_logps=far, old_per_token_logps=far, advantages=torch.ones(8))
    assert all((gradient == 0).all() for gradient in found.values())


def moved(trainer: Spy) -> dict[str, Any]:
    """The first batch, as if the policy had moved since it was sampled: some tokens are clipped, some gated."""
    chance, batch = torch.Generator().manual_seed(0), trainer.batches[0]
    logps = batch["sampling_per_token_logps"]
    old, reference = (logps + size * torch.randn(logps.shape, generator=chance) for size in (0.7, 0.3))
    return {
        **batch,
        "sampling_per_token_logps": old,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "advantages": torch.randn(len(logps), generator=chance),
    }


def noted(trainer: Spy, batch: dict[str, Any]) -> dict[str, float]:
    """The loss of two passes over a batch, and what is said of their update."""
    trainer._monitor.end_passes(trainer.accelerator)
    losses = [trainer._compute_loss(trainer.model.train(), batch).item() for _ in range(2)]
    return trainer._monitor.end_passes(trainer.accelerator) | {"loss": sum(losses)}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_policy_loss_by_itself_is_trl_s_without_its_other_terms(
    held_trainer: Spy, monkeypatch: pytest.MonkeyPatch, loss_type: str, level: str
) -> None:
    batch = moved(held_trainer)
    monkeypatch.setattr(held_trainer, "loss_type", loss_type)
    monkeypatch.setattr(held_trainer, "importance_sampling_level", level)
    objective = replace(held_trainer._objective, importance_sampling_level=level, is_kl_corrected=True)
    monkeypatch.setattr(held_trainer, "_objective", objective)
    monkeypatch.setattr(held_trainer, "current_gradient_accumulation_steps", 2)
    monkeypatch.setattr(held_trainer.args, "use_bias_correction_kl", True)
    with_kl = noted(held_trainer, batch)
    monkeypatch.setattr(held_trainer, "_entropy_bonus_enabled", True)
    monkeypatch.setattr(held_trainer, "entropy_coef", 0.5)
    with_all = noted(held_trainer, batch)
    monkeypatch.setattr(held_trainer, "_entropy_bonus_enabled", False)
    monkeypatch.setattr(held_trainer, "beta", 0.0)
    alone = noted(held_trainer, batch)
    assert alone["loss/policy"] == pytest.approx(alone["loss"])
    assert len({round(found["loss"], 4) for found in (alone, with_kl, with_all)}) == 3
    for found in (with_kl, with_all):
        assert found["loss/policy"] == pytest.approx(alone["loss"], rel=1e-4, abs=1e-6)


def test_what_is_learnt_from_is_what_is_neither_clipped_nor_gated(held_trainer: Spy) -> None:
    batch = moved(held_trainer)
    found = noted(held_trainer, batch)
    ratios = (held_trainer.logps.detach() - batch["sampling_per_token_logps"]).exp()
    advantages = batch["advantages"].unsqueeze(1)
    is_clipped = ((ratios < 0.8) & (advantages < 0)) | ((ratios > 1.2) & (advantages > 0))
    args = held_trainer.args
    is_gated = (ratios < 1 / args.ratio_gate) | (ratios > args.ratio_gate)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (is_clipped & ~is_gated & mask).any()
    assert (is_gated & mask).any()
    learnt = mask & ~is_clipped & ~is_gated
    assert found["loss/active_fraction"] == pytest.approx((learnt.sum() / mask.sum()).item())
    assert found["mask/in_loss_fraction"] == 1.0
    assert found["ratio/histogram/0.8_to_0.95"] == pytest.approx(
        ((ratios > 0.8) & (ratios <= 0.95) & mask).sum().item() / mask.sum().item()
    )
    assert found["kl/active"] == pytest.approx(found["kl/all"])  # nothing is masked


def test_of_a_batch_over_the_cap_nothing_is_learnt_from(held_trainer: Spy) -> None:
    far = held_trainer.batches[0]["ref_per_token_logps"] + 10
    assert noted(held_trainer, {**moved(held_trainer), "ref_per_token_logps": far})["loss/active_fraction"] == 0.0


def test_far_from_the_reference_there_is_only_the_way_back(held_trainer: Spy) -> None:
    reference = held_trainer.batches[0]["ref_per_token_logps"]
    far = reference + 2  # 2 nats at every token: k3 of 4.4
    found = gradients(held_trainer, ref_per_token_logps=far, advantages=torch.ones(8))
    num_hits = held_trainer._metrics["train"]["kl/hard_cap_hits"][-1]
    only_back = gradients(held_trainer, ref_per_token_logps=far, advantages=torch.zeros(8))
    both = gradients(held_trainer, ref_per_token_logps=reference + 1, advantages=torch.ones(8))
    near = gradients(held_trainer, ref_per_token_logps=reference + 1, advantages=torch.zeros(8))
    assert num_hits == 1
    assert all(torch.equal(found[name], gradient) for name, gradient in only_back.items())
    assert any(not torch.equal(both[name], gradient) for name, gradient in near.items())


def test_a_loss_leaves_its_batch_and_its_weights_as_they_were(held_trainer: Spy) -> None:
    """A batch that is learnt from twice is scaled and gated anew each time."""
    batch = {**held_trainer.batches[0], "advantages": torch.ones(8), "row_scale": torch.tensor(0.5)}
    for name, shift in (("sampling_per_token_logps", -2), ("ref_per_token_logps", 3)):
        batch[name] = batch[name].clone()
        batch[name][:, :3] += shift  # of a few tokens: the gate and the cap both have something to do
    given = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    names = set(batch)
    losses = [held_trainer._compute_loss(held_trainer.model.train(), batch).item() for _ in range(2)]
    assert losses[0] == losses[1]
    assert batch.keys() == names
    assert all(torch.equal(batch[name], value) for name, value in given.items())
    assert held_trainer.beta == 0.1


def test_the_weight_of_the_kl_term_rises_while_the_policy_is_too_far_away(tmp_path: Path, adding_model: str) -> None:
    class Far(Spy):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "ref_per_token_logps": batch["ref_per_token_logps"] + 1.5}  # k3 of 2, above the target

    with make_trainer(tmp_path, adding_model, Far, max_steps=3, beta=0.05, learning_rate=0.0, **PAIR) as trainer:
        trainer.train()
    betas = [entry["kl/beta"] for entry in steps(trainer)]
    assert betas == pytest.approx([0.05 * 1.02**n for n in (1, 2, 3)])


def test_old_log_probabilities_of_the_trainer_come_with_a_weight_for_the_difference(
    tmp_path: Path, adding_model: str
) -> None:
    with make_trainer(tmp_path, adding_model, Spy, max_steps=1, learning_rate=0.0, old_logps="trainer") as trainer:
        trainer.train()
        batch = trainer.batches[0]
        assert "old_per_token_logps" not in batch
        shifted = batch["sampling_per_token_logps"].clone()
        shifted[:, 0] -= math.log(2)  # sampled with half the probability that the trainer gives it
        shifted[:, 1] -= math.log(5)  # too far off
        loss = trainer._compute_loss(
            trainer.model.train(), {**batch, "sampling_per_token_logps": shifted, "advantages": torch.ones(8)}
        )
        (gradient,) = torch.autograd.grad(loss, trainer.logps)
    torch.testing.assert_close(gradient[:, 0] / gradient[:, 2], torch.full((8,), 2.0), rtol=1e-3, atol=0)
    assert (gradient[:, 1] == 0).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 0), ({"beta": 0.1}, 1), ({"old_logps": "trainer"}, 1), ({"advantage_mode": "gae"}, 1)],
)
def test_a_batch_for_two_updates_is_scored_only_where_something_reads_it(
    tmp_path: Path, adding_model: str, scorings: list[Any], changes: dict[str, Any], expected: int
) -> None:
    with make_trainer(tmp_path, adding_model, Spy, num_iterations=2, **changes, **PAIR) as trainer:
        trainer.train()
    assert len(scorings) == expected
    first, second = trainer.batches
    assert torch.equal(first["old_per_token_logps"], second["old_per_token_logps"])
    assert ("ref_per_token_logps" in first) == ("beta" in changes)


def test_a_scoring_that_nobody_reads_changes_no_update(
    tmp_path: Path, adding_model: str, scorings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, found = {"num_iterations": 2, "beta": 0.1, "learning_rate": 1e-2}, []
    for is_scored in (False, True):
        monkeypatch.setattr(MCPGRPOTrainer, "_reads_own_logps", lambda *_, is_scored=is_scored: is_scored)
        scorings.clear()
        with make_trainer(tmp_path, adding_model, OneByOne, reward=token_sums, **changes) as trainer:
            trainer.train()
        losses = [(step["loss"], step["grad_norm"]) for step in steps(trainer)]
        found.append((losses, {name: each.detach() for name, each in trainer.model.named_parameters()}))
        assert len(scorings) == 1 + is_scored
    assert all(norm > 0 for _, norm in found[0][0])
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(*(weights for _, weights in found), rtol=0, atol=0)


def test_masked_tokens_keep_their_kl_term_also_with_log_probabilities_of_the_trainer(
    tmp_path: Path, adding_model: str
) -> None:
    changes = {"old_logps": "trainer", "schema_mask": "syntax", "beta": 0.1, "max_steps": 1}
    with make_trainer(tmp_path, adding_model, Spy, **changes) as trainer:
        trainer.train()
    assert trainer.batches[0]["masked"].sum() > 0
    assert math.isfinite(steps(trainer)[0]["loss"])


@pytest.mark.full
def test_groups_that_all_did_the_same_do_not_blow_up_what_values_say(
    tmp_path: Path, adding_model: str, settled: list[Settled]
) -> None:
    def same(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [1.0] * len(trajectory)

    with make_trainer(tmp_path, adding_model, Spy, same, advantage_mode="gae", max_steps=1) as trainer:
        trainer.train()
    assert settled[-1].inputs["advantages"].abs().max() <= 1  # a return of 1, less a value of 0


# ---- Groups ----


def by_task(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """No spread for the task `flat`, some for others."""
    return [0.0 if t.task.task_id == "flat" else float(i % 2) for i, t in enumerate(trajectory)]


def test_groups_without_spread_are_replaced_by_attempts_at_other_tasks(tmp_path: Path, adding_model: str) -> None:
    rows = [{**ROWS[0], "task_id": name} for name in ("flat", "steep", "steeper")]
    seen: set[tuple[str, ...]] = set()
    changes = {**PAIR, "per_device_train_batch_size": 4, "shuffle_dataset": False, "max_steps": 1}
    for rounds in (0, 1):
        with make_trainer(
            tmp_path, adding_model, Spy, by_task, rows=rows, dynamic_sampling=rounds, **changes
        ) as trainer:
            trainer.train()
        names = [task.task_id for task in trainer._batch.tasks]
        seen.add(tuple(names))
        entry = steps(trainer)[0]
        if rounds:
            assert names == ["steeper"] * 2 + ["steep"] * 2
            assert [t.task.task_id for t in trainer._batch.trajectories] == names
            assert (entry["groups/flat_fraction"], entry["groups/flat_fraction_refilled"]) == (0.5, 0)
            assert entry["frac_reward_zero_std"] == 0
            assert set(trainer._logs["rewards"]["by_task"]) == {0.0, 1.0}
        else:
            assert names == ["flat"] * 2 + ["steep"] * 2
            assert entry["frac_reward_zero_std"] == 0.5
    assert len(seen) == 2


def test_kinds_of_tasks_whose_attempts_differ_are_attempted_more(tmp_path: Path, adding_model: str) -> None:
    rows = [
        {**ROWS[0], "task_id": f"{family}-{number}", "family": family}
        for number in range(10)
        for family in ("flat", "steep")
    ]
    seen: list[list[str]] = []

    def by_family(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        seen.append([t.task.metadata["family"] for t in trajectory])
        return [0.0 if t.task.metadata["family"] == "flat" else float(i % 2) for i, t in enumerate(trajectory)]

    changes = {**PAIR, "per_device_train_batch_size": 8, "shuffle_dataset": False, "max_steps": 4}
    with make_trainer(tmp_path, adding_model, Spy, by_family, rows=rows, task_choice="spread", **changes) as trainer:
        trainer.train()
    proposed = ["flat", "flat", "steep", "steep"] * 2
    assert seen[0] == proposed  # nothing is known yet
    shares = [batch.count("steep") / 8 for batch in seen]
    assert shares[-1] > 0.5
    exchanged = [entry["tasks/exchanged_fraction"] for entry in steps(trainer)]
    assert exchanged[0] == 0
    assert all(more >= share - 0.5 for more, share in zip(exchanged, shares, strict=True))
    assert trainer._collector.choice.num_choices == 4
    assert {t.task.task_id for t in trainer._batch.trajectories} == {row["task_id"] for row in trainer._batch.rows}


@pytest.mark.parametrize(("max_steps", "is_said"), [(4, True), (5, False)])
def test_tasks_that_cannot_be_told_apart_are_said(
    tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture, max_steps: int, is_said: bool
) -> None:
    rows = [{**ROWS[0], "task_id": f"task-{number}"} for number in range(8)]
    changes = {**PAIR, "per_device_train_batch_size": 4, "max_steps": max_steps}  # two groups a step
    make_trainer(tmp_path, adding_model, rows=rows, task_choice="spread", **changes).close()
    assert ("has nothing to go by: all 8 tasks" in caplog.text) == is_said


@pytest.mark.parametrize("mode", ["group", "group_turn"])
def test_rewards_that_change_their_mind_are_asked_once_and_turns_are_compared_where_they_count(
    tmp_path: Path, adding_model: str, mode: str
) -> None:
    asked: list[str] = []

    def fickle(trajectory: list[Trajectory], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[list[float]]:
        """Totals of 1, of which each attempt gets more of in its first turn than the one asked about before."""
        rewards = []
        for one in trajectory:
            asked.append(one.task.task_id)
            first = len(asked) / 100
            rewards.append([first, *[0.0] * (one.num_turns - 2), 1 - first] if one.num_turns > 1 else [1.0])
        log_extra("asked", list(range(len(trajectory))))
        log_metric("asked/number", float(len(trajectory)))
        return rewards

    changes = {**PAIR, "max_steps": 1, "advantage_mode": mode, "log_completions": True, "temperature": 0.1}
    with make_trainer(tmp_path, adding_model, Spy, fickle, dynamic_sampling=1, **changes) as trainer:
        trainer.train()
    entry = steps(trainer)[0]
    has_spread = mode == "group_turn" and entry["groups/flat_fraction"] == 0
    assert all(t.num_turns > 1 for t in trainer._batch.trajectories)
    assert has_spread == (mode == "group_turn")
    assert len(asked) == (2 if has_spread else 4)
    given = trainer._turn_rewards.given[0]
    assert [turns[0] for turns in given] == pytest.approx([len(asked) / 100 - 0.01, len(asked) / 100])
    assert list(trainer._logs["extra"]["asked"]) == [0, 1]
    assert entry["asked/number"] == 2


@pytest.mark.full
def test_replacing_groups_ends_though_none_has_spread(tmp_path: Path, adding_model: str) -> None:
    calls = []

    def same(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        calls.append(len(trajectory))
        return [1.0] * len(trajectory)

    with make_trainer(tmp_path, adding_model, reward=same, dynamic_sampling=2, max_steps=1, **PAIR) as trainer:
        trainer.train()
    assert calls == [2, 2, 2]  # before, and after each of two rounds; nothing is scored twice
    assert steps(trainer)[0]["groups/flat_fraction_refilled"] == 1


# ---- Ends ----


@pytest.mark.parametrize("truncation", ["terminal", "mask", "bootstrap"])
def test_what_ran_out_of_turns_is_an_end_or_left_out_or_valued(
    tmp_path: Path, adding_model: str, truncation: str, settled: list[Settled]
) -> None:
    changes = {"advantage_mode": "gae", "max_turns": 1, "max_steps": 1, "truncation": truncation, "gamma": 0.5}
    with make_trainer(tmp_path, adding_model, Spy, **changes) as trainer:
        if truncation == "bootstrap":
            torch.nn.init.constant_(trainer._values.head.out.bias, 3.0)
        trainer.train()
    batch = trainer.batches[0]
    cut = torch.tensor([t.is_cut for t in trainer._batch.trajectories])
    assert cut.any()
    entry = steps(trainer)[0]
    if truncation == "mask":
        assert entry["rollout/left_out_fraction"] == pytest.approx(cut.float().mean().item())
        rows_in_loss = (batch["completion_mask"] * batch["tool_mask"]).sum(1) > 0
        assert rows_in_loss.sum() == (~cut).sum()
    else:
        assert entry["rollout/left_out_fraction"] == 0
        # The one turn is worth its reward, 0, and what would have followed.
        expected = 0.5 * 3.0 if truncation == "bootstrap" else 0.0
        returns = settled[-1].inputs["turn_returns"][:, 0]
        assert sorted(returns.tolist())[-int(cut.sum()) :] == pytest.approx([expected] * int(cut.sum()))
    if truncation == "bootstrap":  # the turn has ended; the head is trained up to its last token, and not after it
        assert batch["ends_turn"].tolist() == [1.0] * len(batch["is_cut"])


# ---- Bootstrap ----


@pytest.mark.parametrize(("imitation_coef", "entropy_coef"), [(None, None), full(0.01, 0.001)])
def test_help_with_the_format_fades_and_is_exactly_gone_at_the_end(
    tmp_path: Path, adding_model: str, imitation_coef: float | None, entropy_coef: float | None
) -> None:
    given = {"bootstrap_imitation_coef": imitation_coef, "bootstrap_entropy_coef": entropy_coef}
    changes: dict[str, Any] = {"max_steps": 1, "bootstrap_steps": 10, "learning_rate": 0.0}
    changes |= {name: value for name, value in given.items() if value is not None}

    class Helped(Spy):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "needs_bootstrap": torch.tensor(1.0)}

    with make_trainer(tmp_path, adding_model, Helped, **changes) as trainer:
        trainer.train()
        batch = trainer.batches[0]
        batch["imitated"], batch["num_imitated"] = batch["forced"], batch["forced"].sum()
        plain = {k: v for k, v in batch.items() if k not in ("needs_bootstrap", "imitated")}
        with torch.no_grad():
            expected, trainer.losses = trainer._compute_loss(trainer.model.train(), plain), []
            for step in (0, 5, 10, 11):
                trainer.state.global_step = step
                trainer.losses.append(trainer._compute_loss(trainer.model, batch))
            imitation = -(trainer.logps * batch["forced"]).sum() / batch["forced"].sum()
    first, half, *gone = (loss - expected for loss in trainer.losses)
    assert all(torch.equal(loss, expected) for loss in trainer.losses[2:])
    assert all(loss == 0 for loss in gone)
    assert first.item() == pytest.approx(2 * half.item(), rel=1e-3)
    entropy = trainer._metrics["train"]["entropy"][-1]
    expected_help = (imitation_coef or 0.05) * imitation.item() - (entropy_coef or 0.01) * entropy
    assert first.item() == pytest.approx(expected_help, rel=1e-3)
    assert trainer.entropy_coef == 0


@pytest.mark.full
def test_a_policy_whose_calls_are_valid_gets_no_help(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, Spy, max_steps=1, bootstrap_steps=10, temperature=0.1) as trainer:
        trainer.train()
    assert steps(trainer)[0]["tools/valid_rate"] == 1
    assert steps(trainer)[0]["bootstrap/is_needed"] == 0


# ---- Health ----


def test_a_run_that_cannot_learn_says_so(tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture) -> None:
    def same(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [1.0] * len(trajectory)

    with make_trainer(tmp_path, adding_model, reward=same, max_steps=4, constants=IMPATIENT, **PAIR) as trainer:
        trainer.train()
    said = [record.message for record in caplog.records if "same reward" in record.message]
    assert len(said) == 1
    assert "dynamic_sampling" in said[0]


@pytest.mark.full
def test_a_strict_run_stops_with_the_reason_and_a_checkpoint(tmp_path: Path, adding_model: str) -> None:
    class Misaligned(Spy):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            shifted = batch["sampling_per_token_logps"] - 0.1
            return {**batch, "sampling_per_token_logps": shifted, "old_per_token_logps": shifted}

    with (
        make_trainer(
            tmp_path,
            adding_model,
            Misaligned,
            on_unhealthy="strict",
            constants=IMPATIENT,
            save_strategy="steps",
            save_steps=100,
        ) as trainer,
        pytest.raises(
            HealthError, match=r"the ratio of the policy to the sampler should be 1, but its median is 1\.105"
        ),
    ):
        trainer.train()
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists()


def test_a_run_whose_trajectories_are_cut_before_their_answer_says_which_setting_cuts(
    tmp_path: Path, adding_model: str
) -> None:
    with (
        make_trainer(
            tmp_path, adding_model, max_turns=1, max_steps=3, on_unhealthy="strict", constants=IMPATIENT
        ) as trainer,
        pytest.raises(HealthError, match=r"cut before their answer \(now \d+% by .*, (\d\d|100)% by `max_turns`\)"),
    ):
        trainer.train()


def test_a_ratio_of_one_is_explained_once(tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="mcp_grpo"), make_trainer(tmp_path, adding_model, **PAIR) as trainer:
        trainer.train()
    assert sum("ratios are 1 and the loss is near 0. That is right" in r.message for r in caplog.records) == 1


# ---- What changes nothing ----


@pytest.mark.parametrize("gradient_checkpointing", [False, full(True)])
def test_an_adapter_trains_bit_by_bit_the_same_without_casts_there_and_back(
    tmp_path: Path, adding_model: str, monkeypatch: pytest.MonkeyPatch, gradient_checkpointing: bool
) -> None:
    def first_is_better(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [float(i == 0) for i in range(len(trajectory))]

    def lora_weights(model: Any) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in model.named_parameters() if "lora_" in name}

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(adding_model, dtype=torch.bfloat16)
        adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
        changes = {"bf16": True, "gradient_checkpointing": gradient_checkpointing, "beta": 0.05, "temperature": 4.0}
        # Few tokens: a CPU may only imitate bf16.
        few = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 16}
        with make_trainer(
            folder, model, OneByOne, reward=first_is_better, peft_config=adapter, **changes, **few
        ) as trainer:
            start = lora_weights(trainer.model)
            trainer.train()
            end = lora_weights(trainer.model)
        assert not any(torch.equal(start[name], end[name]) for name in start)
        return end

    casts = []
    cast = BaseTunerLayer._cast_input_dtype

    def counted(layer: Any, x: Any, dtype: Any) -> Any:
        result = cast(layer, x, dtype)
        casts.append(result is not x)
        return result

    monkeypatch.setattr(BaseTunerLayer, "_cast_input_dtype", counted)
    lean = weights(tmp_path / "lean")
    num_lean = sum(casts)
    monkeypatch.setattr("mcp_grpo.trainer.has_plain_adapter", lambda model: False)
    usual = weights(tmp_path / "usual")
    assert sum(casts) - num_lean > num_lean
    assert all(torch.equal(lean[name], usual[name]) for name in usual)


@pytest.mark.parametrize("bootstrap_steps", [0, full(5)])
def test_calls_that_cannot_be_made_are_no_sign_while_they_are_being_learnt(
    tmp_path: Path, adding_model: str, bootstrap_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"schema_mask": "syntax", "bootstrap_steps": bootstrap_steps, "max_steps": 1}
    with make_trainer(tmp_path, adding_model, **changes) as trainer:
        seen: list[set[str]] = []
        monkeypatch.setattr(
            trainer._monitor.health, "check", lambda figures, **kwargs: seen.append(set(figures)) or []
        )
        trainer.train()
    assert ["tools/valid_rate" in figures for figures in seen] == [bootstrap_steps == 0]
    assert all("tools/call_frequency" in figures for figures in seen)
