from __future__ import annotations

from dataclasses import replace

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.catalog import MAX_CENTERS, Catalog, CatalogCenter, fitting_class_names
from edge_client.protocol.nearest.center_tree import CenterTree

MODEL = manifest_of(b"model", "model")
OTHER = manifest_of(b"other", "model")
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
    for one in (catalog(), catalog(0)):  # of devices that train alone
        assert Catalog.from_bytes(one.to_bytes()) == one
    assert catalog().to_bytes() == catalog().to_bytes()


def test_the_names_of_the_classes_are_read_back_and_those_without_a_place_are_left_out() -> None:
    named = replace(catalog(), class_names=("sitting", "gehen", "\u8d70"))
    assert Catalog.from_bytes(named.to_bytes()) == named
    assert b"classes" not in catalog().to_bytes()  # a catalog without names has the bytes that it always had
    most = ("n" * 64,) * 1024
    assert fitting_class_names(most) == most
    assert fitting_class_names(("n" * 65,)) == fitting_class_names(("n",) * 1025) == ()
    for wrong in (["n" * 65], ["n"] * 1025, [1], "names"):
        with pytest.raises(Malformed, match=r"^bad_field: catalog.classes"):
            Catalog.from_bytes(changed(classes=wrong))


def test_everything_that_it_names_can_be_fetched() -> None:
    assert {m.kind for m in catalog().blobs()} == {"program", "container", "model"}


def test_a_tree_is_read_back_with_the_models_of_its_splits_and_needs_one_of_each() -> None:
    tree = CenterTree(((0, 1), (0, ~0), (1, ~1), (1, ~2)), 3)
    with_tree = replace(catalog(), tree=tree, splits=(MODEL, OTHER))
    for one in (with_tree, replace(catalog(2), tree=CenterTree(((0, ~0), (0, ~1)), 2), splits=(MODEL,))):
        assert Catalog.from_bytes(one.to_bytes()) == one
    assert {MODEL, OTHER} <= set(with_tree.blobs())
    raw = parse_json(with_tree.to_bytes(), 1 << 20)["tree"]
    with pytest.raises(Malformed, match=r"^bad_field: a tree of 2 splits has 1 models"):
        Catalog.from_bytes(changed(tree=raw | {"splits": raw["splits"][:1]}))


def test_a_catalog_with_a_router_and_a_start_names_them_too_and_reads_them_back() -> None:
    router, start = manifest_of(b"router", "router"), manifest_of(b"start", "model")
    whole = replace(catalog(2), router=router, start=start, splits=())
    assert Catalog.from_bytes(whole.to_bytes()) == whole
    named = [whole.program, *whole.containers.values(), *2 * [MODEL, *FILES.values()], router, start]
    assert whole.blobs() == named
    raw = parse_json(whole.to_bytes(), 1 << 20)
    assert (raw["v"], raw["ver"], raw["abstain"], raw["sketches"]) == (1, 1, 2.0, None)
    for name, wrong in (("router", MODEL), ("start", router)):
        with pytest.raises(Malformed):
            Catalog.from_bytes(canonical_json(raw | {name: wrong.to_json()}))


def test_a_catalog_has_1024_centers_at_most_and_sixteen_files_of_each() -> None:
    most = replace(catalog(0), centers=(CatalogCenter(model=MODEL, devices=2**53 - 1, files={}),) * 1024)
    assert len(Catalog.from_bytes(most.to_bytes()).centers) == 1024
    one_more = replace(most, centers=(*most.centers, most.centers[0]))
    with pytest.raises(Malformed):
        Catalog.from_bytes(one_more.to_bytes())
    for count, read in ((16, True), (17, False)):
        files = {f"f{i}": FILES["onnx"] for i in range(count)}
        data = replace(catalog(0), centers=(CatalogCenter(model=MODEL, devices=0, files=files),)).to_bytes()
        if read:
            assert len(Catalog.from_bytes(data).centers[0].files) == count
        else:
            with pytest.raises(Malformed):
                Catalog.from_bytes(data)
    for name in ("a" * 17, "Onnx", ""):
        with pytest.raises(Malformed):
            Catalog.from_bytes(changed(container={name: FILES["onnx"].to_json()}))
    assert Catalog.from_bytes(changed(container={"a" * 16: FILES["onnx"].to_json()}))
    assert Catalog.from_bytes(changed(abstain=0)).abstain == 0.0


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
