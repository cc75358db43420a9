"""docs/train-on-android.md is right: the order of tensors, and the names and places that its listings count on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from edge_client.protocol.program import Port, Program
from tests.support.doc_pages import blocks
from tests.support.programs import compiled, model

pytestmark = pytest.mark.timeout(600)  # the first test compiles for three engines

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "train-on-android.md").read_text(encoding="utf-8")
JAVA = (DOCS / "native" / "Train.java").read_text(encoding="utf-8")
CPP = (DOCS / "native" / "train.cc").read_text(encoding="utf-8")
(KOTLIN,) = re.findall(r"```kotlin\n(.*?)```", PAGE, flags=re.DOTALL)
ROWS = re.findall(r"^\| `(step|evaluate|infer)` \| (.+?) \| (.+?) \|$", PAGE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def program() -> Program:
    """The program that the page shows."""
    return compiled("wecfl-cnn").program


def order(ports: tuple[Port, ...]) -> list[str]:
    """Port names in order; those of one role as the page writes them."""
    return [
        kind
        for kind, _ in groupby(name + "/…" * bool(rest) for name, _, rest in (p.name.partition("/") for p in ports))
    ]


@pytest.mark.parametrize(("function", "inputs", "outputs"), ROWS)
def test_the_table_has_the_order_of_a_compiled_program(
    program: Program, function: str, inputs: str, outputs: str
) -> None:
    found = program.functions[function]
    assert re.findall(r"`([^`]+)`", inputs) == order(found.inputs)
    assert re.findall(r"`([^`]+)`", outputs) == order(found.outputs)


def test_the_table_has_every_function(program: Program) -> None:
    assert [name for name, *_ in ROWS] == sorted(program.functions, key=["step", "evaluate", "infer"].index)


def test_what_a_step_gives_is_what_the_next_one_takes_in_the_same_place(program: Program) -> None:
    step = program.functions["step"]
    assert [port.name for port in step.outputs[:-1]] == [port.name for port in step.inputs[: len(step.outputs) - 1]]
    assert step.outputs[-1].name == "loss"


def test_the_listing_in_kotlin_names_the_signature_and_the_last_inputs_of_the_file(program: Program) -> None:
    from ai_edge_litert.interpreter import Interpreter

    made, step = compiled("wecfl-cnn"), program.functions["step"]
    (named,) = re.findall(r"// ((?:\w+, )+\w+) are the last six", KOTLIN)
    assert named.split(", ") == [port.name for port in step.inputs[-6:]]
    (signature,) = re.findall(r'^ +"(\w+)",$', KOTLIN, flags=re.MULTILINE)
    file = Interpreter(model_content=made.files[made.program.containers["litert"]["step"].sha256])
    ports = file.get_signature_list()[signature]
    into, out = (re.findall(rf'"({kind}_)\$it"', KOTLIN)[0] for kind in ("args", "output"))
    assert set(ports["inputs"]) == {f"{into}{i}" for i in range(len(step.inputs))}
    assert set(ports["outputs"]) == {f"{out}{i}" for i in range(len(step.outputs))}


@pytest.mark.parametrize("listing", [JAVA, CPP], ids=["Java", "C++"])
def test_the_listings_for_onnx_runtime_name_ports_that_a_step_has(program: Program, listing: str) -> None:
    names = {port.name.partition("/")[0] + "/" * ("/" in port.name) for port in program.functions["step"].inputs}
    code = re.sub(r"//.*|/\*\*.*", "", listing)
    asked = set(re.findall(r'(?:startsWith|get|put|begins)\((?:name, )?"([\w/]+)"|values\["(\w+)"\]', code))
    asked = {one or other for one, other in asked}
    assert {"w/", "buffers/", "x", "y", "q", "lr", "momentum"} <= asked <= names


def test_the_script_writes_the_vector_and_the_sizes_that_the_listings_take(program: Program, tmp_path: Path) -> None:
    (script,) = [block.text for block in blocks(DOCS / "train-on-android.md") if block.kind == "python"]
    state = model("wecfl-cnn").module.state_dict()
    weights = {f"{'w' if t.role == 'p' else 'buffers'}/{t.name}": state[t.name].numpy() for t in program.schema.tensors}
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "program.json").write_text(json.dumps(program.to_json()))
    np.savez(tmp_path / "program" / "weights.npz", **weights)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    told, step = json.loads(done.stdout), program.functions["step"]
    vector = np.fromfile(tmp_path / "weights.f32", "<f4")
    assert np.array_equal(vector, np.concatenate([weights[port.name].ravel() for port in step.inputs[: len(weights)]]))
    assert told["moved"] == len(step.outputs) - 1
    assert len(told["sizes"]) == len(step.inputs)
    assert sum(told["sizes"][: len(weights)]) == len(vector)
    assert told["sizes"][-6:] == [8 * 784, 8 * 10, 8, 1, 1, 1]  # x, y, q, lr, momentum, mu
