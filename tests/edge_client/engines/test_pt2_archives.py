"""Which .pt2 archives are refused before torch reads them."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client.engines.base import open_engine
from edge_client.engines.pt2 import load_graph, refuse_code
from edge_client.errors import ProgramRefused
from export.bundle.center_files import export_center, load_infer_module
from export.containers.write_pt2 import read_pt2
from tests.support.programs import compiled

END_OF_DIRECTORY = struct.Struct("<4s4H2LH")  # signature, disks (2), entries (2), size, offset, comment's length


def test_an_archive_that_would_be_unpickled_is_refused_before_torch_reads_it(tmp_path: Path) -> None:
    made = compiled("digits-mlp")
    original = made.files[made.program.containers["pt2"]["step"].sha256]
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(original)) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("constants_config.json"):
                data = json.dumps({"config": {"c": {"path_name": "c", "use_pickle": True}}}).encode()
            new.writestr(name, data)
    (tmp_path / "step").write_bytes(changed.getvalue())
    with pytest.raises(ProgramRefused, match="pickled"):
        open_engine("pt2", made.program, {"step": tmp_path / "step"})


def note_unpickling(where: str) -> None:
    """Leave a trace."""
    Path(where).touch()


class CallsWhenUnpickled:
    """Calls `note_unpickling`."""

    def __init__(self, where: Path) -> None:
        self._where = str(where)

    def __reduce__(self) -> tuple[Any, ...]:
        return note_unpickling, (self._where,)


@pytest.mark.parametrize(
    "member",
    [
        "weights/model.pt",
        "constants/model.pt",
        "constants/opaque_obj_0",
        "sample_inputs/model.pt",
        "aotinductor/m/m.so",
    ],
)
def test_an_archive_with_a_member_that_programs_do_not_have_is_refused_before_torch_reads_it(
    member: str, tmp_path: Path
) -> None:
    """Torch unpickles files of its older formats, whatever the archive's lists of tensors say."""
    made, changed, pickled = compiled("digits-mlp"), io.BytesIO(), io.BytesIO()
    torch.save(({}, CallsWhenUnpickled(tmp_path / "unpickled")), pickled)
    with (
        zipfile.ZipFile(io.BytesIO(made.files[made.program.containers["pt2"]["step"].sha256])) as old,
        zipfile.ZipFile(changed, "w") as new,
    ):
        for name in old.namelist():
            if name != f"archive/data/{member}":
                new.writestr(name, old.read(name))
        new.writestr(f"archive/data/{member}", pickled.getvalue())
    (tmp_path / "step").write_bytes(changed.getvalue())
    with pytest.raises(ProgramRefused, match=f"^step holds data/{member}, which no program has"):
        open_engine("pt2", made.program, {"step": tmp_path / "step"})
    with pytest.raises(ProgramRefused, match=f"holds data/{member}"):
        load_infer_module(changed.getvalue(), made.program.schema, np.zeros(made.program.schema.size, np.float32))
    assert not (tmp_path / "unpickled").exists()


