"""program.json: what is written is read back, and each part has its form, its limits and what belongs to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.golden_run import DIGEST, Golden
from edge_client.protocol.program import (
    FROZEN,
    MAX_CONTAINER_BYTES,
    Adapter,
    Container,
    Function,
    Origin,
    Port,
    Program,
)
from edge_client.protocol.task import Schema, TensorSpec
from edge_client.protocol.tensors import MAX_HEADER_BYTES
from tests.support import softmax_program

FILE, OTHER = Container(sha256="1" * 64, size=100), Container(sha256="2" * 64, size=101)
STEP = Function(
    inputs=(Port(name="x", dtype="float32", shape=("batch", 5)), Port(name="y", dtype="float32", shape=("batch", 4))),
    outputs=(Port(name="loss", dtype="float32", shape=()),),
)
GOLDEN = Golden(
    seed=1, batch=8, lr=0.1, pull=0.01, tokens=0, losses=(1.0, 0.5), weights=(0.0,) * DIGEST, buffers=(0.0,) * DIGEST,
    tolerance=1e-4,
)  # fmt: skip
FROZEN_TENSORS = Schema((TensorSpec(name="base", role="p", shape=(10,)),))
PROGRAM = replace(
    softmax_program.program(buffered=True),
    functions={"step": STEP},
    containers={"onnx": {"step": FILE, FROZEN: OTHER}, "litert": {"step": FILE}},
    batch={"onnx": "any", "litert": 8},
    versions={"torch": "2.9"},
    parity={"onnx": 1e-6},
    origin=Origin(model="models:Net", args=[5], seed=0),
    golden={"onnx": GOLDEN, "litert": GOLDEN},
    frozen=FROZEN_TENSORS,
    adapter=Adapter(config={"r": 8}, tensors={"lora": "head.weight"}),
)


def refusal(**changed: Any) -> str:  # noqa: ANN401 - any JSON
    with pytest.raises(Malformed) as refused:
        Program.from_json(PROGRAM.to_json() | changed)
    return refused.value.code


def with_golden(**changed: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    return {"golden": {"onnx": GOLDEN.to_json() | changed}}


def test_a_program_is_read_back_as_it_was() -> None:
    assert Program.from_json(PROGRAM.to_json()) == PROGRAM
    scalar = Schema((TensorSpec(name="temperature", role="p", shape=()),))  # and no classifier
    plain = replace(softmax_program.program(), own_loss=True, schema=scalar)
    assert Program.from_json(plain.to_json()) == plain


def test_frozen_tensors_are_one_file_of_all_engines_with_a_list_of_what_it_holds() -> None:
    held = PROGRAM.to_json()["containers"]
    step = {"sha256": FILE.sha256, "size": FILE.size}
    for changed in ({"containers": held | {"litert": {"step": step, FROZEN: step}}}, {"frozen": None}):
        with pytest.raises(Malformed, match=r"^bad_program: .*frozen tensors need one file and a list"):
            Program.from_json(PROGRAM.to_json() | changed)


def test_a_file_of_frozen_tensors_has_at_most_six_bytes_a_value_and_a_header() -> None:
    most = 6 * FROZEN_TENSORS.size + MAX_HEADER_BYTES + 8
    for size in (most, most + 1):
        made = replace(PROGRAM, containers={"onnx": {"step": FILE, FROZEN: Container(sha256="2" * 64, size=size)}})
        raw = replace(made, golden={}).to_json()
        if size == most:
            assert Program.from_json(raw).containers["onnx"][FROZEN].size == most
        else:
            with pytest.raises(Malformed, match="frozen tensors in"):
                Program.from_json(raw)


def test_a_container_has_at_most_256_mib() -> None:
    for size in (MAX_CONTAINER_BYTES, MAX_CONTAINER_BYTES + 1):
        raw = replace(PROGRAM, containers={"onnx": {"step": replace(FILE, size=size)}}, golden={}).to_json()
        if size == 256 << 20:
            assert Program.from_json(raw).containers["onnx"]["step"].size == size
        else:
            with pytest.raises(Malformed, match=r"^too_big: "):
                Program.from_json(raw)


@pytest.mark.parametrize(
    ("loss", "target", "fits"),
    [
        ("cross-entropy", [4], True),
        ("cross-entropy", [4, 2], False),
        ("cross-entropy", [], False),
        ("token-cross-entropy", [4], False),
        ("token-cross-entropy", [7, 4], True),
        ("pixel-cross-entropy", [4], False),
        ("pixel-cross-entropy", [4, 7, 7], True),
        ("squared-error", [4], True),
        ("squared-error", [4, 2], True),
        ("squared-error", [], False),
        ("squared-error", [1] * 8, True),
        ("squared-error", [1] * 9, False),
    ],
)
def test_a_target_has_the_axes_of_its_loss(loss: str, target: list[int], fits: bool) -> None:  # noqa: FBT001 - a row
    if fits:
        assert list(Program.from_json(PROGRAM.to_json() | {"loss": loss, "target": target}).target) == target
    else:
        assert refusal(loss=loss, target=target) == "bad_program"


def test_classes_lie_last_and_those_of_pixels_first() -> None:
    tokens = replace(PROGRAM, loss="token-cross-entropy", target=(7, 4))
    pixels = replace(PROGRAM, loss="pixel-cross-entropy", target=(4, 7, 6))
    assert [(p.classes, p.truth, p.positions) for p in (PROGRAM, tokens, pixels)] == [
        (4, (), 1),
        (4, (7,), 7),
        (4, (7, 6), 42),
    ]
    squared = replace(PROGRAM, loss="squared-error")
    assert (squared.has_classes, squared.truth, squared.positions) == (False, (4,), 1)
    assert replace(squared, functions={}, target=(3,)).truth == (3,)


def test_an_engine_opens_the_files_of_its_functions_and_that_of_the_frozen_tensors() -> None:
    assert PROGRAM.files("onnx", ["step"]) == {"step": FILE, FROZEN: OTHER}
    assert PROGRAM.files("litert", ["step"]) == {"step": FILE}
    assert (FILE.manifest("step", 4096).kind, FILE.manifest(FROZEN, 4096).kind) == ("container", "frozen")


@pytest.mark.parametrize(
    ("field", "least", "greatest"),
    [("seed", 0, 2**53 - 1), ("batch", 1, 65_536), ("tokens", 0, 1 << 24)],
)
def test_an_integer_of_a_golden_run_has_its_limits(field: str, least: int, greatest: int) -> None:
    for value in (least, greatest):
        assert vars(Golden.from_json(GOLDEN.to_json() | {field: value}, buffers=True))[field] == value
    for value in (least - 1, greatest + 1):
        with pytest.raises(Malformed, match=field):
            Golden.from_json(GOLDEN.to_json() | {field: value}, buffers=True)


def test_a_golden_run_has_1_to_16_losses_and_digests_of_8_numbers() -> None:
    for losses in (1, 16):
        assert len(Golden.from_json(GOLDEN.to_json() | {"losses": [0.5] * losses}, buffers=True).losses) == losses
    read = Golden.from_json(GOLDEN.to_json() | {"weights": [0.5] * 8, "buffers": []}, buffers=False)
    assert (read.weights, read.buffers) == ((0.5,) * 8, ())
    for field, sizes in {"losses": (0, 17), "weights": (7, 9), "buffers": (0, 7, 9)}.items():
        for size in sizes:
            assert refusal(**with_golden(**{field: [0.5] * size})) == "bad_program"
    with pytest.raises(Malformed, match="0 numbers"):
        Golden.from_json(GOLDEN.to_json(), buffers=False)


def test_the_rates_of_a_golden_run_are_above_zero_and_its_tolerance_at_most_a_tenth() -> None:
    assert Golden.from_json(GOLDEN.to_json() | {"tolerance": 0.1}, buffers=True).tolerance == 0.1
    for changed in ({"lr": 0}, {"pull": 0}, {"tolerance": 0}, {"tolerance": 0.1001}):
        assert refusal(**with_golden(**changed)) == "bad_program"


def test_a_golden_run_is_of_an_engine_that_has_a_step_and_takes_its_batch() -> None:
    assert refusal(golden={"pt2": GOLDEN.to_json()}) == "bad_program"
    assert refusal(golden={"litert": GOLDEN.to_json() | {"batch": 9}}) == "bad_program"
    assert refusal(functions={}) == "bad_program"
    assert Program.from_json(PROGRAM.to_json() | with_golden(batch=9)).golden["onnx"].batch == 9


@pytest.mark.parametrize(
    "changed",
    [
        {"origin": {"model": "models:Net", "args": "5", "seed": 0}},
        {"origin": {"model": "models:Net", "args": [5], "seed": -1}},
        {"origin": {"model": "", "args": [5], "seed": 0}},
        {"adapter": {"config": {}, "tensors": {"lora": "mean"}}},
        {"adapter": {"config": {}, "tensors": {"lora": "other"}}},
        {"opset": 0},
        {"batch": {"onnx": 0}},
        {"batch": {"onnx": "some"}},
        {"model": ""},
        {"model": "x" * 513},
        {"dtype": "float16"},
        {"optimizer": "adam"},
        {"loss": "own"},
        {"containers": {"onnx": {"step": {"sha256": "1" * 64, "size": 0}}}},
        {"containers": {"onnx": {"train": {"sha256": "1" * 64, "size": 1}}}},
        {"functions": {"train": {"inputs": [], "outputs": []}}},
        {"functions": {"step": {"inputs": [["x", "int8", [1]]], "outputs": []}}},
        {"functions": {"step": {"inputs": [["x", "int32", [0]]], "outputs": []}}},
        {"functions": {"step": {"inputs": {}, "outputs": []}}},
        {"functions": {"step": {"inputs": [["x", "int32", []]] * 32_769, "outputs": []}}},
    ],
)
def test_a_part_of_another_form_is_a_bad_program(changed: dict[str, Any]) -> None:
    assert refusal(**{"golden": {}} | changed) == "bad_program"


def test_a_function_has_as_many_ports_as_a_schema_of_the_most_tensors_needs() -> None:
    raw = {"step": {"inputs": [["x", "int32", []]] * 32_768, "outputs": []}}
    assert (
        len(Program.from_json(PROGRAM.to_json() | {"golden": {}, "functions": raw}).functions["step"].inputs) == 32_768
    )
    assert Program.from_json(PROGRAM.to_json() | {"model": "x" * 512}).model == "x" * 512


def test_another_version_is_named_and_what_is_no_object_is_refused() -> None:
    assert refusal(v=2) == "bad_version"
    with pytest.raises(Malformed, match=r"^bad_program: program\.json is not a JSON object"):
        Program.from_json([])  # type: ignore[arg-type]
