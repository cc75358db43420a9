"""Recurrent layers and cells as calls that torch's tracer gets right.

Stacked layers are called one by one: torch's decomposition of a stack leaves out the dropout between the layers
(torch 2.13). The cells are written out: torch's own write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from export.compiler.forward_calls.dropout import DROPOUT

F = nn.functional
Bias = Tensor | None
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def layer_by_layer(  # noqa: PLR0913, PLR0917 - the arguments of torch's operator
    func: Any,  # noqa: ANN401 - torch's
    x: Tensor,
    start: Any,  # noqa: ANN401 - [layers * directions, batch, hidden], or two of them
    weights: Sequence[Tensor],
    biases: bool,  # noqa: FBT001
    layers: int,
    dropout: float,
    training: bool,  # noqa: FBT001
    bidirectional: bool,  # noqa: FBT001
    batch_first: bool,  # noqa: FBT001
) -> tuple[Tensor, ...]:
    """A stack of layers as a chain of single layers with dropout between them. -> (output, *last states)."""
    x = x if batch_first else x.transpose(0, 1)
    each, rows = len(weights) // layers, 2 if bidirectional else 1
    ends: list[Sequence[Tensor]] = []
    for i in range(layers):
        mine = slice(i * rows, (i + 1) * rows)
        state = start[mine] if isinstance(start, Tensor) else [s[mine] for s in start]
        own = list(weights[i * each : (i + 1) * each])
        x, *end = func(x, state, own, biases, 1, 0.0, training, bidirectional, True)  # noqa: FBT003 - samples first
        ends.append(end)
        if i < layers - 1:
            # dropped in torch's own layout, so that the same random numbers drop the same values
            x = DROPOUT(x.transpose(0, 1), dropout, training).transpose(0, 1)
    return (x if batch_first else x.transpose(0, 1), *(torch.cat(parts) for parts in zip(*ends, strict=True)))


def _lstm_cell(
    x: Tensor, state: Sequence[Tensor], w_x: Tensor, w_h: Tensor, b_x: Bias = None, b_h: Bias = None
) -> tuple[Tensor, Tensor]:
    """Torch's documentation of nn.LSTMCell; torch's own cells write in place. -> hidden and cell [batch, hidden]."""
    hidden, cell = state
    taken, kept, new, shown = (F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h)).chunk(4, -1)
    cell = torch.sigmoid(kept) * cell + torch.sigmoid(taken) * torch.tanh(new)
    return torch.sigmoid(shown) * torch.tanh(cell), cell


def _gru_cell(x: Tensor, hidden: Tensor, w_x: Tensor, w_h: Tensor, b_x: Bias = None, b_h: Bias = None) -> Tensor:
    """Torch's documentation of nn.GRUCell."""
    of_x, of_h = F.linear(x, w_x, b_x).chunk(3, -1), F.linear(hidden, w_h, b_h).chunk(3, -1)
    reset, kept = (torch.sigmoid(of_x[i] + of_h[i]) for i in (0, 1))
    new = torch.tanh(of_x[2] + reset * of_h[2])
    return (hidden - new) * kept + new


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Torch's documentation of nn.RNNCell."""

    def cell(x: Tensor, hidden: Tensor, w_x: Tensor, w_h: Tensor, b_x: Bias = None, b_h: Bias = None) -> Tensor:
        return activation(F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h))

    return cell


CELL_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
}
