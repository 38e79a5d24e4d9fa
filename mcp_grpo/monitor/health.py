"""Signs that a run cannot learn, or no longer does, each with a sentence that says what to do."""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


logger = logging.getLogger(__name__)


MAX_RATIO_DIFFERENCE = 0.02
MIN_ALIGNMENT = 0.95  # of tokens; bf16 on both sides, by different kernels, was seen to agree on 97 to 99 %
MAX_DIFFERENCE = 0.5  # nats per token, which no rounding explains: 0.003 was seen in bf16
MIN_ACTIVE_FRACTION = 0.5
MIN_VALID_RATE = 0.5
MAX_CUT_FRACTION = 0.5
MAX_FLAT_FRACTION = 0.5
MAX_IDLE_FRACTION = 2 / 3  # of the groups, over `FLAT_WINDOW` batches
FLAT_WINDOW = 10
PATIENCE = 5  # batches in a row, where one may be bad luck
LONG = 2  # times as many, before a run is stopped for one thing alone
VERY_LONG = 4
WINDOW = 5  # batches that the start of a run, and what it is now, are averaged over
MIN_ENTROPY_LEFT = 0.25  # of what it was at the start
MIN_RISE = 0.05  # of the reward, to be called a rise
MAX_CUT_RISE = 0.15
MAX_CUT_JUMP = 0.5  # since the first batch, which alone is from before any update
MAX_ANSWER_FALL = 0.15
MAX_KL_OF_TARGET = 3.0
EV_WINDOW = 10  # steps
MAX_EV_DROP = 0.3

CUTS = ("stop/max_tokens", "stop/max_turns")
TRENDS = ("entropy", "reward", "stop/answered", "cuts", "endless")
CALLS = "tools/call_frequency"
MIN_CALLS_LEFT = 0.5  # of the first batch's

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthNote:
    """
    Something that was said about the health of a run.

    Args:
        step (`int`):
            Step at which it was said.
        name (`str`):
            Name of the sign; it is logged as `health/<name>` while it shows.
        sentence (`str`):
            What is wrong, and what to do.
        is_fatal (`bool`):
            Whether it is a reason to stop the run.
        since (`int`, *optional*):
            Of a policy that has got worse: a step from which it may have been so. `None` if it was never better, and of other signs.
    """

    step: int
    name: str
    sentence: str
    is_fatal: bool
    since: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """A sign of ill health: the metrics it needs, when it shows, for how long it is borne, what to say, and whether it is of a fall."""

    name: str
    keys: tuple[str, ...]
    shows: Callable[[Metrics], bool]
    sentence: Callable[[Metrics], str]
    patience: int = 1  # times that of the run; 0 for what is never bad luck
    is_fatal: bool = False
    is_fall: bool = False


@dataclass(slots=True)
class _Trend:
    """The course of a metric: its mean over the first batches, over the last ones, and the best that the latter was."""

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    best: float = -math.inf

    def add(self, value: float) -> None:
        if len(self.first) < WINDOW:
            self.first.append(value)
        self.last = [*self.last, value][-WINDOW:]
        if len(self.last) == WINDOW:
            self.best = max(self.best, self.now)

    @property
    def start(self) -> float:
        return sum(self.first) / len(self.first)

    @property
    def now(self) -> float:
        return sum(self.last) / len(self.last)


def _has_risen(m: Metrics) -> bool:
    """Return whether the reward has risen, and has not fallen again."""
    return m["now/reward"] > m["start/reward"] + MIN_RISE and m["now/reward"] > m["best/reward"] - MIN_RISE


def _is_narrow(m: Metrics) -> bool:
    return m["now/entropy"] < MIN_ENTROPY_LEFT * m["start/entropy"]


def _is_cut_more(m: Metrics) -> bool:
    """Return whether more are cut than at the start, or far more than in the first batch: a collapse may take two updates."""
    return m["now/cuts"] > min(m["start/cuts"] + MAX_CUT_RISE, m["first/cuts"] + MAX_CUT_JUMP)


