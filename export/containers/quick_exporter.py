"""A context in which torch's ONNX exporter takes less time, with the same files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.export import ExportedProgram


@contextmanager
def quick_exporter(opset: int) -> Iterator[None]:
    """Without what the exporter does again for each file, or does for nothing in a graph of ours."""
    with _quick_rules(), _no_needless_trace(), _registry_made_once(opset), _promotion_by_notes():
        yield


def _quick_rules() -> AbstractContextManager[object]:
    """With a first look at a node's operator, before onnxscript sets up a match of each of its rules."""
    from onnxscript.rewriter._rewrite_rule import RewriteRule

    own = RewriteRule.try_rewrite

    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **given: Any) -> Any:  # noqa: ANN401 - onnxscript's own
        operator = rule._target_pattern.output_nodes[0]._op_identifier  # noqa: SLF001 - None: a rule for any operator
        other = operator is not None and operator != node.op_identifier()
        return None if other else own(rule, model, graph, node, **given)

    return patch.object(RewriteRule, "try_rewrite", try_rewrite)


def _no_needless_trace() -> AbstractContextManager[object]:
    """Without the exporter's second trace for graphs in which it would decompose nothing: over half of its time.

    It decomposes operators without a translation, and with them those that write into their arguments.
    """
    from torch.onnx._internal.exporter import _fx_passes

    decompose = _fx_passes.decompose_with_registry

    def decompose_if_needed(exported: ExportedProgram, registry: Any) -> ExportedProgram:  # noqa: ANN401 - torch's own
        calls = {node.target for node in exported.graph.nodes if node.op == "call_function"}
        ops = {op for op in calls if isinstance(op, torch._ops.OpOverload)}  # noqa: SLF001 - no public name
        translated = all(op.name() in registry.functions for op in ops)  # type: ignore[no-untyped-call]
        ready = translated and not any(op._schema.is_mutable for op in ops)  # noqa: SLF001 - no public name
        return exported if ready else decompose(exported, registry)

    return patch.object(_fx_passes, "decompose_with_registry", decompose_if_needed)


def _registry_made_once(opset: int) -> AbstractContextManager[object]:
    """With one table of torch's translations for all files; each export adds its own to a copy."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    def copy_of_registry(opset_version: int) -> ONNXRegistry:
        made = ONNXRegistry()
        made._opset_version = opset_version  # noqa: SLF001 - as from_torchlib does
        made.functions = {name: list(known) for name, known in _torchlib(opset_version).functions.items()}
        return made

    _torchlib(opset)
    return patch.object(ONNXRegistry, "from_torchlib", staticmethod(copy_of_registry))


@cache
def _torchlib(opset_version: int) -> Any:  # noqa: ANN401 - torch's own
    """The table without the translations' signatures, for which torch reads the source of 560 functions.

    A translation that is used gets its signature then, as torch's own nested ones do.
    """
    from torch.onnx._internal.exporter import _registration

    with (
        patch.object(_registration, "onnxscript_apis", SimpleNamespace(get_torchlib_ops=_translations)),
        patch.object(_registration.OnnxDecompMeta, "__post_init__", lambda _self: None),
    ):
        return _registration.ONNXRegistry.from_torchlib(opset_version=opset_version)


def _translations() -> list[SimpleNamespace]:
    """As onnxscript's own list, in its order, without what only a reading of each function's source tells."""
    from onnxscript.function_libs.torch_lib import ops, registration

    del ops  # its import registers them
    return [
        SimpleNamespace(qualified_name=name, function=function, is_complex=is_complex)
        for name, known in registration.default_registry.items()
        if not name.startswith("internal::")
        for functions, is_complex in ((known.overloads, False), (known.complex, True))
        for function in functions
    ]


def _promotion_by_notes() -> AbstractContextManager[object]:
    """With the shapes that the graph's nodes note, where torch's pass for mixed types would run every node again."""
    from torch.onnx._internal.fx.passes import type_promotion

    run_again = torch.fx.Interpreter.run_node

    def run_node(self: Any, n: Any) -> Any:  # noqa: ANN401 - torch's own
        rule = type_promotion.get_type_promotion_rule(n, self.type_promotion_table)
        if rule:
            with self._set_current_node(n):
                self._maybe_promote_node(n, rule)
        noted = n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)
        return n.meta["val"] if noted else run_again(self, n)

    return patch.object(type_promotion._TypePromotionInterpreter, "run_node", run_node)  # noqa: SLF001 - no other
