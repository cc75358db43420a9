"""What each way to make a center's file smaller costs: accuracy per device on held-out samples, bytes, time.

    python -m tests.benches.quantization RUN [--data DIR] [--out FOLDER] [--tensorflow PYTHON]

RUN is a folder of `fedcenters-emulator simulate`. Every center is written as float32 ONNX and TFLite, then by each
tool; each device's test samples go through the file of its own center. --tensorflow names a Python with tensorflow in
it (as `make readers` makes), whose quantizer then joins in. Prints a Markdown table. export/bundle/quantize.py has what
was chosen; DECISIONS.md says why.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.models.registry import build_model
from edge_client.protocol import codecs
from emulator import bundle_source as simulated
from export.bundle import quantize
from export.bundle.bundle_contents import LabelledSamples
from export.bundle.center_files import export_center
from export.bundle.verify_centers import accuracy_by_device, latency_ms, open_model
from export.compiler.program import load_vector, schema_of
from export.silence import suppress_output

Tool = Callable[[bytes, LabelledSamples], bytes]
TENSORFLOW = Path(__file__).parents[1] / "readers" / "quantize.py"


def ours(fmt: str, scheme: str) -> Tool:
    return lambda file, seen: quantize.quantize_file(file, fmt, scheme, seen)


def onnx_half(file: bytes, _: LabelledSamples) -> bytes:
    """ONNX Runtime's converter: half precision in the computation too, where the processor has it."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    made = convert_float_to_float16(onnx.load_model_from_string(file), keep_io_types=True)
    return made.SerializeToString()  # type: ignore[no-any-return]


def onnx_dynamic(file: bytes, _: LabelledSamples) -> bytes:
    """ONNX Runtime's quantize_dynamic: int8 weights, and activations in int8 by their own range each time."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as name:
        whole, ready, small = (Path(name) / part for part in ("a.onnx", "ready.onnx", "b.onnx"))
        whole.write_bytes(file)
        quant_pre_process(str(whole), str(ready), skip_symbolic_shape=True)
        proto = onnx.load(str(ready))
        del proto.graph.value_info[:]  # shapes of before the tool transposes a Gemm's weights, over which it stumbles
        onnx.save(proto, str(ready))
        quantize_dynamic(str(ready), str(small), weight_type=QuantType.QInt8, per_channel=True)
        return small.read_bytes()


def tflite_dynamic(file: bytes, _: LabelledSamples) -> bytes:
    """ai-edge-quantizer: int8 weights, and activations in int8 by their own range each time."""
    from ai_edge_quantizer import quantizer, recipe

    return bytes(quantizer.Quantizer(bytearray(file), recipe.dynamic_wi8_afp32()).quantize().quantized_model)


def tflite_averaged(file: bytes, seen: LabelledSamples) -> bytes:
    """ai-edge-quantizer's own calibration, which averages each range over the samples."""
    from ai_edge_quantizer import quantizer, recipe

    tool = quantizer.Quantizer(bytearray(file), recipe.static_wi8_ai8())
    for end in (quantizer.qtyping.TFLOperationName.INPUT, quantizer.qtyping.TFLOperationName.OUTPUT):
        tool.update_quantization_recipe(".*", end, algorithm_key=quantizer.algorithm_manager.AlgorithmName.NO_QUANTIZE)
    rows = [{"x": row[np.newaxis]} for row in seen.subsample(quantize.MAX_CALIBRATION_SAMPLES).x]
    return bytes(tool.quantize(tool.calibrate({"serving_default": rows}, num_threads=1)).quantized_model)


def by_tensorflow(python: str) -> Tool:
    """TensorFlow's post-training quantizer over the same TFLite file, in its own environment."""

    def made(file: bytes, seen: LabelledSamples) -> bytes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "a.tflite").write_bytes(file)
            np.savez(folder / "x.npz", x=seen.subsample(quantize.MAX_CALIBRATION_SAMPLES).x)
            subprocess.run([python, str(TENSORFLOW), name], check=True, capture_output=True)
            return (folder / "b.tflite").read_bytes()

    return made


