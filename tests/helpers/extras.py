"""
Packages of optional features that a few tests need, in a folder of their own.

Accelerate, Transformers and PEFT import them wherever they are installed, which would cost every process seconds. A test starts a
process that has them, with the variables of `with_extras`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


FOLDER = Path(sys.prefix) / "test_extras"


def needs(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test where a package is neither installed nor in that folder."""
    has = find_spec(name) is not None or (FOLDER / name).is_dir()
    return pytest.mark.skipif(not has, reason=f"needs {name}: `make test-all` installs it, or says why it cannot")


def with_extras() -> dict[str, str]:
    """Variables of a process that finds these packages, after all others."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(FOLDER)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
