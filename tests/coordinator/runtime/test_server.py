"""The phases of a coordinator; tests/faults disturbs them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from coordinator.identity.revoked_list import REVOKED_FILE
from coordinator.strategies.baselines.fedavg import FedAvg
from edge_client.errors import ConfigError, NetworkError
from edge_client.protocol import messages
from tests.support import softmax_program
from tests.support.virtual_federation import BALLAST, TOPICS, Federation, Spy, config


def test_a_training_ends_with_centers_a_catalog_and_a_full_record(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST)
    fed.start(4)
    fed.finish()
    fed.world.end()
    folder = fed.config.folder
    assert sorted(p.name for p in (folder / "centers" / "fesem").iterdir()) == [
        "center-0.safetensors",
        "center-1.safetensors",
    ]
    assert messages.read_message(fed.world.broker.retained[TOPICS.catalog()], "cat")["ver"] == 1
    told = [json.loads(line)["event"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert told == ["start", "program", *["joined"] * 4, "round", "round", "run-done", "bundle", "done"]
    assert {r["device"] for r in fed.events if r["event"] == "joined"} == {"d00", "d01", "d02", "d03"}


def test_more_centers_than_devices_are_told_when_a_run_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Federation.of(tmp_path, devices=1).play(1)
    words = "fesem: clusters is 2, with 1 device: at least 1 center will have no device"
    assert caplog.messages.count(words) == 1


def test_runs_follow_each_other_over_the_same_fleet_and_the_first_is_served(tmp_path: Path) -> None:
    settings = {"local-steps": 2}
    runs = (
        RunConfig(method="fesem", rounds=1, name="centers", settings={**settings, "clusters": 2}),
        RunConfig(method="fedavg", rounds=2, name="global", settings=settings),
    )
    fed = Federation.of(tmp_path, runs=runs)
    fed.start(4)
    fed.finish()
    fed.world.end()
    assert [(r["run"], r["round"]) for r in fed.rounds()] == [("centers", 1), ("global", 1), ("global", 2)]
    bundle = next(event for event in fed.events if event["event"] == "bundle")
    assert (bundle["run"], [card["devices"] for card in bundle["centers"]]) == ("centers", [2, 2])


@pytest.mark.parametrize(
    ("method", "settings", "devices"),
    [("fedavg", {}, [4]), ("fedavg-plus", {"runs": 2}, [4, 4]), ("nonfed", {}, [0])],
)
def test_a_card_counts_the_devices_that_the_center_serves(
    tmp_path: Path, method: str, settings: dict[str, Any], devices: list[int]
) -> None:
    run = RunConfig(method=method, rounds=1, name=method, settings={"local-steps": 2, **settings})
    fed = Federation.of(tmp_path, runs=(run,))
    fed.start(4)
    fed.finish()
    fed.world.end()
    bundle = next(event for event in fed.events if event["event"] == "bundle")
    assert [card["devices"] for card in bundle["centers"]] == devices


def test_it_ends_by_itself_where_that_is_wanted(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, exit_when_done=True)
    process = fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: process.ended)
    fed.world.end()
    assert process.error is None
    assert messages.read_message(fed.world.broker.retained[TOPICS.coord()], "coord")["online"] is False


def test_too_few_devices_are_told_after_the_time_to_start(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, start_timeout_s=30.0)
    fed.start(3)
    with pytest.raises(NetworkError, match="3 of 4 devices came within 30 s"):
        fed.finish()
    fed.world.end()
    assert fed.events[-1]["event"] == "error"


def test_a_device_without_an_engine_that_was_compiled_is_not_waited_for(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, start_timeout_s=30.0, devices=1)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    caps = {"engine": "litert", "n": 10}
    spy.publish(TOPICS.state("d00"), messages.write_message("st", ident="x", t_ms=0, s="on", bd=1, caps=caps))
    with pytest.raises(NetworkError, match="engines that can train: onnx"):
        fed.finish()


def test_a_wrong_method_is_told_before_anything_is_done(tmp_path: Path) -> None:
    runs = (RunConfig(method="fedavg", rounds=1, name="x", settings={"learning-rat": 1}),)
    fed = Federation.of(tmp_path, runs=runs)
    fed.start_coordinator()
    with pytest.raises(ConfigError, match="learning-rat"):
        fed.finish()
    assert not (fed.config.folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [
        ("fedsgd", {}, "buffers"),
        ("cam", {}, "sum of 2 models"),
        ("fedavg", {"privacy-noise": 1.0}, "running statistics"),
        ("fedavg", {"secure": "updates", "least-members": 5}, "running statistics"),
        ("fesem", {"clusters": 1_025}, "1025 centers: messages and bundles have numbers for 1024"),
    ],
)
def test_a_later_run_that_the_model_does_not_suit_or_of_too_many_centers_is_told_before_the_first_round(
    method: str, settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """The first run's rounds were lost: the settings of a folder cannot change, and its centers come after all runs."""
    second = RunConfig(method=method, rounds=1, name="second", settings=settings)
    runs = (RunConfig(method="fedavg", rounds=1, name="first", settings={"local-steps": 2}), second)
    fed = Federation.of(tmp_path, runs=runs, devices=5, buffered=True)
    fed.start(5)
    with pytest.raises(ConfigError, match=told):
        fed.finish()
    assert not fed.happened("round")


