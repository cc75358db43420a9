"""Coordinators for the tests of the phone's page: one that trains with the phone alone, one whose model is known."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from coordinator.identity.signing_key import open_signing_key
from coordinator.storage.store import Store
from edge_client.protocol.messages import canonical_json
from tests.support import softmax_program
from tests.support.ports import free_port
from tests.support.process_fleet import FleetScene

RUN: dict[str, Any] = {"method": "fedavg", "num-rounds": 1, "local-steps": 1500, "learning-rate": 0.05}


def known_model(folder: Path, **changes: Any) -> Path:  # noqa: ANN401 - of the program's fields
    """A coordinator whose model is known and whose broker for browsers does not answer; `changes` are its program's."""
    open_signing_key(folder / "run")
    program = replace(softmax_program.program(), **changes)
    with closing(Store(folder / "run" / "store")) as store:
        named = store.blobs.put(canonical_json(program.to_json()))
        store.facts.put("program", json.dumps({"program": named, "initial": named}))
    table: dict[str, Any] = {
        "federation": "demo",
        "broker": f"mosquitto:{free_port()}",
        "web-port": free_port(),
        "folder": str(folder / "run"),
        "formats": [],
        "model": {"name": "digits-mlp", "engines": ["onnx"]},
        "runs": [{"method": "fedavg", "num-rounds": 1}],
    }
    path = folder / "coordinator.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def federation_of_one(testbed: FleetScene, **more: Any) -> Path:  # noqa: ANN401 - TOML values
    """A coordinator that trains with one device, which is the phone; -> its file. `more` are keys of it."""
    port = int(testbed.broker.rpartition(":")[2])
    testbed.start_coordinator(broker=f"mosquitto:{port}", devices=1, web_port=free_port(), **more)
    return testbed.work / "coordinator.toml"
