"""Pictures among the text of a result: each has a note in the text, which says where it belongs."""

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcp_grpo.errors import CassetteError
from mcp_grpo.types import Image


_SHA256 = re.compile("[0-9a-f]{64}")


def image_of(encoded: str, mime_type: str, note: str) -> Image | None:
    """Return a picture from the base64 that a server sent; `None` if it is none."""
    try:
        return Image(data=base64.b64decode(encoded, validate=True), mime_type=mime_type, note=note)
    except (binascii.Error, ValueError):
        return None


def between(separator: str, parts: Sequence[str | Image]) -> list[str | Image]:
    """Return parts with a text between each two of them."""
    return [each for part in parts for each in (separator, part)][1:]


def joined(parts: Iterable[str | Image]) -> tuple[str, tuple[Image, ...]]:
    """Return parts of a result as one text, with notes for pictures, and the pictures with their places in it."""
    texts: list[str] = []
    images: list[Image] = []
    num_after = 0
    for part in reversed(list(parts)):
        text = part if isinstance(part, str) else part.note
        if not isinstance(part, str):
            images.append(replace(part, num_after=num_after))
        texts.append(text)
        num_after += len(text)
    return "".join(reversed(texts)), tuple(reversed(images))


def split(text: str, images: Sequence[Image]) -> list[str | Image]:
    """
    Return the parts of a result: pictures in the place of their notes, and the text between them, if there is any.

    A picture whose note is not where it should be, because the text was changed, comes there beside it.
    """
    parts: list[str | Image] = []
    end = len(text)
    for image in reversed(images):
        start = min(max(len(text) - image.num_after, 0), end)
        parts += [text[start:end], image]
        end = start - len(image.note) if text.endswith(image.note, 0, start) else start
    parts.append(text[:end])
    return [part for part in reversed(parts) if part != ""]


def after_cut(images: Sequence[Image], before: str, text: str) -> tuple[Image, ...]:
    """Return pictures with their places in a text of which the middle was cut: at its end, if they stood in what is gone."""
    if not images or before == text:
        return tuple(images)
    shared = zip(reversed(before), reversed(text), strict=False)
    num_kept = next((i for i, (old, new) in enumerate(shared) if old != new), min(len(before), len(text)))
    return tuple(image if image.num_after <= num_kept else replace(image, num_after=0) for image in images)


class ImageFolder:
    """
    A folder of pictures beside a recording, each in a file that is named by its hash, so that no file is there twice.

    Args:
        path (`Path`):
            The folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[str, bytes] = {}

    def keep(self, images: Iterable[Image]) -> list[dict[str, Any]]:
        """Write pictures; return what a recording has of each."""
        kept: list[dict[str, Any]] = []
        for image in images:
            file = self.path / image.sha256
            if not file.exists():
                self.path.mkdir(parents=True, exist_ok=True)
                draft = file.with_suffix(".part")
                draft.write_bytes(image.data)
                draft.replace(file)
            kept.append({**image.reference, "note": image.note, "num_after": image.num_after})
        return kept

    def take(self, kept: Iterable[dict[str, Any]]) -> tuple[Image, ...]:
        """Return pictures again. Raises [`CassetteError`] for one that is not there, or not what was written."""
        return tuple(
            Image(
                data=self._data(str(each["sha256"])),
                mime_type=each["mime_type"],
                note=each["note"],
                num_after=each["num_after"],
            )
            for each in kept
        )

    def _data(self, sha256: str) -> bytes:
        if sha256 not in self._read:
            file = self.path / sha256
            try:
                data = file.read_bytes() if _SHA256.fullmatch(sha256) else None
            except OSError:
                data = None
            if data is None or Image(data=data, mime_type="", note="").sha256 != sha256:
                raise CassetteError(
                    f"The recording names a picture that is not in {str(file)!r}, or was changed. Keep the folder beside the "
                    "recording when you move it, or record again."
                )
            self._read[sha256] = data
        return self._read[sha256]
