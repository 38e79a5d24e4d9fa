"""The final message gives the expected answer in any usual form, and in no form that covers several answers."""

import json
from typing import Any

import pytest
from helpers.attempts import attempt
from hypothesis import example, given
from hypothesis import strategies as st

from mcp_grpo.desk.reward import COMPANY_WORDS
from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards import AnswerWords, answer_match, answers, is_matched
from mcp_grpo.rewards.words import GENERAL


MILLIONS = {"type": "number", "value": 12.5, "unit": "million USD", "tolerance": 0.005}
PERCENT = {"type": "number", "value": 12.5, "unit": "%", "absolute": 0.05}
DATE = {"type": "date", "value": "2024-03-05"}
NAME = {"type": "name", "value": "Northwind Logistics, Inc.", "aliases": ["NWL"]}
SET = {"type": "set", "values": ["VLTA", "NWL", "Johnson & Johnson"]}
ORDERED = ["VLTA", "NWL"]
REFUSAL = {"type": "refusal"}
REVENUE = {"type": "number", "value": 305_861_000, "unit": "USD", "tolerance": 0.001}
LOSS = {"type": "number", "value": -19_852_000, "unit": "USD", "tolerance": 0.001}
FALL = {"type": "number", "value": -1.7, "unit": "%", "absolute": 0.005}
PERSON = {"type": "name", "value": "Edda Fairbourne"}
CLASS_B = {"type": "name", "value": "Quintrel Data Inc. Class B", "aliases": ["QNTB"]}


def matches_answer(message: str, answer: Any, question: str = "") -> bool:
    """Compare with the words of companies. What matches without them matches with them, too."""
    found = answers.matches_answer(message, answer, question=question, words=COMPANY_WORDS)
    assert found or not answers.matches_answer(message, answer, question=question)
    return found


def mentions_answer(text: str, answer: Any) -> bool:
    return answers.mentions_answer(text, answer, COMPANY_WORDS)


