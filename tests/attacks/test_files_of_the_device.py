"""Tries to have a device's files read by a signed program: tensors that name a file instead of holding values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edge_client.engines import litert, litert_compiled
from edge_client.engines.center_file import run_file
from edge_client.engines.onnx import session
from edge_client.engines.onnx_files import refuse_named_files
from edge_client.errors import ProgramRefused
from edge_client.protocol.program import Function, Port

Model = onnx.ModelProto
X, Y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
ONES = numpy_helper.from_array(np.ones(4, np.float32), "w")


def named(path: object) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", str(path)), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def model(*nodes: onnx.NodeProto, tensors: tuple[TensorProto, ...] = (ONES,)) -> Model:
    graph = helper.make_graph(list(nodes) or [helper.make_node("Add", ["x", "w"], ["y"])], "g", [X], [Y], list(tensors))
    made: Model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return made


def in_a_constant(tensor: TensorProto) -> Model:
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    return model(constant, helper.make_node("Add", ["x", "w"], ["y"]), tensors=())


def in_a_branch(tensor: TensorProto) -> Model:
    out = helper.make_tensor_value_info("w", TensorProto.FLOAT, [4])
    branch = helper.make_graph([], "b", [], [out], [tensor])
    choice = numpy_helper.from_array(np.array(True), "c")  # noqa: FBT003 - an array of it
    chosen = helper.make_node("If", ["c"], ["v"], then_branch=branch, else_branch=branch)
    return model(chosen, helper.make_node("Add", ["x", "v"], ["y"]), tensors=(choice,))


def in_a_function(tensor: TensorProto) -> Model:
    body = [helper.make_node("Constant", [], ["w"], value=tensor), helper.make_node("Add", ["a", "w"], ["b"])]
    made = model(helper.make_node("f", ["x"], ["y"], domain="d"), tensors=())
    opset = [helper.make_opsetid("", 18)]
    made.functions.append(helper.make_function("d", "f", ["a"], ["b"], body, opset))
    made.opset_import.append(helper.make_opsetid("d", 1))
    return made


def sparse(tensor: TensorProto) -> Model:
    made = model()
    indices = numpy_helper.from_array(np.arange(4), "i")
    made.graph.sparse_initializer.add(values=tensor, indices=indices, dims=[4])
    return made


PLACES: dict[str, Callable[[TensorProto], Model]] = {
    "a weight": lambda tensor: model(tensors=(tensor,)),
    "a constant": in_a_constant,
    "a branch": in_a_branch,
    "a function": in_a_function,
    "a sparse weight": sparse,
}


@pytest.mark.parametrize("place", PLACES)
def test_no_tensor_of_a_program_is_read_from_a_file_that_it_names(place: str, tmp_path: Path) -> None:
    (tmp_path / "device.key").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (tmp_path / "blobs").mkdir()
    for path in (tmp_path / "device.key", "../device.key", "beside"):
        data = PLACES[place](named(path)).SerializeToString()
        (tmp_path / "blobs" / "step").write_bytes(data)
        for given_as in (data, str(tmp_path / "blobs" / "step")):
            with pytest.raises(ProgramRefused, match="another file of this device"):
                session(given_as, threads=1)


@pytest.mark.parametrize("place", [name for name in PLACES if name != "a sparse weight"])
def test_the_same_programs_with_their_values_run(place: str) -> None:
    data = PLACES[place](ONES).SerializeToString()
    found = session(data, threads=1).run(None, {"x": np.zeros(4, np.float32)})[0]
    assert found.tolist() == [1.0] * 4


def test_a_center_that_names_a_file_is_refused_with_the_reason() -> None:
    data = model(tensors=(named("/etc/hostname"),)).SerializeToString()
    with pytest.raises(ProgramRefused, match="another file of this device"):
        run_file("onnx", data, np.zeros((1, 4), np.float32))


def test_no_compiled_part_is_read_from_a_file_that_a_program_names() -> None:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context="../../x", embed_mode=0)
    with pytest.raises(ProgramRefused, match="another file of this device"):
        session(model(node, tensors=()).SerializeToString(), threads=1)


@pytest.mark.parametrize("bits", [32, 33, 34])
def test_a_program_is_refused_whose_fields_have_longer_numbers_than_the_runtime_reads(bits: int) -> None:
    """Protobuf reads 32 bits of a field's tag: 2^32 + 58 is the tag of the graph, as 58 is."""
    whole = model(tensors=(named("/etc/hostname"),))
    graph = whole.graph.SerializeToString()
    whole.ClearField("graph")
    data = whole.SerializeToString() + _varint((1 << bits) + (7 << 3 | 2)) + _varint(len(graph)) + graph
    with pytest.raises(ProgramRefused, match="no ONNX file"):
        session(data, threads=1)


