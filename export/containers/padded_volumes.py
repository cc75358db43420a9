"""Convolutions of volumes with padding, on some of which LiteRT's converter ends the process.

litert-converter 0.5.0 crashes (a segmentation fault) on a padded 3-D convolution with strides or groups. One that finds
its zeros around the volume has the same values; groups are then refused in words.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from export.containers.expand_nodes import describe_node

ATEN = torch.ops.aten
CONVOLUTIONS = (ATEN.conv3d.default, ATEN.convolution.default)
PADDING, TRANSPOSED = 4, 6  # places of their arguments; the last one has `convolution` alone
VOLUME = 5  # axes of a batch of volumes


def pad_volumes_first(exported: ExportedProgram) -> None:
    """Pad what a 3-D convolution reads, so that it pads nothing itself; every value and shape stays."""
    graph = exported.graph
    for node in [one for one in graph.nodes if one.target in CONVOLUTIONS and len(one.args) > PADDING]:
        given, padding = node.args[0], node.args[PADDING]
        transposed = node.target == ATEN.convolution.default and node.args[TRANSPOSED]
        if given.meta["val"].dim() != VOLUME or transposed or not any(padding):
            continue
        each = list(padding) * (3 // len(padding))
        around = [amount for amount in reversed(each) for _ in range(2)]  # the last axis first
        with graph.inserting_before(node):
            padded = graph.call_function(ATEN.constant_pad_nd.default, (given, around, 0.0))
        describe_node(padded, ATEN.constant_pad_nd.default(given.meta["val"], around, 0.0))
        node.args = (padded, *node.args[1:PADDING], [0, 0, 0], *node.args[PADDING + 1 :])
    exported.graph_module.recompile()
