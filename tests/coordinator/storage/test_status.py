"""`status` beside a coordinator that runs, after it has ended, and after it was killed."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.config_sections import RunConfig
from coordinator.identity.revoked_list import REVOKED_FILE
from coordinator.status_in_words import render_status, status_lines
from coordinator.storage.event_log import insert_events
from coordinator.storage.status import STATUS_FILE, await_run, follow_status, read_status, run_folder_of
from coordinator.storage.store import Store
from edge_client import __version__
from edge_client.errors import ConfigError, NetworkError
from edge_client.protocol.blocks import manifest_of
from tests.support.virtual_federation import BALLAST, BLOCK, Federation, Spy


class WaitsAs:
    """The module `time` for one module alone: `time.sleep` itself is for all threads, also those of other tests."""

    def __init__(self, sleep: Callable[[float], object]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def test_it_tells_how_far_a_training_is_while_it_is_being_written(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.world.run(lambda: fed.happened("round"))
    found = read_status(fed.config.folder)
    assert (found["epoch"], found["devices"], found["connected"], found["done"]) == (1, 4, 4, False)
    assert [(run["name"], run["round"], run["of"]) for run in found["runs"]] == [("fesem", 1, 2)]
    fed.finish()
    fed.world.end()
    assert read_status(fed.config.folder)["runs"][0]["accuracy"]["micro"] > 0.9


def test_a_device_that_is_revoked_in_the_training_is_counted_no_longer_and_took_part_once_it_is_over(
    tmp_path: Path,
) -> None:
    fed = Federation.of(tmp_path)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: fed.live_since(3.0))
    assert "4 take part in the training" in status_lines(read_status(fed.config.folder))[1]
    (fed.config.folder / REVOKED_FILE).write_text("d03\n")
    fed.world.run(lambda: fed.happened("revoked"))
    assert "3 take part in the training" in status_lines(read_status(fed.config.folder))[1]
    fed.finish()
    fed.world.end()
    assert "4 took part in the training" in status_lines(read_status(fed.config.folder))[1]


def test_of_an_open_exchange_it_names_who_trains_who_uploads_and_who_has_answered(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST)
    spy = Spy(fed.world.broker)
    fed.start(2)
    fed.start_mute_device("d02")
    fed.start_mute_device("d03")
    fed.world.run(lambda: len(spy.said("ack")) == 2)
    task = spy.said("task", cid="d03")[0]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    update = manifest_of(b"x" * 3 * BLOCK, "delta", block=BLOCK)
    spy.say("d03", "rdy", **key, attempt=1, n=40, what="delta", update=update, seconds=1.0)
    fed.world.run(lambda: fed.live_since(3.0))
    found = read_status(fed.config.folder)
    exchange = found["exchange"]
    assert found["phase"] == "asking"
    assert (exchange["run"], exchange["round"], exchange["asked"], exchange["wanted"]) == ("fesem", 1, 4, 4)
    assert (exchange["answered"], exchange["uploading"], exchange["open"]) == (["d00", "d01"], ["d03"], ["d02"])
    assert "  uploading: 1 (d03)" in status_lines(found)


def test_of_a_run_on_sums_it_tells_what_the_coordinator_sees_and_why_a_sum_failed(tmp_path: Path) -> None:
    settings = {"local-steps": 3, "batch-size": 8, "secure": "updates", "secure-clip": 10.0}
    runs = (RunConfig(method="fedavg", rounds=2, name="sums", settings=settings),)
    fed = Federation.of(tmp_path, devices=6, runs=runs, quorum=0.5, deadline_s=60.0)
    fed.start(6)
    fed.world.run(lambda: fed.live is not None)
    assert "  secure = updates: the coordinator sees sums of updates" in status_lines(read_status(fed.config.folder))
    fed.world.run(lambda: fed.happened("round"))
    said = status_lines(read_status(fed.config.folder))
    sees = (
        "sums of 5 or more devices, and of each device its number of samples and its times, and which center it chose"
    )
    sees += "; no update, no loss, no accuracy of one device"
    assert f"  secure = updates: the coordinator sees {sees}" in said
    assert not any("no sum" in line for line in said)
    for cid in ("d01", "d02"):
        fed.world.kill(cid)
    fed.complete()
    said = status_lines(read_status(fed.config.folder))
    assert "  no sum in the last round: 4 devices sent shares that others hold; at least 5 must" in said


def test_an_update_that_does_not_count_is_named_with_the_reason_in_status_and_in_the_metrics(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.5)
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: len(spy.said("ack")) == 3)
    task = spy.said("task", cid="d03")[0]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    update = manifest_of(b"no tensors", "delta", block=BLOCK, inline=True)
    spy.say("d03", "rdy", **key, attempt=1, n=40, what="delta", update=update, seconds=1.0)
    fed.world.run(lambda: fed.happened("round"))
    found = read_status(fed.config.folder)
    reason = next(event for event in fed.events if event["event"] == "round")["refused"]["d03"]
    assert reason.startswith("bad_schema: ")
    assert found["runs"][0]["refused"] == {"d03": reason} or found["runs"][0]["refused"] == {}  # of round 2 already


def test_a_reply_that_came_too_late_is_told_as_late(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.5, deadline_s=60.0)
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: len(spy.said("stop", cid="d03")) == 1)
    task = spy.said("task", cid="d03")[0]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    update = manifest_of(b"x" * 3 * BLOCK, "delta", block=BLOCK)
    spy.say("d03", "rdy", **key, attempt=1, n=40, what="delta", update=update, seconds=1.0)
    fed.world.run(lambda: bool(spy.said("ack", cid="d03")))
    assert spy.said("ack", cid="d03")[0]["status"] == "late"
    found = read_status(fed.config.folder)
    assert found["runs"][0]["late"] == ["d03"]
    assert "  late: 1 (d03)" in status_lines(found)


def test_the_last_error_has_its_hint_on_a_line_of_its_own_and_an_earlier_starts_is_not_shown(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=1.0, deadline_s=30.0)
    fed.start_coordinator()
    fed.start_devices(3)
    fed.start_mute_device("d03")
    with pytest.raises(NetworkError, match="3 of 4 devices"):
        fed.finish()
    error = read_status(fed.config.folder)["error"]
    what, hint = error.split("\n\nhint: ")
    lines = status_lines(read_status(fed.config.folder))
    at = lines.index(f"last error: {what}")
    assert "only 3 of 4" in what
    assert lines[at + 1] == f"  hint: {hint}"
    fed.start_coordinator()
    fed.world.run(lambda: fed.live is not None)
    assert read_status(fed.config.folder)["error"] is None
    fed.world.end()


def test_status_says_how_many_devices_are_waited_for(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=3)
    fed.start_coordinator()
    fed.start_devices(1)
    fed.world.run(lambda: fed.world.clock.time_s > 5.0)
    assert status_lines(read_status(fed.config.folder))[0] == "federation test, epoch 1: waiting: 1 of 3 devices"
    fed.world.end()


def test_a_coordinator_that_stopped_and_one_that_was_killed_are_told_apart(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, exit_when_done=True)
    process = fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: process.ended)
    fed.world.end()
    folder = fed.config.folder
    assert status_lines(read_status(folder))[0] == "federation test, epoch 1: stopped, all runs are done"
    assert any("took part in the training" in line for line in status_lines(read_status(folder)))
    assert [found["phase"] for found in follow_status(folder)] == ["stopped"]
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(render_status(read_status(folder)))
    assert "stopped, all runs are done" in console.export_text()
    left = json.loads((folder / STATUS_FILE).read_text())
    (folder / STATUS_FILE).write_text(json.dumps({**left, "phase": "asking"}))
    os.utime(folder / STATUS_FILE, (1, 1))
    assert "no sign of life for" in status_lines(read_status(folder))[0]
    (folder / STATUS_FILE).write_text("{")
    assert read_status(folder)["phase"] == "not started"


def test_a_watch_repeats_nothing_while_only_signs_of_life_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.world.run(lambda: fed.happened("round"))
    fed.world.end()
    file, writes = fed.config.folder / STATUS_FILE, 0

    def write(phase: str) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), "phase": phase, "unix_ms": writes}))

    def sleep(_seconds: float) -> None:
        nonlocal writes
        writes += 1
        write("serving" if writes < 4 else "stopped")

    write("serving")
    monkeypatch.setattr("coordinator.storage.status.time", WaitsAs(sleep))
    assert [found["phase"] for found in follow_status(fed.config.folder)] == ["serving", "stopped"]


def test_a_configuration_names_its_folder_and_a_folder_itself(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'federation = "x"\nbroker = "embedded"\nfolder = "run"\n[model]\nname = "digits-mlp"\n'
        '[[runs]]\nmethod = "fedavg"\nnum-rounds = 1\n'
    )
    assert run_folder_of(config) == tmp_path / "run"
    assert run_folder_of(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match=r"there is no run in .* yet\n\nhint: `serve` makes it when it starts"):
        read_status(tmp_path)
    with pytest.raises(ConfigError, match=r"does not exist\n\nhint: .* made by `serve`.* TOML file"):
        run_folder_of(tmp_path / "run")


def test_a_watch_of_a_configuration_waits_for_the_run_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    waits: Iterator[Callable[[], object]] = iter([lambda: None, lambda: Federation.of(tmp_path).start(1)])
    monkeypatch.setattr("coordinator.storage.status.time", WaitsAs(lambda _: next(waits)()))
    folder = tmp_path / "run"
    await_run(folder, told.append)
    assert told == [f"there is no run in {folder} yet; waiting for `serve`, which makes it when it starts"]


def test_a_device_that_will_not_train_is_shown_with_what_it_said_of_itself(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.5)
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: len(spy.said("ack")) == 3)
    task = spy.said("task", cid="d03")[0]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    hot = "cpu-thermal is at 84 °C, more than 80 °C"
    spy.say("d03", "nack", re=task["id"], **key, code="unavailable", detail=hot, retry_ms=120_000)
    fed.world.run(lambda: read_status(fed.config.folder)["runs"][0]["refused"] != {})
    told = [line for line in status_lines(read_status(fed.config.folder)) if "d03" in line]
    assert f"  d03 did not count: unavailable: {hot}" in told


def test_runtimes_that_compute_wrongly_are_told_with_their_versions_and_such_a_device_is_not_waited_for(
    tmp_path: Path,
) -> None:
    fed = Federation.of(tmp_path, quorum=0.5)
    fed.start_coordinator()
    wrong = {"engine": "onnx", "runtime": "onnxruntime 1.23.2", "difference": 0.5}
    fed.start_mute_device("d04", runtime="onnxruntime 1.23.2", refused=[wrong])
    fed.start_mute_device("d05", n=0, engine="litert", runtime="ai-edge-litert 2.3.0", refused=[wrong])
    fed.world.run(lambda: fed.world.clock.time_s > 10.0)  # they have announced themselves to the coordinator
    fed.start_devices(4)
    fed.world.run(lambda: fed.happened("round"))
    found = read_status(fed.config.folder)
    said = "onnxruntime 1.23.2 computes wrongly (off by 5.0e-01)"
    assert found["runtimes"] == {
        "d04": f"{said}; no other engine is left",
        "d05": f"{said}; it uses ai-edge-litert 2.3.0",
    }
    assert f"  d04: {said}; no other engine is left" in status_lines(found)
    assert f"  clients: fedcenters-edge {__version__} on 4 devices" in status_lines(found)
    hostile = status_lines(found | {"clients": {"\x1b[2J\nlast error: none": 1}})
    (told,) = (line for line in hostile if line.startswith("  clients: "))
    assert told.isprintable()
    assert found["devices"] == 4
    counted = "6 devices connected (1 not in the training), 4 take part in the training; "
    assert counted in "\n".join(status_lines(found))


@pytest.mark.parametrize(
    ("phase", "connected", "said"),
    [
        ("compiling", 2, "2 devices connected, 2 wait for the training program to be compiled; "),
        ("waiting for devices", 1, "1 device connected, 1 waits for the first round; "),
        ("compiling", 0, "0 devices connected, 0 take part in the training; "),
    ],
)
def test_before_the_first_round_devices_wait_for_it(tmp_path: Path, phase: str, connected: int, said: str) -> None:
    found = read_status(Federation.of(tmp_path).play().config.folder)
    begun = found | {"phase": phase, "devices": 0, "connected": connected, "without_samples": 0, "done": False}
    assert said in "\n".join(status_lines(begun))


@pytest.mark.parametrize(("later_s", "said"), [(60, "%H:%M"), (86_400 * 2, "%Y-%m-%d %H:%M")])
def test_the_traffic_is_that_since_the_coordinators_last_start(tmp_path: Path, later_s: int, said: str) -> None:
    fed = Federation.of(tmp_path).play()
    found = read_status(fed.config.folder)
    assert 0 < found["since_ms"] <= found["unix_ms"]
    since = time.strftime(said, time.localtime(found["since_ms"] / 1000))
    found["unix_ms"] = found["since_ms"] + 1000 * later_s
    assert f" up since the coordinator's start at {since}" in status_lines(found)[1]


def test_before_the_first_start_there_is_no_time_of_it(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path).play()
    (fed.config.folder / STATUS_FILE).unlink()
    assert status_lines(read_status(fed.config.folder))[1].endswith("; 0 bytes down, 0 bytes up")


def test_a_coordinator_that_stopped_in_a_round_shows_nothing_of_that_moment(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start_devices(2)
    fed.start_mute_device("d02")
    fed.start_mute_device("d03")
    process = fed.start_coordinator()
    fed.world.run(lambda: fed.live_since(3.0))
    assert "\nnow: " in "\n".join(status_lines(read_status(fed.config.folder)))
    assert fed.server is not None
    fed.server.stop()
    fed.world.run(lambda: process.ended)
    found = read_status(fed.config.folder)
    assert (found["phase"], found["connected"], found["exchange"], found["runtimes"]) == ("stopped", 0, None, {})
    text = "\n".join(status_lines(found))
    assert "connected" not in text
    assert "now: " not in text
    assert "4 take part in the training; " in text
    fed.world.end()


def test_a_device_that_refused_is_not_also_shown_as_training(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.5)
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: len(spy.said("ack")) == 3 and fed.live_since(3.0))
    before = (fed.config.folder / STATUS_FILE).read_text()  # as written up to two seconds before a refusal
    task = spy.said("task", cid="d03")[0]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    spy.say("d03", "nack", re=task["id"], **key, code="unavailable", detail="hot", retry_ms=120_000)
    fed.world.run(lambda: read_status(fed.config.folder)["runs"][0]["refused"] != {})
    (fed.config.folder / STATUS_FILE).write_text(before)
    found = read_status(fed.config.folder)["exchange"]
    assert json.loads(before)["exchange"]["open"] == ["d03"]
    assert (found["open"], found["refused"]) == ([], ["d03"])
    fed.world.end()


def last_round(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = [e for e in map(json.loads, store.events.lines()) if e["event"] == "round"][-1]
    return found


@pytest.mark.parametrize(
    ("centers", "sizes", "warned"),
    [
        ([0, 0, 0, 1], "[3, 1]", "  center 1 has one device: a center learns from its own devices only"),
        ([0, 1, 2, 2], "[1, 1, 2]", "  2 centers (0, 1) have one device: a center learns from its own devices only"),
        ([0, 0, 1, 1], "[2, 2]", ""),
        ([0, 1, 2, 3], "[1, 1, 1, 1]", ""),  # as the method wants it
    ],
)
def test_centers_with_one_device_are_told(tmp_path: Path, centers: list[int], sizes: str, warned: str) -> None:
    fed = Federation.of(tmp_path).play()
    found = {"assignment": {f"d{i:02d}": k for i, k in enumerate(centers)}, "per_center": [0.5] * (max(centers) + 1)}
    with closing(Store(fed.config.folder / "store")) as store, store.database.transaction():
        insert_events(store.database, [last_round(store) | found])
    lines = status_lines(read_status(fed.config.folder))
    assert any(f"devices per center {sizes}, last round" in line for line in lines)
    assert [line for line in lines if "one device" in line] == ([warned] if warned else [])
