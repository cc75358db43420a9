"""The usual training loop: module, DataLoader, torch.optim.SGD, the proximal term in the loss. One thread."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.benches.work import BATCH, LR, MOMENTUM, MU, Work


class PlainLoop:
    """One module for all clients, loaded anew for each; `update` [n_params] is the mean of the last pass."""

    def __init__(self, work: Work) -> None:
        self._module = copy.deepcopy(work.model.module).train()
        self._start = {name: tensor.clone() for name, tensor in self._module.state_dict().items()}
        self._sets = [TensorDataset(torch.from_numpy(d.x), torch.from_numpy(d.y)) for d in work.data]
        self._orders = [order.tolist() for order in work.orders()]
        self._names = [t.name for t in work.program.schema.tensors if t.role == "p"]
        self.update: NDArray[np.float64] = np.zeros(work.program.schema.n_params)

    def turn(self) -> None:
        """Every client once."""
        total = torch.zeros(len(self.update), dtype=torch.float64)
        for samples, order in zip(self._sets, self._orders, strict=True):
            total += self._client(samples, order)
        self.update = (total / len(self._sets)).numpy()

    def _client(self, samples: TensorDataset, order: list[int]) -> torch.Tensor:
        module, loss_of = self._module, nn.CrossEntropyLoss()
        module.load_state_dict(self._start)
        anchor = [p.detach().clone() for p in module.parameters()]
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        for x, y in DataLoader(samples, batch_size=BATCH, sampler=order):
            optimizer.zero_grad()
            pull = sum(((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchor, strict=True))
            loss = loss_of(module(x), y) + MU / 2 * pull
            loss.backward()
            optimizer.step()
        values = dict(module.named_parameters())
        with torch.no_grad():
            return torch.cat([(values[name] - self._start[name]).flatten() for name in self._names])
