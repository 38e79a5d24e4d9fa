"""
The gallery in the documentation: one task of each family, solved on the real servers.

    python tests/helpers/gallery.py

writes it anew between its two marks.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import FAMILIES, build_tasks
from mcp_grpo.evaluation import Solution, run_solutions
from mcp_grpo.tasks import tasks_from_rows


PAGE = Path(__file__).parent.parent.parent / "docs" / "desk" / "families.md"
BEGIN, END = "<!-- gallery: written by tests/helpers/gallery.py -->\n", "<!-- end of the gallery -->\n"
MAX_SHOWN = 150


def gallery(solutions: Sequence[Solution]) -> str:
    """One transcript for each family, folded."""
    first: dict[str, Solution] = {}
    for solution in solutions:
        first.setdefault(solution.trajectory.task.metadata["family"], solution)
    return "\n".join(_transcript(name, first[name]) for name in FAMILIES)


def _transcript(family: str, solution: Solution) -> str:
    task = solution.trajectory.task
    evidence = [text for step in task.metadata["solution"]["steps"] for text in step["evidence"]]
    lines = [f"<details markdown><summary><b>{family}</b>: {task.prompt[-1]['content']}</summary>\n", "```text"]
    for exchange in solution.trajectory.exchanges:
        arguments = ", ".join(f"{name}={_shown(value)}" for name, value in exchange.call.arguments.items())
        lines.append(f"turn {exchange.turn + 1}  {exchange.call.name}({arguments})")
        lines += [f"        {text}" for text in _excerpts(exchange.result.text, evidence)]
    lines.append(
        f"turn {solution.trajectory.num_turns}  "
        + solution.trajectory.messages[-1]["content"].replace("\n", "\n        ")
    )
    wanted = task.answer if task.answer is not None else task.metadata["expected_state"]
    lines += ["```\n", f"Wanted: `{json.dumps(wanted, ensure_ascii=False)}`\n", "</details>"]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"


def _excerpts(text: str, evidence: Sequence[str]) -> list[str]:
    """The places that the solution goes on from, or the beginning."""
    if len(text) <= MAX_SHOWN:
        return [text]
    found = sorted({text.find(one) for one in evidence if one in text}) or [0]
    shown, last = [], -MAX_SHOWN
    for place in found:
        if place >= last + MAX_SHOWN // 2:
            start = max(0, place - 30)
            words = re.match(r"\w*(.*?)\w*$", text[start : start + MAX_SHOWN], re.DOTALL)  # no halves of them
            assert words
            shown.append(f"{'... ' if start else ''}{words[1] if start else words[0]} ...".replace("\n", " "))
            last = place
    return shown


def solutions() -> list[Solution]:
    """Of the first tasks of the test split, which has all families."""
    return run_solutions(tasks_from_rows(build_tasks("test", 2 * len(FAMILIES))), desk_servers())


if __name__ == "__main__":
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + gallery(solutions()) + "\n" + END + rest.split(END)[1])
