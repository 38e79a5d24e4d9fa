"""Which rows share a pass, and which passes become one."""

from typing import Any

import torch

from mcp_grpo.learning import NO_CAPACITY, BatchRows, joined
from mcp_grpo.learning.checkpointing import Capacity


def passes(prompts: list[list[int]], lengths: list[list[int]], prompt_length: int) -> list[dict[str, Any]]:
    columns = torch.arange(max(map(max, lengths)))
    return [
        {
            "prompt_ids": torch.tensor(each).unsqueeze(1).expand(-1, prompt_length),
            "prompt_mask": torch.ones(len(each), prompt_length, dtype=torch.long),
            "completion_mask": (columns < torch.tensor(own).unsqueeze(1)).long(),
            "row": torch.tensor([10 * prompt + length for prompt, length in zip(each, own, strict=True)]),
            "num_items_in_batch": torch.tensor(38),
            "nothing": None,
        }
        for each, own in zip(prompts, lengths, strict=True)
    ]


def test_rows_with_the_same_prompt_share_a_pass() -> None:
    batches = passes([[1, 2], [3, 1], [2, 3]], [[5, 9], [4, 7], [1, 2]], prompt_length=30)
    found = BatchRows(batches).by_prompt()
    assert [each["row"].tolist() for each in found] == [[17, 15], [29, 21], [34, 32]]
    assert all(torch.equal(each["completion_mask"].sum(dim=1), each["row"] % 10) for each in found)
    assert all(each["num_items_in_batch"] == 38 and each["nothing"] is None for each in found)


def test_groups_stay_together_where_their_longest_rows_are_as_long() -> None:
    batches = passes([[1, 2], [1, 2]], [[9, 9], [5, 4]], prompt_length=30)
    assert [each["row"].tolist() for each in BatchRows(batches).by_prompt()] == [[19, 15], [29, 24]]


def test_rows_of_like_length_share_a_pass_where_prompts_are_short() -> None:
    batches = passes([[1, 2], [3, 1], [2, 3]], [[5, 9], [4, 7], [1, 2]], prompt_length=1)
    assert [each["row"].tolist() for each in BatchRows(batches).by_prompt()] == [[29, 17], [15, 34], [32, 21]]


GROUPS = [[1, 1], [2, 2], [3, 3], [4, 4]]
LENGTHS = [
    [40, 30],
    [5, 4],
    [20, 20],
    [10, 1],
]  # and a prompt of 30, and the last token of it once more: 102, 41, 72, 43


def rows_of(found: list[dict[str, Any]]) -> list[list[int]]:
    return [each["row"].tolist() for each in found]


def test_passes_of_several_groups_have_about_as_many_tokens_each() -> None:
    batches = passes(
        [GROUPS[0] + GROUPS[1], GROUPS[2] + GROUPS[3]], [LENGTHS[0] + LENGTHS[1], LENGTHS[2] + LENGTHS[3]], 30
    )
    assert rows_of(BatchRows(batches).by_prompt()) == [[50, 40, 25, 24], [50, 50, 50, 41]]


def test_half_groups_stay_side_by_side() -> None:
    batches = passes([[1], [2], [1], [2]], [[5], [9], [4], [7]], prompt_length=30)
    assert rows_of(BatchRows(batches).by_prompt(num_joined=2)) == [[29], [27], [15], [14]]


def test_passes_are_joined_as_long_as_they_fit() -> None:
    rows = BatchRows(passes(GROUPS, LENGTHS, prompt_length=30))
    # Four of 102 tokens and fewer, two of 143 and 115, one of 258.
    for kept, expected in ((0, 1), (102, 1), (142, 1), (143, 2), (257, 2), (258, 4)):
        assert rows.num_joined(Capacity(kept, 0)) == expected
    assert rows.num_joined(NO_CAPACITY) == 1


def test_passes_are_joined_with_checkpointing_only_where_that_saves_more_than_it_costs() -> None:
    whole = BatchRows(passes(GROUPS, LENGTHS, prompt_length=30))
    assert whole.num_joined(Capacity(102, 10_000)) == 1
    assert whole.num_joined(Capacity(10, 10_000)) == 4  # there is no way without it
    single = [[number] for pair in GROUPS for number in pair]
    halves = BatchRows(passes(single, [[length] for pair in LENGTHS for length in pair], prompt_length=300))
    assert halves.num_joined(Capacity(350, 10_000)) == 8  # each prompt once, not twice


def test_a_pass_that_several_became_has_their_rows_and_what_is_of_the_batch() -> None:
    batches = passes(GROUPS, LENGTHS, prompt_length=30)
    assert [joined(batches, index, 1) for index in range(4)] == batches
    assert [joined(batches, index, 2) for index in (0, 2)] == [{}, {}]
    last = joined(batches, 3, 2)
    assert last["row"].tolist() == [50, 50, 50, 41]
    assert last["completion_mask"].shape == (4, 40)
    assert last["num_items_in_batch"] == torch.tensor(38)
    assert last["nothing"] is None
