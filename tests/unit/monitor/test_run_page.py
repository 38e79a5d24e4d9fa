"""A page about a run says what was learnt, needs nothing else, and does nothing that a policy or a tool says."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.recorded_run import EVIL, make_run
from matplotlib.image import imread

from mcp_grpo.cli import main
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import Judged, write_judged
from mcp_grpo.monitor.run_page import write_page


class Reader(HTMLParser):
    """Collects the tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_says_what_was_learnt_what_was_wrong_and_with_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert f"The report is {tmp_path / 'report.html'}." in capsys.readouterr().out
    reader = Reader((tmp_path / "report.html").read_text())
    text = " ".join(reader.text.split())
    assert "The trained policy is better: +100.0% of 8 tasks (95 % interval +100.0% to +100.0%)." in text
    assert "success, with 95 % interval 0.0% (0.0% to 32.4%) 100.0% (67.6% to 100.0%)" in text
    assert "doing nothing 12.5%" in text
    assert "Step 2 Too little spread." in text
    assert "3 steps · policy of step 2 kept" in text
    assert "learning_rate 1e-05" in text
    assert "trl 1.16" in text
    assert "prompts Prompts are run once." in text
    assert "At the start: step 0, 5-0" in text
    assert "At the end: step 2, 5-0" in text
    assert 'add({"a": "5 at step 2"})' in text
    assert reader.tags.count("svg") == 3  # success, reward, entropy
    for picture in ("curves.png", "learning.png"):
        assert imread(tmp_path / "pictures" / picture).shape[0] > 200


def test_it_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = write_page(make_run(tmp_path))[0].read_text()
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    assert "currentColor" in page  # curves are in the colour of the text, light or dark


@pytest.mark.full
def test_a_run_that_was_not_evaluated_or_has_not_ended_has_its_page(tmp_path: Path) -> None:
    make_run(tmp_path, results=False)
    text = " ".join(Reader(write_page(tmp_path)[0].read_text()).text.split())
    assert "Reward of training: 0.333 at the start, 1.000 at the end" in text
    assert "add 3 3 1 tool_error 1 tool_error" in text  # of the first and the last step that was trained on
    assert "5 family 0.100 0.900" in text
    evaluations = [
        Judged(
            step=step,
            rewards={f"t{i}": [0.1 * step] for i in range(4)},
            solved={f"t{i}": [step > 1] for i in range(4)},
        )
        for step in (0, 3)
    ]
    write_judged(evaluations, tmp_path / "evaluations.jsonl")
    text = " ".join(Reader(write_page(tmp_path)[0].read_text()).text.split())
    assert "It learnt: from before training to step 3, the reward changed by +0.300" in text
    assert "By success: the trained policy is better: +100.0% of 4 tasks" in text


def test_it_has_all_evaluations_and_kinds_of_tasks_once(tmp_path: Path) -> None:
    """A run that has no evaluations but its own; its trajectories are of the family `5 family`, too."""
    make_run(tmp_path, results=False)
    kinds = {"t0": "5 family", "t1": "5 family", "t2": "<img>[red]x", "t3": "<img>[red]x"}
    write_judged(
        [
            Judged(
                step=step,
                rewards={task: [0.1 * step] for task in kinds},
                solved={task: [task < "t2" and step > 1] * 2 for task in kinds},
                kinds=kinds,
            )
            for step in (0, 2, 3)
        ],
        tmp_path / "evaluations.jsonl",
    )
    page = write_page(tmp_path)[0].read_text()
    text = " ".join(Reader(page).text.split())
    assert "<img" not in page
    assert "points since before, with 95 % interval +50.0 (" in text
    assert "Attempts that succeeded, by kind of task. kind before step 2 step 3 5 family 0 of 4 4 of 4 4 of 4" in text
    assert "<img>[red]x 0 of 4 0 of 4 0 of 4" in text
    assert "No attempt at `<img>[red]x` succeeded in any evaluation" in text
    assert "By family" not in text
    assert "By tool" in text


def test_kinds_are_those_of_the_tasks_that_nothing_was_chosen_by_where_there_are_some(tmp_path: Path) -> None:
    make_run(tmp_path)
    evaluations = [
        Judged(step=step, rewards={"a": [0.0], "b": [1.0]}, kinds={"a": "one", "b": "other"}) for step in (0, 3)
    ]
    write_judged(evaluations, tmp_path / "evaluations.jsonl")
    text = " ".join(Reader(write_page(tmp_path)[0].read_text()).text.split())
    assert "By family" in text
    assert "by kind of task" not in text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="There is no run in"):
        write_page(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_text_of_tools_and_policies_is_shown_and_does_nothing(tmp_path: Path) -> None:
    ordinary, hostile = (make_run(tmp_path / name, text=text) for name, text in (("a", "5"), ("b", EVIL)))
    pages = [write_page(folder)[0].read_text() for folder in (ordinary, hostile)]
    readers = [Reader(page) for page in pages]
    assert set(readers[1].tags) == set(readers[0].tags)  # none of its own
    assert not {"script", "img", "iframe", "object", "link"} & set(readers[1].tags)
    assert not [name for name, value in readers[1].attributes if name.startswith("on")]
    assert readers[1].text.count("<script>document.title='owned'</script>") > 5
    assert "{{ 7*7 }}" in readers[1].text
    assert "\x1b" not in pages[1]
    assert "\u202e" not in pages[1]
