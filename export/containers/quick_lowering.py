"""A context in which JAX's part of a conversion for LiteRT, one operator at a time, takes half of its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from unittest.mock import patch


@contextmanager
def quick_lowering() -> Iterator[None]:
    """With the same file, to the last byte.

    All operators of a conversion share one MLIR context, which JAX would make anew for each. An operator's text becomes
    bytecode once: functions, programs and centers repeat their operators, and the text has its shapes and constants.
    """
    from jax._src.interpreters import mlir
    from litert_torch.backend.jax_bridge import _wrap

    with (
        patch.object(mlir, "make_ir_context", cache(mlir.make_ir_context)),
        patch.object(_wrap, "_stablehlo_to_vhlo", _bytecode_maker()),
    ):
        yield


@cache
def _bytecode_maker() -> Callable[[str], bytes]:
    from litert_torch.backend.jax_bridge import _wrap

    return lru_cache(maxsize=1_024)(_wrap._stablehlo_to_vhlo)  # noqa: SLF001 - the converter has no setting
