"""Compare the final message with the expected answer: a number, date, name, list, yes or no, or refusal."""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from datetime import date
from typing import Any, NamedTuple, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards.numbers import CURRENCIES, PERCENTS, SCALES, Number, asks_for_fall, dates_in, numbers_in
from mcp_grpo.rewards.words import GENERAL, AnswerWords
from mcp_grpo.types import Task, Trajectory


MAX_ANSWER = 1000  # characters; a longer text is no answer
MAX_NAMED = 200  # characters of a name with its figure
MAX_REPEATS = 3  # forms of the same answer, as in "12.5 million (12,500,000)"
TOLERANCE = 1e-6  # relative, unless the answer sets another

# Possessive, and within one line: a message of blank lines is read once, not once for each of them.
_SPACE = r"[^\S\n]"
_ANSWER_LINE = re.compile(
    rf"^(?:{_SPACE}|[>*_#`-])*+(?:final{_SPACE}++)?answer{_SPACE}*+[*_`]*+{_SPACE}*+[:：][ \t]*+(.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_HEDGE = re.compile(
    r"\b(?:or|either|neither|nor|maybe|perhaps|possibly|not|cannot|never|unsure|uncertain|unlikely)\b|n['’]t\b|±|\+\s?/?\s?-|\?"
    r"|\b(?:wrong(?:ly)?|incorrect(?:ly)?|false(?:ly)?|untrue|mistaken(?:ly)?|inaccurate|anything\s+but|far\s+from)\b"
    r"|\b(?:more|less|fewer|greater|other|rather)\s+than\s+(?=[^\s\d]{0,4}\s?\d)",
    re.IGNORECASE,
)
_FIGURE_OUT = re.compile(r"^(.+?)(?:\s*\(|\s*[,:;]\s+|\s+-\s+|\s+(?:with|at)\s+)([^()]*\d[^()]*?)\)?\W*$")
_YES, _NO = {"yes", "true", "correct"}, {"no", "false", "incorrect"}
_CAPITAL = r"(?:(?:Inc|Corp|Co|Ltd|Mrs?|Ms|Dr|Prof|[A-Z])\.|[^\W\d_a-zß-öø-ÿ][\w'’-]*)"
_CAPITALS = re.compile(rf"{_CAPITAL}(?:[ \u00a0]+(?:&[ ]+)?{_CAPITAL})*")
_IS_ABOUT = re.compile(r"\b(?:of|for|at|on|about|hi|hello|thanks|dear)\s+(?:the\s+)?$|@$", re.IGNORECASE)
_FORMER = re.compile(r"\b(?:former|formerly|previous|previously|until|ex)\b", re.IGNORECASE)
_LISTED_BEFORE = re.compile(r"[^\W_](?:\s*[,;/|+]|\s+and|\s*&|\n)\s*$", re.IGNORECASE)
_LISTED_AFTER = re.compile(r"(?:\s*[,;/|+]|\s+and\s|\s*&|\s*\n)\s*(?:and\s+)?(?-i:[A-Z])", re.IGNORECASE)
_ASKS_FOR_FALL = (
    "asks_for_fall"  # in a spec: the question itself says "loss" or "fall", and an answer need not have the sign
)
_ITEM_MARK = re.compile(r"^\s*(?:[-*•]|\(?\d{1,2}[.)](?=\s))\s*")


