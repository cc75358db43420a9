"""docs/termux.sh makes an arm64 Debian under proot-distro a device, and the service that it writes trains a round.

proot-distro, proot and Debian's arm64 packages are real, under qemu; the commands that only Android has (pkg,
sv-enable, termux-*) are small programs. Of Android, its battery and its power saving it says nothing.
Needs what `make boards` needs, and proot and proot-distro (apt install proot; pip install proot-distro).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_client.cli import main
from emulator.testbed.testbed_files import write_toml
from tests.boards.test_arm64 import answered
from tests.support.arm64_board import PATIENCE_S, ROOT, STORE, note, qemu, rootfs, started, until
from tests.support.guarded_broker import Guarded, guarded_broker
from tests.support.phone_page import SCALE, digits
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.board, pytest.mark.slow, pytest.mark.timeout(3000)]
CID, MODEL, SAMPLES = "porch", "digits-mlp", 40
ANDROID = {
    "pkg": "",
    "sv-enable": "",
    "termux-wake-lock": "",
    "termux-battery-status": json.dumps({"plugged": "PLUGGED_USB", "percentage": 64, "temperature": 27.5}),
    "termux-wifi-connectioninfo": json.dumps({"supplicant_state": "COMPLETED", "ssid": "home"}),
}
# On Termux proot-distro shows $PREFIX to a container, at the same place, and adds its programs to PATH.
AS_ON_TERMUX = """#!/bin/sh
[ "$1" = login ] || exec {program} "$@"
shift
exec {program} login --bind {prefix} --env PATH=/usr/sbin:/usr/bin:/sbin:/bin:{prefix}/bin "$@"
"""


def phone(folder: Path) -> dict[str, str]:
    """A home and a prefix as Termux has them; -> the environment of its shell."""
    prefix, home, program = folder / "usr", folder / "home", shutil.which("proot-distro")
    if program is None or shutil.which("proot") is None:
        skip_without("proot-distro is not installed (apt install proot; pip install proot-distro; make boards)")
    for made in (prefix / "bin", home):
        made.mkdir(parents=True)
    for name, answer in ANDROID.items():
        (prefix / "bin" / name).write_text(f"#!/bin/sh\necho '{answer}'\necho {name} \"$@\" >> {folder}/called\n")
        (prefix / "bin" / name).chmod(0o755)
    (prefix / "bin" / "sh").symlink_to("/bin/sh")
    (prefix / "bin" / "proot-distro").write_text(AS_ON_TERMUX.format(program=program, prefix=prefix))
    (prefix / "bin" / "proot-distro").chmod(0o755)
    (prefix / "bin" / "qemu-aarch64").symlink_to(qemu())
    path = f"{prefix / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
    stores = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("DATA", "CACHE")}
    return {"PATH": path, "HOME": str(home), "PREFIX": str(prefix), "TERM": "dumb", **stores}


def image(folder: Path) -> Path:
    """Debian's root file system as an archive."""
    archive = folder / "debian.tar"
    pack = ["tar", "--numeric-owner", "--exclude=./var/cache", "-cf", str(archive), "-C", str(rootfs()), "."]
    subprocess.run(pack, check=True)
    return archive


def coordinator(keys: Path, broker: Guarded, folder: Path) -> Path:
    mine, config = keys / "coordinator", folder / "coordinator.toml"
    table = {
        "federation": broker.work.plan.federation,
        "broker": broker.url,
        "folder": str(folder / "run"),
        "ca": str(mine / "ca.crt"),
        "certificate": str(mine / "coordinator.crt"),
        "key": str(mine / "coordinator.key"),
        "signing-folder": str(mine),
        "min-devices": 1,
        "start-timeout-s": PATIENCE_S,
        "deadline-s": PATIENCE_S,
        "quorum": 1.0,
        "formats": [],
        "model": {"name": MODEL, "engines": ["onnx"]},
        "runs": [{"method": "fedavg", "num-rounds": 1, "local-steps": 10}],
    }
    write_toml(config, table)
    return config


@contextmanager
def service_of(log: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all that it starts; Debian's proot, unlike Termux', leaves the programs in it when it ends."""
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_script_makes_a_phone_a_device_that_trains(tmp_path: Path) -> None:
    shell, bundle = phone(tmp_path / "termux"), tmp_path / "porch.tar"
    with guarded_broker(tmp_path / "federation", CID) as broker:
        port, python = broker.url.rpartition(":")[2], ["--python", "3.11"]  # of Debian 12; a phone has Debian 13
        about = ["--board", "generic-arm64", "--device-id", CID, "--join", str(broker.work.folder), *python]
        place = ["--bundle", str(bundle), "--cache", str(STORE / "wheels"), "--federation", f"mqtts://127.0.0.1:{port}"]
        assert main(["flash", *about, *place]) == 0
        script = ["/bin/sh", str(ROOT / "docs" / "termux.sh"), str(bundle), str(image(tmp_path))]
        for _ in range(2):  # the second time changes nothing
            done = subprocess.run(script, env=shell, capture_output=True, text=True, timeout=1200, check=False)
            (tmp_path / "script.log").write_text(done.stdout + done.stderr)
            assert done.returncode == 0, done.stderr[-3000:]
        assert "ok   runtime: onnxruntime" in done.stdout
        assert "ok   phone: plugged in, Wi-Fi; Android answers through Termux:API" in done.stdout
        root = tmp_path / "termux" / "data" / "proot-distro" / "containers" / "fedcenters" / "rootfs"
        x, y = digits()
        for name, part in (("train", slice(SAMPLES)), ("test", slice(SAMPLES, 2 * SAMPLES))):
            samples = (x[part] / SCALE).reshape(-1, 1, 8, 8).astype(np.float32)
            np.savez(root / "var" / "lib" / "fedcenters" / "data" / f"{name}.npz", x=samples, y=y[part])
        config = coordinator(broker.work.folder, broker, tmp_path)
        service = tmp_path / "termux" / "usr" / "var" / "service" / "fedcenters" / "run"
        serve = [sys.executable, "-m", "coordinator", "serve", str(config)]
        join = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in shell.items()), str(service)]
        with started(tmp_path / "serve.log", serve) as server, service_of(tmp_path / "join.log", join) as device:
            until(tmp_path / "run" / "metrics.jsonl", "round", (server, device), tmp_path)
        assert answered(tmp_path / "run") == {CID}
    called = (tmp_path / "termux" / "called").read_text().splitlines()
    assert {
        "pkg install -y proot-distro termux-api termux-services",
        "sv-enable fedcenters",
        "termux-wake-lock",
    } <= set(called)
    boot = tmp_path / "termux" / "home" / ".termux" / "boot" / "fedcenters"
    assert os.access(boot, os.X_OK)
    note(**{"termux: a round trained under proot": True})
