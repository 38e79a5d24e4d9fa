"""Make rows of tasks from chains that were run."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_grpo.rewards.answers import matches_answer
from mcp_grpo.synth.questions import SYSTEM_PROMPT
from mcp_grpo.synth.run import Run, as_text
from mcp_grpo.tools.catalog import Tool
from mcp_grpo.types import Message


REFUSAL = {"type": "refusal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A task before it is filtered: a chain that was run, its question and its answer."""

    made: Run
    question: str
    answer: Any
    final: str

    @property
    def chain_id(self) -> str:
        """Return a short name of the chain's shape."""
        return hashlib.sha256(self.made.chain.shape.encode()).hexdigest()[:10]


def draft_of(made: Run, question: str) -> Draft:
    """Write the answer of a task and the message that a solution ends with."""
    chain = made.chain
    if chain.outcome == "state":
        return Draft(made=made, question=question, answer=None, final="It is done.")
    if chain.outcome == "nothing":
        return Draft(made=made, question=question, answer=dict(REFUSAL), final="Answer: no data available")
    value = made.value
    answer: dict[str, Any] = (
        {"type": "number", "value": value} if isinstance(value, int | float) else {"type": "name", "value": value}
    )
    if chain.digits is not None:
        answer["absolute"] = 0.6 * 10**-chain.digits
    return Draft(made=made, question=question, answer=answer, final=f"Answer: {as_text(value)}")


def is_paid(draft: Draft) -> bool:
    """Tell whether the final message is paid as the answer."""
    return draft.answer is None or matches_answer(draft.final, draft.answer, question=draft.question)


def row_of(draft: Draft, offered: Sequence[Tool], tools: Mapping[str, Tool]) -> dict[str, Any]:
    """Return the row of a task."""
    chain = draft.made.chain
    needed = list(dict.fromkeys(call.tool for call in draft.made.calls))
    family = chain.family
    task_id = f"{family}-{hashlib.sha256(draft.question.encode()).hexdigest()[:12]}"
    prompt: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": draft.question}]
    row: dict[str, Any] = {
        "task_id": task_id,
        "prompt": prompt,
        "servers": list(dict.fromkeys(tool.server for tool in offered)),
        "tools": [tool.name for tool in offered],
        "difficulty": _difficulty(draft),
        "answer": draft.answer,
        "family": family,
        "chain": draft.chain_id,
        "chain_shape": chain.shape,
        "reference_calls": len(draft.made.calls),
        "distractors": sum(tool.server not in {tools[name].server for name in needed} for tool in offered),
        "solution": {"steps": _solution_steps(draft), "final": draft.final},
    }
    if chain.outcome == "state":
        server = tools[chain.reads[0].tool].server
        row["state_calls"] = {server: [{"name": one.tool, "arguments": dict(one.arguments)} for one in chain.reads]}
        row["expected_state"] = {server: {"calls": [{"equals": text} for text in draft.made.value]}}
    return row


def _difficulty(draft: Draft) -> str:
    number = len(draft.made.calls)
    is_easy = number == 1 and draft.made.chain.outcome == "value" and "sql join" not in draft.made.chain.shape
    return "easy" if is_easy else "medium" if number <= 2 else "hard"


def _solution_steps(draft: Draft) -> list[dict[str, Any]]:
    """Return a turn for each call; what the next calls and the answer need must be in its result."""
    steps: list[dict[str, Any]] = []
    calls = draft.made.calls
    for number, call in enumerate(calls):
        later = [value for after in calls[number + 1 :] for value in after.arguments.values() if not call.fails]
        refs = [
            ref
            for after in draft.made.chain.steps[number + 1 :]
            for ref in after.refs.values()
            if ref.step == number and not ref.prefix
        ]
        evidence = [str(_bare(value)) for value in later if refs and str(_bare(value)) in draft.made.texts[number]]
        if number == len(calls) - 1 and isinstance(draft.made.value, str) and draft.made.value in draft.made.texts[-1]:
            evidence.append(draft.made.value)
        steps.append(
            {
                "calls": [{"name": call.tool, "arguments": dict(call.arguments)}],
                "evidence": [text for text in dict.fromkeys(evidence) if re.search(r"\w", text)],
                "fails": call.fails,
            }
        )
    return steps


def _bare(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
