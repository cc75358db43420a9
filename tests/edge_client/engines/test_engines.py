"""What the three engines refuse, and how. That they compute the right thing is tests/conformance/test_programs.py."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import types
import typing
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.engines import litert
from edge_client.engines.base import open_engine, run_step
from edge_client.engines.onnx import PROVIDERS, runtime
from edge_client.engines.pt2 import files_read_once, load_graph, read_exported
from edge_client.errors import ProgramRefused, RuntimeMissing, UsageError
from edge_client.protocol.program import ENGINES, Function
from edge_client.protocol.task import Array
from tests.support.programs import BATCH, compiled, feeds, model, relative, torch_step

each_engine = pytest.mark.parametrize("engine", ENGINES)
CUDA = "CUDAExecutionProvider" in runtime().get_available_providers() or torch.cuda.is_available()
SINGLE_STEP = 1e-5  # as in tests/conformance/test_programs.py
RUNTIMES = {"onnx": "onnxruntime", "litert": "ai_edge_litert.interpreter", "pt2": "torch"}


def stored(engine: str, function: str, folder: Path) -> Path:
    made = compiled("digits-mlp")
    path = folder / made.program.containers[engine][function].sha256
    path.write_bytes(made.files[path.name])
    return path


def test_a_step_of_litert_holds_one_row_of_a_convolution_after_another(tmp_path: Path) -> None:
    """All five at once, in a copy or until the gradient needs them, are 10 to 20 MB of the WeCFL CNN's batch of 32."""
    made = compiled("wecfl-cnn", engines=("litert",))
    path = tmp_path / "step"
    path.write_bytes(made.files[made.program.containers["litert"]["step"].sha256])
    opened = litert.interpreter(path.read_bytes(), threads=1)
    bytes_of = {
        tensor["index"]: math.prod(map(int, tensor["shape"])) * np.dtype(tensor["dtype"]).itemsize
        for tensor in opened.get_tensor_details()
    }
    row = 5 * 16 * BATCH * 14 * 14 * 4
    assert row in bytes_of.values()
    assert max(bytes_of.values()) < 5 * row
    handed_on = [o for op in opened._get_ops_details() if op["op_name"] == "DELEGATE" for o in op["outputs"]]
    assert handed_on
    assert row not in {bytes_of[output] for output in handed_on}


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """It does not run by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_litert_frees_one_functions_interpreter_for_the_next_without_the_garbage_collector(tmp_path: Path) -> None:
    """Each look through all objects takes a third of a second where torch is loaded."""
    program, names = compiled("digits-mlp").program, ("step", "evaluate")
    engine = litert.LitertEngine(program, {name: stored("litert", name, tmp_path) for name in names}, threads=1)
    before, given = gc.get_stats(), feeds(program, "step", batch=BATCH)
    held = [weakref.ref(engine.open(name)) for name in names]
    engine.update(given).step(given)
    assert not any(interpreter() for interpreter in held)
    assert gc.get_stats()[2]["collections"] == before[2]["collections"]


@each_engine
def test_a_runtime_that_is_not_installed_is_named_with_what_to_install(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(engine, "step", tmp_path)
    monkeypatch.setitem(sys.modules, RUNTIMES[engine], None)
    for other in ("tflite_runtime.interpreter", "ai_edge_litert.compiled_model"):
        monkeypatch.setitem(sys.modules, other, None)
    with pytest.raises(RuntimeMissing, match=r"hint: pip install"):
        open_engine(engine, compiled("digits-mlp").program, {"step": path})


@each_engine
@pytest.mark.parametrize("data", [b"", b"not a program", bytes(4096)])
def test_a_file_that_is_no_program_is_refused(engine: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "step").write_bytes(data)
    with pytest.raises(ProgramRefused, match="hint: "):
        open_engine(engine, compiled("digits-mlp").program, {"step": tmp_path / "step"})


@pytest.mark.parametrize("engine", ["onnx", "litert"])
def test_a_file_with_other_inputs_than_the_manifest_says_is_refused(engine: str, tmp_path: Path) -> None:
    program = compiled("digits-mlp").program
    step = program.functions["step"]
    other = replace(program, functions={"step": Function(inputs=step.inputs[1:], outputs=step.outputs)})
    with pytest.raises(ProgramRefused, match="manifest"):
        open_engine(engine, other, {"step": stored(engine, "step", tmp_path)})


@each_engine
def test_a_function_that_was_not_opened_is_a_key_error(engine: str, tmp_path: Path) -> None:
    program = compiled("digits-mlp").program
    opened = open_engine(engine, program, {"evaluate": stored(engine, "evaluate", tmp_path)})
    opened.evaluate(feeds(program, "evaluate", batch=opened.fixed_batch or 3))
    with pytest.raises(KeyError):
        opened.update({})


def test_a_runtime_that_is_installed_but_broken_is_passed_over_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tflite-runtime 2.14 under numpy 2 imports well, and raises SystemError when it makes an interpreter."""

    class BrokenRuntime:
        def __init__(self, **_: object) -> None:
            raise SystemError("returned a result with an exception set")

    def named(name: str, interpreter: type) -> None:
        module = types.ModuleType(name)
        module.Interpreter = interpreter  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)

    from ai_edge_litert.interpreter import Interpreter

    program, files = compiled("digits-mlp").program, {"step": stored("litert", "step", tmp_path)}
    named("ai_edge_litert.interpreter", BrokenRuntime)
    named("tflite_runtime.interpreter", Interpreter)
    given = feeds(program, "step", batch=BATCH)
    assert run_step(open_engine("litert", program, files), given).keys() == {
        p.name for p in program.functions["step"].outputs
    }
    named("tflite_runtime.interpreter", BrokenRuntime)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.compiled_model", None)
    with pytest.raises(RuntimeMissing, match=r"tflite-runtime: returned a result[\s\S]*hint: pip install"):
        open_engine("litert", program, files)


