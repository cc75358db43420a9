"""The imports of the process that the workers are forked from. No other process imports this module.

Workers share its pages until one of them writes. The garbage collector writes to every object that it visits, so the
objects are frozen; without this each worker would copy 45 MB of them.
"""

from __future__ import annotations

import gc

import emulator.engines.registry
import emulator.parallel.worker  # noqa: F401 - the loop of a worker

gc.collect()
gc.freeze()
