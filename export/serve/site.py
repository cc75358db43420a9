"""A site: a folder of bundles that any web server or CDN can host as it is.

    index.json                       {"v", "generation", "manifest"}; it changes, and is replaced whole
    generations/<generation>/...     a bundle, as reader.py describes it; never changes, but for the signature, which
                                     another key may replace. Its name is the SHA-256 of its manifest.json, which names
                                     every other file by hash

A client that reads index.json once and then fetches below that generation gets files of one bundle, even when another
is published meanwhile. Two older generations stay for downloads that have begun.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.durable_files import sync_files, sync_folder
from edge_client.errors import ConfigError, FedcentersError, Malformed
from export.bundle.reader import MANIFEST_FILE, SIGNATURE_FILE, Bundle, file_entries, read_bundle
from export.folder_lock import locked_folder

VERSION = 1
INDEX_FILE, GENERATIONS_FOLDER = "index.json", "generations"
MAX_KEPT_GENERATIONS = 3  # the newest ones, which stay although they are not served


@dataclass(frozen=True, kw_only=True)
class SiteFile:
    """One file of a generation."""

    path: Path
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A bundle that does not change; `files` maps a path in it to the file."""

    name: str
    bundle: Bundle = field(repr=False)
    files: Mapping[str, SiteFile] = field(repr=False)

    @property
    def centers(self) -> list[dict[str, Any]]:
        """Each center's card and its files with their addresses on the site, for a listing."""
        return [
            {
                "center": c["center"],
                "card": c["card"],
                "files": {
                    name: {**file, "url": f"/{GENERATIONS_FOLDER}/{self.name}/{file['path']}"}
                    for name, file in {"model": c["model"], **c["files"]}.items()
                },
            }
            for c in self.bundle.manifest["centers"]
        ]


