"""A client in Go that was written from PROTOCOL.md: it reads the golden vectors and takes part beside Python's."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.protocol import messages, signing
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Message
from edge_client.transport.mqtt import MqttTransport
from tests.support.mixed_cohort import PATIENCE_S, SOURCE, GuardedCohort, MixedCohort, build

GOLDEN = SOURCE.parent / "golden"
ROUNDS = 5
LEFT = 7  # the exit code of `-quit-at`
pytestmark = pytest.mark.timeout(1_300)  # two runs of PATIENCE_S


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("second-client"))


def test_the_golden_vectors_hold_in_go(program: Path) -> None:
    done = subprocess.run([program, "golden", GOLDEN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "golden vectors hold" in done.stdout


def record(link: int) -> bytes:
    """What a coordinator's connection says of itself."""
    boot, private = "0123456789abcdef", bytes(range(32))
    facts = {"boot": boot, "online": True, "proto": [1], "spread_ms": 0, "block": 4_096, "window": 1, "src": ["mqtt"]}
    signature = signing.sign_record(boot, 1, private, "home")
    return messages.write_message("coord", ident=f"c1-{link}", t_ms=0, epoch=1, link=link, **facts, **signature)


@pytest.mark.broker
def test_a_second_client_is_announced_to_each_connection_of_the_coordinator_that_is_newer_than_its_own(
    program: Path, tmp_path: Path
) -> None:
    """Else a coordinator that comes later counts it only when it answers a `rebirth`, five seconds on."""
    topics, heard = Topics("home"), 0
    home = MixedCohort(tmp_path, program, key=signing.public_key(bytes(range(32))).hex())
    (tmp_path / "dev-0").mkdir()
    for name in ("train", "test"):
        (tmp_path / "dev-0" / f"{name}.csv").write_text("0,1,0\n")
    with home.broker() as home.url, closing(MqttTransport(home.url, "home.coordinator.0")) as coordinator:
        coordinator.connect()
        second: subprocess.Popen[bytes] | None = None
        while heard < 3:  # its own birth, then one for each of two connections
            event = coordinator.receive(PATIENCE_S)
            if isinstance(event, Connected):
                coordinator.subscribe(topics.state("dev-0"))
                second = second or home.second()
            elif isinstance(event, Message) and not event.retained:
                assert messages.read_message(event.payload, "st")["s"] == "on"
                heard += 1
                coordinator.publish(topics.coord(), record(heard), retain=True)
            else:
                assert event is not None, home.log("second")
        assert second is not None
        second.terminate()
        assert second.wait(PATIENCE_S) == 0


@pytest.mark.broker
@pytest.mark.parametrize("method", [{"method": "fedavg"}, {"method": "fesem", "clusters": 2}])
def test_every_result_of_the_second_client_counts(program: Path, tmp_path: Path, method: dict[str, Any]) -> None:
    """In the default codec i8, whose residual is carried from round to round; uploads have several blocks."""
    home = MixedCohort(tmp_path, program)
    home.run(**method, num_rounds=ROUNDS)
    taken = [line["what"] for line in home.said("ack") if line["status"] == "ok"]
    assert taken == ["delta", "stats"] * ROUNDS
    assert [line.get("refused", {}) for line in home.rounds()] == [{}] * ROUNDS
    assert all("dev-0" in line["per_device"] for line in home.rounds())


@pytest.mark.broker
@pytest.mark.slow
def test_the_centers_are_those_of_a_fleet_of_python_clients(program: Path, tmp_path: Path) -> None:
    centers = []
    for seat, who in (("go", program), ("python", None)):
        (tmp_path / seat).mkdir()
        home = MixedCohort(tmp_path / seat, who, top={"codec": "f32"})
        home.run(method="fesem", clusters=2, num_rounds=2)
        centers.append(home.centers("fesem"))
    np.testing.assert_allclose(centers[0], centers[1], atol=1e-5)


@pytest.mark.broker
def test_a_killed_second_client_goes_on_from_its_state(program: Path, tmp_path: Path) -> None:
    def kill(home: MixedCohort) -> None:
        home.wait(lambda: len(home.said("ack")) > 2)  # in round 2
        process = home.processes.pop()
        process.kill()
        process.wait()
        home.second()

    home = MixedCohort(tmp_path, program)
    home.run(kill, method="fedavg", num_rounds=ROUNDS)
    assert "dev-0" in home.rounds()[-1]["per_device"]
    assert len(home.said("golden run")) == 2


@pytest.mark.broker
@pytest.mark.parametrize(
    ("mode", "method"),
    [
        ("updates", {"method": "fedavg"}),
        pytest.param("updates+membership", {"method": "fesem", "clusters": 2}, marks=pytest.mark.slow),
    ],
)
def test_masked_sums_with_the_second_client_are_those_of_python(
    program: Path, tmp_path: Path, mode: str, method: dict[str, Any]
) -> None:
    """No sum of fewer than five devices is made, and each center has five, so that none is made without dev-0."""
    centers, failed = [], []
    for seat, who in (("go", program), ("python", None)):
        (tmp_path / seat).mkdir()
        home = MixedCohort(tmp_path / seat, who, devices=10 if "clusters" in method else 5)
        home.run(**method, num_rounds=2, secure=mode, least_members=5)
        centers.append(home.centers(str(method["method"])))
        failed += [line["secure"].get("failed") for line in home.rounds()]
    assert not any(failed)
    np.testing.assert_allclose(centers[0], centers[1], atol=1e-5)


@pytest.mark.broker
def test_a_sum_goes_on_without_a_second_client_that_left_after_its_shares(program: Path, tmp_path: Path) -> None:
    """Its masks in the others' uploads are taken off with the shares that it dealt."""
    home = MixedCohort(tmp_path, program, devices=7, deadline=5, top={"quorum": 0.5})
    home.run(method="fedavg", num_rounds=2, secure="updates", options="-quit-at add")
    assert [line["what"] for line in home.said("ack")] == ["masked", "masked"]  # prekeys and shares
    first = home.rounds()[0]
    assert not first["secure"].get("failed")
    assert np.abs(home.centers("fedavg")).max() < 10


@pytest.mark.broker
def test_a_second_client_that_is_started_again_after_its_shares_is_in_the_sum(program: Path, tmp_path: Path) -> None:
    """Five devices are the least, so without its keys from disk there would be no sum."""

    def restart(home: MixedCohort) -> None:
        process = home.processes.pop()
        assert process.wait(PATIENCE_S) == LEFT
        home.second()

    home = MixedCohort(tmp_path, program, devices=5)
    home.run(restart, method="fedavg", num_rounds=1, secure="updates", options="-quit-at add")
    assert not home.rounds()[0]["secure"].get("failed")
    assert [line["job"] for line in home.said("task")][:4] == ["prekeys", "shares", "add", "add"]


@pytest.mark.broker
def test_a_token_becomes_a_certificate_with_which_the_second_client_trains(program: Path, tmp_path: Path) -> None:
    home = GuardedCohort(tmp_path, program, devices=1)
    home.run(method="fedavg", num_rounds=1)
    assert [line["status"] for line in home.said("ack")] == ["ok", "ok"]
    assert {path.name for path in home.identity.iterdir()} >= {"device.crt", "device.key"}
    assert not (home.identity / "token").exists()
