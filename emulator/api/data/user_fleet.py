"""`fc.fleet`: the user's own samples as a fleet."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import I64, Array
from emulator.api.data.columns import Columns, as_array, is_missing
from emulator.api.data.kinds import (
    check_kinds,
    check_no_bytes,
    checked_inputs,
    checked_labels,
    look_like_classes,
    warn_of_shared,
)
from emulator.api.data.of_devices import (
    LEAST,
    columns_of_each,
    device_folders,
    joined_with,
    tell_left_out,
    warn_of_other_classes,
)
from emulator.api.data.partitions import as_scheme
from emulator.api.data.reading import read_columns
from emulator.api.data.unread import DEVICES_TESTS, MAKE_NUMBERS, check_devices, check_order, is_frame
from emulator.data.fleet import Fleet
from emulator.data.fleet_split import device_names
from emulator.data.given_parts import GivenParts, PartsOf
from emulator.data.loaders.samples import TRAIN_SHARE, DataSet, RawSamples, to_float, to_unit_range
from emulator.data.partition_schemes import PARTITION_SCHEMES, Iid, PartitionScheme, describe_scheme
from emulator.data.user_schemes import ByUser
from emulator.options import OPTIONS
from export.plugins import nearest_name_hint

log = logging.getLogger(__name__)
TEST_SHARE = 0.2
WITHOUT_SAMPLES = (
    "y holds %s of the classes 0 to %s: class %s has an output of the model and no sample. Where that is not meant, "
    "number them without gaps: y = np.unique(y, return_inverse=True)[1]"
)
GROUPS = "give one value for each sample, groups=array, or for each device, groups={device: group}"
HOW = 'write by="column", or partition=fc.partitions.Dirichlet(0.1) and devices=100'


def fleet(  # noqa: PLR0913 - each is a part of the question
    data: Any,  # noqa: ANN401 - of many libraries
    *,
    by: Any = None,  # noqa: ANN401 - a column's name, or an array
    partition: Any = None,  # noqa: ANN401 - what `as_scheme` takes
    devices: int | None = None,
    test: Any = TEST_SHARE,  # noqa: ANN401 - a share, or data
    x: Any = None,  # noqa: ANN401 - a column's name, or several
    y: str | int | None = None,
    groups: Any = None,  # noqa: ANN401 - a column's name, or an array
    seed: int | None = None,
    name: str = "",
) -> Fleet:
    """A fleet of your own samples: one device per value of a column (`by`), or a `partition` among `devices`.

    `data` is a torch Dataset or DataLoader, a pair (x, y) of arrays or tensors (x is a dict of several, by the names of
    forward's parameters, for a model that takes several), a pandas DataFrame, a Hugging Face
    Dataset, a dict that has such data for each device, or a folder with a subfolder for each device (as
    fedcenters-edge reads it). `x`, `y` and `by` name columns where there are any; of a pandas DataFrame x is every
    other column of numbers, and a line on stderr names those that are left out. `by` may also be an array [n].
    `partition` is what `fc.partitions` says.

    Samples x [n, ...] become float32; uint8 are pixels, and become 0 to 1. Whole numbers y [n] are classes from 0;
    texts, and True and False, are classes in alphabetical order, which the fleet's `classes` names and `Result.predict`
    returns; floats are targets. `columns` has the names of a table's inputs. `test` is the share of each device's
    samples that only test, where it brings none that do, or data of the same kind (a dict, where `data` is one). `seed`
    cuts the data; without it the seed of the run does, `fleet["anna"]` and `new_devices` are those of seed 0, and
    `Result.split` has those of the run. `groups`, a column, an array [n] of the samples, or a mapping from each device,
    is the true group: where each device has one, a run says how well a method found them (`ari`). `name` is what
    reports call the data. Devices are named by the values of `by`, or by the keys of a dict; a number stands behind the
    column's name, and `fleet[7]` finds it; `frame["subject"].map(fleet.name).map(result.assignments)` is the center of
    each row.
    `without` and `only` leave devices out, which are then `new_devices`. Raises UsageError and ConfigError, which say
    what to write.

    >>> x, y = np.random.default_rng(0).normal(size=(90, 4)), np.arange(90) % 3
    >>> fleet((x, y), by=np.repeat(["anna", "ben", "cleo"], 30))
    Fleet(arrays, 3 devices with 24 training samples [4] of 3 classes, by=array)
    >>> fleet((x, y), by=np.repeat([7, 8, 9], 30)).without([8]).name(7)
    'device-7'
    >>> fleet((x, y), partition="dirichlet:alpha=1,least=2", devices=5, name="mine")["device-00"].train.x.dtype
    dtype('float32')
    """
    if isinstance(data, (str, Path)):
        data = device_folders(Path(data))
    OPTIONS["devices"].check(devices)
    if seed is not None:
        OPTIONS["seed"].check(seed)
    test = float(test) if isinstance(test, Real) and not isinstance(test, (bool, Integral)) else test
    parts: GivenParts | None = None
    if isinstance(data, Mapping) and not hasattr(data, "with_format"):
        check_devices(data)
        if by is not None or partition is not None or devices is not None:
            raise UsageError("these data are divided among devices already", hint="leave out by, partition and devices")
        data = {who: data[who] for who in sorted(data, key=str)}  # its order draws nothing
        names = dict(zip(data, device_names(data), strict=True))
        columns, rows, tables, test = _of_devices(data, test, x=x, y=y, groups=groups)
        parts = GivenParts(list(rows.values()), names=[names[who] for who in rows])
        data = {who: data[who] for who in rows}
    else:
        columns, tables = read_columns(_without_groups(data, x, groups, y, by), x=x, y=y, by=by), [data]
    held, share = _test_columns(test, columns, x=x, y=y, by=by, parts=parts)
    if held is not None:
        warn_of_other_classes([("the training data", data), ("the test data", test)])
    if told := ", ".join(f"{name} ({kind})" for name, kind in columns.left_out.items()):
        log.warning("left out of x: %s. Name what x is, x=[...], or make them numbers: %s", told, MAKE_NUMBERS)
    if saved := [name for name in columns.names if name.startswith("Unnamed: ")]:  # as pandas calls it
        log.warning("column %r of x is the index of a table that was saved: read it with index_col=0", saved[0])
    whole, classes = _data_set(columns, held, share)
    devices_of, given = _given(data, columns, parts, whole.names)
    if groups is not None:
        domain = _group_numbers(groups, tables, devices_of, list(given))
        whole = replace(whole, train=replace(whole.train, domain=domain))
    scheme = parts or _scheme(by, partition, devices)
    how = f"by={by if isinstance(by, (str, int)) else 'array'}" if partition is None and by is not None else ""
    found = Fleet(
        read=partial(_given_samples, whole),
        scheme=scheme,
        count=devices or 0,
        options={"data_set": name or columns.kind, "partition": how or describe_scheme(scheme), "data_seed": seed},
        seed=seed,
        classes=classes,
        columns=tuple(columns.names),
        pixels=columns.x.dtype == np.uint8,
        given=given,
    )
    found.cut()  # so that what is wrong is said here
    return found


def _given_samples(whole: DataSet, _seed: int) -> DataSet:
    """What `Fleet.read` is here: a function by name, so that a fleet can be pickled for another process."""
    return whole


def _scheme(by: Any, partition: Any, devices: int | None) -> PartitionScheme:  # noqa: ANN401 - see `fleet`
    if partition is None:
        if by is None and devices is None:
            raise UsageError("nothing says how devices share these samples", hint=HOW)
        return Iid() if by is None else ByUser(least=2)
    scheme = as_scheme(partition)
    ours = isinstance(scheme, (GivenParts, PartsOf, *PARTITION_SCHEMES.values())) and not isinstance(scheme, ByUser)
    if by is not None and ours:
        told = f"{describe_scheme(scheme)} does not look at whose the samples are"
        raise UsageError(told, hint="leave out by, or take partition=fc.partitions.ByUser()")
    if not devices and not isinstance(scheme, ByUser) and not getattr(scheme, "knows_devices", False):
        raise UsageError(f"{describe_scheme(scheme)} for how many devices?", hint="add devices=100")
    return scheme


def _of_devices(
    data: Mapping[Any, Any],
    test: Any,  # noqa: ANN401 - see `fleet`
    *,
    x: Any,  # noqa: ANN401 - see `fleet`
    y: str | int | None,
    groups: Any,  # noqa: ANN401 - see `fleet`
) -> tuple[Columns, dict[str, I64 | tuple[I64, ...]], list[Any], Any]:
    """-> the samples of all devices, whose each is, the objects that they are from, and what `test` says beside."""
    if isinstance(test, Mapping) and not test:
        raise UsageError("test has no device", hint="leave it out: a share of each device's samples then tests")
    tests, test = (test, TEST_SHARE) if isinstance(test, Mapping) else ({}, test)
    inputs, held_out = ({who: _without_groups(d, x, groups, y) for who, d in of.items()} for of in (data, tests))
    columns, parts = columns_of_each(inputs, x=x, y=y, tests=held_out)
    if isinstance(test, float) and test != TEST_SHARE and any(isinstance(rows, tuple) for rows in parts.values()):
        raise UsageError("each device has samples of its own that test", hint="leave out test")
    return columns, parts, [one for who in parts for one in (data[who], tests.get(who)) if one is not None], test


def _test_columns(
    test: Any,  # noqa: ANN401 - see `fleet`
    train: Columns,
    *,
    x: Any,  # noqa: ANN401 - see `fleet`
    y: str | int | None,
    by: Any,  # noqa: ANN401 - see `fleet`
    parts: GivenParts | None,
) -> tuple[Columns | None, float]:
    """The user's own test data, if any, and the share of each device's samples that trains where there are none.

    Each test sample belongs to a device that has training samples.
    """
    if isinstance(test, float) and 0 < test < 1:
        return None, 1 - test
    if test is None or isinstance(test, (Real, str)):
        raise UsageError(f"test is {test!r}", hint="give the share of each device's samples that only test, as 0.2")
    if parts is not None:
        raise UsageError(
            "each device's test samples are not named",
            hint="give a share, as test=0.2, a dict with data for each device, or a folder with test/",
        )
    if by is not None and not isinstance(by, (str, int)):
        raise UsageError(
            "nothing says whose the test samples are",
            hint=f"name a column of both: by='column', or write {DEVICES_TESTS}, or test=0.2",
        )
    held = read_columns(test, x=list(train.names) or x, y=y, by=by)
    check_kinds("the test data", held, "the training data", train)
    if held.classes and train.classes and held.classes != train.classes:
        told = f"the test data have the classes {', '.join(held.classes)}, the training data {', '.join(train.classes)}"
        raise ConfigError(told, hint="give both the same names in the same order, as test.cast_column does")
    for part in (train, held):
        if part.by is not None:
            _distinct("by", part.by)
    if held.by is not None and train.by is not None and (strange := np.setdiff1d(held.by, train.by)).size:
        told = f"{strange.size} values of {by!r} are only in the test data, as {strange[0]!r}"
        raise ConfigError(told, hint="give these devices training samples, or leave them out")
    if held.x.shape[1:] != train.x.shape[1:]:
        raise ConfigError(
            f"test samples are {list(held.x.shape[1:])}, training samples {list(train.x.shape[1:])}",
            hint="use one shape",
        )
    return replace(held, parts=joined_with("test samples", train.parts, held.parts)), TRAIN_SHARE


def _data_set(train: Columns, test: Columns | None, share: float) -> tuple[DataSet, Sequence[str | bool]]:
    """-> the data set, and the names of its classes where they have some."""
    columns = [train] if test is None else [train, test]
    labels, classes = checked_labels([part.y for part in columns])
    shapes = [list(y.shape[1:]) for y in labels]
    if shapes[0] != shapes[-1]:
        raise ConfigError(f"test targets are {shapes[-1]}, training targets {shapes[0]}", hint="use one shape")
    if labels[0].dtype == np.int64 and labels[0].ndim == 1:
        known = np.unique(np.concatenate(labels))
        if (gaps := known != np.arange(len(known))).any():
            log.warning(WITHOUT_SAMPLES, len(known), known[-1], gaps.argmax())
    if how := look_like_classes(labels):
        log.warning("y holds %s, which are targets. For classes give %s", *how)
    users, names = _users(train, columns)
    raw = [
        RawSamples(x=checked_inputs(part.x), y=y, user=user)
        for part, y, user in zip(columns, labels, users, strict=True)
    ]
    ready = to_unit_range if train.x.dtype == np.uint8 else to_float
    held = raw[1] if test is not None else None
    if held is not None:
        warn_of_shared([raw[0].x], [held.x.astype(raw[0].x.dtype, copy=False)])
    data = DataSet(train=raw[0], test=held, ready=ready, train_share=share, names=names)
    data = replace(data, parts=train.parts if test is None else test.parts)
    return data, classes or train.classes


def _given(
    data: Any,  # noqa: ANN401 - see `fleet`
    columns: Columns,
    parts: GivenParts | None,
    names: Sequence[str],
) -> tuple[I64, dict[Any, str]]:
    """-> the number of each sample's device [n], and by what the user called each device the name that it got."""
    if parts is not None:
        lengths = [len(np.concatenate(part)) if isinstance(part, tuple) else len(part) for part in parts.parts]  # type: ignore[arg-type]
        return np.repeat(np.arange(len(lengths)), lengths), dict(zip(data, parts.names, strict=True))
    if columns.by is None:
        return np.zeros(len(columns.x), np.int64), {}
    values, which = np.unique(columns.by, return_inverse=True)
    return which.astype(np.int64), dict(zip(values.tolist(), names, strict=True))


def _without_groups(data: Any, x: Any, groups: Any, *others: Any) -> Any:  # noqa: ANN401 - see `fleet`
    """A data frame without its column of true groups, which is no input unless `x` names it."""
    if x is not None or not isinstance(groups, str) or any(isinstance(one, str) and one == groups for one in others):
        return data
    return data.drop(columns=[groups]) if is_frame(data) and groups in data.columns else data


def _group_numbers(groups: Any, held: list[Any], devices_of: I64, called: Sequence[Any]) -> I64:  # noqa: ANN401 - see `fleet`
    """The number of each sample's true group; `called` has the devices as the user calls them."""
    if isinstance(groups, Mapping):
        if missing := [who for who in called if who not in groups]:
            raise UsageError(f"groups say nothing of {missing[0]!r}", hint="give each device a group")
        if not called:
            raise UsageError("groups by device, for devices without names", hint=GROUPS)
        groups = np.array([groups[who] for who in called])[devices_of]
    if isinstance(groups, str):
        for one in held:
            if groups not in (names := list(getattr(one, "columns", getattr(one, "column_names", ())))):
                hint = nearest_name_hint(groups, map(str, names)) if names else GROUPS
                raise UsageError(f"there is no column {groups!r} for groups", hint=hint)
        groups = np.concatenate([as_array(one[groups]) for one in held])
    check_order("groups", held[0][0] if isinstance(held[0], (tuple, list)) else held[0], groups)
    found = as_array(groups)
    if found.shape != devices_of.shape:
        raise ConfigError(f"groups are {list(found.shape)}, for {len(devices_of)} samples", hint=GROUPS)
    return _distinct("groups", found)[1].astype(np.int64)


def _distinct(name: str, values: Array) -> tuple[Array, I64]:
    """-> the sorted values, and the number of each one [n]. Raises ConfigError for missing ones and several kinds."""
    if missing := sum(map(is_missing, values.tolist())):
        raise ConfigError(
            f"{missing} samples have no value of {name}", hint="fill these values in, or drop the samples"
        )
    try:
        return np.unique(values, return_inverse=True)
    except TypeError:
        kinds = sorted({type(value).__name__ for value in values.tolist()})
        told = f"{name} holds {' and '.join(kinds)}"
        raise ConfigError(told, hint="make them one kind, as texts: astype(str)") from None


def _users(train: Columns, columns: Sequence[Columns]) -> tuple[list[I64 | None], Sequence[str]]:
    """-> the number of each sample's user in each part, and the users' names as devices."""
    if train.by is None:
        return [None for _ in columns], ()
    check_no_bytes("by", [part.by for part in columns if part.by is not None])
    values, first = _distinct("by", train.by)
    few = np.bincount(first) < LEAST
    if len(columns) > 1 and columns[1].by is not None:
        few |= ~np.isin(values, columns[1].by)
    if few.any():
        why = "have a single sample" if len(columns) == 1 else "have no test samples, or a single training sample,"
        tell_left_out(values[few].tolist(), len(values), why)
    owners = [part.by for part in columns if part.by is not None]
    numbers: list[I64 | None] = [np.searchsorted(values, owner).astype(np.int64) for owner in owners]
    return numbers, device_names(values.tolist(), train.by_name)
