"""What a family of tasks makes: a question, what it is worth, and a way to the answer."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcp_grpo.servers.slack.workspace import Workspace
from mcp_grpo.servers.world.corpus import Corpus
from mcp_grpo.servers.world.market import Market
from mcp_grpo.servers.world.records import Company


T = TypeVar("T")

FINANCE, SEARCH, PYTHON, SLACK = "finance", "search", "python", "slack"
REFUSAL = {"type": "refusal"}


class Unsuitable(Exception):
    """What was drawn makes no good question; draw again."""


@dataclass(frozen=True, slots=True)
class World:
    """
    What tasks are about.

    Args:
        market ([`Market`]):
            What the finance server knows.
        corpus ([`Corpus`]):
            What the search server finds.
        workspace ([`Workspace`]):
            What Slack holds.
    """

    market: Market
    corpus: Corpus
    workspace: Workspace

    @classmethod
    def of_seed(cls, seed: int) -> "World":
        """
        The world that the servers have with the same `--seed`.

        Args:
            seed (`int`):
                Which one.

        Returns:
            [`World`]: The world.
        """
        market = Market(seed)
        return cls(market, Corpus(market), Workspace(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """
    One turn of a solution.

    Args:
        calls (`tuple[tuple[str, Mapping[str, Any]], ...]`):
            Tools and their arguments, called at the same time.
        evidence (`tuple[str, ...]`, *optional*):
            What the results must say for the next turn to know what it needs.
        fails (`bool`, *optional*, defaults to `False`):
            Whether the tool is to answer with an error, which is then the evidence.
    """

    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    evidence: tuple[str, ...] = ()
    fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """
    A task before it has a number.

    Args:
        question (`str`):
            What is asked.
        steps (`Sequence[Step]`):
            How it can be solved.
        final (`str`):
            The message that ends the solution.
        servers (`tuple[str, ...]`):
            Servers whose tools may be used.
        difficulty (`str`):
            `"easy"`, `"medium"` or `"hard"`.
        answer (`Any`, *optional*):
            What [`~mcp_grpo.rewards.answer_match`] expects of the final message.
        expected_state (`Mapping[str, Any]`, *optional*):
            What [`~mcp_grpo.rewards.state_match`] expects to have been done.
        symbols (`tuple[str, ...]`, *optional*):
            Listings it is about.
    """

    question: str
    steps: Sequence[Step]
    final: str
    servers: tuple[str, ...]
    difficulty: str
    answer: Any = None
    expected_state: Mapping[str, Any] | None = None
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """
    Chance, and what of the world it may fall on.

    Args:
        random (`random.Random`):
            The source of chance. Only `randrange` is used, which is the same in all versions of Python.
        world ([`World`]):
            The world.
        symbols (`frozenset[str]`):
            Listings that tasks of this split may be about.
    """

    random: random.Random
    world: World
    symbols: frozenset[str] = field(repr=False)

    def one(self, values: Sequence[T]) -> T:
        """
        One of some values.

        Args:
            values (`Sequence[T]`):
                The values.

        Returns:
            `T`: One of them.
        """
        if not values:
            raise Unsuitable
        return values[self.random.randrange(len(values))]

    def some(self, values: Sequence[T], number: int) -> list[T]:
        """
        Several different ones of some values.

        Args:
            values (`Sequence[T]`):
                The values.
            number (`int`):
                How many.

        Returns:
            `list[T]`: As many, in random order.
        """
        left = list(values)
        if len(left) < number:
            raise Unsuitable
        return [left.pop(self.random.randrange(len(left))) for _ in range(number)]

    def companies(self, where: Callable[[Company], bool] = lambda company: True) -> list[Company]:
        """
        Companies of this split that are traded today.

        Args:
            where (`Callable[[Company], bool]`, *optional*):
                Only those of which it holds.

        Returns:
            `list[Company]`: In the market's order.
        """
        return [
            company
            for company in self.world.market.companies()
            if company.symbol in self.symbols and company.is_actively_trading and where(company)
        ]

    def company(self, where: Callable[[Company], bool] = lambda company: True) -> Company:
        """
        One of [`companies`].

        Args:
            where (`Callable[[Company], bool]`, *optional*):
                Only of those of which it holds.

        Returns:
            [`Company`]: The company.
        """
        return self.one(self.companies(where))


def shown(value: Any) -> str:
    """
    A value as results of tools have it.

    Args:
        value (`Any`):
            Such as a price.

    Returns:
        `str`: JSON.
    """
    return json.dumps(value, ensure_ascii=False)


def amount(value: float, unit: str) -> dict[str, Any]:
    """
    The answer that is an amount, right to one in a thousand.

    Args:
        value (`float`):
            The amount.
        unit (`str`):
            Such as `"USD"`.

    Returns:
        `dict[str, Any]`: The `answer` of a task.
    """
    return {"type": "number", "value": value, "unit": unit, "tolerance": 0.001}


def exact(value: float, unit: str = "", within: float = 0.005) -> dict[str, Any]:
    """
    The answer that is a number, right to some absolute margin.

    Args:
        value (`float`):
            The number.
        unit (`str`, *optional*):
            Such as `"%"`.
        within (`float`, *optional*, defaults to `0.005`):
            How far it may be off.

    Returns:
        `dict[str, Any]`: The `answer` of a task.
    """
    return {"type": "number", "value": value, "unit": unit, "absolute": within}


def named(company: Company) -> dict[str, Any]:
    """
    The answer that is a company, of which the question names one class of shares at most.

    Args:
        company ([`Company`]):
            The company.

    Returns:
        `dict[str, Any]`: The `answer` of a task.
    """
    aliases = [company.short_name, company.symbol]
    if company.share_class:
        suffix = f" Class {company.share_class}"
        aliases += [company.name.removesuffix(suffix), company.short_name + suffix]
    return {"type": "name", "value": company.name, "aliases": aliases}


def person(name: str) -> dict[str, Any]:
    """
    The answer that is a person.

    Args:
        name (`str`):
            The full name.

    Returns:
        `dict[str, Any]`: The `answer` of a task.
    """
    return {"type": "name", "value": name}


def step(*calls: tuple[str, Mapping[str, Any]], evidence: Sequence[str] = (), fails: bool = False) -> Step:
    """
    One turn of a solution; see [`Step`].

    Args:
        calls (`tuple[str, Mapping[str, Any]]`):
            Tools and arguments.
        evidence (`Sequence[str]`, *optional*):
            What the results must say.
        fails (`bool`, *optional*, defaults to `False`):
            Whether they are errors.

    Returns:
        [`Step`]: The turn.
    """
    return Step(calls=calls, evidence=tuple(evidence), fails=fails)


def find(*companies: Company) -> Step:
    """
    Find the symbols of companies.

    Args:
        companies ([`Company`]):
            The companies.

    Returns:
        [`Step`]: One search for each.
    """
    calls = (("searchName", {"query": company.short_name}) for company in companies)
    return step(*calls, evidence=[shown(company.symbol) for company in companies])
