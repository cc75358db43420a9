"""`make readers`, first half: writes .tflite files into a folder, each with inputs and what torch makes of them.

    NAME.tflite, NAME.npz   "<function>/args_<i>" and "<function>/output_<i>", positional as in the file; a center's
                            file has no functions, its arrays are "/x" and "/logits"
    NAME.onnx, NAME.npz     a center

A center is there in float32 and in every quantization. The expected values come from torch in float64 and from no
runtime. Reads nothing, judges nothing: read.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge_client.protocol.task import Array
from export.bundle.bundle_contents import LabelledSamples
from export.bundle.center_files import export_center
from export.bundle.quantize import SCHEMES_OF, quantize_file
from tests.support.programs import BATCH, compiled, feeds, model, torch_evaluate, torch_step

MODELS = ("digits-mlp", "wecfl-cnn", "gn-cnn")


def program_file(name: str) -> tuple[bytes, dict[str, Array]]:
    """A program's file with every function of it."""
    made, known = compiled(name, engines=("litert",)), model(name)
    arrays: dict[str, Array] = {}
    for function, ports in made.program.functions.items():
        given = feeds(made.program, "step" if function == "step" else "evaluate", batch=BATCH)
        results = torch_step(known.module, given) if function == "step" else torch_evaluate(known.module, given)
        arrays |= {f"{function}/args_{i}": given[port.name] for i, port in enumerate(ports.inputs)}
        arrays |= {f"{function}/output_{i}": results[port.name] for i, port in enumerate(ports.outputs)}
    return made.files[made.program.containers["litert"]["step"].sha256], arrays


def center_files(name: str) -> Iterator[tuple[str, bytes, dict[str, Array]]]:
    """(file name, file, arrays): one sample in, its logits out. The center is the model as it was built."""
    known, given = model(name), feeds(compiled(name, engines=("litert",)).program, "evaluate", batch=1)
    expected = torch_evaluate(known.module, {"x": given["x"], "y": given["y"]})
    arrays = {"/x": given["x"], "/logits": expected["logits"]}
    for fmt in ("onnx", "tflite"):
        file = export_center(known.module, known.input, fmt)
        yield f"{name}-center.{fmt}", file, arrays
        for scheme in SCHEMES_OF[fmt]:
            yield (
                f"{name}-center-{scheme}.{fmt}",
                quantize_file(file, fmt, scheme, LabelledSamples(x=given["x"])),
                arrays,
            )


def main(folder: Path) -> None:
    """Write them all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        for label, file, arrays in ((f"{name}.tflite", *program_file(name)), *center_files(name)):
            (folder / label).write_bytes(file)
            np.savez((folder / label).with_suffix(".npz"), allow_pickle=False, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
