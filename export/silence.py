"""Suppress what third-party exporters print on stdout and stderr. Their exceptions are not affected."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from edge_client.printable import printable, put_on_stderr

CHATTY_LOGGERS = (
    "torch.onnx",
    "torch.utils._pytree",
    "torchao",
    "onnxscript",
    "onnx_ir",
    "absl",
    "litert_torch",
)
OUR_LOGGERS = ("edge_client", "export", "coordinator", "emulator")

_one_at_a_time = threading.RLock()  # descriptors belong to the whole process
_depth = 0
_stderr: int | None = None  # a copy of descriptor 2 while it is silenced
_named: frozenset[str] = frozenset()  # threads whose messages begin with the thread's name


def write_stderr(text: str) -> None:
    """Write a line to stderr, also while another thread is in `suppress_output`."""
    text, copy = printable(text), _stderr
    if copy is None:
        put_on_stderr(f"{text}\n")
    else:
        with suppress(OSError):  # as there
            os.write(copy, f"{text}\n".encode())


def show_progress(logger: str) -> None:
    """From now on what takes long is told on stderr: the messages of this logger and of those below it."""
    told = logging.getLogger(logger)
    if not any(isinstance(handler, _StderrLines) for handler in told.handlers):
        told.addHandler(_StderrLines())
        told.setLevel(logging.INFO)
        told.propagate = False  # litert's libraries give the root logger a handler, which would repeat each line


def show_warnings() -> None:
    """From now on the warnings of all loggers are lines on stderr; of libraries not while they are silenced.

    Python's own last resort would do until a library calls `logging.info`, which puts another handler before it, as
    litert's do in the middle of a run: one that lets control characters through.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = _StderrLines(logging.WARNING)
        handler.addFilter(lambda record: _stderr is None or record.name.partition(".")[0] in OUR_LOGGERS)
        root.addHandler(handler)


def name_threads(names: Iterable[str]) -> None:
    """From now on what threads of these names show begins with the thread's name."""
    global _named  # noqa: PLW0603 - of the whole process, as descriptor 2
    _named = frozenset(names)


class _StderrLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        name = f"{record.threadName}: " if record.threadName in _named else ""
        write_stderr(f"{name}{self.format(record)}")


@contextmanager
def suppress_output() -> Iterator[None]:
    """Silence Python warnings, CHATTY_LOGGERS, the root logger, and C++ libraries that write to descriptors 1 and 2."""
    with _one_at_a_time:  # levels that are read while another thread is silent would be put back as the usual ones
        root, loggers = logging.getLogger(), [logging.getLogger(name) for name in CHATTY_LOGGERS]
        levels = [logger.level for logger in loggers]
        _set_levels(loggers, [logging.CRITICAL] * len(loggers))
        quiet = _critical_only()
        root.addFilter(quiet)  # for its own records; its level would silence all other loggers, too
        try:
            with warnings.catch_warnings(), _descriptors_to_null():
                warnings.simplefilter("ignore")
                yield
        finally:
            root.removeFilter(quiet)
            _set_levels(loggers, levels)


def _set_levels(loggers: Sequence[logging.Logger], levels: Sequence[int]) -> None:
    """`setLevel` empties what every logger of the process remembers, of which torch has hundreds: once will do."""
    for logger, level in zip(loggers, levels, strict=True):
        logger.level = level
    loggers[0].setLevel(levels[0])


def _critical_only() -> Callable[[logging.LogRecord], bool]:
    """A filter of its own for each time that output is suppressed."""
    return lambda record: record.levelno >= logging.CRITICAL


@contextmanager
def _descriptors_to_null() -> Iterator[None]:
    global _depth, _stderr  # noqa: PLW0603 - the state of the process's descriptors
    with suppress(AttributeError):  # a program without a console has no stdout
        sys.stdout.flush()
    put_on_stderr("")
    null = os.open(os.devnull, os.O_WRONLY)
    while null <= 2:  # noqa: PLR2004 - a stream that was closed stays the null device: a copy could have its number
        null = os.dup(null)
    saved = [os.dup(fd) for fd in (1, 2)]
    try:
        _depth, _stderr = _depth + 1, saved[1] if _depth == 0 else _stderr
        for fd in (1, 2):
            os.dup2(null, fd)
        yield
    finally:
        _depth -= 1
        _stderr = None if _depth == 0 else _stderr
        for fd, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, fd)
            os.close(copy)
        os.close(null)