def test_a_file_of_the_runtimes_own_format_is_refused() -> None:
    with pytest.raises(ProgramRefused, match="own format"):
        session(b"\x28\x00\x00\x00ORTM" + bytes(64), threads=1)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_by_name_or_hold_no_such_tensor(data: bytes) -> None:
    try:
        refuse_named_files(memoryview(data))
    except ProgramRefused:
        return


def test_a_tensor_below_a_thousand_graphs_inside_each_other_is_found() -> None:
    data = named("/etc/hostname").SerializeToString()
    for number in (5, *(5, 1, 6) * 1_000, 5, 1, 7):  # in an attribute, that in a node, that in a graph, and so on
        data = bytes([number << 3 | 2]) + _varint(len(data)) + data
    with pytest.raises(ProgramRefused, match="another file of this device"):
        refuse_named_files(memoryview(data))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def tflite_of(file: Path) -> bytes:
    """y = x + w, of four numbers; w is in a file."""
    import flatbuffers  # type: ignore[import-untyped]
    from ai_edge_litert import schema_py_generated as schema

    made, graph = schema.ModelT(), schema.SubGraphT()
    made.version, made.operatorCodes, made.buffers = 3, [schema.OperatorCodeT()], [schema.BufferT() for _ in range(3)]
    graph.tensors = [schema.TensorT() for _ in range(3)]
    for at, (tensor, name) in enumerate(zip(graph.tensors, "xwy", strict=True)):
        tensor.name, tensor.shape, tensor.type, tensor.buffer = name, [4], schema.TensorType.FLOAT32, (1, 0, 2)[at]
    graph.tensors[1].externalBuffer = 1
    group, beside = schema.ExternalBufferGroupT(), schema.ExternalBufferT()
    group.name, beside.id, beside.length = str(file), 1, 16
    made.externalBufferGroups, made.externalBuffers = [group], [beside]
    add = schema.OperatorT()
    add.inputs, add.outputs = [0, 1], [2]
    add.builtinOptionsType, add.builtinOptions = schema.BuiltinOptions.AddOptions, schema.AddOptionsT()
    graph.operators, graph.inputs, graph.outputs = [add], [0], [2]
    signature, into, out = schema.SignatureDefT(), schema.TensorMapT(), schema.TensorMapT()
    into.name, out.name, out.tensorIndex = "args_0", "output_0", 2
    signature.signatureKey, signature.inputs, signature.outputs = "infer", [into], [out]
    made.subgraphs, made.signatureDefs = [graph], [signature]
    builder = flatbuffers.Builder(1024)
    builder.Finish(made.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def test_no_tensor_of_a_tflite_file_is_read_from_a_file_that_it_names(tmp_path: Path) -> None:
    """LiteRT's CompiledModel reads it, from any folder (seen with 2.3.0); its Interpreter does not."""
    (tmp_path / "device.key").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    program, data = tmp_path / "program", tflite_of(tmp_path / "device.key")
    program.write_bytes(data)
    ports = [Port(name=name, dtype="float32", shape=(4,)) for name in ("x", "logits")]
    infer = Function(inputs=(ports[0],), outputs=(ports[1],))
    asked: list[Callable[[], object]] = [
        lambda: litert_compiled._opened(program, "infer", infer, 1),
        lambda: litert._opened(program, "infer", infer, 1),
        lambda: run_file("tflite", data, np.zeros((1, 4), np.float32)),
    ]
    for ask in asked:
        with pytest.raises(ProgramRefused, match="the TFLite file has a part that would be read from another file"):
            ask()


@given(data=st.binary(max_size=64))
def test_bytes_that_are_no_tflite_file_are_left_to_the_runtime(data: bytes) -> None:
    with suppress(ProgramRefused):
        litert_compiled.refuse_named_files(data)
