"""Values of other libraries as arrays, and what a reader finds: columns of samples. No library of these is imported."""

# ruff: noqa: ANN401 - the objects of other libraries have no types here

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np

from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.samples.input_parts import Parts
from edge_client.protocol.task import Array
from emulator.api.data.unread import check_column
from export.plugins import nearest_name_hint

LABEL_COLUMNS = ("y", "label", "labels", "target", "targets", "class", "fine_label")
Column = str | int | None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """`x` [n, ...] raw, `y` [n, ...] raw, `by` [n]: to whom each sample belongs; `kind` is what they came from.

    `classes` are the names of the labels, where the source has them; `by_name` is the name of the column. `names` are
    those of the columns of x, in order, where x is a table. `parts`: the arrays that x was packed of, if it was.
    `left_out`: other columns of the table that are no numbers, and what they are.
    """

    x: Array
    y: Array
    by: Array | None = None
    kind: str = "arrays"
    by_name: str = ""
    classes: Sequence[str] = ()
    names: Sequence[str] = ()
    parts: Parts = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def as_array(value: Any) -> Array:
    """A tensor, an image, a column or a list as an array; an image has its channels first."""
    if hasattr(value, "toarray") or getattr(value, "is_sparse", False):
        raise ConfigError("a sparse matrix", hint="make it dense: x.toarray(), or x.to_dense() of a tensor")
    if hasattr(value, "detach"):
        held = value.detach().cpu().resolve_conj().resolve_neg()
        return np.asarray((held.float() if str(held.dtype) == "torch.bfloat16" else held).numpy())
    if hasattr(value, "getbands"):
        return channels_first(np.asarray(value))
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise ConfigError("masked values", hint="fill these values in, or drop the samples")
    try:
        return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except ValueError:
        hint = "give samples and labels apart, as x and y, and all samples one shape: resize or pad them"
        raise ConfigError("a list of values of different shapes", hint=hint) from None


def is_missing(label: Any) -> bool:
    """Whether a label is None, NaN, NaT or NA of pandas."""
    if label is None:
        return True
    try:
        return bool(label != label)  # noqa: PLR0124 - only what is no value differs from itself
    except TypeError:  # NA is neither equal nor different
        return True
    except (ValueError, RuntimeError):  # an array or a tensor of several
        return False


def as_numbers(given: Array) -> Array:
    """What are all numbers in an array of objects, as an array of numbers; other arrays as they are."""
    if given.dtype != object or not all(isinstance(value, Number) for value in given.flat):
        return given
    found = np.array(given.tolist())
    return given.astype(np.float64) if found.dtype == object else found  # numbers of decimals and fractions


def channels_first(pixels: Array) -> Array:
    """[..., height, width] or [..., height, width, channels] -> [..., channels, height, width]."""
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)  # noqa: PLR2004 - a grey image


def find_column(
    what: str, asked: Column, names: Sequence[str], usual: Sequence[str], others: Sequence[str] = ()
) -> str:
    """The column that was asked for, or the one with a usual name, or all that is left beside `others` of known use.

    Raises UsageError.
    """
    check_column(what, asked)
    if asked is None:
        axes = {"x", "y", "z"} <= {*names}
        found = [name for name in usual if name in names and not (axes and name == "y")]
        if what == "y" and len(found) > 1:
            raise UsageError(f"{' and '.join(map(repr, found[:2]))} may both be y", hint="name it: y=...")
        left = [name for name in names if name not in others]
        if not found and len(others) > 1 and len(left) == 1:
            return left[0]
        if not found:
            raise UsageError(f"no column of {list(names)} is surely {what}", hint=f"name it: {what}=...")
        return found[0]
    if str(asked) not in names:
        raise UsageError(f"there is no column {asked!r} for {what}", hint=nearest_name_hint(str(asked), names))
    return str(asked)
