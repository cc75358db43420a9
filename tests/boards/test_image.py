"""An image of Debian arm64, flashed on a loop mount and booted by qemu: its first boot makes it a device that trains.

Kernel, systemd, wheels, mosquitto with mutual TLS and coordinator are real; the processor is emulated. Figures go to
`.boards/figures.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_client.cli import main
from tests.boards.test_arm64 import answered
from tests.boards.test_termux import SAMPLES, coordinator
from tests.support.arm64_board import STORE, note, started, until
from tests.support.arm64_image import GATEWAY, Image, QemuMachine, booted, image_root, new_image
from tests.support.guarded_broker import Guarded, guarded_broker
from tests.support.phone_page import SCALE, digits

pytestmark = [pytest.mark.board, pytest.mark.slow, pytest.mark.timeout(6000)]
CID = "porch"
CLIENT = "runuser -u fedcenters -- env PYTHONPATH=/opt/fedcenters/site python3 -m edge_client.cli"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    image_root()  # first: it takes longest, or it skips
    with guarded_broker(tmp_path_factory.mktemp("federation"), CID, hosts=("127.0.0.1", GATEWAY)) as found:
        yield found


def flashed(broker: Guarded) -> Image:
    """What a user does with a card: write the system, mount it, flash it, add samples, take it out."""
    began_s = time.perf_counter()
    image = new_image(CID)
    note(**{"image: made and mounted, s": round(time.perf_counter() - began_s)})
    began_s, port = time.perf_counter(), broker.url.rpartition(":")[2]
    with image.mounted() as root:
        about = ["--board", "generic-arm64", "--device-id", CID, "--join", str(broker.work.folder)]
        place = ["--rootfs", str(root), "--cache", str(STORE / "wheels"), "--federation", f"mqtts://{GATEWAY}:{port}"]
        assert main(["flash", *about, *place]) == 0
        note(**{"image: flash, s": round(time.perf_counter() - began_s)})
        data = root / "var" / "lib" / "fedcenters" / "data"
        data.mkdir(parents=True)
        x, y = digits()
        for name, part in (("train", slice(SAMPLES)), ("test", slice(SAMPLES, 2 * SAMPLES))):
            np.savez(data / f"{name}.npz", x=(x[part] / SCALE).reshape(-1, 1, 8, 8).astype(np.float32), y=y[part])
    return image


def shown(machine: QemuMachine, name: str) -> str:
    """A property of the service, as its systemd tells it."""
    return machine.run(f"systemctl show fedcenters-edge -p {name} --value").stdout.strip()


def test_the_first_boot_of_a_flashed_image_ends_in_a_device_that_trains(broker: Guarded, tmp_path: Path) -> None:
    image, config = flashed(broker), coordinator(broker.work.folder, broker, tmp_path)
    serve = [sys.executable, "-m", "coordinator", "serve", str(config)]
    began_s = time.perf_counter()
    with started(tmp_path / "serve.log", serve) as server, booted(image) as machine:
        until(tmp_path / "run" / "metrics.jsonl", "round", (server, machine.process), tmp_path)
        note(**{"image: from power on to a trained round, s": round(time.perf_counter() - began_s)})
        assert answered(tmp_path / "run") == {CID}
        machine.wait_for_login()
        assert shown(machine, "NRestarts") == "0", machine.console[-3000:]
        assert shown(machine, "User") == "fedcenters"
        note(**{"image: memory of the service, MB": round(int(shown(machine, "MemoryPeak")) / 1e6)})
        whole = machine.run("cd / && sha256sum --check --quiet /opt/fedcenters/MANIFEST")
        assert whole.returncode == 0, whole.stdout
        done = machine.run(f"{CLIENT} doctor --config /etc/fedcenters/client.toml --json")
        found = json.loads(done.stdout)
        assert found["fit"], (found, done.stderr)
