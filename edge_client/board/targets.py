"""Writes a list of files into a root file system on this machine, or into an archive. The same list, wherever it goes.

Into a root file system nothing is written before everything was checked, each file is replaced as a whole, and a file
with the same content is left alone. The host's own `/` and a system of another architecture are refused.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_client.board.board_files import MANIFEST_PATH, BoardFile
from edge_client.board.profiles import MACHINES, BoardProfile, check_machine, check_python_of
from edge_client.board.systemd_unit import CONFIG_PATH
from edge_client.errors import ConfigError, RuntimeMissing
from edge_client.transport.keys import write_private_file

PROGRAM_PATTERNS = (
    "usr/bin/python3*",
    "usr/bin/dash",
    "usr/bin/bash",
    "bin/dash",
    "bin/bash",
    "bin/busybox",
    "sbin/init",
)
ELF_HEADER_BYTES = 20
MODELESS_FILESYSTEMS = ("vfat", "msdos", "exfat", "ntfs", "ntfs3", "fuseblk", "9p")
ARCHIVE_MTIME = 946_684_800  # the year 2000: of an archive's folders and links, and the earliest of its files
ARCHIVE_MTIME_BITS = 29  # of the seconds that follow, up to 2017
UPDATE_HINT = "flash --update replaces it and keeps what the board has learned"


def check_rootfs(root: Path, profile: BoardProfile, *, own_python: bool) -> None:
    """Raise ConfigError, with what to do, unless `root` is the root file system of such a board."""
    if not root.is_dir() or root.resolve() == Path("/"):
        raise ConfigError(
            f"{root} is not a board's root file system", hint="mount the card's root partition, name that"
        )
    if not any(root.iterdir()):
        raise ConfigError(
            f"{root} is empty: nothing is mounted there",
            hint="write the system to the card with its maker's tool, find its root partition with `lsblk -f` (the "
            f"ext4 one), and mount it: sudo mount /dev/PARTITION {root}",
        )
    if not (root / "etc").is_dir():
        raise ConfigError(
            f"{root} has no etc folder",
            hint="take the root partition, not the boot partition; it must be written first",
        )
    kind = _filesystem(root)
    if kind in MODELESS_FILESYSTEMS:
        raise ConfigError(f"{root} is on {kind}, which keeps no owners", hint="take the ext4 root partition, on Linux")
    check_machine(str(root), machine_of(root), profile)
    if profile.tegra and not (root / "etc" / "nv_tegra_release").exists():
        raise ConfigError(
            f"{root} is no Jetson's: etc/nv_tegra_release is missing",
            hint="run NVIDIA's apply_binaries.sh on Linux_for_Tegra/rootfs first",
        )
    if not own_python:
        check_python_of(str(root), python_of(root))


def machine_of(root: Path) -> str | None:
    """The architecture of a root file system, from the header of a program in it."""
    for pattern in PROGRAM_PATTERNS:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                found = machine_of_program(path)
                if found is not None:
                    return found
    return None


def machine_of_program(path: Path) -> str | None:
    """The architecture of an ELF file; None for another file, or another architecture."""
    with path.open("rb") as file:
        header = file.read(ELF_HEADER_BYTES)
    if len(header) < ELF_HEADER_BYTES or header[:4] != b"\x7fELF":
        return None
    number = int.from_bytes(header[18:20], "little")
    return next((name for name, known in MACHINES.items() if known == number), f"ELF machine {number}")


def python_of(root: Path) -> str | None:
    """The version of a system's `python3`, from where the link points; None where there is none."""
    link = root / "usr" / "bin" / "python3"
    name = str(link.readlink()) if link.is_symlink() else ""
    version = name.rpartition("/")[2].removeprefix("python")
    return version if version.count(".") == 1 and version.replace(".", "").isdecimal() else None


def write_rootfs(root: Path, entries: Sequence[BoardFile], *, update: bool) -> dict[str, str]:
    """Write the files; -> path -> "new", "changed" or "gone", for each that was not there like this.

    Raises ConfigError before writing.
    """
    places = {entry.path: _inside(root, entry.path) for entry in entries}
    changes = {e.path: what for e in entries if (what := _difference(root, e, places[e.path]))}
    stale = _stale(root, entries)
    different = [path for path, what in changes.items() if what == "changed"] + stale
    _check_same_device(root, entries)  # first: --update does not turn one device into another
    if different and not update:
        raise ConfigError(f"{root} has been flashed with something else: {different[0]} differs", hint=UPDATE_HINT)
    for entry in (e for e in entries if e.path in changes):
        _write(entry, places[entry.path], root)
    for path in stale:
        _inside(root, path).unlink(missing_ok=True)
    return changes | dict.fromkeys(stale, "gone")


def write_archive(path: Path, entries: Sequence[BoardFile]) -> None:
    """FILE.tar.zst or FILE.tar, to be unpacked over a root file system; the same list gives the same bytes."""
    data = make_archive(entries)
    if path.name.endswith(".tar.zst"):
        if shutil.which("zstd") is None:
            raise RuntimeMissing("zstd is not installed", hint="apt install zstd, or name the file .tar")
        # One thread: with more, the frames depend on timing.
        data = run_fed(["zstd", "-q", "-10", "-T1", "-c"], data, stdout=subprocess.PIPE, check=True).stdout
    elif not path.name.endswith(".tar"):
        raise ConfigError(f"{path} is no archive's name", hint="--bundle FILE.tar.zst or FILE.tar")
    write_private_file(path, data)  # it may hold a key


