"""Build tasks on the desk: any number, the same for the same seed."""

import hashlib
import logging
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]

from mcp_grpo.desk.tasks import channels, figures, prices, sources, traps
from mcp_grpo.desk.tasks.drafts import FINANCE, PYTHON, SEARCH, SLACK, Draft, Family, Pick, Unsuitable, World
from mcp_grpo.desk.world.market import Market
from mcp_grpo.errors import SettingsError
from mcp_grpo.tasks.columns import dataset_from_rows


logger = logging.getLogger(__name__)

FAMILIES: Mapping[str, Family] = {
    "lookup": Family(figures.lookup, "easy", (FINANCE,)),
    "quarter": Family(figures.quarter, "easy", (FINANCE,)),
    "arithmetic": Family(figures.arithmetic, "medium", (FINANCE, PYTHON)),
    "comparison": Family(figures.comparison, "medium", (FINANCE,)),
    "time_series": Family(prices.time_series, "medium", (FINANCE, PYTHON)),
    "search_verify": Family(sources.search_verify, "medium", (SEARCH, FINANCE)),
    "contradiction": Family(sources.contradiction, "medium", (SEARCH, FINANCE)),
    "code": Family(prices.code, "hard", (FINANCE, PYTHON)),
    "report": Family(channels.report, "medium", (FINANCE, SLACK)),
    "thread": Family(channels.thread, "hard", (FINANCE, SLACK)),
    "refusal": Family(traps.refusal, "medium", (FINANCE,)),
    "recovery": Family(traps.recovery, "medium", (FINANCE, PYTHON)),
    "adjusted": Family(prices.adjusted, "medium", (FINANCE,)),
    "namesakes": Family(traps.namesakes, "medium", (FINANCE,)),
    "ranking": Family(figures.ranking, "medium", (FINANCE,)),
    "restatement": Family(sources.restatement, "hard", (SEARCH, FINANCE)),
    "reaction": Family(channels.reaction, "medium", (SLACK,)),
}
"""The families of tasks, by name."""

HELD_OUT_FAMILIES = ("ranking", "restatement", "reaction")
"""Families that only the test split has."""

SPLITS = {"train": range(7), "validation": range(7, 8), "test": range(8, 10)}
"""The tenths of the companies in each split."""

SYSTEM_PROMPT = (
    "You work at the research desk of a bank. Today is {today}. Find what you are asked for with the tools; never answer "
    "from memory. When you are asked a question, end with a line `Answer: ` and the bare answer, as exact as the "
    "tools have it and with its unit."
)
_MAX_DRAWS = 200


def build_tasks(split: str = "train", num_tasks: int = 1000, *, seed: int = 0, world: int = 0) -> Dataset:
    """
    Build tasks on the desk's servers; see [`~mcp_grpo.desk.servers.desk_servers`].

    Families take turns. Splits share no companies, and some families are only in the test split, which therefore tests
    generalisation. Every task has a `solution` that [`~mcp_grpo.evaluation.run_solutions`] can run.

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"validation"` or `"test"`.
        num_tasks (`int`, *optional*, defaults to `1000`):
            Number of tasks.
        seed (`int`, *optional*, defaults to `0`):
            Another seed gives other tasks.
        world (`int`, *optional*, defaults to `0`):
            `seed` of the servers.

    Returns:
        [`~datasets.Dataset`]: The tasks, with the columns `task_id`, `prompt`, `servers`, `max_turns`, `difficulty`,
        `reference_calls` (those of the solution), `answer`, `expected_state`, `family`, `symbols` and `solution`. The same
        arguments give the same tasks to the byte.
    """
    if split not in SPLITS:
        raise SettingsError(f"`split` must be one of {', '.join(map(repr, SPLITS))}, got {split!r}.")
    if num_tasks < 1:
        raise SettingsError(f"`num_tasks` must be at least 1, got {num_tasks}.")
    place = World.of_seed(world)
    symbols = _symbols(place.market, split, world)
    families = [name for name in FAMILIES if split == "test" or name not in HELD_OUT_FAMILIES]
    rows: dict[str, dict[str, Any]] = {}
    turn = 0
    while len(rows) < num_tasks:
        if not families:
            raise SettingsError(
                f"The split {split!r} has no more than {len(rows)} different tasks in this world, and {num_tasks} were asked "
                "for. Ask for fewer, or build more with another `world`."
            )
        family = families[turn % len(families)]
        chance = random.Random(f"{seed} {split} {family} {turn}")
        row = _row(family, Pick(chance, place, symbols), rows)
        if row is None:
            families.remove(family)
            number = sum(one["family"] == family for one in rows.values())
            logger.warning(
                "The split %r seems to have no more than %d tasks of the family %r in this world: others take their place.",
                split,
                number,
                family,
            )
            continue
        rows[row["task_id"]] = row
        turn += 1
    return dataset_from_rows(list(rows.values()))


def _row(family: str, pick: Pick, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make a task that is not known yet; return `None` if the family seems to have no other."""
    for _ in range(_MAX_DRAWS):
        try:
            draft = FAMILIES[family].draft(pick)
        except Unsuitable:
            continue
        draft = replace(draft, question=draft.question.replace("..", "."))  # of a company called "Inc."
        task_id = f"{family}-{hashlib.sha256(draft.question.encode()).hexdigest()[:12]}"
        if task_id not in known:
            return _as_row(task_id, family, draft, pick.world.market.today)
    return None


def _as_row(task_id: str, family: str, draft: Draft, today: str) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT.format(today=today)},
            {"role": "user", "content": draft.question},
        ],
        "servers": list(draft.servers or FAMILIES[family].servers),
        "difficulty": FAMILIES[family].difficulty,
        "reference_calls": sum(len(one.calls) for one in draft.steps),
        "answer": draft.answer,
        "expected_state": draft.expected_state,
        "family": family,
        "symbols": list(draft.symbols),
        "solution": {
            "steps": [
                {
                    "calls": [{"name": name, "arguments": dict(arguments)} for name, arguments in one.calls],
                    "evidence": list(one.evidence),
                    "fails": one.fails,
                }
                for one in draft.steps
            ],
            "final": draft.final,
        },
    }


def _symbols(market: Market, split: str, world: int) -> frozenset[str]:
    """Return the listings of a split. All listings of a company are in one split."""
    chosen: set[str] = set()
    for company in market.companies():
        digest = hashlib.sha256(f"{world} {company.issuer}".encode()).digest()
        if int.from_bytes(digest[:4], "big") % 10 in SPLITS[split]:
            chosen.add(company.symbol)
    return frozenset(chosen)