@pytest.mark.skipif(CUDA, reason="here a device with CUDA is refused nothing")
@pytest.mark.parametrize(
    ("engine", "device"),
    [("onnx", "cuda"), ("onnx", "tensorrt"), ("litert", "cuda"), ("pt2", "cuda"), ("pt2", "tensorrt")],
)
def test_a_device_asked_for_by_name_is_used_or_refused(engine: str, device: str, tmp_path: Path) -> None:
    files = {"step": stored(engine, "step", tmp_path)}
    way_out = "engine = 'onnx'" if (engine, device) == ("pt2", "tensorrt") else "cpu"  # no build of torch has TensorRT
    with pytest.raises(RuntimeMissing, match=rf"cannot use {device}[\s\S]*hint: .*{way_out}"):
        open_engine(engine, compiled("digits-mlp").program, files, device=device)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_provider_that_is_listed_but_not_to_be_had_is_left_in_silence_or_refused(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its wheel is installed and its driver is not. onnxruntime would say so on stdout, and go on with the CPU."""
    import onnxruntime

    broken = ("CUDAExecutionProvider", {"device_id": "4711"})
    monkeypatch.setitem(PROVIDERS, "cuda", broken)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [broken[0], "CPUExecutionProvider"])
    program, files = compiled("digits-mlp").program, {"step": stored("onnx", "step", tmp_path)}
    with nullcontext() if device == "auto" else pytest.raises(RuntimeMissing, match="cannot use cuda"):
        given = feeds(program, "step", batch=BATCH)
        run_step(open_engine("onnx", program, files, device=device), given)
    assert capfd.readouterr() == ("", "")


def test_a_file_is_read_once_where_that_is_asked_for() -> None:
    made = compiled("digits-mlp")
    file = made.files[made.program.containers["pt2"]["infer"].sha256]
    with files_read_once():
        first = read_exported(file)
        assert read_exported(file) is first
    assert read_exported(file) is not first


def test_the_types_of_a_torch_files_classes_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself does so for each of the file's thousands of records."""
    asked, hints = Counter[str](), typing.get_type_hints

    def counted(cls: type, **more: object) -> dict[str, object]:
        if cls.__module__ == "torch._export.serde.schema":
            asked[cls.__name__] += 1
        return hints(cls, **more)  # type: ignore[arg-type]  # as it came

    made = compiled("digits-mlp")
    monkeypatch.setattr(typing, "get_type_hints", counted)
    exported = read_exported(made.files[made.program.containers["pt2"]["step"].sha256])
    assert len(exported.graph.find_nodes(op="placeholder")) == len(made.program.functions["step"].inputs)
    assert set(asked.values()) == {1}


def test_a_torch_program_moves_to_its_device_as_a_whole(tmp_path: Path) -> None:
    """On torch's `meta` device, which computes shapes only and refuses what was left on the CPU."""
    made = compiled("wecfl-cnn", engines=("pt2",))
    (tmp_path / "step").write_bytes(made.files[made.program.containers["pt2"]["step"].sha256])
    given = feeds(made.program, "step", batch=BATCH)
    inputs = [torch.tensor(given[port.name], device="meta") for port in made.program.functions["step"].inputs]
    results = load_graph(tmp_path / "step", "meta")(*inputs)
    assert {value.device.type for value in results} == {"meta"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["digits-mlp", "wecfl-cnn"])
@pytest.mark.parametrize(("engine", "device"), [("onnx", "cuda"), ("onnx", "tensorrt"), ("pt2", "cuda")])
def test_an_update_on_a_gpu_is_torchs(name: str, engine: str, device: str, tmp_path: Path) -> None:
    if engine == "onnx" and "CUDAExecutionProvider" not in runtime().get_available_providers():
        pytest.skip("this ONNX Runtime is not built for CUDA (onnxruntime-gpu is)")
    made = compiled(name, engines=(engine,))
    (tmp_path / "step").write_bytes(made.files[made.program.containers[engine]["step"].sha256])
    given = feeds(made.program, "step", batch=BATCH)
    first = run_step(open_engine(engine, made.program, {"step": tmp_path / "step"}, device=device), given)
    assert relative(first, torch_step(model(name).module, given)) < SINGLE_STEP


def test_what_onnx_runtime_reads_in_place_lives_as_long_as_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before onnxruntime 1.30 neither an OrtValue that is bound nor a binding keeps the arrays that it reads."""
    import onnxruntime

    lent: list[weakref.ref[Array]] = []
    from_numpy, bind = onnxruntime.OrtValue.ortvalue_from_numpy, onnxruntime.IOBinding.bind_cpu_input

    def forgetful_value(array: Array, *place: object) -> object:
        lent.append(weakref.ref(array))
        value = from_numpy(array, *place)
        value._numpy_obj = None
        return value

    def forgetful_bind(self: onnxruntime.IOBinding, name: str, array: Array) -> None:
        lent.append(weakref.ref(array))
        bind(self, name, array)
        self._numpy_obj_references.clear()

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", staticmethod(forgetful_value))
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_cpu_input", forgetful_bind)
    program = compiled("digits-mlp").program
    engine = open_engine("onnx", program, {"step": stored("onnx", "step", tmp_path)})
    # in Fortran's order, so that every matrix is copied before it is lent
    update = engine.update({n: np.asfortranarray(v) for n, v in feeds(program, "step", batch=BATCH).items()})
    given = feeds(program, "step", batch=BATCH)
    update.step({n: np.asfortranarray(given[n]) for n in ("x", "y", "q")})
    assert len(lent) == len(program.functions["step"].inputs) - len(update.read())
    assert all(array() is not None for array in lent)


def test_an_unknown_device_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"tpu[\s\S]*auto, cpu, cuda, tensorrt"):
        open_engine("onnx", compiled("digits-mlp").program, {}, device="tpu")


def test_an_unknown_engine_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"tensorrt[\s\S]*onnx, litert, pt2"):
        open_engine("tensorrt", compiled("digits-mlp").program, {})


@pytest.mark.parametrize("function", ["step", "evaluate"])
def test_onnx_runtime_keeps_no_identity_and_reports_nothing_home(function: str, tmp_path: Path) -> None:
    path, scratch = stored("onnx", function, tmp_path), tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import sys; from edge_client.engines.onnx import session; session(sys.argv[1], threads=1); "
        "import os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    environ = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environ |= {"TMPDIR": str(scratch), "HOME": str(scratch), "XDG_CACHE_HOME": str(scratch)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
    assert list(scratch.rglob("*")) == []  # its telemetry leaves a session id in the temporary folder
