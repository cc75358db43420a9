"""Compare a written program with its torch model: each container runs on the same inputs as torch.

The inputs make mistakes visible: w != anchor, velocity and linear not zero, q not constant, and half of the samples
half zero, so that windows of pools have ties. program_parity.py computes the difference.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from edge_client.errors import ProgramRefused
from edge_client.protocol.codecs import decode_frozen
from edge_client.protocol.program import ENGINES, Program
from export.compiler.adapters.frozen import load_frozen
from export.compiler.forward_pass import uncompiled
from export.compiler.losses.sample_losses import LossFunction
from export.compiler.program import make_source
from export.compiler.program_folder import FROZEN_FILE, ContainerFile, ProgramFolder, container_files, read_folder
from export.compiler.program_functions import TraceSource, function_ports
from export.compiler.program_parity import MAX_RELATIVE_DIFFERENCE, max_difference
from export.compiler.signatures.packed_inputs import pack_module
from export.diagnostics import first_sentence, raise_for_machine

BATCH_SIZES = (8, 3)  # for engines that take any batch size
log = logging.getLogger(__name__)
SEED = 2  # other inputs than those of the compiler's own measurement


@uncompiled()
def check_folder(
    path: Path,
    module: nn.Module,
    *,
    loss: LossFunction | None = None,
    tolerance: float = MAX_RELATIVE_DIFFERENCE,
    seed: int = SEED,
) -> list[dict[str, Any]]:
    """Check hashes, then compare, and log what. Rows: file, engine, function, batches, difference, ok.

    `loss` is the function that the program was compiled with, if it was one.
    Raises ConfigError or Malformed for an incomplete or altered folder, ProgramRefused for another model's program.
    """
    folder = read_folder(path)
    program = folder.program
    if program.own_loss != (loss is not None):
        raise ProgramRefused(
            f"program.json was compiled with {'a loss of its own' if program.own_loss else program.loss}",
            hint="check it in Python: export.compiler.check_program.check_folder(path, module, loss=function)"
            if program.own_loss
            else "leave `loss` out",
        )
    source = make_source(
        pack_module(module, program.parts) if program.parts else module,
        name=program.model,
        input=program.input,
        target=program.target,
        loss=program.loss,
        own_loss=loss,
        own_targets=None if program.has_classes else program.truth,
        dtype=program.dtype,
        parts=program.parts,
    )
    _refuse_other(program, source)
    source = _with_frozen(source, folder)
    rows = []
    for file in (f for f in container_files(program) if f.functions):
        fixed = program.batch[file.engine]
        batches = BATCH_SIZES if fixed == "any" else (fixed,)
        for function in file.functions:
            log.info("comparing %s of %s with torch", function, file.name)
            worst = max(_difference(source, folder, file, function, b, seed, tolerance) for b in batches)
            row = {"file": file.name, "engine": file.engine, "function": function, "batches": list(batches)}
            rows.append({**row, "difference": worst, "ok": worst <= tolerance})
    return rows


def _with_frozen(source: TraceSource, folder: ProgramFolder) -> TraceSource:
    """The source with the frozen parameters as the folder stores them: float16 and int8 have rounded them."""
    if source.frozen is None or FROZEN_FILE not in folder.blobs:
        return source
    file = folder.blobs[FROZEN_FILE]
    load_frozen(source.module, decode_frozen(file, source.frozen.schema))
    return replace(source, frozen=replace(source.frozen, file=file))


def _refuse_other(program: Program, source: TraceSource) -> None:
    mine, theirs = source.schema.tensors, program.schema.tensors
    if mine != theirs:
        differ = next((f"{t.name} {list(t.shape)}" for m, t in zip(mine, theirs, strict=False) if m != t), "fewer")
        raise ProgramRefused(
            f"the program was made from another model: {len(theirs)} tensors, and this one has {len(mine)}; "
            f"the first that differs there: {differ}",
            hint="give the --model and --model-args that it was compiled with",
        )
    if program.frozen != (None if source.frozen is None else source.frozen.schema):
        raise ProgramRefused(
            "the program was made from a model with other frozen parameters",
            hint="give the --model and --model-args that it was compiled with",
        )
    if any(function_ports(source, name) != function for name, function in program.functions.items()):
        raise ProgramRefused(
            "program.json lists other inputs than this version writes", hint="compile the program again"
        )


def _difference(  # noqa: PLR0913, PLR0917 - what is compared
    source: TraceSource, folder: ProgramFolder, file: ContainerFile, function: str, batch: int, seed: int, limit: float
) -> float:
    if file.engine not in ENGINES:
        raise ProgramRefused(f"{file.name} is for an engine that this version does not know", hint="update fedcenters")
    try:
        return max_difference(
            source,
            file.engine,
            function,
            folder.blobs[file.name],
            batch=batch,
            seed=seed,
            limit=limit,
        )
    except ImportError:
        raise
    except Exception as wrong:  # each runtime has its own exceptions for a file that it cannot load
        raise_for_machine(wrong)
        raise ProgramRefused(
            f"{file.name} cannot be run: {first_sentence(wrong)}", hint="compile the program again"
        ) from wrong
