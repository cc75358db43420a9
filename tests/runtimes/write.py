"""Local updates for suite.py: programs as the coordinator would send them, and what torch makes of them in float64.

MODEL.json              the program's manifest; its containers lie beside it under their hashes
MODEL-ENGINE.npz        "given/NAME" begins the update, "K/NAME" is its batch K; "after/NAME" and "losses" are what
                        torch ends with; "asked/NAME" and "told/NAME" are an evaluation; "limit" is how far off a
                        runtime may be
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from edge_client.engines.base import FIXED_ROLES, UPDATED_ROLES
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Tensors
from tests.support.programs import BATCH, compiled, feeds, model, relative, torch_evaluate, torch_step

MODELS = ("digits-mlp", "wecfl-cnn")  # a batch norm, a pool and convolutions are in the second
ENGINES = ("onnx", "litert")
STEPS = 6
SHORT = 5  # samples of the last batch
# Float32 over six steps: a few roundings each, and torch's own distance from itself where a model enlarges them.
LIMIT, ROOM = 5e-5, 10


def main(folder: Path) -> None:
    """Write them all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        made = compiled(name, engines=ENGINES)
        (folder / f"{name}.json").write_bytes(canonical_json(made.program.to_json()))
        for sha256, file in made.files.items():
            (folder / sha256).write_bytes(file)
        for engine in ENGINES:
            arrays: dict[str, Array] = update(made.program, made.program.batch[engine] == "any")
            np.savez(folder / f"{name}-{engine}.npz", allow_pickle=False, **arrays)


def update(program: Program, any_size: bool) -> dict[str, Array]:  # noqa: FBT001 - what the manifest says
    """One local update with every term switched on, and an evaluation of what it began with."""
    given = feeds(program, "step", batch=BATCH)
    batches = [_fresh(feeds(program, "step", batch=BATCH, seed=k)) for k in range(STEPS - 1)]
    batches.append(_fresh(feeds(program, "step", batch=SHORT if any_size else BATCH, seed=STEPS)))
    if not any_size:
        batches[-1]["q"][SHORT:] = 0  # rows that fill the last batch weigh nothing
    after, own = (_trained(program, given, batches, dtype) for dtype in (torch.float64, torch.float32))
    asked = feeds(program, "evaluate", batch=BATCH)
    told = torch_evaluate(model(program.model).module, asked)
    losses = after.pop("losses")
    limit = max(LIMIT, ROOM * relative(own, after | {"losses": losses}))
    parts = {
        "given": {n: v for n, v in given.items() if n not in batches[0]},
        "after": after,
        "asked": asked,
        "told": told,
    }
    parts |= {str(k): batch for k, batch in enumerate(batches)}
    named = {f"{part}/{name}": value for part, arrays in parts.items() for name, value in arrays.items()}
    return named | {"losses": losses, "limit": np.array(limit)}


def _fresh(given: Tensors) -> dict[str, Array]:
    """What a step reads anew."""
    return {n: v for n, v in given.items() if n.partition("/")[0] not in (*UPDATED_ROLES, *FIXED_ROLES)}


def _trained(program: Program, given: Tensors, batches: list[dict[str, Array]], dtype: torch.dtype) -> dict[str, Array]:
    """Weights and buffers after all steps, and `losses`. No velocity: that of a bias before a batch norm is noise."""
    feed, losses, moved = dict(given), [], dict[str, Array]()
    for batch in batches:
        moved = torch_step(model(program.model).module, feed | batch, dtype=dtype)
        losses.append(moved.pop("loss"))
        feed |= moved
    return {n: v for n, v in moved.items() if not n.startswith("velocity/")} | {"losses": np.array(losses)}
