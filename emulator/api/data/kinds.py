"""Kinds of samples and labels: which a fleet takes, and what they become."""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import Array
from emulator.api.data.columns import Columns, is_missing
from emulator.api.data.unread import ONE_KIND

log = logging.getLogger(__name__)
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_INT64 = 2**63 - 1
MOST_CLASSES = 32  # of whole numbers as floats; more are counts rather than classes
FEATURES = 2  # dimensions: n, and at least one feature
NUMBERS = {"i": "whole numbers", "u": "whole numbers", "f": "floating point numbers", "b": "True and False"}


def check_kinds(who: str, part: Columns, other: str, of: Columns) -> None:
    """Raise ConfigError for samples or labels of another kind, which would make others of those of all devices."""
    for name, hint in (
        ("x", ONE_KIND),
        ("y", "make them one kind: whole numbers or texts for classes, floating point numbers for targets"),
    ):
        mine, theirs = (_kind_in_words(name, getattr(each, name)) for each in (part, of))
        if mine != theirs:
            raise ConfigError(f"{name} of {who} is {mine}, of {other} {theirs}", hint=hint)


def _kind_in_words(name: str, values: Array) -> str:
    if name == "x":
        return "uint8" if values.dtype == np.uint8 else "other numbers"
    return NUMBERS.get(values.dtype.kind, "text")


def checked_inputs(x: Array) -> Array:
    """Samples of a kind that becomes float32. Raises ConfigError."""
    if x.dtype.kind not in "biuf" or x.ndim < FEATURES or 0 in x.shape:
        told = f"x is {x.dtype} {list(x.shape)}"
        hint = "give numbers [n, features], [n, tokens] of texts, or [n, channels, height, width] of images"
        raise ConfigError(told, hint=hint)
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        wrong = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))
        told = f"x holds NaN or infinity in {len(wrong)} of {len(x)} samples, first in x[{wrong[0]}]"
        raise ConfigError(told, hint="fill these values in, or drop the samples")
    _check_range("x", x)
    return x


def check_no_bytes(name: str, parts: Sequence[Array]) -> None:
    """Raise ConfigError for bytes, as files of HDF5 give them: their text is not what the user calls it."""
    for y in parts:
        if y.dtype.kind in "SO" and any(isinstance(value, bytes) for value in y.flat):
            how = f"np.asarray({name}).astype(str)" if y.dtype.kind == "S" else f"[value.decode() for value in {name}]"
            raise ConfigError(f"{name} holds bytes", hint=f"make them texts: {how}")


def _check_range(name: str, values: Array) -> None:
    """Raise ConfigError for numbers that float32 does not hold."""
    if values.dtype.kind == "f" and max(abs(float(values.max())), abs(float(values.min()))) > MAX_FLOAT32:
        raise ConfigError(f"{name} holds numbers beyond float32, above {MAX_FLOAT32:.1e}", hint="scale them")


def checked_labels(parts: Sequence[Array]) -> tuple[list[Array], Sequence[str | bool]]:
    """-> classes int64 or targets [n, ...] float32 of each part, and the values of classes that were no numbers."""
    kinds = {y.dtype.kind for y in parts}
    if any(0 in y.shape for y in parts):
        raise ConfigError(f"y is {parts[0].dtype} {list(parts[0].shape)}", hint="give one label for each sample")
    if kinds & set("cVMm"):  # also dates, each of which would be a class
        raise ConfigError(f"y is {parts[0].dtype}", hint="give whole numbers or texts for classes, floats for targets")
    if kinds <= {"f"}:
        return [_targets(y) for y in parts], ()
    several = [math.prod(y.shape[1:]) > 1 for y in parts]
    if kinds <= set("iu") and all(several):
        if any(((y < 0) & (y != IGNORED)).any() for y in parts):
            raise ConfigError("y holds classes below 0", hint=f"use numbers from 0, and {IGNORED} to leave one out")
        if all((y == IGNORED).all() for y in parts):
            raise ConfigError(f"all labels are {IGNORED}, which counts nothing", hint="give labels, from 0 on")
        return [y.astype(np.int64) for y in parts], ()
    if any(several):
        hint = "give one class for each sample, whole numbers, or float targets"
        if kinds == {"b"}:
            hint = "for several yes and no of a sample give y.astype('float32'), and a loss of these to the run"
        raise ConfigError(f"labels are {parts[0].dtype} {list(parts[0].shape)}", hint=hint)
    flat = [y.reshape(len(y)) for y in parts]
    if kinds <= set("iub"):
        return [_numbered(y) for y in flat], (False, True) if kinds == {"b"} else ()
    return _texts(flat)


def look_like_classes(parts: Sequence[Array]) -> tuple[str, str] | None:
    """What targets [n, k] hold that are classes in another form, and what makes them classes; None where they are none.

    A column of classes becomes floats by one missing value; one-hot rows have a single 1.
    """
    if any(y.dtype.kind != "f" or y.ndim != FEATURES for y in parts):
        return None
    if any(y.shape[1] > 1 for y in parts):
        hot = all(((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all() for y in parts)
        return ("one-hot rows", "y.argmax(axis=1)") if hot else None
    known = np.unique(np.concatenate(parts))
    whole = 1 < len(known) <= MOST_CLASSES and (known == np.arange(len(known))).all()
    return ("whole numbers as floats", "y.astype(int)") if whole else None


def warn_of_shared(train: Iterable[Array], test: Iterable[Array]) -> None:
    """Say that most samples that test are samples that train, as where a test part was not taken out.

    Of samples of few values, as those of yes and no, most training samples are equal to others, and nothing is said.
    """
    known = Counter(hash(row.tobytes()) for part in train for row in part)
    shared = [hash(row.tobytes()) in known for part in test for row in part]
    alike = sum(count for count in known.values() if count > 1)
    if 2 * sum(shared) > len(shared) and 2 * alike < known.total():
        log.warning(
            "%s of %s test samples are training samples, too: the accuracy says little of new samples. Take the test "
            "samples out of the training samples, or give a share, as test=0.2",
            sum(shared),
            len(shared),
        )


def _targets(y: Array) -> Array:
    if not np.isfinite(y).all():
        raise ConfigError("y holds NaN or infinity", hint="drop the samples without a target")
    _check_range("y", y)
    return (y[:, None] if y.ndim == 1 else y).astype(np.float32)


def _numbered(y: Array) -> Array:
    if wrong := [end for end in (int(y.min()), int(y.max())) if not 0 <= end <= MAX_INT64]:
        hint = "number the classes from 0: y = np.unique(y, return_inverse=True)[1]"
        raise ConfigError(f"y holds the class {wrong[0]}", hint=hint)
    return y.astype(np.int64)


def _texts(flat: Sequence[Array]) -> tuple[list[Array], Sequence[str]]:
    if missing := sum(is_missing(v) for y in flat for v in y):
        raise ConfigError(f"y holds NaN, None or NA in {missing} samples", hint="drop the samples without a label")
    check_no_bytes("y", flat)
    if any(isinstance(v, (dt.date, dt.timedelta)) for y in flat for v in y):  # as with a time zone
        raise ConfigError("y holds dates or durations", hint="give the class of each sample, or floats for targets")
    texts = [np.array([str(v) for v in y]) for y in flat]
    names = np.unique(np.concatenate(texts))
    return [np.searchsorted(names, y).astype(np.int64) for y in texts], tuple(names.tolist())