def answer_match(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    Pay 1 if the final message gives the task's `answer`, and 0 otherwise.

    The answer is the text after the last `Answer:` at the beginning of a line, or else the whole message. A message with
    several candidates gives no answer. The task's `answer` is a value, or a mapping with its type:

    | `answer` | matches |
    |---|---|
    | `12.5`, `{"type": "number", "value": 12.5}` | `12.5`, `12.50`, `1.25e1` |
    | `{"type": "number", "value": 12.5, "unit": "million USD", "tolerance": 0.005}` | `$12.5M`, `12,480,000`, `12.5` |
    | `{"type": "number", "value": 12.5, "unit": "%", "absolute": 0.05}` | `12.5%`, `0.125`, `12.46 percent` |
    | `"2024-03-05"`, `{"type": "date", "value": "2024-03-05"}` | `March 5, 2024`, not the ambiguous `03/05/2024` |
    | `"Nestlé"`, `{"type": "name", "value": "Nestlé", "aliases": ["NESN"]}` | `NESTLE`, `The answer is nesn.` |
    | `{"type": "set", "values": ["VLTA", "NWL"]}` | `NWL and VLTA`, without others |
    | `["VLTA", "NWL"]`, `{"type": "list", "values": [...]}` | the same, in this order |
    | `true`, `{"type": "boolean", "value": true}` | `Yes`, `true` |
    | `{"type": "refusal"}` | `There is no data for that day`, without any figure |

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            Other arguments that the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_matched(attempt)) for attempt in trajectory]


def is_matched(trajectory: Trajectory, *, words: AnswerWords = GENERAL) -> bool:
    """Tell whether the final message gives the task's `answer`; see [`answer_match`]."""
    task = trajectory.task
    if task.answer is None:
        raise TaskFormatError(
            f"Task {task.task_id!r} has no `answer` to compare with. Give every task one, or use a reward function that "
            "does not need it."
        )
    try:
        spec = answer_spec(task.answer)
    except TaskFormatError as error:
        raise TaskFormatError(f"The `answer` of task {task.task_id!r} is not valid: {error}") from error
    if trajectory.answer is None:
        return False
    return matches_answer(trajectory.answer, spec, question=question_of(task), words=words)


def question_of(task: Task) -> str:
    """Return what the user asks in a task."""
    return " ".join(str(message.get("content") or "") for message in task.prompt if message["role"] == "user")


def matches_answer(message: str, answer: Any, *, question: str = "", words: AnswerWords = GENERAL) -> bool:
    """
    Tell whether a message gives an answer; see [`answer_match`].

    Args:
        message (`str`):
            The policy's text.
        answer (`Any`):
            The expected answer: a value, or a mapping with its `type`.
        question (`str`, *optional*):
            The question. "A loss of 5" is -5, but 5 is also right if the question itself asks for a loss.
        words ([`AnswerWords`], *optional*):
            Words of the field that the answer is from, such as those of companies.

    Returns:
        `bool`: Whether it does.
    """
    text = final_answer(message)
    spec = answer_spec(answer)
    return 0 < len(text) <= MAX_ANSWER and _matches(text, {**spec, _ASKS_FOR_FALL: asks_for_fall(question)}, words)


def mentions_answer(text: str, answer: Any, words: AnswerWords = GENERAL) -> bool:
    """Tell whether a text meant for a reader, such as a post, mentions an answer among other things."""
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
            said = f" {' '.join(_words(text))} "
            return any(f" {name} " in said for name in _names(spec, words))
        case _:
            return _matches(text, spec, words)


