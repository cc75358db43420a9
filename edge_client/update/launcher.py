"""Starts the newest release that works: the flashed one, or one that the client fetched later. Standard library only.

On a board this file is /opt/fedcenters/launch.py, beside `site` (the flashed client and its wheels). Releases lie in
$STATE_DIRECTORY/releases/VERSION; `record.json` beside them says which is good, which is on trial, how often that one
was started, and which failed. A release on trial has MAX_TRIAL_STARTS to hear its coordinator (then the client calls it
good); else the one of before is started again. The record is replaced as a whole, so a power cut at any instruction
leaves one that can be read. A release that is older than what was flashed since is passed over, and so is one that lost
a file or a byte on a bad card: the client that starts instead fetches it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_TRIAL_STARTS = 3
MAX_FAILED_KEPT = 16
RECORD_FILE = "record.json"
HASHES_FILE = "hashes"  # of a release's files, in the form of `sha256sum`
RELEASES_VARIABLE = "FEDCENTERS_RELEASES"  # tells the client where releases lie, and so that there is a launcher
_VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}")
_ASSIGNED = re.compile(r'^__version__ = "([^"]*)"$', re.MULTILINE)


class ReleaseRecord(NamedTuple):
    """The state of the releases; "" is the flashed one, which is always there."""

    good: str = ""
    trial: str = ""
    starts: int = 0
    failed: tuple[str, ...] = ()


def version_numbers(version: str) -> tuple[int, ...]:
    """The text 0.2.10 -> (0, 2, 10). Raises ValueError for what is no version."""
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is no version")
    return tuple(int(part) for part in version.split("."))


def choose_release(record: ReleaseRecord, usable: Callable[[str], bool]) -> tuple[str, ReleaseRecord]:
    """-> (the release to start, the record to keep before it starts).

    `usable` says whether a release is on the disk and newer than the flashed one.
    """
    good = record.good if record.good and usable(record.good) else ""
    if record.trial and record.starts < MAX_TRIAL_STARTS:
        counted = record._replace(good=good, starts=record.starts + 1)
        if usable(record.trial):
            return record.trial, counted
        if counted.starts < MAX_TRIAL_STARTS:  # it is fetched again; not for ever, as a card may damage it each time
            return good, counted
    failed = (*record.failed, record.trial)[-MAX_FAILED_KEPT:] if record.trial else record.failed
    return good, ReleaseRecord(good=good, failed=failed)


def read_record(folder: Path) -> ReleaseRecord:
    """The record; an empty one where there is none or it is damaged."""
    try:
        raw = json.loads((folder / RECORD_FILE).read_text(encoding="ascii"))
        return ReleaseRecord(
            str(raw["good"]), str(raw["trial"]), int(raw["starts"]), tuple(str(v) for v in raw["failed"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ReleaseRecord()


def write_record(folder: Path, record: ReleaseRecord) -> None:
    """Replace the record; after a power cut it is the old one or this one."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / (RECORD_FILE + ".new")
    with beside.open("w", encoding="ascii") as file:
        json.dump(record._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / RECORD_FILE)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the client."""
    site = Path(__file__).resolve().parent / "site"
    releases = Path(os.environ.get("STATE_DIRECTORY", "/var/lib/fedcenters")) / "releases"
    flashed = _version_of(site)

    def newer(name: str) -> bool:
        return bool(_VERSION.fullmatch(name)) and version_numbers(name) > flashed

    def usable(name: str) -> bool:
        return newer(name) and _is_whole(releases / name)

    before = read_record(releases)
    chosen, after = choose_release(before if newer(before.trial) else before._replace(trial=""), usable)
    if after != before:
        try:
            write_record(releases, after)
        except OSError as full:  # a trial that cannot be counted must not begin
            sys.stderr.write(f"cannot write {releases / RECORD_FILE}: {full}; starting what is known to work\n")
            chosen = before.good if before.good and usable(before.good) else ""
    path = [str(releases / chosen), str(site)] if chosen else [str(site)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), RELEASES_VARIABLE: str(releases)}
    command = [sys.executable, "-m", "edge_client.cli", *arguments]
    os.execve(sys.executable, command, environment)  # noqa: S606 - the same process, so that systemd knows it


def _is_whole(release: Path) -> bool:
    """Whether a release has the files that were installed."""
    try:
        listed = [line.split("  ", 1) for line in (release / HASHES_FILE).read_text(encoding="ascii").splitlines()]
        return bool(listed) and all(
            hashlib.sha256((release / name).read_bytes()).hexdigest() == sha256 for sha256, name in listed
        )
    except (OSError, ValueError):
        return False


def _version_of(site: Path) -> tuple[int, ...]:
    """The version of the flashed client."""
    try:
        found = _ASSIGNED.search((site / "edge_client" / "__init__.py").read_text(encoding="utf-8"))
        return version_numbers(found[1]) if found else ()
    except (OSError, ValueError):
        return ()


if __name__ == "__main__":
    main(sys.argv[1:])
