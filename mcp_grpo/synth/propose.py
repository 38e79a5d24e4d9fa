"""Propose chains from what was seen: single calls, values that one tool returns and another takes, and traps."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcp_grpo.synth.chains import Chain, Ref, Step, shape_of
from mcp_grpo.synth.explore import Exploration
from mcp_grpo.synth.selectors import Selector, place_of, selectors_of
from mcp_grpo.synth.tame import is_tame
from mcp_grpo.synth.values import Observation, fits, named_by, optional
from mcp_grpo.tools.arguments import properties
from mcp_grpo.tools.catalog import Tool


MAX_PER_RESULT = 14  # answers that are proposed for one result
MAX_LINKS = 3  # ways to reach one value
MIN_CHOICES = 2  # values in a description that make an argument a choice
MAX_SHOWN = 160  # characters of an argument in a prompt

ATTRIBUTES = (
    *("warranty number", "phone number", "postal code", "blood type", "licence plate", "shoe size", "boiling point"),
    *("wing span", "tax number", "cabin class", "soil type", "ring tone", "fuel grade", "seat colour", "bank account"),
)
"""What is asked for where nothing has it."""


_LIMIT = re.compile(r"limit|max|count|top|page|head|tail", re.IGNORECASE)


def propose(known: Exploration, tools: Sequence[Tool], seed: int) -> list[Chain]:
    """Propose chains in a fixed order."""
    chance = random.Random(f"{seed} propose")
    chains: list[Chain] = []
    answers = {one.number: _answers(one, chance) for one in known.seen if _is_askable(one)}
    for seen in known.seen:
        if seen.number not in answers:
            continue
        step = Step(tool=seen.tool.name, arguments=seen.arguments)
        chains += [_valued("lookup", [step], answer) for answer in answers[seen.number]]
        chains += _linked(seen, answers[seen.number], known, chance)
        chains += _joined(seen, known, chance)
        chains += _misspelt(seen, answers[seen.number], known, chance)
        chains += _absent(seen, answers[seen.number], chance)
        chains += _lacking(seen, known, tools, chance)
    return chains + list(_differences(known, answers, chance))


def _valued(family: str, steps: Sequence[Step], answer: Selector) -> Chain:
    return Chain(family=family, steps=tuple(steps), shape=shape_of(steps, answer.shape), answer=answer)


def _is_askable(seen: Observation) -> bool:
    """Tell whether all arguments of a call can be said in a question."""
    return all(is_sayable(value) for value in seen.arguments.values())


def is_sayable(value: Any) -> bool:
    """Tell whether a value can be said in a question."""
    if isinstance(value, list):
        return len(value) == 1 and is_sayable(value[0])
    return isinstance(value, bool | int | float) or (isinstance(value, str) and is_tame(value, MAX_SHOWN))


def _answers(seen: Observation, chance: random.Random) -> list[Selector]:
    """Choose what to ask about a result: each kind of answer in turn."""
    by_shape: dict[str, list[Selector]] = {}
    is_limited = any(_LIMIT.search(name) for name in optional(seen.tool))
    for selector in selectors_of(seen.reading):
        # Where a tool returns the first few unless it is told how many, neither the last nor their number means anything.
        if not (is_limited and (selector.index == -1 or selector.kind in ("count", "sum"))):
            by_shape.setdefault(selector.shape, []).append(selector)
    for same in by_shape.values():
        chance.shuffle(same)
    found: list[Selector] = []
    while by_shape and len(found) < MAX_PER_RESULT:
        for shape in list(by_shape):
            found.append(by_shape[shape].pop())
            if not by_shape[shape]:
                del by_shape[shape]
    return found[:MAX_PER_RESULT]


def _linked(
    seen: Observation, answers: Sequence[Selector], known: Exploration, chance: random.Random
) -> Iterator[Chain]:
    """Replace an argument by a way to find it in another result, and one of that call's by a third."""
    for name, ref, first in _links(seen, known, chance):
        step = Step(tool=seen.tool.name, arguments={**seen.arguments, name: ref})
        start = Step(tool=first.tool.name, arguments=first.arguments)
        for answer in answers[:4]:
            yield _valued("chain", [start, step], answer)
        for second, earlier, before in list(_links(first, known, chance))[:1]:
            middle = Step(tool=first.tool.name, arguments={**first.arguments, second: earlier})
            last = Step(
                tool=seen.tool.name,
                arguments={**seen.arguments, name: Ref(1, ref.selector, ref.is_listed, ref.prefix)},
            )
            begin = Step(tool=before.tool.name, arguments=before.arguments)
            for answer in answers[:2]:
                yield _valued("chain", [begin, middle, last], answer)


