"""Drop what is no good task: told twice, ambiguous, not paid, or solved without tools."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mcp_grpo.synth.tasks import Draft, is_paid


MAX_SHARE = 0.34  # of the most frequent answer among tasks that ask for the same thing
MAX_SAME = 0.1  # of one answer among all tasks
MAX_TRAPS = {"refusal": 8, "recovery": 6}  # one for so many other tasks, at most
MAX_SAID = 0.5  # of the letters of an answer
MAX_GUESSED = 2  # a number of things that is as soon guessed as counted

Note = Callable[[Draft, str], None]


def filtered(drafts: Sequence[Draft], note: Note, num_tasks: int) -> list[Draft]:
    """Return the drafts that make good tasks, of which so many are wanted; `note` is told why others do not."""
    found = list(drafts)
    for keep in (_paid, _distinct, _unambiguous, _unsaid, _counted, _needed, _not_constant, _not_frequent):
        found = keep(found, note)
    return _few_traps(found, note, num_tasks)


def _paid(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    return _each(drafts, is_paid, "the answer cannot be compared", note)


def _distinct(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    """Keep one of those that make the same calls for the same value."""
    seen: set[str] = set()

    def is_new(draft: Draft) -> bool:
        made = draft.made
        chain = made.chain
        asked = (chain.missing, chain.answer, chain.question, chain.outcome, draft.answer)
        # Two tools that return the same for the same arguments are one.
        calls = [sorted(map(repr, call.arguments.items())) for call in made.calls]
        key = repr((calls, made.texts, asked))
        is_first = key not in seen and draft.question not in seen
        seen.update((key, draft.question))
        return is_first

    return _each(drafts, is_new, "another task is the same", note)


def _unambiguous(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    """Drop questions that have been given two answers."""
    answers: dict[str, set[str]] = {}
    for draft in drafts:
        answers.setdefault(_words(draft.question), set()).add(repr(draft.answer))
    return _each(drafts, lambda draft: len(answers[_words(draft.question)]) == 1, "the question has two answers", note)


def _unsaid(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    """Drop tasks whose answer stands in the question."""
    return _each(
        drafts, lambda draft: not is_said(draft.made.value, draft.question), "the answer stands in the question", note
    )


def is_said(value: Any, question: str) -> bool:
    """Tell whether a question says a value, or most of it."""
    if value is None or isinstance(value, list):
        return False
    said, asked = _words(str(value)), _words(question)
    if said != "" and f" {said} " in f" {asked} ":
        return True
    words = said.split()
    known = sum(len(word) for word in words if word in asked.split())
    return len(words) > 1 and known > MAX_SAID * sum(map(len, words))


def _counted(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    """Drop counts of very few things."""

    def is_many(draft: Draft) -> bool:
        chain = draft.made.chain
        is_count = chain.outcome == "value" and chain.answer is not None and chain.answer.is_count
        return not is_count or draft.made.value > MAX_GUESSED

    return _each(drafts, is_many, "the number is easily guessed", note)


def _needed(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    """Drop chains whose answer is found before the last call."""

    def is_needed(draft: Draft) -> bool:
        made = draft.made
        if made.chain.family != "chain" or made.value is None:
            return True
        said = f" {_words(str(made.value))} "
        is_long = isinstance(made.value, str) or made.value > 100
        return not (is_long and any(said in f" {_words(text)} " for text in made.texts[:-1]))

    return _each(drafts, is_needed, "the answer is found before the last call", note)


def _not_constant(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    """Drop tasks that saying the usual thing would solve: the most frequent answer to what is asked there."""
    groups: dict[str, Counter[str]] = {}
    for draft in drafts:
        groups.setdefault(_group(draft), Counter())[repr(draft.answer)] += 1

    def is_varied(draft: Draft) -> bool:
        counts = groups[_group(draft)]
        (answer, most), total = counts.most_common(1)[0], counts.total()
        return draft.answer is None or total < 3 or most / total <= MAX_SHARE or repr(draft.answer) != answer

    return _each(drafts, is_varied, "most tasks of its kind have the same answer", note)


def _group(draft: Draft) -> str:
    chain = draft.made.chain
    if chain.outcome in ("nothing", "state"):
        return repr(draft.question)
    return f"{draft.made.calls[-1].tool} {chain.outcome} {chain.question and chain.shape} {chain.answer and chain.answer.shape}"


def _not_frequent(drafts: Sequence[Draft], note: Note) -> list[Draft]:
    """Limit how many tasks have the same answer; refusals, which call for a look at the tools, may be more."""
    most = max(3, round(MAX_SAME * len(drafts)))
    counts: Counter[str] = Counter()

    def is_rare(draft: Draft) -> bool:
        if draft.made.chain.outcome in ("nothing", "state"):
            return True
        counts[repr(draft.answer)] += 1
        return counts[repr(draft.answer)] <= most

    return _each(drafts, is_rare, "many other tasks have the same answer", note)


def _few_traps(drafts: Sequence[Draft], note: Note, num_tasks: int) -> list[Draft]:
    """Limit refusals and recoveries, whose last words or first call would else be right too often."""
    usual = min(num_tasks, sum(draft.made.chain.family not in MAX_TRAPS for draft in drafts))
    counts: Counter[str] = Counter()

    def is_room(draft: Draft) -> bool:
        family = draft.made.chain.family
        counts[family] += 1
        return family not in MAX_TRAPS or counts[family] * MAX_TRAPS[family] <= usual

    return _each(drafts, is_room, "there are too few others beside refusals and recoveries", note)


def _each(drafts: Sequence[Draft], is_good: Callable[[Draft], bool], why: str, note: Note) -> list[Draft]:
    kept: list[Draft] = []
    for draft in drafts:
        if is_good(draft):
            kept.append(draft)
        else:
            note(draft, why)
    return kept


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
