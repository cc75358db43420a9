"""The unit and the container file of docs/deploy: they can be read, they run no root, and they write nowhere else."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coordinator import call_filter

FOLDER = Path(__file__).parents[2] / "docs" / "deploy"
UNIT = FOLDER / "fedcenters-coordinator@.service"
CONTAINER = FOLDER / "Containerfile"
PROGRAM = "/opt/fedcenters/bin/fedcenters-coordinator"
RUNTIMES = "import torch, coordinator.service, numpy as np; print(np.ones((300, 300)) @ np.ones((300, 300)))"
EXPOSURE = 25  # tenths that `systemd-analyze security` may count; a plain unit has 96


def unit(part: str = "[Service]") -> dict[str, list[str]]:
    """Keys of a section and their values; a key may stand twice."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line
        elif "=" in line and not line.startswith("#") and section == part:
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def stages() -> list[list[tuple[str, str]]]:
    """(instruction, rest) of each stage of the container file."""
    out: list[list[tuple[str, str]]] = []
    for line in CONTAINER.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            if word == "FROM":
                out.append([])
            out[-1].append((word, rest))
    return out


def test_the_unit_starts_the_coordinator_as_nobody_with_one_folder_to_write_to() -> None:
    service = unit()
    assert service["ExecStart"] == [f"{PROGRAM} serve /etc/fedcenters/%i.toml"]
    assert service["DynamicUser"] == ["yes"]
    assert (service["ProtectSystem"], service["StateDirectory"]) == (["strict"], ["fedcenters/%i"])
    assert service["CapabilityBoundingSet"] == [""]


def test_the_unit_restarts_what_may_help_and_leaves_the_coordinator_time_to_stop() -> None:
    from coordinator.service import STOP_TIMEOUT_S
    from edge_client.errors import ConfigError, ProtocolError, UsageError

    service = unit()
    assert service["Restart"] == ["on-failure"]
    useless = (UsageError, ConfigError, ProtocolError)
    assert service["RestartPreventExitStatus"] == [" ".join(str(error.exit_code) for error in useless)]
    assert int(service["TimeoutStopSec"][0]) > STOP_TIMEOUT_S


def test_the_unit_starts_the_coordinator_again_however_long_its_broker_is_away() -> None:
    """By systemd's own limit, or one of the unit, it would be given up after some minutes without a broker."""
    assert unit("[Unit]")["StartLimitIntervalSec"] == ["0"]


def can_filter_calls() -> bool:
    """Whether this machine has what call_filter.py needs."""
    try:
        ctypes.CDLL(call_filter.LIBRARY)
    except OSError:
        return False
    return shutil.which("systemd-analyze") is not None


@pytest.mark.skipif(not can_filter_calls(), reason="systemd or libseccomp is not installed")
def test_the_coordinators_libraries_run_with_the_system_calls_that_the_unit_allows() -> None:
    command = [sys.executable, call_filter.__file__, str(UNIT), sys.executable, "-c", RUNTIMES]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parents[1])
    assert ran.returncode == 0, ran.stderr
    assert "300." in ran.stdout
    assert "ProcSubset" not in unit()  # /proc/cpuinfo says which of the CPU's instructions the runtimes may use


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    copy = tmp_path / "fedcenters-coordinator@home.service"
    copy.write_text(UNIT.read_text().replace(PROGRAM, "/bin/true").replace("mosquitto.service", ""))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert copy.name not in checked.stderr, checked.stderr
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", "--no-pager", str(copy)]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout[-3000:] + judged.stderr


def test_the_container_runs_the_coordinator_without_root_and_can_be_stopped() -> None:
    last = dict(stages()[-1])
    user, _, group = last["USER"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert json.loads(last["ENTRYPOINT"]) == [PROGRAM]
    assert json.loads(last["CMD"])[0] == "serve"
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert last["VOLUME"] == last["WORKDIR"] == "/var/lib/fedcenters"


def test_the_pages_command_builds_the_container_with_torch_from_another_index() -> None:
    page = (FOLDER.parent / "run-as-a-service.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"podman build .*--build-arg (\w+)=", page)
    build = stages()[0]
    (installs,) = [place for place, (word, rest) in enumerate(build) if word == "RUN" and "pip install" in rest]
    assert build.index(("ARG", f"{name}=")) < installs
    assert name == "PIP_EXTRA_INDEX_URL"  # pip reads it


def test_the_container_copies_our_packages_and_nothing_that_is_secret() -> None:
    copied = [rest.split()[:-1] for stage in stages() for word, rest in stage if word == "COPY"]
    names = {name for names in copied for name in names if not name.startswith(("--from", "/"))}
    project = (FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    packages, modules = re.findall(r'"(\w+)\*"', project), re.findall(r'py-modules = \["(\w+)"\]', project)
    built_from = {*packages, *(f"{module}.py" for module in modules), "pyproject.toml", "setup.py"}
    assert modules
    assert names == built_from | {"constraints.txt", "README.md", "LICENSE"}
    assert all((FOLDER.parents[1] / name).exists() for name in names)
