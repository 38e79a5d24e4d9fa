"""Signs that a run cannot learn, each with a sentence that says what to do."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcp_grpo.errors import HealthError


logger = logging.getLogger(__name__)

MAX_RATIO_DIFFERENCE = 0.02
MIN_ALIGNMENT = 0.99
MIN_ACTIVE_FRACTION = 0.5
MIN_VALID_RATE = 0.5
MAX_CUT_FRACTION = 0.5
MAX_FLAT_FRACTION = 0.5
PATIENCE = 3  # batches in a row, where one may be bad luck
EV_WINDOW = 10  # steps
MAX_EV_DROP = 0.3

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """Something that should not be: what it is told by, when it shows, for how many times in a row, and what to say."""

    name: str
    keys: tuple[str, ...]
    shows: Callable[[Metrics], bool]
    sentence: Callable[[Metrics], str]
    patience: int = 1


_SIGNS = (
    _Sign(
        name="ratio",
        keys=("align/score", "ratio/p50"),  # the former only before any update
        shows=lambda m: abs(m["ratio/p50"] - 1) > MAX_RATIO_DIFFERENCE,
        sentence=lambda m: (
            f"Before any update, the ratio of the policy to the sampler should be 1, but its median is {m['ratio/p50']:.3f}: "
            "the sampler and the trainer do not see the same model, prompt or temperature. Check that nothing changes the "
            "weights, the template or the logits of only one of them."
        ),
    ),
    _Sign(
        name="alignment",
        keys=("align/score",),
        shows=lambda m: m["align/score"] < MIN_ALIGNMENT,
        sentence=lambda m: (
            f"Only {m['align/score']:.1%} of the tokens have the same log-probability in sampler and trainer (mean "
            f"difference {m['align/logp_mae']:.3f} nats). Use the same precision on both sides (try `bf16=False`, or "
            "`cast_lm_head_to_fp32=True`), and no quantisation or dropout on only one."
        ),
    ),
    _Sign(
        name="active fraction",
        keys=("mask/in_loss_fraction",),
        shows=lambda m: m["mask/in_loss_fraction"] < MIN_ACTIVE_FRACTION,
        sentence=lambda m: (
            f"The policy loss sees only {m['mask/in_loss_fraction']:.0%} of the sampled tokens; the schema mask leaves out the "
            'rest. Raise `schema_mask_min_prob` or `min_unforced_fraction`, or set `schema_mask="off"`.'
        ),
        patience=PATIENCE,
    ),
    _Sign(  # before the next, which would hide it
        name="cuts",
        keys=("stop/max_tokens", "stop/max_turns", "frac_reward_zero_std"),
        # Not by itself: some tasks have no answer, and are rewarded all the same.
        shows=lambda m: (
            m["stop/max_tokens"] + m["stop/max_turns"] > MAX_CUT_FRACTION
            and m["frac_reward_zero_std"] > MAX_FLAT_FRACTION
        ),
        sentence=lambda m: (
            f"In {PATIENCE} batches in a row, more than half of the trajectories were cut before their answer (now "
            f"{m['stop/max_tokens']:.0%} by `max_completion_length`, {m['stop/max_turns']:.0%} by `max_turns`), and more than "
            "half of the groups had nothing to learn from: their tasks may need more than they are given. Raise the setting "
            "that cuts most, or lower `max_result_tokens` or `max_turn_tokens`, so that one result or one turn does not take "
            "all of it."
        ),
        patience=PATIENCE,
    ),
    _Sign(
        name="spread",
        keys=("frac_reward_zero_std", "reward"),
        shows=lambda m: m["frac_reward_zero_std"] == 1,
        sentence=lambda m: (
            f"In {PATIENCE} batches in a row, all attempts of each group had the same reward (mean {m['reward']:.2f}), so there "
            "was nothing to learn. Use tasks that the policy solves sometimes, a reward with more steps, a higher "
            "`temperature` or `num_generations`, or `dynamic_sampling`."
        ),
        patience=PATIENCE,
    ),
    _Sign(
        name="tools",
        keys=("tools/call_frequency",),
        shows=lambda m: m["tools/call_frequency"] == 0,
        sentence=lambda _: (
            f"In {PATIENCE} batches in a row, no tool was called. Say in the prompt that tools are to be used, train on calls "
            "first, or set `first_call_retries` and `bootstrap_steps`."
        ),
        patience=PATIENCE,
    ),
    _Sign(
        name="calls",
        keys=("tools/valid_rate",),
        shows=lambda m: m["tools/valid_rate"] < MIN_VALID_RATE,
        sentence=lambda m: (
            f"In {PATIENCE} batches in a row, less than half of the tool calls could be made (now {m['tools/valid_rate']:.0%}): "
            "their syntax, tool or arguments are wrong. A policy that is punished for that may learn to call none. Warm it up "
            "on solutions first (`recipes/sft_warmup.py`), or set `bootstrap_steps` or `constrained_decoding`."
        ),
        patience=PATIENCE,
    ),
)


class Health:
    """
    Looks at the figures of each step, and says once what is wrong.

    Args:
        is_strict (`bool`, *optional*, defaults to `False`):
            Whether to raise an error instead of a warning.
    """

    def __init__(self, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._counts: dict[str, int] = {}
        self._explained: deque[float] = deque(maxlen=2 * EV_WINDOW)

    def check(self, metrics: Metrics, *, is_on_policy: bool = False) -> None:
        """
        Look at one step.

        Args:
            metrics (`Mapping[str, float]`):
                Its own figures. Those of a batch are only there in the step that rolled it out.
            is_on_policy (`bool`, *optional*, defaults to `False`):
                Whether each batch is used for one update, so that every ratio is 1.

        Raises:
            [`HealthError`]: If something is wrong, and it is strict.
        """
        if is_on_policy and "note" not in self._counts:
            self._counts["note"] = 1
            logger.info(
                "Each batch is used for one update, by the policy that sampled it: ratios are 1 and the loss is near 0. That "
                "is right, and the gradient is not 0. Judge by reward, KL divergence and gradient norm."
            )
        for sign in _SIGNS:
            count = self._counts.get(sign.name, 0)
            if count >= sign.patience or not all(key in metrics for key in sign.keys):
                continue  # said before, or nothing new to tell by
            self._counts[sign.name] = count + 1 if sign.shows(metrics) else 0
            if self._counts[sign.name] == sign.patience:
                self._say(sign.sentence(metrics))
        self._check_value(metrics.get("value/explained_variance"))

    def _check_value(self, explained: float | None) -> None:
        if explained is None or "value" in self._counts:
            return
        self._explained.append(explained)
        if len(self._explained) < 2 * EV_WINDOW:
            return
        values = list(self._explained)
        before, now = sum(values[:EV_WINDOW]) / EV_WINDOW, sum(values[EV_WINDOW:]) / EV_WINDOW
        if now < 0 and before - now > MAX_EV_DROP:
            self._counts["value"] = 1
            self._say(
                f"The value head explains less and less of the returns ({before:.2f}, then {now:.2f}): it falls behind the "
                'policy. Raise `value_learning_rate`, lower `learning_rate`, or use `advantage_mode="group_turn"`, which '
                "needs none."
            )

    def _say(self, sentence: str) -> None:
        if self._is_strict:
            raise HealthError(sentence)
        logger.warning(sentence)

    def state_dict(self) -> dict:
        """What has been said, and seen."""
        return {"counts": dict(self._counts), "explained": list(self._explained)}

    def load_state_dict(self, state: Mapping) -> None:
        """
        Go on from an earlier run.

        Args:
            state (`Mapping`):
                From [`state_dict`].
        """
        self._counts = dict(state["counts"])
        self._explained = deque(state["explained"], maxlen=2 * EV_WINDOW)
