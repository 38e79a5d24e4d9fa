"""Questions about the directory, and scripted solutions to warm a model up on."""

import random
from typing import Any

from mcp_grpo.quickstart.directory import EMPLOYEES, NUM_HELD_OUT, Employee, lookup


Row = dict[str, Any]
Message = dict[str, Any]

COLLEAGUES = ("manager", "mentor")
THINGS = ("phone", "desk", "badge", "locker")
DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard"}  # by the number of dependent calls


def build_tasks(num_train: int = 3000, num_held_out: int = 120, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """
    Tasks to train on and tasks to judge by, about different people, with as many of each difficulty.

    | difficulty | calls | question |
    |---|---|---|
    | easy | 1 | What is the phone of E4173? |
    | medium | 2 | What is the phone of Ada Kent? What is the phone of the mentor of E4173? |
    | hard | 3 | What is the phone of the mentor of Ada Kent? |

    Args:
        num_train (`int`, *optional*, defaults to `3000`):
            Number of tasks to train on.
        num_held_out (`int`, *optional*, defaults to `120`):
            Number of held-out tasks.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the choice of questions. The directory is the same for all.

    Returns:
        `tuple[list[Row], list[Row]]`: Rows with the columns `task_id`, `prompt`, `servers`, `max_turns`, `difficulty`
        and `answer`, and for [`scripted_solution`] `subject` and `steps`.
    """
    rng = random.Random(seed)
    held_out, train = EMPLOYEES[:NUM_HELD_OUT], EMPLOYEES[NUM_HELD_OUT:]
    return _draw_tasks("train", train, num_train, rng), _draw_tasks("held-out", held_out, num_held_out, rng)


def _draw_tasks(split: str, employees: tuple[Employee, ...], count: int, rng: random.Random) -> list[Row]:
    """Draw `count` different tasks, easy, medium and hard by turns."""
    rows: dict[str, Row] = {}  # by question, so that none comes twice
    while len(rows) < count:
        row = _draw_task(rng.choice(employees), len(rows) % 3 + 1, rng)
        rows.setdefault(row["prompt"][0]["content"], {"task_id": f"{split}-{len(rows)}", **row})
    return list(rows.values())


def _draw_task(employee: Employee, num_calls: int, rng: random.Random) -> Row:
    """Draw a task about `employee` that takes `num_calls` calls."""
    by_name = num_calls == 3 or (num_calls == 2 and rng.random() < 0.5)
    subject = employee.name if by_name else employee.id
    thing = rng.choice(THINGS)
    steps = ["find_person"] if by_name else []
    question = f"What is the {thing} of "
    if num_calls - len(steps) == 2:
        colleague = rng.choice(COLLEAGUES)
        steps.append(f"get_{colleague}")
        question += f"the {colleague} of "
    steps.append(f"get_{thing}")
    row = {
        "prompt": [{"role": "user", "content": f"{question}{subject}?"}],
        "servers": ["people", "office"],
        "max_turns": num_calls + 1,
        "difficulty": DIFFICULTIES[num_calls],
        "subject": subject,
        "steps": steps,
    }
    return {**row, "answer": scripted_solution(row)[-1]["content"]}


def scripted_solution(row: Row, noise: float = 0.0, rng: random.Random | None = None) -> list[Message]:
    """
    Return messages that solve a task, as a policy and the servers would write them.

    At each call, with probability `noise`, a look-alike tool is picked at random: well-formed, and often wrong.
    """
    messages, value = [], row["subject"]
    for tool in row["steps"]:
        if rng is not None and rng.random() < noise:
            tool = rng.choice(_look_alikes(tool))
        arguments = {"name" if tool == "find_person" else "employee": value}
        call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
        value = lookup(tool, value)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": tool, "content": value})
    return [*messages, {"role": "assistant", "content": value}]


def with_solutions(rows: list[Row]) -> list[Row]:
    """Return tasks with their solutions in the column `solution`, as `mcp-grpo tasks check` runs them."""
    return [{**row, "solution": _script(scripted_solution(row))} for row in rows]


def _script(messages: list[Message]) -> dict[str, Any]:
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return {"steps": [{"calls": [call]} for call in calls], "final": messages[-1]["content"]}


def _look_alikes(tool: str) -> list[str]:
    """Return the tools that take and return the same kinds of values, `tool` included."""
    for fields in (COLLEAGUES, THINGS):
        if tool.removeprefix("get_") in fields:
            return [f"get_{field}" for field in fields]
    return [tool]
