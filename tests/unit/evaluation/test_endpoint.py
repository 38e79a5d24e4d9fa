"""A policy behind an OpenAI-compatible endpoint attempts tasks on real tools, and an evaluation of it goes on where it was."""

from pathlib import Path
from typing import Any

import pytest
from helpers.endpoint import Reply, call, stand_in
from servers.sums import server

from mcp_grpo import evaluate
from mcp_grpo.errors import SettingsError, TaskFormatError
from mcp_grpo.evaluation import Attempt, AttemptFile, Endpoint, Prices, compare, markdown_report
from mcp_grpo.policy_evaluation import ATTEMPTS_FILE, baselines, read_evaluation
from mcp_grpo.types import Task, Trajectory, UserTurn


SERVERS = {"sums": server}
SOLUTION = {"steps": [{"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}], "evidence": ["5"]}], "final": "5"}
TASKS = [
    Task(
        task_id=f"{a}+{b}",
        prompt=({"role": "user", "content": f"{a}+{b}?"},),
        answer=str(a + b),
        difficulty="easy" if a < 3 else "hard",
        metadata={"family": "sums"} | ({"solution": SOLUTION} if (a, b) == (2, 3) else {}),
    )
    for a, b in ((1, 2), (2, 3), (30, 4))
]


def adding(body: dict[str, Any]) -> Reply:
    """Calls the tool, then says what it said."""
    if body["messages"][-1]["role"] == "tool":
        return {"content": body["messages"][-1]["content"]}
    a, b = body["messages"][-1]["content"].rstrip("?").split("+") if "+" in body["messages"][-1]["content"] else (0, 0)
    return {"content": None, "tool_calls": [call("add", {"a": int(a), "b": int(b)})]}


def test_it_is_given_the_tools_and_reads_what_they_say(tmp_path: Path) -> None:
    with stand_in(adding) as api:
        found = evaluate(
            Endpoint(base_url=api.url, model="m", temperature=0.5),
            TASKS,
            SERVERS,
            k=2,
            output_dir=tmp_path,
            prices=Prices(read=1.0, written=10.0),
        )
    assert found.success == 1.0
    assert found.interval.low < 1.0
    assert found.pass_all == {1: 1.0, 2: 1.0}
    assert (found.num_tasks, found.num_trajectories, found.num_failed) == (3, 6, 0)
    assert (found.turns, found.calls, found.tokens) == (2.0, 1.0, 20.0)
    assert found.cost == pytest.approx(6 * (200 * 1.0 + 20 * 10.0) / 1e6)
    assert found.success_by_difficulty == {"easy": 1.0, "hard": 1.0}
    assert found.success_by_family == {"sums": 1.0}
    assert found.tools["add"].calls == 6
    asked, answered = next(body for body in api.bodies if "tools" in body), api.bodies[-1]
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["add"]
    assert (asked["model"], asked["temperature"]) == ("m", 0.5)
    assert answered["messages"][-1]["tool_call_id"] == answered["messages"][-2]["tool_calls"][0]["id"]
    text = markdown_report("m", found, {"doing nothing": 0.0})
    assert "| success | 100.0% (95 % interval" in text
    assert "| `add` | 6 |" in text
    assert "| pass^2 | 100.0% |" in text


def test_what_cannot_be_called_is_told_and_counts_against_the_policy() -> None:
    def clumsy(body: dict[str, Any]) -> Reply:
        results = [message for message in body["messages"] if message["role"] == "tool"]
        if len(results) == 3:
            return {"content": results[-1]["content"]}
        calls = [call("add", {"a": "x"}, "1"), call("subtract", {}, "2"), call("add", "{not json", "3")]
        return {"content": "", "tool_calls": calls}

    with stand_in(clumsy) as api:
        found = evaluate(Endpoint(base_url=api.url, model="m"), TASKS[:1], SERVERS)
    assert found.valid_calls == 0.0
    assert found.tools["add"].errors == {"invalid_arguments": 1}
    assert found.tools["(none)"].errors == {"unknown_tool": 1, "malformed_call": 1}
    assert "could not be read" in api.bodies[-1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"content": "a lot", "finish_reason": "length"}, "max_tokens"),
        ({"content": "", "tool_calls": [call("add", {"a": 1, "b": 1})]}, "max_turns"),
    ],
)
def test_an_attempt_that_does_not_end_is_not_solved(reply: dict[str, Any], reason: str) -> None:
    with stand_in(lambda body: dict(reply)) as api:
        found = evaluate(Endpoint(base_url=api.url, model="m", max_turns=3), TASKS[:1], SERVERS)
    assert found.stop_reasons == {reason: 1.0}
    assert found.success == 0.0


