"""Which rows share a pass."""

from typing import Any

import torch

from mcp_grpo.learning import BatchRows


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
    batches = passes([[1, 2]] * 4, [[5, 9], [4, 7], [3, 2], [1, 8]], prompt_length=30)
    assert rows_of(BatchRows(batches).by_prompt()) == [[29, 28], [27, 22], [15, 14], [13, 11]]
