"""`fc.federation`: a run over MQTT by real processes has the numbers of the run in one process, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedcenters as fc
from coordinator.strategies.baselines.fedavg import FedAvg
from edge_client.errors import ConfigError, NetworkError, UsageError
from emulator.api import over_mqtt
from emulator.console import ConsoleProgress
from tests.support.has_option import HasDefault, HasOption

ROOT = Path(__file__).parents[3]
MINE = """
import json

import torch
from torch import nn

import fedcenters as fc

torch.manual_seed(0)
module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
fleet, method = fc.fleets.digits(devices=6, groups=2), fc.FeSEM(2, local_steps=2)
masked = fc.FedAvg(local_steps=2, server=fc.ServerOptions(secure="updates"))
with fc.federation("embedded", model=module, fleet=fleet) as home:
    real = home.run(method, rounds=2, name="home")
    sums = home.run(masked, rounds=2, name="sums")
virtual = fc.simulate(method, fleet=fleet, model=module, rounds=2, engine="onnx")
added = fc.simulate(masked, fleet=fleet, model=module, rounds=2, engine="onnx")
same = [
    bool((real.run.state.centers == virtual.run.state.centers).all()),
    list(real.history["accuracy"]) == list(virtual.history["accuracy"]),
    dict(real.assignments) == dict(virtual.assignments),
    # A device's float32 update differs in its last bit, and so at times a word by one of 3.6e8 levels.
    bool(abs(sums.run.state.centers - added.run.state.centers).max() < 1e-6),
    "failed" not in sums.summary()["secure"],
]
facts = {"answered": real.summary()["answered"], "folder": str(real.folder), "module": type(real.module(0)).__name__}
print(json.dumps({"same": same, "url": home.url, **facts}))
"""


OWN_LOSS = """
import json

import numpy as np
import torch
from torch import nn

import fedcenters as fc
from emulator.reports.comparison import read_runs
from tests.support.has_option import HasOption


def smoothed(outputs, labels):
    each = nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")
    return each.flatten(1).sum(1) / (labels != -100).flatten(1).sum(1)


torch.manual_seed(0)
rng = np.random.default_rng(0)
x = rng.standard_normal((340, 1, 4, 4)).astype(np.float32)
y = np.where(rng.random((340, 4, 4)) < 0.2, -100, x[:, 0] > 0)
parts = [slice(20), slice(20, 40), slice(40, 340)]  # more than `max-samples-ratio` times the median in the last
fleet = fc.fleet({f"d{i}": (x[part], y[part]) for i, part in enumerate(parts)})
method, module = HasOption(local_steps=10, learning_rate=0.5), nn.Conv2d(1, 2, 1)
with fc.federation("embedded", model=module, fleet=fleet, loss=smoothed) as home:
    real = home.run(method, rounds=2, name="home")
virtual, plain = (
    fc.simulate(method, fleet=fleet, model=module, rounds=2, engine="onnx", loss=loss) for loss in (smoothed, None)
)
same = [bool((real.run.state.centers == run.run.state.centers).all()) for run in (virtual, plain)]
accuracy = [real.history["accuracy"].tolist(), virtual.history["accuracy"].tolist()]
print(json.dumps({"same": same, "accuracy": accuracy, "reported": read_runs(real.folder)[0].own_loss}))
"""


FROZEN_BASE = """
import json

import torch
from torch import nn

import fedcenters as fc

torch.manual_seed(0)
module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32).requires_grad_(False), nn.ReLU(), nn.Linear(32, 10))
fleet, method = fc.fleets.digits(devices=4, groups=2), fc.FeSEM(2, local_steps=2, representation="*.weight")
with fc.federation("embedded", model=module, fleet=fleet) as home:
    real = home.run(method, rounds=2, name="home")
virtual = fc.simulate(method, fleet=fleet, model=module, rounds=2, engine="onnx")
bundle = real.export("centers", formats=("onnx",))
same, files = (real.run.state.centers == virtual.run.state.centers).all(), bundle.program.containers["onnx"]
print(json.dumps({"same": bool(same), "numbers": real.run.state.centers.shape[1], "frozen": "frozen" in files}))
"""


SCRIPTS = {"mine": MINE, "own loss": OWN_LOSS, "frozen base": FROZEN_BASE}
ALL = """
import os
import runpy

