"""The README's roads for a server and for a board, followed: certificates, mosquitto, two devices and a new one.

What the README leaves to the reader is done here: the second device, samples, and this machine instead of 192.168.1.10.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.local_broker import find_mosquitto
from coordinator.storage.status import follow_status
from edge_client.data.dataset import DeviceData
from emulator.data.fleet_split import digits_fleet
from tests.support.doc_pages import ROOT, PageReader, blocks
from tests.support.ports import free_port

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]
README = ROOT / "README.md"
COMMANDS = [command for block in blocks(README) if block.kind == "console" for command in block.commands]
DEVICES = ("pi-1", "pi-2")


def command(words: str) -> str:
    """The README's command that begins with these words."""
    return next(re.sub(r"\s*&?$", "", line) for line in COMMANDS if line.startswith(words))


def get_ready(folder: Path, name: str, local: DeviceData) -> None:
    """The device's folder from the operator, with samples in it."""
    shutil.copytree(folder / "keys" / "devices" / name, folder / name)
    (folder / name / "data").mkdir()
    for part, data in (("train", local.train), ("test", local.test)):
        assert data is not None
        np.savez(folder / name / "data" / f"{part}.npz", x=data.x, y=data.y)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageReader]:
    folder = tmp_path_factory.mktemp("reader")
    port = free_port()
    here = {
        "--host 192.168.1.10": f"--host localhost --port {port} --enrol-port {free_port()}",
        "192.168.1.10:8883": f"localhost:{port}",
        "mosquitto -c": f"{find_mosquitto()} -c",
        "--dashboard 8080": f"--dashboard {free_port()}",
        "8081": str(free_port()),
    }
    reader = PageReader(folder=folder, here=here)
    try:
        for block in blocks(README):
            if block.kind == "toml" and block.text.startswith("# coordinator.toml"):
                reader.write(block.text)
        reader.run(command("fedcenters-coordinator provision"))
        configuration = folder / "keys" / "broker" / "mosquitto.conf"
        if os.geteuid() == 0:  # root's mosquitto becomes a user who cannot look into a test's folder
            configuration.write_text(f"user root\n{configuration.read_text()}")
        reader.run(f"{command('mosquitto')} &")
        reader.run(f"{command('fedcenters-coordinator serve')} &")
        fleet = digits_fleet(devices=2, new=1, groups=2)
        for name, local in zip(DEVICES, fleet.devices.values(), strict=True):
            get_ready(folder, name, local)
            if name == "pi-1":
                reader.run(command("fedcenters-edge doctor"))
            reader.run(f"{command('fedcenters-edge join').replace('pi-1', name)} &")
        next(found for found in follow_status(folder / "runs" / "home") if found["done"])
        for words in ("fedcenters-coordinator status", "fedcenters-export bundle", "fedcenters-export verify"):
            reader.run(command(words))
        reader.run(f"{command('fedcenters-export serve')} &")
        reader.run(command("fedcenters-coordinator provision keys --device pi-3"))
        get_ready(folder, "pi-3", fleet.new_devices["new-0"])
        reader.run(command("fedcenters-edge nearest --config"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(folder))  # for what is fetched without --state
            reader.run(command("fedcenters-edge nearest --federation"))
        yield reader
    finally:
        reader.leave()


def test_status_tells_of_a_training_that_is_done(reader: PageReader) -> None:
    assert "round 10/10, accuracy" in reader.printed[command("fedcenters-coordinator status")]


def test_the_board_is_well(reader: PageReader) -> None:
    told = reader.printed[command("fedcenters-edge doctor")]
    assert re.search(r"took \d+ steps on cpu, [\de.+-]+ from", told)
    assert "FAIL" not in told


def test_a_smaller_bundle_is_made_of_the_run(reader: PageReader) -> None:
    assert list((reader.folder / "centers").rglob("*int8*"))


def test_the_bundle_is_verified_and_its_files_run_without_us(reader: PageReader) -> None:
    assert reader.printed[command("fedcenters-export verify")]
    script = (
        "import numpy, onnxruntime; s = onnxruntime.InferenceSession('runs/home/bundle/centers/center-0/model.onnx');"
        "print(s.run(['logits'], {'x': numpy.load('pi-1/data/test.npz')['x']})[0].shape)"
    )
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, "-c", script], cwd=reader.folder, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("10)")


def test_a_new_device_is_told_its_nearest_center(reader: PageReader) -> None:
    over_mqtt = command("fedcenters-edge nearest --config")
    assert '"center": ' in reader.printed[over_mqtt]
    assert shlex.split(over_mqtt)[-1] == "--json"
    assert Path(reader.folder / "pi-3" / "state").is_dir()
    assert "signed by home" in reader.printed[command("fedcenters-edge nearest --federation")]
