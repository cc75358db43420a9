"""Replacements for calls of torch in a model's forward that torch's tracer gets wrong.

Each replacement computes the same function as the call, before any gradient is taken.

A linear layer over sequences gets one long batch: torch's own flattening fixes a symbolic batch size. Dropout,
attention and recurrent layers are in forward_calls/. Pools over three axes are pools over two and then over one, and
padding by repetition picks by index: their gradients then exist.
Fourier transforms and other complex numbers are pairs of real tensors (decompositions/complex_pairs.py). Values that
are written where a mask says so are chosen: torch's own gradient counts the places of the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from export.compiler.decompositions.complex_pairs import COMPLEX_OVERRIDES, call_of_pairs, is_complex_call
from export.compiler.decompositions.fourier import FOURIER_OVERRIDES
from export.compiler.decompositions.indexing import INDEXING_OVERRIDES
from export.compiler.decompositions.matrices import GRID_OVERRIDES
from export.compiler.decompositions.picks import PICK_OVERRIDES
from export.compiler.decompositions.pools import POOL_OVERRIDES
from export.compiler.decompositions.short_time import SHORT_TIME_OVERRIDES
from export.compiler.decompositions.supported_ops import UnsupportedOperator
from export.compiler.forward_calls.dropout import DROPOUT_OVERRIDES
from export.compiler.forward_calls.recurrent import CELL_OVERRIDES, RECURRENT, layer_by_layer
from export.compiler.losses.label_losses import LOSS_OVERRIDES
from export.own_thread import replaced_here

F = nn.functional
LINEAR = F.linear
SAMPLES_VALUES = 2  # dimensions of a batch of vectors
RELUS = (F.relu, torch.relu, Tensor.relu)
MAX_POOLS = (F.max_pool1d, F.max_pool2d, torch.max_pool1d, torch.max_pool2d)
OTHER_NAMES = {"axis": "dim", "keepdims": "keepdim", "train": "training"}  # numpy's, and torch.dropout's own


class ForwardOverrides(TorchFunctionMode):
    """A context in which the calls of FORWARD_OVERRIDES are replaced, inside torch's attention function too."""

    def __init__(self) -> None:
        super().__init__()
        self._rectified: list[tuple[Tensor, Tensor]] = []  # the last output of a ReLU, and its input

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        kwargs = kwargs or {}
        if _writes(func, kwargs):
            self._rectified = []
        own = partial(call_of_pairs, func) if is_complex_call(func, args) else FORWARD_OVERRIDES.get(func)
        if "input" in kwargs and (own is not None or func in RELUS or func in MAX_POOLS):  # most first arguments' name
            args, kwargs = (kwargs["input"], *args), {name: v for name, v in kwargs.items() if name != "input"}
        if own is not None:
            return own(*args, **{OTHER_NAMES.get(name, name): value for name, value in kwargs.items()})
        if func in RELUS:
            out = func(*args, **kwargs)
            self._rectified = [(out, args[0])]
            return out
        if func in MAX_POOLS:
            return self._pooled(func, *args, **kwargs)
        if func in RECURRENT and isinstance(args[3], bool) and args[4] > 1 and args[5] > 0:  # no packed sequence
            with replaced_here(F, "linear", _linear):  # what torch's decomposition calls
                return layer_by_layer(func, *args)
        if func is F.multi_head_attention_forward:
            with ExitStack() as stack:
                for name, own in INSIDE_ATTENTION.items():
                    stack.enter_context(replaced_here(F, name, own))
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _pooled(self, pool: Any, x: Tensor, *rest: Any, **named: Any) -> Tensor:  # noqa: ANN401 - torch's
        """Move a ReLU behind the max-pool that follows it: the same values and gradients, on fewer values."""
        known = [before for out, before in self._rectified if out is x]
        out = pool(known[0] if known else x, *rest, **named)
        return torch.relu(out).clone() if known else out  # a copy: the model may write into it, and no ReLU's output


def _writes(func: Any, named: Mapping[str, Any]) -> bool:  # noqa: ANN401 - torch's
    """Whether a call may change a tensor in place."""
    name = getattr(func, "__name__", "")
    own = name.endswith("_") and not name.endswith("__")
    return own or name.startswith(("__i", "__set")) or "out" in named or bool(named.get("inplace"))


def _linear(x: Tensor, *rest: Any, **named: Any) -> Tensor:  # noqa: ANN401 - torch's
    if x.dim() == SAMPLES_VALUES:
        return LINEAR(x, *rest, **named)  # as it is: a reshape to the same shape stays in the files
    out = LINEAR(x.reshape(-1, x.shape[-1]), *rest, **named)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Repetition of the edge or of the whole picks its values by index; other modes stay torch's."""
    if mode not in {"replicate", "circular"}:
        return PAD(x, pad, mode, value)
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if min(before, after) < 0:  # torch cuts first, and repeats what is left
            x = PAD(x, [0, 0] * i + [min(before, 0), min(after, 0)])
            before, after = max(before, 0), max(after, 0)  # noqa: PLW2901 - what is left to add
        size = x.shape[-1 - i]
        rows = torch.arange(-before, size + after)
        rows = rows.clamp(0, size - 1) if mode == "replicate" else rows % size
        x = x.index_select(x.dim() - 1 - i, rows)
    return x


PAD = F.pad


