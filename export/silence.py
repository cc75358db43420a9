"""Suppress what third-party exporters print on stdout and stderr. Their exceptions are not affected."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

CHATTY_LOGGERS = (
    "torch.onnx",
    "torch.utils._pytree",
    "torchao",
    "root",
    "onnxscript",
    "onnx_ir",
    "absl",
    "litert_torch",
)


@contextmanager
def suppress_output() -> Iterator[None]:
    """Silence Python warnings, CHATTY_LOGGERS, and C++ libraries that write to descriptors 1 and 2 directly."""
    loggers = [logging.getLogger(name) for name in CHATTY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _descriptors_to_null():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _descriptors_to_null() -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(fd) for fd in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(null, fd)
        yield
    finally:
        for fd, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, fd)
            os.close(copy)
        os.close(null)
