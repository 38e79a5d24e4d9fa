"""What a family makes: a question, its expected outcome, and a solution."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from mcp_grpo.desk.servers.slack.workspace import Workspace
from mcp_grpo.desk.world.corpus import Corpus
from mcp_grpo.desk.world.market import Market
from mcp_grpo.desk.world.records import Company


T = TypeVar("T")

FINANCE, SEARCH, PYTHON, SLACK = "finance", "search", "python", "slack"
REFUSAL = {"type": "refusal"}


class Unsuitable(Exception):
    """The draw makes no good question; draw again."""


@dataclass(frozen=True, slots=True)
class World:
    """The data that tasks are about: of the finance, search and Slack servers."""

    market: Market
    corpus: Corpus
    workspace: Workspace

    @classmethod
    def of_seed(cls, seed: int) -> "World":
        """Make the world of the servers with the same `--seed`."""
        market = Market(seed)
        return cls(market, Corpus(market), Workspace(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """
    One turn of a solution: concurrent calls, and the evidence that their results (or errors, if it `fails`) must hold.
    """

    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    evidence: tuple[str, ...] = ()
    fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A task without id and columns: the question, its expected answer or state, and a solution."""

    question: str
    steps: Sequence[Step]
    final: str
    answer: Any = None
    expected_state: Mapping[str, Any] | None = None
    symbols: tuple[str, ...] = ()
    servers: tuple[str, ...] | None = None  # where they are not those of the family


@dataclass(frozen=True, slots=True)
class Pick:
    """
    Random choices from a world, limited to the listings of a split.

    Only `randrange` is used, which is the same in all versions of Python.
    """

    random: random.Random
    world: World
    symbols: frozenset[str] = field(repr=False)

    def one(self, values: Sequence[T]) -> T:
        """Pick one value."""
        if not values:
            raise Unsuitable
        return values[self.random.randrange(len(values))]

    def some(self, values: Sequence[T], number: int) -> list[T]:
        """Pick several different values, in random order."""
        left = list(values)
        if len(left) < number:
            raise Unsuitable
        return [left.pop(self.random.randrange(len(left))) for _ in range(number)]

    def companies(self, where: Callable[[Company], bool] = lambda company: True) -> list[Company]:
        """List the companies of this split that are traded today, in the market's order."""
        return [
            company
            for company in self.world.market.companies()
            if company.symbol in self.symbols and company.is_actively_trading and where(company)
        ]

    def company(self, where: Callable[[Company], bool] = lambda company: True) -> Company:
        """Pick one of [`companies`]."""
        return self.one(self.companies(where))


class Family(NamedTuple):
    """A family of tasks: how to draft one, its difficulty, and the servers it may use."""

    draft: Callable[[Pick], Draft]
    difficulty: str
    servers: tuple[str, ...]


def shown(value: Any) -> str:
    """Return a value as tool results show it."""
    return json.dumps(value, ensure_ascii=False)


def amount(value: float, unit: str) -> dict[str, Any]:
    """Return the answer that is an amount, correct to one in a thousand."""
    return {"type": "number", "value": value, "unit": unit, "tolerance": 0.001}


def exact(value: float, unit: str = "", within: float = 0.005) -> dict[str, Any]:
    """Return the answer that is a number, correct within an absolute margin."""
    return {"type": "number", "value": value, "unit": unit, "absolute": within}


def named(company: Company) -> dict[str, Any]:
    """Return the answer that is a company, of which the question names one class of shares at most."""
    aliases = [company.short_name, company.symbol]
    if company.share_class:
        suffix = f" Class {company.share_class}"
        aliases += [company.name.removesuffix(suffix), company.short_name + suffix]
    return {"type": "name", "value": company.name, "aliases": aliases}


def person(name: str) -> dict[str, Any]:
    """Return the answer that is a person."""
    return {"type": "name", "value": name}


def step(*calls: tuple[str, Mapping[str, Any]], evidence: Sequence[str] = (), fails: bool = False) -> Step:
    """Make one turn of a solution."""
    return Step(calls=calls, evidence=tuple(evidence), fails=fails)


def find(*companies: Company) -> Step:
    """Search for companies by name to find their symbols."""
    calls = (("searchName", {"query": company.short_name}) for company in companies)
    return step(*calls, evidence=[shown(company.symbol) for company in companies])
