"""The dashboard as a web application: its page, and what the page asks for."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from mcp_grpo.dashboard.guard import Guard
from mcp_grpo.dashboard.runs import Run, Runs
from mcp_grpo.dashboard.trajectories import PAGE, SORTS, Filter
from mcp_grpo.inert import inert


STATIC = Path(__file__).parent / "static"


class CleanJSON(Response):
    """An answer in JSON. Text from outside does nothing where it is shown, and numbers that JSON does not have are null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(clean(content), separators=(",", ":"), allow_nan=False).encode()


def clean(value: Any) -> Any:
    """Return a value that JSON has, with control characters shown in all its texts."""
    if isinstance(value, str):
        return inert(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {inert(str(name)): clean(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [clean(each) for each in value]
    return value


class Answers:
    """Answer what the page asks for from the files of a run."""

    NAMES = ("runs", "metrics", "trajectories", "trajectory", "group", "history")

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, Runs(folder)

    def runs(self, request: Request) -> Response:
        """Tell which runs there are, in short."""
        return CleanJSON({"folder": self._folder.resolve().name, "runs": [run.about() for run in self._runs.all()]})

    def metrics(self, request: Request) -> Response:
        """Tell the metrics that are new since `from`."""
        generation = request.query_params.get("generation")
        return CleanJSON(self._run(request).metrics.since(generation, max(0, _whole(request, "from", 0))))

    def trajectories(self, request: Request) -> Response:
        """Tell one page of the trajectories that pass the filters."""
        asked = request.query_params
        sort = asked.get("sort", SORTS[0])
        if sort not in SORTS:
            raise HTTPException(400, f"`sort` must be one of {', '.join(SORTS)}.")
        wanted = Filter(
            min_reward=_number(request, "min_reward"),
            max_reward=_number(request, "max_reward"),
            min_step=_whole(request, "min_step"),
            max_step=_whole(request, "max_step"),
            family=asked.get("family") or None,
            tool=asked.get("tool") or None,
            stop_reason=asked.get("stop_reason") or None,
            task=asked.get("task") or None,
            errors=asked.get("errors") == "1",
        )
        offset, limit = max(0, _whole(request, "offset", 0)), max(1, _whole(request, "limit", PAGE))
        return CleanJSON(self._run(request).trajectories.find(wanted, sort=sort, offset=offset, limit=limit))

    def trajectory(self, request: Request) -> Response:
        """Tell one trajectory, with its tokens."""
        step, rank, row = (_whole(request, name, 0) for name in ("step", "rank", "row"))
        found = self._run(request).trajectories.open(step, rank, row)
        if found is None:
            raise HTTPException(404, "This trajectory is not there, or not any more.")
        return CleanJSON(found)

    def group(self, request: Request) -> Response:
        """Tell the attempts at a task in one step."""
        task_id = request.query_params.get("task", "")
        return CleanJSON(self._run(request).trajectories.group(_whole(request, "step", 0), task_id))

    def history(self, request: Request) -> Response:
        """Tell what became of a task from step to step."""
        return CleanJSON(self._run(request).trajectories.history(request.query_params.get("task", "")))

    def _run(self, request: Request) -> Run:
        run = self._runs.get(request.query_params.get("run", ""))
        if run is None:
            raise HTTPException(404, "There is no run of this name.")
        return run


def make_app(folder: Path, token: str | None = None) -> Starlette:
    """
    Make the application that shows the runs in a folder.

    With `token`, it is for other machines, too, and answers only to those who have it.
    """
    answers = Answers(folder)
    routes = [Route("/", _page), Mount("/static", StaticFiles(directory=STATIC))]
    routes += [Route(f"/api/{name}", getattr(answers, name)) for name in Answers.NAMES]
    middleware = [Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=4096, compresslevel=3)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _refused})


def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return CleanJSON({"error": error.detail}, error.status_code)


def _whole(request: Request, name: str, default: Any = None) -> Any:
    given = _number(request, name)
    return default if given is None else int(given)


def _number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name, "")
    if not given.strip():
        return None
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or abs(number) > 2**53:
        raise HTTPException(400, f"`{name}` must be a number.")
    return number
