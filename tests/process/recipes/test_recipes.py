"""The quickstart does what it promises: whole, from nothing, for any seed."""

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import quickstart
import torch
from quickstart import SERVERS, list_tools
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcp_grpo import Task, ToolCall, ToolPool
from mcp_grpo.quickstart.model import build_model, build_tokenizer
from mcp_grpo.quickstart.tasks import build_tasks, scripted_solution
from mcp_grpo.quickstart.warm_start import WARM_START, WHAT_TO_RUN, fingerprint
from mcp_grpo.quickstart.warmup import IGNORED, SampleBuilder
from mcp_grpo.tasks import tasks_from_rows


pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
TRAIN, HELD_OUT = build_tasks()


@pytest.fixture(scope="module")
def tools() -> list[dict]:
    return anyio.run(list_tools)


def test_the_quickstart_s_tasks_are_tasks_and_none_is_in_both_sets() -> None:
    train, held_out = tasks_from_rows(TRAIN), tasks_from_rows(HELD_OUT)
    questions = {task.prompt[0]["content"] for task in train}
    assert not questions & {task.prompt[0]["content"] for task in held_out}
    assert {task.difficulty for task in held_out} == {"easy", "medium", "hard"}


def test_nobody_in_a_held_out_task_is_met_in_training() -> None:
    def met(rows: list[dict]) -> set[str]:
        calls = [m["tool_calls"][0]["function"] for r in rows for m in scripted_solution(r) if "tool_calls" in m]
        return {value for call in calls for value in call["arguments"].values()}

    assert not met(TRAIN) & met(HELD_OUT)


def test_scripted_solutions_are_what_the_servers_answer() -> None:
    async def replay() -> None:
        async with ToolPool(SERVERS) as pool, pool.lease(Task(task_id="t", prompt=({"role": "user"},))) as lease:
            for row in HELD_OUT[:30]:
                messages = scripted_solution(row)
                for call, result in zip(messages[0::2], messages[1::2], strict=False):
                    function = call["tool_calls"][0]["function"]
                    answer = await lease.call(ToolCall(name=function["name"], arguments=function["arguments"]))
                    assert answer.text == result["content"]
                assert messages[-1]["content"] == row["answer"]

    anyio.run(replay)


def test_a_warm_up_sample_is_what_the_template_renders_with_only_the_policy_s_tokens_labelled(
    tools: list[dict],
) -> None:
    tokenizer = build_tokenizer(TRAIN[:300], tools)
    builder = SampleBuilder(tokenizer, tools)
    for row in HELD_OUT[:6]:
        solution = scripted_solution(row)
        ids, labels = builder.sample(row, solution)
        assert len(ids) == len(labels)
        rendered = builder._renderer._render([*row["prompt"], *solution], tools=tools)
        assert tokenizer.decode(ids) + "\n" == rendered
        written = tokenizer.decode([label for label in labels if label != IGNORED])
        assert written.count("<|im_end|>") == len(solution[0::2])
        assert written.endswith(f"{row['answer']}<|im_end|>")
        assert "<tool_response>" not in written
    assert sum(p.numel() for p in build_model(tokenizer).parameters()) < 1_000_000


def test_the_warm_start_was_made_from_these_tasks_and_tools(tools: list[dict]) -> None:
    made_from = json.loads((WARM_START / "made_from.json").read_text())
    now = fingerprint(TRAIN, tools)
    changed = [name for name in now if now[name] != made_from.get(name)]
    assert not changed, f"{', '.join(changed)} changed since the warm start of the quickstart was made: {WHAT_TO_RUN}."
    tokenizer, shipped = build_tokenizer(TRAIN, tools), AutoTokenizer.from_pretrained(WARM_START)
    assert shipped.get_vocab() == tokenizer.get_vocab(), f"The tokenizer is another one now: {WHAT_TO_RUN}."
    prompt = {"conversation": HELD_OUT[0]["prompt"], "tools": tools, "tokenize": False}
    assert shipped.apply_chat_template(**prompt) == tokenizer.apply_chat_template(**prompt)
    model = AutoModelForCausalLM.from_pretrained(WARM_START)
    assert model.num_parameters() == build_model(tokenizer).num_parameters()
    assert next(model.parameters()).dtype == torch.float32


def test_a_world_that_has_changed_is_warmed_up_for_anew_and_the_report_says_that_nothing_was_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "warm_up", lambda *args, **kwargs: None)  # the slow part
    monkeypatch.setattr(quickstart, "build_tasks", lambda num_held_out: (TRAIN[:300], HELD_OUT[:num_held_out]))
    assert not quickstart.main(quickstart.Arguments(output_dir=str(tmp_path), max_steps=1, num_held_out=6))
    assert WHAT_TO_RUN in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"success_before", "success_after", "seconds", "seed"} <= summary.keys()
    for name in ("adapter_model.safetensors", "curves.png", "chat_template.jinja"):
        assert (tmp_path / name).stat().st_size > 0
    card = (tmp_path / "README.md").read_text()
    assert "| `find_person` | people |" in card
    assert "| success, with 95 % interval | " in card
    assert "6 tasks, 12 attempts before and 12 after." in card
    assert "doing nothing 0.0%, scripted solutions 100.0%." in card
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(tmp_path: Path, seed: int) -> None:
    accelerate = Path(sys.executable).parent / "accelerate"
    command = [str(accelerate), "launch", "--cpu", "--num_processes", "1", "recipes/quickstart.py"]
    subprocess.run([*command, "--seed", str(seed), "--output_dir", str(tmp_path)], cwd=ROOT, check=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["success_before"] <= 0.6
    assert summary["success_after"] >= 0.9
    assert summary["seed"] == seed
    for name in ("adapter_model.safetensors", "adapter_config.json", "README.md", "curves.png", "chat_template.jinja"):
        assert (tmp_path / name).exists()