def test_a_busy_endpoint_is_asked_again_and_a_broken_one_is_not_the_policys_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mcp_grpo.evaluation.endpoint.FIRST_WAIT", 0.01)
    states = iter([(503, "busy", {}), (429, "slow down", {"retry-after": "0.01"})])

    def busy(body: dict[str, Any]) -> Reply:
        return next(states, None) or adding(body) if "tools" in body else {"content": "Hi"}

    with stand_in(busy) as api:
        assert evaluate(Endpoint(base_url=api.url, model="m"), TASKS[:1], SERVERS).success == 1.0
    for reply, words in (
        ((400, "too long", {}), r"all failed.*too long"),
        ((200, "<html>", {}), "not a chat completion"),
    ):

        def broken(body: dict[str, Any], reply: Reply = reply) -> Reply:
            return reply if "tools" in body else {"content": "Hi"}

        with stand_in(broken) as api, pytest.raises(SettingsError, match=words):
            evaluate(Endpoint(base_url=api.url, model="m"), TASKS[:1], SERVERS)


def test_an_endpoint_that_is_wrong_is_known_before_the_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="cannot be reached"):
        evaluate(Endpoint(base_url="http://127.0.0.1:9/v1", model="m"), TASKS, SERVERS)
    with stand_in(lambda body: (404, "no model m", {})) as api:
        with pytest.raises(SettingsError, match=r"refuses the model 'm'.*no model m"):
            evaluate(Endpoint(base_url=api.url, model="m"), TASKS, SERVERS)
        assert len(api.bodies) == 1
    with pytest.raises(SettingsError, match="'NO_SUCH_KEY'"):
        Endpoint(base_url="http://127.0.0.1:9", model="m", api_key_variable="NO_SUCH_KEY")
    monkeypatch.setenv("SOME_KEY", "canary-key")
    endpoint = Endpoint(base_url=api.url, model="m", api_key_variable="SOME_KEY")
    assert "canary-key" not in repr(endpoint)
    with stand_in(adding) as api:
        evaluate(Endpoint(base_url=api.url, model="m", api_key_variable="SOME_KEY"), TASKS[:1], SERVERS)
    assert set(api.keys) == {"Bearer canary-key"}


def test_an_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    with stand_in(adding) as api:
        evaluate(Endpoint(base_url=api.url, model="m"), TASKS[:2], SERVERS, output_dir=tmp_path)
        path = tmp_path / ATTEMPTS_FILE
        whole = path.read_text()
        path.write_text(whole + whole[:40])  # killed in the middle of a line
        num_before = len(api.bodies)
        found = evaluate(Endpoint(base_url=api.url, model="m"), TASKS, SERVERS, output_dir=tmp_path)
    assert found.num_trajectories == 3
    assert len(api.bodies) - num_before == 3  # a hello, and the two turns of the one task that was left
    assert read_evaluation(tmp_path).outcomes == found.outcomes
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(TaskFormatError, match=r"Line 1 of .* is not an attempt"):
        AttemptFile(path).read()


