"""What the process loads that all workers are copies of; importing this module is the work, and nobody else should.

Workers share these pages until one of them writes. A collector visits every object and writes to it, so what is here is
frozen: it would else become each worker's own, 45 MB of it.
"""

from __future__ import annotations

import gc

import torch._inductor  # noqa: F401 - torch loads it when it first records a step

import emulator.engines.registry
import emulator.parallel.worker  # noqa: F401 - what they are for

gc.collect()
gc.freeze()