def _joined(seen: Observation, known: Exploration, chance: random.Random) -> Iterator[Chain]:
    """Find an entry of one result by a value of another: both have it."""
    wheres = [
        one
        for one in selectors_of(seen.reading)
        if one.kind == "where" and isinstance(one.equals, str) and len(one.equals) > 2
    ]
    chance.shuffle(wheres)
    last = Step(tool=seen.tool.name, arguments=seen.arguments)
    for where in wheres[:MAX_PER_RESULT]:
        found: list[tuple[Observation, Ref]] = []
        for place, prefix in known.book.places_of(where.equals):
            first = known.seen[place.observation]
            if prefix or place.observation == seen.number or first.text == seen.text or not _is_askable(first):
                continue
            is_said = _says(first.arguments, where.equals) or _says(seen.arguments, where.equals)
            for selector in place_of(first.reading, place.path, place.index, place.field):
                if (
                    selector.kind == "where"
                    and not is_said
                    and not any(_holds(text, where.equals) for text in selector.texts)
                ):
                    found.append((first, Ref(0, selector)))
        for first, ref in chance.sample(found, min(1, len(found))):
            steps = [Step(tool=first.tool.name, arguments=first.arguments), last]
            shape = f"{shape_of(steps, where.shape)} by {ref.selector.shape}"
            yield Chain(family="chain", steps=tuple(steps), shape=shape, answer=where.at(ref))


def _links(seen: Observation, known: Exploration, chance: random.Random) -> Iterator[tuple[str, Ref, Observation]]:
    for name, argument in seen.arguments.items():
        value = argument[0] if isinstance(argument, list) and len(argument) == 1 else argument
        if isinstance(value, bool) or len(str(value)) < 2:
            continue
        found: list[tuple[str, Ref, Observation]] = []
        for place, prefix in known.book.places_of(value):
            first = known.seen[place.observation]
            is_itself = first.tool.name == seen.tool.name and first.arguments == seen.arguments
            if is_itself or not _is_askable(first) or _says(first.arguments, value):
                continue
            for selector in place_of(first.reading, place.path, place.index, place.field):
                if not any(_holds(text, value) for text in selector.texts):
                    found.append((name, Ref(0, selector, isinstance(argument, list), prefix), first))
        chance.shuffle(found)
        yield from found[:MAX_LINKS]


def _says(arguments: Mapping[str, Any], value: Any) -> bool:
    return any(_holds(str(argument), value) for argument in arguments.values())


def _holds(text: str, value: Any) -> bool:
    return str(value).casefold() in text.casefold()


def _differences(
    known: Exploration, answers: Mapping[int, Sequence[Selector]], chance: random.Random
) -> Iterator[Chain]:
    """Compare a number in two results of one tool that differ in one argument."""
    numbers: dict[tuple[str, str], list[tuple[Observation, Selector]]] = {}
    for seen in known.seen:
        for answer in answers.get(seen.number, ()):
            if answer.kind in ("field", "count", "sum") and isinstance(answer.value_in(seen.reading), int | float):
                numbers.setdefault((seen.tool.name, answer.shape), []).append((seen, answer))
    for pairs in numbers.values():
        chance.shuffle(pairs)
        for (one, answer), (other, _) in itertools.pairwise(pairs):
            differing = [
                name
                for name in one.arguments.keys() | other.arguments.keys()
                if one.arguments.get(name) != other.arguments.get(name)
            ]
            if (
                len(differing) == 1
                and one.arguments.keys() == other.arguments.keys()
                and answer.value_in(one.reading) != answer.value_in(other.reading)
            ):
                steps = [Step(tool=each.tool.name, arguments=each.arguments) for each in (one, other)]
                yield Chain(
                    family="difference",
                    steps=tuple(steps),
                    shape=shape_of(steps, f"difference {answer.shape}"),
                    outcome="difference",
                    answer=answer,
                )


def _misspelt(
    seen: Observation, answers: Sequence[Selector], known: Exploration, chance: random.Random
) -> Iterator[Chain]:
    """Ask with two letters of a value swapped: the call fails, a listing has the right one."""
    for name, argument in seen.arguments.items():
        wrong = _swapped(argument, known, chance) if isinstance(argument, str) else None
        listing = _listing_of(argument, seen, known) if wrong is not None else None
        if wrong is None or listing is None or not _is_free(seen, name):
            continue
        steps = [
            Step(tool=seen.tool.name, arguments={**seen.arguments, name: wrong}, fails=True),
            Step(tool=listing.tool.name, arguments=listing.arguments),
            Step(tool=seen.tool.name, arguments=seen.arguments),
        ]
        for answer in answers[:2]:
            shape = f"misspelt {name} of {shape_of(steps[2:], answer.shape)}"
            yield Chain(family="recovery", steps=tuple(steps), shape=shape, answer=answer, subject=name)