def archive_members(function: str = "step") -> dict[str, bytes]:
    made = compiled("digits-mlp")
    with zipfile.ZipFile(io.BytesIO(made.files[made.program.containers["pt2"][function].sha256])) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(members: Mapping[str, bytes], *, comment: bytes = b"") -> tuple[bytes, bytes]:
    """The members of an archive, and its central directory, without the record of its end."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.comment = comment
            archive.writestr(info, data)
    file = made.getvalue()
    at = END_OF_DIRECTORY.unpack(file[-END_OF_DIRECTORY.size :])[-2]
    return file[:at], file[at : -END_OF_DIRECTORY.size]


def two_archives_in_one(for_torch: Mapping[str, bytes], for_python: Mapping[str, bytes]) -> bytes:
    """Torch takes the offset of the central directory as it is written; zipfile takes what stands before the end."""
    assert len(for_torch) == len(for_python)
    first, first_directory = written(for_torch)
    second, directory = written(for_python, comment=b" " * 64)  # the longer directory, of which torch reads a part
    between = len(first_directory) + len(second)  # zipfile adds this to every offset
    assert len(first) + len(first_directory) >= between
    moved, at = bytearray(directory), 0
    while at < len(moved):
        name, extra, note = struct.unpack_from("<3H", moved, at + 28)
        (offset,) = struct.unpack_from("<L", moved, at + 42)
        struct.pack_into("<L", moved, at + 42, offset + len(first) + len(first_directory) - between)
        at += 46 + name + extra + note
    count = len(for_python)
    end = END_OF_DIRECTORY.pack(b"PK\5\6", 0, 0, count, count, len(moved), len(first), 0)
    return first + first_directory + second + bytes(moved) + end


@pytest.mark.parametrize("hidden", ["tensor_0", "model.pt"])
def test_an_archive_that_zipfile_and_torch_read_differently_is_refused(hidden: str, tmp_path: Path) -> None:
    plain, pickled = archive_members("infer"), io.BytesIO()
    torch.save(CallsWhenUnpickled(tmp_path / "unpickled"), pickled)
    entry = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = {"archive/data/constants/model_constants_config.json": json.dumps({"config": {"c": entry}}).encode()}
    hostile = plain | (config if hidden == "tensor_0" else {})
    del hostile["archive/byteorder"]  # as many members in both
    hostile[f"archive/data/constants/{hidden}"] = pickled.getvalue()
    file = two_archives_in_one(hostile, plain)
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == plain
    (tmp_path / "infer").write_bytes(file)
    with pytest.raises(ProgramRefused, match=r"pickled objects|holds data/constants/model\.pt"):
        load_graph(tmp_path / "infer", "cpu")
    schema = compiled("digits-mlp").program.schema
    with pytest.raises(ProgramRefused, match=r"pickled objects|holds data/constants/model\.pt"):
        load_infer_module(file, schema, np.zeros(schema.size, np.float32))
    assert not (tmp_path / "unpickled").exists()


def test_members_that_only_zipfile_sees_are_refused(tmp_path: Path) -> None:
    """Torch unpickles the members of an older format, which it reads by zipfile, of a file that it cannot load."""
    plain = archive_members("infer")
    other = {f"older{k}": b" " for k in range(len(plain))}
    (tmp_path / "infer").write_bytes(two_archives_in_one(plain, other))
    with pytest.raises(ProgramRefused, match="other members for zipfile than for torch"):
        load_graph(tmp_path / "infer", "cpu")


def changed_graph(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file of `infer` whose graph's JSON was changed."""
    members = archive_members("infer")
    graph = json.loads(members["archive/models/model.json"])
    change(graph)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in (members | {"archive/models/model.json": json.dumps(graph).encode()}).items():
            archive.writestr(name, data)
    return made.getvalue()


def with_size(text: str) -> bytes:
    """Each size of the graph is this text, in which SIZE is the right one."""

    def change(entry: Any) -> None:  # noqa: ANN401 - any JSON
        for key, value in list(entry.items() if isinstance(entry, dict) else enumerate(entry)):
            if key == "expr_str":
                entry[key] = text.replace("SIZE", value)
            elif isinstance(value, (dict, list)):
                change(value)

    return changed_graph(change)


def with_call(target: str, name: str, argument: Mapping[str, str]) -> bytes:
    """The first node of the graph calls this."""

    def change(graph: dict[str, Any]) -> None:
        node = graph["graph_module"]["graph"]["nodes"][0]
        node |= {"target": target, "inputs": [{"name": name, "arg": argument, "kind": 1}]}

    return changed_graph(change)


def refused_by_each_reader(file: bytes, path: Path) -> None:
    """All that opens a file with torch refuses this one."""
    path.write_bytes(file)
    schema = compiled("digits-mlp").program.schema
    for way in (
        lambda: load_graph(path, "cpu"),
        lambda: load_infer_module(file, schema, np.zeros(schema.size, np.float32)),
        lambda: read_pt2(file, path.name),
    ):
        with pytest.raises(ProgramRefused, match="which no program has"):
            way()


@pytest.mark.parametrize(
    "text",
    [
        "(__import__('pathlib').Path('PATH').touch() or 1) * SIZE",
        "exec(chr(112)) * SIZE",
        "[SIZE for a1 in (1, 2)]",
        "SIZE.subs",
        "S('exec') * SIZE",
        "open",
        "9**9**9",
        "SIZE + 0*Pow(9, Pow(9, Integer(9)))",
        "((((9**99)**99)**99)**99)",
        "Integer(9)**-(9*9**9)",
        "1 << 99999999999",
        "1**" + "-" * 1_500 + "1",
        "Pow(Mul(" + "9999999999, " * 50 + "1), Integer(99))",
        "Float('0.1', 1000000000)",
        "Float('1e999999999')",
        "Permutation(999999999)",
        "9" * 9_999,
        "(" * 9_999 + ")" * 9_999,
    ],
)
def test_a_size_that_is_more_than_arithmetic_is_refused_before_torch_evaluates_it(text: str, tmp_path: Path) -> None:
    refused_by_each_reader(with_size(text.replace("PATH", str(tmp_path / "ran"))), tmp_path / "infer")
    assert not (tmp_path / "ran").exists()


SQUARES = "Add(Pow(SIZE, Integer(2)), SIZE**2, Mul(SIZE**-1, FloatPow(SIZE, Float('0.5', precision=53))))"