for folder in {folders}:
    os.chdir(folder)
    runpy.run_path("script.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each script prints last, each in a folder of its own.

    They run in a process of their own, as a user runs one: the embedded broker's library leaves sockets to the
    interpreter. It is one process for all of them, since it takes seconds to import what they use.
    """
    root = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (root / name).mkdir()
        (root / name / "script.py").write_text(text)
    (root / "all.py").write_text(ALL.format(folders=[str(root / name) for name in SCRIPTS]))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(root / "all.py")], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(SCRIPTS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.timeout(900)
def test_a_model_with_a_frozen_base_ends_over_mqtt_where_it_ends_in_one_process(outcomes: dict[str, Any]) -> None:
    assert outcomes["frozen base"] == {"same": True, "numbers": 330, "frozen": True}


@pytest.mark.timeout(900)
def test_a_loss_of_ones_own_over_labels_for_each_pixel_ends_over_mqtt_where_it_ends_in_one_process(
    outcomes: dict[str, Any],
) -> None:
    told = outcomes["own loss"]
    assert told["same"] == [True, False]
    assert told["accuracy"][0] == told["accuracy"][1]
    assert told["accuracy"][0][-1] > 0.95
    assert told["reported"] == "own"


@pytest.mark.timeout(900)
def test_ones_own_module_ends_over_mqtt_where_it_ends_in_one_process(outcomes: dict[str, Any]) -> None:
    told = outcomes["mine"]
    assert told["same"] == [True] * 5
    assert (told["answered"], Path(told["folder"]).is_absolute(), told["folder"][-9:]) == (1.0, True, "runs/home")
    assert (told["module"], told["url"]) == ("Sequential", "")


def test_a_federation_that_is_not_open_says_how_to_open_it() -> None:
    with pytest.raises(UsageError, match=r"with fc\.federation"):
        fc.federation("embedded").run(fc.FeSEM())


def test_a_method_of_a_cell_is_refused_with_what_to_do() -> None:
    cell = type("Mine", (FedAvg,), {"__module__": "__main__"})
    home = fc.federation("embedded")
    home.url = "mqtt://127.0.0.1:1"  # as if it were open; the method is looked at first
    with pytest.raises(UsageError, match="put class Mine into a file"):
        home.run(cell())


@pytest.mark.parametrize(("given", "said"), [({"fleet": 3}, "fleet is int"), ({"out": 3}, "out is 3")])
def test_a_wrong_part_is_told_before_anything_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=said):
        fc.federation("embedded", **given)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (HasOption(option={1, 2}), r"^option of .*HasOption is .*, which the file of a run cannot hold"),
        (HasDefault(option=None), r"^option of .*HasDefault is None, which the file of a run cannot hold"),
    ],
)
def test_a_setting_that_no_file_can_hold_is_told_before_anything_starts(
    method: FedAvg, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ended in a TypeError of TOML that named no setting, and the second was its default."""
    home = fc.federation("mqtt://127.0.0.1:1")
    monkeypatch.setattr(home, "url", "mqtt://127.0.0.1:1")  # as in the `with` block, which needs a broker
    with pytest.raises(UsageError, match=said):
        home.run(method)


def test_a_broker_that_does_not_answer_is_told_in_words_of_python() -> None:
    with pytest.raises(NetworkError, match="leave `broker` out"), fc.federation("mqtt://127.0.0.1:1"):
        pass


def test_wrong_rounds_are_told_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    home = fc.federation("mqtt://127.0.0.1:1")
    monkeypatch.setattr(home, "url", "mqtt://127.0.0.1:1")  # as in the `with` block, which needs a broker
    with pytest.raises(UsageError, match=r"^rounds is 0"):
        home.run(fc.FedAvg(), rounds=0)


def test_an_unknown_engine_is_told_before_the_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told after the user's model had been recorded and the fleet cut."""

    def make() -> nn.Module:
        pytest.fail("the model is looked at")

    home = fc.federation("mqtt://127.0.0.1:1", model=make, fleet=fc.fleets.digits(devices=2))
    monkeypatch.setattr(home, "url", "mqtt://127.0.0.1:1")  # as in the `with` block, which needs a broker
    with pytest.raises(UsageError, match="no edge client trains with engine 'nope'"):
        home.run(fc.FedAvg(), engine="nope")


@pytest.mark.broker
def test_the_end_of_its_broker_ends_a_run_at_once_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run waited until the silence was too long: an hour."""

    class EndsTheBroker(ConsoleProgress):
        def busy(self, text: str) -> None:
            broker = home._broker
            assert broker is not None
            assert broker.pid is not None
            with suppress(ProcessLookupError):
                os.kill(broker.pid, signal.SIGKILL)
            super().busy(text)

    monkeypatch.setattr(over_mqtt, "ConsoleProgress", EndsTheBroker)
    with fc.federation("mosquitto", fleet=fc.fleets.digits(devices=3), out=tmp_path) as home:
        with pytest.raises(NetworkError, match="mosquitto has ended"):
            home.run(fc.FedAvg(), rounds=1)
        with pytest.raises(NetworkError, match="mosquitto has ended"):
            home.run(fc.FedAvg(), rounds=1)
