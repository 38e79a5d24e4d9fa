"""Passes through a model that sees the pictures of its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcp_grpo.sampling.vision import Vision, picture_inputs, token_types, type_column
from mcp_grpo.types import Trajectory


def picture_columns(trajectories: Sequence[Trajectory], vision: Vision | None, device: torch.device) -> dict[str, Any]:
    """
    Return the pictures of trajectories as TRL takes them: `pixel_values` and the like of all of them, one after the other, and
    `num_images` of each trajectory. Nothing, if there are none.
    """
    images = [trajectory.images for trajectory in trajectories]
    if vision is None or not any(images):
        return {}
    inputs = picture_inputs([vision.picture(image) for own in images for image in own])
    return {name: value.to(device) for name, value in inputs.items()} | {"num_images": [len(own) for own in images]}


class Seeing:
    """
    Calls a vision-language model on rows with and without pictures.

    Which tokens stand for pictures is read off the rows. One that the policy wrote, which can only be the last of its row, is none
    of them: nothing attends to it, so that any other token may stand there, while its own probability is that of the label. It
    stands in for the model in one call of TRL's `_get_per_token_logps_and_entropies`.
    """

    def __init__(self, model: Any, vision: Vision, filler_id: int) -> None:
        self._model = model
        self._token_ids = vision.token_ids
        self._filler_id = filler_id
        self._types = type_column(model)

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> Any:
        """Call the model; without pictures, as one that reads text."""
        pictures = self._pictures(kwargs)
        if attention_mask is not None and pictures:
            columns = torch.arange(input_ids.size(1), device=input_ids.device)
            last = (columns * attention_mask).amax(dim=1, keepdim=True)
            is_own = (columns == last) & (token_types(input_ids, self._token_ids) > 0)
            input_ids = input_ids.masked_fill(is_own, self._filler_id)
            if self._types is not None:
                pictures[self._types] = token_types(input_ids, self._token_ids)
        return self._model(input_ids=input_ids, attention_mask=attention_mask, **kwargs, **pictures)

    @staticmethod
    def _pictures(kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take what is given for pictures out of the arguments of a call, and return it if there are any."""
        names = [name for name in kwargs if name == "pixel_values" or name.startswith("image_")]
        found: Mapping[str, Any] = {name: kwargs.pop(name) for name in names}
        return dict(found) if found and len(found["pixel_values"]) else {}
