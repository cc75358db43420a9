"""Engines that are broken on purpose: what an update keeps is overwritten after it was handed to the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_client.engines import litert, onnx, pt2
from edge_client.protocol.task import Array

Spoil = Callable[[Array], Array]  # the tensor that was lent -> what stands there afterwards


def break_engine(monkeypatch: pytest.MonkeyPatch, engine: str, group: str, spoil: Spoil) -> None:
    """Updates of this engine compute with other values in the ports of `group` than they were given."""
    kinds: dict[str, type[Any]] = {"onnx": onnx.OnnxUpdate, "litert": litert.LitertUpdate, "pt2": pt2.Pt2Update}
    kind, overwrite = kinds[engine], {"onnx": _in_onnx, "litert": _in_litert, "pt2": _in_pt2}[engine]
    begin = kind.__init__

    def broken(self: Any, *given: Any) -> None:  # noqa: ANN401 - of three classes
        begin(self, *given)
        feeds = next(each for each in reversed(given) if each is not None)  # a rule may follow
        names = [name for name in feeds if name.split("/")[0] == group]
        assert names
        for name in names:
            overwrite(self, name, spoil)

    monkeypatch.setattr(kind, "__init__", broken)


def _in_onnx(update: Any, name: str, spoil: Spoil) -> None:  # noqa: ANN401
    """The memory that onnxruntime reads in place, as the next owner of freed memory would."""
    update._lent[name][...] = spoil(update._lent[name])


def _in_litert(update: Any, name: str, spoil: Spoil) -> None:  # noqa: ANN401
    into, held = update._inputs[name], update._interpreter
    held.set_tensor(into, np.asarray(spoil(held.get_tensor(into)), np.float32))


def _in_pt2(update: Any, name: str, spoil: Spoil) -> None:  # noqa: ANN401
    tensor = update._held[name]
    tensor.numpy()[...] = spoil(tensor.numpy().copy())
