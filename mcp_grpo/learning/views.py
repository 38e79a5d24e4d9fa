"""Passes through a model in which each turn has the context that it was written in."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mcp_grpo.learning.padding import PER_TOKEN
from mcp_grpo.types import Trajectory


View = tuple[np.ndarray, int, int, int]  # all ids, where the completion tokens `start` to `end` are at their end


class Views:
    """The contexts of trajectories that were not written in one, by their tokens, for as long as they are trained on."""

    def __init__(self) -> None:
        self._batches: dict[bool, dict[bytes, list[View]]] = {}  # of training and of evaluation

    def __bool__(self) -> bool:
        return any(self._batches.values())

    def replace(self, trajectories: Iterable[Trajectory], *, is_training: bool) -> None:
        """Remember a batch instead of the last one that was trained on, or evaluated."""
        self._batches[is_training] = {
            _key(np.array(trajectory.prompt_ids + trajectory.completion_ids)): [
                _view(trajectory, *view) for view in trajectory.views
            ]
            for trajectory in trajectories
            if len(trajectory.views) > 1
        }

    def of(self, ids: np.ndarray) -> list[View] | None:
        """Return the contexts of a row, given all its tokens; `None` if it was written in one."""
        key = _key(ids)
        return next((batch[key] for batch in self._batches.values() if key in batch), None)


class AsSeen:
    """
    Calls a model on rows as the policy saw them: one that was written in several contexts becomes a row for each.

    Outputs are put back to where the tokens stand in the rows that were asked for. It stands in for the model in one call of TRL's
    `_get_per_token_logps_and_entropies`; `make` returns what to call, given the width of the completions.
    """

    def __init__(self, make: Callable[[int], Any], views: Views, num_tokens: int) -> None:
        self._make = make
        self._views = views
        self._num_tokens = num_tokens

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        num_values: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the model on each row in its contexts; return its output as for the rows, with zeros for what has none."""
        ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy() > 0
        found = [self._views.of(row[is_token]) for row, is_token in zip(ids, mask, strict=True)]
        if not any(found):
            values = {} if num_values is None else {"num_values": num_values}
            rows = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
            return self._make(self._num_tokens)(**rows, **values, **kwargs)
        parts = _parts(ids, mask, (labels != -100).cpu().numpy(), found, self._num_tokens)
        left, right = max(part.num_before for part in parts), max(len(part.ids) - part.num_before for part in parts)
        rows = {
            name: torch.from_numpy(_padded(values, [left - part.num_before for part in parts], left + right, filler))
            for name, values, filler in (
                ("input_ids", [part.ids for part in parts], 0),
                ("attention_mask", [np.ones_like(part.ids) for part in parts], 0),
                ("labels", [part.labels for part in parts], -100),
            )
        }
        values = {} if num_values is None else {"num_values": left + right}
        device, shape = input_ids.device, input_ids.shape
        output = self._make(right)(**{name: each.to(device) for name, each in rows.items()}, **values, **kwargs)
        places, homes = _moves(parts, left, left + right, shape[1])
        # A state that a context is written in may stand where the last token of the context before it does.
        _, last = np.unique(homes[::-1], return_index=True)
        of_states, of_tokens = len(homes) - 1 - last, _is_token(parts)
        for name in PER_TOKEN:
            if (per_token := getattr(output, name, None)) is not None:
                # That of a token stands one before it, and nothing is said of a state.
                full = torch.cat([torch.zeros_like(per_token[:, :1]), per_token], dim=1)
                setattr(output, name, _moved(full, places[of_tokens], homes[of_tokens], shape)[:, 1:])
        if num_values is not None and getattr(output, "value_preds", None) is not None:
            values = output.value_preds[:, -(left + right) :]
            output.value_preds = _moved(values, places[of_states], homes[of_states], shape)[:, -num_values:]
        return output


class _Part(NamedTuple):
    """A row to run: its tokens and labels, how many are before the completion, and where tokens stand that are put back."""

    ids: np.ndarray
    labels: np.ndarray
    num_before: int
    row: int
    first: int  # of the tokens that are put back
    columns: np.ndarray
    num_states: int = 0  # of these, for the state that the completion is written in, not for themselves


def _parts(
    ids: np.ndarray, mask: np.ndarray, is_label: np.ndarray, found: Sequence[list[View] | None], num_tokens: int
) -> list[_Part]:
    parts: list[_Part] = []
    for row, views in enumerate(found):
        columns = np.flatnonzero(mask[row])
        if views is None:
            labels = np.where(is_label[row], ids[row], -100)[columns]
            num_before = int((columns < ids.shape[1] - num_tokens).sum())
            parts.append(_Part(ids[row][columns], labels, num_before, row, 0, columns))
            continue
        num_prompt = len(columns) - views[-1][3]  # the completion ends the row
        for view_ids, start, end, _ in views:
            num_before = len(view_ids) - (end - start)
            homes = columns[num_prompt + start - 1 : num_prompt + end]
            labels = np.full_like(view_ids, -100)
            labels[num_before:] = np.where(is_label[row], ids[row], -100)[homes[1:]]
            parts.append(_Part(view_ids, labels, num_before, row, num_before - 1, homes, num_states=1))
    return parts


def _moves(parts: Sequence[_Part], left: int, width: int, row_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where tokens are in the rows that were run, and where they stand in those that were asked for, both flattened."""
    places = [
        number * width + left - part.num_before + part.first + np.arange(len(part.columns))
        for number, part in enumerate(parts)
    ]
    return np.concatenate(places), np.concatenate([part.row * row_width + part.columns for part in parts])


def _is_token(parts: Sequence[_Part]) -> np.ndarray:
    """Return which of the places are of tokens, not of the state before a completion."""
    return np.concatenate([np.arange(len(part.columns)) >= part.num_states for part in parts])


def _moved(found: torch.Tensor, places: np.ndarray, homes: np.ndarray, shape: torch.Size) -> torch.Tensor:
    where, to = (torch.from_numpy(each).to(found.device) for each in (places, homes))
    return found.new_zeros(shape.numel()).index_copy(0, to, found.flatten()[where]).view(shape)


def _padded(rows: Sequence[np.ndarray], starts: Sequence[int], width: int, filler: int) -> np.ndarray:
    table = np.full((len(rows), width), filler, dtype=np.int64)
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        table[number, start : start + len(row)] = row
    return table


def _view(trajectory: Trajectory, context_ids: Sequence[int], start: int, end: int) -> View:
    ids = np.array([*context_ids, *trajectory.completion_ids[start:end]], dtype=np.int64)
    return ids, start, end, len(trajectory.completion_ids)


def _key(ids: np.ndarray) -> bytes:
    return ids.astype(np.int64).tobytes()