class RoundOfItsOwn(FedAvg):
    """Nothing says that it adds the noise."""

    def round(self, *args: Any) -> Any:  # noqa: ANN401 - of FedAvg
        return super().round(*args)


def test_noise_that_a_method_may_ignore_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    """It was refused when the program had been compiled and the devices had come."""
    method = f"{__name__}:RoundOfItsOwn"
    runs = (RunConfig(method=method, rounds=1, name="x", settings={"privacy-noise": 1.0}),)
    fed = Federation.of(tmp_path, runs=runs, start_timeout_s=60.0)
    fed.start_coordinator()
    with pytest.raises(ConfigError, match="which has a `round` of its own"):
        fed.finish()
    assert not (fed.config.folder / "metrics.jsonl").exists()


def test_the_catalog_is_not_made_twice(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    first = fed.world.broker.retained[TOPICS.catalog()]
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.finish()
    fed.world.end()
    again = fed.world.broker.retained[TOPICS.catalog()]
    assert messages.read_message(first, "cat")["catalog"] == messages.read_message(again, "cat")["catalog"]
    assert [event["event"] for event in fed.events].count("bundle") == 1
    assert fed.progress[-1] == {"event": "serving"}


def _class_names(fed: Federation) -> tuple[str, ...]:
    return () if fed.catalog is None else fed.catalog.class_names


def test_the_catalog_has_the_names_of_the_classes_also_those_of_a_later_start(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, class_names=("low", "high"))
    fed.start(4)
    fed.finish()
    assert _class_names(fed) == ("low", "high")
    fed.world.kill("coordinator.0")
    fed.config = config(fed.config.folder, class_names=("low", "middle", "high"))
    fed.start_coordinator()
    fed.finish()
    fed.world.end()
    assert _class_names(fed) == ("low", "middle", "high")


def test_a_later_start_that_names_another_run_publishes_its_centers(tmp_path: Path) -> None:
    """Settings of what is published may change at each start; the centers of the first run stayed on offer."""
    fed = Federation.of(tmp_path, runs=(*config(tmp_path).runs, RunConfig(method="fedavg", rounds=1, name="fedavg")))
    fed.start(4)
    fed.finish()
    assert fed.catalog is not None
    assert len(fed.catalog.centers) == 2
    for start in range(2):  # and once only
        fed.world.kill("coordinator.0")
        fed.config = config(fed.config.folder, runs=fed.config.runs, bundle_run="fedavg")
        fed.start_coordinator()
        fed.finish()
        assert len(fed.catalog.centers) == 1
        assert [event["run"] for event in fed.events if event["event"] == "bundle"] == ["fesem", "fedavg"], start
    fed.world.end()


def test_more_devices_are_asked_than_wanted_and_those_who_come_too_late_are_stopped(tmp_path: Path) -> None:
    settings = {"local-steps": 2, "fraction-train": 0.5, "batch-size": 8}
    run = RunConfig(method="fedavg", rounds=2, name="fedavg", settings=settings)
    fed = Federation.of(tmp_path, runs=(run,), devices=4, over_select=2.0, quorum=1.0, deadline_s=300.0)
    spy = Spy(fed.world.broker)
    fed.start(3)
    fed.start_mute_device("d03")  # it is asked, and nobody waits for it; a test waits for everybody
    fed.world.run(lambda: bool(spy.said("stop")))
    assert fed.world.clock.time_s < 60.0
    assert len([task for task in spy.said("task") if task["round"] == 1 and task["job"] == "fit"]) == 4
    counted = [ack for ack in spy.said("ack") if ack["status"] == "ok"]
    assert len(counted) == 2
    assert {message["why"] for message in spy.said("stop")} == {"the exchange is closed"}


def test_over_selection_leaves_an_exchange_alone_that_needs_everybody(tmp_path: Path) -> None:
    settings = {"local-steps": 2, "fraction-train": 0.5, "batch-size": 8, "clusters": 2}
    run = RunConfig(method="fedsoft", rounds=1, name="fedsoft", settings=settings)
    fed = Federation.of(tmp_path, runs=(run,), devices=4, over_select=2.0, quorum=1.0, deadline_s=300.0)
    spy = Spy(fed.world.broker)
    fed.start(4)
    fed.finish()
    fed.world.end()
    counted = Counter(ack["exchange"] for ack in spy.said("ack") if ack["status"] == "ok")
    # starts of groups, votes, fits of the cohort, the test of the served models, that of the centers
    assert counted == {0: 4, 1: 4, 2: 2, 3: 4, 4: 4}


def test_an_exchange_is_not_begun_before_enough_devices_are_connected(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=4, fraction_connected=1.0, quorum=0.5, deadline_s=100.0)
    fed.start(4)
    fed.world.run(lambda: fed.live is not None)
    fed.world.kill("d03")
    with pytest.raises(NetworkError, match=r"3 of 4 devices were connected for round 1[\s\S]*fraction-connected"):
        fed.finish()
    fed.start_coordinator()
    fed.start_device("d03", softmax_program.grouped_fleet(4, 2)["d03"])
    fed.finish()


def test_too_few_connected_devices_do_not_stop_a_run_that_is_to_continue(tmp_path: Path) -> None:
    fed = Federation.of(
        tmp_path, devices=4, fraction_connected=1.0, quorum=0.5, deadline_s=50.0, below_quorum="continue"
    )
    fed.start(4)
    fed.world.run(lambda: fed.happened("joined") and fed.live_since(0.1))
    fed.world.kill("d03")
    fed.finish()
    fed.world.end()
    assert len(fed.rounds()) == 2


def test_a_device_that_is_revoked_while_its_connection_is_waited_for_is_waited_for_no_longer(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=4, fraction_connected=1.0, quorum=0.5, deadline_s=100.0)
    fed.start(4)
    fed.world.run(lambda: fed.live is not None)
    fed.world.kill("d03")
    fed.world.run(lambda: fed.live_since(10.0) and fed.live is None)
    (fed.config.folder / REVOKED_FILE).write_text("d03\n")
    fed.finish()
    assert fed.world.clock.time_s < 2 * 100.0  # the first exchange waited for its deadline


def test_no_exchange_begins_in_a_pause_that_came_while_devices_were_waited_for(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=4, fraction_connected=1.0, quorum=0.5, deadline_s=100.0)
    fed.start(4)
    fed.world.run(lambda: fed.live is not None)
    fed.world.kill("d03")
    fed.world.run(lambda: fed.live_since(10.0) and fed.live is None)
    assert fed.server is not None
    fed.server.pause()
    paused_s = fed.world.clock.time_s
    fed.start_device("d03", softmax_program.grouped_fleet(4, 2)["d03"])
    fed.world.run(lambda: fed.live is not None or fed.world.clock.time_s > paused_s + 300.0)
    assert fed.live is None
    fed.server.resume()
    fed.finish()


def test_a_device_hears_of_no_compiling_when_a_coordinator_with_a_stored_program_starts_again(tmp_path: Path) -> None:
    """ "waiting: the coordinator compiles the training program" stayed its last line until its next task."""
    fed = Federation.of(tmp_path)
    fed.start()
    fed.world.run(lambda: fed.live is not None)
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.finish()
    assert [event for told in fed.told.values() for event in told if event.get("doing") == "compile"] == []


def test_a_coordinator_that_starts_again_says_nothing_before_it_hears_the_answers(tmp_path: Path) -> None:
    """Its first tasks came before its subscription: what a device said at once was lost, and said again much later."""
    fed = Federation.of(tmp_path)
    fed.start()
    fed.world.run(lambda: fed.live is not None)
    fed.world.kill("coordinator.0")
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.finish()
    again = [record for record in spy.records() if record["epoch"] == 2]
    assert again[0]["link"] == 1  # as each connection of the coordinator is called once it has subscribed
    first = spy.said("task")[0]
    assert (first["epoch"], int(first["id"].split("-")[1]) > int(again[0]["id"].split("-")[1])) == (2, True)
    fed.world.end()