def gives_only(text: str, expected: list[Any]) -> bool:
    found = answers.gives_only(text, expected, COMPANY_WORDS)
    assert found or not answers.gives_only(text, expected)
    return found


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("3", 3),
        ("3.0", 3),
        ("Answer: 3", 3),
        ("The sum is 3.", 3),
        ("First I add 1 and 2.\n**Answer:** 3", 3),
        ("Answer: 4\nNo, wait.\nAnswer: 3", 3),
        ("answer:\n3", 3),
        ("Final answer: `3`", 3),
        ("Answer: -3", -3),
        ("Answer: −3", -3),
        ("Answer: minus 3", -3),
        ("Answer: -$3", -3),
        ("Answer: $-3", -3),
        ("1,234,567.5", 1234567.5),
        ("1'234'567.5", 1234567.5),
        ("1\u202f234\u202f567.5", 1234567.5),
        ("1.2345675e6", 1234567.5),
        ("1.2345675 × 10^6", 1234567.5),
        (".5", 0.5),
        ("Answer: _0.5_", 0.5),
        ("$12.5M", MILLIONS),
        ("$12.5 million", MILLIONS),
        ("12.5", MILLIONS),
        ("12,500,000", MILLIONS),
        ("US$12,480,000", MILLIONS),
        ("12500k USD", MILLIONS),
        ("0.0125bn dollars", MILLIONS),
        ("$12.5 million ($12,500,000)", MILLIONS),
        ("about 12.46 million", MILLIONS),
        ("12.5%", PERCENT),
        ("12.5 percent", PERCENT),
        ("12.5", PERCENT),
        ("0.125", PERCENT),
        ("12.46 pct", PERCENT),
        ("1250 basis points", PERCENT),
        ("12.5%", 0.125),
        ("12.5%", 12.5),
        ("12.5%", "12.5%"),
        ("$1,200", "1200"),
        ("Revenue of FY2023 in Q3 was $12.5 million.", MILLIONS),
        ("On 2024-03-05 the close was 187.43", 187.43),
        ("2024-03-05", DATE),
        ("2024-03-05", "2024-03-05"),
        ("2024/3/5", DATE),
        ("March 5, 2024", DATE),
        ("Mar. 5th, 2024", DATE),
        ("Tuesday, 5 March 2024", DATE),
        ("the 5th of March 2024", DATE),
        ("25/03/2024", "2024-03-25"),
        ("03/25/2024", "2024-03-25"),
        ("03/03/2024", "2024-03-03"),
        ("2024-03-05T00:00:00Z", DATE),
        ("Northwind Logistics", NAME),
        ("northwind logistics inc", NAME),
        ("The answer is Northwind Logistics Corp.", NAME),
        ("Answer: **NWL**", NAME),
        ("Northwind Logistics (NWL)", NAME),
        ("It's Northwind Logistics.", NAME),
        ("NESTLE S.A.", "Nestlé"),
        ("Soren Oberg", "Søren Öberg".replace("ø", "o")),
        ("AT and T", "AT&T"),
        ("BRK.A", "BRK.A"),
        ("NWL, VLTA and Johnson & Johnson", SET),
        ("- VLTA\n- NWL\n- Johnson and Johnson", SET),
        ("Answer:\n1. VLTA\n2. Johnson & Johnson\n3. NWL", SET),
        ('Answer: ["NWL", "VLTA", "Johnson & Johnson"]', SET),
        ("VLTA; NWL; NWL; Johnson & Johnson", SET),
        ("VLTA, NWL", ORDERED),
        ("Acme, Inc. and Volta, Ltd.", ["Acme", "Volta"]),
        ("1,200, 3,400 and 5", [1200, 3400, 5]),
        ("$1.2M; $3M", [{"type": "number", "value": 1.2, "unit": "million"}, 3e6]),
        ("Yes", True),
        ("yes, it did.", True),
        ("Answer: true", True),
        ("No.", False),
        ("It is false", {"type": "boolean", "value": False}),
        ("There is no data for VLTA on 2024-03-05.", REFUSAL),
        ("Answer: not available", REFUSAL),
        ("VLTA was not listed in 2019.", REFUSAL),
        ("The company doesn't exist.", REFUSAL),
        ("Answer: N/A", REFUSAL),
    ],
)
def test_an_answer_in_any_usual_form_matches(message: str, answer: Any) -> None:
    assert matches_answer(message, answer)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("", 3),
        ("three", 3),
        ("4", 3),
        ("3 or 4", 3),
        ("Answer: 3 or 4", 3),
        ("Answer: either 3", 3),
        ("3, 4", 3),
        ("3,4", 3),
        ("3-4", 3),
        ("between 3 and 5", 4),
        ("1 2 3 4 5", 3),
        (" ".join(map(str, range(100))), 3),
        ("Answer: " + ", ".join(map(str, range(100))), 3),
        ("Answer: 3\nAnswer: 4", 3),
        ("It is not 3", 3),
        ("I cannot say whether it is 3", 3),
        ("What is 1 + 2? 3", 3),
        ("3 " * 10, 3),
        ("3" + " " * 5000 + "x" * 5000, 3),
        ("3rd", 3),
        ("Q3", 3),
        ("3x", 3),
        ("13", 3),
        ("0.3", 3),
        ("3e2", 3),
        ("-3", 3),
        ("3%", 3.0001),
        ("3 million", 3),
        ("1,2345", 12345),
        ("1,23", 123),
        ("1.234,56", 1234.56),
        ("12.6 million", MILLIONS),
        ("€12.5 million", MILLIONS),
        ("12.5%", MILLIONS),
        ("12.5 billion", MILLIONS),
        ("12.5 thousand", MILLIONS),
        ("Between $12.5 million and $13 million", MILLIONS),
        ("12.6%", PERCENT),
        ("0.125%", PERCENT),
        ("1.25", PERCENT),
        ("12.5 million", PERCENT),
        ("03/05/2024", DATE),
        ("05.03.2024", DATE),
        ("2024-03-05 or 2024-03-06", DATE),
        ("2024-03-05, 2024-03-06", DATE),
        ("not 2024-03-05", DATE),
        ("March 2024", DATE),
        ("2024-13-05", DATE),
        ("20240305", DATE),
        ("Northwind", NAME),
        ("Northwind Logic", NAME),
        ("Northwind Logistics or Northwind Logic", NAME),
        ("Northwind Logistics, Northwind Logic", NAME),
        ("Not Northwind Logistics", NAME),
        ("Northwind Logistics (Northwind Logic)", NAME),
        ("Which company? Northwind Logistics", NAME),
        ("VLTAA", "VLTA"),
        ("VLTA VLTB VLTAA", "VLTA"),
        ("BRKA", "BRK.A"),
        ("VLTA, NWL", SET),
        ("VLTA, NWL, Johnson & Johnson, ACME", SET),
        ("VLTA, NWL or Johnson & Johnson", SET),
        ("NWL, VLTA", ORDERED),
        ("VLTA, NWL, NWL", ORDERED),
        ("yes and no", True),
        ("yes or no", True),
        ("no", True),
        ("Not true", True),
        ("I think so", True),
        ("It closed at 12.5, but the data does not exist", REFUSAL),
        ("12.5", REFUSAL),
        ("Here it is", REFUSAL),
    ],
)
def test_what_is_wrong_or_covers_several_answers_does_not_match(message: str, answer: Any) -> None:
    assert not matches_answer(message, answer)


