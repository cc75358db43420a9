"""apple/pfl-research: one FedProx round of all clients per turn. Runs in .peers/pfl.

    python -m tests.benches.peers.pfl_rounds WORK.npz MODEL      MODEL is a function of coordinator/models/zoo.py

pfl's own backend, model and algorithm, one process, no evaluation. The tensors and its cached batches stay in memory
from turn to turn; all else is its default.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.algorithm.fedprox import FedProx, FedProxParams  # type: ignore[import-not-found]
from pfl.common_types import Population  # type: ignore[import-not-found]
from pfl.context import CentralContext  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.pytorch import PyTorchTensorDataset  # type: ignore[import-not-found]
from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]
from torch import nn

from coordinator.models import zoo
from tests.benches.peers.turns import serve


class WithLoss(nn.Module):
    """What pfl asks of a module: `loss` and `metrics`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, _x: torch.Tensor, _y: torch.Tensor) -> dict[str, Any]:
        return {}


class PflRounds:
    """A model and a cohort; every turn starts from the same values."""

    def __init__(self, arrays: dict[str, Any], net: nn.Module) -> None:
        lr, momentum, mu, steps, batch = arrays["settings"].tolist()
        start = {name.removeprefix("start/"): torch.from_numpy(a) for name, a in arrays.items() if "/" in name}
        net.load_state_dict(start, strict=False)  # num_batches_tracked is not among ours
        self.module = WithLoss(net)
        self.start = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.n = len(arrays["x"])
        users = {
            i: PyTorchTensorDataset((torch.from_numpy(x), torch.from_numpy(y)), user_id=str(i))
            for i, (x, y) in enumerate(zip(arrays["x"], arrays["y"], strict=True))
        }
        ids = itertools.cycle(range(self.n))
        cohort = FederatedDataset(users.__getitem__, lambda: next(ids))
        self.backend, self.algorithm = SimulatedBackend(cohort, cohort), FedProx()
        self.model = PyTorchModel(
            self.module,
            lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
            torch.optim.SGD(self.module.parameters(), lr=1.0),
        )
        trained = NNTrainHyperParams(
            local_batch_size=int(batch), local_num_epochs=None, local_num_steps=int(steps), local_learning_rate=lr
        )
        self.context = CentralContext(
            current_central_iteration=1,
            do_evaluation=False,
            cohort_size=self.n,
            population=Population.TRAIN,
            algorithm_params=FedProxParams(
                mu=mu, central_num_iterations=2, evaluation_frequency=2, train_cohort_size=self.n, val_cohort_size=0
            ),
            model_train_params=trained,
            seed=0,
        )

    def turn(self) -> None:
        """One round from the start."""
        with torch.no_grad():
            for name, p in self.module.net.named_parameters():
                p.copy_(self.start[name])
        found, metrics = self.backend.gather_results(self.model, self.algorithm, central_context=self.context)
        self.algorithm.process_aggregated_statistics(self.context, metrics, self.model, found)

    def update(self) -> Any:  # noqa: ANN401 - an array; pfl's environment checks no types
        """[n_params] in the order of the module's parameters."""
        moved = [(p.detach() - self.start[name]).flatten() for name, p in self.module.net.named_parameters()]
        return torch.cat(moved).numpy()


def main() -> None:
    torch.set_num_threads(1)
    with np.load(sys.argv[1], allow_pickle=False) as file:
        rounds = PflRounds(dict(file), getattr(zoo, sys.argv[2])())
    serve(rounds.turn, rounds.update, {p: importlib.metadata.version(p) for p in ("pfl", "torch")})


if __name__ == "__main__":
    main()
