"""Data that are divided among devices already: a dict of them, or a folder with a subfolder for each."""

# ruff: noqa: ANN401 - the objects of other libraries have no types here

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.dataset import Dataset, DeviceData, load_folder
from edge_client.errors import ConfigError, UsageError
from edge_client.printable import first_of
from edge_client.protocol.samples.input_parts import Parts, joined_parts
from edge_client.protocol.task import I64
from emulator.api.data.columns import Columns
from emulator.api.data.frames import frame_columns
from emulator.api.data.kinds import check_kinds, checked_inputs, warn_of_shared
from emulator.api.data.reading import read_columns
from emulator.api.data.unread import is_frame, no_device_folders

log = logging.getLogger(__name__)
SHOWN = 5  # devices that an error names
LEAST = 2  # samples of a device: one to train, one to test
BY_CLASS = (
    "for a folder of pictures for each class give data sets: "
    "fc.fleet({home.name: torchvision.datasets.ImageFolder(home) for home in Path(folder).iterdir()})"
)
OTHER_CLASSES = (
    "class %s is %s in %s, and %s in %s. Give each ImageFolder a folder of every class, and allow_empty=True"
)


def columns_of_each(
    data: Mapping[str, Any], *, x: Any, y: str | int | None, tests: Mapping[str, Any]
) -> tuple[Columns, dict[str, I64 | tuple[I64, ...]]]:
    """The columns of all devices after each other, and whose each sample is; `tests` has samples that only test.

    Devices that cannot train and test are no part of it. Raises UsageError, ConfigError.
    """
    if strange := [who for who in tests if who not in data]:
        told = f"there are test samples of {strange[0]!r}, which has no training samples"
        raise UsageError(told, hint="name the same devices in both dicts")
    warn_of_other_classes((f"the data of {who}", one) for who, one in [*data.items(), *tests.items()])
    held: list[tuple[str, Columns]] = []
    parts: dict[Any, Any] = {}
    end = 0
    for who, mine in data.items():
        columns = _of_one(str(who), mine, tests.get(who), held[:1], x=x, y=y)
        if len(columns) == 1 and len(columns[0].x) < LEAST:
            continue
        held += [(str(who), part) for part in columns]
        rows = [np.arange(end, end := end + len(part.x)) for part in columns]
        parts[who] = rows[0] if len(rows) == 1 else tuple(rows)
    if not held:
        raise ConfigError("there is no device with two samples", hint="give at least one")
    if few := [who for who in data if who not in parts]:
        tell_left_out(few, len(data), "have a single sample")
    bare = [who for who, rows in parts.items() if not isinstance(rows, tuple)]
    if 0 < len(bare) < len(parts):
        told = f"{first_of(bare, SHOWN)} without test samples, beside devices that have some"
        raise ConfigError(told, hint="give each device some, or none of them: `test` is then the share that tests")
    if x is None and (name := _column_of_devices(held)):
        log.warning("column %r of x holds what each device is called: drop it, or name what x is, x=[...]", name)
    joined = _one_after_another(held)
    if tests:
        warn_of_shared(*((joined.x[rows] for rows in each) for each in zip(*parts.values(), strict=True)))
    return joined, parts


def tell_left_out(devices: Sequence[Any], among: int, why: str) -> None:
    """Name the devices that are no part of a fleet."""
    log.warning("%s of %s devices %s and are left out: %s", len(devices), among, why, first_of(devices, SHOWN))


def warn_of_other_classes(data: Iterable[tuple[str, Any]]) -> None:
    """Say that one number is several classes, as of torchvision's data sets of folders where a class has no folder."""
    known = dict[Any, tuple[str, str]]()
    for who, one in data:
        numbers = getattr(getattr(one, "dataset", one), "class_to_idx", None)  # of a loader and a subset, too
        for name, number in numbers.items() if isinstance(numbers, Mapping) else ():
            first, called = known.setdefault(number, (who, name))
            if called != name:
                log.warning(OTHER_CLASSES, number, called, first, name, who)
                return


