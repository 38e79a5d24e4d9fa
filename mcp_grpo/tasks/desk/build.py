"""Builds tasks on the desk, as many as are wanted, the same for the same seed."""

import hashlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]

from mcp_grpo.errors import SettingsError
from mcp_grpo.servers.world.market import Market
from mcp_grpo.tasks.columns import dataset_from_rows
from mcp_grpo.tasks.desk import channels, figures, prices, sources, traps
from mcp_grpo.tasks.desk.drafts import Draft, Pick, Unsuitable, World


logger = logging.getLogger(__name__)

FAMILIES: Mapping[str, Callable[[Pick], Draft]] = {
    "lookup": figures.lookup,
    "quarter": figures.quarter,
    "arithmetic": figures.arithmetic,
    "comparison": figures.comparison,
    "time_series": prices.time_series,
    "search_verify": sources.search_verify,
    "contradiction": sources.contradiction,
    "code": prices.code,
    "report": channels.report,
    "thread": channels.thread,
    "refusal": traps.refusal,
    "recovery": traps.recovery,
    "adjusted": prices.adjusted,
    "namesakes": traps.namesakes,
    "ranking": figures.ranking,
    "restatement": sources.restatement,
    "reaction": channels.reaction,
}
"""How tasks of each family are made."""

HELD_OUT_FAMILIES = ("ranking", "restatement", "reaction")
"""Families that only the test split has."""

SPLITS = {"train": range(7), "validation": range(7, 8), "test": range(8, 10)}
"""Tenths of the companies that each split is about."""

SYSTEM_PROMPT = (
    "You work at the research desk of a bank. Today is {today}. Find what you are asked for with the tools; never answer "
    "from memory. When you are asked a question, end with a line `Answer: ` and the bare answer, as exact as the "
    "tools have it and with its unit."
)
_MAX_DRAWS = 200


def build_tasks(split: str = "train", num_tasks: int = 1000, *, seed: int = 0, world: int = 0) -> Dataset:
    """
    Tasks on the desk's servers; see [`~mcp_grpo.servers.desk_servers`].

    Families take turns. The companies of a split are not those of another, and some families are only in the test split,
    so that it asks what the policy has learnt rather than what it has seen. Every task has a `solution` that can be run
    with [`~mcp_grpo.evaluation.run_solutions`].

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"validation"` or `"test"`.
        num_tasks (`int`, *optional*, defaults to `1000`):
            How many.
        seed (`int`, *optional*, defaults to `0`):
            Another seed gives other tasks.
        world (`int`, *optional*, defaults to `0`):
            `seed` of the servers.

    Returns:
        [`~datasets.Dataset`]: The tasks, with the columns `task_id`, `prompt`, `servers`, `max_turns`, `difficulty`,
        `reference_calls` (those of the solution), `answer`, `expected_state`, `family`, `symbols` and `solution`. For the same arguments it is the same to the byte.
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
                "The split %r seems to have no more than %d tasks of the family %r in this world: the others fill up.",
                split,
                number,
                family,
            )
            continue
        rows[row["task_id"]] = row
        turn += 1
    return dataset_from_rows(list(rows.values()))


def _row(family: str, pick: Pick, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """A task that is not there yet; `None` if the family seems to have no other."""
    for _ in range(_MAX_DRAWS):
        try:
            draft = FAMILIES[family](pick)
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
        "servers": list(draft.servers),
        "difficulty": draft.difficulty,
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
    """Listings of a split. Those of one company go together."""
    chosen: set[str] = set()
    for company in market.companies():
        digest = hashlib.sha256(f"{world} {company.issuer}".encode()).digest()
        if int.from_bytes(digest[:4], "big") % 10 in SPLITS[split]:
            chosen.add(company.symbol)
    return frozenset(chosen)