def _cuts_before(m: Metrics) -> float:
    """Return what was cut before more were."""
    return min(m["start/cuts"], m["first/cuts"])


def _has_collapsed(m: Metrics) -> bool:
    has_fallen = m["now/reward"] < m["best/reward"] - max(MIN_RISE, 0.5 * abs(m["best/reward"]))
    # Whatever it is paid for it. Not by turns, which a policy may well use up in a game.
    is_endless = m["now/endless"] > min(m["start/endless"] + 2 * MAX_CUT_RISE, m["first/endless"] + MAX_CUT_JUMP)
    return _is_narrow(m) and (is_endless or (not _has_risen(m) and (_is_cut_more(m) or has_fallen)))


_TREND_KEYS = (*(f"now/{name}" for name in TRENDS), "first/cuts")
_GO_BACK = "Go on from a checkpoint before the fall, or start anew."
_LESS_DRASTIC = "Lower `learning_rate`, raise `beta` so that a reference holds the policy, or set `entropy_coef` (0.001 is a start)."

_LOOK = (
    "Look at what it writes (`--debug`, or `trainer.roll_out(tasks)` and `print(explain(trajectory))`). If it does not know "
    "how to call tools, or writes calls in another form than its chat template, train it on solutions first "
    "(`recipes/sft_warmup.py`); if it could, say in the prompt that tools are to be used, or set `bootstrap_steps`."
)
_ASK = "Say in the prompt that tools are to be used, train on calls first, or set `bootstrap_steps`."


