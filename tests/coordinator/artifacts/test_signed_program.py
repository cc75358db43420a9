"""The training program is compiled for an engine when a device asks for it, and stays one program."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.artifacts.signed_program import PROGRAM_FACT, prepare_program
from coordinator.config_sections import ModelConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.training_fleet import TrainingFleet
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.errors import ConfigError
from tests.support.virtual_federation import config


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "store")) as made:
        yield made


def test_an_engine_that_is_asked_for_later_is_added_to_the_same_program(store: Store, tmp_path: Path) -> None:
    settings = config(tmp_path, model=ModelConfig(name="linear-regression", engines=("onnx", "litert", "pt2")))
    key, told = open_signing_key(tmp_path), list[str]()

    def prepared(*engines: str) -> Any:  # noqa: ANN401 - a CompiledProgram
        told.clear()
        return prepare_program(settings, store, key, engines, progress=told.append)

    first = prepared("pt2")
    assert list(first.program.containers) == ["pt2"]
    assert not any("litert" in part or "onnx" in part for part in told)
    both = prepared("pt2", "onnx")
    assert not any("pt2" in part for part in told)
    assert sorted(both.program.containers) == ["onnx", "pt2"]
    assert both.program.containers["pt2"] == first.program.containers["pt2"]
    assert both.program.schema == first.program.schema
    assert both.program.golden.keys() == both.program.parity.keys() == {"pt2", "onnx"}
    assert np.array_equal(both.initial, first.initial)
    again = prepared("onnx")
    assert (told, again.manifest.sha256) == ([], both.manifest.sha256)  # nothing is compiled twice
    other = config(tmp_path, model=ModelConfig(name="digits-mlp", engines=("litert",)))
    with pytest.raises(ConfigError, match="is not the one that this federation's program was compiled from"):
        prepare_program(other, store, key, ["litert"])


def test_after_the_training_it_is_told_what_each_further_engine_is_for(store: Store, tmp_path: Path) -> None:
    """A run with `engines` and `formats` of ONNX alone was silent about why it compiled pt2."""
    model = ModelConfig(name="linear-regression", engines=("onnx",))
    settings, told = config(tmp_path, model=model, formats=("onnx",)), list[str]()
    prepare_program(settings, store, open_signing_key(tmp_path), ["onnx"], progress=told.append)
    assert told[0] == "model linear-regression for onnx"
    told.clear()
    more: dict[str, Any] = {"trained": True, "progress": told.append}
    prepare_program(settings, store, open_signing_key(tmp_path), settings.compiled_engines, **more)
    assert told[0] == "model linear-regression for pt2; the bundle's files are made from pt2"
    told.clear()
    wider = config(tmp_path, model=ModelConfig(name="linear-regression", engines=("litert",)))
    prepare_program(wider, store, open_signing_key(tmp_path), ["litert"], **more)
    assert told[0].endswith("for litert; devices that never trained may have any of `engines`")


def test_the_program_is_compiled_for_what_devices_ask_for_before_they_take_part(store: Store, tmp_path: Path) -> None:
    presence, asked = FleetPresence(10), list[list[str]]()
    born = {"s": "on", "bd": 1}

    def come(cid: str, engine: str, **caps: Any) -> None:  # noqa: ANN401 - JSON
        presence.update(cid, {**born, "caps": {"engine": engine, "n": 5, **caps}})

    def compile_for(engines: Collection[str]) -> None:
        asked.append(list(engines))
        if len(asked) == 1:
            come("b", "litert")  # while the compiler works

    log = EventLog(tmp_path / "metrics.jsonl", store.events, lambda _: None, lambda: 0)
    devices = TrainingFleet(store, presence, ("onnx", "litert", "pt2"), log, compile_for)
    come("a", "onnx")
    devices.enrol()
    assert asked == [["onnx"], ["litert", "onnx"]]
    assert sorted(devices.members) == ["a", "b"]
    come("c", "pt2")
    come("d", "tflite")  # an engine that the configuration does not have is left out
    devices.let_in("run", 2)
    assert asked[-1] == ["litert", "onnx", "pt2"]
    assert sorted(devices.members) == ["a", "b", "c"]


def test_a_device_whose_engine_computes_wrongly_gets_every_other(store: Store, tmp_path: Path) -> None:
    presence, asked = FleetPresence(10), list[list[str]]()
    log = EventLog(tmp_path / "metrics.jsonl", store.events, lambda _: None, lambda: 0)
    devices = TrainingFleet(store, presence, ("onnx", "litert"), log, lambda engines: asked.append(list(engines)))
    presence.update("a", {"s": "on", "bd": 1, "caps": {"engine": "onnx", "n": 5}})
    devices.enrol()
    refused = [{"engine": "onnx", "runtime": "onnxruntime 1.19", "difference": 0.5}]
    presence.update("a", {"s": "on", "bd": 1, "caps": {"engine": "onnx", "n": 5, "refused": refused}})
    devices.let_in("run", 2)
    assert asked == [["onnx"], ["litert", "onnx"]]


def test_more_names_than_the_model_has_classes_are_refused(store: Store, tmp_path: Path) -> None:
    named = config(tmp_path, model=ModelConfig(name="digits-mlp"), class_names=tuple("abcdefghijk"))
    with pytest.raises(ConfigError, match="class-names has 11 names, the model 10 classes"):
        prepare_program(named, store, open_signing_key(tmp_path), ["pt2"])
    assert store.facts.get(PROGRAM_FACT) is None  # the next start may name another model