def tools(fmt: str, tensorflow: str) -> dict[str, Tool]:
    rows: dict[str, Tool] = {f"{scheme} (ours)": ours(fmt, scheme) for scheme in quantize.SCHEMES_OF[fmt]}
    if fmt == "onnx":
        return rows | {"fp16, ONNX Runtime's": onnx_half, "int8, quantize_dynamic": onnx_dynamic}
    rows["int8, dynamic recipe"] = tflite_dynamic
    rows["int8-static, averaged ranges"] = tflite_averaged
    return rows | ({"int8-static, TensorFlow's": by_tensorflow(tensorflow)} if tensorflow else {})


def files_of(run: Path) -> Iterator[tuple[int, str, bytes]]:
    """(center, format, float32 file)."""
    asked = simulated._asked(run)
    model = build_model(asked["model"], seed=asked["seed"])
    schema = schema_of(model.module)
    paths = sorted((run / "centers").glob("*/center-*.safetensors"))
    for k, path in enumerate(paths):
        load_vector(model.module, schema, codecs.decode_vector(path.read_bytes(), schema, kind="model"))
        for fmt in ("onnx", "tflite"):
            yield k, fmt, export_center(model.module, model.input, fmt)


def measure(run: Path, data: Path | None, tensorflow: str, out: Path | None) -> list[dict[str, Any]]:
    """One row per center, format and tool; accuracies by device, None where the tool failed."""
    test, seen = simulated.held_out(run, data=data), simulated.calibration(run, data=data)
    if test is None or seen is None:
        raise ValueError("the run has no samples")
    rows = []
    for k, fmt, file in files_of(run):
        mine = test.rows(test.center == k)
        made: dict[str, Callable[[], bytes]] = {"float32": lambda file=file: file}  # type: ignore[misc]
        for name, tool in tools(fmt, tensorflow).items():
            made[name] = lambda file=file, tool=tool: tool(file, seen)  # type: ignore[misc]
        for name, make in made.items():
            try:
                with suppress_output():
                    small = make()
                if out is not None:
                    (out / f"{run.parent.name}-{k}-{name.replace(' ', '-')}.{fmt}").write_bytes(small)
                go = open_model(small, fmt)
                accuracy, ms, size = accuracy_by_device(go(mine.x), mine), latency_ms(go, mine.x), len(small)
            except Exception as wrong:  # noqa: BLE001 - a tool that fails is a row too
                print(f"center {k} {fmt} {name}: {str(wrong)[:200]}", file=sys.stderr, flush=True)
                rows.append({"center": k, "format": fmt, "tool": name, "accuracy": None})
                continue
            rows.append({"center": k, "format": fmt, "tool": name, "size": size, "ms": ms, "accuracy": accuracy})
            print(
                k,
                fmt,
                name,
                size,
                f"{ms:.2f} ms",
                f"{np.mean(list(accuracy.values())):.4f}",
                file=sys.stderr,
                flush=True,
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Per format and tool: bytes, mean accuracy of the devices, loss of the mean, of the worst center and device.

    A tool that failed for a center has no figures: means over the other centers would be of other devices.
    """
    lines = [
        "| file | made by | bytes | accuracy, mean of devices | loss, mean | worst center | worst device | ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for fmt in ("onnx", "tflite"):
        mine = [r for r in rows if r["format"] == fmt]
        base = {r["center"]: r["accuracy"] for r in mine if r["tool"] == "float32"}
        for tool in dict.fromkeys(r["tool"] for r in mine):
            found = [r for r in mine if r["tool"] == tool]
            if any(r["accuracy"] is None or base[r["center"]] is None for r in found):
                lines.append(f"| {fmt} | {tool} | failed | | | | | |")
                continue
            lost = {r["center"]: {d: base[r["center"]][d] - a for d, a in r["accuracy"].items()} for r in found}
            every = [v for devices in lost.values() for v in devices.values()]
            worst = max(float(np.mean(list(devices.values()))) for devices in lost.values())
            mean = np.mean([a for r in found for a in r["accuracy"].values()])
            ms, size = (float(np.median([r[key] for r in found])) for key in ("ms", "size"))
            lines.append(
                f"| {fmt} | {tool} | {size:,.0f} | {mean:.2%} | {100 * np.mean(every):+.2f} | {100 * worst:+.2f} "
                f"| {100 * max(every):+.2f} | {ms:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, help="keep the files here")
    parser.add_argument("--tensorflow", default="", help="a Python with tensorflow")
    args = parser.parse_args()
    print(table(measure(args.run, args.data, args.tensorflow, args.out)))


if __name__ == "__main__":
    main()
