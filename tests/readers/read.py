"""`make readers`, second half: an independent runtime opens the files of write.py, runs them and compares.

    python read.py MODULE FOLDER     MODULE holds a TFLite Interpreter, such as tflite_runtime.interpreter, or is
                                     onnxruntime

Runs where only that runtime and numpy are installed, so it imports nothing of ours. Prints one line per function, and
leaves with 1 when one is wrong.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# Relative to the largest value of each output. All are float32, and the gradient of a bias before a batch norm is a
# small difference of large sums: torch's own is up to 5e-5 off. A wrong gradient shows in the first digit.
TOLERANCE = 1e-4
# A quantized center, by the end of its name: 11 bits of a weight, 8 bits of a weight, 8 bits of everything.
QUANTIZED = {"-fp16": 1e-2, "-int8": 5e-2, "-int8-static": 1e-1}


def difference(got: Array, expected: Array) -> float:
    """The largest one, relative to the largest expected value."""
    return float(np.abs(np.asarray(got) - expected).max() / max(1e-6, np.abs(expected).max()))


def compared(interpreter: Any, arrays: dict[str, Array], function: str) -> float:  # noqa: ANN401 - no types there
    """Run one function, or the whole of a file that has none."""
    given = {k.split("/")[1]: v for k, v in arrays.items() if k.startswith(f"{function}/")}
    if not function:
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], given["x"])
        interpreter.invoke()
        return difference(interpreter.get_tensor(interpreter.get_output_details()[0]["index"]), given["logits"])
    results = interpreter.get_signature_runner(function)(**{k: v for k, v in given.items() if k.startswith("args_")})
    expected = {k: v for k, v in given.items() if k.startswith("output_")}
    if set(results) != set(expected):
        return float("inf")
    return float(np.max([difference(results[k], v) for k, v in expected.items()]))  # NaN stays NaN


def compared_onnx(runtime: Any, path: Path, arrays: dict[str, Array]) -> float:  # noqa: ANN401 - no types there
    """Run a center."""
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return difference(session.run(["logits"], {"x": arrays["/x"]})[0], arrays["/logits"])


def main(module: str, folder: Path) -> int:
    """-> the exit code."""
    runtime, right = importlib.import_module(module), True
    onnx = module == "onnxruntime"
    files = sorted(folder.glob("*.onnx" if onnx else "*.tflite"))
    for path in files:
        arrays = dict(np.load(path.with_suffix(".npz")))
        for function in sorted({name.partition("/")[0] for name in arrays}):
            if onnx:
                worst = compared_onnx(runtime, path, arrays)
            else:
                worst = compared(runtime.Interpreter(model_path=str(path)), arrays, function)
            limit = next((limit for end, limit in QUANTIZED.items() if path.stem.endswith(end)), TOLERANCE)
            right &= worst < limit
            print("ok  " if worst < limit else "FAIL", module, path.stem, function or "logits", f"{worst:.0e}")  # noqa: T201 - its data
    return 0 if right and files else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
