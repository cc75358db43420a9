"""The README is right: configurations are accepted, targets exist, a script does what it says.

tests/docs/test_named_commands.py looks for its commands and options, as for those of every page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator import config as coordinator_config
from coordinator.strategies.registry import make_method
from edge_client import config as client_config
from edge_client.toml_files import read_toml
from tests.support.guarded_broker import provision_federation

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = sorted(
    {
        line.removeprefix("$ ").split("#")[0].strip()
        for kind, text in BLOCKS
        if kind == "console"
        for line in text.splitlines()
        if line.startswith("$ ")
    }
)


def configuration(name: str) -> str:
    return str(next(text for kind, text in BLOCKS if kind == "toml" and text.startswith(f"# {name}")))


def test_the_devices_configuration_is_accepted_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(configuration("client.toml"))
    assert client_config.load_config(tmp_path / "client.toml", {}).device_id == "pi-1"


def test_the_devices_configuration_has_the_lines_that_provision_writes(tmp_path: Path) -> None:
    (tmp_path / "README.toml").write_text(configuration("client.toml"))
    shown = read_toml(tmp_path / "README.toml", hint="")
    provision_federation(tmp_path / "keys", "pi-1", federation="home")
    written = read_toml(tmp_path / "keys" / "devices" / "pi-1" / "client.toml", hint="")
    assert shown.keys() - written.keys() == {"engine", "device"}  # which the user adds
    assert written.keys() <= shown.keys()


def test_the_coordinators_configuration_is_accepted_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "coordinator.toml").write_text(configuration("coordinator.toml"))
    settings = coordinator_config.read_config(tmp_path / "coordinator.toml")
    for run in settings.runs:
        make_method(run.method, **run.settings)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_each_make_target_exists(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_the_script_for_devices_without_samples_leaves_a_provisioned_client_as_it_is(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    script = next(text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "# two_devices.py" in text)
    assert "`two_devices.py`" in README
    for name in ("pi-1", "pi-2", "pi-3", "pi-4", "pi-5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ca.crt").touch()  # a key comes later where there is a token
        (tmp_path / name / "client.toml").write_text("as provisioned")
    assert "`python two_devices.py pi-3`" in README
    calls = [[], ["pi-3"], ["pi-4", "pi-5"]]  # of one process: each takes a second of CPU time for scikit-learn
    thrice = f"import sys\nfor sys.argv[1:] in {calls}:\n    exec({script!r}, {{'__name__': '__main__'}})"
    subprocess.run([sys.executable, "-c", thrice], cwd=tmp_path, check=True)
    seen: set[bytes] = set()
    for name in ("pi-1", "pi-2", "pi-3", "pi-4", "pi-5"):
        assert (tmp_path / name / "client.toml").read_text() == "as provisioned"
        for file in ("train.npz", "test.npz"):
            samples = np.load(tmp_path / name / "data" / file)["x"]
            assert samples.shape[1:] == (1, 8, 8)
            assert seen.isdisjoint(row.tobytes() for row in samples)
            seen |= {row.tobytes() for row in samples}