def _swapped(value: str, known: Exploration, chance: random.Random) -> str | None:
    """Swap two neighbouring letters of the last part of a value, such that no known value results."""
    start = value.rfind("/") + 1
    end = value.rfind(".") if value.rfind(".") > start else len(value)
    spots = [
        at
        for at in range(start + 1, end - 1)
        if value[at].isalpha() and value[at + 1].isalpha() and value[at].lower() != value[at + 1].lower()
    ]
    last = value[start:end]
    if (
        end - start < 5
        or not spots
        or re.fullmatch(r"[0-9a-fA-F]{7,}", last)
        or sum(map(str.isalpha, last)) < 0.7 * len(last)
    ):
        return None
    at = spots[chance.randrange(len(spots))]
    wrong = value[:at] + value[at + 1] + value[at] + value[at + 2 :]
    values = {str(one.value) for group in known.book.groups.values() for one in group}
    return None if wrong in values else wrong


def _listing_of(value: str, seen: Observation, known: Exploration) -> Observation | None:
    """Return a call of the same server whose result has a value, or its last part, among others."""
    last = value.rsplit("/", 1)[-1]
    for other in known.seen:
        texts = [str(leaf) for leaf in _texts(other.reading.value)]
        is_other = other.tool.name != seen.tool.name and other.tool.server == seen.tool.server
        is_listing = is_other and _is_askable(other) and len(texts) > 1 and not _says(other.arguments, last)
        if is_listing and any(text in (value, last) for text in texts):
            return other
    return None


def _texts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _absent(seen: Observation, answers: Sequence[Selector], chance: random.Random) -> Iterator[Chain]:
    """Ask about something that does not exist."""
    for name, argument in seen.arguments.items():
        value = argument[0] if isinstance(argument, list) and len(argument) == 1 else argument
        if not isinstance(value, str) or not _is_free(seen, name) or not answers:
            continue
        folder, _, last = value.rpartition("/")
        ending = match[0] if (match := re.search(r"\.\w{1,5}$", last)) else ""
        word = ("harbour", "meadow", "lantern", "orchard", "glacier", "compass")[chance.randrange(6)]
        made = (
            f"{folder}/{word}_{chance.randrange(100, 999)}{ending}"
            if folder
            else f"{word}_{chance.randrange(100, 999)}{ending}"
        )
        # Of nothing there are none: a count has an answer.
        asked = [
            one
            for one in answers
            if one.kind in ("field", "nth", "line", "pair", "most", "least")
            and not _says(seen.arguments, one.value_in(seen.reading))
        ]
        if not asked:
            continue
        answer = asked[0]
        step = Step(
            tool=seen.tool.name, arguments={**seen.arguments, name: [made] if isinstance(argument, list) else made}
        )
        yield Chain(
            family="refusal",
            steps=(step,),
            shape=f"absent {name} of {shape_of([step], answer.shape)}",
            outcome="nothing",
            answer=answer,
            subject=made,
        )


def _lacking(seen: Observation, known: Exploration, tools: Sequence[Tool], chance: random.Random) -> Iterator[Chain]:
    """Ask for an attribute that no tool knows of."""
    subject = next((v for v in seen.arguments.values() if isinstance(v, str) and len(v) > 2), None)
    said = " ".join(
        [*(f"{tool.name} {tool.description} {tool.input_schema}" for tool in tools), *(one.text for one in known.seen)]
    )
    free = [one for one in ATTRIBUTES if not any(word in said.casefold() for word in one.split())]
    if subject is None or not free or seen.reading.form in ("text", "scalar"):
        return
    attribute = free[chance.randrange(len(free))]
    step = Step(tool=seen.tool.name, arguments=seen.arguments)
    yield Chain(
        family="refusal",
        steps=(step,),
        shape=f"lacking of {shape_of([step], '')}",
        outcome="nothing",
        missing=attribute,
        subject=subject,
    )


def _is_free(seen: Observation, name: str) -> bool:
    """Tell whether an argument is a text of any kind, not a choice: one whose values are listed, or told in its description."""
    schema = properties(seen.tool.input_schema).get(name)
    is_text = isinstance(schema, Mapping) and "enum" not in schema and fits("text", schema)
    return is_text and len({one.value for one in named_by(schema, name)}) < MIN_CHOICES
