"""Bounds of the buffers in an update: batch norm's running means and variances, which training does not bound. Pure.

A device computes buffers from its own samples, so a bound has to let samples through that are not normalised: the
pixels 0 to 255 have a variance of up to 16,256.
"""

from __future__ import annotations

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.task import Flat, Schema

MAX_BUFFER = 1e12  # absolute value of any buffer; its square is a float32
USUAL_BUFFER = 1e6  # absolute value that a buffer may have whatever the center has
MAX_GROWTH = 1e4  # times the greatest absolute value of the same tensor in the center
VARIANCE_SUFFIX = "running_var"  # of torch's name of a buffer that holds variances; a program does not mark them
CODEC_ERROR = 2.0**-10  # of a tensor's greatest move: twice the rounding of the codec f16


def bounded_buffers(update: Flat, center: Flat | None, schema: Schema) -> Flat:
    """The update [schema.size] with its buffers checked; `center` [schema.size] is where it started, if that is known.

    A variance that the codec rounded below zero becomes zero; an update without one is returned as it is. Raises
    Malformed("rejected") for buffers beyond the bounds, and for other negative variances.
    """
    for tensor in schema.tensors:
        if tensor.role != "b":
            continue
        place = schema.slices[tensor.name]
        values = update[place].astype(np.float64)
        old = None if center is None else center[place].astype(np.float64)
        limit = MAX_BUFFER
        if old is not None:
            limit = min(limit, max(USUAL_BUFFER, MAX_GROWTH * float(np.abs(old).max())))
        if (greatest := float(np.abs(values).max())) > limit:
            raise Malformed("rejected", f"buffer {tensor.name!r:.80} has {greatest:.3g}, at most {limit:g}")
        if tensor.name.endswith(VARIANCE_SUFFIX) and (least := float(values.min())) < 0:
            moved = values if old is None else values - old
            if least < -CODEC_ERROR * float(np.abs(moved).max()):
                raise Malformed("rejected", f"buffer {tensor.name!r:.80} has the variance {least:.3g}, at least 0")
            update = update.copy()
            update[place] = update[place].clip(0)
    return update
