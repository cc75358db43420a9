"""Data sets by name: samples `x` [n, ...] float32 ready for a model, and class labels `y` [n] int64.

One row per data set. Nothing here cuts data into devices; partitions.py does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np

from edge_client.dataset import Dataset
from edge_client.errors import RuntimeMissing, UsageError


def load(name: str) -> Dataset:
    """The whole data set, always in the same order. Raises UsageError for an unknown name."""
    if name not in DATA_SETS:
        close = difflib.get_close_matches(name, DATA_SETS, n=1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"unknown data set {name!r}", hint=f"{guess}use one of {', '.join(sorted(DATA_SETS))}")
    return DATA_SETS[name]()


def digits() -> Dataset:
    """1,797 scans of handwritten digits by 43 people, [1, 8, 8], ink from 0 to 1; ships with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise RuntimeMissing("scikit-learn is not installed", hint="pip install 'fedcenters[emulator]'") from missing
    raw = load_digits()
    x = raw.data.reshape(-1, 1, 8, 8).astype(np.float32) / np.float32(16)
    return Dataset(x, raw.target.astype(np.int64))


DATA_SETS: dict[str, Callable[[], Dataset]] = {"digits": digits}
