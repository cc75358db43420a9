"""What a library's exception says, in one line and without the paths of this machine. Knows no library."""

from __future__ import annotations

import re

MAX_SENTENCE_CHARS = 300
PATH_PATTERN = re.compile(r"""(File )?["'(]*[\w.~+:-]*([/\\][\w.~+@-]+){2,}["')]*(, line \d+)?(, in \w+)?[:\d]*\s*""")


def first_sentence(wrong: BaseException) -> str:
    """The first line that says something; the exception's kind when none does."""
    lines = (PATH_PATTERN.sub("", line).strip() for line in str(wrong).splitlines())
    return next((line[:MAX_SENTENCE_CHARS] for line in lines if line), type(wrong).__name__)
