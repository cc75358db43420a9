"""A newer client is fetched when it is signed, beside the tasks of a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.board.pack import pack_release
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.update import launcher
from edge_client.update.launcher import ReleaseRecord
from edge_client.update.self_update import SelfUpdater
from tests.support.releases import NEW, OLD, site
from tests.support.scripted_coordinator import DeviceStage, Script


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path, updates=SelfUpdater(tmp_path / "releases", running=OLD))


def offer(
    stage: DeviceStage, version: str = NEW, *, data: bytes | None = None, manifest: Manifest | None = None
) -> None:
    blob = pack_release(site(version), version) if data is None else data
    stage.lead(1, release={"version": version, "file": manifest or stage.blob(blob, "release")})


def recorded(stage: DeviceStage) -> ReleaseRecord:
    return launcher.read_record(stage.folder / "releases")


def test_a_signed_newer_release_is_fetched_put_on_trial_and_the_device_leaves(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        offer(stage)
        yield
        pytest.fail("the device did not leave")

    stage.play(script())
    assert recorded(stage) == ReleaseRecord(trial=NEW)
    assert (stage.folder / "releases" / NEW / "edge_client" / "cli.py").is_file()
    assert stage.last("st")["s"] == "off"


@pytest.mark.parametrize("case", ["older", "same", "unsigned", "failed", "other version", "no release", "no launcher"])
def test_anything_else_changes_nothing(stage: DeviceStage, case: str) -> None:
    def script() -> Script:
        yield
        data = pack_release(site(NEW), NEW)
        if case in ("older", "same"):
            offer(stage, {"older": "0.0.9", "same": OLD}[case])
        elif case == "unsigned":
            stage.blobs[manifest_of(data, "release", block=4096).sha256] = data
            offer(stage, manifest=manifest_of(data, "release", block=4096))
        elif case == "other version":
            offer(stage, "0.9.0", data=data)
        elif case == "no release":
            offer(stage, data=b"no release")
        else:
            offer(stage)
        yield 100
        stage.ask(stage.fit())
        yield

    if case == "failed":
        launcher.write_record(stage.folder / "releases", ReleaseRecord(failed=(NEW,)))
    if case == "no launcher":
        stage.updates = SelfUpdater(None, running=OLD)
    before = recorded(stage)
    stage.play(script())
    assert recorded(stage) == before
    assert stage.said("rdy")  # it lives on


def test_a_release_that_is_refused_is_told_once_and_not_with_each_record(
    stage: DeviceStage, caplog: pytest.LogCaptureFixture
) -> None:
    """A coordinator says its record in each round, and a broker may repeat it without an end."""
    unsigned = manifest_of(pack_release(site(NEW), NEW), "release", block=4096)
    stage.play_turns(*[lambda: offer(stage, manifest=unsigned)] * 3)
    told = [record.getMessage() for record in caplog.records if "cannot take release" in record.getMessage()]
    assert [line.partition(":")[0] for line in told] == [f"cannot take release {NEW}"]


def test_a_task_comes_before_a_release(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        offer(stage)
        yield
        assert recorded(stage) == ReleaseRecord()
        stage.go()
        yield
        stage.ack("ok")
        yield
        pytest.fail("the device did not leave")

    stage.play(script())
    assert len(stage.said("rdy")) == 1
    assert recorded(stage) == ReleaseRecord(trial=NEW)


def test_a_round_that_ends_without_a_device_takes_nothing_of_the_release_that_it_fetches(stage: DeviceStage) -> None:
    """A slow device, which each round ended without, began to fetch it anew after each."""
    data = pack_release({**site(NEW), "edge_client/large.py": bytes(100_000)}, NEW)

    def script() -> Script:
        yield
        stage.serve = False
        offer(stage, data=data)
        yield
        stage.send_blocks(stage.last("get"))
        yield
        stage.ask(stage.fit())
        yield
        stage.tell("stop", run="r1", round=1, exchange=0)
        stage.serve = True
        yield 100
        pytest.fail("the device did not leave")

    stage.play(script())
    sha256 = manifest_of(data, "release").sha256
    assert [get["at"][0][0] for get in stage.said("get") if get["sha256"] == sha256].count(0) == 1
    assert recorded(stage) == ReleaseRecord(trial=NEW)


def test_a_release_on_trial_that_hears_its_coordinator_is_good_and_others_are_removed(stage: DeviceStage) -> None:
    """But no link to a folder, nor what it leads to."""
    folder, elsewhere = stage.folder / "releases", stage.folder / "elsewhere"
    for version in (OLD, NEW):
        (folder / version / "edge_client").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "linked").symlink_to(elsewhere)
    launcher.write_record(folder, ReleaseRecord(good=OLD, trial=NEW, starts=1))
    stage.updates = SelfUpdater(folder, running=NEW)
    stage.play(iter(()))
    assert recorded(stage) == ReleaseRecord(good=NEW)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [NEW, "linked"]


def test_a_release_on_trial_gives_way_when_the_coordinator_stays_silent(tmp_path: Path) -> None:
    folder = tmp_path / "releases"
    launcher.write_record(folder, ReleaseRecord(trial=NEW, starts=1))
    updates = SelfUpdater(folder, running=NEW)
    assert not updates.overdue(0.0)
    assert not updates.overdue(899.0)
    assert updates.overdue(900.0)
    launcher.write_record(folder, ReleaseRecord(good=NEW))
    assert not updates.overdue(1_800.0)