def gives_only(text: str, answers: Sequence[Any], words: AnswerWords = GENERAL) -> bool:
    """
    Tell whether a text meant for a reader, such as a post, gives these answers in its sentences and no others.

    Every figure except years and dates must be one of the answers. A name must be given once, with no other name that
    could be meant instead. A text that hedges or denies gives nothing.
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
    if not all(_is_only_name(text, spec, [other for other in names if other is not spec], words) for spec in names):
        return False
    return all(_matches(text, spec, words) for spec in specs if spec["type"] not in ("number", "date", "name"))


def _is_covered(fits: Sequence[Sequence[bool]], num_specs: int) -> bool:
    """Tell whether every figure fits an answer and every answer has a figure, with few repetitions."""
    is_short = len(fits) <= MAX_REPEATS * num_specs
    return is_short and all(map(any, fits)) and all(any(row[spec] for row in fits) for spec in range(num_specs))


def _is_only_name(text: str, spec: Mapping[str, Any], others: Sequence[Mapping[str, Any]], words: AnswerWords) -> bool:
    names = _names(spec, words)
    known = names.union(*(_names(other, words) for other in others))
    runs = [_Run(match, words) for match in _CAPITALS.finditer(_without_marks(text))]
    given = [run for run in runs if _name(run.name, words) in names]
    if not given or len({_name(run.name, words) for run in given}) < len(given):
        return False
    if len(_words(given[0].name)) == 1:
        return not any(run.is_listed for run in given)
    rivals = [run for run in runs if len(_words(run.name)) > 1 and _name(run.name, words) not in known]
    # One other name may be there: of the company, say. What a text is about, and what it says of it, cannot be mistaken.
    is_clear = all(run.is_subject for run in rivals) and not any(run.is_subject for run in given)
    return not rivals or (is_clear and len({_words(run.name)[0] for run in rivals}) == 1)


class _Run:
    """A run of capitalised words, and the text around it."""

    def __init__(self, match: re.Match[str], words: AnswerWords) -> None:
        self._words = words
        self._before, self._text, self._after = match.string[: match.start()], match[0], match.string[match.end() :]
        self.name = words.aside.sub("", match[0]).strip(" .")

    @property
    def is_subject(self) -> bool:
        """Tell whether the text is about this name, rather than giving it."""
        return (
            _IS_ABOUT.search(self._before) is not None
            or self._words.owner.search(self._text) is not None
            or self._words.asked.match(self._after) is not None
        )

    @property
    def is_listed(self) -> bool:
        """Tell whether it is part of a list."""
        return _LISTED_BEFORE.search(self._before) is not None or _LISTED_AFTER.match(self._after) is not None


def final_answer(message: str) -> str:
    """Return the part of a message that counts as its answer."""
    last = None
    for last in _ANSWER_LINE.finditer(message):  # noqa: B007 (only the last one is wanted)
        pass
    if last is None:
        return _unboxed(message.strip())
    line = _unboxed(last[1])
    if len(line) > 2 * MAX_ANSWER:
        return line  # no answer, whatever marks are in it
    return _without_marks(line) or _unboxed(message[last.end() :].strip())


def has_answer_line(message: str) -> bool:
    """Tell whether a message has a line that begins with `Answer:`."""
    return _ANSWER_LINE.search(message) is not None


def answer_spec(answer: Any) -> Mapping[str, Any]:
    """Return an expected answer as a checked mapping with its `type`."""
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
    if not isinstance(kind, str) or kind not in _TYPES:
        raise TaskFormatError(f"The `type` of an answer must be one of {sorted(_TYPES)}, got {kind!r}.")
    keys = {"type", *_TYPES[kind].keys}
    unknown = sorted(key for key, value in spec.items() if key not in keys and value is not None)
    if unknown:
        raise TaskFormatError(f"An answer of type {kind!r} has no {unknown}; it has {sorted(keys)}.")
    if not _TYPES[kind].is_valid(spec):
        raise TaskFormatError(f"This is not an answer of type {kind!r}: {dict(spec)!r}. {_TYPES[kind].rule}")
    return {key: value for key, value in spec.items() if value is not None}


def _matches(text: str, spec: Mapping[str, Any], words: AnswerWords) -> bool:
    return _TYPES[spec["type"]].matches(text, spec, words)


def _matches_number(text: str, spec: Mapping[str, Any], words: AnswerWords) -> bool:
    numbers = _figures(numbers_in(_plain(text)))
    if not 0 < len(numbers) <= MAX_REPEATS or _HEDGE.search(text):
        return False
    return all(_is_number(number, spec) for number in numbers)


def _figures(numbers: Sequence[Number]) -> Sequence[Number]:
    """Return numbers without the years among them; all of them if all could be years."""
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
    """The unit of a figure: percent, a scale such as millions, a currency, or none."""

    def __init__(self, unit: str) -> None:
        words = [word.lower() for word in re.findall(r"%|[^\W\d_]*[$€£¥]|[^\W\d_]+", unit)]
        self.is_percent = any(word in PERCENTS for word in words)
        self.scale = next((SCALES[word] for word in words if word in SCALES), 1.0)
        self.currency = next((CURRENCIES[word] for word in words if word in CURRENCIES), None)
        self.is_none = not words
        self.factor = next((PERCENTS[word] for word in words if word in PERCENTS), self.scale)

    def readings(self, number: Number) -> Iterator[float]:
        """Yield the values that a number may stand for in this unit."""
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


def _matches_date(text: str, spec: Mapping[str, Any], words: AnswerWords) -> bool:
    dates = dates_in(_without_marks(text))
    return not _HEDGE.search(text) and set(dates) == {date.fromisoformat(spec["value"])} and len(dates) <= MAX_REPEATS


def _matches_name(text: str, spec: Mapping[str, Any], words: AnswerWords) -> bool:
    names = _names(spec, words)
    text = _without_marks(text)
    if _name(text, words) in names:
        return True
    if _HEDGE.search(text):
        return False
    text = words.lead_out.sub("", words.lead_in.sub("", text))
    return any(_is_named(found, names, words) for found in (text, _with_figure(text)) if found is not None)


def _names(spec: Mapping[str, Any], words: AnswerWords) -> set[str]:
    return {_name(name, words) for name in (spec["value"], *spec.get("aliases", ()))}


def _is_named(text: str, names: Set[str], words: AnswerWords) -> bool:
    if _name(text, words) in names:
        return True
    inside = re.fullmatch(r"(.+?)\s*\((.+)\)\W*", text)  # "Northwind Logistics (NWL)", "Northwind Logistics (Class B)"
    if inside is None:
        return False
    parts = {_name(inside[1], words), _name(words.register.sub("", inside[2]), words)}
    return parts <= names or _name(f"{inside[1]} {inside[2]}", words) in names


def _with_figure(text: str) -> str | None:
    """Return the text before a figure at its end, as in "Northwind Logistics ($2.6B)"."""
    found = _FIGURE_OUT.match(text) if len(text) <= MAX_NAMED else None
    if found is None or len(numbers_in(found[2])) != 1:
        return None
    words = re.findall(r"[^\W\d_]+", found[2].lower())
    return found[1] if all(word in {*SCALES, *PERCENTS, *CURRENCIES} for word in words) else None


def _matches_set(text: str, spec: Mapping[str, Any], words: AnswerWords) -> bool:
    specs = [answer_spec(value) for value in spec["values"]]
    return any(
        is_assignable([[_matches(item, value, words) for value in specs] for item in dict.fromkeys(items)], len(specs))
        for items in _segmentations(text, words)
    )


def _matches_list(text: str, spec: Mapping[str, Any], words: AnswerWords) -> bool:
    specs = [answer_spec(value) for value in spec["values"]]
    return any(
        len(items) == len(specs)
        and all(_matches(item, value, words) for item, value in zip(items, specs, strict=True))
        for items in _segmentations(text, words)
    )


def is_assignable(fits: Sequence[Sequence[bool]], num_expected: int) -> bool:
    """Tell whether every item can be given a place of its own that it fits, with no place left empty."""
    owners: dict[int, int] = {}

    def place(item: int, tried: set[int]) -> bool:
        for expected, is_fit in enumerate(fits[item]):
            if is_fit and expected not in tried:
                tried.add(expected)
                if expected not in owners or place(owners[expected], tried):
                    owners[expected] = item
                    return True
        return False

    return len(fits) == num_expected and all(place(item, set()) for item in range(len(fits)))


def _matches_boolean(text: str, spec: Mapping[str, Any], words: AnswerWords) -> bool:
    said = _words(words.lead_in.sub("", text))
    right, wrong = (_YES, _NO) if spec["value"] else (_NO, _YES)
    return bool(said) and said[0] in right and not wrong.intersection(said) and not re.search(r"\bor\b", text, re.I)


def _segmentations(text: str, words: AnswerWords) -> Iterator[list[str]]:
    """Split a text into items, in the usual ways of writing lists."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            content = json.loads(text)
            items = [item if isinstance(item, str) else json.dumps(item) for item in cast("list[Any]", content)]
        except (ValueError, RecursionError):
            items = None
        if items is not None:
            yield items
        text = text[1:-1]
    text = words.comma_before_ending.sub(" ", text)
    comma = r"\n+|;|,(?!\d{3}(?!\d))"
    for separator in (r"\n+|;", comma, rf"{comma}(?:\s+and\b)?|\s+and\s+", rf"{comma}(?:\s+and\b)?|\s+(?:and|&)\s+"):
        items = [_ITEM_MARK.sub("", part).strip().rstrip(".") for part in re.split(separator, text)]
        yield [item for item in items if item]


