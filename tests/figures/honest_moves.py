"""How far honest updates move, from which the bounds of docs/hostile-devices.md were chosen.

    python -m tests.figures.honest_moves --method fedavg -c learning-rate=0.5 --partition dirichlet:alpha=0.1

plays `fedcenters-emulator simulate` with these arguments, and prints for each kind of move (update_validation.py) the
greatest one, and the greatest multiple of the run's scale. The model of the second run in that page,
`tests.figures.honest_moves:normed`, has batch norm.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from coordinator.models.registry import ModelEntry
from coordinator.rounds.update_validation import outliers
from edge_client.protocol.task import ClientId
from emulator.cli import app
from emulator.simulation import virtual_network


def _normed() -> nn.Module:
    """Two convolutions with batch norm, for images of 28 x 28 pixels."""
    first = (nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU())
    second = (nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(256, 10))


normed = ModelEntry(make=_normed, input=(1, 28, 28), classes=10)


def main(arguments: list[str]) -> None:
    """Play one simulation and print a line for each kind."""
    greatest, multiple = defaultdict[str, float](float), defaultdict[str, float](float)

    def spy(
        moves: Mapping[ClientId, Mapping[str, float]], scales: Mapping[str, float], *, ratio: float
    ) -> tuple[dict[ClientId, str], dict[str, float]]:
        refused, known = outliers(moves, scales, ratio=ratio)
        for kinds in moves.values():
            for kind, size in kinds.items():
                greatest[kind] = max(greatest[kind], size)
                if known.get(kind):
                    multiple[kind] = max(multiple[kind], size / known[kind])
        return refused, known

    vars(virtual_network)["outliers"] = spy
    app(["simulate", *arguments], standalone_mode=False)
    for kind in sorted(greatest):
        sys.stdout.write(f"{kind:15} at most {greatest[kind]:9.3g}, {multiple[kind]:5.2f} times the usual\n")


if __name__ == "__main__":
    main(sys.argv[1:])
