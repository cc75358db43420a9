"""A newer client, fetched from the coordinator: what a release is, when it is wanted, and how it is installed.

A release is a tar of `RELEASE` ({"version": "0.2.0"}) and the files of `edge_client/`; the wheels stay those that were
flashed. The coordinator's signing key signs it as a blob of kind "release" (PROTOCOL.md, section on releases). It is
unpacked beside the others and put on trial; update/launcher.py decides at each start which one runs. Only a client that
the launcher started updates itself. client.py fetches it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client import __version__
from edge_client.errors import Malformed
from edge_client.update import launcher
from edge_client.update.launcher import ReleaseRecord, version_numbers

if TYPE_CHECKING:
    import tarfile

log = logging.getLogger(__name__)
NOTE_FILE = "RELEASE"
MAX_FILES = 2_000
MAX_BYTES = 64 << 20
TRIAL_PATIENCE_S = 240.0  # of its start, for a broker or a clock that comes late; systemd waits 300 s for a start
TRIAL_TIMEOUT_S = 900.0  # a release on trial that has not heard its coordinator by then gives way
_NAME = re.compile(r"edge_client(/[A-Za-z0-9_.-]{1,64}){1,6}")


class SelfUpdater:
    """The releases of one board. `folder` is the launcher's; None: there is no launcher, and nothing is ever wanted."""

    def __init__(self, folder: Path | None, *, running: str = __version__) -> None:
        self._folder, self._running = folder, running
        self._began_s: float | None = None
        self._unwritten = False  # whether it was heard, and the disk did not take that

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> SelfUpdater:
        """The releases of the board whose launcher set these variables."""
        told = environment.get(launcher.RELEASES_VARIABLE, "")
        return SelfUpdater(Path(told) if told else None)

    @property
    def on_trial(self) -> bool:
        """Whether the running release is."""
        return self._folder is not None and launcher.read_record(self._folder).trial == self._running

    def wanted(self, version: str) -> bool:
        """Whether a version is newer than what runs, and has not failed here."""
        if self._folder is None or version in launcher.read_record(self._folder).failed:
            return False
        return version_numbers(version) > version_numbers(self._running)

    def install(self, data: bytes, version: str) -> None:
        """Unpack a release and put it on trial. Raises Malformed("bad_program") for one that is none.

        A cut at any instruction leaves what was there before, or the whole release.
        """
        if self._folder is None:
            return
        found = unpack_release(data)
        if json.loads(found.pop(NOTE_FILE)) != {"version": version}:
            raise Malformed("bad_program", f"the release is not version {version}")
        beside = self._folder / ".unpacking"
        shutil.rmtree(beside, ignore_errors=True)
        lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(found.items())]
        try:
            for name, content in (*found.items(), (launcher.HASHES_FILE, "".join(lines).encode("ascii"))):
                _write(beside / name, content)
            for folder in {path.parent for path in beside.rglob("*")}:
                launcher.sync_folder(folder)
        except OSError:  # a full disk does not need half a release as well
            shutil.rmtree(beside, ignore_errors=True)
            raise
        place = self._folder / version
        shutil.rmtree(place, ignore_errors=True)  # of an earlier try that nothing names yet
        beside.replace(place)
        launcher.sync_folder(self._folder)
        before = launcher.read_record(self._folder)
        starts = before.starts if before.trial == version else 0  # it was damaged on the card
        launcher.write_record(self._folder, before._replace(trial=version, starts=starts))

    def confirm(self) -> None:
        """Call the running release good, if it was on trial, and remove the others: the coordinator was heard."""
        if self._folder is None:
            return
        self._unwritten, record = False, launcher.read_record(self._folder)
        if record.trial == self._running:
            try:
                launcher.write_record(self._folder, ReleaseRecord(good=self._running, failed=record.failed))
            except OSError as full:
                log.warning("cannot write that this release works: %s; trying again", full)
                self._unwritten = True
                return
            for path in self._folder.iterdir():
                if path.is_dir() and path.name != self._running:
                    shutil.rmtree(path, ignore_errors=True)

    def overdue(self, now_s: float) -> bool:
        """Whether the running release is on trial, its time is over, and it has not heard the coordinator."""
        if self._folder is None:
            return False
        if self._unwritten:
            self.confirm()
            return False
        if self._began_s is None:
            self._began_s = now_s
        return now_s >= self._began_s + TRIAL_TIMEOUT_S and self.on_trial


def unpack_release(data: bytes) -> dict[str, bytes]:
    """The files of a release by name, NOTE among them. Raises Malformed("bad_program").

    Only plain files with plain names below edge_client/: no link, no folder, nothing above.
    """
    import tarfile

    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in _limited(tar):
                content = tar.extractfile(member)
                found[member.name] = b"" if content is None else content.read()
        note = json.loads(found[NOTE_FILE])
        version_numbers(note["version"])
    except (tarfile.TarError, EOFError, ValueError, KeyError, TypeError, OverflowError) as wrong:
        raise Malformed("bad_program", f"this is no release: {wrong}") from wrong
    if "edge_client/cli.py" not in found:
        raise Malformed("bad_program", "this is no release: it holds no edge_client/cli.py")
    return found


def _limited(tar: tarfile.TarFile) -> Iterable[tarfile.TarInfo]:
    total = 0
    for count, member in enumerate(tar):
        total += member.size
        if count >= MAX_FILES or total > MAX_BYTES:
            raise ValueError("too many files, or too large")
        plain = member.name == NOTE_FILE or (_NAME.fullmatch(member.name) and ".." not in member.name.split("/"))
        if not plain or not member.isreg():
            raise ValueError(f"{member.name!r:.80} has no place in it")
        yield member


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