def _rrelu(  # torch's gradient of it reads what its forward wrote
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,  # noqa: FBT001, FBT002 - torch's
    inplace: bool = False,  # noqa: FBT001, FBT002 - torch's
) -> Tensor:
    slope = lower + (upper - lower) * torch.rand_like(x.detach()) if training else (lower + upper) / 2
    out = torch.where(x > 0, x, x * slope)
    return x.copy_(out) if inplace else out


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """Without torch's look at the values."""
    if num_classes < 0:
        raise UnsupportedOperator("one_hot", "the number of classes must be given")
    return (x.unsqueeze(-1) == torch.arange(num_classes, dtype=x.dtype)).to(torch.int64)


def _distances(x: Tensor, other: Tensor, p: float = 2.0, compute_mode: object = None) -> Tensor:  # noqa: ARG001 - torch's
    apart = x.unsqueeze(-2) - other.unsqueeze(-3)
    distances: Tensor = torch.linalg.vector_norm(apart, p, -1)
    if p == math.inf:  # each of the axes that are equally far apart takes the whole gradient, as torch's own
        size, farthest = apart.abs(), distances.detach()
        distances = farthest + torch.where(size == farthest.unsqueeze(-1), size - size.detach(), 0 * size).sum(-1)
    return distances


def _adaptive_avg_pool2d(x: Tensor, size: int | Sequence[int | None]) -> Tensor:
    """The mean of whole images; torch's own asks for strides where channels lie last, which no graph has."""
    whole = (size, size) if isinstance(size, int) else tuple(size)
    if all(wanted == 1 or (wanted is None and have == 1) for wanted, have in zip(whole, x.shape[-2:], strict=True)):
        return x.mean((-2, -1), keepdim=True)
    return ADAPTIVE_AVG_POOL(x, size)  # type: ignore[arg-type]


ADAPTIVE_AVG_POOL = F.adaptive_avg_pool2d


def _local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """The mean of squares of neighbouring channels is a pool of two axes; torch's own has one of three."""
    squares = PAD(x.square().flatten(2).unsqueeze(1), (0, 0, size // 2, (size - 1) // 2))
    around = F.avg_pool2d(squares, (size, 1), stride=1).reshape(x.shape)
    return x / (around * alpha + k).pow(beta)


def _set_item(x: Tensor, key: Any, value: Any) -> None:  # noqa: ANN401 - torch's
    """x[mask] = one value for all places of the mask, or a row of values for each; other keys stay torch's."""
    masked = isinstance(key, Tensor) and key.dtype == torch.bool and isinstance(value, Tensor | int | float)
    row = torch.tensor(value, dtype=x.dtype) if masked and not isinstance(value, Tensor) else value
    if not masked or row.dim() > x.dim() - key.dim():
        SET_ITEM(x, key, value)
    else:
        mask = key.reshape([*key.shape, *[1] * (x.dim() - key.dim())])
        x.copy_(torch.where(mask, row.to(x.dtype), x))


SET_ITEM = Tensor.__setitem__


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Torch's own compares the batch with other sizes."""
    if dim is None:
        return torch.gather(x.reshape(-1), 0, indices.reshape(-1))
    wide = list(torch.broadcast_shapes(x.select(dim, 0).shape, indices.select(dim, 0).shape))  # type: ignore[no-untyped-call]
    at = dim % x.dim()
    x, indices = (part.expand([*wide[:at], part.shape[at], *wide[at:]]) for part in (x, indices))
    return torch.gather(x, at, indices)


def _corner(rows: int, columns: int, above: Callable[[int, int], bool]) -> Tensor:
    """[2, places]: row and column of each place of a matrix of which `above` is true."""
    return torch.tensor([(i, j) for i in range(rows) for j in range(columns) if above(i, j)]).reshape(-1, 2).t()


def _triu_indices(row: int, col: int, offset: int = 0, **_: object) -> Tensor:
    return _corner(row, col, lambda i, j: j - i >= offset)


def _tril_indices(row: int, col: int, offset: int = 0, **_: object) -> Tensor:
    return _corner(row, col, lambda i, j: j - i <= offset)


FORWARD_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    **LOSS_OVERRIDES,
    **COMPLEX_OVERRIDES,
    **FOURIER_OVERRIDES,
    **SHORT_TIME_OVERRIDES,
    **GRID_OVERRIDES,
    **INDEXING_OVERRIDES,
    **PICK_OVERRIDES,
    **CELL_OVERRIDES,
    F.linear: _linear,
    **DROPOUT_OVERRIDES,
    **POOL_OVERRIDES,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.pad: _pad,
    **dict.fromkeys((F.rrelu, torch.rrelu), _rrelu),
    torch.rrelu_: partial(_rrelu, inplace=True),
    F.local_response_norm: _local_response_norm,
    F.one_hot: _one_hot,
    Tensor.__setitem__: _set_item,
    torch.triu_indices: _triu_indices,
    torch.tril_indices: _tril_indices,
    **dict.fromkeys((torch.sgn, Tensor.sgn), torch.sign),  # the gradient of the first makes a number of the batch
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
    torch.cdist: _distances,
}
INSIDE_ATTENTION = {  # of F, by name: what F.linear is now may be another thread's replacement
    name: FORWARD_OVERRIDES[getattr(F, name)] for name in ("linear", "dropout", "scaled_dot_product_attention")
}
