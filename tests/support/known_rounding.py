"""Devices that round the words of masked sums by known numbers in place of secret ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_client.training import summed_work


def round_by_known_numbers(replace: Callable[[object, str, object], None] = setattr) -> None:
    """From now on in this process: every task's words are rounded by the same numbers, so that bits can be compared."""
    replace(summed_work, "secret_stream", lambda: np.random.default_rng(0))
