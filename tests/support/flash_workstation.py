"""A workstation for tests of `flash`: a provisioned folder, root file systems that look real, wheels in the cache."""

from __future__ import annotations

import datetime as dt
import hashlib
import zipfile
from pathlib import Path

from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from edge_client.board.profiles import BOARD_PROFILES, MACHINES, BoardProfile
from edge_client.board.wheels import WheelSpec
from edge_client.cli import main

NOW = dt.datetime.now(dt.timezone.utc)
DEVICE = "porch"


def provisioned(folder: Path) -> Provisioner:
    """One device with a certificate, one with a token."""
    work = Provisioner(folder=folder, plan=ProvisionPlan(federation="home", hosts=("broker.example",)), now=NOW)
    work.write_infrastructure()
    work.add_device(DEVICE)
    work.add_token("shed")
    return work


def rootfs(folder: Path, profile: BoardProfile, python: str = "") -> Path:
    """As much of a root file system as `flash` looks at."""
    programs = folder / "usr" / "bin"
    programs.mkdir(parents=True)
    (folder / "etc").mkdir()
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + MACHINES[profile.machine].to_bytes(2, "little")
    version = python or profile.python
    (programs / f"python{version}").write_bytes(header + bytes(100))
    (programs / "python3").symlink_to(f"python{version}")
    if profile.tegra:
        (folder / "etc" / "nv_tegra_release").write_text("# R36")
    return folder


def wheel(path: Path, **files: bytes) -> Path:
    """A wheel with these files, the same bytes at any time; `__` in a name is a slash."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name.replace("__", "/") + ".py"), data)
    return path


def stocked(cache: Path, profile: BoardProfile, python: str = "", engines: tuple[str, ...] = ("onnx",)) -> Path:
    """A cache that holds a lock file and its one wheel, so that nothing is downloaded."""
    (cache / "wheels").mkdir(parents=True, exist_ok=True)
    (cache / "locks").mkdir(exist_ok=True)
    made = wheel(cache / "wheels" / "numpy-2.0-cp311-none-any.whl", numpy__init=b"x = 1\n", numpy__tests__a=b"no")
    spec = WheelSpec(profile=profile, python=python or profile.python, engines=engines)
    line = f"numpy==2.0 --hash=sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}\n"
    (cache / "locks" / f"{spec.key()}.txt").write_text(line)
    return cache


class FlashSetup:
    """`flash` with what it needs, in one folder."""

    def __init__(self, folder: Path, board: str = "raspberry-pi-5") -> None:
        self.folder, self.profile = folder, BOARD_PROFILES[board]
        self.keys = provisioned(folder / "keys").folder
        for python in (self.profile.python, "3.11"):  # of a bundle, and of the boards that tests make
            self.cache = stocked(folder / "cache", self.profile, python)

    def flash(self, *more: str, device: str = DEVICE) -> int:
        about = ["--board", self.profile.name, "--device-id", device, "--join", str(self.keys)]
        return main(["flash", *about, "--cache", str(self.cache), *more])
