"""Random small architectures for hypothesis: chains of layers over images, signals, sequences and rows.

An `Architecture` is data (what was drawn) and makes the same module each time. Some layers are known to have no place
in a training program; `refused` says that a drawn chain holds one. Nothing here knows the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

CLASSES = 3
Shape = tuple[int, ...]  # one sample, without the batch
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Architecture:
    """Layers as (word, arguments) in order; `input` is one sample's shape."""

    layers: tuple[tuple[str, tuple[Any, ...]], ...]
    input: Shape
    seed: int

    @property
    def refused(self) -> bool:
        """Whether a layer of it cannot be written for any device."""
        return any(word == "alien" for word, _ in self.layers)

    def make(self) -> nn.Module:
        """The same weights each time; torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return nn.Sequential(*(WORDS[word](*given) for word, given in self.layers))

    def __str__(self) -> str:
        """One line for a report."""
        chain = ", ".join(f"{word}{given}" if given else word for word, given in self.layers)
        return f"{self.input} -> {chain} (seed {self.seed})"


class Added(nn.Module):
    """x + layer(x)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)  # type: ignore[no-any-return]


class ChannelGate(nn.Module):
    """x weighed channel by channel by what its mean says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]


class Hidden(nn.Module):
    """A recurrent layer whose states are the output."""

    def __init__(self, kind: str, features: int, width: int, layers: int, both: bool) -> None:  # noqa: FBT001 - drawn
        super().__init__()
        self.body = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind](
            features, width, layers, batch_first=True, bidirectional=both
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0]  # type: ignore[no-any-return]


class Last(nn.Module):
    """The last step of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


