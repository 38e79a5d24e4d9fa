"""The doctor: each thing that it names is made wrong here, on real servers, files and models."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import save_tiny_model, tiny_model
from mcp.types import Tool, ToolAnnotations
from trl import ModelConfig

from mcp_grpo.cli import main
from mcp_grpo.doctor import Finding, Subject, dry_run, examine
from mcp_grpo.doctor.command import subject_of
from mcp_grpo.doctor.limits import spread
from mcp_grpo.doctor.machine import Machine
from mcp_grpo.environments import function_server
from mcp_grpo.types import Task


SERVERS = Path(__file__).parents[1] / "servers"
NOTHING = Machine()


def server(*arguments: str, file: str = "patient.py", **entry: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVERS / file), *arguments], **entry}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """What writes a file of servers, tasks or settings, and returns its path."""

    def write(name: str, content: Any) -> str:
        path = tmp_path / name
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps({"prompt": "How much?", **row}) + "\n" for row in content))
        else:
            path.write_text(yaml.safe_dump(content) if name.endswith(".yaml") else json.dumps({"mcpServers": content}))
        return str(path)

    return write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def rows(**given: Any) -> dict[str, Finding]:
    """What the doctor finds, by the names of its checks; every failure has a remedy."""
    report = examine(subject_of(**given), NOTHING)
    assert all(one.remedy for one in report.problems)
    return {one.name: one for one in report.findings}


def wrong(found: dict[str, Finding]) -> set[str]:
    return {name for name, one in found.items() if one.status == "wrong"}


# ---- Servers ----


def test_servers_that_are_well_are_listed_and_only_harmless_tools_are_called(write: Any, tmp_path: Path) -> None:
    path = write("mcp.json", {"patient": server("change", str(tmp_path / "changed"))})
    found = rows(servers=path)
    assert not wrong(found)
    assert "3 tools, listed after" in found["server patient"].found
    assert "2 of 3 tools can safely be called twice; not, or not said to be: change" in found["calling twice"].found
    assert "1 tool answered, the slowest (`look`)" in found["harmless calls"].found
    assert not (tmp_path / "changed").exists()
    # What only the user vouches for is not called either: a file is written if it is.
    vouched = {"read_only_tools": ["*"]}
    path = write("mcp.json", {"patient": server("change", str(tmp_path / "changed"), **{"x-mcp-grpo": vouched})})
    found = rows(servers=path)
    assert "3 of 3 tools can safely" in found["calling twice"].found
    assert found["harmless calls"].status == "not run"
    assert not (tmp_path / "changed").exists()


def test_all_keys_that_are_missing_are_told_at_once(write: Any) -> None:
    path = write("mcp.json", {"a": server(env={"K": "${DOCTOR_ONE}"}), "b": server(env={"K": "${DOCTOR_TWO}"})})
    found = rows(servers=path, tasks=write("tasks.jsonl", [{"task_id": "a", "answer": 1}]))
    assert wrong(found) == {"keys"}
    assert "'DOCTOR_ONE'" in found["keys"].found
    assert "'DOCTOR_TWO'" in found["keys"].found
    assert ".env" in found["keys"].remedy
    assert (found["tools"].status, found["tools"].found) == ("not run", "needs servers")


def test_a_server_that_dies_is_named_and_the_others_are_looked_at(write: Any) -> None:
    dying = {"command": sys.executable, "args": ["-c", "import sys; sys.exit('no such table')"]}
    found = rows(servers=write("mcp.json", {"dying": dying, "well": server()}))
    assert wrong(found) == {"server dying"}
    assert "no such table" in found["server dying"].found
    assert "by hand" in found["server dying"].remedy
    assert found["server well"].status == "ok"
    assert found["harmless calls"].status == "ok"


def test_an_invalid_schema_and_a_call_that_fails_are_told(write: Any) -> None:
    found = rows(servers=write("mcp.json", {"patient": server("schema", "error")}))
    assert wrong(found) == {"schemas"}
    assert "1 tools are not valid: patient: odd" in found["schemas"].found
    assert "`allowed_tools`" in found["schemas"].remedy
    assert found["harmless calls"].status == "warning"
    assert "`look` (tool_error): the key is refused" in found["harmless calls"].found


def test_a_file_that_is_none_of_servers_is_told(tmp_path: Path) -> None:
    found = rows(servers=str(tmp_path / "none.json"))
    assert wrong(found) == {"servers"}
    assert "cannot be read" in found["servers"].found


# ---- Tasks ----


def test_wrong_names_set_ups_and_rewards_are_told_all_at_once(write: Any) -> None:
    tasks = [
        {"task_id": "a", "answer": 1, "tools": ["lok"]},
        {"task_id": "b", "tools": ["chang"]},
        {"task_id": "c", "answer": 1, "setup": {"patient": {"x": 1}}},
    ]
    found = rows(servers=write("mcp.json", {"patient": server()}), tasks=write("tasks.jsonl", tasks))
    assert wrong(found) == {"tools", "setup", "rewards"}
    assert "tool 'lok' (1 task: 'a') does not exist. The nearest names are `look`" in found["tools"].found
    assert "tool 'chang' (1 task: 'b') does not exist. The nearest names are `change`" in found["tools"].found
    assert "server 'patient', which cannot be set up" in found["setup"].found
    assert "Task 'b' has neither an `answer` nor an `expected_state`" in found["rewards"].found


def test_tasks_need_no_servers_and_no_model(write: Any) -> None:
    found = rows(tasks=write("tasks.jsonl", [{"task_id": "a"}]))
    assert wrong(found) == {"rewards"}
    assert not {"tools", "keys", "tokenizer", "trainer"} & found.keys()
    found = rows(tasks=write("tasks.jsonl", [{"task_id": "a", "answer": 1, "solution": {"steps": 3}}]))
    assert wrong(found) == {"solutions"}
    assert "must be of the form" in found["solutions"].found
    found = rows(tasks=write("tasks.jsonl", [{"task_id": "a", "answer": 1}, {"task_id": "a", "answer": 2}]))
    assert wrong(found) == {"tasks"}


def test_rewards_of_the_settings_are_those_that_are_computed(write: Any) -> None:
    tasks = write("tasks.jsonl", [{"task_id": "a", "expected_state": {"x": {"n": 1}}}] * 1)
    settings = {"output_dir": "outputs", "rewards": ["nonsense"], "report_to": "none", "use_cpu": True}
    found = rows(tasks=tasks, config=write("c.yaml", settings))
    assert "There is no reward 'nonsense'" in found["rewards"].found
    found = rows(tasks=tasks, config=write("c.yaml", {**settings, "rewards": ["exact_answer"]}))
    assert "Task 'a' has no `answer`" in found["rewards"].found


# ---- Model ----


def test_a_model_that_is_here_makes_a_dry_trajectory_which_changes_nothing(
    write: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suited: list[Any] = []
    monkeypatch.setattr(dry_run, "suited_to_cpu", lambda model: suited.append(model) or model)
    path = write("mcp.json", {"patient": server("change", str(tmp_path / "changed"))})
    found = rows(servers=path, tasks=write("tasks.jsonl", [{"task_id": "a", "answer": 1}]), model=model)
    assert not wrong(found)
    assert "token by token" in found["chat template"].found
    assert "by the model" in found["dry trajectory"].found
    assert len(suited) == (not torch.cuda.is_available())
    assert "tokens of prompt" in found["dry trajectory"].found
    assert "(most for `" in found["prompts"].found
    assert "in a context of 4096" in found["prompts"].found
    assert not (tmp_path / "changed").exists()


def test_a_dry_trajectory_has_the_server_that_is_made_for_its_task(model: str) -> None:
    tools = [Tool(name="look", input_schema={"type": "object"}, annotations=ToolAnnotations(read_only_hint=True))]

    def make(task: Task | None) -> Any:
        assert task is None or task.metadata["shelf"] == "upper"
        return function_server("shelf", tools, lambda name, arguments: "4")

    row = {"task_id": "a", "prompt": "How much?", "answer": 4, "shelf": "upper"}
    subject = Subject(
        servers=lambda: {"shelf": make},
        tasks=lambda: Dataset.from_list([row]),
        model=ModelConfig(model_name_or_path=model),
    )
    found = {one.name: one for one in examine(subject, NOTHING).findings}
    assert found["dry trajectory"].status == "ok", found["dry trajectory"].found


def test_weights_that_are_not_here_are_told_and_a_script_takes_their_place(write: Any) -> None:
    found = rows(servers=write("mcp.json", {"patient": server()}), model="Qwen/Qwen3-none")
    assert wrong(found) == {"weights"}
    assert "hf download" in found["weights"].found
    assert found["tags"].shown_status == "not run"
    assert "a script in place of the model" in found["dry trajectory"].found
    assert "2 turns; 1 of 1 calls answered" in found["dry trajectory"].found
    found = rows(model="somebody/else")
    assert wrong(found) == {"weights", "tokenizer"}


def test_a_template_without_tools_is_replaced_or_refused(write: Any, tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tiny_model(tokenizer).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    plain = str(tmp_path / "plain")
    found = rows(model=plain)
    assert found["chat template"].status == "warning"
    assert "fenced JSON: its chat template knows no tools" in found["chat template"].found
    settings = {"output_dir": "outputs", "call_format": "template", "report_to": "none", "use_cpu": True}
    found = rows(model=plain, config=write("c.yaml", settings))
    assert wrong(found) == {"chat template"}
    assert "knows no tools" in found["chat template"].found
    assert 'call_format="json"' in found["chat template"].remedy


def test_a_template_that_rewrites_what_was_said_is_told(write: Any, tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "rewriting", family_tokenizer("qwen3")
    tokenizer.chat_template = "{{ messages | length }} messages so far\n" + str(tokenizer.chat_template)
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = rows(servers=write("mcp.json", {"patient": server()}), model=str(folder))
    assert wrong(found) == {"chat template"}
    assert (found["dry trajectory"].status, found["dry trajectory"].found) == ("not run", "needs chat template")


def test_further_messages_of_the_user_that_a_template_cannot_carry_are_told(
    write: Any, tmp_path: Path, model: str
) -> None:
    folder, tokenizer = tmp_path / "gptoss", family_tokenizer("gptoss")
    policy = tiny_model(tokenizer)
    policy.generation_config.eos_token_id = end_of_turn_ids("gptoss", tokenizer)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = {
        "servers": write("mcp.json", {"patient": server()}),
        "tasks": write("tasks.jsonl", [{"task_id": "a", "answer": 1, "user_turns": ["And then?"]}]),
    }
    found = rows(**given, model=str(folder))
    assert wrong(found) == {"user turns"}
    assert "further messages of the user" in found["user turns"].found
    assert rows(**given, model=model)["user turns"].status == "ok"


def test_tags_that_were_never_trained_are_told(write: Any, tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen3")
    policy = tiny_model(tokenizer)
    policy.resize_token_embeddings(len(tokenizer) + 20)
    embeddings = policy.get_input_embeddings().weight.data
    torch.nn.init.normal_(embeddings)
    tags = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    embeddings[[*tags, *range(len(tokenizer), len(embeddings))]] = torch.randn(32) * 0.5
    policy.save_pretrained(tmp_path / "untrained")
    tokenizer.save_pretrained(tmp_path / "untrained")
    settings = {"output_dir": "outputs", "call_format": "template", "report_to": "none", "use_cpu": True}
    found = rows(model=str(tmp_path / "untrained"), config=write("c.yaml", settings))
    assert wrong(found) == {"tags"}
    assert "never trained to write <tool_call> and </tool_call>" in found["tags"].found
    found = rows(model=str(tmp_path / "untrained"))
    assert found["chat template"].status == "warning"
    assert "never trained to write" in found["chat template"].found


def test_prompts_that_are_longer_than_the_context_are_told_with_the_heaviest_tools(write: Any, tmp_path: Path) -> None:
    small = save_tiny_model(tmp_path / "small", max_position_embeddings=300)
    path = write("mcp.json", {"patient": server()})
    found = rows(servers=path, model=small)
    assert "prompts" in wrong(found)
    assert "(most for `" in found["prompts"].found
    assert "but the model's context holds 300" in found["prompts"].found


def test_tools_that_speak_in_control_tokens_are_told(write: Any, model: str) -> None:
    found = rows(servers=write("mcp.json", {"patient": server("control")}), model=model)
    assert wrong(found) == {"descriptions"}
    assert "The tool 'loud' describes itself with '<|im_start|>'" in found["descriptions"].found


# ---- Settings ----


def test_groups_that_do_not_form_and_names_that_are_no_settings_are_told(write: Any) -> None:
    tasks = write("tasks.jsonl", [{"task_id": "a", "answer": 1}])
    settings = {"output_dir": "outputs", "report_to": "none", "use_cpu": True, "num_generations": 4}
    found = rows(tasks=tasks, config=write("c.yaml", {**settings, "per_device_train_batch_size": 8}))
    assert wrong(found) == {"settings"}
    assert "A batch holds 2 tasks" in found["settings"].found
    found = rows(tasks=tasks, config=write("c.yaml", {**settings, "per_device_train_batch_size": 4}))
    assert not wrong(found)
    assert "in groups of 4" in found["settings"].found
    found = rows(config=write("c.yaml", {**settings, "num_generation": 4}))
    assert "There is no setting `num_generation`. Did you mean `num_generations`?" in found["settings"].found
    found = rows(config=write("c.yaml", {**settings, "top_p": 0.5}))
    assert "`top_p=0.5` samples from another distribution" in found["settings"].found
    found = rows(config=write("c.yaml", {**settings, "use_vllm": True, "vllm_mode": "colocate"}))
    assert ("packages" in found) == (found["vllm"].found.startswith("not installed"))


def test_everything_together_builds_the_trainer(write: Any, model: str) -> None:
    settings = {
        "report_to": "none",
        "use_cpu": True,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": "1e-6",
    }
    settings |= {"output_dir": "outputs", "max_completion_length": 64, "use_peft": True, "rewards": ["task_outcome"]}
    given = {
        "servers": write("mcp.json", {"patient": server()}),
        "tasks": write("tasks.jsonl", [{"task_id": "a", "answer": 1}]),
    }
    found = rows(model=model, config=write("c.yaml", {**settings, **given}))
    assert not wrong(found)
    assert "can be built, with 1 tasks to train on" in found["trainer"].found
    assert "there is no GPU here to compare" in found["gpu memory"].found


def test_solutions_that_do_not_fit_into_the_limits_are_told_and_run_without_changing_anything(
    write: Any, model: str, tmp_path: Path
) -> None:
    def task(family: str, *calls: tuple[str, str]) -> dict[str, Any]:
        steps = [{"calls": [{"name": name, "arguments": {"text": text}}]} for name, text in calls]
        return {"task_id": family, "answer": 1, "family": family, "solution": {"steps": steps, "final": "1"}}

    tasks = [
        task("short", ("find", "3"), ("change", "3"), ("find", "2000")),
        task("long", ("find", "2000"), ("change", "3")),
        task("chatty", *[("find", "60")] * 4),
    ]
    settings = {"report_to": "none", "use_cpu": True, "num_generations": 2, "per_device_train_batch_size": 2}
    settings |= {"output_dir": "outputs", "max_completion_length": 1000, "max_result_tokens": 400}
    given = {
        "servers": write("mcp.json", {"patient": server("change", str(tmp_path / "changed"))}),
        "tasks": write("tasks.jsonl", tasks),
    }
    found = rows(model=model, config=write("c.yaml", {**settings, **given}))["limits"]
    assert found.status == "warning"
    assert "2 of 3 solutions that were tried do not fit into them" in found.found
    assert "1 because a tool result is longer than `max_result_tokens` (long)" in found.found
    assert "1 because it is longer than `max_completion_length`" in found.found
    assert "(chatty)" in found.found
    assert found.remedy.startswith("Raise the setting")
    assert not (tmp_path / "changed").exists()
    room = {**settings, "max_completion_length": 3000, "max_result_tokens": 20_000}
    long = {**given, "tasks": write("some.jsonl", [tasks[0], tasks[2]])}
    found = rows(model=model, config=write("c.yaml", {**room, **long}))["limits"]
    assert (found.status, found.found) == ("ok", "2 solutions that were tried fit into them")


def test_solutions_are_tried_of_all_families_in_turn() -> None:
    def task(family: str | None, number: int) -> Task:
        metadata = {} if family is None else {"family": family}
        return Task(task_id=f"{family}{number}", prompt=({"role": "user", "content": "?"},), metadata=metadata)

    tasks = [*(task("a", number) for number in range(4)), task("b", 0), *(task("c", number) for number in range(2))]
    assert [one.task_id for one in spread(tasks, 5)] == ["a0", "b0", "c0", "a1", "c1"]
    assert len(spread([task(None, number) for number in range(9)], 5)) == 5
    assert spread([]) == []


# ---- The command ----


def test_the_command_prints_a_table_or_json_and_fails_where_something_is_wrong(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    well = write("well.jsonl", [{"task_id": "a", "answer": 1}])
    assert main(["doctor", "--tasks", well]) == 0
    assert "The doctor found nothing wrong." in capsys.readouterr().out
    ill = write("ill.jsonl", [{"task_id": "a"}])
    assert main(["doctor", "--tasks", ill]) == 1
    said = capsys.readouterr().out
    assert "The doctor: 1 thing is wrong." in said
    assert "-> Give every task what its rewards need" in " ".join(said.replace("│", " ").split())
    assert main(["doctor", "--tasks", ill, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    (problem,) = [row for row in found["checks"] if row["status"] == "wrong"]
    assert (problem["name"], bool(problem["remedy"])) == ("rewards", True)
    assert {row["status"] for row in found["checks"]} <= {"ok", "wrong", "warning", "not run"}


def test_what_raises_is_a_finding_and_the_other_checks_are_made() -> None:
    report = examine(Subject(tasks=lambda: {}["rows"], servers=lambda: {}["file"]), NOTHING)
    assert {one.name: one.found for one in report.problems} == {
        "tasks": "KeyError: 'rows'",
        "servers": "KeyError: 'file'",
    }
