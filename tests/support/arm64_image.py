"""A whole arm64 machine without hardware: an image of Debian with its own kernel and systemd, booted by qemu.

`.boards/image-root` (git-ignored) keeps the packages that mmdebstrap installed. Their scripts run under qemu's user
emulation, in a namespace with its own binfmt_misc, as in arm64_board.py. An image is an ext4 file system without
partitions, mounted through a loop device. Needs root, mmdebstrap, mke2fs, a loop device, qemu-system-aarch64 and ssh.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.arm64_board import KEYRING, MAGIC, MASK, MIRROR, PATIENCE_S, STORE, note, qemu
from tests.support.ports import free_port
from tests.support.requirements import skip_without

SUITE = "trixie"  # the Debian of the newest Raspberry Pi OS
PACKAGES = "linux-image-arm64,systemd-sysv,udev,python3,openssh-server"
PROGRAMS = ("mmdebstrap", "mke2fs", "qemu-system-aarch64", "ssh", "unshare")
IMAGE_MB, MEMORY_MB = 1500, 512  # 512: a Raspberry Pi Zero 2 W
GATEWAY = "10.0.2.2"  # this machine, seen from qemu's user network
OWN_IDS = "0 0 65536\n"  # files of every owner and group of the image keep them
ENTER = """set -e
read -r _
mount -t proc proc /proc
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
printf '%s' ":arm64:M::{magic}:{mask}:{qemu}:F" > /proc/sys/fs/binfmt_misc/register
exec "$@"
"""
# An initial RAM disk with all modules takes minutes to make and to unpack under emulation; these are the image's disk.
SMALL_INITRD = """mkdir -p "$1/etc/initramfs-tools/conf.d"
printf 'MODULES=list\\nCOMPRESS=gzip\\n' > "$1/etc/initramfs-tools/conf.d/small"
printf 'virtio_pci\\nvirtio_blk\\next4\\n' > "$1/etc/initramfs-tools/modules"
"""
NETWORK = """printf '[Match]\\nName=e*\\n[Network]\\nDHCP=yes\\n' > "$1/etc/systemd/network/ethernet.network"
chroot "$1" systemctl enable systemd-networkd
"""


def image_root() -> Path:
    """A folder with Debian's packages, installed and configured."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        needed = "apt install mmdebstrap e2fsprogs qemu-system-arm openssh-client"
        skip_without(f"not installed: {', '.join(missing)} ({needed}; make boards)")
    root, done = STORE / "image-root", STORE / "image-root.done"
    if not done.exists():
        shutil.rmtree(root, ignore_errors=True)
        began_s = time.perf_counter()
        script = ENTER.format(magic=MAGIC, mask=MASK, qemu=qemu())
        made = ["mmdebstrap", "--mode=root", "--architectures=arm64", "--skip=check/qemu", "--variant=minbase"]
        made += [f"--include={PACKAGES}", f"--keyring={KEYRING}", "--format=directory"]
        made += [f"--essential-hook={SMALL_INITRD}", f"--customize-hook={NETWORK}", SUITE, str(root), MIRROR]
        _in_own_namespace(["sh", "-c", script, "sh", *made])
        done.touch()
        note(**{"image: mmdebstrap, s": round(time.perf_counter() - began_s)})
    return root


def _in_own_namespace(command: list[str]) -> None:
    """Run as root of a user namespace in which the ids are this system's; `command` begins to work at a line."""
    own = ["unshare", "--user", "--mount", "--pid", "--fork"]
    with subprocess.Popen([*own, *command], stdin=subprocess.PIPE, text=True) as process:
        space = Path(f"/proc/{process.pid}/ns/user")
        while space.readlink() == Path("/proc/self/ns/user").readlink():
            time.sleep(0.01)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(OWN_IDS)
        process.communicate("\n")
    assert process.returncode == 0, command


@dataclass(frozen=True, kw_only=True)
class Image:
    """An ext4 image, and the files that boot it and let us in."""

    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk.img"

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """Its root file system, for as long as it lasts."""
        place = self.folder / "card"
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", "-o", "loop", str(self.disk), str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)


def new_image(name: str) -> Image:
    """A fresh one; root may log in with the key beside it."""
    image = Image(folder=STORE / "made" / f"image-{name}")
    shutil.rmtree(image.folder, ignore_errors=True)
    image.folder.mkdir(parents=True)
    make = ["mke2fs", "-q", "-t", "ext4", "-d", str(image_root()), str(image.disk), f"{IMAGE_MB}M"]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(image.folder / "login")], check=True)
    with image.mounted() as root:
        shutil.copy(next(root.glob("boot/vmlinuz-*")), image.folder / "kernel")
        shutil.copy(next(root.glob("boot/initrd.img-*")), image.folder / "initrd")
        (root / "root" / ".ssh").mkdir(mode=0o700, exist_ok=True)
        shutil.copy(image.folder / "login.pub", root / "root" / ".ssh" / "authorized_keys")
    return image


@dataclass(frozen=True, kw_only=True)
class QemuMachine:
    """An image that runs."""

    image: Image
    port: int
    process: subprocess.Popen[bytes]

    @property
    def console(self) -> str:
        """What it has said, the service's log among it."""
        return (self.image.folder / "console.log").read_text(errors="replace")

    def settings(self) -> list[str]:
        """ssh's own, for a host that nobody knows."""
        told = [f"Port={self.port}", f"IdentityFile={self.image.folder / 'login'}", "BatchMode=yes", "User=root"]
        return [*told, "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]

    def run(self, command: str, *, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """A line for root's shell there, to its end."""
        options = [f"-o{setting}" for setting in self.settings()]
        line = ["ssh", *options, "127.0.0.1", command]
        return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False)

    def wait_for_login(self) -> None:
        """Return when ssh lets root in."""
        deadline = time.monotonic() + PATIENCE_S
        while self.run("true").returncode != 0:
            assert self.process.poll() is None, self.console[-3000:]
            assert time.monotonic() < deadline, self.console[-3000:]
            time.sleep(1)


@contextmanager
def booted(image: Image) -> Iterator[QemuMachine]:
    """The image's own kernel and systemd on an emulated machine; switched off at the end."""
    port = free_port()
    command = ["qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", str(MEMORY_MB)]
    command += ["-kernel", str(image.folder / "kernel"), "-initrd", str(image.folder / "initrd")]
    command += ["-append", "root=/dev/vda rw console=ttyAMA0 systemd.journald.forward_to_console=1"]
    command += ["-drive", f"if=none,id=disk,format=raw,file={image.disk}", "-device", "virtio-blk-pci,drive=disk"]
    command += ["-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22"]
    command += ["-device", "virtio-net-pci,netdev=net,romfile=", "-nodefaults", "-display", "none", "-no-reboot"]
    command += ["-serial", f"file:{image.folder / 'console.log'}"]
    with (image.folder / "qemu.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield QemuMachine(image=image, port=port, process=process)
        finally:
            process.terminate()