@pytest.mark.parametrize(
    "text",
    [
        "$305,861,000 (fiscal 2023)",
        "The gross profit in Q2 2023 was $305,861,000.",
        "Gross profit in the second quarter of fiscal 2023: $305,861,000",
        "In 2023, up on 2022: 305,861,000 USD",
        "Gross profit - $305,861,000",
        "Gross profit – 305,861,000",
        "Gross profit ($305,861,000)",
        "USD305,861,000",
        "305861000USD",
        "305.86 mln",
        "$305.86MM",
        "0.30586 bln",
        "$\\boxed{305{,}861{,}000}$ USD",
        "It fell to $305,861,000",
        "It had fallen in 2023 to about $305,861,000",
        "It declined from $305,861,000",
    ],
)
def test_a_year_a_dash_or_a_level_do_not_spoil_a_figure(text: str) -> None:
    assert matches_answer(f"Answer: {text}", REVENUE)
    assert not matches_answer(f"Answer: {text}", REVENUE | {"value": 2023, "unit": ""})
    assert not matches_answer(f"Answer: {text}", REVENUE | {"value": -305_861_000})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2023, 2024", 2023),
        ("In 2023 it was 1998", 1998),
        ("2023 or 305,861,000", REVENUE),
        ("2023 and 305,861,000 and 299,000,000", REVENUE),
        ("$2,023 and $305,861,000", REVENUE),
        ("2023 million and 305,861,000", REVENUE),
        ("2023", REVENUE),
        ("3 months: 305,861,000", REVENUE),
        ("(fiscal 2023)", 2022),
    ],
)
def test_only_what_can_be_a_year_is_one(text: str, answer: Any) -> None:
    assert not matches_answer(f"Answer: {text}", answer)


def test_a_year_may_be_the_answer() -> None:
    assert matches_answer("It was founded in 1998.", 1998)
    assert not matches_answer("It was founded in 1998 with 17 people.", 1998)


@pytest.mark.parametrize(
    "text",
    [
        "-$19,852,000",
        "- $19,852,000",
        "– $19,852,000",
        "$-19,852,000",
        "($19,852,000)",
        "$(19,852,000)",
        "(19,852,000) USD",
        "(19.852 million)",
        "-(19,852,000)",
        "The net income was ($19,852,000).",
        "Net income: - $19,852,000",
        "a net loss of $19.852 million",
        "A net loss of Quintrel Data Inc. in fiscal 2023 of $19.852 million",
        "net loss: 19,852,000",
        "$19,852,000 (loss)",
        "$19,852,000 net loss",
        "It lost $19,852,000",
        "-19,852,000 USD (a net loss)",
        "a loss of -19,852,000",
    ],
)
def test_a_loss_is_below_zero_however_it_is_written(text: str) -> None:
    assert matches_answer(f"Answer: {text}", LOSS)
    assert not matches_answer(f"Answer: {text}", LOSS | {"value": 19_852_000})


@pytest.mark.parametrize(
    "text", ["$19,852,000", "a profit of $19,852,000", "Net income - $19,852,000", "no loss: $19,852,000 or so"]
)
def test_what_is_no_loss_is_not_below_zero(text: str) -> None:
    assert not matches_answer(f"Answer: {text}", LOSS)


@pytest.mark.parametrize(
    "text",
    [
        "decreased by 1.70%",
        "It fell by 1.7 percent",
        "down 1.70%",
        "1.70% decrease",
        "1.7% lower",
        "a decline of 1.70%",
        "It dropped 1.70 %",
        "declined from 2022 by 1.70%",
        "a 1.70% drop",
    ],
)
def test_a_fall_is_not_a_rise_unless_the_question_takes_it_for_granted(text: str) -> None:
    rise = FALL | {"value": 1.7}
    assert matches_answer(f"Answer: {text}", FALL)
    assert not matches_answer(f"Answer: {text}", rise)
    assert not matches_answer(f"Answer: {text}", rise, question="By how much did it rise or fall?")
    assert matches_answer(f"Answer: {text}", rise, question="By how much did it fall?")
    assert matches_answer(f"Answer: {text}", FALL, question="By how much did it fall?")
    assert not matches_answer("Answer: rose by 1.70%", FALL, question="By how much did it fall?")
    assert not matches_answer("Answer: rose by 1.70%", FALL)


@pytest.mark.parametrize(
    "text", ["±1.7%", "+/- 1.7%", "+-1.7%", "rise or fall of 1.7%", "1.7% or -1.7%", "1.7% (-1.7%)"]
)
def test_a_figure_with_both_signs_is_no_answer(text: str) -> None:
    assert not matches_answer(f"Answer: {text}", FALL)
    assert not matches_answer(f"Answer: {text}", FALL | {"value": 1.7})


