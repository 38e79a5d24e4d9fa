"""What the documentation says of the repository is so."""

import re
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
PACKAGE = ROOT / "mcp_grpo"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "recipes/README.md", "benchmarks/README.md"])
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = re.findall(r'\]\(([^)#]+)[^)]*\)|(?:src|srcset)="([^"]+)"', text)
    links = [link for pair in targets for link in pair if link and "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


def test_every_guarantee_has_its_test() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "concepts" / "guarantees.md").read_text()))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert not {name for name in named if f"def {name}(" not in tests}


@pytest.mark.parametrize("page", ["docs/concepts/step.md", "docs/pictures/step.svg", "CONTRIBUTING.md"])
def test_every_module_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"(?<![\w/.])((?:\w+/)*\w+(?:\.py|/))(?=[`< ])", (ROOT / page).read_text()))
    outside = {"mcp_grpo/", "docs/", "tests/", "recipes/", "notebooks/", "benchmarks/", "site/", "dist/"}
    assert named
    assert not {name for name in named - outside if not (PACKAGE / name).exists() and not (ROOT / name).exists()}


TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_workflows_run_what_the_makefile_has() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [path.stem for path in workflows] == ["docs", "release", "tests"]
    for path in workflows:
        content = yaml.safe_load(path.read_text())
        assert {"name", "jobs"} <= content.keys()
        steps = [step for job in content["jobs"].values() for step in job["steps"]]
        made = {word for step in steps for word in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE)}
        assert made, path.name
        assert made <= TARGETS, path.name
