"""A file for LiteRT takes less of JAX's time, and is the same to the last byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.export.decomp_utils import CustomDecompTable

from export.compiler.program import compile_program
from export.containers import quick_lowering, write_tflite
from export.silence import suppress_output


def written(patch: pytest.MonkeyPatch) -> tuple[str, int, int, list[str], int]:
    """Of one small program: its file's hash, JAX's contexts and lowered operators, and the texts that became bytecode.

    And how often torch made its table of decompositions. One of the program's operators, the error function, is of
    CHLO in JAX.
    """
    with suppress_output():  # a first import warns while it compiles, which is an error in a test
        from jax._src.interpreters import mlir
        from litert_torch.backend.jax_bridge import _wrap

    contexts, lowered, texts, tables = list[object](), list[object](), list[str](), list[object]()
    context, jit, bytecode = mlir.make_ir_context, _wrap.jax.jit, _wrap._stablehlo_to_vhlo
    table = CustomDecompTable.__init__

    def one_more() -> object:
        contexts.append(context())
        return contexts[-1]

    def lowers(function: Callable[..., object]) -> object:
        lowered.append(function)
        return jit(function)

    def told(text: str) -> bytes:
        texts.append(text)
        return bytes(bytecode(text))

    def one_more_table(made: CustomDecompTable) -> None:
        tables.append(made)
        table(made)  # type: ignore[no-untyped-call]

    patch.setattr(CustomDecompTable, "__init__", one_more_table)
    patch.setattr(mlir, "make_ir_context", one_more)
    patch.setattr(_wrap, "jax", SimpleNamespace(jit=lowers))
    patch.setattr(_wrap, "_stablehlo_to_vhlo", told)
    torch.manual_seed(0)
    program = compile_program(nn.Sequential(nn.Linear(6, 3), nn.GELU()), (6,), batch=2, engines=("litert",)).program
    return program.containers["litert"]["step"].sha256, len(contexts), len(lowered), texts, len(tables)


def test_functions_share_what_jax_makes_and_each_text_becomes_bytecode_once_for_the_same_file() -> None:
    quick_lowering._bytecode_maker.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            file, contexts, lowered, texts, _ = written(patch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(write_tflite, "quick_lowering", nullcontext)
            slow_file, slow_contexts, slow_lowered, slow_texts, tables = written(patch)
    finally:
        quick_lowering._bytecode_maker.cache_clear()  # it remembers what counts here
    assert file == slow_file
    assert any("chlo." in text for text in texts)
    assert contexts == 1 < slow_contexts
    assert lowered < slow_lowered
    assert len(texts) == len(set(slow_texts)) < len(slow_texts)
    assert tables == 2  # the converter's, once each, not for each function; of the second call: imports make some
