"""What the settings of the recipes rest on is said for each of them, and only for them."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml


ROOT = Path(__file__).parents[2]
CONFIGS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
}
SECTION = (ROOT / "recipes" / "README.md").read_text().split("## What the settings rest on\n")[1].split("\n## ")[0]
TABLES, _, OTHERS = SECTION.partition("\nOf no concern to what is learnt")
NOT_LEARNING = set(re.findall(r"`(\w+)`", OTHERS))


class Row(NamedTuple):
    """A row of the table: settings and their values, patterns of configurations, and what they rest on."""

    settings: dict[str, Any]
    patterns: list[str]
    support: str

    def is_of(self, config: str) -> bool:
        return any(fnmatchcase(config, pattern) for pattern in self.patterns)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows() -> Iterator[Row]:
    for line in TABLES.split("| setting | value | in | rests on |\n|---|---|---|---|\n")[1].splitlines():
        if line.startswith("|"):
            names, values, where, support = cells(line)
            read = [yaml.safe_load(value) for value in codes(values)]
            yield Row(dict(zip(codes(names), read, strict=True)), codes(where), support)


ROWS = list(rows())
WORDS = [cells(line)[0] for line in TABLES.splitlines() if line.startswith("| ") and len(cells(line)) == 2][1:]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_of_a_configuration_is_in_the_table_once_with_its_value(config: str) -> None:
    for name, value in CONFIGS[config].items():
        found = [row.settings[name] for row in ROWS if row.is_of(config) and name in row.settings]
        if name in NOT_LEARNING:
            assert not found, f"`{name}` is in the table and below it"
        else:
            assert found == [value], f"recipes/README.md says {found} of `{name}: {value}` in {config}.yaml"


def test_the_table_is_of_settings_that_are_there() -> None:
    for row in ROWS:
        configs = [config for config in CONFIGS if row.is_of(config)]
        assert all(any(fnmatchcase(config, pattern) for config in configs) for pattern in row.patterns), row
        assert all(CONFIGS[config].items() >= row.settings.items() for config in configs), row
    assert set().union(*CONFIGS.values()) >= NOT_LEARNING


def test_each_says_in_a_word_what_is_known_and_points_to_what_was_measured() -> None:
    results = (ROOT / "docs" / "results.md").read_text()
    headings = re.findall(r"^#+ (.+)$", results, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = re.findall(r"\(\.\./docs/results\.md#([\w-]+)\)", SECTION)
    assert set(linked) <= anchors
    assert len(linked) > 10
    assert WORDS == ["learnt", "no gain", "untested", "size", "exact", "default"]
    assert {row.support.partition(":")[0] for row in ROWS} == set(WORDS)
