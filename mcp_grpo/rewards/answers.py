"""Whether the final message gives the expected answer: as a number, a date, a name, a list, a yes, or a refusal."""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from datetime import date
from typing import Any, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards.assignment import is_assignable
from mcp_grpo.rewards.numbers import CURRENCIES, PERCENTS, SCALES, Number, asks_for_fall, dates_in, numbers_in
from mcp_grpo.rewards.refusals import is_refusal
from mcp_grpo.types import Task, Trajectory


MAX_ANSWER = 1000  # characters; who writes more has not answered
MAX_NAMED = 200  # characters of a name with its figure
MAX_REPEATS = 3  # of the answer in other words, as in "12.5 million (12,500,000)"
TOLERANCE = 1e-6  # relative, of a number that asks for no other

_ANSWER_LINE = re.compile(r"^[\s>*_#`-]*(?:final\s+)?answer\s*[*_`]*\s*[:：][ \t]*(.*)$", re.IGNORECASE | re.MULTILINE)
_HEDGE = re.compile(
    r"\b(?:or|either|neither|nor|maybe|perhaps|possibly|not|cannot)\b|n['’]t\b|±|\+\s?/?\s?-", re.IGNORECASE
)
_ROLE = r"(?:ceo|cfo|coo|chief\s+(?:executive|financial|operating)(?:\s+officer)?|managing\s+director|president|chair(?:man|woman|person)?)(?:\s*\(c[efo]o\))?"
_NOW = r"(?:the\s+|its\s+)?(?:current\s+|present\s+|new\s+)?"
_OF = r"(?:\s+(?:of|at|for)\s+[^:;,()\n]{1,80}?)?"
_LEAD_IN = re.compile(
    r"^(?:(?:so|thus|therefore|hence)\W+)?"
    rf"(?:(?:(?:[^:;,()\n]{{1,60}}?['’]s?\s+)?{_NOW}(?:final\s+)?(?:answer|result|company|name|symbol|ticker|{_ROLE}){_OF}(?:\s+(?:is|was)\b|\s*[:,])"
    r"|(?:it|that|this)\s+(?:is|was)\b|it['’]s)\W+)?"
    rf"(?:(?:the\s+)?{_ROLE}\s+)?(?:(?:mr|mrs|ms|dr|prof)\b\.?\s+)?",
    re.IGNORECASE,
)
_LEAD_OUT = re.compile(
    rf"(?:\s*\(|,\s+|\s+(?:is|has\s+been)\s+){_NOW}{_ROLE}{_OF}(?:\s+since\s+(?:\w+\s+){{0,2}}\d{{4}})?\s*\)?\W*$",
    re.IGNORECASE,
)
_EXCHANGE = re.compile(r"^\s*(?:nyse|nasdaq|lse|xetra|ticker|symbol)\s*:\s*", re.IGNORECASE)
_FIGURE_OUT = re.compile(r"^(.+?)(?:\s*\(|\s*[,:;]\s+|\s+-\s+|\s+(?:with|at)\s+)([^()]*\d[^()]*?)\)?\W*$")
_LEGAL_FORMS = {
    "inc",
    "incorporated",
    "corp",
    "corporation",
    "co",
    "company",
    "plc",
    "ltd",
    "limited",
    "llc",
    "lp",
    "llp",
}
_LEGAL_FORMS |= {"ag", "sa", "nv", "se", "gmbh", "spa", "ab", "asa", "oyj"}
_YES, _NO = {"yes", "true", "correct"}, {"no", "false", "incorrect"}
_CAPITAL = r"(?:(?:Inc|Corp|Co|Ltd|Mrs?|Ms|Dr|Prof|[A-Z])\.|[^\W\d_a-zß-öø-ÿ][\w'’-]*)"
_CAPITALS = re.compile(rf"{_CAPITAL}(?:[ \u00a0]+(?:&[ ]+)?{_CAPITAL})*")
_ASIDE = re.compile(  # words that have capitals in a sentence, and are of no name
    r"(?:^|(?<=\s))(?:(?:the|its|a|an|our|current|new|answer|hi|hello|thanks|in|at|for|it|is|as|of|mr|mrs|ms|dr|prof)\.?"
    rf"|{_ROLE})(?=\s|$)",
    re.IGNORECASE,
)
_IS_ABOUT = re.compile(r"\b(?:of|for|at|on|about|hi|hello|thanks|dear)\s+(?:the\s+)?$|@$", re.IGNORECASE)
_IS_OWNER = re.compile(rf"(?:['’]s?(?:\s+{_ROLE})?|\s{_ROLE})$|^(?:of|for|at|hi|hello|thanks)\s", re.IGNORECASE)
_IS_ASKED = re.compile(
    rf"\s*(?:\([^()]*\)\s*)?(?::|['’]s?\s|{_ROLE}\b|has\s+(?-i:[A-Z])|is\s+(?:led|run|headed)\s)", re.IGNORECASE
)
_FORMER = re.compile(r"\b(?:former|formerly|previous|previously|until|ex)\b", re.IGNORECASE)
_LISTED_BEFORE = re.compile(r"[^\W_](?:\s*[,;/|+]|\s+and|\s*&|\n)\s*$", re.IGNORECASE)
_LISTED_AFTER = re.compile(r"(?:\s*[,;/|+]|\s+and\s|\s*&|\s*\n)\s*(?:and\s+)?(?-i:[A-Z])", re.IGNORECASE)
_ASKS_FOR_FALL = (
    "asks_for_fall"  # in a spec: the question itself says "loss" or "fall", and an answer need not have the sign
)
_ITEM_MARK = re.compile(r"^\s*(?:[-*•]|\(?\d{1,2}[.)](?=\s))\s*")


