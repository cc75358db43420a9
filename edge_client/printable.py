"""Text that came from elsewhere, as a terminal may have it.

A control character in it could move the cursor, colour or hide lines, set the clipboard, or type for the user. Every
place that writes to a terminal or to a log passes its text through here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

LINES = "\n\t"


def printable(text: str, *, keep: str = LINES) -> str:
    r"""`text` with every character that is no visible one as its escape, like \x1b; those of `keep` stay.

    Also the characters that change the direction of text, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_line(text: str) -> str:
    """The same, and one line: a text cannot pretend to be another message."""
    return printable(text, keep="")


def size_in_words(count: int) -> str:
    """A number of bytes for people: 12 bytes, 3.4 kB, 5.6 MB."""
    for unit, size in (("MB", 1_000_000), ("kB", 1_000)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def counted(count: int, what: str) -> str:
    """1 device, 2 devices; the word's plural ends in s."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def first_of(names: Sequence[object], most: int) -> str:
    """The first `most` of these names with commas, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def write_line(text: str) -> None:
    """One line on stderr, as a terminal may have it."""
    put_on_stderr(f"{printable_line(text)}\n")


def put_on_stderr(text: str) -> None:
    """Write text to stderr as it is.

    What cannot be written is lost, and the work goes on: a full disk, no reader, no stderr.
    """
    with suppress(OSError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def open_closed_streams() -> None:
    """Open the null device in the place of a standard stream that was closed before the start.

    A file that is opened later would have its number, and what a library prints would be written into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


class PrintableFormatter(logging.Formatter):
    """A formatter of log records; tracebacks keep their lines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
