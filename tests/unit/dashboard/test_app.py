"""What the dashboard answers, and to whom."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.recordings import attempt, call, write_about, write_batch, write_metrics
from starlette.testclient import TestClient

from mcp_grpo.dashboard.app import STATIC, make_app
from mcp_grpo.dashboard.guard import COOKIE


HERE = "http://127.0.0.1:8268"
HALF = "half \ud83d\x1b[31m\u202e<script>alert(1)</script>"
PATHS = ("/", "/static/style.css", "/static/js/main.js", "/api/runs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_metrics(tmp_path / "run", {"step": 1, "reward": 0.5})
    note = {"step": 1, "name": "no_calls", "sentence": "No tool was called.", "is_fatal": False}
    write_about(tmp_path / "run", health=[note])
    write_batch(tmp_path / "run", [attempt(), attempt(row=1, rewards={"exact": float("nan")})])
    return tmp_path


def client(folder: Path, token: str | None = None, address: str = HERE) -> TestClient:
    return TestClient(make_app(folder, token), base_url=address)


def get(folder: Path, path: str, **parameters: Any) -> Any:
    answer = client(folder).get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_runs_metrics_and_trajectories_are_told(folder: Path) -> None:
    (run,) = get(folder, "/api/runs")["runs"]
    assert (run["name"], run["step"], run["num_files"]) == ("run", 1, 1)
    assert run["health"][0]["sentence"] == "No tool was called."
    metrics = get(folder, "/api/metrics", run="run")
    assert metrics["series"] == {"reward": [[1], [0.5]]}
    found = get(folder, "/api/trajectories", run="run", min_reward="0.5")
    assert [row["row"] for row in found["rows"]] == [0]
    assert get(folder, "/api/trajectories", run="run", sort="oldest")["rows"][1]["reward"] is None  # JSON has no NaN
    assert get(folder, "/api/trajectory", run="run", step=0, row=1)["tokens"]["advantage"][3] is None
    assert len(get(folder, "/api/group", run="run", step=0, task="sum-1")) == 2
    assert get(folder, "/api/history", run="run", task="sum-1")["num_steps"] == 1


def test_text_from_outside_does_nothing_where_it_is_shown(tmp_path: Path) -> None:
    hostile = attempt(
        prompt=HALF,
        messages=json.dumps([{"role": "assistant", "content": HALF}]),
        calls=[call(text="\x1b[2J\u202e")],
        tokens=[b"\x1b", "\u202e".encode(), b"\x00"],
        turns=[0, 0, 0],
    )
    write_batch(tmp_path / "run", [hostile])
    one = get(tmp_path, "/api/trajectory", run="run", step=0, row=0)
    text = json.dumps(one, ensure_ascii=False)
    assert not set(text) & {"\x1b", "\u202e", "\x00", "\ud83d"}
    assert "half �␛[31m�<script>" in one["prompt"][0]["content"]  # it is text, and the page shows it as text
    assert one["tokens"]["text"] == ["␛", "�", "␀"]


def test_messages_that_are_nested_without_end_do_not_hide_a_trajectory(tmp_path: Path) -> None:
    deep = '[{"role": "assistant", "content": ' + "[" * 700 + "]" * 700 + "}]"
    write_batch(tmp_path / "run", [attempt(messages=deep, states="[" * 100_000)])
    assert get(tmp_path, "/api/trajectory", run="run", step=0, row=0)["messages"] == deep


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/metrics?run=no", 404),
        ("/api/metrics", 404),
        ("/api/metrics?run=../run", 404),
        ("/api/trajectory?run=run&step=99", 404),
        ("/api/trajectory?run=run&step=x", 400),
        ("/api/trajectories?run=run&min_reward=nan", 400),
        ("/api/trajectories?run=run&sort=no", 400),
        ("/api/trajectories?run=run&offset=1e300", 400),
        ("/static/../app.py", 404),
        ("/static/%2e%2e/app.py", 404),
        ("/static/..%2fapp.py", 404),
        ("/static/%2fetc/passwd", 404),
        ("/nothing", 404),
    ],
)
def test_what_is_not_there_or_makes_no_sense_is_refused(folder: Path, path: str, status: int) -> None:
    assert client(folder).get(path).status_code == status


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_keeps_text_from_becoming_code(folder: Path, path: str) -> None:
    headers = client(folder).get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8268", "127.0.0.1.evil.example", "", "a@b:c:d", "[::1"]
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(folder: Path, path: str, host: str) -> None:
    assert client(folder).get(path, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:8268", "LOCALHOST"])
def test_names_of_this_machine_are_answered_at_any_port(folder: Path, host: str) -> None:
    assert client(folder).get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [None, "secret"])
def test_requests_of_other_pages_are_refused(
    folder: Path, headers: dict[str, str], path: str, token: str | None
) -> None:
    cookies = {} if token is None else {"cookie": f"{COOKIE}={token}"}
    assert client(folder, token).get(path, headers=headers | cookies).status_code == 403


def test_a_link_may_lead_here_but_not_to_the_data(folder: Path) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client(folder).get("/", headers=followed).status_code == 200
    assert client(folder).get("/api/runs", headers=followed).status_code == 403
    own = {"sec-fetch-site": "same-origin", "origin": HERE}
    assert client(folder).get("/api/runs", headers=own).status_code == 200


def test_it_takes_nothing_but_get(folder: Path) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client(folder).request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("path", PATHS)
def test_with_a_token_nothing_is_answered_without_it(folder: Path, path: str) -> None:
    other = client(folder, "secret", "http://box.example:8268")
    assert other.get(path).status_code == 401
    assert other.get(path, params={"token": "wrong"}).status_code == 401
    assert other.get(path, headers={"cookie": f"{COOKIE}=wrong"}).status_code == 401
    assert other.get(path, headers={"cookie": "\x00;=;"}).status_code == 401


def test_the_token_of_the_address_becomes_a_cookie_of_this_site_alone(folder: Path) -> None:
    other = client(folder, "secret", "http://box.example:8268")
    answer = other.get("/", params={"token": "secret"})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert other.get("/api/runs").status_code == 200  # by the cookie
    assert "set-cookie" not in other.get("/api/runs").headers
    assert "set-cookie" not in client(folder).get("/").headers


def test_the_page_brings_everything_itself_and_no_text_becomes_markup() -> None:
    for file in STATIC.rglob("*"):
        if file.suffix not in (".js", ".css", ".html") or "vendor" in file.parts:
            continue
        text = file.read_text()
        assert "//cdn" not in text
        assert "http://" not in text
        assert "https://" not in text
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text, f"{way} in {file.name}"
    assert (STATIC / "vendor" / "uplot" / "LICENSE").is_file()