def answer_match(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    1 if the final message gives the task's `answer`, 0 otherwise.

    What counts as the answer is what stands after the last `Answer:` at the beginning of a line, or else the whole message.
    Whoever names several candidates has not answered. The task's `answer` is a value, or says what kind of value it is:

    | `answer` | matches |
    |---|---|
    | `12.5`, `{"type": "number", "value": 12.5}` | `12.5`, `12.50`, `1.25e1` |
    | `{"type": "number", "value": 12.5, "unit": "million USD", "tolerance": 0.005}` | `$12.5M`, `12,480,000`, `12.5` |
    | `{"type": "number", "value": 12.5, "unit": "%", "absolute": 0.05}` | `12.5%`, `0.125`, `12.46 percent` |
    | `"2024-03-05"`, `{"type": "date", "value": "2024-03-05"}` | `March 5, 2024`, not `03/05/2024`, which could be two |
    | `"Nestlé"`, `{"type": "name", "value": "Nestlé", "aliases": ["NESN"]}` | `NESTLE S.A.`, `nesn` |
    | `{"type": "set", "values": ["VLTA", "NWL"]}` | `NWL and VLTA`, nothing more |
    | `["VLTA", "NWL"]`, `{"type": "list", "values": [...]}` | the same, in this order |
    | `true`, `{"type": "boolean", "value": true}` | `Yes`, `true` |
    | `{"type": "refusal"}` | `There is no data for that day`, without any figure |

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            What else the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_matched(attempt)) for attempt in trajectory]


def is_matched(trajectory: Trajectory) -> bool:
    """
    Whether the final message gives the task's `answer`; see [`answer_match`].

    Args:
        trajectory ([`Trajectory`]):
            A finished trajectory.

    Returns:
        `bool`: Whether it does.
    """
    task = trajectory.task
    if task.answer is None:
        raise TaskFormatError(
            f"Task {task.task_id!r} has no `answer` to compare with. Give every task one, or use a reward function that "
            "does not need it."
        )
    try:
        spec = answer_spec(task.answer)
    except TaskFormatError as error:
        raise TaskFormatError(f"The `answer` of task {task.task_id!r} cannot be compared with: {error}") from error
    if trajectory.answer is None:
        return False
    return matches_answer(trajectory.answer, spec, question=question_of(task))


def question_of(task: Task) -> str:
    """
    What the user asks in a task.

    Args:
        task ([`Task`]):
            The task.

    Returns:
        `str`: The user's messages, one after the other.
    """
    return " ".join(str(message.get("content") or "") for message in task.prompt if message["role"] == "user")


def matches_answer(message: str, answer: Any, *, question: str = "") -> bool:
    """
    Whether a message gives an answer; see [`answer_match`].

    Args:
        message (`str`):
            What the policy wrote.
        answer (`Any`):
            What is expected: a value, or a mapping with its `type`.
        question (`str`, *optional*):
            What was asked. "A loss of 5" is -5, but 5 is right as well where the question itself asks for a loss.

    Returns:
        `bool`: Whether it does.
    """
    text = final_answer(message)
    spec = answer_spec(answer)
    return 0 < len(text) <= MAX_ANSWER and _matches(text, {**spec, _ASKS_FOR_FALL: asks_for_fall(question)})


