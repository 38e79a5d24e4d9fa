"""Write tasks, a card about them, and a report of what was dropped."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp_grpo.synth.pipeline import Made


CARD, REPORT = "README.md", "report.json"
MAX_CARD_TEXT = 160
NUM_EXAMPLES = 3


def write_tasks(made: Made, folder: Path) -> list[Path]:
    """
    Write a file for each split that has tasks, `README.md` and `report.json`.

    Args:
        made ([`Made`]):
            The tasks.
        folder (`Path`):
            Where to; it is created. Files of splits that have no tasks now are removed.

    Returns:
        `list[Path]`: The files of tasks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for split, rows in made.rows.items():
        path = folder / f"{split}.jsonl"
        if not rows:
            path.unlink(missing_ok=True)
            continue
        lines = [json.dumps(row, ensure_ascii=False, sort_keys=True) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        files.append(path)
    (folder / CARD).write_text(card(made), encoding="utf-8")
    report: dict[str, Any] = {
        "tasks": {split: len(rows) for split, rows in made.rows.items()},
        "chains": len({row["chain"] for row in made.tasks}),
        "families": dict(Counter(row["family"] for row in made.tasks)),
        "num_calls": made.num_calls,
        "num_chains_run": made.num_chains,
        "dropped": made.dropped,
        "dropped_examples": made.examples,
        "tools_not_used": made.uncalled,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return files


def card(made: Made) -> str:
    """Return the dataset card."""
    rows = made.tasks
    families, difficulties = Counter(row["family"] for row in rows), Counter(row["difficulty"] for row in rows)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split, found in made.rows.items() if found)
    configs = f"configs:\n- config_name: default\n  data_files:\n{files}" if files else ""
    writes = "were called, each time on a server of its own" if made.settings.allow_writes else "were not called"
    wording = (
        "by templates"
        if made.settings.writer is None
        else f"by `{inert(made.settings.writer.model)}`, which also answered each of them blind"
    )
    table = _table(
        ["split", "tasks", "chains"],
        [[split, len(found), len({row["chain"] for row in found})] for split, found in made.rows.items()],
    )
    return f"""---
task_categories: [text-generation]
tags: [mcp, tool-use, synthetic]
{configs}---

# Tasks on {", ".join(f"`{inert(name)}`" for name in made.servers)}

Made by `mcp-grpo tasks synth` from the tools of {len(made.servers)} MCP server{"s" if len(made.servers) != 1 else ""} and what they returned. Every task
has a `solution` that was run twice on the servers and came to the same both times; questions were worded {wording}.
Tools that may change things {writes}.

{table}
Splits share no chain: no sequence of tools, links between them and field that is asked for is in two of them.

{_table(["family", "tasks"], [[name, number] for name, number in families.most_common()])}
{_table(["difficulty", "tasks"], [[name, number] for name, number in difficulties.most_common()])}
{_table(["server", "tools"], [[f"`{inert(name)}`", number] for name, number in made.servers.items()])}
## Columns

`prompt`, `answer` (what `mcp_grpo.rewards.task_outcome` compares with) or `expected_state`, `servers` and `tools` (what the policy is offered,
`distractors` of them from servers that the task does not need), `solution`, `family`, `difficulty`, `chain` and `chain_shape`.

## Examples

{_examples(rows)}
## What was left out

{made.num_chains} chains were run with {made.num_calls} calls.

{_table(["dropped because", "chains"], [[why, number] for why, number in made.dropped.items()]) if made.dropped else "Nothing was dropped."}
{_uncalled(made)}"""


def inert(text: str) -> str:
    """Return a text of a server such that it is no markup in a card."""
    plain = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    plain = re.sub(r"[`|<>\[\]{}*#\\!]|https?://", "'", plain)
    return plain if len(plain) <= MAX_CARD_TEXT else f"{plain[:MAX_CARD_TEXT]} ..."


def _examples(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "There are no tasks.\n"
    firsts = {row["family"]: row for row in reversed(rows)}
    return "".join(
        f"- {inert(row['family'])}: {inert(row['prompt'][-1]['content'])}\n"
        for row in list(firsts.values())[: 2 * NUM_EXAMPLES]
    )


def _uncalled(made: Made) -> str:
    if not made.uncalled:
        return ""
    return "Tools that were not used:\n\n" + "".join(
        f"- `{inert(name)}`: {inert(why)}\n" for name, why in made.uncalled.items()
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