signed = st.lists(
    st.sampled_from(
        ["-", "- ", "(", ")", "$", "loss of ", " (loss)", "fell by ", "a ", "1.7", "%", " decrease", " ", ": ", "to "]
    ),
    min_size=1,
    max_size=7,
).map("".join)


@given(signed)
def test_no_form_of_a_figure_is_right_for_both_signs(text: str) -> None:
    answers = [{"type": "number", "value": value, "absolute": 0.01} for value in (1.7, -1.7)]
    assert sum(matches_answer(text, answer) for answer in answers) <= 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The CEO is Edda Fairbourne.", PERSON),
        ("The chief executive of Solvane Properties Corp. is Edda Fairbourne.", PERSON),
        ("The current CEO: Edda Fairbourne", PERSON),
        ("CEO: Edda Fairbourne", PERSON),
        ("CEO Edda Fairbourne", PERSON),
        ("The CEO, Edda Fairbourne", PERSON),
        ("It is the CEO Edda Fairbourne", PERSON),
        ("Chief Executive Officer (CEO): Edda Fairbourne", PERSON),
        ("Solvane Properties' CEO is Edda Fairbourne", PERSON),
        ("Solvane's current CEO is Edda Fairbourne", PERSON),
        ("Edda Fairbourne has been CEO since 2019", PERSON),
        ("Edda Fairbourne (CEO of Solvane Properties since March 2019)", PERSON),
        ("Edda Fairbourne (CEO)", PERSON),
        ("Edda Fairbourne, CEO", PERSON),
        ("Edda Fairbourne, Chief Executive Officer of Solvane Properties", PERSON),
        ("Edda Fairbourne is the CEO.", PERSON),
        ("Ms. Edda Fairbourne", PERSON),
        ("Dr Edda Fairbourne", PERSON),
        ("\\boxed{Edda Fairbourne}", PERSON),
        ("\\boxed{\\text{Edda Fairbourne}}", PERSON),
        ("\\boxed{VLTA, NWL}", ORDERED),
        ("Quintrel Data Class B", CLASS_B),
        ("Quintrel Data, Inc. Class B", CLASS_B),
        ("Quintrel Data Inc. (Class B)", CLASS_B),
        ("Quintrel Data Inc. Class B (QNTB)", CLASS_B),
        ("Quintrel Data Inc. Class B (NASDAQ: QNTB)", CLASS_B),
        ("Quintrel Data Inc. Class B ($2.6B)", CLASS_B),
        ("Quintrel Data Inc. Class B with $2.6 billion", CLASS_B),
        ("Quintrel Data Inc. Class B - 12.5%", CLASS_B),
        ("VLTA ($2.6B), NWL ($1.1B)", ORDERED),
    ],
)
def test_a_name_may_come_with_its_role_or_its_figure(text: str, answer: Any) -> None:
    assert matches_answer(f"Answer: {text}", answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The CEO is not Edda Fairbourne.", PERSON),
        ("The CEO isn't Edda Fairbourne.", PERSON),
        ("Edda Fairbourne is not the CEO", PERSON),
        ("The former CEO is Edda Fairbourne.", PERSON),
        ("Edda Fairbourne (former CEO)", PERSON),
        ("Edda Fairbourne (until 2021)", PERSON),
        ("Edda Fairbourne had been CEO until 2021", PERSON),
        ("Edda Fairbourne was the CEO", PERSON),
        ("Solvane's former CEO is Edda Fairbourne", PERSON),
        ("Solvane's CFO is Hedda Cheverton, its CEO is Edda Fairbourne", PERSON),
        ("The CEO, Hedda Cheverton, Edda Fairbourne", PERSON),
        ("Edda Fairbourne, Hedda Cheverton", PERSON),
        ("Edda Fairbourne (Hedda Cheverton)", PERSON),
        ("Edda Fairbourne and Hedda Cheverton", PERSON),
        ("Edda Fairbourne, CEO, or Hedda Cheverton, CEO", PERSON),
        ("CEO: Hedda Cheverton, CEO: Edda Fairbourne", PERSON),
        ("The CEO is Hedda Cheverton is Edda Fairbourne", PERSON),
        ("The CEO of Solvane, perhaps, is Edda Fairbourne", PERSON),
        ("The CEO of Solvane or Volta is Edda Fairbourne", PERSON),
        ("\\boxed{Edda Fairbourne} \\boxed{Hedda Cheverton}", PERSON),
        ("Fairbourne", PERSON),
        ("Quintrel Data Class A", CLASS_B),
        ("Quintrel Data Inc. (Class A)", CLASS_B),
        ("Quintrel Data", CLASS_B),
        ("Class B", CLASS_B),
        ("Quintrel Data Inc. Class B (Class A)", CLASS_B),
        ("Quintrel Data Inc. Class B ($2.6B), Volta ($3B)", CLASS_B),
        ("Quintrel Data Inc. Class B ($2.6B against $3B of Volta)", CLASS_B),
        ("VLTA ($2.6B), NWL ($1.1B), ACME ($1B)", ORDERED),
    ],
)
def test_a_name_denied_or_one_of_several_is_no_answer(text: str, answer: Any) -> None:
    assert not matches_answer(f"Answer: {text}", answer)


