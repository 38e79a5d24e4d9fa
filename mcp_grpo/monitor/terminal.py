"""Warnings in the terminal, and what a run chose by itself, whatever else is done with the log."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tqdm.auto import tqdm

from mcp_grpo.inert import inert


class InertFormatter(logging.Formatter):
    """Writes control characters of what is logged so that no terminal obeys them, also when it shows the file later."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return inert(super().format(record))


class TerminalHandler(logging.Handler):
    """
    Writes warnings to the terminal, above the progress bars, with control characters in them shown instead of obeyed.

    Python does that by itself only until somebody adds a handler, such as one that writes to a file: from then on nothing is
    seen. Where a handler of the root writes to the terminal, it is left to that one.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(InertFormatter("%(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, unless the root's handlers do, or the terminal hears of it anyway."""
        if getattr(record, "is_said", False):
            return
        if any(_is_terminal(handler) and record.levelno >= handler.level for handler in logging.getLogger().handlers):
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except (OSError, ValueError):  # the terminal is gone
            self.handleError(record)


@contextmanager
def any_text_in_terminal() -> Iterator[None]:
    """Let characters that a terminal cannot show be written as escapes meanwhile, instead of raising."""
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    kept = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, kept, strict=True):
            stream.reconfigure(errors=errors)


def tell(logger: logging.Logger, sentence: str) -> None:
    """
    Log a sentence that is no warning, and show it in the terminal all the same: once, also where what is logged is seen there.

    Args:
        logger (`logging.Logger`):
            Gets it at the level `INFO`. If it takes not even warnings, nothing is shown.
        sentence (`str`):
            What is said.
    """
    logger.info("%s", sentence)
    if logger.isEnabledFor(logging.WARNING) and not _shows(logger, logging.INFO):
        with suppress(OSError, ValueError):  # the terminal is gone
            tqdm.write(inert(sentence), file=sys.stderr)


def speak_in_terminal(*names: str) -> None:
    """
    Let loggers write their warnings to the terminal. Doing it again changes nothing.

    Args:
        names (`str`):
            Names of loggers.
    """
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, TerminalHandler) for handler in logger.handlers):
            logger.addHandler(TerminalHandler())


def _shows(logger: logging.Logger, level: int) -> bool:
    """Return whether what is logged at a level is written to the terminal."""
    each: logging.Logger | None = logger
    while each is not None and logger.isEnabledFor(level):
        if any(_is_terminal(handler) and level >= handler.level for handler in each.handlers):
            return True
        each = each.parent if each.propagate else None
    return False


def _is_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams
