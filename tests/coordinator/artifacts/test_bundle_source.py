"""What a coordinator's folder tells a bundle: the program, the centers, and a card for each."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.artifacts import bundle_source
from coordinator.config_sections import RunConfig
from coordinator.storage.run_reader import read_program
from edge_client.errors import ConfigError
from edge_client.protocol.signing import public_key, verify_bundle
from export.bundle.bundle_contents import BundleNames, NewcomerData, find_run_reader
from export.bundle.model_cards import markdown, program_facts
from export.bundle.writer import BundleOptions, write_bundle
from tests.support.virtual_federation import Federation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four devices of two groups, two rounds."""
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    return fed.config.folder


def test_the_folder_is_known_by_what_it_holds(run: Path, tmp_path: Path) -> None:
    assert find_run_reader(run).is_run_folder(run)
    assert not bundle_source.is_run_folder(tmp_path / "elsewhere")


def test_a_folder_that_is_not_there_is_told_as_verify_and_report_tell_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_run_reader(tmp_path / "nowhere")


def test_every_center_has_a_card_of_its_devices(run: Path) -> None:
    found = bundle_source.bundle_source(run, method="", engines=(), data=None)
    assert found.program == read_program(run)
    assert len(found.centers) == len(found.cards)
    assert all(center.shape == (found.program.schema.size,) for center in found.centers)
    assert sum(card["devices"] for card in found.cards) == 4
    for card in found.cards:
        assert (card["method"], card["rounds"]) == ("fesem", 2)
        assert card["accuracy"]["devices"] == card["devices"]
        assert 0 <= card["accuracy"]["min"] <= card["accuracy"]["median"] <= card["accuracy"]["max"] <= 1
        assert card["labels"]["of"] == "held-out samples"
        assert np.sum(card["labels"]["counts"]) > 0


def test_the_card_of_a_run_that_goes_on_is_of_the_end_that_its_centers_are_of(run: Path) -> None:
    """With more rounds than before it tests again, and what devices are served then is not what the folder has."""
    before = bundle_source.bundle_source(run, method="", engines=(), data=None).cards
    told = bundle_source.last_round(run, "fesem")
    later = {**told, "round": 3, "of": 5, "assignment": {}, "per_device": dict.fromkeys(told["per_device"], 0.0)}
    with closing(sqlite3.connect(run / "store" / "coordinator.sqlite")) as db, db:
        db.execute("insert into events (line) values (?)", (json.dumps(later),))
    assert bundle_source.bundle_source(run, method="", engines=(), data=None).cards == before


def test_of_a_long_run_one_record_is_in_memory(run: Path) -> None:
    """All were, at its end: of 10,000 devices and 1,000 rounds a gigabyte of text, and what it becomes in Python."""
    told = bundle_source.last_round(run, "fesem")
    size = 100_000
    long = json.dumps({**told, "round": 1, "refused": {"d00": "x" * size}})
    with closing(sqlite3.connect(run / "store" / "coordinator.sqlite")) as db, db:
        db.executemany("insert into events (line) values (?)", [(long,)] * 100 + [(json.dumps(told),)])
    tracemalloc.start()
    try:
        assert bundle_source.last_round(run, "fesem") == told
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 10 * size


def test_where_choices_are_hidden_a_card_has_the_number_of_devices_that_was_summed_and_none_is_guessed(
    tmp_path: Path,
) -> None:
    """Each device is served center 0 as far as the server knows; the sums say that each center has six of twelve."""
    settings = {"clusters": 2, "local-steps": 3, "batch-size": 8, "secure": "updates+membership", "secure-clip": 10.0}
    fed = Federation.of(tmp_path, devices=12, runs=(RunConfig(method="ifca", rounds=2, name="r", settings=settings),))
    fed.start()
    fed.complete()
    cards = next(event for event in fed.events if event["event"] == "bundle")["centers"]
    assert [card["devices"] for card in cards] == [6, 6]
    assert all("samples" not in card for card in cards)
    found = bundle_source.bundle_source(fed.config.folder, method="", engines=(), data=None)
    for card in found.cards:
        assert not {"devices", "samples"} & card.keys()
        assert "unknown devices with unknown training samples" in markdown({**card, **program_facts(found.program)})


def test_its_bundles_are_signed_with_the_federations_key(run: Path) -> None:
    found = bundle_source.bundle_source(run, method="", engines=(), data=None)
    assert found.sign is not None
    key = public_key(bytes.fromhex((run / "signing.key").read_text().strip()))
    assert verify_bundle(b"manifest", found.sign(b"manifest").encode(), [key]) == "test"


def test_what_newcomers_are_told_is_of_these_centers_or_left_out(run: Path) -> None:
    """With several runs in a folder its own bundle is that of the last one."""
    found = bundle_source.bundle_source(run, method="", engines=(), data=None)
    start = found.centers[0] + np.float32(1)
    known = NewcomerData(start=start)
    for centers, kept in ((found.centers, True), ([start] * len(found.centers), False)):
        write_bundle(run / "bundle", replace(found, centers=centers, newcomers=known), BundleOptions(formats=()))
        again = bundle_source.bundle_source(run, method="", engines=(), data=None).newcomers
        assert (again.start is not None and np.array_equal(again.start, start)) == kept


def test_its_bundles_have_the_class_names_of_the_last_start_and_not_those_of_its_own_bundle(run: Path) -> None:
    found = bundle_source.bundle_source(run, method="", engines=(), data=None)
    write_bundle(run / "bundle", replace(found, names=BundleNames(classes=("low", "high"))), BundleOptions(formats=()))
    (run / "config.toml").write_text('class-names = ["low", "middle", "high"]\n')
    again = bundle_source.bundle_source(run, method="", engines=(), data=None)
    assert again.names.classes == ("low", "middle", "high")


def test_devices_samples_stayed_with_them(run: Path) -> None:
    assert bundle_source.held_out(run, data=None) is None
    assert bundle_source.calibration(run, data=None) is None


def test_a_run_that_is_not_there_is_named_with_those_that_are(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"no centers of ifca[\s\S]*fesem"):
        bundle_source.bundle_source(run, method="ifca", engines=(), data=None)


def test_of_several_runs_it_is_the_one_that_the_coordinator_publishes(run: Path) -> None:
    """FeSEM stands before FedAvg in the file, and behind it in the alphabet."""
    shutil.copytree(run / "centers" / "fesem", run / "centers" / "fedavg")
    other = {**bundle_source.last_round(run, "fesem"), "run": "fedavg", "method": "fedavg"}
    with closing(sqlite3.connect(run / "store" / "coordinator.sqlite")) as db, db:
        db.execute("insert into events (line) values (?)", (json.dumps(other),))
    runs = '[[runs]]\nmethod = "fesem"\n[[runs]]\nmethod = "fedavg"\n'
    for asked, published in (("", "fesem"), ('bundle-run = "fedavg"\n', "fedavg")):
        (run / "config.toml").write_text(asked + runs)
        cards = bundle_source.bundle_source(run, method="", engines=(), data=None).cards
        assert {card["method"] for card in cards} == {published}


def test_a_bundle_is_signed_with_the_key_of_the_runs_signing_folder(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (run / "signing.key").rename(keys / "signing.key")
    (run / "config.toml").write_text(f'signing-folder = "{keys}"\n')
    found = bundle_source.bundle_source(run, method="", engines=(), data=None)
    key = public_key(bytes.fromhex((keys / "signing.key").read_text().strip()))
    assert found.sign is not None
    assert verify_bundle(b"manifest", found.sign(b"manifest").encode(), [key]) == "test"
    assert not caplog.messages
    (keys / "signing.key").unlink()
    assert bundle_source.bundle_source(run, method="", engines=(), data=None).sign is None
    assert f"{keys / 'signing.key'} cannot be read: No such file" in caplog.text
    assert list(keys.iterdir()) == []
