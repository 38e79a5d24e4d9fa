"""Calls that depend on each other, and the value that they come to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mcp_grpo.synth.selectors import Selector


Outcome = Literal["value", "difference", "nothing", "state"]


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is found in the result of an earlier call."""

    step: int
    selector: Selector
    is_listed: bool = False  # the argument is a list with this value
    prefix: str = ""  # that the argument has before it, such as the path of a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a chain. One that `fails` must be answered with an error, which the next steps mend."""

    tool: str
    arguments: Mapping[str, Any]
    fails: bool = False

    @property
    def refs(self) -> dict[str, Ref]:
        """Return the arguments that come from earlier calls."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Ref)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """
    A solution in the abstract: calls, and what they come to.

    Args:
        family (`str`):
            Kind of task.
        steps (`tuple[Step, ...]`):
            The calls, in their order.
        shape (`str`):
            What the chain is, without its single values. All tasks of a shape are in one split.
        outcome (`str`, *optional*, defaults to `"value"`):
            `"value"`: what `answer` finds in the last result. `"difference"`: the difference of what it finds in the last two.
            `"nothing"`: that there is no such thing. `"state"`: what the calls leave behind.
        answer ([`Selector`], *optional*):
            The value.
        question (`str`, *optional*):
            The question, where no template of calls makes it.
        digits (`int`, *optional*):
            Digits after the point that are asked for.
        subject (`str`, *optional*):
            What there is nothing of, for the final message of a refusal.
        reads (`tuple[Step, ...]`, *optional*):
            Calls that show the state at the end.
        missing (`str`, *optional*):
            An attribute that nothing has.
    """

    family: str
    steps: tuple[Step, ...]
    shape: str
    outcome: Outcome = "value"
    answer: Selector | None = None
    question: str | None = None
    digits: int | None = None
    subject: str | None = None
    reads: tuple[Step, ...] = field(default=())
    missing: str | None = None

    @property
    def tools(self) -> list[str]:
        """Return the tools that it calls, each once."""
        return list(dict.fromkeys(step.tool for step in self.steps))


def call_key(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a key of a call: equal for equal calls."""
    return f"{tool} {json.dumps(arguments, sort_keys=True, default=str)}"


def shape_of(steps: Sequence[Step], answer: str) -> str:
    """Return the shape of a chain: its tools, which arguments come from where, and what is asked for."""
    parts = [
        f"{step.tool}({','.join(f'{name}<-{ref.step}.{ref.selector.shape}' for name, ref in sorted(step.refs.items()))})"
        for step in steps
    ]
    return " > ".join([*parts, answer])
