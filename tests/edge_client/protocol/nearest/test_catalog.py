from __future__ import annotations

from dataclasses import replace

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.catalog import MAX_CENTERS, Catalog, CatalogCenter

MODEL = manifest_of(b"model", "model")
FILES = {"onnx": manifest_of(b"onnx", "container"), "tflite": manifest_of(b"tflite", "container")}


def catalog(centers: int = 3) -> Catalog:
    return Catalog(
        version=1,
        program=replace(manifest_of(b"program", "program"), key="0" * 16, sig="0" * 128),
        containers={"onnx": manifest_of(b"evaluate", "container")},
        centers=tuple(CatalogCenter(model=MODEL, devices=k, files=FILES) for k in range(centers)),
        abstain=2.0,
    )


def changed(**fields: object) -> bytes:
    return canonical_json({**parse_json(catalog().to_bytes(), 1 << 20), **fields})


def test_a_catalog_is_read_back_as_it_was_and_equal_ones_have_equal_bytes() -> None:
    assert Catalog.from_bytes(catalog().to_bytes()) == catalog()
    assert catalog().to_bytes() == catalog().to_bytes()


def test_everything_that_it_names_can_be_fetched() -> None:
    assert {m.kind for m in catalog().blobs()} == {"program", "container", "model"}


A_CENTER = parse_json(catalog().to_bytes(), 1 << 20)["centers"][0]


@pytest.mark.parametrize(
    "blob",
    [
        b"{}",
        b"[]",
        b"7",
        b'{"program":1}',
        changed(v=2),
        changed(program=MODEL.to_json()),
        changed(program={**MODEL.to_json(), "kind": "program"}),
        changed(container=[]),
        changed(container={"../onnx": FILES["onnx"].to_json()}),
        changed(centers=[{**A_CENTER, "id": 1}]),
        changed(centers=[A_CENTER, A_CENTER]),
        changed(centers=[{**A_CENTER, "files": {"onnx": MODEL.to_json()}}]),
        changed(centers=[{**A_CENTER, "devices": -1}]),
        changed(centers=[{**A_CENTER, "id": k} for k in range(MAX_CENTERS + 1)]),
        changed(abstain=-1),
        changed(abstain="much"),
    ],
)
def test_a_catalog_that_breaks_a_rule_is_malformed(blob: bytes) -> None:
    with pytest.raises(Malformed):
        Catalog.from_bytes(blob)
