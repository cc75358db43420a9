"""What a library's exception says, in one line and without the paths of this machine. Knows no library."""

from __future__ import annotations

import re

LIMIT = 300
PATH = re.compile(r"""(File )?["'(]*[\w.~+:-]*([/\\][\w.~+@-]+){2,}["')]*(, line \d+)?(, in \w+)?[:\d]*\s*""")


def sentence(wrong: BaseException) -> str:
    """The first line that says something; the exception's kind when none does."""
    lines = (PATH.sub("", line).strip() for line in str(wrong).splitlines())
    return next((line[:LIMIT] for line in lines if line), type(wrong).__name__)
