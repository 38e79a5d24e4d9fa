"""
Complete WorkBench's solutions, which only change things, by the searches that tell what is to be changed.

The searches are made from words of the request and from what was found before, never from the authors' calls. Those decide only which way
a condition went, and whether everything was found.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from typing import Any

from mcp.types import Tool

from mcp_grpo.rollout.replay import call_message
from mcp_grpo.tasks.grounding import unseen_values
from mcp_grpo.types import Message


_ADDRESS = "company_directory_find_email_address"
_EVENTS = "calendar_search_events"
_EMAILS = "email_search_emails"
_CUSTOMERS = "customer_relationship_manager_search_customers"
_TASKS = "project_management_search_tasks"
_TRAFFIC = "analytics_traffic_source_count"
_METRICS = {
    "total visits": "analytics_total_visits_count",
    "average session duration": "analytics_get_average_session_duration",
    "engaged users": "analytics_engaged_users_count",
}
_SOURCES = ("direct", "referral", "search engine", "social media")
_UNFINISHED = ("Backlog", "In Progress", "In Review")
_PRODUCTS = ("software", "hardware", "services", "consulting", "training")
_STATUSES = {"lead": "Lead", "qualified": "Qualified", "proposal": "Proposal", "won": "Won", "lost": "Lost"}
_MAX_ROWS = 5  # that most searches return
_MAX_PAGES = 4

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")  # fmt: skip
_DATE = re.compile(
    rf"(?P<iso>\d{{4}}-\d\d-\d\d)|(?P<month>{'|'.join(_MONTHS)}) (?P<day>\d+)|(?P<next>next )?\b(?P<weekday>{'|'.join(_DAYS)})\b"
    r"|(?P<tomorrow>tomorrow)|(?P<ahead>next )?\b(?P<number>\d+) (?P<unit>day|week)s|(?P<week>last week\b)",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"(?<!\w)'(.+?)'(?!\w)", re.DOTALL)
_TIME = re.compile(r"\b(at|before|after) (\d{1,2})(?::(\d\d))?\b")
_DELETE = re.compile(r"delete|cancel|get rid|no longer", re.IGNORECASE)
_THRESHOLD = re.compile(r"\b(more|less) than (\d+)\b(?!%)(?=.* any time|.* been at any)")
_OTHERWISE = re.compile(r"\botherwise\b|\bif not\b", re.IGNORECASE)
_LONGER = re.compile(r"\bby (?:(\d+) minutes|([\d.]+) hours)")


class Lookups:
    """
    Searches of WorkBench in its start state.

    Args:
        functions (`Mapping[str, Callable]`):
            The searches, by the names that calls have.
        now (`datetime`):
            The time at which the requests are made.
        tools (`Iterable[Tool]`):
            How the tools are described.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], now: datetime, tools: Iterable[Tool]) -> None:
        self.now = now
        self.names = frozenset(functions)
        self.is_told = lru_cache(maxsize=None)(self._is_told)
        self._told = [tool.model_dump(mode="json", include={"name", "description", "input_schema"}) for tool in tools]
        self._functions = functions
        self._found = lru_cache(maxsize=None)(self._run)

    def find(self, name: str, arguments: Mapping[str, str]) -> Any:
        """Return what a search finds."""
        return self._found(name, tuple(arguments.items()))

    @cached_property
    def people(self) -> frozenset[str]:
        """Return the first names in the company's directory."""
        return frozenset(address.partition(".")[0] for address in self.find(_ADDRESS, {"name": "@"}))

    def complete(
        self, prompt: Sequence[Message], calls: Sequence[Mapping[str, Any]], tools: Collection[str] | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """
        Put searches before the calls of a solution.

        Args:
            prompt (`Sequence[Message]`):
                Opening messages, of which the last is the request.
            calls (`Sequence[Mapping[str, Any]]`):
                The calls, in their order.
            tools (`Collection[str]`, *optional*):
                Names of the tools that may be called; all, if not given.

        Returns:
            `tuple[list[dict], bool]`: Steps of the solution, and whether its calls follow from what is told and found before. Some of the
            authors' do not: they write what nobody said, or do what the request does not want.
        """
        script = _Script(self, prompt, calls, self.names if tools is None else self.names & set(tools))
        script.look()
        is_grounded = not script.missing() and not script.is_contradicted()
        return [*script.steps, *({"calls": [call]} for call in calls)], is_grounded

    def _is_told(self, value: str) -> bool:
        """Tell whether a value is in the tools' descriptions."""
        call = {"name": "", "arguments": {"value": value}}
        return not unseen_values((), [call_message({"calls": [call]})], self._told)

    def _run(self, name: str, arguments: tuple[tuple[str, str], ...]) -> Any:
        return self._functions[name](**dict(arguments))


class _Script:
    """A solution while it is written."""

    def __init__(
        self, lookups: Lookups, prompt: Sequence[Message], calls: Sequence[Mapping[str, Any]], tools: Collection[str]
    ) -> None:
        self._lookups, self._prompt, self._calls, self._tools = lookups, prompt, calls, tools
        self._said = prompt[-1]["content"]
        self._words = _QUOTED.sub(" ", self._said)  # without texts that are only to be written
        self._today = lookups.now.replace(hour=0, minute=0, second=0)
        self.steps: list[dict[str, Any]] = []
        self._messages: list[Message] = []
        self._events: list[Mapping[str, Any]] = []

    def look(self) -> None:
        """Look at what a condition is about, then for what the calls are about, for people, and for a free slot."""
        self._look_at_metrics()
        if not self.steps or any(str(value).isdigit() or "@" in str(value) for value in self._unnamed()):
            _ = (
                self._look_for_tasks()
                or self._look_for_customers()
                or self._look_for_emails()
                or self._look_for_events()
            )
        missing = self.missing()
        self._addresses([name for name in self._people if any(_is_of(value, name) for value in missing)])
        if "tomorrow" in self._words and any("event_start" in call["arguments"] for call in self._calls):
            self._search_events({}, self._day(self._today + timedelta(days=1)))

    def missing(self) -> list[str]:
        """Return the values of the calls that are neither told nor found, and cannot be worked out."""
        return [value for value in self._unseen() if not self._can_be_worked_out(value)]

    def is_contradicted(self) -> bool:
        """Tell whether the calls delete what is not to be deleted, or go the wrong way at a threshold."""
        if any("_delete_" in call["name"] for call in self._calls) and not _DELETE.search(self._words):
            return True
        condition, (_, *otherwise) = _THRESHOLD.search(self._words), _OTHERWISE.split(self._said)
        searched = self.steps[0]["calls"][0] if self.steps else None
        if condition is None or searched is None or searched["name"] not in _METRICS.values():
            return False
        found, limit = self._lookups.find(searched["name"], searched["arguments"]).values(), float(condition[2])
        is_met = any(value > limit if condition[1] == "more" else value < limit for value in found)
        texts = [text for call in self._calls for key, text in call["arguments"].items() if key == "body"]
        is_otherwise = any(text in part for text in texts for part in otherwise)
        return is_met == is_otherwise if otherwise else is_met != bool(self._calls)

    def _unnamed(self) -> list[str]:
        """Return the missing values that are not just the addresses of people in the request."""
        people = self._people
        return [value for value in self.missing() if not any(_is_of(value, name) for name in people)]

    def _unseen(self) -> list[str]:
        needed = [call_message({"calls": [call]}) for call in self._calls]
        own = {str(value) for call in self._calls for value in call["arguments"].values()}
        unseen = map(str, unseen_values(self._prompt, [*self._messages, *needed]))
        return [value for value in unseen if value in own and not self._lookups.is_told(value)]

    def _can_be_worked_out(self, value: str) -> bool:
        """Tell whether a value is a date or a time that follows from the request and from events that were found."""
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            return False
        day, time = when.replace(hour=0, minute=0, second=0), (when.hour, when.minute)
        if len(value) == len("2000-01-01"):
            return day in self._dates()
        starts = [datetime.fromisoformat(event["event_start"]) for event in self._events]
        if day in self._dates() and any(time == stated for _, stated in self._times()):
            return True
        if when in [start + timedelta(minutes=self._minutes_longer()) for start in starts] and self._minutes_longer():
            return True
        return bool(starts) and (time == (9, 0) or when in map(_end, self._events))

    # Searches

    def _search(self, *searches: tuple[str, Mapping[str, str]]) -> list[Any]:
        """Make searches in one turn, and return what each finds."""
        step = {"calls": [{"name": name, "arguments": dict(arguments)} for name, arguments in searches]}
        found = [self._lookups.find(name, arguments) for name, arguments in searches]
        if step not in self.steps:
            self.steps.append(step)
            self._messages.append(call_message(step))
            self._messages += [{"role": "tool", "content": str(one)} for one in found]
        rows = [[] if isinstance(one, str) else list(one) for one in found]
        self._events += [
            row for (name, _), some in zip(searches, rows, strict=True) if name == _EVENTS for row in some
        ]
        return rows

    def _search_pages(
        self, name: str, arguments: Mapping[str, str], after: Callable[[Mapping[str, Any]], Mapping[str, str]]
    ) -> None:
        """Search again from the last row on, as long as there may be more that matters."""
        (found,) = self._search((name, arguments))
        for _ in range(_MAX_PAGES - 1):
            if len(found) < _MAX_ROWS or not (self._wants_all or self._unnamed()):
                return
            (found,) = self._search((name, {**arguments, **after(found[-1])}))

    @property
    def _wants_all(self) -> bool:
        return (
            re.search(r"\b(all|future|leads|customers|my meetings|last event)\b", self._words, re.IGNORECASE)
            is not None
        )

    def _addresses(self, names: Sequence[str]) -> list[str]:
        """Return the addresses of people."""
        if not names or _ADDRESS not in self._tools:
            return []
        found = self._search(*((_ADDRESS, {"name": name}) for name in names))
        return [
            next(address for address in addresses if _is_of(address, name))
            for name, addresses in zip(names, found, strict=True)
        ]

    def _look_at_metrics(self) -> None:
        text, dates = self._words.lower(), self._matched_dates()
        if not dates or re.search(r"\bbetween\b|\bdistribution\b|histogram of", text):
            return
        since, until = dates[0][0], {}
        if "previous" in text:
            since, until = since - timedelta(days=7), {"time_max": _date(since)}
        window = {"time_min": _date(since), **until}
        if "traffic" in text:
            sources = sorted((one for one in _SOURCES if one in text), key=text.index) or _SOURCES
            searches = [(_TRAFFIC, {**window, "traffic_source": source}) for source in sources]
        else:
            metrics = sorted((one for one in _METRICS if one in text), key=text.index)
            searches = [(_METRICS[metric], window) for metric in metrics]
        if searches and all(name in self._tools for name, _ in searches):
            self._search(*searches)

    def _look_for_tasks(self) -> bool:
        if _TASKS not in self._tools or not re.search(r"\btasks\b|urgent task", self._words):
            return False
        if "fewest overdue" in self._words:
            month = _date(self._today)[:7]
            self._search(*((_TASKS, {"list_name": name, "due_date": month}) for name in _UNFINISHED))
            return True
        if "most completed front end" in self._words:
            self._search((_TASKS, {"list_name": "Completed", "board": "Front end"}))
            return True
        for address in self._addresses(self._owners()):
            searched = {"assigned_to_email": address}
            if re.search(r"started|in the backlog", self._words):
                searched["list_name"] = "Backlog"
            elif found := re.search(r"in progress|in review|unfinished", self._words):
                # The authors' unfinished tasks are those in progress.
                searched["list_name"] = "In Review" if found[0] == "in review" else "In Progress"
            self._search((_TASKS, searched))
        return True

    def _look_for_customers(self) -> bool:
        if _CUSTOMERS not in self._tools or re.search(r"\bnew lead\b", self._words):
            return False
        for name in re.findall(r"(?=\b([A-Z][a-z]+ [A-Z][a-z]+)\b)", self._words):
            if self._lookups.find(_CUSTOMERS, {"customer_name": name}):
                self._search((_CUSTOMERS, {"customer_name": name}))
                return True
        product = re.search("|".join(_PRODUCTS), self._words)
        searched = {"product_interest": product[0]} if product else {}
        if found := re.search(r"proposal for the .* (\d+) weeks", self._words):
            until = _date(self._today - timedelta(weeks=int(found[1])))
            self._search_customers({"status": "Proposal", **searched, "last_contact_date_max": until})
            return True
        if not re.search(r"\b(leads|customers)\b", self._words):
            return False
        told = re.search(r"\bleads\b|in the (\w+) stage|either (\w+) or in (\w+)", self._words)
        statuses = [_STATUSES[word] for word in (told.groups() if told else ()) if word] or ["Lead"]
        for address in self._addresses(self._owners()):
            for status in statuses:
                self._search_customers({"assigned_to_email": address, "status": status, **searched})
        return True

    def _search_customers(self, searched: Mapping[str, str]) -> None:
        self._search_pages(_CUSTOMERS, searched, lambda row: {"last_contact_date_max": row["last_contact_date"]})

    def _look_for_emails(self) -> bool:
        asked = r"emails?\b.* (?:from|about)\b|last email|sent me"
        if _EMAILS not in self._tools or not re.search(asked, self._words):
            return False
        about = re.search(r"about '(.+?)'(?!\w)|about (.+?) and schedule", self._said)
        from_whom = self._owners() if re.search(r"from [a-z]|'s last|sent me", self._words) else []
        words = [*from_whom, *([about[1] or about[2]] if about else [])]
        window: dict[str, str] = {}
        for date, kind in [found for found in self._matched_dates() if found[0] <= self._today][:1]:
            window["date_min"] = _date(date)
            if kind != "past":
                window["date_max"] = _date(date + timedelta(days=6 if kind == "week" else 0))
        self._search_pages(
            _EMAILS, {"query": " ".join(words), **window}, lambda row: {"date_max": row["sent_datetime"][:10]}
        )
        return True

    def _look_for_events(self) -> bool:
        if _EVENTS not in self._tools or re.search(r"event called", self._words):
            return False
        searched: dict[str, str] = {}
        dates, window = self._matched_dates(), {"time_min": _time(self._lookups.now)}
        if people := self._people:
            searched["query"] = people[0]
        elif named := re.search(r"(?:next|future|any more) (.+?) meetings?(?= to |$|\.)", self._words):
            searched["query"] = named[1]
        elif not dates:
            return False
        if dates and dates[0][1] == "day":
            day = dates[0][0] if dates[0][0] >= self._today else dates[0][0] + timedelta(days=7)
            window = self._day(day)
            for word, (hour, minute) in self._times():
                bound = {"before": "time_max", "after": "time_min"}.get(word)
                window |= {bound: _time(day.replace(hour=hour, minute=minute))} if bound else {}
        elif dates and dates[0][1] == "past":
            window = {"time_min": _time(dates[0][0]), "time_max": _time(self._lookups.now)}
        elif dates and dates[0][1] == "ahead":
            window["time_max"] = _time(dates[0][0])
        self._search_events(searched, window)
        return True

    def _search_events(self, searched: Mapping[str, str], window: Mapping[str, str]) -> None:
        self._search_pages(_EVENTS, {**searched, **window}, lambda row: {"time_min": _time(_end(row))})

    # What the request says

    @cached_property
    def _people(self) -> list[str]:
        """Return the names in the request that the company's directory knows, in their order."""
        words = re.findall(r"(?<![\w.@])[A-Za-z]+(?![\w@]|\.\w)", self._words)
        return [
            word for word in dict.fromkeys(words) if _ADDRESS in self._tools and word.lower() in self._lookups.people
        ]

    def _owners(self) -> list[str]:
        """Return the name of the one who has what is to be changed."""
        people = self._people
        for found in re.finditer(r"\b(\w+)'s\b|\b(?:from|assigned to) (\w+)|that (\w+) hasn't", self._words):
            name = next(filter(None, found.groups()))
            if name in people:
                return [name]
        return people[:1]

    def _matched_dates(self) -> list[tuple[datetime, str]]:
        """Return the dates in the request, and what each is: a day, a week, or what is so many days ago (`"past"`) or ahead."""
        found: list[tuple[datetime, str]] = []
        for match in _DATE.finditer(self._words):
            told = match.groupdict()
            if told["iso"]:
                found.append((datetime.fromisoformat(told["iso"]), "day"))
            elif told["month"]:
                month = [*map(str, _MONTHS)].index(told["month"].title()) + 1
                found.append((self._today.replace(month=month, day=int(told["day"])), "day"))
            elif told["weekday"]:
                back = (self._today.weekday() - _DAYS.index(told["weekday"].lower())) % 7 or 7
                found.append((self._today + timedelta(days=14 - back if told["next"] else -back), "day"))
            elif told["tomorrow"]:
                found.append((self._today + timedelta(days=1), "tomorrow"))
            elif told["week"]:
                found.append((self._today - timedelta(days=self._today.weekday() + 7), "week"))
            else:
                days = int(told["number"] or 0) * (7 if told["unit"] == "week" else 1)
                found.append(
                    (self._today + timedelta(days=days), "ahead")
                    if told["ahead"]
                    else (self._today - timedelta(days=days), "past")
                )
        return found

    def _dates(self) -> list[datetime]:
        """Return the dates in the request, with days of the week in either direction."""
        found = [date for date, _ in self._matched_dates()]
        return [*found, *(date + timedelta(days=7 * sign) for date in found for sign in (-1, 1))]

    def _times(self) -> list[tuple[str, tuple[int, int]]]:
        """Return the times of the day in the request, with the word before each. Meetings are from 9 to 6."""
        told = [(word, int(hour), int(minute or 0)) for word, hour, minute in _TIME.findall(self._words)]
        return [(word, (hour + 12 if hour < 9 else hour, minute)) for word, hour, minute in told]

    def _minutes_longer(self) -> float:
        found = _LONGER.search(self._words)
        return float(found[1] or 60 * float(found[2] or 0)) if found else 0

    def _day(self, day: datetime) -> dict[str, str]:
        return {"time_min": _time(day.replace(hour=9)), "time_max": _time(day.replace(hour=18))}


def _is_of(address: str, name: str) -> bool:
    return address.startswith(f"{name.lower()}.")


def _date(when: datetime) -> str:
    return f"{when:%Y-%m-%d}"


def _time(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S}"


def _end(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["event_start"]) + timedelta(minutes=float(event["duration"]))