def mentions_answer(text: str, answer: Any) -> bool:
    """
    Whether a text has an answer in it, among other things. For text that somebody else is to read, such as a post.

    Args:
        text (`str`):
            The text. If it has more than a handful of figures, or is very long, it mentions nothing.
        answer (`Any`):
            What is expected: a value, or a mapping with its `type`.

    Returns:
        `bool`: Whether it has.
    """
    if len(text) > MAX_ANSWER:
        return False
    spec = answer_spec(answer)
    match spec["type"]:
        case "number":
            numbers = numbers_in(_plain(text))
            return len(numbers) <= 2 * MAX_REPEATS and any(_is_number(number, spec) for number in numbers)
        case "date":
            dates = dates_in(text)
            return len(dates) <= MAX_REPEATS and date.fromisoformat(spec["value"]) in dates
        case "name":
            names = [_name(name) for name in (spec["value"], *spec.get("aliases", ()))]
            words = f" {' '.join(_words(text))} "
            return any(f" {name} " in words for name in names)
        case _:
            return _matches(text, spec)


def gives_only(text: str, answers: Sequence[Any]) -> bool:
    """
    Whether a text gives answers in its sentences, and no others. For text that somebody else is to read, such as a post.

    Every figure but years and dates must be one of the answers. A name must be given once, with no other name that could be
    meant instead. Whoever hedges or denies has given nothing.

    Args:
        text (`str`):
            The text.
        answers (`Sequence[Any]`):
            What is expected: values, or mappings with their `type`.

    Returns:
        `bool`: Whether it does.
    """
    specs = [answer_spec(answer) for answer in answers]
    if not 0 < len(text) <= MAX_ANSWER or _HEDGE.search(text):
        return False
    numbers = [spec for spec in specs if spec["type"] == "number"]
    found = numbers_in(_plain(text))
    found = _figures(found) if numbers else [number for number in found if not number.is_year]
    if not _is_covered([[_is_number(number, spec) for spec in numbers] for number in found], len(numbers)):
        return False
    days = [date.fromisoformat(spec["value"]) for spec in specs if spec["type"] == "date"]
    if days and set(dates_in(_without_marks(text))) != set(days):
        return False
    names = [spec for spec in specs if spec["type"] == "name"]
    if names and _FORMER.search(text):
        return False
    if not all(_is_only_name(text, spec, [other for other in names if other is not spec]) for spec in names):
        return False
    return all(_matches(text, spec) for spec in specs if spec["type"] not in ("number", "date", "name"))


def _is_covered(fits: Sequence[Sequence[bool]], num_specs: int) -> bool:
    """Whether every figure fits an answer and every answer has a figure, said a few times at most."""
    is_short = len(fits) <= MAX_REPEATS * num_specs
    return is_short and all(map(any, fits)) and all(any(row[spec] for row in fits) for spec in range(num_specs))


