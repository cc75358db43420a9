"""`python -m tests.benches.step_profile MODEL`: where a step in ONNX Runtime spends its time; batch 32."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import onnxruntime

from tests.support.programs import compiled, feeds

BATCH, STEPS = 32, 20


def main() -> None:
    """An operator a line: milliseconds a step, share of the step, how many nodes."""
    made = compiled(sys.argv[1], engines=("onnx",))
    given = feeds(made.program, "step", batch=BATCH)
    file = made.files[made.program.containers["onnx"]["step"].sha256]
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.enable_profiling = 1, True
        options.profile_file_prefix = str(Path(folder) / "step")
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        for _ in range(STEPS):
            session.run(None, given)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    spent, nodes = Counter[str](), Counter[str]()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
            nodes[event["args"]["op_name"]] += 1
    for name, us in spent.most_common():
        share = us / spent.total()
        sys.stdout.write(f"{name:20} {us / STEPS / 1000:8.2f} ms {share:6.1%} {nodes[name] // STEPS:5} nodes\n")


if __name__ == "__main__":
    main()