@pytest.mark.parametrize(
    "text",
    [
        "no data available",
        "There was no closing price on that date.",
        "No closing price (trading was halted).",
        "No company named Ostermark Aviation exists.",
        "There is no such company",
        "No listing found",
        "No matching company found",
        "No net income reported for fiscal 2026",
        "No net income data for fiscal 2026",
        "no fiscal 2026 data",
        "No Ostermark Aviation data",
        "No price for 2021-08-24",
        "not yet available",
        "Not reported yet",
        "not in database",
        "No available data",
        "Trading was halted that day",
        "There is no price; the stock was halted for 3 days",
        "I was unable to find this company",
        "I could not find any company of this name.",
        "The tools did not return any data.",
        "It didn’t trade",
        "It was not yet public on that date",
        "It had not gone public yet",
        "There isn't any data",
        "Nothing was found",
        "None available",
        "Unknown company",
        "0 results",
        "Fiscal 2026 results have yet to be reported",
        "No data (the latest annual report is of fiscal 2024)",
        "Data unavailable",
        "Not applicable",
    ],
)
def test_that_there_is_no_such_thing_can_be_said_in_many_ways(text: str) -> None:
    assert matches_answer(f"Answer: {text}", REFUSAL)


@pytest.mark.parametrize(
    "text",
    [
        "I cannot be bothered.",
        "this is not financial advice",
        "The answer is not simple.",
        "It is not so",
        "I do not know",
        "I can't say",
        "none",
        "unknown",
        "no",
        "No, it is fine",
        "No doubt the price is right",
        "no change in price",
        "no price change",
        "There was no trading halt",
        "Trading was not halted",
        "There is no data missing",
        "If there is no such data, say so.",
        "Is there no data?",
        "Perhaps there is no data",
        "There may be no data",
        "It is not true that there is no data",
        "I do not know whether the company exists",
        "There is no data, so I take 12.5",
        "No price of 12.5 USD",
        "There is no doubt: 12.5",
        "no data, 3",
        "No data for 3 of them",
        "12.5, or no data",
    ],
)
def test_what_gives_a_figure_or_means_something_else_is_no_refusal(text: str) -> None:
    assert not matches_answer(f"Answer: {text}", REFUSAL)


def test_a_refusal_counts_where_the_answer_stands() -> None:
    assert not matches_answer("There is no data for 2021.\nAnswer: the usual", REFUSAL)
    assert not matches_answer("There is no data for 2021.\nAnswer: 12.5", REFUSAL)


def test_a_huge_text_is_no_answer_and_takes_no_time() -> None:
    for filler in ("3 ", "1,", "-", "9", "(", "* ", "Answer ", "minus ", "2024-03-", "a and "):
        text = filler * 100_000
        assert not matches_answer(text, 3)
        assert not matches_answer(f"Answer: {text}", 3)
        assert not matches_answer(text, SET)
        assert not matches_answer(text, DATE)


def test_a_short_answer_after_a_long_text_counts() -> None:
    assert matches_answer("So 1 and 2 and then 4.\n" * 1000 + "Answer: 3", 3)


finite = st.floats(-1e12, 1e12).map(lambda x: round(x, 4))


@given(finite)
def test_a_number_matches_itself_however_it_is_written(value: float) -> None:
    for text in (repr(value), f"{value:,.4f}", f"{value:.12e}", f"Answer: {value}", f"it is {value!r}."):
        assert matches_answer(text, value)


@given(finite.filter(lambda x: abs(x) > 1e-3), st.sampled_from([("thousand", 1e3), ("M", 1e6), ("bn", 1e9)]))
def test_a_number_matches_itself_in_another_scale(value: float, scale: tuple[str, float]) -> None:
    unit, factor = scale
    spec = {"type": "number", "value": value, "tolerance": 1e-9}
    assert matches_answer(f"{value / factor!r} {unit}", spec)
    assert matches_answer(f"{value / factor!r}", spec | {"value": value / factor, "unit": unit})


