"""Write the question of a chain in plain English, by templates."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mcp_grpo.synth.chains import Ref, Step
from mcp_grpo.synth.run import Run
from mcp_grpo.synth.tame import listed, phrase
from mcp_grpo.tools.catalog import Tool


SYSTEM_PROMPT = (
    "Do what you are asked with the tools; never answer from memory. When you are asked a question, end with a line `Answer: ` and the "
    "bare answer, as exact as the tools have it. If the tools show that there is no such thing, end with `Answer: no data available`."
)


def question_of(made: Run, tools: Mapping[str, Tool]) -> str:
    """Return the question that a chain answers."""
    chain = made.chain
    if chain.question is not None:
        return chain.question
    if chain.outcome == "state":
        return _chained(made, tools)
    if chain.outcome == "difference":
        return _difference(made, tools)
    if chain.missing is not None:
        return f"{_order(chain.steps[-1], tools)} What is the {chain.missing} given there?"
    steps = chain.steps[-1:] if chain.family == "recovery" else chain.steps
    if chain.family == "recovery":
        steps = (Step(tool=steps[0].tool, arguments=chain.steps[0].arguments),)
    asked = _asked(made)
    if len(steps) == 1:
        text = _turned(steps[0], asked, tools) if _draw(made, 2) else f"{_order(steps[0], tools)} {asked}"
    else:
        text = f"{_chained(made, tools)} {asked}"
    if chain.family == "recovery":
        text += (
            f" The `{chain.subject}` may be misspelt: if there is none of that name, take the one that differs from it only in two "
            "neighbouring letters that are swapped."
        )
    return text


def said_call(step: Step) -> str:
    """Return the arguments of a call as a clause."""
    said = [f"`{name}` set to {_value(value)}" for name, value in step.arguments.items()]
    return f" with {listed(said)}" if said else ""


def _value(value: Any) -> str:
    if isinstance(value, Ref):
        return f"the path of that entry in `{value.prefix.rstrip('/')}`" if value.prefix else "that value"
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], dict | list):
        return f"`{value[0]}`"
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _asked(made: Run) -> str:
    answer = made.chain.answer
    assert answer is not None
    words = answer.words(made.readings[-1].form if made.readings[-1].value else "data")
    return f"How many {words}?" if answer.is_count else f"What is {words}?"


def _order(step: Step, tools: Mapping[str, Tool]) -> str:
    words = _said(step, tools)
    return f"{words[0].upper()}{words[1:]}."


def _said(step: Step, tools: Mapping[str, Tool]) -> str:
    """Return a call as the rest of "Please ..."."""
    words, with_what = phrase(tools[step.tool]), said_call(step)
    return f"{words},{with_what}" if with_what and "," in words else f"{words}{with_what}"


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]


def _turned(step: Step, asked: str, tools: Mapping[str, Tool]) -> str:
    """Return the question before what to do: "What is the `size` if you ...?"."""
    return f"{asked[:-1]} if you {_said(step, tools)}?"


def _chained(made: Run, tools: Mapping[str, Tool]) -> str:
    """Return one order after another, each with what the next one needs."""
    said: list[str] = []
    for number, step in enumerate(made.chain.steps):
        order = _order(step, tools)
        said.append(order if number == 0 else f"Then {_lowered(order)}")
        refs = [ref for later in made.chain.steps for ref in later.refs.values()]
        refs += [made.chain.answer.equals] if made.chain.answer and isinstance(made.chain.answer.equals, Ref) else []
        wanted = [ref.selector.words(made.readings[number].form) for ref in refs if ref.step == number]
        said += [f"Note {listed(dict.fromkeys(wanted))}."] if wanted else []
    return " ".join(said)


def _difference(made: Run, tools: Mapping[str, Tool]) -> str:
    chain = made.chain
    one, other = chain.steps
    assert chain.answer is not None
    name = next(name for name in one.arguments if one.arguments[name] != other.arguments[name])
    same = {key: value for key, value in one.arguments.items() if key != name}
    order = _said(Step(tool=one.tool, arguments=same), tools)
    twice = f"once with `{name}` set to {_value(one.arguments[name])} and once set to {_value(other.arguments[name])}"
    words = chain.answer.words(made.readings[-1].form)
    what = (
        f"the number of {words.split(' are there')[0]}{words.partition('are there')[2]}"
        if chain.answer.is_count
        else words
    )
    return f"{order[0].upper()}{order[1:]}, {twice}. By how much does {what} differ between the two?"


def _draw(made: Run, number: int) -> int:
    """Draw a number that depends on nothing but the chain."""
    text = repr(
        (
            made.chain.shape,
            [(call.tool, sorted(call.arguments.items(), key=str)) for call in made.calls],
            made.chain.answer,
        )
    )
    return hashlib.sha256(text.encode()).digest()[0] % number
