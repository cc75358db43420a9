"""A bundle of a model with frozen parameters: merged files, the base once, and adapters as peft stores them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge_client.protocol.program import FROZEN, Adapter
from edge_client.protocol.task import Array
from export.bundle.bundle_contents import BundleSource
from export.bundle.reader import Bundle, read_bundle
from export.bundle.verify_centers import file_logits, torch_logits
from export.bundle.writer import BundleOptions, write_bundle
from export.compiler.program import load_vector, vector_of
from tests.support.programs import compiled, model

NAMES = {"base_model.model.one.lora_A.weight": "3.weight", "base_model.model.one.lora_B.weight": "3.bias"}
CONFIG = {"peft_type": "LORA", "r": 4, "inference_mode": True}


def centers() -> list[Array]:
    start = vector_of(model("frozen-body").module, compiled("frozen-body", engines=("onnx", "pt2")).program.schema)
    return [start, start + np.float32(0.3)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    made = compiled("frozen-body", engines=("onnx", "pt2"))
    program = replace(made.program, adapter=Adapter(config=CONFIG, tensors=NAMES))
    source = BundleSource(program=program, files=made.files, centers=centers(), cards=[{}, {}])
    out = tmp_path_factory.mktemp("run") / "bundle"
    write_bundle(out, source, BundleOptions(formats=("onnx", "tflite"), stacked=True))
    return read_bundle(out)


def test_the_base_is_there_once(bundle: Bundle) -> None:
    frozen = bundle.program.containers["onnx"][FROZEN].sha256
    assert [entry["path"] for entry in bundle.manifest["containers"]].count(f"program/{frozen}.safetensors") == 1
    assert frozen in bundle.files()


def test_every_center_is_a_merged_file_and_a_module(bundle: Bundle) -> None:
    x = np.random.default_rng(0).standard_normal((3, *bundle.program.input)).astype(np.float32)
    for k, vector in enumerate(centers()):
        mine = copy.deepcopy(model("frozen-body").module).eval()
        load_vector(mine, bundle.program.schema, vector)
        told = torch_logits(mine, x)
        for form, entry in bundle.manifest["centers"][k]["files"].items():
            np.testing.assert_allclose(file_logits(bundle.read(entry), form, x), told, atol=1e-4, err_msg=form)
        np.testing.assert_allclose(torch_logits(bundle.module(k), x), told, atol=1e-5)
        stacked = bundle.read(bundle.manifest["stacked"]["onnx"])
        np.testing.assert_allclose(file_logits(stacked, "onnx", x, k), told, atol=1e-4)


def test_an_adapter_has_pefts_names_and_settings(bundle: Bundle) -> None:
    for k, vector in enumerate(centers()):
        entry = bundle.manifest["centers"][k]["adapter"]
        assert json.loads(bundle.read(entry["config"])) == CONFIG
        assert {Path(file["path"]).parent.name for file in entry.values()} == {"adapter"}
        held, values = load_file(bundle.root / entry["model"]["path"]), bundle.program.schema.split(vector)
        assert held.keys() == NAMES.keys()
        for key, name in NAMES.items():
            np.testing.assert_array_equal(held[key], values[name])
