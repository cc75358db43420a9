"""Convolutions of volumes, on some of which LiteRT's converter ends the process.

litert-converter 0.5.0 crashes (a segmentation fault) on a padded 3-D convolution with strides or groups, and on a
transposed one. One that finds its zeros around the volume has the same values. Groups and transposed ones, which it
takes in no form, are refused before it sees them.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from export.containers.expand_nodes import describe_node

ATEN = torch.ops.aten
CONVOLUTIONS = (ATEN.conv3d.default, ATEN.convolution.default)
PADDING, TRANSPOSED = 4, 6  # places of their arguments; the last one has `convolution` alone
VOLUME = 5  # axes of a batch of volumes


def pad_volumes_first(exported: ExportedProgram) -> None:
    """Pad what a 3-D convolution reads, so that it pads nothing itself; every value and shape stays.

    Raises ValueError for one that the converter cannot take.
    """
    graph = exported.graph
    found = [node for node in graph.nodes if node.target in CONVOLUTIONS and node.args[0].meta["val"].dim() == VOLUME]
    for node in found:
        _check(node)
    for node in [one for one in found if len(one.args) > PADDING and any(one.args[PADDING])]:
        given, padding = node.args[0], node.args[PADDING]
        each = list(padding) * (3 // len(padding))
        around = [amount for amount in reversed(each) for _ in range(2)]  # the last axis first
        with graph.inserting_before(node):
            padded = graph.call_function(ATEN.constant_pad_nd.default, (given, around, 0.0))
        describe_node(padded, ATEN.constant_pad_nd.default(given.meta["val"], around, 0.0))
        node.args = (padded, *node.args[1:PADDING], [0, 0, 0], *node.args[PADDING + 1 :])
    exported.graph_module.recompile()


def _check(node: Node) -> None:
    if node.target == ATEN.convolution.default and node.args[TRANSPOSED]:
        told = "ConvTranspose3d, or Conv3d with strides behind the first trained layer, whose gradient is one"
        raise ValueError(f"its converter takes no transposed convolution of volumes ({told})")
    given, weight = node.all_input_nodes[:2]
    if given.meta["val"].shape[1] != weight.meta["val"].shape[1]:
        raise ValueError("its converter takes no Conv3d with groups")
