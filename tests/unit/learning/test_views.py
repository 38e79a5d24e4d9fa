"""Turns that were written in several contexts: their log-probabilities, values and gradients are those of each context."""

from typing import Any

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.policies import tiny_model

from mcp_grpo.learning import AsSeen, PromptSharing, SampledOnly, SharedPrompts, Unpadded, Views
from mcp_grpo.learning.value_head import add_value_head
from mcp_grpo.trl_compat import add_fused_lm_head
from mcp_grpo.types import Segment, StopReason, Task, Trajectory


TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))
PROMPT, OTHER = (11, 12, 13, 14), (21, 22, 23)
SHORT, NOTES = (11, 12, 13, 14, 1, 2, 90), (11, 12, 13, 95)


def wrote(*ids: int, context: tuple[int, ...] | None = None) -> Segment:
    return Segment(token_ids=ids, logprobs=(-1.0,) * len(ids), context_ids=context)


def trajectory(*segments: Segment, prompt: tuple[int, ...] = PROMPT) -> Trajectory:
    return Trajectory(
        task=TASK, prompt_ids=prompt, segments=segments, messages=(), exchanges=(), stop_reason=StopReason.MAX_TURNS
    )


# Three contexts; the third follows the second at once, as a summary does. Then one that has only one.
LONG = trajectory(
    wrote(1, 2),
    Segment(token_ids=(3, 4, 5)),
    wrote(6),
    Segment(token_ids=(7, 8)),
    wrote(9, 10, context=SHORT),
    wrote(31, 32, 33, context=NOTES),
    Segment(token_ids=(34,)),
    wrote(35),
)
PLAIN = trajectory(wrote(41, 42), Segment(token_ids=(43,)), wrote(44, 45, 46), prompt=OTHER)
ROWS = [LONG, PLAIN]


def test_the_views_of_a_trajectory_are_what_the_policy_saw() -> None:
    assert LONG.views == ((PROMPT, 0, 6), (SHORT, 8, 10), (NOTES, 10, 15))
    assert PLAIN.views == ((OTHER, 0, 6),)


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_model(family_tokenizer("qwen3")).double()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    add_value_head(model).double()
    torch.nn.init.normal_(model.value_head.out.weight)
    return model


def padded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """As TRL does it: prompts to the left, completions to the right."""
    left, right = max(len(t.prompt_ids) for t in ROWS) + 1, max(len(t.completion_ids) for t in ROWS) + 1
    ids, mask = (torch.zeros(len(ROWS), left + right, dtype=torch.long) for _ in range(2))
    for row, one in enumerate(ROWS):
        start = left - len(one.prompt_ids)
        tokens = torch.tensor(one.prompt_ids + one.completion_ids)
        ids[row, start : start + len(tokens)] = tokens
        mask[row, start : start + len(tokens)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :left] = -100
    return ids, mask, labels, right


def expected(model: Any, one: Trajectory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log-probability and entropy of each sampled token, and the value before it, context by context."""
    logps, entropies, values = ([torch.zeros(())] * len(one.completion_ids) for _ in range(3))
    for context_ids, start, end in one.views:
        ids = torch.tensor([context_ids + one.completion_ids[start:end]])
        output = model(input_ids=ids, labels=ids, fused_lm_head=True, num_values=ids.size(1))
        for place in range(start, end):
            at = len(context_ids) + place - start
            logps[place], entropies[place] = output.log_probs[0, at - 1], output.entropy[0, at - 1]
            values[place] = output.value_preds[0, at - 1]
    is_sampled = torch.tensor(one.sampled_mask)
    return tuple(torch.stack([v.double() for v in each]) * is_sampled for each in (logps, entropies, values))  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["as they are", "unpadded", "shared"])
@pytest.mark.parametrize("is_all", [True, False])
def test_each_turn_has_the_log_probs_values_and_gradients_of_its_context(
    model: Any, how: str, is_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_grpo.learning.shared_prompts.MIN_SHARED", 2)
    monkeypatch.setattr("mcp_grpo.learning.shared_prompts.MIN_SAVED", 0.01)
    views = Views()
    views.replace(ROWS, is_training=True)
    ids, mask, labels, width = padded()
    makers: dict[str, Any] = {
        "as they are": lambda num_tokens: model,
        "unpadded": lambda num_tokens: Unpadded(model),
        "shared": lambda num_tokens: SharedPrompts(model, Unpadded(model), num_tokens),
    }
    trees: list[Any] = []
    if how == "shared":
        assert PromptSharing(True).is_possible(model)
        trees = noted_trees(monkeypatch)
    seen: Any = AsSeen(makers[how], views, width)
    if not is_all:  # as tokens that tools wrote are left out
        is_sampled = torch.tensor([[*t.sampled_mask, *[0] * (width - len(t.sampled_mask))] for t in ROWS])
        seen = SampledOnly(seen, is_sampled, width)
    weights = torch.randn(3, len(ROWS), width, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    output = seen(input_ids=ids, attention_mask=mask, labels=labels, num_values=width + 1, fused_lm_head=True)
    assert how != "shared" or trees
    found = [output.log_probs[:, -width:], output.entropy[:, -width:], output.value_preds[:, :-1]]
    wanted = [torch.zeros(len(ROWS), width, dtype=torch.double) for _ in range(3)]
    is_sampled = torch.zeros(len(ROWS), width)
    for row, one in enumerate(ROWS):
        is_sampled[row, : len(one.sampled_mask)] = torch.tensor(one.sampled_mask)
        for table, values in zip(wanted, expected(model, one), strict=True):
            table[row, : len(values)] = values
    losses = []
    for table, others, weight in zip(found, wanted, weights, strict=True):
        torch.testing.assert_close(table.double() * is_sampled, others, rtol=1e-5, atol=1e-5)
        losses.append(((table.double() * is_sampled * weight).sum(), (others * weight).sum()))
    parameters = list(model.parameters())
    gradients = [
        torch.autograd.grad(sum(each), parameters, allow_unused=True)  # type: ignore[arg-type]
        for each in zip(*losses, strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def noted_trees(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the trees that are run."""
    seen: list[Any] = []
    pack = SharedPrompts.pack
    monkeypatch.setattr(
        SharedPrompts, "pack", lambda self, tree, *args, **kw: seen.append(tree) or pack(self, tree, *args, **kw)
    )
    return seen


def test_a_batch_is_forgotten_when_the_next_one_comes_and_evaluation_keeps_its_own() -> None:
    views = Views()
    assert not views
    views.replace(ROWS, is_training=True)
    views.replace([PLAIN], is_training=False)
    ids = torch.tensor(LONG.prompt_ids + LONG.completion_ids).numpy()
    assert views.of(ids) is not None
    views.replace([PLAIN], is_training=True)
    assert views.of(ids) is None
    assert not views
