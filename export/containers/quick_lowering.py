"""A context in which JAX's part of a conversion for LiteRT, one operator at a time, takes a fraction of its time."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_lowering() -> Iterator[None]:
    """With the same file, to the last byte.

    All operators of a conversion share one MLIR context, which JAX would make anew for each, and so does their way into
    bytecode. An operator's text becomes bytecode once: functions, programs and centers repeat their operators, and the
    text has its shapes and constants. What was lowered for one function of a program serves the others.
    """
    from jax._src.interpreters import mlir
    from litert_torch.backend.jax_bridge import _wrap

    with (
        patch.object(mlir, "make_ir_context", cache(mlir.make_ir_context)),
        patch.object(_wrap, "serialize_portable_artifact", _serializer()),
        patch.object(_wrap, "_stablehlo_to_vhlo", _bytecode_maker()),
        patch.object(_wrap, "JaxBridgeLoweringCache", _lowerings_of_all_functions()),
    ):
        yield


@cache
def _bytecode_maker() -> Callable[[str], bytes]:
    from litert_torch.backend.jax_bridge import _wrap

    return lru_cache(maxsize=1_024)(_wrap._stablehlo_to_vhlo)  # noqa: SLF001 - the converter has no setting


def _serializer() -> Callable[[str, str], bytes]:
    """StableHLO text and the version of its bytecode -> the bytecode, without a context for this text alone.

    Text with operators of CHLO, which first become StableHLO, goes the converter's own way.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir, passmanager
    from jax._src.lib.mlir.dialects import hlo
    from litert_torch.backend.jax_bridge import _wrap

    own = _wrap.serialize_portable_artifact

    def serialize(text: str, version: str) -> bytes:
        if "chlo." in text:
            made: bytes = own(text, version)
            return made
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            passmanager.PassManager.parse("builtin.module(func.func(canonicalize))").run(module.operation)
            return bytes(hlo.serialize_portable_artifact(module, version))

    return serialize


def _lowerings_of_all_functions() -> type:
    """The converter's cache of lowered operators, which is one for each function, with a store for those of all."""
    from litert_converter.mlir import ir  # type: ignore[import-untyped]
    from litert_torch.backend.jax_bridge import _wrap

    held: dict[Any, Any] = {}  # (context, what is lowered) -> the function, in a module of its own

    class SharedLowerings(_wrap.JaxBridgeLoweringCache):  # type: ignore[misc]  # the package has no types
        module: Any = None  # that of the function which is lowered

        @classmethod
        def get(cls, lctx: Any) -> SharedLowerings:  # noqa: ANN401
            found: SharedLowerings = super().get(lctx)
            found.module = lctx.ir_module
            return found

        def get_func_op(self, identifier: Any) -> Any:  # noqa: ANN401
            found, key = super().get_func_op(identifier), self._key(identifier)
            if found is None and key in held:
                with ir.InsertionPoint.at_block_begin(self.module.body):
                    found = held[key][1].clone()
                    name = f"shared_{self.next_id}_{uuid.uuid4().hex[:8]}"
                    found.attributes["sym_name"] = ir.StringAttr.get(name)
                    self.next_id += 1
                super().set_func_op(identifier, found)
            return found

        def set_func_op(self, identifier: Any, func_op: Any) -> None:  # noqa: ANN401
            super().set_func_op(identifier, func_op)
            key = self._key(identifier)
            if key is not None:
                alone = ir.Module.create()
                with ir.InsertionPoint(alone.body):
                    held[key] = (alone, func_op.clone())

        def _key(self, identifier: Any) -> Any:  # noqa: ANN401
            told = _wrap.get_cache_fingerprint(identifier)
            return None if told is None else (self.module.context, told)

    return SharedLowerings
