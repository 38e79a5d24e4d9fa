"""The folder of a run, made by hand, and text that would do something if it could."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.attempts import attempt
from mcp_grpo.evaluation import summarize
from mcp_grpo.monitor import Results, ScoredBatch, TrajectoryRecorder, results_content, write_results
from mcp_grpo.types import Exchange, ResultKind, ToolCall, ToolResult, Trajectory


EVIL = (
    "</style></svg><script>document.title='owned'</script><img src=https://evil.test/x.png onerror=document.title='owned'>"
    "{{ 7*7 }} \x1b[2J \u202e $\\frac{$"
)


def trajectory(text: str, *, task_id: str = "t", family: str = "sums", kind: ResultKind = ResultKind.OK) -> Trajectory:
    made = attempt(text, answer="5", task_id=task_id, kinds=[[kind]], family=family)
    call = Exchange(call=ToolCall(name="add", arguments={"a": text}), result=ToolResult(text=text, kind=kind), turn=0)
    return replace(made, exchanges=(call,))


def make_run(folder: Path, *, text: str = "5", results: bool = True) -> Path:
    """The folder of a run of three steps, as a trainer leaves it."""
    recorder = TrajectoryRecorder(folder)
    for step, reward in enumerate((0.1, 0.2, 0.9)):
        attempts = [
            trajectory(f"{text} at step {step}", task_id=f"{text}-{task}", family=f"{text} family")
            for task in range(2)
        ]
        attempts.append(trajectory("other", task_id=f"only-{step}", kind=ResultKind.TOOL_ERROR))
        rewards = [{f"{text}/r": reward}, {f"{text}/r": reward}, {f"{text}/r": float("nan")}]
        recorder.begin(ScoredBatch(step=step, trajectories=attempts, rewards=rewards, columns={}))
        recorder.close()
    logged = [{"step": step, "reward": step / 3, f"rewards/{text}/mean": 0.1, "entropy": 0.5} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged) + '{"step": 4, "rew')
    note = {"step": 2, "name": "no_spread", "sentence": f"Too little spread. {text}", "is_fatal": False}
    run = {"state": "ended", "health": [note], "chosen": {"prompts": f"Prompts are run once. {text}"}}
    (folder / "run.json").write_text(json.dumps(run))
    if results:
        before = summarize([attempt("4", answer="5", task_id=f"e{i}", family=text) for i in range(8)])
        after = summarize([attempt("5", answer="5", task_id=f"e{i}", family=text) for i in range(8)])
        found = Results.of_evaluations(before, after, f"On held-out tasks {text}:")
        found = found.with_baselines({"doing nothing": 0.125})
        facts: Any = {"kept_step": 2, "num_steps": 3, "versions": {"trl": "1.16"}, "settings": {"learning_rate": 1e-5}}
        write_results(folder, results_content(found, (before, after), **facts))
    return folder