def _is_only_name(text: str, spec: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    names = {_name(name) for name in (spec["value"], *spec.get("aliases", ()))}
    known = names.union(*({_name(name) for name in (one["value"], *one.get("aliases", ()))} for one in others))
    runs = [_Run(match) for match in _CAPITALS.finditer(_without_marks(text))]
    given = [run for run in runs if _name(run.name) in names]
    if not given or len({_name(run.name) for run in given}) < len(given):
        return False
    if len(_words(given[0].name)) == 1:
        return not any(run.is_listed for run in given)
    rivals = [run for run in runs if len(_words(run.name)) > 1 and _name(run.name) not in known]
    # One other name may be there: of the company, say. What a text is about, and what it says of it, cannot be mistaken.
    is_clear = all(run.is_subject for run in rivals) and not any(run.is_subject for run in given)
    return not rivals or (is_clear and len({_words(run.name)[0] for run in rivals}) == 1)


class _Run:
    """Words with capitals that stand side by side, and what is around them."""

    def __init__(self, match: re.Match[str]) -> None:
        self._before, self._text, self._after = match.string[: match.start()], match[0], match.string[match.end() :]
        self.name = _ASIDE.sub("", match[0]).strip(" .")

    @property
    def is_subject(self) -> bool:
        """Whether it is what the text is about, rather than what it says of it."""
        return (
            _IS_ABOUT.search(self._before) is not None
            or _IS_OWNER.search(self._text) is not None
            or _IS_ASKED.match(self._after) is not None
        )

    @property
    def is_listed(self) -> bool:
        """Whether it stands in a list."""
        return _LISTED_BEFORE.search(self._before) is not None or _LISTED_AFTER.match(self._after) is not None


def final_answer(message: str) -> str:
    """
    The part of a message that counts as its answer.

    Args:
        message (`str`):
            What the policy wrote.

    Returns:
        `str`: What stands on the line of the last `Answer:`, or below it if nothing stands there; or else all of it.
    """
    lines = list(_ANSWER_LINE.finditer(message))
    if not lines:
        return _unboxed(message.strip())
    line = _unboxed(lines[-1][1])
    return _without_marks(line) or _unboxed(message[lines[-1].end() :].strip())


def has_answer_line(message: str) -> bool:
    """Whether a message has a line that begins with `Answer:`."""
    return _ANSWER_LINE.search(message) is not None


def answer_spec(answer: Any) -> Mapping[str, Any]:
    """
    An expected answer with its type.

    Args:
        answer (`Any`):
            A value, or a mapping with its `type`.

    Returns:
        `Mapping[str, Any]`: The mapping. Raises [`TaskFormatError`] if it makes no sense.
    """
    if isinstance(answer, Mapping):
        return _checked(cast("Mapping[str, Any]", answer))
    if isinstance(answer, bool):
        return {"type": "boolean", "value": answer}
    if isinstance(answer, int | float):
        return _checked({"type": "number", "value": answer})
    if isinstance(answer, list | tuple):
        return _checked({"type": "list", "values": list(cast("Sequence[Any]", answer))})
    if isinstance(answer, str) and answer.strip():
        return _spec_of_text(answer.strip())
    raise TaskFormatError(f"An answer must be a value or a mapping with a `type`, got {answer!r}.")


def _spec_of_text(text: str) -> Mapping[str, Any]:
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text) and dates_in(text) != [None]:
        return {"type": "date", "value": text}
    numbers = numbers_in(_plain(text))
    if len(numbers) == 1 and not re.search(r"[^\W\d]", re.sub(r"[eE][-+]?\d+", "", text)):
        number = numbers[0]
        units = ["%"] * (number.percent is not None) + [number.currency] * (number.currency is not None)
        return {"type": "number", "value": number.value, "unit": " ".join(map(str, units))}
    return {"type": "name", "value": text}


