"""Tasks on the wire: what the device does is what the method asked."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol import codecs, messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.task import (
    FIT_BUFFERS,
    MAX_BETA,
    OWN_MODEL,
    PROBE_BUFFERS,
    PROBE_QUANTITIES,
    Fit,
    Flat,
    Optimiser,
    OwnModel,
    Probe,
)
from edge_client.protocol.task_codec import (
    container_functions,
    read_task,
    task_fields,
    task_manifests,
    without_unneeded_inits,
)
from tests.support.sample_messages import SCHEMA, TASK


class BlobShelf:
    """A store of blobs in a dictionary; counts what is asked of it."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []

    def put(self, flat: Flat, kind: str) -> Manifest:
        data = codecs.encode_vector(flat, SCHEMA, codec="f32", kind=kind)
        manifest = manifest_of(data, kind)
        self.blobs[manifest.sha256] = data
        return manifest

    def get(self, manifest: Manifest) -> Flat:
        self.asked.append(manifest.sha256)
        return codecs.decode_vector(self.blobs[manifest.sha256], SCHEMA, kind=manifest.kind)


def vector(fill: float) -> Flat:
    return np.full(SCHEMA.size, fill, np.float32)


def over_the_wire(task: Fit | Probe, shelf: BlobShelf, base: str = "zero") -> dict[str, Any]:
    reply = {"codec": "f32", "base": base, "max_size": 1 << 20}
    job = task_fields(task, shelf.put)
    files = dict.fromkeys(container_functions(job), TASK["container"])
    sent = messages.write_message("task", ident="x", t_ms=0, epoch=1, **{**TASK, "reply": reply, **job, **files})
    return messages.read_message(sent, "t")


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, np.asarray(b))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, OwnModel) and isinstance(b, OwnModel):
        return a.slot == b.slot and same(a.init, b.init)
    return a == b


OPTIMISERS = st.builds(
    Optimiser,
    name=st.just("sgd"),
    momentum=st.floats(0.1, 1),
    nesterov=st.booleans(),
    weight_decay=st.floats(0, 1),
    clip_norm=st.floats(0, 1e9),
) | st.builds(
    Optimiser,
    name=st.sampled_from(["adam", "adamw"]),
    beta1=st.floats(0, MAX_BETA),
    beta2=st.floats(0, MAX_BETA),
    eps=st.floats(1e-16, 1),
    weight_decay=st.floats(0, 1),
    clip_norm=st.floats(0, 1e9),
)
FITS = st.builds(
    Fit,
    start=st.sampled_from([vector(1), OWN_MODEL]),
    init=st.sampled_from([None, vector(2)]),
    anchor=st.sampled_from([vector(3), vector(1)]),
    linear=st.sampled_from([None, vector(4)]),
    lr=st.floats(0, 10),
    momentum=st.floats(0, 1),
    mu=st.floats(0, 10),
    steps=st.integers(1, 1_000_000),
    batch=st.integers(1, 65_536),
    seed=st.integers(0, 2**53 - 1),
    rows=st.sampled_from(["ones", "posterior:3"]),
    slot=st.sampled_from(["main", "center-1"]),
    upload=st.booleans(),
    buffers=st.sampled_from(sorted(FIT_BUFFERS)),
)
FITS |= st.builds(lambda fit, optimiser: replace(fit, momentum=0.0, optimiser=optimiser), FITS, OPTIMISERS)
PROBES = st.builds(
    Probe,
    models=st.permutations([vector(1), vector(2), OwnModel(init=vector(3)), OwnModel(slot="personal")]).map(
        lambda models: models[:3]
    ),
    want=st.sampled_from([frozenset({"grad"}), frozenset({"labels"})])
    | st.frozensets(st.sampled_from(sorted(PROBE_QUANTITIES - {"grad", "labels"})), min_size=1),
    batch=st.integers(1, 65_536),
    seed=st.integers(0, 2**53 - 1),
    prior=st.sampled_from([None, [0.25, 0.25, 0.5]]),
    split=st.sampled_from(["train", "test"]),
    limit=st.sampled_from([None, 100]),
    buffers=st.sampled_from(sorted(PROBE_BUFFERS)),
    label_totals=st.sampled_from([None, [[3, 0.125], None, [1, 2]]]),
)
PROBES |= st.builds(lambda probe: replace(probe, want=frozenset({"loss"}), least=True), PROBES)


@given(FITS | PROBES)
def test_a_task_arrives_as_it_was_asked(task: Fit | Probe) -> None:
    shelf = BlobShelf()
    arrived = read_task(over_the_wire(task, shelf), shelf.get)
    assert type(arrived) is type(task)
    assert [f.name for f in fields(task) if not same(getattr(task, f.name), getattr(arrived, f.name))] == []


@given(FITS | PROBES)
def test_a_device_fetches_each_blob_once(task: Fit | Probe) -> None:
    shelf = BlobShelf()
    message = over_the_wire(task, shelf)
    read_task(message, shelf.get)
    assert sorted(shelf.asked) == sorted(m.sha256 for m in task_manifests(message)) == sorted(shelf.blobs)


