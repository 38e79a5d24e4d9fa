"""The one way from a trainer to the Hub."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import trainer as transformers_trainer


class _CleanUploads:
    """An `HfApi` that uploads a clean copy of a folder in its place."""

    def __init__(self, api: Any, copy: Callable[[Path, Path], None], beside: Path) -> None:
        self._api, self._copy, self._beside = api, copy, beside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: str, run_as_future: bool = False, **kwargs: Any) -> Any:
        # Beside the policy, where there is room for it. The name starts as those that are never uploaded.
        staged = Path(tempfile.mkdtemp(prefix="_upload-", dir=self._beside))
        is_uploading = False
        try:
            self._copy(Path(folder_path), staged)
            result = self._api.upload_folder(folder_path=str(staged), run_as_future=run_as_future, **kwargs)
            if run_as_future:
                result.add_done_callback(lambda _: shutil.rmtree(staged, ignore_errors=True))
                is_uploading = True
            return result
        finally:
            if not is_uploading:
                shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def uploads_of(copy: Callable[[Path, Path], None], beside: str | Path) -> Iterator[None]:
    """
    In which the `Trainer` of Transformers uploads copies of folders, not the folders.

    Args:
        copy (`Callable[[Path, Path], None]`):
            Called with a folder to be uploaded and an empty one, which it fills and which is uploaded instead.
        beside (`str` or `Path`):
            Where the copies are made.
    """
    module: Any = transformers_trainer
    original = module.hf_api
    module.hf_api = lambda: _CleanUploads(original(), copy, Path(beside))
    try:
        yield
    finally:
        module.hf_api = original
