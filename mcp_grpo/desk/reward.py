"""The reward of the desk's tasks, which knows how answers about companies are written."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcp_grpo.rewards import Rubric, call_penalty, is_done
from mcp_grpo.rewards.answers import answer_spec
from mcp_grpo.rewards.shape import MAX_CALL_PENALTY
from mcp_grpo.rewards.task import SYMBOLS
from mcp_grpo.rewards.words import AnswerWords
from mcp_grpo.types import Exchange, Trajectory


_THINGS = (
    r"quotes?|close|trad(?:es?|ing)|listings?|compan(?:y|ies)|stocks?|shares?|securit(?:y|ies)|symbols?|tickers?|filings?"
    r"|statements?|revenues?|income|profits?|earnings|eps|dividends?"
)
COMPANY_WORDS = AnswerWords(
    roles=r"ceo|cfo|coo|chief\s+(?:executive|financial|operating)(?:\s+officer)?|managing\s+director|president|chair(?:man|woman|person)?",
    labels="company|symbol|ticker",
    registers="nyse|nasdaq|lse|xetra|ticker|symbol",
    name_endings="inc|incorporated|corp|corporation|co|company|plc|ltd|limited|llc|lp|llp|ag|sa|nv|se|gmbh|spa|ab|asa|oyj",
    name_tails=r"class \w+",
    things=_THINGS,
    qualifiers="closing|opening|closed|listed|adjusted|financial|fiscal|market|net|gross|operating",
    found=r"trad(?:e|ed|ing)|(?:gone\s+)?public|in\s+(?:(?:the|its|our|this|my)\s+)?market",
    refusals=(
        r"\bunknown\s+(?:company|symbol|ticker)\b"
        r"|\b(?:trading|trades?|shares?|stock|it)\b(?:(?!\bnot\b|n['’]t\b|\bnever\b)[^.;?!]){0,40}\b(?:halted|suspended)\b"
        r"|\b(?:halt|suspension)\s+(?:of|in)\s+trading\b"
    ),
)
"""How companies, their heads and their listings are written about."""


_WITHOUT_DATA = ("python", "slack")  # servers that know nothing of companies


def is_solved(trajectory: Trajectory) -> bool:
    """
    Tell whether a trajectory did what its task on the desk asked for; see [`~mcp_grpo.rewards.task_outcome`].

    A look is one at the servers that have the data: neither Python nor Slack knows a company. What can be guessed needs more
    than that a company was asked about. Which of several it is, is paid after a tool has shown the figures of all of them;
    that there is no data, after a look where they would be.

    Args:
        trajectory ([`Trajectory`]):
            A finished trajectory.

    Returns:
        `bool`: Whether it did.
    """
    looks = [one for one in trajectory.exchanges if one.result.server not in _WITHOUT_DATA]
    return is_done(replace(trajectory, exchanges=tuple(looks)), words=COMPANY_WORDS) and _is_known(trajectory, looks)


def _is_known(trajectory: Trajectory, looks: Sequence[Exchange]) -> bool:
    """Tell whether the tools have shown what a guess would be right about too often, by the last step of the solution."""
    task = trajectory.task
    steps = (task.metadata.get("solution") or {}).get("steps")
    kind = None if task.answer is None else answer_spec(task.answer)["type"]
    if not steps or not task.metadata.get(SYMBOLS):
        return True
    evidence: Sequence[str] = steps[-1]["evidence"] or ()
    if kind == "refusal":
        wanted = [(call["name"], call["arguments"]) for call in steps[-1]["calls"]]
        symbol = str(task.metadata[SYMBOLS][0]).casefold()
        return any(
            any(_covers(look, name, arguments) for name, arguments in wanted)
            or (_symbol(look) == symbol and any(one in look.result.text for one in evidence))
            for look in looks
        )
    if len(task.metadata[SYMBOLS]) > 1 and kind in ("name", "list", "set"):
        return all(any(one in look.result.text for look in looks) for one in evidence)
    return True


def _covers(look: Exchange, name: str, arguments: Mapping[str, Any]) -> bool:
    """Tell whether a call asked for what another one asks for: of the same company, and all of its days."""
    given = look.call.arguments
    if look.call.name != name or _symbol(look) != str(arguments.get("symbol")).casefold():
        return False
    if not arguments.get("from"):
        return True
    return "" < str(given.get("from", "")) <= arguments["from"] and str(given.get("to", "9")) >= arguments["to"]


def _symbol(look: Exchange) -> str:
    return str(look.call.arguments.get("symbol", "")).strip().casefold()


def desk_outcome(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    Pay 1 for a trajectory that did what its task on the desk asked for ([`is_solved`]), and 0 otherwise.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            Other arguments that the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_solved(attempt)) for attempt in trajectory]


def desk_reward() -> Rubric:
    """
    Make the reward of the desk's tasks: [`desk_outcome`], less a little for calls that could not be made, and for an answer
    without any ([`~mcp_grpo.rewards.call_penalty`]): no task can be solved without.

    Returns:
        [`~mcp_grpo.rewards.Rubric`]: A reward function, which logs its parts as `rewards/outcome/mean` and
        `rewards/calls/mean`.
    """
    # As much as calls can cost, so that trying is never worse than not trying.
    return Rubric({"outcome": desk_outcome, "calls": call_penalty(no_call=MAX_CALL_PENALTY)})
