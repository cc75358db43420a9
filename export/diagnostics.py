"""A library's exception as one line without the paths of this machine; its warnings silenced."""

from __future__ import annotations

import errno
import io
import os
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from zipfile import ZipFile

from edge_client.errors import RuntimeMissing, install_hint, raise_for_memory

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # that tell no file
WRITTEN_KINDS = (io.FileIO, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper, ZipFile)
MAX_SENTENCE_CHARS = 300
MAX_LINE_CHARS = 10_000  # that are looked at, as of an error that shows all of an array
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PATH_PATTERN = re.compile(
    r"""(File )?["'(]{0,4}[\w.~+:-]{0,100}([/\\][\w.~+@-]+){2,}["')]*(, line \d+)?(, in \w+)?[:\d]*\s*"""
)


def raise_for_machine(wrong: BaseException) -> str:
    """The first line of what a library says. Raises what this machine lacks: memory, or room and rights on a disk."""
    if isinstance(wrong, OSError) and wrong.errno is not None:  # without a number it is Python's own, as of `inspect`
        raise wrong
    return raise_for_memory(wrong)


def name_written_file(wrong: OSError) -> None:
    """Give an error in writing, as on a full disk, the name of its file, which the system leaves out.

    It is that of the innermost frame that writes files; of several none is named.
    """
    if wrong.filename is not None or wrong.errno not in WRITE_ERRORS:
        return
    for frame, _ in reversed(list(traceback.walk_tb(wrong.__traceback__))):
        names = set(filter(None, map(_written_name, frame.f_locals.values())))
        if len(names) == 1:
            wrong.filename = names.pop()
        if names:
            return


def _written_name(value: object) -> str | None:
    """The path of a file that is open for writing."""
    if not isinstance(value, WRITTEN_KINDS):
        return None
    try:
        name = value.filename if isinstance(value, ZipFile) else value.name
        written = set("wax+") & set(str(value.mode))
    except (AttributeError, ValueError):  # text in memory, or without its file
        return None
    return str(name) if written and isinstance(name, str | os.PathLike) else None


def first_sentence(wrong: BaseException) -> str:
    """The first line that is not empty, without colours, cut at MAX_SENTENCE_CHARS; otherwise the exception's class."""
    lines = (PATH_PATTERN.sub("", line[:MAX_LINE_CHARS]).strip() for line in COLOURS.sub("", str(wrong)).splitlines())
    return next((line[:MAX_SENTENCE_CHARS] for line in lines if line), type(wrong).__name__)


def converter_missing(wrong: ImportError) -> RuntimeMissing:
    """The error for a converter that is not installed or too old. The model has no part in it."""
    return RuntimeMissing(f"a converter cannot be imported: {first_sentence(wrong)}", hint=install_hint("export"))


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Silence torch's warnings about its own internals while it traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
