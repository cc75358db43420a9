"""Models that torch.export takes only as the layer of another one.

Those with a layer, parameter or buffer whose name torch keeps for its graphs: `code`, `graph`, `meta` and others. And
those of which a layer gives a buffer another tensor (`self.mean = new`): torch writes it back for the outermost module
alone, and drops it in silence for the layers in it. The exported pass then has the tensors under their own names again.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

TAKEN = frozenset(dir(fx.GraphModule({}, fx.Graph()))) - frozenset(dir(nn.Module()))
TENSORS = ("_parameters", "_buffers", "_modules")


def has_taken_name(module: nn.Module) -> bool:
    """Whether torch keeps the name of one of the module's own layers, parameters or buffers."""
    return any(not TAKEN.isdisjoint(vars(module)[kind]) for kind in TENSORS)


class OneLevelDown(nn.Module):
    """The model as the only layer; a buffer that its pass replaces gets the new values in place at the end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *samples: Any) -> Any:  # noqa: ANN401 - as the model's own
        held = [(layer, name, value) for layer in self.modules() for name, value in layer.named_buffers(recurse=False)]
        out = self.model(*samples)
        replaced = [(layer, name, value) for layer, name, value in held if getattr(layer, name) is not value]
        news = [getattr(layer, name).clone() for layer, name, _ in replaced]  # one may be the old tensor of another
        for (layer, name, value), new in zip(replaced, news, strict=True):
            value.copy_(new)
            setattr(layer, name, value)
        return out


class OneLevelUp(nn.Module):
    """The exported pass of a OneLevelDown, with the tensors of its only layer: those that are given here are its."""

    def __init__(self, exported: nn.Module) -> None:
        super().__init__()
        vars(self).update({kind: vars(exported.model)[kind] for kind in TENSORS}, exported=exported)

    def forward(self, *samples: Any) -> Any:  # noqa: ANN401 - as the model's own
        return vars(self)["exported"](*samples)