def _unboxed(text: str) -> str:
    """Remove LaTeX boxes."""
    for _ in range(3 if "\\" in text and len(text) <= 2 * MAX_ANSWER else 0):
        text = re.sub(r"\\(?:boxed|text\w*|mathrm|mathbf)\s*\{((?:[^{}]|\{,\})*)\}", r"\1", text.replace("{,}", ","))
    return text


def _without_marks(text: str) -> str:
    """Remove Markdown and LaTeX marks around a text."""
    text = text.replace("\u2010", "-").replace("\u2011", "-")
    return re.sub(r"(?<![\w*])[_*]++|(?<![_*])[_*]++(?![\w*\s])|(?<![*_`])[*_`]++$|[`\\]", "", text.strip()).strip()


def _plain(text: str) -> str:
    """Normalise minus signs, and remove marks around figures."""
    text = _without_marks(text.translate({0x2212: "-", 0x2013: "-", 0x2014: ";"}))
    return re.sub(r"(?<=\d)\*\*(?!\s?10|\d)|(?<!\d)\*\*(?=\d)", "", text)


def _words(text: str) -> list[str]:
    """Return the words of a text, without case, accents and punctuation."""
    decomposed = unicodedata.normalize("NFKD", text.replace("&", " and ").replace("'s ", "s "))
    plain = "".join(character for character in decomposed if not unicodedata.combining(character)).casefold()
    plain = re.sub(r"(?<=\b\w)\.(?=\w\b)|(?<=\b\w)\.(?!\w)", "", plain)  # S.A. is one word
    return re.findall(r"\w+", plain)


