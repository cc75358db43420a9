"""Models whose outputs are added, f(x; w_0) + f(x; w_1) + ..., as one module and therefore one vector.

The buffer `trained` [members] says which members a training step moves: the output of another one counts, and has no
gradient. Each step returns the buffer as it came. So a method chooses by the vector that it sends, and to devices,
containers, bundles and pages a sum is a model like any other. Members begin at different weights; all but the first
begin with a last layer of zeros, so that the sum begins as its first member.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coordinator.models.members import TRAINED
from edge_client.errors import ConfigError
from export.compiler.program import last_layer
from export.compiler.signatures.module_copies import copied


def with_members(module: nn.Module, members: int) -> nn.Module:
    """The sum of `members` modules like this one; a sum, and a module that is to be alone, stays what it is."""
    if members == 1 or isinstance(module, Sum):
        return module
    return Sum([copied(module) for _ in range(members)])


class Sum(nn.Module):
    """The sum of the outputs of modules for the same samples. Raises ConfigError for a member that is one itself."""

    trained: Tensor

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        if any(isinstance(member, Sum) for member in members):
            raise ConfigError("a member of the sum is a sum itself", hint="name every model once, as a+b+c")
        self.members = nn.ModuleList(members)
        self.register_buffer(TRAINED, torch.ones(len(members)))
        with torch.no_grad():
            for member in members[1:]:
                held = dict(member.named_parameters())
                for name in last_layer(member):
                    held[name].zero_()

    def forward(self, x: Tensor) -> Tensor:
        outputs = [member(x) for member in self.members]
        if self.training:  # the value is that of the output, the gradient is the switch times its own
            fixed = [output.detach() for output in outputs]
            outputs = [f + on * (o - f) for o, f, on in zip(outputs, fixed, self.trained, strict=True)]
        total: Tensor = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total