@given(FITS | PROBES)
def test_the_same_task_gives_the_same_bytes(task: Fit | Probe) -> None:
    one, two = (messages.canonical_json(task_fields(task, BlobShelf().put)) for _ in range(2))
    assert one == two


def test_the_model_that_stands_in_for_an_own_one_is_fetched_only_by_a_device_that_has_none() -> None:
    shelf, w = BlobShelf(), vector(1)
    own = [OwnModel(slot="a", init=vector(2)), OwnModel(slot="b", init=vector(3))]
    probe = over_the_wire(Probe(models=[w, *own], want=frozenset({"loss"}), batch=2, seed=0), shelf)
    fit = over_the_wire(Fit(start=OWN_MODEL, init=vector(2), steps=1, lr=0.1, batch=2, seed=0, slot="a"), shelf)
    kept = read_task(without_unneeded_inits(probe, {"a"}.__contains__), shelf.get)
    assert isinstance(kept, Probe)
    assert same(kept.models, [w, OwnModel(slot="a"), own[1]])
    assert len(task_manifests(without_unneeded_inits(probe, {"a", "b"}.__contains__))) == 1
    assert len(task_manifests(probe)) == 3
    assert task_manifests(without_unneeded_inits(fit, {"a"}.__contains__)) == []
    assert len(task_manifests(without_unneeded_inits(fit, {"b"}.__contains__))) == 1


def test_a_fit_from_a_sent_start_keeps_what_it_needs() -> None:
    fit = over_the_wire(Fit(start=vector(1), init=vector(2), steps=1, lr=0.1, batch=2, seed=0), BlobShelf())
    assert without_unneeded_inits(fit, lambda _: True) == fit


@pytest.mark.parametrize("slot", ["", "A", "a/b", "..", "x" * 33, "x" * 5_000, "a\n"])
def test_a_slot_is_a_short_plain_name(slot: str) -> None:
    for make in (
        lambda: OwnModel(slot=slot),
        lambda: Fit(start=OWN_MODEL, steps=1, lr=0.1, batch=2, seed=0, slot=slot),
    ):
        with pytest.raises(ValueError, match="slot must have the form"):
            make()


def test_an_anchor_that_is_the_start_is_named_and_stays_one_array() -> None:
    start, shelf = vector(1), BlobShelf()
    message = over_the_wire(Fit(start=start, anchor=start, mu=1, steps=1, lr=0.1, batch=2, seed=0), shelf, "start")
    assert message["anchor"] == "start"
    task = read_task(message, shelf.get)
    assert isinstance(task, Fit)
    assert task.anchor is task.start


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    three, four, prior = np.array([3, 4, 1.0])
    fit = Fit(start=vector(1), steps=1, lr=np.float64(three), momentum=prior, batch=2, seed=0)
    probe = Probe(models=[vector(1)], want=frozenset({"loss"}), batch=int(three), seed=int(four), prior=[prior])
    assert over_the_wire(fit, BlobShelf())["lr"] == 3.0
    fields = over_the_wire(probe, BlobShelf())
    assert (fields["batch"], fields["seed"], fields["prior"]) == (3, 4, [1.0])


def test_vectors_of_two_sizes_are_a_bad_task() -> None:
    shelf = BlobShelf()
    message = over_the_wire(Fit(start=vector(1), anchor=vector(2), steps=1, lr=0.1, batch=2, seed=0), shelf)
    sizes = iter((3, 4))
    with pytest.raises(Malformed, match=r"^bad_task: "):
        read_task(message, lambda _: np.zeros(next(sizes)))


@pytest.mark.parametrize(
    ("want", "buffers", "files"),
    [
        ({"grad"}, "sent", {"container": "step"}),
        ({"grad"}, "batch", {"container": "step"}),
        ({"loss"}, "own", {"container": "evaluate"}),
        ({"confusion", "votes"}, "sent", {"container": "evaluate"}),
        ({"confusion"}, "batch", {"container": "evaluate", "step": "step"}),
    ],
)
def test_a_probe_names_the_functions_that_it_needs(want: set[str], buffers: str, files: dict[str, str]) -> None:
    probe = Probe(models=[vector(1)], want=frozenset(want), batch=1, seed=0, buffers=buffers)
    assert container_functions(task_fields(probe, BlobShelf().put)) == files


def test_statistics_of_a_batch_without_the_file_of_a_step_are_a_bad_task() -> None:
    job = task_fields(Probe(models=[vector(1)], want=frozenset({"loss"}), batch=1, seed=0), BlobShelf().put)
    reply = {"codec": "f32", "base": "zero", "max_size": 1 << 20}
    with pytest.raises(Malformed, match="need the step's file"):
        messages.write_message(
            "task", ident="x", t_ms=0, epoch=1, **{**TASK, "reply": reply, **job, "buffers": "batch"}
        )


def test_a_gradient_is_not_asked_for_beside_anything_else() -> None:
    with pytest.raises(ValueError, match="alone"):
        Probe(models=[vector(1)], want=frozenset({"grad", "loss"}), batch=1, seed=0)