def _checked(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = spec.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise TaskFormatError(f"The `type` of an answer must be one of {sorted(_KEYS)}, got {kind!r}.")
    unknown = sorted(key for key, value in spec.items() if key not in _KEYS[kind] and value is not None)
    if unknown:
        raise TaskFormatError(f"An answer of type {kind!r} has no {unknown}; it has {sorted(_KEYS[kind])}.")
    if not _VALID[kind](spec):
        raise TaskFormatError(f"This is not an answer of type {kind!r}: {dict(spec)!r}. {_RULES[kind]}")
    return {key: value for key, value in spec.items() if value is not None}


def _matches(text: str, spec: Mapping[str, Any]) -> bool:
    return _MATCHERS[spec["type"]](text, spec)


def _matches_number(text: str, spec: Mapping[str, Any]) -> bool:
    numbers = _figures(numbers_in(_plain(text)))
    if not 0 < len(numbers) <= MAX_REPEATS or _HEDGE.search(text):
        return False
    return all(_is_number(number, spec) for number in numbers)


def _figures(numbers: Sequence[Number]) -> Sequence[Number]:
    """Numbers without the years among them, which say when; all of them if all could be years."""
    return [number for number in numbers if not number.is_year] or numbers


def _is_number(number: Number, spec: Mapping[str, Any]) -> bool:
    unit = _Unit(spec.get("unit") or "")
    want = spec["value"] * unit.factor
    relative = spec.get("tolerance", TOLERANCE if "absolute" not in spec else 0.0)
    margin = max(relative * abs(want), spec.get("absolute", 0.0) * unit.factor) * (1 + 1e-9)
    if number.is_fall and spec.get(_ASKS_FOR_FALL):
        want, number = abs(want), replace(number, value=abs(number.value))
    return any(math.isfinite(got) and abs(got - want) <= margin for got in unit.readings(number))


class _Unit:
    """What a figure is given in: of a percentage, of millions, of a currency, of all or none of these."""

    def __init__(self, unit: str) -> None:
        words = [word.lower() for word in re.findall(r"%|[^\W\d_]*[$€£¥]|[^\W\d_]+", unit)]
        self.is_percent = any(word in PERCENTS for word in words)
        self.scale = next((SCALES[word] for word in words if word in SCALES), 1.0)
        self.currency = next((CURRENCIES[word] for word in words if word in CURRENCIES), None)
        self.is_none = not words
        self.factor = next((PERCENTS[word] for word in words if word in PERCENTS), self.scale)

    def readings(self, number: Number) -> Iterator[float]:
        """What a number may mean here."""
        if self.currency and number.currency and self.currency != number.currency:
            return
        if number.percent is not None:
            if self.is_percent or self.is_none:
                yield number.value * number.percent
            if self.is_none:
                yield number.value
            return
        yield number.value * number.scale  # as it stands; of a percentage, as a fraction
        if number.scale == 1.0:
            yield number.value * self.factor  # in the unit that was asked for


def _matches_date(text: str, spec: Mapping[str, Any]) -> bool:
    dates = dates_in(_without_marks(text))
    return not _HEDGE.search(text) and set(dates) == {date.fromisoformat(spec["value"])} and len(dates) <= MAX_REPEATS


def _matches_name(text: str, spec: Mapping[str, Any]) -> bool:
    names = {_name(name) for name in (spec["value"], *spec.get("aliases", ()))}
    text = _without_marks(text)
    if _name(text) in names:
        return True
    if _HEDGE.search(text):
        return False
    text = _LEAD_OUT.sub("", _LEAD_IN.sub("", text))
    return _is_named(text, names) or ((found := _with_figure(text)) is not None and _is_named(found, names))


def _is_named(text: str, names: Set[str]) -> bool:
    if _name(text) in names:
        return True
    inside = re.fullmatch(r"(.+?)\s*\((.+)\)\W*", text)  # "Northwind Logistics (NWL)", "Northwind Logistics (Class B)"
    if inside is None:
        return False
    first, second = _name(inside[1]), _name(_EXCHANGE.sub("", inside[2]))
    return {first, second} <= names or (second.startswith("class ") and _name(f"{inside[1]} {inside[2]}") in names)


def _with_figure(text: str) -> str | None:
    """What stands before a figure that ends a text, as in "Northwind Logistics ($2.6B)"."""
    found = _FIGURE_OUT.match(text) if len(text) <= MAX_NAMED else None
    if found is None or len(numbers_in(found[2])) != 1:
        return None
    words = re.findall(r"[^\W\d_]+", found[2].lower())
    return found[1] if all(word in {*SCALES, *PERCENTS, *CURRENCIES} for word in words) else None


def _matches_set(text: str, spec: Mapping[str, Any]) -> bool:
    specs = [answer_spec(value) for value in spec["values"]]
    return any(
        is_assignable([[_matches(item, value) for value in specs] for item in dict.fromkeys(items)], len(specs))
        for items in _segmentations(text)
    )


def _matches_list(text: str, spec: Mapping[str, Any]) -> bool:
    specs = [answer_spec(value) for value in spec["values"]]
    return any(
        len(items) == len(specs) and all(_matches(item, value) for item, value in zip(items, specs, strict=True))
        for items in _segmentations(text)
    )


def _matches_boolean(text: str, spec: Mapping[str, Any]) -> bool:
    words = _words(_LEAD_IN.sub("", text))
    right, wrong = (_YES, _NO) if spec["value"] else (_NO, _YES)
    return bool(words) and words[0] in right and not wrong.intersection(words) and not re.search(r"\bor\b", text, re.I)


def _matches_refusal(text: str, spec: Mapping[str, Any]) -> bool:
    return is_refusal(_plain(text))


def _segmentations(text: str) -> Iterator[list[str]]:
    """A text as a list of items, in the ways that lists are written."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if isinstance(content, list):
            yield [item if isinstance(item, str) else json.dumps(item) for item in cast("list[Any]", content)]
        text = text[1:-1]
    forms = "|".join(sorted(_LEGAL_FORMS))
    text = re.sub(rf",\s+(?=(?:{forms})\b)", " ", text, flags=re.IGNORECASE)
    comma = r"\n+|;|,(?!\d{3}(?!\d))"
    for separator in (r"\n+|;", comma, rf"{comma}(?:\s+and\b)?|\s+and\s+", rf"{comma}(?:\s+and\b)?|\s+(?:and|&)\s+"):
        items = [_ITEM_MARK.sub("", part).strip().rstrip(".") for part in re.split(separator, text)]
        yield [item for item in items if item]


def _unboxed(text: str) -> str:
    """A text without the boxes of LaTeX around its parts."""
    for _ in range(3 if "\\" in text and len(text) <= 2 * MAX_ANSWER else 0):
        text = re.sub(r"\\(?:boxed|text\w*|mathrm|mathbf)\s*\{((?:[^{}]|\{,\})*)\}", r"\1", text.replace("{,}", ","))
    return text


def _without_marks(text: str) -> str:
    """A text without the marks of Markdown and LaTeX that may stand around it."""
    text = text.replace("\u2010", "-").replace("\u2011", "-")
    return re.sub(r"(?<![\w*])[_*]+|[_*]+(?![\w*\s])|[*_`]+$|[`\\]", "", text.strip()).strip()


def _plain(text: str) -> str:
    """A text with one kind of minus, and no marks around its figures."""
    text = _without_marks(text.translate({0x2212: "-", 0x2013: "-", 0x2014: ";"}))
    return re.sub(r"(?<=\d)\*\*(?!\s?10|\d)|(?<!\d)\*\*(?=\d)", "", text)


def _words(text: str) -> list[str]:
    """The words of a text, without case, accents and punctuation."""
    decomposed = unicodedata.normalize("NFKD", text.replace("&", " and ").replace("'s ", "s "))
    plain = "".join(character for character in decomposed if not unicodedata.combining(character)).casefold()
    plain = re.sub(r"(?<=\b\w)\.(?=\w\b)|(?<=\b\w)\.(?!\w)", "", plain)  # S.A. is one word
    return re.findall(r"\w+", plain)


def _name(text: str) -> str:
    """A name by which the same ones are equal: without article and legal form."""
    words = _words(text)
    if len(words) > 1 and words[0] == "the":
        words = words[1:]
    share_class = words[-2:] if len(words) > 3 and words[-2] == "class" else []
    words = words[: len(words) - len(share_class)]
    while len(words) > 1 and words[-1] in _LEGAL_FORMS:
        words = words[:-1]
    return " ".join([*words, *share_class]) or text.strip().casefold()


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_number_spec(spec: Mapping[str, Any]) -> bool:
    margins = [spec[key] for key in ("tolerance", "absolute") if spec.get(key) is not None]
    has_unit = spec.get("unit") is None or isinstance(spec["unit"], str)
    return _is_finite(spec.get("value")) and has_unit and all(_is_finite(margin) and margin >= 0 for margin in margins)


def _is_date_spec(spec: Mapping[str, Any]) -> bool:
    value = spec.get("value")
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None and dates_in(value) != [None]


def _is_name_spec(spec: Mapping[str, Any]) -> bool:
    names: Any = [spec.get("value"), *(spec.get("aliases") or ())]
    return all(isinstance(name, str) and name.strip() for name in names)


def _is_list_spec(spec: Mapping[str, Any]) -> bool:
    values = spec.get("values")
    if not isinstance(values, list | tuple) or not values:
        return False
    return all(answer_spec(value)["type"] in ("number", "date", "name") for value in cast("Sequence[Any]", values))


_KEYS: Mapping[str, tuple[str, ...]] = {
    "number": ("type", "value", "unit", "tolerance", "absolute"),
    "date": ("type", "value"),
    "name": ("type", "value", "aliases"),
    "set": ("type", "values"),
    "list": ("type", "values"),
    "boolean": ("type", "value"),
    "refusal": ("type",),
}
_VALID: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "number": _is_number_spec,
    "date": _is_date_spec,
    "name": _is_name_spec,
    "set": _is_list_spec,
    "list": _is_list_spec,
    "boolean": lambda spec: isinstance(spec.get("value"), bool),
    "refusal": lambda spec: True,
}
_RULES: Mapping[str, str] = {
    "number": "It needs a `value`, and may have a `unit`, a `tolerance` (relative) and an `absolute` one, 0 or more.",
    "date": 'Its `value` is such as "2024-03-05".',
    "name": "Its `value` is a text, and so are its `aliases`.",
    "set": "Its `values` are a list of numbers, dates and names, at least one.",
    "list": "Its `values` are a list of numbers, dates and names, at least one.",
    "boolean": "Its `value` is true or false.",
    "refusal": "",
}
_MATCHERS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "number": _matches_number,
    "date": _matches_date,
    "name": _matches_name,
    "set": _matches_set,
    "list": _matches_list,
    "boolean": _matches_boolean,
    "refusal": _matches_refusal,
}