def test_two_policies_are_compared_task_by_task() -> None:
    with stand_in(adding) as api:
        good = evaluate(Endpoint(base_url=api.url, model="m"), TASKS, SERVERS)
    with stand_in(lambda body: {"content": "3"}) as api:
        bad = evaluate(Endpoint(base_url=api.url, model="m"), TASKS, SERVERS)
    assert bad.success == pytest.approx(1 / 3)
    assert "No difference is shown: +66.7% of 3 tasks" in str(compare(bad, good))
    assert "too few" in str(compare(bad, bad.of(_first(bad))))


def _first(found: Any) -> Any:
    task = next(iter(found.outcomes))
    fixed: Any = {"family": None, "difficulty": None, "error": None, "calls": [], "messages": []}
    numbers: Any = {"index": 0, "num_turns": 1, "prompt_tokens": 1, "sampled_tokens": 1, "seconds": 0.0}
    return [Attempt(task_id=task, is_solved=True, stop_reason="answered", **fixed, **numbers)]


def test_names_in_a_report_are_inert() -> None:
    hostile = Task(
        task_id="1",
        prompt=({"role": "user", "content": "1+2?"},),
        answer="3",
        metadata={"family": "<b>|\x1b[2J![x](http://x)"},
    )
    with stand_in(adding) as api:
        text = markdown_report("a|b<script>", evaluate(Endpoint(base_url=api.url, model="m"), [hostile], SERVERS))
    assert "<script>" not in text
    assert "<b>" not in text
    assert "\x1b" not in text
    assert "](http" not in text


def test_doing_nothing_and_scripted_solutions_stand_beside_it() -> None:
    assert baselines(TASKS, SERVERS) == {"doing nothing": 0.0, "scripted solutions": 1.0}


def test_half_a_surrogate_pair_is_kept_and_read_back(tmp_path: Path) -> None:
    with stand_in(lambda body: {"content": "half \ud83d"}) as api:
        evaluate(Endpoint(base_url=api.url, model="m"), TASKS[:1], SERVERS, output_dir=tmp_path)
    (attempt,) = AttemptFile(tmp_path / ATTEMPTS_FILE).read()
    assert attempt.messages[-1]["content"] == "half \ud83d"


def test_trajectories_are_summed_up_by_another_function() -> None:
    with pytest.raises(SettingsError, match="use `summarize`"):
        evaluate([], TASKS, SERVERS)


def test_it_hears_what_the_user_says_next_and_gets_the_tools_that_come_with_it() -> None:
    turns = (UserTurn(content="30+4?"), UserTurn(content="And now?", tools=("add",)))
    task = Task(task_id="more", prompt=({"role": "user", "content": "1+2?"},), user_turns=turns, answer="34")
    seen: list[Trajectory] = []

    def replying(body: dict[str, Any]) -> Reply:
        return adding(body) if "tools" in body and body["messages"][-1]["content"] != "And now?" else {"content": "34"}

    def is_success(trajectory: Trajectory) -> bool:
        seen.append(trajectory)
        return trajectory.answer == "34"

    with stand_in(replying) as api:
        found = evaluate(Endpoint(base_url=api.url, model="m"), [task], SERVERS, is_success=is_success)
        none_yet = [body for body in api.bodies if body["messages"][-1]["content"] == "30+4?"]
        last = api.bodies[-1]
    assert found.success == 1.0
    assert [r.question for r in seen[0].rounds] == ["1+2?", "30+4?", "And now?"]
    assert "tools" not in none_yet[0]
    assert [tool["function"]["name"] for tool in last["tools"]] == ["add"]
    assert last["messages"][-1] == {"role": "user", "content": "And now?"}


def test_a_user_of_ones_own_is_asked() -> None:
    user = lambda trajectory: "30+4?" if trajectory.answer == "3" else None  # noqa: E731
    with stand_in(adding) as api:
        found = evaluate(
            Endpoint(base_url=api.url, model="m"), TASKS[:1], SERVERS, user=user, is_success=lambda t: t.answer == "34"
        )
    assert (found.success, found.turns) == (1.0, 4.0)
