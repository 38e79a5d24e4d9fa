"""Everything that reads a policy's text reads it once, whatever it consists of."""

import time

import pytest

from benchmarks.policy_text import TEXTS, readers


LENGTH = 20_000  # what took a fifth of a minute for each trajectory, where it was read once for each of its lines
ENOUGH = 4.0  # seconds of this process for a reader that takes a tenth of one or less: other work does not count


@pytest.mark.parametrize("name", readers())
def test_a_degenerate_text_takes_no_more_than_a_usual_one_of_its_length(name: str) -> None:
    reader = readers()[name]
    for kind, unit in TEXTS.items():
        start = time.process_time()
        reader((unit * LENGTH)[: 2 * LENGTH])
        assert time.process_time() - start < ENOUGH, kind