@given(finite, finite)
@example(0.0, 1000.0)  # no day "0.0/1000"
def test_two_numbers_that_differ_are_no_answer(one: float, other: float) -> None:
    if abs(one - other) > 1e-5 * max(abs(one), abs(other)):
        for text in (
            f"{one!r} {other!r}",
            f"Answer: {one!r}, {other!r}",
            f"{other!r} ({one!r})",
            f"{one!r}/{other!r}",
        ):
            assert not matches_answer(text, one)


@given(st.floats(1, 1e6), st.floats(1e-4, 0.1), st.floats(-0.3, 0.3))
def test_a_tolerance_is_relative(value: float, tolerance: float, error: float) -> None:
    if abs(abs(error) - tolerance) > 1e-6:
        spec = {"type": "number", "value": value, "tolerance": tolerance}
        assert matches_answer(repr(value * (1 + error)), spec) == (abs(error) <= tolerance)


@given(st.dates())
def test_a_date_matches_itself_in_words(day: Any) -> None:
    if day.year < 1000:
        return
    for text in (day.isoformat(), f"{day:%B} {day.day}, {day.year}", f"{day.day} {day:%b} {day.year}"):
        assert matches_answer(text, {"type": "date", "value": day.isoformat()})


names = st.from_regex(r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){0,2}", fullmatch=True).filter(
    lambda n: n.split()[0] != "The"
)


@given(names, st.sampled_from(["Inc.", "Corp", "plc", ", Ltd.", "S.A."]))
def test_case_and_legal_forms_do_not_matter(name: str, form: str) -> None:
    assert matches_answer(name.upper(), {"type": "name", "value": name})
    assert matches_answer(f"{name} {form}", {"type": "name", "value": name})
    assert matches_answer(f"**{name}**.", {"type": "name", "value": f"{name} {form}"})


@given(st.text(max_size=300), st.sampled_from([3, MILLIONS, DATE, NAME, SET, ORDERED, True, REFUSAL]))
def test_any_text_can_be_judged(text: str, answer: Any) -> None:
    assert matches_answer(text, answer) in (True, False)


@given(st.lists(st.from_regex(r"[A-Z]{4}", fullmatch=True), min_size=2, max_size=5, unique=True), st.randoms())
def test_a_set_matches_in_any_order_and_a_list_in_one(items: list[str], random: Any) -> None:
    shuffled = random.sample(items, len(items))
    text = ", ".join(shuffled)
    assert matches_answer(text, {"type": "set", "values": items})
    assert matches_answer(text, items) == (shuffled == items)
    assert not matches_answer(", ".join([*shuffled, "XXXXX"]), {"type": "set", "values": items})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"type": "colour"}, ["'colour'", "'number'"]),
        ({"value": 3}, ["None", "'number'"]),
        ({"type": ["number"]}, ["'number'"]),
        ({"type": "number", "value": "3"}, ["'3'", "`tolerance`"]),
        ({"type": "number", "value": 3, "tolerance": -1}, ["-1"]),
        ({"type": "number", "value": 3, "tolerances": 1}, ["tolerances", "tolerance"]),
        ({"type": "date", "value": "5 March"}, ["5 March", "2024-03-05"]),
        ({"type": "date", "value": "2024-02-31"}, ["2024-02-31"]),
        ({"type": "name", "value": ""}, ["`aliases`"]),
        ({"type": "set", "values": []}, ["at least one"]),
        ({"type": "boolean", "value": "yes"}, ["true or false"]),
        (float("nan"), ["nan"]),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused_with_the_task(answer: Any, words: list[str]) -> None:
    with pytest.raises(TaskFormatError) as caught:
        is_matched(attempt("3", answer=answer))
    assert all(word in str(caught.value) for word in [*words, "'t'"])


def test_keys_that_a_dataset_filled_in_do_no_harm() -> None:
    assert matches_answer("3", {"type": "number", "value": 3, "aliases": None, "unit": None, "values": None})


def test_the_reward_is_1_for_a_match_and_0_for_all_else() -> None:
    assert answer_match([attempt("3", answer=3), attempt("4", answer=3), attempt(None, answer=3)]) == [1.0, 0.0, 0.0]
    with pytest.raises(TaskFormatError, match="no `answer`"):
        answer_match([attempt("3")])


