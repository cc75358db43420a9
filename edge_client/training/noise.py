"""The random numbers of a training step: what dropout compares with its probability. Every engine gets the same ones.

A step that draws at random has an input `noise` [batch, numbers per sample] of uniform numbers in [0, 1); each operator
takes the next columns. They follow from the task's seed and the step's number alone (PROTOCOL.md, section 8), so a
device that starts again, or another implementation, gets the same bits.
"""

from __future__ import annotations

import numpy as np

from edge_client.protocol.program import Program
from edge_client.protocol.task import Array


def step_noise(program: Program, seed: int, step: int, samples: int) -> dict[str, Array]:
    """`noise` [samples, numbers per sample] for step number `step` (from 0) of a task; nothing for a program without.

    numpy's float32 uniform numbers, the upper 24 bits of a 32-bit draw times 2^-24, whatever the program's dtype.
    """
    step_inputs = program.functions["step"].inputs if "step" in program.functions else ()
    port = next((p for p in step_inputs if p.name == "noise"), None)
    if port is None:
        return {}
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(step,))))
    shape = (samples, *(int(d) for d in port.shape[1:]))
    return {"noise": stream.random(shape, dtype=np.float32).astype(program.dtype, copy=False)}