def _name(text: str, words: AnswerWords) -> str:
    """Return a name in the form in which equal names are equal: without article and legal form."""
    said = _words(text)
    if len(said) > 1 and said[0] == "the":
        said = said[1:]
    return words.name_noise.sub("", " ".join(said)) or text.strip().casefold()


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


class _Type(NamedTuple):
    """A type of answer: its keys beside `type`, the check of a spec with its rule, and the comparison."""

    keys: tuple[str, ...]
    is_valid: Callable[[Mapping[str, Any]], bool]
    rule: str
    matches: Callable[[str, Mapping[str, Any], AnswerWords], bool]


_LIST_RULE = "Its `values` are a list of numbers, dates and names, at least one."
_TYPES: Mapping[str, _Type] = {
    "number": _Type(
        ("value", "unit", "tolerance", "absolute"),
        _is_number_spec,
        "It needs a `value`, and may have a `unit`, a `tolerance` (relative) and an `absolute` one, 0 or more.",
        _matches_number,
    ),
    "date": _Type(("value",), _is_date_spec, 'Its `value` is such as "2024-03-05".', _matches_date),
    "name": _Type(
        ("value", "aliases"), _is_name_spec, "Its `value` is a text, and so are its `aliases`.", _matches_name
    ),
    "set": _Type(("values",), _is_list_spec, _LIST_RULE, _matches_set),
    "list": _Type(("values",), _is_list_spec, _LIST_RULE, _matches_list),
    "boolean": _Type(
        ("value",), lambda spec: isinstance(spec.get("value"), bool), "Its `value` is true or false.", _matches_boolean
    ),
    "refusal": _Type((), lambda spec: True, "", lambda text, spec, words: words.is_refusal(_plain(text))),
}
