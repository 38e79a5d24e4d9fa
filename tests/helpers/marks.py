"""Cases that only `make test-all` runs."""

from typing import Any

import pytest


def full(*values: Any, id: str | None = None) -> Any:
    """Mark a case of `parametrize` that repeats, in another setting, what another case shows."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)
