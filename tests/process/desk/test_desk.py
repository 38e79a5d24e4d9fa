"""Tasks on the desk: the same for the same seed, solvable with the real servers, and not without them."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from helpers.gallery import BEGIN, END, PAGE, gallery, solutions
from helpers.marks import full

from mcp_grpo.desk.reward import COMPANY_WORDS, desk_outcome, desk_reward, is_solved
from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import FAMILIES, HELD_OUT_FAMILIES, SPLITS, build, build_tasks, sources, traps
from mcp_grpo.desk.tasks.drafts import Pick, Unsuitable, World, named
from mcp_grpo.desk.world.days import trading_days
from mcp_grpo.desk.world.market import MONTHS, Market
from mcp_grpo.desk.world.pages import Fact
from mcp_grpo.errors import SettingsError, TaskFormatError
from mcp_grpo.evaluation import Solution, run_solutions
from mcp_grpo.rewards import efficiency, is_matched
from mcp_grpo.rewards.answers import matches_answer
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.types import Exchange, ResultKind, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


DIGEST = "8e3f621cc84c2c6a"

LEGAL_FORM = r"\b(?:Inc\.|Corp\.|Company|Holdings|plc|AG|SE)"


def digest(rows: Any) -> str:
    return hashlib.sha256("\n".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def datasets() -> dict[str, Any]:
    return {split: build_tasks(split, 300) for split in SPLITS}


@pytest.fixture(scope="module")
def some_tasks() -> dict[str, Any]:
    """The first of those, of every family, which take less long to build."""
    return {split: build_tasks(split, 6 * len(FAMILIES)) for split in SPLITS}


@pytest.fixture(scope="module")
def market() -> Market:
    return Market()


@pytest.fixture(scope="module")
def solved() -> list[Solution]:
    return solutions()


def attempt(task: Task, answer: str, states: Mapping[str, Any] | None = None) -> Trajectory:
    """What a policy does that asks no tool."""
    return Trajectory(
        task=task,
        prompt_ids=(0,),
        segments=(Segment(token_ids=(0,), logprobs=(0.0,)),),
        messages=({"role": "assistant", "content": answer},),
        exchanges=(),
        stop_reason=StopReason.ANSWERED,
        states={"slack": {"added": []}} if states is None else states,
    )


@pytest.mark.full
def test_the_same_seed_gives_the_same_tasks_to_the_byte_on_every_machine(datasets: dict[str, Any]) -> None:
    assert digest(datasets["test"]) == DIGEST


@pytest.mark.full
def test_questions_that_need_a_second_call_are_of_all_years(datasets: dict[str, Any]) -> None:
    for split, rows in datasets.items():
        texts = [row["prompt"][-1]["content"] for row in rows if row["family"] == "recovery"]
        years = {text.split("trading day of ")[1][:4] for text in texts if "first trading day of" in text}
        assert years == {"2021", "2022", "2023"}, split


@pytest.mark.full
def test_tasks_do_not_depend_on_how_python_hashes(datasets: dict[str, Any]) -> None:
    code = "import sys, json\nfrom mcp_grpo.desk.tasks import build_tasks\nfor row in build_tasks('test', 40): print(json.dumps(row, sort_keys=True))"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("\n") == 40


@pytest.mark.full
def test_another_seed_gives_other_tasks_and_another_world_others_still(datasets: dict[str, Any]) -> None:
    ids = [
        set(rows["task_id"])
        for rows in (datasets["test"], build_tasks("test", 300, seed=1), build_tasks("test", 100, world=3))
    ]
    assert len(ids[0] & ids[1]) < 100
    assert len(ids[0] & ids[2]) < 10  # a few companies are in every world


@pytest.mark.full
def test_splits_share_neither_companies_nor_tasks(datasets: dict[str, Any], market: Market) -> None:
    issuers = {company.symbol: company.issuer for company in market.companies()}
    used = {split: {issuers[symbol] for row in rows for symbol in row["symbols"]} for split, rows in datasets.items()}
    ids = {split: set(rows["task_id"]) for split, rows in datasets.items()}
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not used[one] & used[other]
        assert not ids[one] & ids[other]


@pytest.mark.full
def test_some_families_are_only_in_the_test_split(datasets: dict[str, Any]) -> None:
    for split, rows in datasets.items():
        found = Counter(rows["family"])
        assert set(found) == set(FAMILIES) - (set(HELD_OUT_FAMILIES) if split != "test" else set())
        if split == "train":  # the others are about few companies, which not every family has enough to ask about
            assert max(found.values()) - min(found.values()) <= 1
    assert len(set(FAMILIES) - set(HELD_OUT_FAMILIES)) >= 12


@pytest.mark.full
def test_every_row_is_a_task_with_turns_for_its_difficulty(datasets: dict[str, Any]) -> None:
    tasks = tasks_from_rows(datasets["train"])
    assert {task.difficulty: task.max_turns for task in tasks} == {"easy": 5, "medium": 8, "hard": 10}


def test_scripted_solutions_do_what_their_tasks_ask_for(solved: list[Solution]) -> None:
    assert [(one.trajectory.task.task_id, one.problems) for one in solved if one.problems] == []
    assert {one.trajectory.task.metadata["family"] for one in solved} == set(FAMILIES)
    assert desk_reward()([one.trajectory for one in solved]) == [
        pytest.approx([0.0] * (one.trajectory.num_turns - 1) + [1.0]) for one in solved
    ]


def test_the_gallery_of_the_documentation_shows_them(solved: list[Solution]) -> None:
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0] == gallery(solved) + "\n"


@pytest.mark.full
def test_scripted_solutions_of_two_thousand_tasks_do() -> None:
    for split, number in (("train", 1400), ("validation", 200), ("test", 400)):
        found = run_solutions(tasks_from_rows(build_tasks(split, number, seed=7)), desk_servers())
        assert [(one.trajectory.task.task_id, one.problems) for one in found if one.problems] == []


class TestSolutionsThatProveNothing:
    @pytest.fixture
    def tasks(self) -> dict[str, Task]:
        return {task.metadata["family"]: task for task in tasks_from_rows(build_tasks("test", len(FAMILIES)))}

    def changed(self, task: Task, **changes: Any) -> Task:
        script = {**task.metadata["solution"], **changes.pop("script", {})}
        return replace(task, metadata={**task.metadata, "solution": script}, **changes)

    @pytest.mark.full
    def test_are_found(self, tasks: dict[str, Task]) -> None:
        lookup, report, recovery = tasks["lookup"], tasks["report"], tasks["recovery"]
        steps = lookup.metadata["solution"]["steps"]
        broken = [
            self.changed(lookup, script={"final": "Answer: 17"}),
            self.changed(lookup, script={"steps": [{**steps[0], "evidence": ["nobody says this"]}, *steps[1:]]}),
            self.changed(lookup, script={"steps": [{"calls": [{"name": "getQuote", "arguments": {}}]}]}),
            self.changed(lookup, max_turns=1),
            self.changed(report, script={"final": " "}),
            self.changed(report, script={"steps": report.metadata["solution"]["steps"][:-1]}),
            self.changed(
                recovery, script={"steps": [{**one, "fails": False} for one in recovery.metadata["solution"]["steps"]]}
            ),
        ]
        found = run_solutions(broken, desk_servers())
        assert [len(one.problems) > 0 for one in found] == [True] * len(broken)
        assert "is not what the task wants" in found[0].problems[0]
        assert "do not say 'nobody says this'" in found[1].problems[0]
        assert "getQuote" in found[2].problems[0]
        assert "allows 1" in found[3].problems[0]
        assert "does not come to an answer" in found[4].problems[0]

    def test_a_task_without_one_is_refused(self) -> None:
        with pytest.raises(TaskFormatError, match="has no `solution` to run"):
            run_solutions([Task(task_id="a", prompt=({"role": "user", "content": "b"},), answer=1)], {})


def guesses(task: Task) -> list[str]:
    """What a policy that has read the question, knows what kinds of tasks there are, and asks no tool, may take a pick from."""
    question = task.prompt[-1]["content"].split(" If ")[0]
    if found := re.match(r"(?:Which had the highest|Order these).*?: (.*?)(?:\?|\. Give.*)$", question):
        names = re.split(r", | or ", found[1])
        if question.startswith("Which"):
            return names
        return [", ".join(order) for order in permutations(sorted(task.metadata["symbols"]))]
    if found := re.match(r"On how many days of (\w+) (\d{4})", question):
        month = f"{found[2]}-{MONTHS.index(found[1]) + 1:02}"
        return [str(sum(day.isoformat().startswith(month) for day in trading_days("NYSE")))]
    if found := re.match(r"On which day of (\w+) (\d{4})", question):
        month = f"{found[2]}-{MONTHS.index(found[1]) + 1:02}"
        return [day.isoformat() for day in trading_days("NYSE") if day.isoformat().startswith(month)]
    if found := re.search(r"some say (.*?)\. Which|Some pages name (.*?) as chief", question):
        return [found[1] or found[2]]
    return ["no data available", "0", "100 USD", "1000000000 USD", "2024-06-28"]


@pytest.mark.full
def test_a_policy_that_asks_no_tool_is_paid_nothing_though_some_of_its_guesses_are_right(
    datasets: dict[str, Any],
) -> None:
    shares: list[float] = []
    for task in (task for rows in datasets.values() for task in tasks_from_rows(rows)):
        attempts = [attempt(task, f"Answer: {one}") for one in guesses(task)]
        assert not any(map(is_solved, attempts))
        is_asked = task.answer not in (None, {"type": "refusal"})
        shares.append(is_asked and sum(is_matched(one, words=COMPANY_WORDS) for one in attempts) / len(attempts))
    assert 0 < sum(shares) / len(shares) < 0.03
    assert max(shares) == 1.0  # of some days, the calendar knows how many there are
    assert sum(0 < share < 1 for share in shares) > 30


LOOKS: Mapping[str, Callable[[Task], list[tuple[str, str, dict[str, Any]]]]] = {
    "asks nobody": lambda task: [],
    "writes what it knows into a program": lambda task: [("python", "run_python", {"code": " ".join(known(task))})],
    "posts it": lambda task: [("slack", "slack_post_message", {"channel_id": "C1", "text": " ".join(known(task))})],
    "searches for it": lambda task: [("finance", "searchSymbol", {"query": one}) for one in known(task)],
    "asks for quotes": lambda task: [("finance", "getQuote", {"symbol": one}) for one in known(task)],
    "asks for other days": lambda task: [
        ("finance", "getFullChart", {"symbol": one, "from": "2024-06-03", "to": "2024-06-04"}) for one in known(task)
    ],
}
"""What a policy may do to look busy that reads nothing of what comes back. It may even know the symbols."""


def known(task: Task) -> list[str]:
    return [*task.metadata["symbols"], task.prompt[-1]["content"]]


@pytest.mark.full
@pytest.mark.parametrize("looks", LOOKS)
def test_a_blind_policy_earns_less_than_a_fiftieth_of_the_desk(datasets: dict[str, Any], looks: str) -> None:
    best: list[float] = []
    for task in (task for rows in datasets.values() for task in tasks_from_rows(rows)):
        exchanges = tuple(
            Exchange(
                call=ToolCall(name=name, arguments=arguments),
                result=ToolResult(text='{"symbol":"VLTA"}', server=server),
                turn=0,
            )
            for server, name, arguments in LOOKS[looks](task)
        )
        first = guesses(task)[0]  # "no data", or the first that is named
        best.append(is_solved(replace(attempt(task, f"Answer: {first}"), exchanges=exchanges)))
    assert sum(best) / len(best) < 0.02


def degenerate(solution: Solution) -> Iterator[tuple[str, Trajectory]]:
    """What a policy may do that has not understood its task, or does not want to."""
    whole = solution.trajectory
    task, question = whole.task, whole.task.prompt[-1]["content"]
    untouched = {
        server: {key: type(value)() for key, value in state.items()} for server, state in whole.states.items()
    }
    idle = replace(whole, exchanges=(), states=untouched)
    first_look = replace(whole, exchanges=whole.exchanges[:1], states=untouched)

    def saying(made: Trajectory, text: str) -> Trajectory:
        return replace(made, messages=(*made.messages[:-1], {"role": "assistant", "content": text}))

    yield "does nothing", saying(idle, "Done.")
    yield "says nothing", saying(whole, "")
    yield "knows it all", idle
    yield "parrots", saying(idle, f"Answer: {question}")
    yield "is cut by tokens", replace(whole, stop_reason=StopReason.MAX_TOKENS)
    yield "is cut by turns", replace(whole, stop_reason=StopReason.MAX_TURNS)
    if task.answer is None:
        yield "only looks", replace(whole, states=untouched)
        yield (
            "does one thing too many",
            replace(
                whole,
                states={
                    server: {
                        key: [*value, *value] if isinstance(value, list) else value for key, value in state.items()
                    }
                    for server, state in whole.states.items()
                },
            ),
        )
        return
    right = task.metadata["solution"]["final"].rsplit("Answer: ", 1)[-1]
    yield "hedges", saying(whole, f"Answer: {right} or 17")
    yield "doubts", saying(whole, f"Answer: maybe {right}")
    yield "takes it back", saying(whole, f"Answer: {right}\nAnswer: 17")
    yield "lists what the question names", saying(whole, "Answer: " + ", ".join(re.findall(r"[A-Z]\w+|\d+", question)))
    if len(task.metadata["symbols"]) > 1:
        yield "looks once and guesses", replace(first_look, messages=whole.messages)
    if task.answer["type"] == "refusal":
        if task.metadata["symbols"]:
            yield "finds the name and gives up", replace(first_look, messages=whole.messages)
        return
    yield "always gives up", saying(whole, "Answer: no data available")
    # What a program prints is the answer, so that it may be quoted: not what it was made of.
    read = [one.result.text for one in whole.exchanges if one.call.name != "run_python"][-1]
    yield "quotes", saying(whole, f"Answer: {read}")
    yield "lists all figures", saying(whole, "Answer: " + ", ".join(re.findall(r"\d+(?:\.\d+)?", read)))


def test_what_has_not_done_its_task_is_paid_nothing(solved: list[Solution]) -> None:
    tried = Counter[str]()
    for solution in solved:
        for name, made in degenerate(solution):
            assert not is_solved(made), (name, made.task.task_id, made.answer)
            tried[name] += 1
    assert len(tried) == 17
    assert min(tried.values()) >= 2


@pytest.mark.full
def test_giving_up_after_the_right_calls_is_right_for_few_tasks(datasets: dict[str, Any]) -> None:
    """It is paid nothing for the others (`always gives up`), and cannot be told from having read what there is not."""
    for split, rows in datasets.items():
        share = sum(answer == {"type": "refusal"} for answer in rows["answer"]) / len(rows)
        assert 0.04 < share < 0.08, split


@pytest.mark.full
def test_nothing_in_a_question_tells_whether_it_has_an_answer(datasets: dict[str, Any]) -> None:
    clauses = {"If there is no such data, say so.": Counter(), "If it did not trade": Counter()}
    forms: dict[str, Counter[bool]] = {}
    short = Counter[bool]()
    for row in (row for rows in datasets.values() for row in rows):
        question, has_answer = row["prompt"][-1]["content"], row["answer"] != {"type": "refusal"}
        for clause, found in clauses.items():
            found[has_answer] += clause in question
        head = re.match(r"(?:Look up|What (?!was)|What was|At what price)", question)
        if "If " in question and head:
            forms.setdefault(f"{head[0]} {'on' if ' on 20' in question else 'fiscal'}", Counter())[has_answer] += 1
        if "fiscal" in question and "If " in question and not re.search(LEGAL_FORM, question):
            short[has_answer] += 1
    for found in clauses.values():
        assert found[True] >= found[False] > 0
    assert short[True] >= short[False] > 0  # a name that is not there need not be one without its legal form
    assert len(forms) == 6
    for form, found in forms.items():
        if found[False]:
            assert found[True] * 3 >= found[False], form


def test_splits_do_not_share_the_names_of_companies_that_do_not_exist() -> None:
    place = World.of_seed(0)
    picks = [Pick(random.Random(0), place, build._symbols(place.market, split, 0)) for split in SPLITS]
    names = [{name.rsplit(" ", 1)[0] for name in traps._invented(pick)} for pick in picks]
    every = set().union(*names)
    assert min(map(len, names)) >= 8
    assert len(every) == sum(map(len, names))
    # Some look like the name of a company, some like nobody's.
    assert {bool(place.market.search_name(name)) for name in every} == {True, False}


def test_nobody_has_the_names_of_companies_that_do_not_exist(market: Market) -> None:
    taken = [one.name for one in market.companies()] + [one.old_name for one in market.symbol_changes()]
    assert not [name for name in taken for noun in traps.NO_NOUNS if noun in name]


@pytest.mark.full
@pytest.mark.parametrize("world", [0, 1, 2])
def test_a_clue_fits_one_company(world: int) -> None:
    place = World.of_seed(world)
    facts = [one for kind in ("contract", "plant_capacity", "product_price") for one in place.corpus.facts(kind)]
    everyone = frozenset(company.symbol for company in place.market.companies())
    seen: set[str] = set()
    for number in range(120):
        try:
            draft = sources.search_verify(Pick(random.Random(number), place, everyone))
        except Unsuitable:
            continue
        clue = draft.question.split(". Find out")[0] + "."
        fits = {one.symbol for one in facts if one.subject in clue and _is_of(one, clue)}
        assert fits == set(draft.symbols), draft.question
        seen.add(clue)
    assert len(seen) > 40


def _is_of(fact: Fact, clue: str) -> bool:
    if fact.kind == "product_price":
        return clue.endswith(f"sells the {fact.subject}.")
    words = f"with {fact.subject} worth {fact.value}" if fact.kind == "contract" else f"in {fact.subject} that"
    return words in clue and (fact.kind == "contract" or f" {fact.value} units" in clue)


@pytest.mark.parametrize("built", ["some_tasks", full("datasets")])
def test_no_solution_knows_a_symbol_that_nothing_told_it(request: pytest.FixtureRequest, built: str) -> None:
    for rows in request.getfixturevalue(built).values():
        for row in rows:
            known = row["prompt"][-1]["content"]
            for step in row["solution"]["steps"]:
                for call in step["calls"]:
                    symbol = call["arguments"].get("symbol")
                    assert symbol is None or symbol in known, row["task_id"]
                known += " ".join(step["evidence"])


def test_every_row_says_how_many_calls_are_enough(some_tasks: dict[str, Any], solved: list[Solution]) -> None:
    assert efficiency(desk_outcome)(trajectory=[one.trajectory for one in solved]) == [1.0] * len(solved)
    assert min(some_tasks["train"]["reference_calls"]) >= 1


@pytest.mark.full
def test_a_family_that_has_no_more_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counter(build_tasks("validation", 150)["family"])
    assert f"no more than {counts['contradiction']} tasks of the family 'contradiction'" in caplog.text


@pytest.mark.parametrize("answer", ["Quintrel Data Class B", "Quintrel Data Holdings", "Quintrel Data", "QNTB"])
def test_a_class_of_shares_may_be_named_in_any_usual_way(market: Market, answer: str) -> None:
    company = next(one for one in market.companies() if one.share_class == "B")
    company = replace(company, name="Quintrel Data Holdings Class B", short_name="Quintrel Data", symbol="QNTB")
    assert matches_answer(f"Answer: {answer}", named(company), words=COMPANY_WORDS)
    assert not matches_answer("Answer: Quintrel Data Class A", named(company), words=COMPANY_WORDS)


def stale_answers(task: Task, market: Market) -> Iterator[str]:
    """What is out of date, of another tool, or of somebody else."""
    question, (symbol, *_) = task.prompt[-1]["content"], task.metadata["symbols"] or (None,)
    match task.metadata["family"]:
        case "contradiction":
            found = re.search(r"some say (.*?)\. Which|Some pages name (.*?) as chief", question)
            assert found
            yield found[1] or found[2]
            if year := re.search(r"fiscal (\d{4})", question):
                first = market.first_reported(symbol, int(year[1]), "FY")
                yield str(first.revenue if "revenue" in question else first.net_income)
        case "adjusted":
            day = re.search(r"\d{4}-\d\d-\d\d", question)
            assert day
            is_adjusted = "adjusted for the splits" in question
            (bar,) = market.prices(symbol, day[0], day[0], not is_adjusted)
            yield f"{bar.close / 100:.2f}"
        case "namesakes":
            company = market.company(symbol)
            year = re.search(r"fiscal (\d{4})", question)
            for other in market.companies():
                if other.issuer == company.issuer or not traps._is_alike(company, other):
                    continue
                if "chief executive" in question:
                    yield other.ceo
                elif "latest share price" in question:
                    yield f"{market.quote(other.symbol).price / 100:.2f}"
                elif "revenue" in question and year:
                    statements = market.income_statements(other.symbol)
                    yield from (str(one.revenue) for one in statements if one.fiscal_year == int(year[1]))
        case "refusal" if symbol is not None and "fiscal" in question:
            yield str(market.income_statements(symbol)[0].revenue)
        case _:
            return


@pytest.mark.parametrize(("built", "number"), [("some_tasks", 4), full("datasets", 10)])
def test_what_is_out_of_date_or_somebody_else_s_is_not_paid(
    request: pytest.FixtureRequest, market: Market, built: str, number: int
) -> None:
    tried = Counter[str]()
    result = ToolResult(kind=ResultKind.OK, text="[]")
    for task in (task for rows in request.getfixturevalue(built).values() for task in tasks_from_rows(rows)):
        for answer in stale_answers(task, market):
            call = ToolCall(name="getQuote", arguments={"symbol": task.metadata["symbols"][0]})
            tries = replace(
                attempt(task, f"Answer: {answer}"), exchanges=(Exchange(call=call, result=result, turn=0),)
            )
            assert not is_solved(tries), (task.prompt[-1]["content"], answer)
            tried[task.metadata["family"]] += 1
    assert min(tried[family] for family in ("contradiction", "adjusted", "namesakes", "refusal")) >= number, tried


def test_what_another_task_asks_for_is_not_paid(solved: list[Solution]) -> None:
    for one in solved:
        task = one.trajectory.task
        others = [other for other in solved if other.trajectory.task.answer != task.answer]
        for other in others:
            swapped = replace(
                one.trajectory,
                messages=other.trajectory.messages,
                states={"slack": {"added": []}, **other.trajectory.states},
            )
            assert not is_solved(swapped), (task.task_id, other.trajectory.messages[-1])


def test_a_post_too_many_or_in_another_channel_costs_all(solved: list[Solution]) -> None:
    posted = next(one.trajectory for one in solved if one.trajectory.task.metadata["family"] == "report")
    (post,) = posted.states["slack"]["added"]
    assert is_solved(posted)
    for added in ([], [post, post], [{**post, "channel": "random"}], [{**post, "text": post["text"] + "!"}]):
        assert not is_solved(replace(posted, states={"slack": {"added": added}}))


@pytest.mark.parametrize(("arguments", "words"), [(("dev", 3), "'train'"), (("train", 0), "at least 1")])
def test_what_cannot_be_built_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        build_tasks(*arguments)
