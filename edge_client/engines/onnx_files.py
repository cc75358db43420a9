"""What lies in an ONNX file: one that would read other files of the device is refused, and weights can be replaced.

A tensor of the format may name a file instead of holding its values. What a step computes goes to the coordinator, so
such a program would send whatever the client may read: samples, or its private key. onnxruntime refuses paths out of
the program's folder in recent versions only (1.31 does, 1.23 does not); programs of fedcenters name no file at all.

The format is protobuf: a field is a tag (its number and how it is written), then a varint, 4 or 8 bytes, or a length
and so many bytes. Only the messages that can hold a tensor are entered. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edge_client.errors import ProgramRefused

# The messages that can hold a tensor, by the numbers of their fields (onnx.proto).
PARTS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
OP_TYPE, COMPILED = 4, b"EPContext"  # of a node; this one is a file that a GPU's library has compiled
GRAPH, CONSTANT = 7, 5  # of a model, and of a graph: a tensor
NAME, VALUES = 8, 9  # of a tensor
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # of a tensor: the name of a file; 1: the values are there
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5  # how a field is written
MAX_VARINT_BYTES, TAG_BITS = 10, 32
OTHER_FORMAT = b"ORTM"  # at byte 4 of onnxruntime's own format, which may name files too


def refuse_named_files(data: memoryview) -> None:
    """Raise ProgramRefused for an ONNX file that names a file to be read, and for what is no ONNX file."""
    if data[4:8] == OTHER_FORMAT:
        raise ProgramRefused("the program is a file of onnxruntime's own format", hint="compile it again")
    left = [("model", data)]
    while left:
        kind, message = left.pop()
        for number, value in _fields(message):
            is_named = kind == "tensor" and (number == EXTERNAL_DATA or (number == DATA_LOCATION and value))
            if is_named or (kind == "node" and number == OP_TYPE and _is_text(value, COMPILED)):
                raise named_file("ONNX")
            if isinstance(value, memoryview) and number in PARTS[kind]:
                left.append((PARTS[kind][number], value))


def named_file(form: str) -> ProgramRefused:
    """The refusal of a program that names a file."""
    return ProgramRefused(
        f"the {form} file has a part that would be read from another file of this device",
        hint="do not trust who signed it; programs that fedcenters compiles hold all their tensors",
    )


def replace_constants(data: bytes, values: Mapping[str, bytes]) -> bytes:
    """The file with these values, as many bytes as before, in the graph's constants of these names.

    Raises ProgramRefused where the file has no such constant.
    """
    made, left = bytearray(data), dict(values)
    for graph in _parts(memoryview(made), GRAPH):
        for constant in _parts(graph, CONSTANT):
            name = b"".join(_parts(constant, NAME)).decode(errors="replace")
            for place in _parts(constant, VALUES):
                if name in left and len(place) == len(left[name]):
                    place[:] = left.pop(name)
    if left:
        hint = "the weights alone are in the .safetensors file"
        raise ProgramRefused(f"the ONNX file has no constant {next(iter(left))} of this size", hint=hint)
    return bytes(made)


def _parts(message: memoryview, number: int) -> Iterator[memoryview]:
    """The values of one field that are bytes."""
    return (value for at, value in _fields(message) if at == number and isinstance(value, memoryview))


def _is_text(value: int | memoryview, text: bytes) -> bool:
    return isinstance(value, memoryview) and len(value) == len(text) and bytes(value) == text


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field: a varint as an int, bytes as a view of them; others are passed over."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        if tag >> TAG_BITS:  # protobuf would cut it, and read another field than is seen here
            raise _damaged()
        written = tag & 7
        if written == VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif written == LENGTH:
            size, at = _varint(message, at)
            if size > end - at:
                raise _damaged()
            yield tag >> 3, message[at : at + size]
            at += size
        elif written in (EIGHT_BYTES, FOUR_BYTES):
            at += 8 if written == EIGHT_BYTES else 4
        else:
            raise _damaged()
    if at > end:
        raise _damaged()


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number at this place, and where it ends."""
    value = 0
    for i, byte in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 127) << (7 * i)
        if byte < 128:  # noqa: PLR2004 - the last of the number
            return value, at + i + 1
    raise _damaged()


def _damaged() -> ProgramRefused:
    return ProgramRefused("this is no ONNX file", hint="compile the program again, or fetch the file anew")