def run_fed(command: Sequence[str], data: bytes, **how: Any) -> subprocess.CompletedProcess[bytes]:  # noqa: ANN401 - of `subprocess.run`
    """Run a program with `data` as its input, from an unnamed file: `input=` writes 512 bytes at a time."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return subprocess.run(command, stdin=file, **how)  # noqa: PLW1510 - `how` says whether it is checked


def make_archive(entries: Sequence[BoardFile]) -> bytes:
    """The tar: parents first, numeric owner 0, times that are made of each file's content.

    Python takes a compiled file for fresh by the time and the size of its source. With one time for all, a board whose
    archive is unpacked again would run the old code of each file that keeps its size.
    """
    made = io.BytesIO()
    folders: set[str] = set()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for entry in entries:
            for folder in _parents(entry.path):
                if folder not in folders:
                    folders.add(folder)
                    tar.addfile(_header(folder, tarfile.DIRTYPE, _folder_mode(folder)))
            kind = tarfile.SYMTYPE if entry.link else tarfile.REGTYPE
            header = _header(entry.path.lstrip("/"), kind, entry.mode)
            header.linkname, header.size = entry.link, len(entry.data)
            if not entry.link:
                header.mtime += int(entry.sha256, 16) % (1 << ARCHIVE_MTIME_BITS)
            tar.addfile(header, io.BytesIO(entry.data))
    return made.getvalue()


def _header(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.mtime = kind, mode, ARCHIVE_MTIME
    header.uid = header.gid = 0
    header.uname = header.gname = "root"
    return header


def _parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")[:-1]
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def _folder_mode(name: str) -> int:
    """The board's memory is for its service alone."""
    return 0o700 if name.startswith("var/lib/fedcenters") else 0o755


def _inside(root: Path, path: str) -> Path:
    """Where a path of the board is on this machine. A link on the way must not lead out of the root file system."""
    place = root / path.lstrip("/")
    real, inside = place.parent.resolve(), root.resolve()
    if real != inside and inside not in real.parents:
        raise ConfigError(
            f"{place.parent} leads out of {root}, to {real}", hint="replace that link in the image by a relative one"
        )
    return place


def _difference(root: Path, entry: BoardFile, place: Path) -> str:
    if entry.memory and entry.unless:
        return "" if _had(root, entry, place) else "new"
    if entry.link:
        if place.is_symlink():
            return "" if str(place.readlink()) == entry.link else "changed"
        return "changed" if place.exists() else "new"
    if place.is_symlink():
        return "changed"
    if not place.exists():
        return "new"
    status = place.stat()
    same = status.st_size == len(entry.data) and status.st_mode & 0o777 == entry.mode
    return "" if same and place.read_bytes() == entry.data else "changed"


def _had(root: Path, entry: BoardFile, place: Path) -> bool:
    """Whether a token waits on the board, or was used there."""
    used = _inside(root, entry.unless)
    if used.is_file() and used.read_bytes().strip() == entry.sha256.encode():
        return True
    return place.is_file() and place.read_bytes() == entry.data


def _stale(root: Path, entries: Sequence[BoardFile]) -> list[str]:
    """The paths that an earlier flash wrote and this one does not, by the earlier flash's own list."""
    listed = _inside(root, MANIFEST_PATH)
    if not listed.is_file():
        return []
    wanted = {entry.path for entry in entries}
    known = [line.partition("  .")[2] for line in listed.read_text(encoding="utf-8").splitlines()]
    gone = [path for path in known if path.startswith("/") and path not in wanted and ".." not in path.split("/")]
    return [path for path in gone if _inside(root, path).is_file()]


def _check_same_device(root: Path, entries: Sequence[BoardFile]) -> None:
    """A board's memory belongs to one device of one federation."""
    place = _inside(root, CONFIG_PATH)
    wanted = next((entry.data for entry in entries if entry.path == CONFIG_PATH), b"")
    if not place.is_file() or not wanted:
        return
    was, now = owner_of(place.read_bytes()), owner_of(wanted)
    if was != now:
        raise ConfigError(
            f"this board is {was[1]} of {was[0]}; it is to become {now[1]} of {now[0]}",
            hint="take a fresh image, or remove etc/fedcenters and var/lib/fedcenters there",
        )


def owner_of(toml: bytes) -> tuple[str, str]:
    """-> (federation, device id), as written in a client.toml."""
    lines = dict(line.split(" = ", 1) for line in toml.decode("utf-8", "replace").splitlines() if " = " in line)
    return lines.get("federation", "?").strip('"'), lines.get("device-id", "?").strip('"')


def _write(entry: BoardFile, place: Path, root: Path) -> None:
    for name in _parents(entry.path):
        folder = root / name
        if not folder.exists():
            folder.mkdir()
            folder.chmod(_folder_mode(name))  # whatever the umask is: the service's user must come in
    beside = place.with_name(f".{place.name}.fedcenters")
    beside.unlink(missing_ok=True)
    if entry.link:
        beside.symlink_to(entry.link)
    else:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(entry.data)
            os.fchmod(file.fileno(), entry.mode)
    if os.geteuid() == 0:
        os.lchown(beside, 0, 0)  # the service's own files get their owner at boot: its number is not known here
    beside.replace(place)


def _filesystem(root: Path) -> str:
    """The kind of file system that a folder is on; "" where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    real = str(root.resolve())
    mounts = {fields[1]: fields[2] for fields in (line.split() for line in lines)}
    above = [real, *map(str, Path(real).parents)]
    return next((mounts[folder] for folder in above if folder in mounts), "")
