"""Blobs on disk: files named by their SHA-256, and the partial ones that a transfer is still filling.

    folder/<sha256>                  a whole blob; it got this name only after its hash was checked
    folder/partial/<sha256>.<block>  a transfer: the blob's bytes, then one bit per block that has arrived
    folder/quarantine/<sha256>       a blob whose bytes do not have this hash any more

A power cut at any moment leaves whole blobs whole and a transfer to be continued. One process writes to a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from edge_client.durable_files import read_disk, sync_folder
from edge_client.errors import Malformed
from edge_client.protocol.blocks import Bitmap, Manifest, body_range
from edge_client.protocol.topics import check_sha256

CHUNK_BYTES = 1 << 20
OWN_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)  # flags of POSIX, of Windows
QUARANTINE = "quarantine"  # the folder of damaged blobs
PARTIAL = "partial"
ForEach = Callable[[Callable[[Any], None], Sequence[Any]], Iterable[None]]
MOST_KEPT = 1_000  # blobs, where the least recently used make room
MAX_DISK_SHARE = 0.9  # of the free disk; a full disk stops other programs, too


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file so that after a power cut it holds either its old bytes or the new ones.

    No other user can read a `private` one, whatever the umask. What root writes of these belongs to the file's owner,
    or the folder's, before and after: a broker's user, for example.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with open_beside(beside, 0o600 if private else 0o666) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if private and os.name == "posix" and os.geteuid() == 0:
                there = (path if path.exists() else path.parent).stat()
                os.fchown(file.fileno(), there.st_uid, there.st_gid)
    except OSError as wrong:  # a full disk does not need half a file as well
        beside.unlink(missing_ok=True)
        wrong.filename = str(path)
        raise
    _publish(beside, path)


def open_beside(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file, which will replace another one. What is in its place is removed: another user may hold it open."""
    path.unlink(missing_ok=True)
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags | OWN_FILE, mode))


def _publish(beside: Path, path: Path) -> None:
    beside.replace(path)
    sync_folder(path.parent)


class StagedBlob:
    """A checked blob under another name, not yet durable. `publish_blobs` gives many of them their names."""

    def __init__(self, beside: Path, path: Path, size: int, descriptor: int) -> None:
        self.beside, self._size, self._descriptor = beside, size, descriptor
        self.path = path

    def read(self) -> bytes:
        return self.beside.read_bytes()[: self._size]

    def sync(self) -> None:
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def rename(self) -> None:
        self.close()
        self.beside.replace(self.path)

    def discard(self) -> None:
        """Forget the blob. It stays where it has its name."""
        self.close()
        self.beside.unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def publish_blobs(staged: Sequence[StagedBlob], each: ForEach = map) -> None:
    """Make all of these durable, then give them their names, durably too; a crash in between leaves whole blobs only.

    `each` calls a function for every item, as `map` does. A pool's lets the system write many files at once: what one
    disk flush costs is paid once for all that wait for it. On OSError none of them counts as stored.
    """
    list(each(StagedBlob.sync, staged))
    for blob in staged:
        blob.rename()
    list(each(sync_folder, list(dict.fromkeys(blob.path.parent for blob in staged))))


