"""Where the advantages of a run come from: what its settings say or, with `"auto"`, what its rewards call for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


AUTO, GROUP, GROUP_TURN = "auto", "group", "group_turn"
GAMMA = 0.99  # where nothing else is said
NEAR_GAMMA = 0.5  # where `"auto"` chose `"group_turn"`: with it, paid turns were shown to be learnt faster


class Credit:
    """
    Knows the `advantage_mode` and the `gamma` of a run. With `"auto"` it looks at what turns are given, and chooses.

    `"auto"` begins as `"group"`, which is TRL's. With the first batch in which a turn before a trajectory's last is paid, it becomes
    `"group_turn"`, and stays it. Penalties alone do not make it that: no gain was shown from judging them turn by turn.

    Args:
        mode (`str`):
            The setting `advantage_mode`.
        gamma (`float`, *optional*):
            The setting `gamma`; `None` chooses.
        names (`Sequence[str]`):
            Names of the reward functions.
        hindrance (`str`, *optional*):
            Why turns cannot be judged by themselves, if so.

    Attributes:
        mode (`str`):
            The mode that counts now; never `"auto"`.
        gamma (`float`):
            The discount that counts now.
    """

    def __init__(self, mode: str, gamma: float | None, names: Sequence[str], hindrance: str | None = None) -> None:
        self._is_auto, self._gamma, self._names, self._hindrance = mode == AUTO, gamma, list(names), hindrance
        self._rewarding: str | None = None  # a function that gives rewards to single turns, and one that pays them
        self._paying: str | None = None
        self.mode = GROUP if self._is_auto else mode
        self.gamma = GAMMA if gamma is None else gamma

    @property
    def is_open(self) -> bool:
        """Return whether rewards may still change the mode."""
        return self._is_auto and self._paying is None

    def look(self, given: Mapping[int, Sequence[Sequence[float] | None]], gather: Callable[[Any], Any]) -> None:
        """
        Choose by what the turns of a batch were given, as long as nothing was chosen. All processes call it together.

        Args:
            given (`Mapping[int, Sequence[Sequence[float] | None]]`):
                For each reward function, the rewards of the turns of each trajectory of this process; `None` for one that got a
                single reward.
            gather (`Callable[[torch.Tensor], torch.Tensor]`):
                Puts the rows of all processes one after another.
        """
        if not self.is_open:
            return
        found = torch.zeros(1, 2, len(self._names))
        for index, trajectories in given.items():
            listed = [turns for turns in trajectories if turns is not None]
            found[0, 0, index] = bool(listed)
            found[0, 1, index] = any(reward > 0 for turns in listed for reward in turns[:-1])
        rewarding, paying = (row.nonzero().flatten().tolist() for row in gather(found).amax(dim=0))
        if rewarding:
            self._rewarding = self._names[rewarding[0]]
        if paying:
            self._choose(self._names[paying[0]])

    def _choose(self, paying: str) -> None:
        self._rewarding = self._paying = paying
        if self._hindrance is None:
            self.mode, self.gamma = GROUP_TURN, NEAR_GAMMA if self._gamma is None else self._gamma

    @property
    def sentence(self) -> str | None:
        """Return what `"auto"` has chosen, and why."""
        if not self._is_auto:
            return None
        if self._rewarding is None:
            return "Advantages are those of whole trajectories (`group`), as no reward function rewards single turns."
        if self._paying is None:
            return (
                f"Rewards of turns are added up (`group`): {self._rewarding!r} has paid no turn before the last so far, and for "
                "penalties alone no gain was shown from judging each turn by itself (`advantage_mode='group_turn'`)."
            )
        if self._hindrance is not None:
            return f"Rewards of turns are added up (`group`), though {self._paying!r} pays single turns: {self._hindrance}."
        return (
            f"Each turn is judged by what came of it (`group_turn`, `gamma={self.gamma:g}`), as {self._paying!r} pays single "
            "turns; `advantage_mode='group'` adds their rewards up."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as this one would."""
        return {"rewarding": self._rewarding, "paying": self._paying}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the choice of the run that goes on."""
        if not self._is_auto:
            return
        self._rewarding = state["rewarding"]
        if state["paying"] is not None:
            self._choose(state["paying"])