@pytest.mark.parametrize(
    ("text", "answer", "is_mentioned"),
    [
        ("VLTA had revenue of $12.5 million in 2023, up from 11 million.", MILLIONS, True),
        ("VLTA had revenue of $11 million in 2023.", MILLIONS, False),
        ("1, 2, 3, 4, 5, 6 or 12.5 million", MILLIONS, False),
        ("x" * 2000 + " 12.5 million", MILLIONS, False),
        ("The split of Northwind Logistics Inc. was on 5 March 2024.", NAME, True),
        ("The split of Northwind Logic Inc. was on 5 March 2024.", NAME, False),
        ("The split of Northwind Logistics Inc. was on 5 March 2024.", DATE, True),
    ],
)
def test_a_post_may_say_more_than_the_answer(text: str, answer: Any, is_mentioned: bool) -> None:
    assert mentions_answer(text, answer) is is_mentioned


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Solvane: revenue in fiscal 2023 is 305861000 USD", REVENUE),
        ("Revenue FY2023: $305.86 million ($305,861,000)", REVENUE),
        ("As of 2024-03-05: $305,861,000 in Q2 2023", REVENUE),
        ("Solvane: net loss of $19.852 million", LOSS),
        ("The split of Northwind Logistics was on 5 March 2024.", DATE),
        ("Edda Fairbourne", PERSON),
        ("CEO: Edda Fairbourne", PERSON),
        ("Solvane Properties: chief executive is Edda Fairbourne", PERSON),
        ("Solvane Properties CEO: **Edda Fairbourne**", PERSON),
        ("Hi Hedda, the chief executive of Solvane Properties is Edda Fairbourne.", PERSON),
        ("Hi @Hedda Cheverton, it's Edda Fairbourne", PERSON),
        ("Solvane Properties' chief executive is Edda Fairbourne (since 2019).", PERSON),
        ("Solvane Properties's CEO is Edda Fairbourne", PERSON),
        ("Edda Fairbourne is the CEO of Solvane Properties Corp.", PERSON),
        ("Solvane Properties Corp. (SLVN) is led by Edda Fairbourne", PERSON),
        ("Ms. Edda Fairbourne, Chief Executive Officer of Solvane Properties", PERSON),
        ("At Solvane Properties, Edda Fairbourne is the CEO", PERSON),
        ("The symbol is VLTA", "VLTA"),
    ],
)
def test_a_post_may_give_an_answer_in_a_sentence(text: str, answer: Any) -> None:
    assert gives_only(text, [answer])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", REVENUE),
        ("305861000 / 299000000 / 281000000", REVENUE),
        ("$305.9M, up from $299M", REVENUE),
        ("It was $305.9M in 2023 and $299M in 2022", REVENUE),
        ("It was $305.9M or so", REVENUE),
        ("It was not $305.9M", REVENUE),
        ("a loss of 305861000", REVENUE),
        ("2023", REVENUE),
        ("305861000 " * 4, REVENUE),
        ("305861000 " + "x" * 2000, REVENUE),
        ("The split was on 5 March 2024 and 6 March 2024.", DATE),
        ("The split was on a Tuesday.", DATE),
        ("", PERSON),
        ("Hedda Cheverton", PERSON),
        ("Board: Hedda Cheverton, Dagny Bellhouse, Edda Fairbourne, Alina Vandermeer.", PERSON),
        ("Board: Hedda Cheverton, Edda Fairbourne. Not Edda Fairbourne.", PERSON),
        ("Not Edda Fairbourne", PERSON),
        ("It isn't Edda Fairbourne", PERSON),
        ("Former CEO: Edda Fairbourne", PERSON),
        ("Edda Fairbourne or Hedda Cheverton", PERSON),
        ("Edda Fairbourne and Hedda Cheverton", PERSON),
        ("Edda Fairbourne / Hedda Cheverton", PERSON),
        ("Hedda Cheverton Edda Fairbourne", PERSON),
        ("Hedda Cheverton\nEdda Fairbourne", PERSON),
        ("CEO: Hedda Cheverton. CEO: Edda Fairbourne.", PERSON),
        ("Edda Fairbourne Edda Fairbourne", PERSON),
        ("edda fairbourne, hedda cheverton", PERSON),
        ("EDDA FAIRBOURNE, HEDDA CHEVERTON", PERSON),
        ("CEO of Hedda Cheverton of Edda Fairbourne of Dagny Bellhouse", PERSON),
        ("CEO of Edda Fairbourne: Hedda Cheverton", PERSON),
        ("Hedda Cheverton: Edda Fairbourne: Dagny Bellhouse", PERSON),
        ("Edda Fairbourne 17 18", PERSON),
        ("Edda Fairbourne. Revenue: $305.9M", PERSON),
        ("The split was on 5 March 2024, at 17.", DATE),
        ("VLTA, NWL", "VLTA"),
        ("NWL and VLTA", "VLTA"),
    ],
)
def test_a_post_that_covers_several_answers_gives_none(text: str, answer: Any) -> None:
    assert not gives_only(text, [answer])


