"""An arm64 board without hardware: Debian's root file system, qemu's user emulation, one process at a time.

`.boards/` (git-ignored) keeps what was fetched: `qemu-aarch64` of Debian trixie (10 or later: 7.2 crashes in both
runtimes), `rootfs` (debootstrap's first stage, every package unpacked; nothing of it was run), `wheels`. A board is a
copy of `rootfs` by hard links. Programs run in a user namespace of their own, with its own binfmt_misc: nothing outside
changes. Needs root, debootstrap, dpkg-deb, unshare, and a kernel that gives namespaces a binfmt_misc (6.7 or newer).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.patience import patience

ROOT = Path(__file__).parents[2]
STORE = ROOT / ".boards"
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
QEMU_SUITE = "trixie"
PATIENCE_S = patience(1500.0)
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
ENTER = """set -e
root=$1 qemu=$2
shift 2
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
printf '%s' ":arm64:M::{magic}:{mask}:$qemu:F" > /proc/sys/fs/binfmt_misc/register
mkdir -p "$root/proc" "$root/dev" "$root/sys"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
exec chroot "$root" "$@"
"""


def qemu() -> Path:
    """The emulator, fetched once through apt, which checks its signature."""
    program = STORE / "qemu-aarch64"
    if not program.exists():
        lists = STORE / "apt"
        (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (lists / "trixie.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {QEMU_SUITE} main\n")
        options = [f"Dir::Etc::SourceList={lists / 'trixie.list'}", "Dir::Etc::SourceParts=/dev/null"]
        options += [f"Dir::State::Lists={lists / 'lists'}", f"Dir::Cache::PkgCache={lists / 'pkgcache.bin'}"]
        options += [f"Dir::Cache::SrcPkgCache={lists / 'srcpkgcache.bin'}", "APT::Sandbox::User=root"]
        apt = ["apt-get", "-q", *(f"-o{option}" for option in options)]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "download", "qemu-user"], check=True, cwd=lists)
        (package,) = lists.glob("qemu-user_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(lists / "unpacked")], check=True)
        shutil.move(lists / "unpacked" / "usr" / "bin" / "qemu-aarch64", program)
        shutil.rmtree(lists)
    return program


def rootfs() -> Path:
    """Debian's arm64 packages, unpacked."""
    root = STORE / "rootfs"
    if not (root / "usr" / "bin" / "python3").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        made = ["debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", "--include=python3"]
        subprocess.run([*made, SUITE, str(root), MIRROR], check=True)
        for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    return root


@dataclass(frozen=True, kw_only=True)
class EmulatedBoard:
    """A root file system that programs can run in; the network is this machine's."""

    root: Path

    def command(self, *command: str) -> list[str]:
        """What starts a program in it."""
        script = ENTER.format(magic=MAGIC, mask=MASK)
        return ["unshare", "-Urm", "sh", "-c", script, "sh", str(self.root), str(qemu()), *command]

    def client(self, *arguments: str) -> list[str]:
        """The flashed client, as its unit starts it."""
        return self.command("/usr/bin/env", "-i", "/usr/bin/python3", "/opt/fedcenters/launch.py", *arguments)

    def run(self, command: Sequence[str], *, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """To its end."""
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def new_board(name: str) -> EmulatedBoard:
    """A fresh one."""
    root = STORE / "made" / name
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-al", str(rootfs()), str(root)], check=True)
    return EmulatedBoard(root=root)


def size_mb(folder: Path) -> float:
    """What a folder's files take, in MB."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()) / 1e6


def note(**figures: Any) -> None:  # noqa: ANN401
    """Keep what was seen."""
    path = STORE / "figures.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | figures, indent=1, sort_keys=True) + "\n")


@contextmanager
def started(log: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, its talk in a file, stopped at the end."""
    with log.open("wb") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def until(
    journal: Path, event: str, processes: tuple[subprocess.Popen[bytes], ...], logs: Path
) -> list[dict[str, Any]]:
    """The coordinator's events, once one of this kind is among them."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
        events = [json.loads(line) for line in lines]
        if any(each["event"] == event for each in events):
            return events
        said = {log.name: log.read_text(errors="replace")[-2_000:] for log in logs.glob("*.log")}
        assert all(process.poll() is None for process in processes), said
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
