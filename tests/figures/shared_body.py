"""`python -m tests.figures.shared_body`: what clusters lose, and masked uploads save, if only the last layer is theirs.

Each cell is FeSEM's in the clear of the experiment secure-sums, but that all centers have one body: the mean of all
devices' models in every column outside the classifier. It is compared, seed by seed, with the kept cells of `--kept`.
`bytes` are those of one masked upload with `secure = updates+membership` in words of 32 bits: K whole blocks, and one
block of the body with K of the classifier; each has 2 words more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from coordinator.models.registry import build_model
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.protocol.task import Array, Schema
from emulator.data import registry
from emulator.experiments.cells import CellRun, CellStorage, measure_cell, read_finished
from emulator.experiments.plan import read_plan
from emulator.experiments.table import paired_difference, seed_figures
from export.compiler.program import schema_of

ROW, MODELS, WORD = "FeSEM", ("mnist-mlp", "wecfl-cnn"), 4
whole = ServerOptions.aggregate


def with_one_body(
    self: ServerOptions,
    centers: Array,
    updates: ClientUpdates,
    R: Array,
    a: Array,
    schema: Schema,
    **how: Any,  # noqa: ANN401
) -> Array:
    """`ServerOptions.aggregate`, then the body of all devices in each center."""
    out = whole(self, centers, updates, R, a, schema, **how)
    common = whole(self, centers[:1], updates, np.ones((len(R), 1)), a, schema, **how)[0]
    heads = np.zeros(schema.size, dtype=np.bool_)
    for name in schema.classifier:
        heads[schema.slices[name]] = True
    return np.where(heads, out, common)


def upload_bytes(model: str, centers: int) -> dict[str, int]:
    """Bytes of one masked upload of K whole blocks, and of one body and K classifiers."""
    schema = schema_of(build_model(model, seed=0).module)
    head = sum(schema.slices[name].stop - schema.slices[name].start for name in schema.classifier)
    size = schema.n_params
    return {
        "whole": WORD * centers * (size + 2),
        "shared": WORD * ((size - head + 2) + centers * (head + 2)),
        "one": WORD * (size + 2),
    }


def say(line: dict[str, Any]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--kept", type=Path, default=Path("docs/results/secure-sums"))
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    plan = read_plan("secure-sums")
    (cell,) = (one for one in plan.cells if one.row.name == ROW)
    say({"bytes": {model: upload_bytes(model, cell.row.k) for model in MODELS}})
    shared, kept = list[Any](), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        place = CellStorage(data=asked.data, out=Path(folder))
        for seed in range(asked.seeds):
            job = CellRun(cell=cell, seed=seed)
            data = registry.load_data_set(cell.column.data_set, asked.data, seed=seed)
            with patch.object(ServerOptions, "aggregate", with_one_body):
                found = measure_cell(job, place, data, plan.metrics, lambda *_: None)
            shared.append(found)
            kept.append(read_finished(job, CellStorage(data=None, out=asked.kept)))
            figures = [seed_figures([one], "accuracy") for one in (found, kept[-1])]
            say({"seed": seed, "shared": figures[0], "whole": figures[1]})
    mean, half, n = paired_difference(seed_figures(shared, "accuracy"), seed_figures(kept, "accuracy"))
    say({"shared less whole": round(mean, 2), "half of 95 %": half and round(half, 2), "seeds": n})
    return 0


if __name__ == "__main__":
    sys.exit(main())
