"""Pictures as a policy sees them: decoded, processed, and with the tokens that stand for them."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from threading import Lock
from typing import Any, cast

import torch
from peft import PeftModel
from PIL import Image as Pillow
from transformers import ProcessorMixin

from mcp_grpo.errors import SettingsError
from mcp_grpo.trl_compat import processed_image
from mcp_grpo.types import Image


MAX_BYTES = 8_000_000  # of a file
MAX_PIXELS = 16_000_000  # of a picture, before the model's processor makes it smaller
MAX_IMAGES = 16  # that a policy sees in a trajectory
NUM_KEPT = 64  # pictures that are kept as tensors
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

_PER_IMAGE = {
    "image_grid_thw",
    "image_position_ids",
    "image_sizes",
}  # what TRL takes beside `pixel_values`, a row per picture
_TYPES = ("mm_token_type_ids", "token_type_ids")


class UnseenError(Exception):
    """A picture cannot be shown; the message says why, for the policy."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Picture:
    """
    A picture as a policy sees it.

    Args:
        image (`Image`):
            What the tool returned.
        inputs (`Mapping[str, torch.Tensor]`):
            What the model takes for it beside tokens, such as `pixel_values`.
        placeholder (`str`):
            Text that stands where the chat template has the token of a picture.
        token_ids (`tuple[int, ...]`):
            Tokens that the model puts pictures in the place of.
        num_tokens (`int`):
            How many of them the placeholder has.
    """

    image: Image
    inputs: Mapping[str, torch.Tensor]
    placeholder: str
    token_ids: tuple[int, ...]
    num_tokens: int


class Vision:
    """
    Makes pictures into what a vision-language model takes, by its own processor.

    Args:
        processor (`ProcessorMixin`):
            The processor of the model. Raises [`SettingsError`] if its pictures cannot be told apart in a batch, or if it does more
            with them than can be done for one at a time.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self._processor: Any = processor
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self._lock = Lock()
        self.probe: Picture
        """Some picture, to try a chat template with: its note is `[probe]`, and what follows is `after`."""
        if getattr(processor, "image_processor", None) is None or not getattr(processor, "image_token", None):
            raise SettingsError("its processor has no images")
        self.token: str = self._processor.image_token
        self.token_ids = tuple(each for each in self._processor.image_token_ids if each is not None)
        self._literals: list[str] = [self._processor.tokenizer.convert_ids_to_tokens(each) for each in self.token_ids]
        try:
            problem = self._problem()
        except (
            AttributeError,
            ImportError,
            NotImplementedError,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            RuntimeError,
        ) as error:
            problem = f"its processor cannot be used for one picture at a time ({type(error).__name__}: {error})"
        if problem:
            raise SettingsError(problem)

    @property
    def repeats_token(self) -> bool:
        """Return whether all that stands for a picture is one token, as often as it takes."""
        return self.probe.placeholder == self.token * self.probe.num_tokens

    def picture(self, image: Image) -> Picture:
        """Return a picture as the policy sees it. Raises [`UnseenError`] if it cannot. Threads may share it."""
        key = image.sha256
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            decoded = decode(image)
            try:
                found = self._picture(image, decoded)
            except Exception as error:  # whatever a processor makes of what a server sent
                raise UnseenError("it cannot be processed") from error
            with self._lock:
                self._kept[key] = found
                while len(self._kept) > NUM_KEPT:
                    self._kept.popitem(last=False)
        return replace(found, image=image)  # which may stand elsewhere

    def _picture(self, image: Image, decoded: Pillow.Image) -> Picture:
        inputs, placeholder = processed_image(self._processor, decoded)
        num_rows, grid = len(inputs["pixel_values"]), inputs.get("image_grid_thw")
        if num_rows != (expected := 1 if grid is None else int(grid.prod())):
            raise ValueError(f"it makes {num_rows} rows of a picture, and {expected} can be told apart in a batch")
        return Picture(
            image=image,
            inputs=inputs,
            placeholder=placeholder,
            token_ids=self.token_ids,
            num_tokens=sum(map(placeholder.count, self._literals)),  # other threads use the tokenizer meanwhile
        )

    def _problem(self) -> str | None:
        """Try the processor on two pictures, and say why they could not be batched, if so."""
        if not self.token_ids:
            return "its processor does not say which tokens stand for pictures"
        sizes = ((64, 48), (40, 56))
        both = [Pillow.linear_gradient("L").resize(size).convert("RGB") for size in sizes]
        files = [Image(data=b"", mime_type="", note="")] * 2
        pictures = [self._picture(file, each) for file, each in zip(files, both, strict=True)]
        self.probe = replace(pictures[0], image=Image(data=b"", mime_type="", note="[probe]", num_after=len("after")))
        if not all(picture.num_tokens for picture in pictures):
            return "its processor puts no tokens where a picture is"
        names = set(pictures[0].inputs)
        if "pixel_values" not in names or names - {"pixel_values"} - _PER_IMAGE:
            return f"its processor returns {sorted(names)}, of which pictures cannot be told apart in a batch"
        for number, picture in enumerate(pictures):
            whole = self._processor(
                images=[both[number]], text=[self.token], return_tensors="pt", add_special_tokens=False
            )
            ids = self._processor.tokenizer(picture.placeholder, add_special_tokens=False)["input_ids"]
            num_tokens = sum(each in self.token_ids for each in ids)
            if whole["input_ids"][0].tolist() != ids or picture.num_tokens != num_tokens:
                return "its processor writes other tokens for a picture among text"
            if any(not torch.equal(whole[name], picture.inputs[name]) for name in names):
                return "its processor makes something else of a picture among text"
        together = self._processor.image_processor(images=both, return_tensors="pt")
        batch = picture_inputs(pictures)
        if any(batch[name].shape != together[name].shape or not batch[name].equal(together[name]) for name in names):
            return "its processor makes something else of a picture beside others"
        return None


def decode(image: Image) -> Pillow.Image:
    """Return the pixels of a picture. Raises [`UnseenError`] if it is too large, or none."""
    if len(image.data) > MAX_BYTES:
        raise UnseenError(f"its file is larger than {MAX_BYTES // 1_000_000} MB")
    try:
        with Pillow.open(BytesIO(image.data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height <= MAX_PIXELS:
                return opened.convert("RGB")
    except Exception as error:  # decoders raise whatever they like for what they cannot read
        raise UnseenError("it cannot be decoded") from error
    raise UnseenError(f"it has more than {MAX_PIXELS // 1_000_000} million pixels")


def picture_inputs(pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Return what a model takes for pictures of a batch, in the order of its rows and their tokens."""
    names = pictures[0].inputs if pictures else ()
    return {name: torch.cat([picture.inputs[name] for picture in pictures]) for name in names}


def type_column(model: Any) -> str | None:
    """Return how a model wants to be told which tokens stand for pictures, if it does."""
    bare = getattr(model, "module", model)
    bare = cast(Any, bare).get_base_model() if isinstance(bare, PeftModel) else bare
    known = inspect.signature(type(bare).forward).parameters
    return next((name for name in _TYPES if name in known), None)


def token_types(input_ids: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """Return 1 for the tokens that stand for pictures, 0 for text."""
    return torch.isin(input_ids, torch.tensor(token_ids, device=input_ids.device)).long()