def _what_calls_need(m: Metrics, otherwise: str = _LOOK) -> str:
    """Say what to do where no tool is called, by whether any was called in the first batch."""
    before = m.get(f"first/{CALLS}", 0.0)
    if not before:
        return otherwise
    return (
        f"It called some before it was trained ({before:.2g} calls a trajectory), and has unlearnt it. {_LESS_DRASTIC} "
        f"{_GO_BACK}"
    )


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
        patience=0,
        is_fatal=True,
    ),
    _Sign(
        name="other_policy",
        keys=("align/score", "align/logp_mae"),
        shows=lambda m: m["align/logp_mae"] > MAX_DIFFERENCE,
        sentence=lambda m: (
            f"Before any update, the log-probabilities of sampler and trainer are {m['align/logp_mae']:.1f} nats per token apart, "
            "which no rounding explains: what was sampled does not come from the policy. If `vllm_engine_kwargs` changes how "
            "vLLM samples (`speculative_config`, a quantisation of its own), leave that out; otherwise check what changes the "
            "weights, the template or the logits of only one of them."
        ),
        patience=0,
        is_fatal=True,
    ),
    _Sign(
        name="alignment",
        keys=("align/score", "align/logp_mae"),
        shows=lambda m: m["align/score"] < MIN_ALIGNMENT and m["align/logp_mae"] <= MAX_DIFFERENCE,
        sentence=lambda m: (
            f"Only {m['align/score']:.1%} of the tokens have the same log-probability in sampler and trainer (mean "
            f"difference {m['align/logp_mae']:.3f} nats). Use the same precision on both sides (try `bf16=False`, or "
            "`cast_lm_head_to_fp32=True`), and no quantisation or dropout on only one."
        ),
        patience=0,
    ),
    _Sign(
        name="active_fraction",
        keys=("mask/in_loss_fraction",),
        shows=lambda m: m["mask/in_loss_fraction"] < MIN_ACTIVE_FRACTION,
        sentence=lambda m: (
            f"The policy loss sees only {m['mask/in_loss_fraction']:.0%} of the sampled tokens; the schema mask leaves out the "
            'rest. Raise `schema_mask_min_prob` or `min_unforced_fraction`, or set `schema_mask="off"`.'
        ),
    ),
    _Sign(
        name="no_signal",
        keys=("tools/call_frequency", "is_flat", "reward"),
        shows=lambda m: m["tools/call_frequency"] == 0 and m["is_flat"] == 1,
        sentence=lambda m: (
            f"The policy called no tool, and all attempts of each group had the same reward (now {m['reward']:.2f}): there is "
            f"nothing to learn from. {_what_calls_need(m)}"
        ),
        is_fatal=True,
        is_fall=True,
    ),
    _Sign(
        name="never_calls",
        keys=("tools/call_frequency",),
        shows=lambda m: m["tools/call_frequency"] == 0,
        sentence=lambda m: f"The policy has called no tool. {_what_calls_need(m)}",
        patience=LONG,
        is_fatal=True,
        is_fall=True,
    ),
    _Sign(
        name="no_spread",
        keys=("is_flat", "reward"),
        shows=lambda m: m["is_flat"] == 1,
        sentence=lambda m: (
            f"All attempts of each group still have the same reward (now {m['reward']:.2f}): there is nothing to learn from. If "
            "that is the best reward there is, training is done. Otherwise use tasks that the policy solves sometimes, a reward "
            "with more steps, a higher `temperature` or `num_generations`, or `dynamic_sampling`."
        ),
        patience=VERY_LONG,
        is_fatal=True,
    ),
    _Sign(
        name="collapse",
        keys=_TREND_KEYS,
        shows=_has_collapsed,
        sentence=lambda m: (
            f"The policy has collapsed: its entropy fell from {m['start/entropy']:.2f} to {m['now/entropy']:.3f} nats, cut "
            f"trajectories went from {_cuts_before(m):.0%} to {m['now/cuts']:.0%}, and the reward is {m['now/reward']:.2f} "
            f"after {m['best/reward']:.2f} at its best. It repeats itself, and has little left to learn from. {_LESS_DRASTIC} "
            f"{_GO_BACK}"
        ),
        is_fatal=True,
        is_fall=True,
    ),
    _Sign(  # before the next, which would hide it
        name="cuts",
        keys=(*CUTS, "frac_reward_zero_std"),
        # Not by itself: some tasks have no answer, and are rewarded all the same.
        shows=lambda m: m["cuts"] > MAX_CUT_FRACTION and m["frac_reward_zero_std"] > MAX_FLAT_FRACTION,
        sentence=lambda m: (
            "More than half of the trajectories were cut before their answer (now "
            f"{m['stop/max_tokens']:.0%} by `max_completion_length`, {m['stop/max_turns']:.0%} by `max_turns`), and more than "
            "half of the groups had nothing to learn from: their tasks may need more than they are given. Raise the setting "
            "that cuts most, or lower `max_result_tokens` or `max_turn_tokens`, so that one result or one turn does not take "
            "all of it."
        ),
    ),
    _Sign(
        name="flat_groups",
        keys=("is_flat", "reward"),
        shows=lambda m: m["is_flat"] == 1,
        sentence=lambda m: (
            f"All attempts of each group had the same reward (mean {m['reward']:.2f}), so there was nothing to learn. Use tasks "
            "that the policy solves sometimes, a reward with more steps, a higher `temperature` or `num_generations`, or "
            "`dynamic_sampling`."
        ),
    ),
    _Sign(
        name="mostly_flat",
        keys=("now/flat", "reward"),
        shows=lambda m: MAX_IDLE_FRACTION < m["now/flat"] < 1,  # of all groups, another sign tells
        sentence=lambda m: (
            f"In {m['now/flat']:.0%} of the last groups, all attempts had the same reward (mean {m['reward']:.2f}), so that most of the "
            "work teaches nothing. If that is nearly the best reward there is, training is nearly done. Otherwise set "
            '`task_choice="spread"`, if tasks are of several kinds (column `family` or `difficulty`), use tasks that the policy '
            "solves sometimes, or set `dynamic_sampling`."
        ),
    ),
    _Sign(
        name="no_calls",
        keys=("tools/call_frequency",),
        shows=lambda m: m["tools/call_frequency"] == 0,
        sentence=lambda m: f"No tool was called. {_what_calls_need(m, _ASK)}",
    ),
    _Sign(
        name="invalid_calls",
        keys=("tools/valid_rate",),
        shows=lambda m: m["tools/valid_rate"] < MIN_VALID_RATE,
        sentence=lambda m: (
            f"Less than half of the tool calls could be made (now {m['tools/valid_rate']:.0%}): their syntax, tool or arguments "
            "are wrong. A policy that is punished for that may learn to call none. Warm it up on solutions first "
            "(`recipes/sft_warmup.py`), or set `bootstrap_steps` or `constrained_decoding`."
        ),
    ),
    _Sign(
        name="entropy",
        keys=_TREND_KEYS,
        shows=lambda m: _is_narrow(m) and not _has_risen(m),
        sentence=lambda m: (
            f"Entropy fell from {m['start/entropy']:.2f} to {m['now/entropy']:.3f} nats while the reward does not rise (now "
            f"{m['now/reward']:.2f}, {m['best/reward']:.2f} at its best): attempts become alike before the tasks are solved. "
            f"{_LESS_DRASTIC}"
        ),
    ),
    _Sign(
        name="rising_cuts",
        keys=_TREND_KEYS,
        shows=_is_cut_more,
        sentence=lambda m: (
            f"More and more trajectories are cut before they end by themselves ({_cuts_before(m):.0%} at the start, now "
            f"{m['now/cuts']:.0%}): the policy learns to go on without an end. Check that no reward is paid to a trajectory "
            '`stop_reason` of which is not "answered", lower `learning_rate`, or set `max_turn_tokens`.'
        ),
    ),
    _Sign(
        name="reward_without_answers",
        keys=_TREND_KEYS,
        shows=lambda m: (
            m["now/reward"] > m["start/reward"] + MIN_RISE
            and m["now/stop/answered"] < m["start/stop/answered"] - MAX_ANSWER_FALL
        ),
        sentence=lambda m: (
            f"The reward rises ({m['start/reward']:.2f} at the start, now {m['now/reward']:.2f}) while fewer trajectories end with "
            f"an answer ({m['start/stop/answered']:.0%}, now {m['now/stop/answered']:.0%}): something is rewarded that is not "
            "the task. Read some trajectories with a high reward (`--debug`), and pay only for what was asked."
        ),
    ),
    _Sign(
        name="kl",
        keys=("kl/active", "kl_target"),
        shows=lambda m: m["kl/active"] > MAX_KL_OF_TARGET * m["kl_target"],
        sentence=lambda m: (
            f"The policy runs away from its reference: {m['kl/active']:.2f} nats per token, over {MAX_KL_OF_TARGET:.0f} times "
            f"`kl_target` ({m['kl_target']:.2f}). Lower `learning_rate`, raise `beta`, or let the reference follow "
            '(`ref_sync="ema"`).'
        ),
    ),
)