class BlobFolder:
    """Whole blobs up to `budget_bytes`. With `evict` the least recently used make room, else a full folder refuses.

    Such a folder keeps MOST_KEPT blobs: a run of small models brings thousands, and each new one looks at all of them.
    """

    def __init__(self, path: Path, budget_bytes: int | None = None, *, evict: bool = False) -> None:
        self._path, self._budget, self._evict = path, budget_bytes, evict
        self.pinned: set[str] = set()  # never evicted
        (path / PARTIAL).mkdir(parents=True, exist_ok=True)

    def has(self, sha256: str) -> bool:
        return self._file(sha256).is_file()

    def path(self, sha256: str) -> Path:
        """Where the blob is, or would be; using it makes it the most recently used."""
        file = self._file(sha256)
        if self._evict:
            with contextlib.suppress(FileNotFoundError):
                os.utime(file)
        return file

    def read(self, sha256: str) -> bytes:
        """The blob's bytes, hashed again: cards and disks do rot.

        Raises Malformed: "unknown_blob", or "bad_hash" for a damaged blob, which is then no blob of the folder. A
        folder without a budget keeps it in quarantine/, because a part of it may be all that is left.
        """
        try:
            data = read_disk(self.path(sha256).read_bytes)
        except FileNotFoundError as missing:
            raise Malformed("unknown_blob", f"no blob {sha256}") from missing
        if hashlib.sha256(data).hexdigest() != sha256:
            raise self._damaged(sha256)
        return data

    def verified(self, sha256: str) -> Path:
        """The blob's path, its bytes hashed again without holding them; raises what `read` does."""
        path, digest = self.path(sha256), hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := read_disk(file.read, CHUNK_BYTES):
                    digest.update(chunk)
        except FileNotFoundError as missing:
            raise Malformed("unknown_blob", f"no blob {sha256}") from missing
        if digest.hexdigest() != sha256:
            raise self._damaged(sha256)
        return path

    def put(self, data: bytes) -> str:
        """Store bytes durably; returns their sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        if not self.has(sha256):
            self._make_room(len(data), on_disk=len(data) if self._evict else 0)
            write_atomically(self._file(sha256), data)
        return sha256

    def stage(self, data: bytes) -> StagedBlob | None:
        """Write bytes that `publish_blobs` will store; None where the blob is there already."""
        file = self._file(hashlib.sha256(data).hexdigest())
        if file.is_file():
            return None
        self._make_room(len(data))
        beside = self._path / PARTIAL / f"{file.name}.whole"
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | OWN_FILE, 0o666)
        staged = StagedBlob(beside, file, len(data), descriptor)
        try:
            _write_at(descriptor, data, 0)
        except OSError:
            staged.discard()
            raise
        return staged

    def drop(self, sha256: str) -> None:
        """Forget a blob; no error if there is none."""
        self._file(sha256).unlink(missing_ok=True)

    def _damaged(self, sha256: str) -> Malformed:
        """Remove a damaged blob; -> the error, which says where it is kept, if it is."""
        told = f"blob {sha256} was damaged on disk"
        if self._budget is not None:
            self.drop(sha256)
        else:
            kept = self._path / QUARANTINE
            kept.mkdir(exist_ok=True)
            self._file(sha256).replace(kept / sha256)
            told += f"; it is kept in {kept}"
        return Malformed("bad_hash", told)

    def keep_only(self, wanted: Collection[str]) -> None:
        """Forget every whole blob but these, and what a power cut left of a write."""
        for file in self._path.iterdir():
            if file.is_file() and file.name not in wanted:
                file.unlink(missing_ok=True)

    def partial(self, manifest: Manifest) -> PartialBlob:
        """Begin or continue the transfer of a blob. Malformed("no_space") when it cannot fit."""
        size, file = manifest.size, self._partial_file(manifest)
        if self._budget is not None and size > self._budget:
            raise Malformed("no_space", f"blob of {size} bytes, the folder holds at most {self._budget}")
        here = 512 * getattr(file.stat(), "st_blocks", 0) if file.exists() else 0  # not on Windows
        if self._evict:
            self._make_room(size, but=file, on_disk=size - here)
        if not self._disk_takes(size - here):
            raise Malformed("no_space", f"blob of {size} bytes does not fit on the disk")
        return PartialBlob(self, manifest, file)

    def write_late(self, manifest: Manifest, index: int, body: bytes) -> None:
        """Store the checked body of one block of a transfer that was interrupted, unless that made room for others."""
        if (file := self._partial_file(manifest)).exists():
            transfer = PartialBlob(self, manifest, file)
            try:
                transfer.write_block(index, body)
            finally:
                transfer.close()

    def _disk_takes(self, size: int, removed: int = 0) -> bool:
        return size <= MAX_DISK_SHARE * (shutil.disk_usage(self._path).free + removed)

    def drop_partials(self, *, but: Collection[Manifest] = ()) -> None:
        """Forget all transfers that are not finished, except those of `but`."""
        kept = {manifest.sha256 for manifest in but}
        for file in (self._path / PARTIAL).iterdir():
            if file.stem not in kept:
                file.unlink(missing_ok=True)

    def staged(self, file: Path, manifest: Manifest, descriptor: int) -> StagedBlob:
        """A checked file of `manifest.size` bytes that will be moved in (for `PartialBlob`)."""
        staged = StagedBlob(file, self._file(manifest.sha256), manifest.size, descriptor)
        try:
            self._make_room(manifest.size, but=file)
        except Malformed:
            staged.close()
            raise
        return staged

    def _file(self, sha256: str) -> Path:
        return self._path / check_sha256(sha256)  # the check keeps every path inside the folder

    def _partial_file(self, manifest: Manifest) -> Path:
        return self._path / PARTIAL / f"{manifest.sha256}.{manifest.block}"

    def _blobs(self) -> list[Path]:
        sha256 = 64  # letters; longer is what a power cut left of a write
        return [file for file in self._path.iterdir() if len(file.name) >= sha256]

    def _make_room(self, size: int, *, but: Path | None = None, on_disk: int = 0) -> None:
        if self._budget is None:
            return
        files = self._blobs()
        if self._evict:  # transfers that were given up go like blobs; `but` is the one under way
            files += [file for file in (self._path / PARTIAL).iterdir() if file != but]
        stats = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in files)
        total, kept = sum(length for _, length, _ in stats) + size, len(stats) + 1
        spare = [each for each in stats if self._evict and each[2].name not in self.pinned]
        most = sum(length for _, length, _ in spare)
        if total - most > self._budget:
            raise Malformed("no_space", f"{size} bytes do not fit into the folder's {self._budget}")
        if not self._disk_takes(on_disk, most):  # nothing is removed in vain
            raise Malformed("no_space", f"blob of {size} bytes does not fit on the disk")
        for _, length, file in spare:
            if total <= self._budget and kept <= MOST_KEPT and self._disk_takes(on_disk):
                break
            file.unlink(missing_ok=True)
            total, kept = total - length, kept - 1


class PartialBlob:
    """One transfer: a file that fills, and `bitmap`, which says with what. Costs one descriptor and one bitmap."""

    def __init__(self, folder: BlobFolder, manifest: Manifest, file: Path) -> None:
        self.manifest = manifest
        self._folder, self._file = folder, file
        self._fd: int | None = os.open(file, os.O_RDWR | os.O_CREAT | OWN_FILE, 0o600)
        self.bitmap = self._read_bitmap(self._fd)

    def write_block(self, index: int, body: bytes) -> bool:
        """Store the checked body of one block; False when it was here already."""
        start, stop = body_range(self.manifest, index)
        if len(body) != stop - start:
            raise Malformed("bad_field", f"block of {len(body)} bytes, expected {stop - start}")
        if self.bitmap.has(index):
            return False
        descriptor = self._open()
        _write_at(descriptor, body, start)
        self.bitmap.add(index)  # after the data: a crash in between only costs this block
        byte = index >> 3
        _write_at(descriptor, self.bitmap.to_bytes()[byte : byte + 1], self.manifest.size + byte)
        return True

    def finish(self) -> Path:
        """The whole blob, its hash checked and durable. On Malformed("bad_hash") everything received is dropped."""
        staged = self.stage()
        try:
            publish_blobs([staged])
        finally:
            staged.close()
        return staged.path

    def stage(self) -> StagedBlob:
        """The whole blob, its hash checked, for `publish_blobs`; until then a restart finds all of its blocks."""
        if not self.bitmap.complete:
            raise Malformed("bad_range", f"{self.bitmap.count} of {self.bitmap.total} blocks have arrived")
        if self._hash() != self.manifest.sha256:
            self.abandon()
            raise Malformed("bad_hash", "the blocks do not make the blob that the manifest names")
        descriptor, self._fd = self._open(), None
        return self._folder.staged(self._file, self.manifest, descriptor)

    def abandon(self) -> None:
        self.close()
        self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop for now; the folder's `partial` continues. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            raise Malformed("unknown_blob", "this transfer is closed")
        return self._fd

    def _read_bitmap(self, descriptor: int) -> Bitmap:
        total = self.manifest.total
        os.lseek(descriptor, self.manifest.size, os.SEEK_SET)
        found = os.read(descriptor, (total + 7) // 8)
        try:
            return Bitmap.from_bytes(total, found.ljust((total + 7) // 8, b"\0"))
        except Malformed:  # damaged; begin again
            os.ftruncate(descriptor, 0)
            return Bitmap(total)

    def _hash(self) -> str:
        digest, left = hashlib.sha256(), self.manifest.size
        descriptor = self._open()
        os.lseek(descriptor, 0, os.SEEK_SET)
        while chunk := read_disk(os.read, descriptor, min(CHUNK_BYTES, left)):
            digest.update(chunk)
            left -= len(chunk)
        return digest.hexdigest()


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`; a plain `write` may store only a part of it."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
