"""The parts of `mcp-grpo train`: its plan, what it goes on from, which tasks are held out, and its settings."""

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mcp_grpo.cli import main
from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.doctor.machine import Machine
from mcp_grpo.environments import Environment
from mcp_grpo.errors import SettingsError
from mcp_grpo.rewards import fault_penalty
from mcp_grpo.train.arguments import TrainArguments
from mcp_grpo.train.command import _time_left
from mcp_grpo.train.ledger import Ledger
from mcp_grpo.train.plan import STAGES, Stage, attempts_at, duration, make_plan, plan_table
from mcp_grpo.train.settings import ModelSize, fit_step, settings_for, warm_up_steps
from mcp_grpo.train.splits import load_splits
from mcp_grpo.train.world import world_of


LARGE = Machine(gpu="H200", memory=139.0, has_bf16=True, packages=frozenset({"vllm"}))
SIZES = {
    "tiny": ModelSize(parameters=500_000, context=1024),
    "135M": ModelSize(parameters=135_000_000, context=8192),
    "0.6B": ModelSize(parameters=600_000_000, context=40960),
    "1.7B": ModelSize(parameters=1_700_000_000, context=40960),
    "unknown": ModelSize(),
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def tasks(number: int, name: str = "task", **columns: Any) -> list[dict[str, Any]]:
    return [{"task_id": f"{name}-{i}", "prompt": f"{i}?", "answer": str(i), **columns} for i in range(number)]


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mcp.json").write_text('{"mcpServers": {}}')
    return {"servers": str(tmp_path / "mcp.json"), "tasks": write(tmp_path / "tasks.jsonl", tasks(20))}


# ---- The plan ----


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("machine", [LARGE, Machine()])
def test_a_plan_has_all_stages_with_a_time_where_the_model_is_known(size: str, machine: Machine) -> None:
    settings = settings_for(machine, SIZES[size]).settings
    plan = make_plan(
        settings, SIZES[size], tasks="tasks", num_train=100, num_test=40, num_validation=8, has_tasks=True
    )
    assert tuple(stage.name for stage in plan) == STAGES
    training = next(stage for stage in plan if stage.name == "training")
    assert (training.seconds is None) == (size == "unknown")
    assert f"{settings['max_steps']} steps" in training.what


@pytest.mark.parametrize(
    ("temperature", "attempts"), [(None, "80 attempts"), (0.7, "80 attempts"), (0.0, "40 attempts")]
)
def test_attempts_that_are_all_alike_are_planned_once(temperature: float | None, attempts: str) -> None:
    settings = settings_for(LARGE, SIZES["135M"]).settings
    plan = make_plan(
        settings,
        SIZES["135M"],
        tasks="",
        num_train=99,
        num_test=40,
        num_validation=0,
        has_tasks=True,
        attempts=attempts_at(temperature),
    )
    assert next(stage for stage in plan if stage.name == "before").what.startswith(attempts)


def test_a_larger_model_and_a_cpu_take_longer() -> None:
    def seconds(machine: Machine, size: str) -> float:
        settings = settings_for(machine, SIZES[size], steps=10).settings
        plan = make_plan(settings, SIZES[size], tasks="", num_train=99, num_test=40, num_validation=0, has_tasks=True)
        return sum(stage.seconds or 0.0 for stage in plan)

    assert seconds(LARGE, "135M") < seconds(LARGE, "1.7B") < seconds(Machine(), "1.7B")
    assert [duration(each) for each in (0.2, 61, 150, 7300, None)] == [
        "1 s",
        "61 s",
        "2 min",
        "2 h 02 min",
        "not known",
    ]


def test_a_warm_start_is_planned_with_a_third_of_the_time_that_there_is() -> None:
    def more(minutes: float | None) -> float:
        settings = settings_for(Machine(), SIZES["1.7B"]).settings
        plan = make_plan(
            settings,
            SIZES["1.7B"],
            tasks="",
            num_train=99,
            num_test=40,
            num_validation=0,
            has_tasks=True,
            minutes=minutes,
        )
        (found,) = (stage.more for stage in plan if stage.more is not None)
        return found

    assert more(60) - more(30) == pytest.approx(30 * 60 / 3)
    assert more(10_000) == more(None) > more(60)


def test_a_plan_says_how_long_all_takes_with_a_warm_start_and_without(tmp_path: Path) -> None:
    stages = [
        Stage(name="calls", what="look", seconds=60, more=240),
        Stage(name="training", what="train", seconds=120),
    ]
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(plan_table(stages, Ledger(tmp_path, {})))
    rows = [line.split("│")[2:-1] for line in console.export_text().splitlines()[-3:-1]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["in all", "", "3 min"],
        ["", "with a warm start", "7 min"],
    ]


def test_a_limit_of_time_that_is_too_short_is_told_before_anything_is_done(tmp_path: Path) -> None:
    stages = [
        Stage(name="calls", what="look", seconds=60, more=240),
        Stage(name="training", what="train", seconds=9000),
        Stage(name="after", what="judge", seconds=60),
    ]
    ledger = Ledger(tmp_path, {})
    assert _time_left(1, stages, ledger).startswith("All but training takes about 2 min, which is more than 1 minutes")
    assert _time_left(4, stages, ledger).startswith("With a warm start, all but training takes about 6 min")
    assert "or lower `--num-eval-tasks`" in _time_left(4, stages, ledger)
    assert "all takes about 7 minutes at most" in _time_left(7, stages, ledger)
    ledger.finish("calls", "Fine.", 60)
    assert "all takes about 4 minutes at most" in _time_left(4, stages, ledger)
    assert "--num-eval-tasks" not in _time_left(0.5, stages, ledger)  # which it cannot change any more
    ledger.finish("training", "Fine.", 60)
    assert _time_left(0.5, stages, ledger).startswith("Training is done")


def test_a_dry_run_shows_the_plan_and_leaves_nothing(
    told: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [
        "train",
        "--servers",
        told["servers"],
        "--tasks",
        told["tasks"],
        "--model",
        "./nowhere",
        "--out",
        str(out),
    ]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in STAGES)
    assert "14 tasks to train on" in said
    assert not out.exists()


# ---- What it goes on from ----


def test_other_arguments_are_refused_with_what_differs(told: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Ledger(out, TrainArguments(**told).told())
    first.finish("doctor", "Fine.", 1.0)
    first.finish("tasks", "20 tasks.", 1.0)
    assert Ledger(out, TrainArguments(**told).told()).said("tasks") == "20 tasks."
    with pytest.raises(
        SettingsError, match=r"`--steps` was not given and is 7 now; `--seed` was 0 and is 3 now\. Go on"
    ):
        Ledger(out, TrainArguments(**told, steps=7, seed=3).told())
    with pytest.raises(SettingsError, match="`--cpu` was not given and is given now"):
        Ledger(out, TrainArguments(**told, use_cpu=True).told())
    write(Path(told["tasks"]), tasks(21))
    with pytest.raises(SettingsError, match=r"the contents of .*tasks\.jsonl have changed"):
        Ledger(out, TrainArguments(**told).told())


def test_what_the_doctor_found_wrong_may_be_mended(told: dict[str, Any], tmp_path: Path) -> None:
    Ledger(tmp_path / "out", TrainArguments(**told).told()).finish("doctor", "Fine.", 1.0)
    Path(told["servers"]).write_text('{"mcpServers": {"other": {"command": "true"}}}')
    assert not Ledger(tmp_path / "out", TrainArguments(**told).told()).is_done("doctor")


def test_a_folder_with_something_else_is_not_written_to(told: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"has something else in it \(adapter_config.json\)"):
        Ledger(tmp_path, TrainArguments(**told).told())


def test_two_commands_do_not_work_in_one_folder(told: dict[str, Any], tmp_path: Path) -> None:
    first, second = (Ledger(tmp_path / "out", TrainArguments(**told).told()) for _ in range(2))
    with first.hold(), pytest.raises(SettingsError, match="Another `mcp-grpo train` is at work"), second.hold():
        pass
    with second.hold():
        pass


def test_what_a_stage_wrote_down_is_there_for_the_next_process(told: dict[str, Any], tmp_path: Path) -> None:
    Ledger(tmp_path / "out", TrainArguments(**told).told()).note(base="model")
    assert Ledger(tmp_path / "out", TrainArguments(**told).told())["base"] == "model"


# ---- The arguments ----


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": 0}, "`--steps` must be at least 1, got 0"),
        ({"eval_temperature": -0.5}, "`--eval-temperature` must be at least 0, got -0.5"),
        ({"learning_rate": -1.0}, "`--learning-rate` must be above 0"),
        ({"minutes": 0}, "`--minutes` must be above 0, got 0"),
        ({"minutes": float("nan")}, "`--minutes` must be above 0, got nan"),
        ({"servers": None}, "Name the servers that the tasks are for"),
        ({"tasks": None, "eval_tasks": "held.jsonl"}, "`--eval-tasks` are of no use without `--tasks`"),
        ({"environment": "workbench"}, "has its own servers and tasks: leave `--servers` and `--tasks` out"),
        ({"data": "folder"}, "`--data` is for an environment. Name it with `--environment`"),
        ({"options": (("tools", "all"),)}, "`--option` is for an environment"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(told: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        TrainArguments(**{**told, **changes})


def test_servers_that_are_not_there_and_several_processes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "--servers", "nowhere.json", "--out", str(tmp_path / "out")]) == 1
    assert "There is no file 'nowhere.json'" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--servers", "nowhere.json"]) == 1
    assert "several GPUs go through" in capsys.readouterr().err


def test_an_adapter_is_no_model_to_train(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SettingsError, match="is an adapter"):
        ModelSize.of(str(tmp_path))


# ---- The tasks ----


def test_some_tasks_are_held_out(told: dict[str, Any], tmp_path: Path) -> None:
    splits = load_splits(TrainArguments(**told), tmp_path)
    parts = [set(part["task_id"]) for part in (splits.train, splits.validation, splits.test)]  # pyright: ignore
    assert [len(part) for part in parts] == [14, 2, 4]
    assert len(set.union(*parts)) == 20
    assert splits.sentence == "14 tasks to train on, 2 to choose the best policy by, 4 to judge by"
    again = load_splits(TrainArguments(**told), tmp_path)
    assert again.test["task_id"] == splits.test["task_id"]
    assert load_splits(TrainArguments(**told, seed=1), tmp_path).test["task_id"] != splits.test["task_id"]


def test_tasks_with_chains_are_held_out_by_chain(told: dict[str, Any], tmp_path: Path) -> None:
    rows = [row for chain in range(10) for row in tasks(3, f"c{chain}", chain=f"c{chain}")]
    write(Path(told["tasks"]), rows)
    splits = load_splits(TrainArguments(**told), tmp_path)
    assert not set(splits.train["chain"]) & set(splits.test["chain"])
    assert not splits.note


def test_where_there_are_too_few_chains_it_is_told_what_is_held_out(told: dict[str, Any], tmp_path: Path) -> None:
    write(Path(told["tasks"]), tasks(12, chain="the only one"))
    splits = load_splits(TrainArguments(**told), tmp_path)
    assert len(splits.test) > 0
    assert "too few different chains" in splits.note


def test_where_no_task_can_be_held_out_the_run_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    write(Path(told["tasks"]), tasks(3))
    with pytest.raises(SettingsError, match=r"There are 3 tasks in .*too few to hold some out.*--eval-tasks"):
        load_splits(TrainArguments(**told), tmp_path)


def test_tasks_to_judge_by_may_be_named_and_those_that_are_trained_on_are_told(
    told: dict[str, Any], tmp_path: Path
) -> None:
    held = write(tmp_path / "held.jsonl", [*tasks(2), *tasks(4, "other")])
    splits = load_splits(TrainArguments(**told, eval_tasks=held), tmp_path)
    assert (len(splits.train), len(splits.test)) == (18, 6)
    assert "2 of the tasks to judge by are trained on, too" in splits.note
    assert len(load_splits(TrainArguments(**told, eval_tasks=held, num_eval_tasks=3), tmp_path).test) == 3


SCRIPT = {"steps": [], "final": "1"}


def make_environment(size: str = "24") -> Environment:
    rows = [
        {**row, "template": str(number // 3), "solution": SCRIPT, "grounded": number % 2 == 0}
        for number, row in enumerate(tasks(int(size)))
    ]
    splits = {"train": rows, "test": [{**row, "task_id": f"held-{row['task_id']}"} for row in rows[:5]]}
    return Environment(name="Rows", servers={}, splits=splits, max_turns=17, max_result_tokens=3000)


def test_an_environment_brings_its_tasks_and_how_they_are_split(tmp_path: Path) -> None:
    arguments = TrainArguments(environment=f"{__name__}:make_environment", options=(("size", "30"),))
    splits = load_splits(arguments, tmp_path)
    assert splits.validation is not None
    assert len(splits.train) + len(splits.validation) == 30
    assert not set(splits.train["template"]) & set(splits.validation["template"])
    assert len(splits.test) == 5
    # What a solution uses and nothing has shown would teach the policy to guess; to compare with, it is of use.
    imitated = [row["solution"] is not None for row in splits.train.to_list()]
    assert imitated == splits.train["grounded"]
    assert all(row["solution"] for row in splits.test.to_list())


def test_a_dry_run_in_an_environment_has_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:make_environment"
    assert main(["train", "--environment", name, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Train Qwen/Qwen3-0.6B on Rows" in said
    assert "5 to judge by" in said
    world = world_of(TrainArguments(environment=name))
    settings = settings_for(LARGE, SIZES["135M"]).settings
    assert settings["vllm_max_model_length"] == SIZES["135M"].context
    world.fit(settings, 32_768)
    shown = ("max_turns", "max_result_tokens", "max_completion_length")
    assert [settings[name] for name in shown] == [17, 3000, 7500]
    world.fit(settings, 8192)
    assert [settings[name] for name in shown] == [17, 2048, 4096]  # half is for the prompt
    assert world.attempt(Path("out")) == f"mcp-grpo bench {name} --split test --policy out --out out/bench"


@pytest.mark.parametrize(("more", "length"), [([], 7500), (["--max-tokens", "2000"], 2000)])
def test_a_policy_is_tried_in_an_environment_with_the_limits_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], length: int
) -> None:
    given: dict[str, Any] = {}

    def bench(*args: Any, **settings: Any) -> Any:
        given.update(settings)
        raise SettingsError("enough")

    monkeypatch.setattr("mcp_grpo.bench.bench", bench)
    policy = ["--policy", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["bench", f"{__name__}:make_environment", *policy, *more]) == 1
    shown = ("max_turns", "max_result_tokens", "max_completion_length")
    assert [given[name] for name in shown] == [17, 3000, length]


def make_odd_environment(**options: str) -> Environment:
    rows = [
        {**row, "solution": SCRIPT, "grounded": False, "template": {"of": number}}
        for number, row in enumerate(tasks(20))
    ]
    return Environment(name="Odd", servers={}, splits={"all": rows}, reward_funcs=(fault_penalty,))


def test_an_environment_without_splits_is_split_and_options_may_be_json(tmp_path: Path) -> None:
    options = (("args", '{"difficulty": "hard"}'),)
    arguments = TrainArguments(environment=f"{__name__}:make_odd_environment", options=options)
    splits = load_splits(arguments, tmp_path)
    assert len(splits.test) > 0
    assert not any(row["solution"] for row in splits.train.to_list())
    assert all(row["solution"] for row in splits.test.to_list())
    world = world_of(arguments)
    assert list(world.reward_funcs) == [fault_penalty]
    line = world.attempt(tmp_path / "a folder")
    assert shlex.split(line)[3:6] == ["--option", "args", '{"difficulty": "hard"}']
    assert "--split" not in line
    assert Ledger(tmp_path / "run", arguments.told())["base"] is None


def test_a_run_that_was_begun_before_there_were_environments_goes_on(told: dict[str, Any], tmp_path: Path) -> None:
    arguments = TrainArguments(**told).told()
    before = {name: value for name, value in arguments.items() if name not in ("environment", "data", "options")}
    Ledger(tmp_path / "out", before).finish("tasks", "done", 1.0)
    assert Ledger(tmp_path / "out", arguments).is_done("tasks")


# ---- The settings ----


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("machine", [LARGE, Machine()])
@pytest.mark.parametrize("num_tasks", [1, 3, 300])
def test_settings_form_whole_groups_on_any_machine(
    size: str, machine: Machine, num_tasks: int, tmp_path: Path
) -> None:
    settings = settings_for(machine, SIZES[size]).settings
    fit_step(settings, num_tasks)
    step = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    assert step % settings["num_generations"] == 0
    assert step // settings["num_generations"] <= num_tasks
    own = ("num_eval_tasks", "model_name_or_path", "dtype", "use_peft", "load_in_4bit")
    given = {name: value for name, value in settings.items() if name not in own and not name.startswith("lora_")}
    given |= {"use_vllm": False, "bf16": False, "use_cpu": True, "output_dir": str(tmp_path), "report_to": "none"}
    MCPGRPOConfig(**given)  # which refuses what does not go together


@pytest.mark.parametrize(
    ("memory", "size", "per_pass"), [(139.0, "0.6B", 16), (139.0, "1.7B", 8), (15.0, "1.7B", 4), (8.0, "135M", 2)]
)
def test_a_pass_is_as_large_as_card_and_model_allow(memory: float, size: str, per_pass: int) -> None:
    card = Machine(gpu="Card", memory=memory, has_bf16=True, packages=frozenset({"vllm"}))
    choice = settings_for(card, SIZES[size])
    assert choice.settings["per_device_train_batch_size"] == per_pass
    assert choice.settings["gradient_accumulation_steps"] == 64 // per_pass
    assert any(f"{per_pass} trajectories in a pass" in reason for reason in choice.reasons)


def test_a_warm_start_of_a_larger_model_is_short() -> None:
    assert [warm_up_steps(SIZES[size], 400) for size in ("135M", "0.6B", "1.7B")] == [150, 50, 50]
    assert warm_up_steps(SIZES["0.6B"], 8) == 24
    assert warm_up_steps(SIZES["tiny"], 4000) == 200


def test_settings_go_by_size_context_and_what_is_given() -> None:
    rates = [settings_for(LARGE, size).settings["learning_rate"] for size in SIZES.values()]
    assert rates == [2e-3, 5e-4, 1e-4, 1e-4, 2e-5]  # the last is of unknown size
    tiny = settings_for(Machine(), SIZES["tiny"])
    assert tiny.settings["max_completion_length"] == 512
    assert tiny.settings["max_steps"] == 30
    given = settings_for(LARGE, SIZES["0.6B"], steps=7, learning_rate=1e-3, use_cpu=True)
    assert (given.settings["max_steps"], given.settings["learning_rate"]) == (7, 1e-3)
    assert given.settings["use_cpu"]
    assert "as given" in given.reasons[-1]