class Health:
    """
    Look at the metrics of each step, and say once what is wrong.

    Args:
        reaction (`str`, *optional*, defaults to `"stop"`):
            `"stop"` ends the run for signs that it cannot learn any more, and warns of others; `"warn"` never ends it;
            `"strict"` ends it for every sign.
        patience (`int`, *optional*, defaults to `5`):
            Batches in a row in which a sign must show, where one may be bad luck.
    """

    def __init__(self, reaction: str = "stop", patience: int | None = None) -> None:
        self._reaction = reaction
        self._patience = PATIENCE if patience is None else patience
        self._counts: dict[str, int] = {}
        self._explained: deque[float] = deque(maxlen=2 * EV_WINDOW)
        self._flat: deque[float] = deque(maxlen=FLAT_WINDOW)
        self._num_batches = 0
        self._first_calls: float | None = None  # of the first batch, a trajectory
        self._steps: deque[int] = deque(maxlen=2 * WINDOW)  # of the last batches
        self._since: dict[str, int | None] = {}  # from which step signs of a fall show, while they do
        # Step from which every batch was cut far more, or called far less, than the first.
        self._worse_since: int | None = None
        self._trends = {name: _Trend() for name in TRENDS}
        self.notes: list[HealthNote] = []

    def check(self, metrics: Metrics, *, step: int = 0, is_on_policy: bool = False) -> list[HealthNote]:
        """
        Look at one step.

        Args:
            metrics (`Mapping[str, float]`):
                Its own metrics. Those of a batch are only there in the step that rolled it out.
            step (`int`, *optional*, defaults to `0`):
                The step.
            is_on_policy (`bool`, *optional*, defaults to `False`):
                Whether each batch is used for one update, so that every ratio is 1.

        Returns:
            `list[HealthNote]`: What there is to say now, and was not said before.
        """
        if is_on_policy and "note" not in self._counts:
            self._counts["note"] = 1
            logger.info(
                "Each batch is used for one update, by the policy that sampled it: ratios are 1 and the loss is near 0. That "
                "is right, and the gradient is not 0. Judge by reward, KL divergence and gradient norm."
            )
        seen = self._with_trends(metrics)
        if "reward" in metrics:
            self._steps.append(step)
            is_worse = "first/cuts" in seen and seen["cuts"] > seen["first/cuts"] + MAX_CUT_JUMP
            if CALLS in seen:
                self._first_calls = seen[CALLS] if self._first_calls is None else self._first_calls
                seen[f"first/{CALLS}"] = self._first_calls
                is_worse |= seen[CALLS] < MIN_CALLS_LEFT * self._first_calls
            self._worse_since = (self._worse_since or step) if is_worse else None
        said = [note for sign in _SIGNS if (note := self._check_sign(sign, seen, step))]
        said += self._check_value(metrics.get("value/explained_variance"), step)
        return said

    def note(
        self, name: str, sentence: str, step: int, *, is_fatal: bool = False, since: int | None = None
    ) -> HealthNote:
        """Remember that something is wrong, at a step; return the note."""
        stops = {"stop": is_fatal, "warn": False, "strict": True}[self._reaction]
        self.notes.append(HealthNote(step=step, name=name, sentence=sentence, is_fatal=stops, since=since))
        return self.notes[-1]

    @property
    def showing(self) -> list[str]:
        """Return the names of the signs that were said and still show."""
        return [sign.name for sign in _SIGNS if self._counts.get(sign.name, 0) >= self._needed(sign)]

    def _needed(self, sign: _Sign) -> int:
        return max(1, sign.patience * self._patience)

    def _check_sign(self, sign: _Sign, metrics: Metrics, step: int) -> HealthNote | None:
        if not all(key in metrics for key in sign.keys):
            return None  # nothing new to tell by
        self._counts[sign.name] = self._counts.get(sign.name, 0) + 1 if sign.shows(metrics) else 0
        if not (sign.is_fall and self._counts[sign.name]):
            self._since.pop(sign.name, None)
        elif sign.name not in self._since:
            self._since[sign.name] = self._began(sign, step)
        if self._counts[sign.name] < self._needed(sign) or any(note.name == sign.name for note in self.notes):
            return None
        sentence = sign.sentence(metrics)
        if sign.patience:
            sentence = f"In {self._needed(sign)} batches in a row: {sentence}"
        return self.note(sign.name, sentence, step, is_fatal=sign.is_fatal, since=self._fallen_since(sign))

    def _began(self, sign: _Sign, step: int) -> int | None:
        """Return from which step on the policy may have been worse; `None` if no batch came before that."""
        if len(self._steps) < 2:
            return None
        if not any(key.startswith("now/") for key in sign.keys):
            return step
        # An average falls after what it is an average of, and the first one may have fallen at any time since the first batch.
        return self._steps[1] if self._num_batches <= 2 * WINDOW else self._steps[-WINDOW]

    def _fallen_since(self, sign: _Sign) -> int | None:
        """Return the first step from which a sign shows that the policy got worse, if this one does."""
        if self._since.get(sign.name) is None:
            return None
        return min(step for step in (*self._since.values(), self._worse_since) if step is not None)

    def _with_trends(self, metrics: Metrics) -> dict[str, float]:
        """Add to the metrics of a batch what they were in the first one, were at the start, are now, and were at their best."""
        seen = dict(metrics)
        if "frac_reward_zero_std" in metrics:
            self._flat.append(metrics["frac_reward_zero_std"])
            if len(self._flat) == FLAT_WINDOW:
                seen["now/flat"] = sum(self._flat) / FLAT_WINDOW
        if all(key in metrics for key in CUTS):
            seen["endless"] = metrics["stop/max_tokens"] + metrics.get("stop/context_full", 0.0)
            seen["cuts"] = seen["endless"] + metrics["stop/max_turns"]
        if not all(name in seen for name in TRENDS):
            return seen
        self._num_batches += 1
        for name, trend in self._trends.items():
            trend.add(seen[name])
            seen[f"first/{name}"] = trend.first[0]
            if self._num_batches >= 2 * WINDOW:  # before, the start and now are the same batches
                seen |= {f"start/{name}": trend.start, f"now/{name}": trend.now, f"best/{name}": trend.best}
        return seen

    def _check_value(self, explained: float | None, step: int) -> list[HealthNote]:
        if explained is None or any(note.name == "value" for note in self.notes):
            return []
        self._explained.append(explained)
        if len(self._explained) < 2 * EV_WINDOW:
            return []
        values = list(self._explained)
        before, now = sum(values[:EV_WINDOW]) / EV_WINDOW, sum(values[EV_WINDOW:]) / EV_WINDOW
        if now >= 0 or before - now <= MAX_EV_DROP:
            return []
        sentence = (
            f"The value head explains less and less of the returns ({before:.2f}, then {now:.2f}): it falls behind the "
            'policy. Raise `value_learning_rate`, lower `learning_rate`, or use `advantage_mode="group_turn"`, which '
            "needs none."
        )
        return [self.note("value", sentence, step)]

    def state_dict(self) -> dict[str, Any]:
        """Return what has been said, and seen."""
        return {
            "counts": dict(self._counts),
            "num_batches": self._num_batches,
            "steps": list(self._steps),
            "since": dict(self._since),
            "worse_since": self._worse_since,
            "first_calls": self._first_calls,
            "explained": list(self._explained),
            "flat": list(self._flat),
            "trends": {name: asdict(trend) for name, trend in self._trends.items()},
            "notes": [asdict(note) for note in self.notes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from an earlier run. What it was stopped for is looked for anew: it may have been mended.

        Args:
            state (`Mapping[str, Any]`):
                From [`state_dict`].
        """
        notes = [HealthNote(**note) for note in state.get("notes", [])]
        stopped = {note.name for note in notes if note.is_fatal}
        self.notes = [note for note in notes if not note.is_fatal]
        self._counts = {name: 0 if name in stopped else count for name, count in state["counts"].items()}
        self._explained = deque(state["explained"], maxlen=2 * EV_WINDOW)
        self._flat = deque(state.get("flat", ()), maxlen=FLAT_WINDOW)
        self._steps = deque(state.get("steps", ()), maxlen=2 * WINDOW)
        self._since = dict(state.get("since", {}))
        self._worse_since, self._first_calls = state.get("worse_since"), state.get("first_calls", 0.0)
        if "trends" in state:  # not in the checkpoints of earlier versions
            self._num_batches = state["num_batches"]
            known = state["trends"]
            self._trends = {name: _Trend(**known.get(name, {})) for name in TRENDS}
