"""What compiling a model costs: CPU seconds of each part with an empty cache, and of the whole with a full one.

"cached" has the containers and compares them with torch, as for a user's model; "kept" is a model of ours as a whole.

    python -m tests.benches.compiling [--model gn-cnn] [--engines onnx litert pt2] [--first]

One thread, a fresh process, converters imported before. Prints a Markdown table, and the process's peak of memory after
the first compilation. Parts within parts are not counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from coordinator.models.compiled import compiled_model
from coordinator.models.registry import MODELS, Model
from edge_client.protocol.program import ENGINES
from export.compiler import containers, program
from export.compiler.container_cache import VARIABLE
from export.containers import write_tflite
from export.silence import suppress_output
from tests.support.architectures import ENTRIES
from tests.support.programs import model as model_named

BATCH = 32
PARTS = {
    program: ("make_source", "_parity", "checked_run"),
    containers: ("trace_function", "export_graph", "to_onnx", "to_tflite", "to_pt2"),
}


def seconds_of(model: Model, engines: tuple[str, ...]) -> float:
    began_s = time.process_time()
    facts = {"name": model.name, "input": model.input, "target": model.output, "loss": model.loss}
    program.compile_program(model.module, **facts, engines=engines)  # type: ignore[arg-type]  # each by its own name
    return time.process_time() - began_s


def measure(model: Model, engines: tuple[str, ...], *, first: bool) -> dict[str, float]:
    """CPU seconds by part; "whole" is all parts with an empty cache, "cached" and "kept" with a full one.

    "peak MiB" is the memory of the process, imports included. `first`: nothing with a full cache.
    """
    spent: Counter[str] = Counter()

    def timed(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any part's
            began_s = time.process_time()
            try:
                return part(*args, **kwargs)
            finally:
                spent[name] += time.process_time() - began_s  # type: ignore[assignment]  # seconds

        return run

    patches = [
        patch.object(room, name, timed(name, getattr(room, name))) for room, names in PARTS.items() for name in names
    ]
    for one in patches:
        one.start()
    whole_s = seconds_of(model, engines)
    for one in patches:
        one.stop()
    found = {**spent, "whole": whole_s, "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if first:
        return found
    found["cached"] = seconds_of(model, engines)
    compiled_model(model, batch=BATCH, engines=engines)
    began_s = time.process_time()
    compiled_model(model, batch=BATCH, engines=engines)
    return {**found, "kept": time.process_time() - began_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*MODELS, *ENTRIES]
    parser.add_argument("--model", default="gn-cnn", choices=known, metavar="MODEL", help=", ".join(known))
    parser.add_argument("--first", action="store_true", help="only with an empty cache")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    with suppress_output():
        import onnxscript  # noqa: F401 - a second of imports that belong to no part

        write_tflite._converter()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {VARIABLE: folder}):
        found = measure(model_named(given.model), tuple(given.engines), first=given.first)
    print("| part | CPU s |\n| --- | --- |")
    for part, seconds in found.items():
        print(f"| {part.strip('_')} | {seconds:.3g} |")


if __name__ == "__main__":
    main()
