"""Federated learning that learns several models for one fleet of devices: `import fedcenters as fc`.

This module has names only. Each is fetched from its own module when it is first used, so that the import takes
milliseconds and loads neither numpy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "CAM",
    "CFL",
    "FLHC",
    "IFCA",
    "TKM",
    "Bundle",
    "CAMWeCFL",
    "CLoVE",
    "ClusterCounts",
    "Comparison",
    "Ditto",
    "FeMAM",
    "FeSEM",
    "FeSEMMA",
    "FedAvg",
    "FedAvgLate",
    "FedAvgPlus",
    "FedCenters",
    "FedDANE",
    "FedDWS",
    "FedDist",
    "FedEM",
    "FedGroup",
    "FedProx",
    "FedProxPlus",
    "FedRC",
    "FedSGD",
    "FedSoft",
    "Fit",
    "Fleet",
    "HypCluster",
    "LocalSgd",
    "MultiCenter",
    "NonFed",
    "PFedMe",
    "Probe",
    "Reply",
    "Result",
    "ServerOptions",
    "State",
    "TrainingProgram",
    "WeCFL",
    "__version__",
    "choose_k",
    "compare",
    "compile",
    "federation",
    "fleet",
    "fleets",
    "load",
    "partitions",
    "read_bundle",
    "rounds",
    "simulate",
]

_METHODS = "coordinator.strategies.registry"  # of all other names; it also writes their docstrings
_MODULES = {  # name -> the module that defines it, or that it is (`fleets`)
    "Bundle": "export.bundle.reader",
    "Comparison": "emulator.api.comparison",
    "ClusterCounts": "emulator.api.cluster_counts",
    "Fit": "edge_client.protocol.task",
    "Fleet": "emulator.data.fleet",
    "LocalSgd": "coordinator.strategies.common.local_sgd",
    "MultiCenter": "emulator.api.estimators.multi_center",
    "Probe": "edge_client.protocol.task",
    "Reply": "edge_client.protocol.task",
    "Result": "emulator.api.result",
    "State": "coordinator.strategies.base",
    "TrainingProgram": "emulator.api.training_program",
    "__version__": "edge_client",
    "choose_k": "emulator.api.cluster_counts",
    "compare": "emulator.api.comparison",
    "compile": "emulator.api.training_program",
    "federation": "emulator.api.over_mqtt",
    "fleet": "emulator.api.data.user_fleet",
    "fleets": "emulator.api.data.fleets",
    "partitions": "emulator.api.data.partitions",
    "load": "emulator.api.saved",
    "read_bundle": "export.bundle.reader",
    "rounds": "emulator.api.runs",
    "simulate": "emulator.api.runs",
}

if TYPE_CHECKING:
    from coordinator.strategies.additive.cam import CAM, CAMWeCFL
    from coordinator.strategies.additive.femam import FeMAM
    from coordinator.strategies.base import State
    from coordinator.strategies.baselines.ditto import Ditto
    from coordinator.strategies.baselines.fedavg import FedAvg
    from coordinator.strategies.baselines.fedavg_late import FedAvgLate
    from coordinator.strategies.baselines.fedavg_plus import FedAvgPlus, FedProxPlus
    from coordinator.strategies.baselines.feddane import FedDANE
    from coordinator.strategies.baselines.feddist import FedDist, FedDWS
    from coordinator.strategies.baselines.fedprox import FedProx
    from coordinator.strategies.baselines.fedsgd import FedSGD
    from coordinator.strategies.baselines.nonfed import NonFed
    from coordinator.strategies.baselines.pfedme import PFedMe
    from coordinator.strategies.clove import CLoVE
    from coordinator.strategies.common.local_sgd import LocalSgd
    from coordinator.strategies.common.server_options import ServerOptions
    from coordinator.strategies.fedem import FedEM, FedRC
    from coordinator.strategies.fedsoft import FedSoft
    from coordinator.strategies.fesem import FeSEM
    from coordinator.strategies.fesem_ma import FeSEMMA
    from coordinator.strategies.held_out.fedcenters import FedCenters
    from coordinator.strategies.ifca import IFCA, HypCluster
    from coordinator.strategies.robust_tkm import TKM
    from coordinator.strategies.similarity.cfl import CFL
    from coordinator.strategies.similarity.fedgroup import FedGroup
    from coordinator.strategies.similarity.flhc import FLHC
    from coordinator.strategies.wecfl import WeCFL
    from edge_client import __version__
    from edge_client.protocol.task import Fit, Probe, Reply
    from emulator.api.cluster_counts import ClusterCounts, choose_k
    from emulator.api.comparison import Comparison, compare
    from emulator.api.data import fleets, partitions
    from emulator.api.data.user_fleet import fleet
    from emulator.api.estimators.multi_center import MultiCenter
    from emulator.api.over_mqtt import federation
    from emulator.api.result import Result
    from emulator.api.runs import rounds, simulate
    from emulator.api.saved import load
    from emulator.api.training_program import TrainingProgram, compile  # noqa: A004 - `fc.compile`
    from emulator.data.fleet import Fleet
    from export.bundle.reader import Bundle, read_bundle
else:

    def __getattr__(name: str) -> object:
        """Fetch a name of `__all__` from its module, once."""
        if name not in __all__:
            raise AttributeError(f"module 'fedcenters' has no attribute {name!r}")
        try:
            where = import_module(_MODULES.get(name, _METHODS))
            value = where if where.__name__.endswith(f".{name}") else getattr(where, name)
        except Exception as wrong:  # also what a script export.py does that is run once more, as our package
            if file := _hiding_file():
                raise ImportError(f"{file}: give it another name, or start Python in another folder") from wrong
            raise
        globals()[name] = value
        return value

    def _hiding_file() -> str:
        """The file that Python takes for one of our packages, and which it hides; empty where there is none."""
        from importlib.machinery import PathFinder
        from pathlib import Path

        for room in ("edge_client", "coordinator", "export", "emulator"):
            spec, ours = PathFinder.find_spec(room), Path(__file__).parent / room / "__init__.py"
            if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != ours.resolve():
                return f"{spec.origin} hides {room!r}, a package of fedcenters"
        return ""


def __dir__() -> list[str]:
    return sorted(__all__)


_COMMANDS = {
    "fedcenters-edge": "a device: train, find the nearest center, diagnose",
    "fedcenters-coordinator": "the server: clusters the devices and trains one center per cluster",
    "fedcenters-emulator": "a fleet on this machine: demo, simulate, experiment, report",
    "fedcenters-export": "a torch model, or a run's centers, as files for other runtimes",
}


def _main() -> None:
    """`python -m fedcenters`: the version, and the commands of this installation."""
    from edge_client import __version__

    print(f"fedcenters {__version__}\n\nIn Python: import fedcenters as fc\n\nCommands:")
    width = max(map(len, _COMMANDS))
    for name, words in _COMMANDS.items():
        print(f"  {name:{width}}  {words}")


if __name__ == "__main__":
    _main()