@dataclass(frozen=True, kw_only=True)
class SiteFolder:
    """The folder. Processes that add bundles take turns; only one of them should change the index."""

    root: Path
    trusted: Sequence[bytes] = ()  # public keys; with any, a bundle must be signed by one of them

    def add(self, bundle: Path) -> str:
        """Copy what a bundle's manifest names, every hash checked on the copy; -> its generation.

        One that is damaged here is replaced, and so is another signature. Raises as `read_bundle` does.
        """
        try:
            with partial_folder(self.root, "generation") as part:
                return self._copy(bundle, part)
        except FileNotFoundError as vanished:
            raise ConfigError(f"{bundle} cannot be copied: {vanished}", hint="is it just being replaced?") from None

    def _copy(self, bundle: Path, part: Path) -> str:
        source = read_bundle(bundle, self.trusted)
        for path in (*(entry["path"] for entry in file_entries(source.manifest)), SIGNATURE_FILE):
            if path != SIGNATURE_FILE or (bundle / path).is_file():
                (part / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(bundle / path, part / path)
        (part / MANIFEST_FILE).write_bytes(source.raw)
        name = hashlib.sha256(read_bundle(part, self.trusted).raw).hexdigest()
        if self._is_whole(name):
            self._take_signature(name, part / SIGNATURE_FILE)
        else:
            self.remove(name)
            self._folder(name).parent.mkdir(exist_ok=True)
            sync_files(part)  # the index will name it
            part.rename(self._folder(name))
            sync_folder(self._folder(name).parent)
        return name

    def _is_whole(self, name: str) -> bool:
        """Whether this generation is here and not damaged, with any signature or none."""
        try:
            SiteFolder(root=self.root).open(name)
        except FedcentersError:
            return False
        return True

    def _take_signature(self, name: str, signature: Path) -> None:
        """Give a generation this signature, where there is one; the key may have changed. Its files stay in place."""
        here = self._folder(name) / SIGNATURE_FILE
        if signature.is_file() and not (here.is_file() and here.read_bytes() == signature.read_bytes()):
            replace_file(here, signature.read_bytes())

    def open(self, name: str) -> Generation:
        """A generation of the site, after every hash was checked again."""
        folder = self._folder(name)
        bundle = read_bundle(folder, self.trusted)
        if hashlib.sha256(bundle.raw).hexdigest() != name:
            raise Malformed("bad_hash", f"generation {name:.16} has another manifest")
        files = {
            e["path"]: SiteFile(path=folder / e["path"], sha256=e["sha256"], size=e["size"])
            for e in file_entries(bundle.manifest)
        }
        for known in (MANIFEST_FILE, SIGNATURE_FILE):
            if (folder / known).is_file():
                data = (folder / known).read_bytes()
                files[known] = SiteFile(path=folder / known, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        return Generation(name=name, bundle=bundle, files=files)

    def point(self, name: str) -> None:
        """Make index.json name this generation."""
        replace_file(self.root / INDEX_FILE, json.dumps(index_content(name), sort_keys=True).encode() + b"\n")

    def names(self) -> list[str]:
        """The site's generations, the newest first."""
        folders = [p for p in (self.root / GENERATIONS_FOLDER).glob("*") if p.is_dir()]
        return [p.name for p in sorted(folders, key=lambda p: (-p.stat().st_ctime_ns, p.name))]

    def prune(self, served: Iterable[str]) -> list[str]:
        """Remove old generations other than the `served` ones; -> the names that are left."""
        keep = {*served, *self.names()[:MAX_KEPT_GENERATIONS]}
        for name in self.names():
            if name not in keep:
                self.remove(name)
        return self.names()

    def remove(self, name: str) -> None:
        """Remove a generation."""
        shutil.rmtree(self._folder(name), ignore_errors=True)

    def _folder(self, name: str) -> Path:
        return self.root / GENERATIONS_FOLDER / name


def index_content(name: str) -> dict[str, Any]:
    """index.json's content."""
    return {"v": VERSION, "generation": name, "manifest": f"/{GENERATIONS_FOLDER}/{name}/{MANIFEST_FILE}"}


def publish_bundle(bundle: Path, root: Path, trusted: Sequence[bytes] = ()) -> str:
    """Add a bundle to the site at `root` and point to it; -> its generation. Raises ConfigError where it is served."""
    site = SiteFolder(root=root, trusted=trusted)
    with _held(root, shared=True, hint="put the bundle where that server looks for one, or name another folder"):
        name = site.add(bundle)
        site.open(name)
        site.point(name)
        site.prune([name])
    return name


@contextmanager
def partial_folder(folder: Path, what: str) -> Iterator[Path]:
    """A new folder in which `what` is written until it is whole. Another writer of `folder` waits for its end.

    So what an earlier one has left was killed, and is removed.
    """
    with only_writer(folder):
        for left in folder.glob(f".{what}-[0-9]*.partial"):  # a bundle may be written here, too
            shutil.rmtree(left, ignore_errors=True)
        part = folder / f".{what}-{os.getpid()}.partial"
        part.mkdir()
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make the folder, and wait for another process that writes into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder, wait=True):
        yield


@contextmanager
def only_server(root: Path) -> Iterator[None]:
    """Keep a site for one server, which keeps its roll-out there. Raises ConfigError where another process has it."""
    with _held(root, shared=False, hint="give each server a folder of its own with --site"):
        yield


@contextmanager
def _held(root: Path, *, shared: bool, hint: str) -> Iterator[None]:
    """A server has a site alone; several may publish into one that none serves."""
    folder = root / GENERATIONS_FOLDER  # a writer holds the root for a while
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(locked_folder(folder, wait=False, shared=shared))
        except BlockingIOError:
            writer = "" if shared else ", or one publishes into it"
            raise ConfigError(f"{root} is served by another process{writer}", hint=hint) from None
        yield


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one.

    What is in the new one's place is removed: another user of the folder may have put a link there.
    """
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    with part.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)