class Alien(nn.Module):
    """An operator that runtimes of devices do not share."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x)  # type: ignore[no-any-return]


def frozen(features: int, width: int) -> nn.Module:
    """A linear layer that is not trained."""
    return nn.Linear(features, width).requires_grad_(False)  # noqa: FBT003 - torch's own


def encoder(features: int, heads: int, first: bool, dropout: float) -> nn.Module:  # noqa: FBT001 - drawn
    """One layer of a transformer."""
    return nn.TransformerEncoderLayer(
        features, heads, dim_feedforward=6, dropout=dropout, batch_first=True, norm_first=first
    )


ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky-relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "hard-swish": nn.Hardswish,
    "hard-sigmoid": nn.Hardsigmoid,
}
WORDS: dict[str, Callable[..., nn.Module]] = {
    **ACTIVATIONS,
    "conv": nn.Conv2d,
    "depthwise": nn.Conv2d,
    "conv-1d": nn.Conv1d,
    "transposed": nn.ConvTranspose2d,
    "batch-norm": nn.BatchNorm2d,
    "batch-norm-1d": nn.BatchNorm1d,
    "group-norm": nn.GroupNorm,
    "instance-norm": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "layer-norm": nn.LayerNorm,
    "max-pool": lambda kernel, stride, padding, dilation, ceil: nn.MaxPool2d(
        kernel, stride, padding, dilation, ceil_mode=ceil
    ),
    "avg-pool": nn.AvgPool2d,
    "adaptive": nn.AdaptiveAvgPool2d,
    "max-pool-1d": nn.MaxPool1d,
    "avg-pool-1d": nn.AvgPool1d,
    "residual": lambda channels, kernel: Added(nn.Conv2d(channels, channels, kernel, padding=kernel // 2)),
    "residual-row": lambda features: Added(nn.Linear(features, features)),
    "gate": ChannelGate,
    "dropout": nn.Dropout,
    "dropout-2d": nn.Dropout2d,
    "linear": nn.Linear,
    "frozen": frozen,
    "hidden": Hidden,
    "encoder": encoder,
    "last": Last,
    "flatten": nn.Flatten,
    "alien": Alien,
}


Given = tuple[Any, ...]
Arguments = Callable[[Shape], st.SearchStrategy[Given]]  # of a layer that follows this shape
whole, some, yes = st.integers, st.sampled_from, st.booleans()


def _first(shape: Shape) -> st.SearchStrategy[Given]:
    return st.just((shape[0],))


def _last(shape: Shape) -> st.SearchStrategy[Given]:
    return st.just((shape[-1],))


def _nothing(_: Shape) -> st.SearchStrategy[Given]:
    return st.just(())


def _share(_: Shape) -> st.SearchStrategy[Given]:
    return st.tuples(some([0.1, 0.5]))


def _groups(shape: Shape) -> st.SearchStrategy[Given]:
    return some([(g, shape[0]) for g in (1, 2, 3) if shape[0] % g == 0])


def _conv(shape: Shape, *, depthwise: bool = False) -> st.SearchStrategy[Given]:
    """(in, out, kernel, stride, padding, dilation, groups, bias)."""
    channels, side = shape[0], min(shape[1:])

    def window(kernel: int) -> st.SearchStrategy[Given]:
        groups = channels if depthwise or (channels == 2 and kernel == 2) else 1
        dilations = [d for d in (1, 2) if d * (kernel - 1) < side]
        return st.tuples(
            st.just(channels),
            some([groups, 2 * groups] if groups > 1 else [2, 3, 4, 6]),
            st.just(kernel),
            whole(1, 2),
            whole(0, kernel // 2),
            some(dilations),
            st.just(groups),
            yes,
        )

    return whole(1, min(5, side)).flatmap(window)


def _pool(shape: Shape, *more: st.SearchStrategy[Any]) -> st.SearchStrategy[Given]:
    """(kernel, stride, padding, ...)."""
    return whole(1, min(3, *shape[1:])).flatmap(
        lambda kernel: st.tuples(st.just(kernel), whole(1, 3), whole(0, kernel // 2), *more)
    )


IMAGE: dict[str, Arguments] = {
    "conv": _conv,
    "depthwise": lambda shape: _conv(shape, depthwise=True),
    "transposed": lambda shape: whole(1, 3).flatmap(
        lambda k: st.tuples(st.just(shape[0]), some([2, 3]), st.just(k), whole(1, 2), whole(0, k // 2))
    ),
    "batch-norm": _first,
    "group-norm": _groups,
    "instance-norm": _first,
    "max-pool": lambda shape: _pool(shape, whole(1, 2), yes),
    "avg-pool": lambda shape: _pool(shape, yes, yes),
    "adaptive": lambda shape: st.tuples(whole(1, min(5, *shape[1:]))),
    "residual": lambda shape: st.tuples(st.just(shape[0]), some([1, 3])),
    "gate": _first,
    "dropout": _share,
    "dropout-2d": _share,
    "activation": _nothing,
}
SIGNAL: dict[str, Arguments] = {
    "conv-1d": lambda shape: whole(1, min(5, shape[1])).flatmap(
        lambda k: st.tuples(st.just(shape[0]), some([2, 4]), st.just(k), whole(1, 2), whole(0, k // 2))
    ),
    "batch-norm-1d": _first,
    "group-norm": _groups,
    "max-pool-1d": _pool,
    "avg-pool-1d": _pool,
    "dropout": _share,
    "activation": _nothing,
}
SEQUENCE: dict[str, Arguments] = {
    "hidden": lambda shape: st.tuples(some(["lstm", "gru", "rnn"]), st.just(shape[1]), some([2, 4]), whole(1, 2), yes),
    "encoder": lambda shape: st.tuples(
        st.just(shape[1]), some([h for h in (1, 2) if shape[1] % h == 0]), yes, some([0.0, 0.2])
    ),
    "layer-norm": _last,
    "linear": lambda shape: st.tuples(st.just(shape[1]), some([2, 4])),
    "residual-row": _last,
    "dropout": _share,
    "activation": _nothing,
}
ROW: dict[str, Arguments] = {
    "linear": lambda shape: st.tuples(st.just(shape[0]), whole(1, 8)),
    "frozen": lambda shape: st.tuples(st.just(shape[0]), whole(1, 8)),
    "residual-row": _first,
    "layer-norm": _first,
    "batch-norm-1d": _first,
    "dropout": _share,
    "alien": _nothing,
    "activation": _nothing,
}
KINDS: dict[str, tuple[dict[str, Arguments], st.SearchStrategy[Shape]]] = {
    "image": (IMAGE, st.tuples(whole(1, 3), whole(5, 9), whole(5, 9))),
    "signal": (SIGNAL, st.tuples(whole(1, 4), whole(6, 16))),
    "sequence": (SEQUENCE, st.tuples(whole(2, 6), some([2, 4]))),
    "row": (ROW, st.tuples(whole(1, 8))),
}


@st.composite
def architectures(draw: Draw, *, most: int = 5) -> Architecture:
    """One to `most` layers over one kind of sample, then perhaps one over rows, then the classifier."""
    kind = draw(some(["image", "image", *sorted(KINDS)]))
    table, inputs = KINDS[kind]
    shape = start = draw(inputs)
    layers: list[tuple[str, Given]] = []
    plan = [table] * draw(whole(1, most))
    if kind != "row":
        ending = "last" if kind == "sequence" and draw(yes) else "flatten"
        plan += [{ending: _nothing}, *([ROW] if draw(yes) else [])]
    for words in plan:
        word: str = draw(some(sorted(words)))
        if word == "activation":
            word = draw(some(sorted(ACTIVATIONS)))
        one = word, draw(words.get(word, _nothing)(shape))
        after = _after(one, shape)
        if after is not None:
            layers.append(one)
            shape = after
    layers.append(("linear", (shape[0], CLASSES)))
    return Architecture(tuple(layers), start, draw(whole(0, 99)))


def _after(layer: tuple[str, tuple[Any, ...]], shape: Shape) -> Shape | None:
    """One sample's shape behind the layer; None where torch itself has no such layer for this shape."""
    word, given = layer
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            out: Tensor = WORDS[word](*given).eval()(torch.zeros(2, *shape))
        except (RuntimeError, ValueError):
            return None
    return tuple(out.shape[1:]) if out.numel() else None
