"""Tries to have a device train from, or hand out, a model that the federation's coordinator did not sign.

Who controls the broker could otherwise send a model that makes its update give away the samples behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_client.errors import Malformed
from edge_client.protocol import messages, signing
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.task import Probe
from tests.edge_client.nearest.test_over_mqtt import catalog_of
from tests.support.scripted_coordinator import FEDERATION, PRIVATE, TRUSTED, DeviceStage, Script

NEXT = bytes(range(1, 33))


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path)


def unsigned(manifest: Manifest) -> Manifest:
    return replace(manifest, key=None, sig=None)


def by_a_stranger(manifest: Manifest) -> Manifest:
    return signing.sign_manifest(manifest, bytes(32), FEDERATION)


def for_another_federation(manifest: Manifest) -> Manifest:
    return signing.sign_manifest(manifest, PRIVATE, "other")


def as_another_kind(manifest: Manifest) -> Manifest:
    other = "linear" if manifest.kind == "model" else "model"
    return replace(signing.sign_manifest(replace(manifest, kind=other), PRIVATE, FEDERATION), kind=manifest.kind)


def of_another_blob(manifest: Manifest) -> Manifest:
    return replace(manifest, sha256="0" * 64)


Forge = Callable[[Manifest], Manifest]
FORGERIES: tuple[Forge, ...] = (unsigned, by_a_stranger, for_another_federation, as_another_kind, of_another_blob)


def answer_to(stage: DeviceStage, **changes: Any) -> list[str]:  # noqa: ANN401 - JSON fields of a task
    """The codes of the refusals of a task whose fields were exchanged on the way."""

    def script() -> Script:
        task = stage.fit(anchor=stage.model(2), mu=0.1, linear=stage.model(3))
        yield
        stage.ask(task, **changes)
        yield 60

    stage.play(script())
    return [nack["code"] for nack in stage.said("nack")]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
@pytest.mark.parametrize(("field", "kind"), [("start", "model"), ("anchor", "model"), ("linear", "linear")])
def test_no_vector_of_a_task_is_taken_without_the_coordinators_signature(
    stage: DeviceStage, field: str, kind: str, forge: Forge
) -> None:
    forged = forge(stage.put(stage.model(9), kind))
    assert answer_to(stage, **{field: forged.to_json()}) == ["bad_signature"]
    assert forged.sha256 not in [get["sha256"] for get in stage.said("get")]
    assert stage.said("rdy") == []


@pytest.mark.parametrize("field", ["start", "anchor"])
def test_a_signed_linear_term_does_not_vouch_for_a_model_of_the_same_bytes(stage: DeviceStage, field: str) -> None:
    """Such a task names one blob twice, under two kinds; the signature is that of the last one."""
    term = stage.put(stage.model(9), "linear")
    model = unsigned(replace(term, kind="model"))
    assert answer_to(stage, **{field: model.to_json(), "linear": term.to_json()}) == ["bad_signature"]
    assert stage.said("rdy") == []


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_no_candidate_of_a_probe_is_tried_without_it(stage: DeviceStage, forge: Forge) -> None:
    probe = Probe(models=(stage.model(1), stage.model(2)), want=frozenset({"loss"}), batch=8, seed=0)
    forged = forge(stage.put(stage.model(9), "model"))

    stage.play_turns(
        lambda: stage.ask(probe, models=[stage.put(stage.model(1), "model").to_json(), forged.to_json()]), 60
    )
    assert stage.last("nack")["code"] == "bad_signature"


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_no_catalog_is_read_without_it(stage: DeviceStage, forge: Forge) -> None:
    catalog = catalog_of(stage, [stage.model(1)])
    manifest = forge(stage.blob(catalog.to_bytes(), "catalog"))

    def script() -> Script:
        message = messages.write_message("cat", ident="k", t_ms=0, epoch=1, ver=1, catalog=manifest)
        stage.desk.publish(stage.topics.catalog(), message, retain=True)
        yield

    with pytest.raises(Malformed, match="bad_signature"):
        stage.visit(script())
    assert stage.said("get") == []


def test_while_keys_change_what_either_signed_is_taken(tmp_path: Path) -> None:
    stage = DeviceStage(tmp_path, keys=(TRUSTED, signing.public_key(NEXT)))
    start = signing.sign_manifest(stage.put(stage.model(9), "model"), NEXT, FEDERATION)

    stage.play_turns(
        lambda: stage.ask(
            stage.fit(), start=start.to_json(), program=signing.sign_manifest(stage.manifest, NEXT, FEDERATION)
        ),
        60,
    )
    assert [rdy["what"] for rdy in stage.said("rdy")] == ["delta"]


def test_a_key_that_is_not_pinned_any_more_signs_nothing(tmp_path: Path) -> None:
    stage = DeviceStage(tmp_path, keys=(signing.public_key(NEXT),))

    stage.play_turns(lambda: stage.ask(stage.fit()), 60)
    assert stage.last("nack")["code"] == "bad_signature"
    assert stage.opened == []