def test_of_two_names_only_one_can_be_what_a_post_gives() -> None:
    first, second = PERSON, {"type": "name", "value": "Hedda Cheverton"}
    for text in (
        "{} of {}",
        "{}: {}",
        "The CEO of {} is {}",
        "{}'s CEO is {}",
        "{} CEO, {}",
        "{}, {}",
        "{} has {}",
        "At {}, {}",
    ):
        for names in (("Edda Fairbourne", "Hedda Cheverton"), ("Hedda Cheverton", "Edda Fairbourne")):
            assert sum(gives_only(text.format(*names), [person]) for person in (first, second)) <= 1


def test_a_post_may_have_to_give_several_answers() -> None:
    text = "Edda Fairbourne of Solvane Properties made $305.861 million."
    assert gives_only(text, [PERSON, REVENUE])
    assert not gives_only(text, [PERSON, REVENUE, LOSS])
    assert not gives_only(f"{text} Or $1.", [PERSON, REVENUE])


def test_specs_survive_json() -> None:
    for answer in (MILLIONS, SET, ORDERED, NAME):
        assert matches_answer("x", json.loads(json.dumps(answer))) is False


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("NESTLE S.A.", "Nestlé"),
        ("The CEO is Edda Fairbourne.", PERSON),
        ("Edda Fairbourne, CEO", PERSON),
        ("The symbol is VLTA", "VLTA"),
        ("Quintrel Data Class B", CLASS_B),
        ("Quintrel Data Inc. Class B (NASDAQ: QNTB)", CLASS_B),
        ("Acme, Inc. and Volta, Ltd.", ["Acme", "Volta"]),
        ("There is no such company", REFUSAL),
        ("No net income data for fiscal 2026", REFUSAL),
        ("It didn’t trade", REFUSAL),
        ("Trading was halted that day", REFUSAL),
    ],
)
def test_only_the_words_of_companies_know_how_companies_are_written_about(message: str, answer: Any) -> None:
    assert answers.matches_answer(message, answer, words=COMPANY_WORDS)
    assert not answers.matches_answer(message, answer)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("$12.5 million ($12,500,000)", MILLIONS),
        ("It lost $19,852,000", LOSS),
        ("Tuesday, 5 March 2024", DATE),
        ("The answer is Dr. Edda Fairbourne.", PERSON),
        ("Northwind Logistics Inc. (NWL)", NAME),
        ("- VLTA\n- NWL\n- Johnson and Johnson", SET),
        ("yes, it did.", True),
        ("There is no data for VLTA on 2024-03-05.", REFUSAL),
        ("No price for 2021-08-24", REFUSAL),
        ("I was unable to find it", REFUSAL),
        ("0 results", REFUSAL),
    ],
)
def test_general_words_know_numbers_dates_names_lists_and_refusals(message: str, answer: Any) -> None:
    assert answers.matches_answer(message, answer, words=GENERAL)


def test_a_field_of_one_s_own_adds_its_words() -> None:
    words = AnswerWords(roles="captain", name_endings="fc", things="goals?")
    assert answers.matches_answer("The captain is Edda Fairbourne.", PERSON, words=words)
    assert answers.matches_answer("Northwind FC", "Northwind", words=words)
    assert answers.matches_answer("There were no goals", REFUSAL, words=words)
    assert is_matched(attempt("Northwind FC", answer="Northwind"), words=words)


@pytest.mark.parametrize(
    "text",
    [
        "313.7 is wrong",
        "313.7 is incorrect.",
        "It is false that it was 313.7",
        "anything but 313.7",
        "more than 313.7",
        "other than $313.7",
        "313.7?",
        "never 313.7",
        "unlikely 313.7",
    ],
)
def test_a_figure_that_is_denied_or_doubted_is_not_given(text: str) -> None:
    assert matches_answer("313.7", 313.7)
    assert not matches_answer(text, 313.7)
    assert not matches_answer(f"Answer: {text}", 313.7)
    assert not matches_answer(text.replace("313.7", "2024-03-05"), "2024-03-05")


@pytest.mark.parametrize("text", ["12.5% lower than in 2022", "a fall of 12.5 %, more than any other", "-12.5%"])
def test_a_comparison_does_not_take_a_figure_back(text: str) -> None:
    assert matches_answer(text, {"type": "number", "value": -12.5, "unit": "%"})


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1" * 310, 5), ("1e999", 5), ("5 uſd", 6), ("ſep 5, 2024", "2024-03-05"), ("[" * 400 + "]" * 400, ["A"])],
)
def test_a_text_that_is_no_number_date_or_list_is_wrong_and_no_error(text: str, answer: Any) -> None:
    assert not matches_answer(text, answer)
