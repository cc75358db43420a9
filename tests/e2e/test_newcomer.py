"""One command on a device that never trained, over a real broker: real processes, a fleet that teaches newcomers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.local_broker import start_broker
from edge_client.data.dataset import Dataset
from emulator.data.fleet_split import digits_fleet
from emulator.stop_signals import DeferredSignals
from emulator.testbed import testbed_files
from emulator.testbed.processes import ChildProcesses
from tests.support.process_fleet import DEVICES, RUN, SEED, FleetScene

RUNS = ({**RUN, "num-rounds": 4},)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What `nearest --json` says with labels, with labels of another fleet, with inputs alone and with noise."""
    folder = tmp_path_factory.mktemp("newcomer")
    local = digits_fleet(DEVICES, groups=3, seed=SEED).new_devices["new-0"]
    write(folder / "known", local.train)
    rng = np.random.default_rng(0)
    write(folder / "strange", Dataset(local.train.x, rng.integers(10, size=len(local.train))))
    noise = rng.normal(local.train.x.mean(), local.train.x.std(), size=local.train.x.shape).astype(np.float32)
    for name, x in (("inputs", local.train.x), ("noise", noise)):
        (folder / name).mkdir()
        np.savez(folder / name / "train.npz", x=x)
    with (
        start_broker(folder / "broker") as broker,
        DeferredSignals() as signals,
        ChildProcesses(folder / "logs", signals) as children,
    ):
        testbed = FleetScene(folder / "run", broker.url, children, RUNS)
        testbed.start_coordinator(engines=("onnx", "pt2"), formats=["onnx"], teach_newcomers=True)
        testbed.start_devices(1)
        testbed.wait_for("bundle")
        found = {name: asked(folder, broker.url, name) for name in ("known", "strange", "inputs", "noise")}
        found["trained"] = asked(folder, broker.url, "known", "--by", "round", "--personalise", "5")
        children.wait_for_exit(children.running)
    return found


def write(folder: Path, data: Dataset) -> None:
    folder.mkdir()
    np.savez(folder / "train.npz", x=data.x, y=data.y)


def asked(folder: Path, broker: str, name: str, *more: str) -> dict[str, object]:
    federation = f"{broker}/{testbed_files.DEMO_FEDERATION}"
    arguments = ["--federation", federation, "--signing-key", str(folder / "run" / "signing.pub"), "--device", name]
    arguments += ["--data", str(folder / name), "--state", str(folder / f"{name}-state"), "--json", *more]
    command = [sys.executable, "-m", "edge_client.cli", "nearest", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_a_newcomer_finds_its_signed_center_and_hears_how_it_fits(answers: dict[str, dict[str, object]]) -> None:
    known = answers["known"]
    assert known["center"] is not None
    assert (known["way"], known["signed_by"]) == ("labelled", testbed_files.DEMO_FEDERATION)
    assert known["fit"] in ("well", "badly")
    assert float(str(known["accuracy"])) > 0.5  # a center of another group writes no class alike
    assert Path(str(known["file"])).is_file()


def test_labels_that_nobody_uses_fit_no_center(answers: dict[str, dict[str, object]]) -> None:
    strange = answers["strange"]
    assert strange["center"] is None
    assert strange["losses"]
    assert strange["file"] is None


def test_without_labels_known_inputs_find_a_center_and_noise_finds_none(answers: dict[str, dict[str, object]]) -> None:
    assert (answers["inputs"]["center"] is None, answers["inputs"]["fit"]) in ((False, "well"), (False, "badly"))
    assert (answers["noise"]["center"], answers["noise"]["fit"]) == (None, "none")


def test_a_local_round_leads_to_the_same_center(answers: dict[str, dict[str, object]]) -> None:
    trained = answers["trained"]
    assert (trained["way"], trained["center"]) == ("round", answers["known"]["center"])
    assert isinstance(trained["personal"], dict)
    assert Path(trained["personal"]["file"]).is_file()
