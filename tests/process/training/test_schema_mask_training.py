"""Training with the syntax of tool calls masked: what leaves the loss, what stays, and what is logged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.marks import full
from helpers.runs import Attempting
from helpers.sums import ROWS, TEMPLATE_KWARGS
from servers.sums import server

from mcp_grpo import MCPGRPOConfig, exact_answer
from mcp_grpo.types import ResultKind, TokenRole, Trajectory


LOSSES = ["dapo", "grpo", "bnpo", "dr_grpo", "luspo", "sapo", "cispo", "vespo"]
HARD = {"schema_mask": "syntax", "schema_mask_min_prob": 0.0, "min_unforced_fraction": 0.0}


class Spy(Attempting):
    """Keeps what its loss was computed from."""

    seen: dict[str, Any]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.seen = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._pass is None:
            self.logps = output[0]
        return output


def trainer(folder: Path, model: str, kind: type[Spy] = Spy, **settings: Any) -> Spy:
    args = MCPGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=400,
        max_turns=3,
        learning_rate=0.0,
        max_steps=1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        chat_template_kwargs=TEMPLATE_KWARGS,
        **settings,
    )
    return kind(model, exact_answer, args, Dataset.from_list(ROWS), servers={"sums": server})


def gradient(of: Spy, **changes: Any) -> torch.Tensor:
    """The gradient of the loss of the batch that was seen, all parameters in a row."""
    of.model.train()
    of.model.zero_grad()
    of._compute_loss(of.model, {**of.seen, **changes}).backward()
    return torch.cat([p.grad.flatten() for p in of.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("mode", ["syntax", "grammar"])
def test_syntax_leaves_the_loss_and_its_denominator_and_nothing_else_does(
    tmp_path: Path, adding_model: str, mode: str
) -> None:
    with trainer(tmp_path, adding_model, **HARD | {"schema_mask": mode}) as spy:
        spy.train()
        inputs, trajectories = spy.seen, spy._batch.trajectories
    called = [t for t in trajectories if t.exchanges and not t.exchanges[0].result.is_error]
    assert called
    for attempt in called:
        assert attempt.roles is not None
        assert attempt.masked is not None
        assert attempt.masked == tuple(role is TokenRole.FORCED for role in attempt.roles)
        pieces = spy._collector.renderer.vocabulary.pieces(attempt.completion_ids)
        masked = b"".join(piece for piece, m in zip(pieces, attempt.masked, strict=True) if m)
        assert b'"name"' in masked
        assert b'"arguments"' in masked
        values = [i for i, piece in enumerate(pieces) if piece in (b"2", b"3")]
        assert not any(attempt.masked[i] for i in values)
    num_masked = sum(sum(attempt.masked or ()) for attempt in trajectories)
    num_sampled = sum(sum(attempt.sampled_mask) for attempt in trajectories)
    assert num_masked > 0
    assert (inputs["completion_mask"] * inputs["tool_mask"]).sum() == num_sampled - num_masked
    assert inputs["num_items_in_batch"] == num_sampled - num_masked
    assert inputs["masked"].sum() == num_masked
    logged = spy.state.log_history[0]
    assert logged["mask/masked_fraction"] == pytest.approx(num_masked / num_sampled)
    assert logged["mask/relaxed_fraction"] == 0


class FirstCallRefused(Spy):
    """Takes the calls of the first trajectory of a batch for ones that could not be made."""

    def attempt(self, *args: Any, **kwargs: Any) -> list[Trajectory]:
        first, *others = super().attempt(*args, **kwargs)
        refused = replace(first.exchanges[0].result, kind=ResultKind.INVALID_ARGUMENTS)
        exchanges = (replace(first.exchanges[0], result=refused),)
        return [replace(first, exchanges=exchanges, roles=None, masked=None), *others]


def test_a_masked_token_has_no_gradient_and_the_syntax_of_a_refused_call_has(
    tmp_path: Path, adding_model: str
) -> None:
    with trainer(tmp_path, adding_model, FirstCallRefused, **HARD) as spy:
        spy.train()
        inputs = {**spy.seen, "advantages": torch.ones_like(spy.seen["advantages"])}
        loss = spy._compute_loss(spy.model.train(), inputs)
        (gradients,) = torch.autograd.grad(loss, spy.logps)
    masked, sampled = inputs["masked"].bool(), torch.zeros_like(gradients, dtype=torch.bool)
    for row, attempt in enumerate(spy._batch.trajectories):
        sampled[row, : len(attempt.sampled_mask)] = torch.tensor(attempt.sampled_mask, dtype=torch.bool)
    # TRL shuffles the rows: the one that was refused is the one without a mask.
    order = [[t.completion_ids for t in spy._batch.trajectories].index(ids) for ids in completions(inputs)]
    sampled = sampled[order]
    assert TokenRole.FORCED not in (spy._batch.trajectories[0].roles or ())
    assert masked.any()
    assert (gradients[masked] == 0).all()
    assert (gradients[sampled & ~masked] != 0).all()
    unmasked_rows = [row for row in range(len(order)) if not masked[row].any()]
    assert unmasked_rows
    assert all((gradients[row][sampled[row]] != 0).all() for row in unmasked_rows)


def completions(inputs: dict[str, Any]) -> list[tuple[int, ...]]:
    """The completions of a batch, without padding."""
    rows = zip(inputs["completion_ids"].tolist(), inputs["completion_mask"].tolist(), strict=True)
    return [tuple(ids[: sum(mask)]) for ids, mask in rows]


@pytest.mark.parametrize("loss_type", [one if one == "dapo" else full(one) for one in LOSSES])
def test_masked_tokens_keep_their_kl_term_over_the_denominator_of_the_others(
    tmp_path: Path, adding_model: str, loss_type: str
) -> None:
    with trainer(tmp_path, adding_model, **HARD, beta=0.5, loss_type=loss_type) as spy:
        spy.train()
        inputs, model = spy.seen, spy.model.train()
        # Off the reference, or the term would be 0.
        inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] - 0.5
        inputs["advantages"] = torch.zeros_like(inputs["advantages"])
        with torch.no_grad():
            whole = spy._compute_loss(model, inputs)
            without = spy._compute_loss(model, {k: v for k, v in inputs.items() if k != "masked"})
            # The same in TRL's own hands, with no token masked: then its denominator counts them all, and is corrected.
            mask = inputs["completion_mask"] * inputs["tool_mask"]
            full = {k: v for k, v in inputs.items() if k != "masked"}
            full["tool_mask"] = inputs["tool_mask"] + inputs["masked"]
            if loss_type in ("grpo", "sapo"):  # means over the tokens of each row
                rows = [{k: v[i : i + 1] if v.dim() else v for k, v in full.items()} for i in range(len(mask))]
                counts = (full["tool_mask"] * inputs["completion_mask"]).sum(-1) / mask.sum(-1)
                expected = torch.stack([spy._compute_loss(model, row) for row in rows]).mul(counts).mean()
            elif loss_type == "bnpo":  # a mean over all tokens
                count = (full["tool_mask"] * inputs["completion_mask"]).sum() / mask.sum()
                expected = spy._compute_loss(model, full) * count
            else:  # their denominators do not look at the mask
                expected = spy._compute_loss(model, full)
        torch.testing.assert_close(whole, expected)
        assert whole > without > 0


@pytest.mark.parametrize(("policy", "call_format"), [("adding_model", "template"), ("fenced_adding_model", "json")])
def test_under_a_constraint_every_call_is_valid_and_what_it_forced_is_masked(
    tmp_path: Path, policy: str, call_format: str, request: pytest.FixtureRequest
) -> None:
    settings = HARD | {"schema_mask": "off", "constrained_decoding": True, "temperature": 1.5}
    settings["call_format"] = call_format
    with trainer(tmp_path, request.getfixturevalue(policy), **settings) as spy:
        spy.train()
        trajectories = spy._batch.trajectories
    logged = spy.state.log_history[0]
    assert logged["rollout/force_rate"] == 1
    assert logged["rollout/neg_log_allowed"] >= 0
    assert logged["tools/valid_rate"] == 1
    assert logged["mask/masked_fraction"] > 0
    for attempt in trajectories:
        for masked, logprob in zip(attempt.masked or (), attempt.logprobs, strict=True):
            assert not masked or logprob >= -1e-6
    # What the constraint cut away is no change of the policy: on-policy every ratio is 1, also where little was allowed.
    active = spy.seen["completion_mask"] * spy.seen["tool_mask"] > 0
    assert logged["rollout/neg_log_allowed"] > 0.01
    assert active.any()
    assert logged["ratio/std"] < 1e-3
    assert logged["align/score"] == 1


@pytest.mark.full
def test_sampling_is_free_unless_a_constraint_is_asked_for(tmp_path: Path, adding_model: str) -> None:
    with trainer(tmp_path, adding_model, schema_mask="grammar") as spy:
        spy.train()
    assert spy.state.log_history[0]["rollout/force_rate"] == 0
    assert all(segment.allowed_logprobs is None for attempt in spy._batch.trajectories for segment in attempt.segments)


@pytest.mark.full
def test_the_floor_fires_on_a_short_call_and_is_logged(tmp_path: Path, adding_model: str) -> None:
    settings = {"schema_mask": "syntax", "schema_mask_min_prob": 0.0, "min_unforced_fraction": 0.95}
    with trainer(tmp_path, adding_model, **settings) as spy:
        spy.train()
    logged = spy.state.log_history[0]
    assert logged["mask/relaxed_fraction"] > 0
    assert 0 < logged["mask/masked_fraction"] <= 0.05
