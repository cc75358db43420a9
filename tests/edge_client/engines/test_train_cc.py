"""docs/native/train.cc, compiled as it stands, trains as the Python engine does. Needs g++ and ONNX Runtime's headers.

The headers are in Debian 13 (apt install libonnxruntime-dev); elsewhere ONNXRUNTIME_INCLUDE names their folder. The
library is that of the Python package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edge_client.protocol.task import Array
from tests.support.programs import compiled, feeds, opened, relative

SOURCE = Path(__file__).parents[3] / "docs" / "native" / "train.cc"
HEADERS = Path(os.environ.get("ONNXRUNTIME_INCLUDE", "/usr/include/onnxruntime"))
STEPS, BATCH, N, LR, MOMENTUM = 6, 8, 40, 0.05, 0.9
SINGLE = 1e-5  # one runtime on one machine, but another version of its graph optimiser may be asked for


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None or not (HEADERS / "onnxruntime_cxx_api.h").is_file():
        pytest.skip("g++ and ONNX Runtime's headers (apt install g++ libonnxruntime-dev) are not here")
    package = find_spec("onnxruntime")
    assert package is not None
    (library,) = (Path(next(iter(package.submodule_search_locations or ()))) / "capi").glob("libonnxruntime.so.*")
    made = tmp_path_factory.mktemp("native") / "train"
    (made.parent / "libonnxruntime.so.1").symlink_to(library)  # the name that it gives itself
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", f"-I{HEADERS}", f"-Wl,-rpath,{made.parent}"]
    done = subprocess.run(["g++", *flags, SOURCE, library, "-o", made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def in_python(name: str, given: dict[str, Array], x: Array, y: Array, folder: Path) -> tuple[dict[str, Array], float]:
    """The weights after the same steps, and the accuracy."""
    made = compiled(name)
    engine = opened(made, "onnx", folder)
    update, one_hot = engine.update(given), np.eye(made.program.classes, dtype=np.float32)
    for k in range(STEPS):
        rows = np.arange(k * BATCH, (k + 1) * BATCH) % N
        update.step({"x": x[rows], "y": one_hot[y[rows]], "q": np.full(BATCH, 1 / BATCH, np.float32)})
    end = {n: v for n, v in update.read().items() if not n.startswith("velocity/")}
    logits = engine.evaluate(end | {"x": x, "y": one_hot[y]})["logits"]
    return end, float((logits.argmax(1) == y).mean())


@pytest.mark.parametrize("name", ["digits-mlp", "wecfl-cnn"])
def test_the_cpp_listing_trains_as_the_engine_does(name: str, train: Path, tmp_path: Path) -> None:
    made, rng = compiled(name), np.random.default_rng(5)
    given = feeds(made.program, "step", batch=BATCH)
    idle = {n: np.zeros_like(v) for n, v in given.items() if n.partition("/")[0] in ("velocity", "linear", "mu")}
    given |= idle | {"lr": np.array(LR, np.float32), "momentum": np.array(MOMENTUM, np.float32)}
    x = rng.standard_normal((N, *made.program.input)).astype(np.float32)
    y = rng.integers(made.program.classes, size=N).astype(np.uint8)
    vector = [v.ravel() for n, v in given.items() if n.startswith(("w/", "buffers/"))]
    for file, array in {"weights": np.concatenate(vector), "x": x, "y": y}.items():
        array.tofile(tmp_path / file)
    wanted, accuracy = in_python(name, given, x, y, tmp_path)
    paths = [str(tmp_path / made.program.containers["onnx"][f].sha256) for f in ("step", "evaluate")]
    paths += [str(tmp_path / file) for file in ("weights", "x", "y", "out")]
    command = [str(train), *paths, *(str(v) for v in (STEPS, BATCH, LR, MOMENTUM))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ends = np.cumsum([value.size for value in wanted.values()])
    parts = np.split(np.fromfile(tmp_path / "out", dtype=np.float32), ends[:-1])
    found = {n: part.reshape(wanted[n].shape) for n, part in zip(wanted, parts, strict=True)}
    assert relative(found, wanted) < SINGLE
    assert done.stdout.splitlines()[-1] == f"accuracy {round(accuracy * N)} of {N}"


def test_the_cpp_listing_says_what_it_cannot_read(train: Path, tmp_path: Path) -> None:
    command = [str(train), "step", "evaluate", "w", "x", "y", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "train: cannot read x\n")
