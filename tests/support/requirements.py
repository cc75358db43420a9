"""What a test needs and this machine lacks: a skip on a user's machine, a failure in CI, which installs it."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


def skip_without(what: str) -> NoReturn:
    """Skip, or fail in CI; `what` says what is not there and how to get it."""
    if IN_CI:
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
