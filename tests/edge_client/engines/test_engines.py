"""What the three engines refuse, and how. That they compute the right thing is tests/conformance/test_programs.py."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.engines.base import ENGINES, open_engine
from edge_client.errors import ProgramRefused, RuntimeMissing, UsageError
from edge_client.protocol.program import Function
from tests.programs import compiled, feeds

each_engine = pytest.mark.parametrize("engine", ENGINES)
RUNTIMES = {"onnx": "onnxruntime", "litert": "ai_edge_litert.interpreter", "pt2": "torch"}


def stored(engine: str, function: str, folder: Path) -> Path:
    made = compiled("digits-mlp")
    path = folder / made.program.containers[engine][function].sha256
    path.write_bytes(made.files[path.name])
    return path


@each_engine
def test_a_runtime_that_is_not_installed_is_named_with_what_to_install(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(engine, "step", tmp_path)
    monkeypatch.setitem(sys.modules, RUNTIMES[engine], None)
    monkeypatch.setitem(sys.modules, "tflite_runtime.interpreter", None)
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
        opened.step({})


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