QUOTIENT = "Mul(SIZE, Pow(Add(SIZE, Integer(1)), Integer(-1)))"
MANY = f"Add({', '.join(['Pow(SIZE, Integer(2))'] * 20)})"


SIZES = ["SIZE", "2 * SIZE", "Add(SIZE, Integer(-1)) % 7", "Max(1, SIZE)", SQUARES, QUOTIENT, MANY]


@pytest.mark.parametrize("text", SIZES)
def test_a_size_that_is_arithmetic_is_not_refused(text: str) -> None:
    refuse_code(with_size(text), "infer")


def test_a_long_size_is_refused_at_once() -> None:
    for text in ("s1" * 4000, "A1a1" * 4000, "a=1" * 4000, "'s1'" * 4000):
        with pytest.raises(ProgramRefused, match="which no program has"):
            refuse_code(with_size(f"{text}!"), "infer")


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.ops.aten.from_file.default",
        "torch.ops.higher_order.inline_asm_elementwise",
        "torch.ops.higher_order.print",
        "torch.ops.load_library",
        "torch.ops.image.write_file.default",
        "torch.load",
        "_operator.call",
        "_operator.attrgetter",
        "_operator.methodcaller",
        "#anything",
    ],
)
def test_a_graph_that_calls_more_than_operators_on_tensors_is_refused(target: str, tmp_path: Path) -> None:
    for file in (
        with_call(target, "filename", {"as_string": "/etc/hostname"}),
        with_call("torch.ops.aten.relu.default", "self", {"as_operator": target}),
    ):
        refused_by_each_reader(file, tmp_path / "infer")


@pytest.mark.parametrize("key", ["name", "forward_arg_names", "parameter_name", "in_spec", "a key of an object"])
def test_a_name_of_which_torch_would_make_code_is_refused(key: str, tmp_path: Path) -> None:
    """Torch writes the graph as the text of a function, with these names as they are."""
    code = "x=open('ran', 'w')"

    def change(graph: dict[str, Any]) -> None:
        signature = graph["graph_module"]["module_call_graph"][0]["signature"]
        if key == "name":
            graph["graph_module"]["graph"]["inputs"][0] = {"as_tensor": {"name": code}}
        elif key == "parameter_name":
            named = {"arg": {"name": "x"}, "parameter_name": f'a"), {code}, ("'}
            graph["graph_module"]["signature"]["input_specs"][0] = {"parameter": named}
        elif key == "in_spec":
            signature[key] = signature[key].replace('"children_spec"', f'"{code}"', 1)
        elif key == "forward_arg_names":
            signature[key] = [code]
        else:
            graph["graph_module"]["graph"]["tensor_values"][code] = None

    refused_by_each_reader(changed_graph(change), tmp_path / "infer")


@pytest.mark.parametrize("name", ["metadata", "as_string", "as_strings"])
def test_a_tensor_whose_name_is_that_of_a_plain_text_is_checked_as_any_other(name: str, tmp_path: Path) -> None:
    code = {"as_expr": {"expr_str": f"(__import__('pathlib').Path('{tmp_path / 'ran'}').touch() or 1)", "hint": None}}

    def change(graph: dict[str, Any]) -> None:
        old = graph["graph_module"]["graph"]["inputs"][0]["as_tensor"]["name"]
        graph |= json.loads(json.dumps(graph).replace(f'"{old}"', f'"{name}"'))
        graph["graph_module"]["graph"]["tensor_values"][name]["sizes"][0] = code

    refused_by_each_reader(changed_graph(change), tmp_path / "infer")
    assert not (tmp_path / "ran").exists()


class NamedRelations(nn.Module):
    """Layers and a buffer under names of relations, as those of graphs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        names = ("<reads___to___by>", "share (%)", "a = b's", "→")
        self.by = nn.ModuleDict({name: nn.BatchNorm1d(4) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = sum(layer(x) for layer in self.by.values())
        return out


def test_layers_may_have_any_name_that_torch_takes() -> None:
    """Torch writes a tensor's place in its module between quotes."""
    model, x = NamedRelations(), torch.randn(5, 4)
    found = read_pt2(export_center(model, (4,), "pt2"), "file").module(check_guards=False)(x)
    torch.testing.assert_close(found, model(x))


def test_arguments_that_import_a_module_are_refused(tmp_path: Path) -> None:
    def change(graph: dict[str, Any]) -> None:
        signature = graph["graph_module"]["module_call_graph"][0]["signature"]
        named = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
        told = {"type": "collections.defaultdict", "context": json.dumps(named), "children_spec": []}
        signature["in_spec"] = json.dumps([1, told])

    refused_by_each_reader(changed_graph(change), tmp_path / "infer")
