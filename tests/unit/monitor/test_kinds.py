"""What all evaluations of a run show, kind of task by kind of task, of one run and of several."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from mcp_grpo.cli import main
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import Judged, mean_difference, write_judged
from mcp_grpo.evaluation.comparison import success_change
from mcp_grpo.monitor import kinds_report, learning_table, stuck_sentence
from mcp_grpo.monitor.grid import Grid
from mcp_grpo.monitor.judged_runs import JudgedRun, learnt, read_judged_runs
from mcp_grpo.monitor.kinds import MAX_KINDS, kinds_grid
from mcp_grpo.monitor.report import evaluations_grid, points_text, reward_text


KINDS = {"a": "lookup", "b": "lookup", "c": "code", "d": "code", "e": "sums", "f": "thread"}


def judged(step: int, num_solved: str, *, kinds: dict[str, str] = KINDS, is_known: bool = True) -> Judged:
    """An evaluation in which so many of two attempts at each task succeeded, such as "01" for two tasks."""
    solved = {task: [i < int(number) for i in range(2)] for task, number in zip("abcdef", num_solved, strict=False)}
    rewards = {task: [one - 0.5 for one in found] for task, found in solved.items()}
    return Judged(step=step, rewards=rewards, solved=solved if is_known else {}, kinds=kinds)


def cells(grid: Grid | None) -> dict[str, list[str]]:
    assert grid is not None
    return {label: list(row) for label, row in grid.rows}


def values(each: Judged) -> dict[str, list[float]]:
    return {task: [float(one) for one in found] for task, found in each.solved.items()}


def run(folder: Path, evaluations: list[Judged], *, state: str = "ended", kept_step: int | None = None) -> Path:
    write_judged(evaluations, folder / "evaluations.jsonl")
    (folder / "run.json").write_text(json.dumps({"state": state}))
    (folder / "results.json").write_text(json.dumps({"kept_step": kept_step}))
    return folder


def test_every_evaluation_has_a_column_with_its_gain_since_before() -> None:
    evaluations = [judged(0, "000021"), judged(20, "110021"), judged(40, "220022")]
    grid = evaluations_grid(evaluations, 20)
    assert grid.columns == ["before", "step 20, kept", "step 40"]
    assert [label for label, _ in grid.rows] == [
        "success, with 95 % interval",
        "reward, with 95 % interval",
        "points since before, with 95 % interval",
    ]
    gain = mean_difference(values(evaluations[0]), values(evaluations[2]))
    assert gain
    assert cells(grid)["points since before, with 95 % interval"][0] == ""
    assert cells(grid)["points since before, with 95 % interval"][2] == points_text(gain)
    assert points_text(gain) == f"{100 * gain.mean:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    assert points_text(gain).startswith("+41.7 (")


@pytest.mark.parametrize("is_known", [True, False])
def test_attempts_that_were_cut_are_told_of_by_kind(is_known: bool) -> None:
    before, after = (judged(step, found, is_known=is_known) for step, found in ((0, "000000"), (20, "220000")))
    before.cut.update(a=1, b=2, c=1, unknown=4)
    after.cut.update(c=1)
    shown = cells(kinds_grid({"before": [before], "after": [after], "both": [before, after]}))
    if is_known:
        assert shown["lookup"] == ["0 of 4, 3 cut", "4 of 4", "4 of 8, 3 cut"]
        assert shown["code"] == ["0 of 4, 1 cut", "0 of 4, 1 cut", "0 of 8, 2 cut"]
        assert shown["sums"] == ["0 of 2", "0 of 2", "0 of 4"]
    else:
        assert shown["lookup"] == ["-0.500, 3 cut", "0.500", "0.000, 3 cut"]


def test_a_gain_is_one_of_the_reward_where_it_is_not_known_what_success_is() -> None:
    evaluations = [judged(5, "000021", is_known=False), judged(20, "110021", is_known=False)]
    gain = mean_difference(evaluations[0].rewards, evaluations[1].rewards)
    assert gain
    assert cells(evaluations_grid(evaluations, None)) == {
        "reward, with 95 % interval": [str(each.reward) for each in evaluations],
        "reward since step 5, with 95 % interval": ["", reward_text(gain)],
    }
    assert reward_text(gain).startswith("+0.167 (")


def test_one_evaluation_or_one_task_has_no_gain() -> None:
    assert list(cells(evaluations_grid([judged(0, "10")], None))) == [
        "success, with 95 % interval",
        "reward, with 95 % interval",
    ]
    assert len(evaluations_grid([judged(0, "1"), judged(5, "2")], None).rows) == 2


def test_kinds_are_counted_in_attempts_and_sorted_by_what_they_gained() -> None:
    evaluations = [judged(0, "000021"), judged(20, "110020"), judged(40, "220020")]
    grid = kinds_report(evaluations, 20)
    assert grid is not None
    assert grid.title == "Attempts that succeeded, by kind of task"
    assert grid.columns == ["before", "step 20, kept", "step 40"]
    assert list(cells(grid).items()) == [
        ("lookup", ["0 of 4", "2 of 4", "4 of 4"]),
        ("sums", ["2 of 2", "2 of 2", "2 of 2"]),  # at 100 % before what is at 0
        ("code", ["0 of 4", "0 of 4", "0 of 4"]),
        ("thread", ["1 of 2", "0 of 2", "0 of 2"]),
    ]
    kept_is_last = kinds_report(evaluations, 40)
    assert kept_is_last is not None
    assert kept_is_last.columns == ["before", "step 40, kept"]


def test_kinds_show_the_reward_where_it_is_not_known_what_success_is() -> None:
    grid = kinds_report([judged(0, "002211", is_known=False), judged(20, "202211", is_known=False)], 20)
    assert grid is not None
    assert grid.title == "Reward, by kind of task"
    assert cells(grid)["lookup"] == ["-0.500", "0.000"]


@pytest.mark.parametrize(
    "kinds",
    [{}, dict.fromkeys("abcdef", "all")],
)
def test_fewer_than_two_kinds_have_no_table(kinds: dict[str, str]) -> None:
    assert kinds_report([judged(0, "000021", kinds=kinds)], 0) is None


def test_kinds_that_are_names_of_tasks_have_no_table_and_no_sentence() -> None:
    names = [f"task {i}" for i in range(MAX_KINDS + 1)]
    one = Judged(
        step=0,
        rewards={name: [0.0] * 4 for name in names},
        solved={name: [False] * 4 for name in names},
        kinds={name: name for name in names},
    )
    assert kinds_grid({"before": [one]}) is None
    assert stuck_sentence([one]) is None


def test_an_evaluation_without_kinds_takes_those_of_another() -> None:
    grid = kinds_report([judged(0, "000000", kinds={}), judged(20, "110020")], 20)
    assert cells(grid)["lookup"] == ["0 of 4", "2 of 4"]


def test_kinds_at_which_nothing_ever_succeeded_are_named() -> None:
    evaluations = [judged(0, "000020"), judged(20, "100020")]
    assert stuck_sentence(evaluations) == (
        "No attempt at `code`, `thread` succeeded in any evaluation: see whether the limits allow their solutions, and "
        "whether they are too hard."
    )
    assert stuck_sentence(evaluations[:1]) == (  # two attempts at `thread` are too few
        "No attempt at `code`, `lookup` succeeded in any evaluation: see whether the limits allow their solutions, and "
        "whether they are too hard."
    )
    assert stuck_sentence([*evaluations, judged(40, "001001")]) is None  # once is enough
    assert stuck_sentence([judged(0, "000000", is_known=False)]) is None


def test_a_table_is_as_wide_as_the_terminal_and_loses_nothing() -> None:
    grid = evaluations_grid([judged(step, "000021") for step in range(0, 60, 10)], None)

    def text(width: int) -> str:
        console = Console(width=width, record=True, file=io.StringIO())
        for table in grid.tables(width):
            console.print(table)
        return console.export_text()

    assert len(grid.tables(300)) == 1
    wide, narrow = text(300), text(80)
    assert [len(table.columns) for table in grid.tables(80)] == [3] * 3  # with that of the labels
    assert [len(table.columns) for table in grid.tables(10)] == [2] * 6
    for name in ("before", *(f"step {step}" for step in range(10, 60, 10))):
        assert narrow.count(f" {name} ") == wide.count(f" {name} ") == 1
    assert all(len(line) <= 80 for line in narrow.splitlines())
    share, interval = grid.rows[0][1][0].split(" ", 1)
    assert wide.count(f"{share} {interval}") == 6
    assert narrow.count(f" {share} ") == 6
    assert narrow.count(f" {interval} ") == 6


class TestRuns:
    """Folders of runs, by the command."""

    def test_a_run_is_printed_with_all_evaluations_and_what_is_stuck(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(tmp_path, [judged(0, "000021"), judged(20, "220022"), judged(40, "210022")], kept_step=20)
        assert main(["report", str(tmp_path), "--text"]) == 0
        shown = capsys.readouterr().out
        assert shown.count("step 20, kept") == 2  # of both tables
        assert "6 tasks to judge by, 2 attempts each" in shown
        assert "│ lookup │ 0 of 4 │        4 of 4 │  3 of 4 │" in shown
        assert "No attempt at `code` succeeded in any evaluation" in shown
        assert "from before training to step 20" in shown
        assert not (tmp_path / "report.html").exists()

    def test_markdown_can_be_pasted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        kinds = KINDS | {"c": "a|b\n# `x`", "d": "time_series"}
        run(tmp_path, [judged(0, "000021", kinds=kinds), judged(20, "220022", kinds=kinds)], kept_step=20)
        assert main(["report", str(tmp_path), "--markdown"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "| kind | before | step 20, kept |" in lines
        assert "| --- | --- | --- |" in lines
        assert "| lookup | 0 of 4 | 4 of 4 |" in lines
        assert "| a\\|b \\# \\`x\\` | 0 of 2 | 0 of 2 |" in lines
        assert "| time\\_series | 0 of 2 | 0 of 2 |" in lines
        gain = success_change(judged(0, "000021"), judged(20, "220022"))
        assert gain
        assert f"| points since before, with 95 % interval |  | {points_text(gain)} |" in lines

    def test_a_run_that_has_not_ended_does_not_say_what_it_kept(self, tmp_path: Path) -> None:
        run(tmp_path, [judged(0, "000021"), judged(20, "220022")], state="running", kept_step=20)  # of a checkpoint
        (found,) = read_judged_runs([tmp_path])
        assert found.kept_step is None
        grids, notes = learnt([found])
        assert grids[0].columns == ["before", "step 20"]
        assert [note for note in notes if "training" in note] == []

    def test_a_file_of_earlier_without_kinds_is_read_and_a_broken_line_is_left_out(self, tmp_path: Path) -> None:
        old = [
            {"step": step, "rewards": {"a": [0.0], "b": [share]}, "metrics": {}, "solved": {"a": [False], "b": [True]}}
            for step, share in ((0, 0.0), (20, 1.0))
        ]
        text = "".join(json.dumps(line) + "\n" for line in old)
        (tmp_path / "evaluations.jsonl").write_text(text + json.dumps(old[0])[:40])
        (found,) = read_judged_runs([tmp_path])
        assert [each.step for each in found.evaluations] == [0, 20]
        assert found.evaluations[0].kinds == {}
        grids, notes = learnt([found])
        assert len(grids) == 1
        assert notes == []

    @pytest.mark.parametrize("text", [None, "", '{"step": 0, "rew'])
    def test_a_folder_without_evaluations_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
    ) -> None:
        if text is not None:
            (tmp_path / "evaluations.jsonl").write_text(text)
        assert main(["report", str(tmp_path), "--text"]) == 1
        assert f"There are no evaluations in {tmp_path}." in " ".join(capsys.readouterr().err.split())

    def test_several_runs_are_beside_each_other_and_added_up(self) -> None:
        first = [judged(0, "000021"), judged(20, "110021"), judged(40, "220022")]
        second = [judged(0, "000012"), judged(20, "020021"), judged(40, "200022")]
        (success, kinds), notes = learnt(
            [JudgedRun(name="one", evaluations=first), JudgedRun(name="two", evaluations=second)]
        )
        assert success.title == "Success of 2 runs on 6 tasks, with 95 % interval"
        assert success.columns == kinds.columns == ["before", "step 20", "step 40"]
        rows = cells(success)
        assert [cell.split(" (")[0] for cell in rows["one"]] == ["25.0%", "41.7%", "66.7%"]
        assert [cell.split(" (")[0] for cell in rows["two"]] == ["25.0%", "41.7%", "50.0%"]
        assert [cell.split(" (")[0] for cell in rows["mean of 2 runs"]] == ["25.0%", "41.7%", "58.3%"]
        pooled = [
            {task: values(one)[task] + values(two)[task] for task in "abcdef"}
            for one, two in zip(first, second, strict=True)
        ]
        gains = [mean_difference(pooled[0], after) for after in pooled[1:]]
        assert rows["points since before, with 95 % interval"] == ["", *(points_text(gain) for gain in gains if gain)]
        assert cells(kinds)["lookup"] == ["0 of 8", "4 of 8", "6 of 8"]
        assert notes == [stuck_sentence(first)]

    def test_each_run_is_compared_with_itself(self) -> None:
        """A task that a server failed in one run at one time counts in the other run alone."""
        first = [judged(0, "22"), judged(20, "22")]
        second = [judged(0, "00"), judged(20, "0")]
        (success, *_), _ = learnt(
            [JudgedRun(name="one", evaluations=first), JudgedRun(name="two", evaluations=second)]
        )
        assert cells(success)["points since before, with 95 % interval"] == ["", "+0.0 (+0.0 to +0.0)"]

    def test_runs_that_ended_elsewhere_have_columns_for_their_ends_and_for_what_they_kept(self) -> None:
        first = JudgedRun(name="one", evaluations=[judged(0, "00"), judged(20, "22"), judged(40, "21")], kept_step=20)
        second = JudgedRun(name="two", evaluations=[judged(0, "00"), judged(30, "20")], kept_step=30)
        (success, *_), _ = learnt([first, second])
        assert success.columns == ["before", "last", "kept"]
        ends = [cell.split(" (")[0] + cell.split(")")[1] for cell in cells(success)["one"]]
        assert ends == ["0.0%", "75.0%, step 40", "100.0%, step 20"]
        same = [JudgedRun(name=name, evaluations=first.evaluations, kept_step=20) for name in "ab"]
        assert learnt(same)[0][0].columns == ["before", "step 20, kept", "step 40"]

    def test_only_tasks_that_all_runs_have_are_counted(self) -> None:
        more = JudgedRun(name="more", evaluations=[judged(0, "000000"), judged(20, "220000")])
        fewer = JudgedRun(name="fewer", evaluations=[judged(0, "0000"), judged(20, "2200")])
        (success, *_), _ = learnt([more, fewer])
        assert success.title.startswith("Success of 2 runs on 4 tasks")
        assert cells(success)["more"][1].startswith("50.0% ")

    def test_runs_that_cannot_be_added_up_are_refused(self) -> None:
        other = Judged(step=0, rewards={"x": [0.0]})
        run = JudgedRun(name="one", evaluations=[judged(0, "00")])
        with pytest.raises(SettingsError, match="judged by different tasks"):
            learnt([run, JudgedRun(name="two", evaluations=[other])])
        with pytest.raises(SettingsError, match="no step at which all runs were judged"):
            learnt([run, JudgedRun(name="two", evaluations=[judged(5, "00")])])

    def test_several_runs_have_a_page_each(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folders = [run(tmp_path / name, [judged(0, "00"), judged(20, "22")]) for name in "ab"]
        for folder in folders:
            (folder / "results.json").write_text(json.dumps({"num_steps": 20}))
        assert main(["report", *map(str, folders)]) == 0
        assert all((folder / "report.html").is_file() for folder in folders)
        capsys.readouterr()


def test_the_short_table_has_the_gain_of_the_kept_and_the_last() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(learning_table([judged(0, "000021"), judged(20, "110021"), judged(40, "220022")], 40))
    text = console.export_text()
    assert "step 20" not in text
    (line,) = [line for line in text.splitlines() if "points since before" in line]
    assert "+41.7 (" in line


def test_names_do_nothing_where_they_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kinds = KINDS | {"c": "[red]x[/nothing]\x1b[2J", "d": "[link=file:///]y"}
    run(tmp_path / "[bold]a", [judged(0, "0000", kinds=kinds), judged(20, "2200", kinds=kinds)])
    run(tmp_path / "[bold]b", [judged(0, "0000", kinds=kinds), judged(20, "2200", kinds=kinds)])
    folders = [str(tmp_path / name) for name in ("[bold]a", "[bold]b")]
    assert main(["report", *folders, "--text"]) == 0
    shown = capsys.readouterr().out
    assert "[red]x[/nothing]␛[2J" in shown
    assert "`[red]x[/nothing]␛[2J`" in shown  # in the sentence, too
    assert "[link=file:///]y" in shown
    assert "│ [bold]a " in shown
    assert "\x1b" not in shown
    grid = kinds_report([judged(0, "0000", kinds=kinds)], 0)
    assert grid is not None
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(grid.table())  # a console that obeys
    assert "[red]x[/nothing]␛[2J" in console.export_text()