def _column_of_devices(held: Sequence[tuple[str, Columns]]) -> str:
    """The column of a table that has the device's own name, a number, in each sample; empty where there is none."""
    try:
        numbers = [(float(who), part) for who, part in held]
    except ValueError:
        return ""
    names = held[0][1].names
    return next((n for k, n in enumerate(names) if all((part.x[:, k] == who).all() for who, part in numbers)), "")


def _of_one(
    who: str, mine: Any, test: Any, before: Sequence[tuple[str, Columns]], *, x: Any, y: str | int | None
) -> list[Columns]:
    """A device's samples, and those that test where it has some; `before` is the first device, if another is."""
    first, of = (before[0][0], list(before[0][1].names)) if before else ("", [])
    train, held = (mine.train, mine.test) if isinstance(mine, DeviceData) else (mine, None)
    columns: list[Columns] = []
    try:
        for part in (train, held if test is None else test):
            if part is not None:
                columns.append(_columns(part, x=of or x, y=y))
                checked_inputs(columns[-1].x)
                of = of or list(columns[0].names)  # in the order of the first device
    except (UsageError, ConfigError) as wrong:
        raise type(wrong)(f"{who}: {wrong.message}", hint=wrong.hint) from None
    if before and x is None and is_frame(mine) and (more := sorted({*frame_columns(mine, y)} - {*of})):
        told = f"{who} has a column {more[0]!r} of numbers, which {first} has not"
        raise ConfigError(told, hint="give all devices the same columns, or name what x is: x=[...]")
    return [replace(part, classes=mine.class_names) for part in columns] if isinstance(mine, DeviceData) else columns


def _columns(data: Any, *, x: Any, y: str | int | None) -> Columns:
    if not isinstance(data, Dataset):
        return read_columns(data, x=x, y=y)
    return replace(read_columns((data.x, data.y), x=x, y=y), parts=data.parts)


def _one_after_another(held: Sequence[tuple[str, Columns]]) -> Columns:
    """Raises ConfigError for a device whose samples or labels are others than the first one's."""
    first, one = held[0]
    packed, called, classes = one.parts, first, one.classes
    for who, part in held:
        packed = joined_with(who, packed, part.parts)
        check_kinds(who, part, first, one)
        for name, what in (("x", "samples"), ("y", "labels")):
            mine, theirs = (list(getattr(each, name).shape[1:]) for each in (part, one))
            if mine != theirs:
                raise ConfigError(f"{who} has {what} of {mine}, {first} of {theirs}", hint="use one shape")
        if not classes:
            called, classes = who, part.classes
        if part.classes and part.classes != classes:
            told = f"{who} has the classes {', '.join(part.classes)}, {called} {', '.join(classes)}"
            raise ConfigError(told, hint="name the same classes in the same order in each schema.toml")
    x, y = (np.concatenate([getattr(part, name) for _, part in held]) for name in ("x", "y"))
    return replace(one, x=x, y=y, kind=f"{one.kind} of each device", parts=packed, classes=classes)


def joined_with(who: str, one: Parts, other: Parts) -> Parts:
    """The parts of both. Raises ConfigError for others than the first samples have."""
    try:
        return joined_parts(one, other)
    except ValueError as wrong:
        raise ConfigError(f"{who}: {wrong}", hint="give all samples the same arrays") from None


def device_folders(folder: Path) -> dict[str, DeviceData]:
    """Each device's samples from its own subfolder, as fedcenters-edge reads them. Raises ConfigError."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    homes = [path for path in paths if path.is_dir() and not path.name.startswith(".")]
    if not homes:
        raise no_device_folders(folder)
    return {home.name: _load_device(home) for home in homes}


def _load_device(home: Path) -> DeviceData:
    try:
        return load_folder(home)
    except ConfigError as wrong:
        others = not (home / "train").is_dir() and any(path.is_dir() for path in home.iterdir())
        raise ConfigError(f"{home.name}: {wrong.message}", hint=BY_CLASS if others else wrong.hint) from None
