"""
The company directory behind both servers: made-up employees, the same on every machine.

Every number is drawn at random, so an answer cannot be guessed or worked out: it has to come from the tools.
"""

import random
from dataclasses import dataclass

from mcp.server.mcpserver.exceptions import ToolError


# fmt: off
FIRST_NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kai", "Lena", "Max", "Nina", "Otto",
    "Pia", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Vera", "Will", "Xena", "Yara", "Zoe", "Amy", "Bob", "Carl",
    "Dora", "Emil", "Fay",
)
LAST_NAMES = (
    "Abbot", "Bell", "Cole", "Drew", "Ellis", "Ford", "Grant", "Hale", "Irwin", "Jones", "Kent", "Lane", "Moss",
    "Nash", "Owen", "Park", "Reed", "Shaw", "Tate", "Vance", "Ward", "York", "Adams", "Burke", "Cross", "Dunn",
    "Frost", "Gray", "Hart", "Knox", "Lowe", "Mills",
)
# fmt: on


NUM_HELD_OUT = 100  # employees nobody is trained on; they work with each other only


@dataclass(frozen=True, slots=True, kw_only=True)
class Employee:
    """An employee; each field but the name is what the tool `get_<field>` answers."""

    id: str
    name: str
    manager: str
    mentor: str
    phone: str
    desk: str
    badge: str
    locker: str


def _make_employees() -> tuple[Employee, ...]:
    """Give each pair of names an id, two colleagues and four numbers, from a fixed seed."""
    rng = random.Random(0)
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    rng.shuffle(names)

    def numbers(letter: str) -> list[str]:
        return [f"{letter}{number}" for number in rng.sample(range(1000, 10000), len(names))]

    ids = numbers("E")
    columns = zip(ids, names, *map(numbers, "PDBL"), strict=True)
    employees = []
    for index, (id_, name, phone, desk, badge, locker) in enumerate(columns):
        manager, mentor = rng.choices(ids[:NUM_HELD_OUT] if index < NUM_HELD_OUT else ids[NUM_HELD_OUT:], k=2)
        employees.append(
            Employee(
                id=id_,
                name=name,
                manager=manager,
                mentor=mentor,
                phone=phone,
                desk=desk,
                badge=badge,
                locker=locker,
            )
        )
    return tuple(employees)


EMPLOYEES = _make_employees()
_BY_ID = {employee.id: employee for employee in EMPLOYEES}
_BY_NAME = {employee.name: employee for employee in EMPLOYEES}


def lookup(tool: str, argument: str) -> str:
    """Return the text that a tool answers with, for a name (`find_person`) or an employee id."""
    known = _BY_NAME if tool == "find_person" else _BY_ID
    if argument not in known:
        raise ToolError(f"No employee {argument!r}.")
    return getattr(known[argument], "id" if tool == "find_person" else tool.removeprefix("get_"))
