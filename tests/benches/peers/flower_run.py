"""Flower: FedAvg over a folder of devices, as a simulation app. Runs in .peers/flower.

    python -m tests.benches.peers.flower_run FOLDER MODEL      MODEL is a function of coordinator/models/zoo.py

FOLDER holds start.npz (the model's tensors), settings.json, and K.npz for each device: train x, y and test x, y. Two
actors of one thread each on two cores, one CPU per client; Flower's default gives a client both and trains one by one.
Prints one JSON object: the accuracy on all devices' test samples after the last round.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import (  # type: ignore[import-not-found]
    ArrayRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]
from flwr.simulation import run_simulation  # type: ignore[import-not-found]
from torch import nn

from coordinator.models import zoo

FOLDER, MODEL = Path(sys.argv[1]), sys.argv[2]
SETTINGS: dict[str, Any] = json.loads((FOLDER / "settings.json").read_text(encoding="utf-8"))


def network(arrays: Any) -> nn.Module:  # noqa: ANN401 - Flower's
    """The model with the values that a message brought."""
    torch.set_num_threads(1)
    net: nn.Module = getattr(zoo, MODEL)()
    net.load_state_dict(arrays.to_torch_state_dict())
    return net


def samples(context: Any, part: str) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """A device's own."""
    with np.load(FOLDER / f"{context.node_config['partition-id']}.npz", allow_pickle=False) as held:
        return torch.from_numpy(held[f"{part}/x"]), torch.from_numpy(held[f"{part}/y"])


def train(message: Any, context: Any) -> Any:  # noqa: ANN401
    """Local SGD with momentum, a new order in every pass."""
    net, (x, y) = network(message.content["arrays"]).train(), samples(context, "train")
    optimizer = torch.optim.SGD(net.parameters(), lr=SETTINGS["lr"], momentum=SETTINGS["momentum"])
    done = 0
    while done < SETTINGS["steps"]:
        for index in torch.split(torch.randperm(len(x)), SETTINGS["batch"])[: SETTINGS["steps"] - done]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(content=RecordDict(content), reply_to=message)


def evaluate(message: Any, context: Any) -> Any:  # noqa: ANN401
    """Accuracy on the device's test samples."""
    net, (x, y) = network(message.content["arrays"]).eval(), samples(context, "test")
    with torch.no_grad():
        logits = torch.cat([net(part) for part in torch.split(x, SETTINGS["batch"])])
    right = int((logits.argmax(1) == y).sum())
    content = MetricRecord({"accuracy": right / len(x), "num-examples": len(x)})
    return Message(content=RecordDict({"metrics": content}), reply_to=message)


def serve(grid: Grid, _context: Context) -> None:
    """The rounds."""
    with np.load(FOLDER / "start.npz", allow_pickle=False) as start:
        state = getattr(zoo, MODEL)().state_dict() | {name: torch.from_numpy(start[name]) for name in start.files}
    n = SETTINGS["devices"]
    strategy = FedAvg(min_train_nodes=n, min_evaluate_nodes=n, min_available_nodes=n)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(state), num_rounds=SETTINGS["rounds"])
    last = result.evaluate_metrics_clientapp[SETTINGS["rounds"]]
    (FOLDER / "flower.json").write_text(json.dumps({"accuracy": last["accuracy"]}), encoding="utf-8")


def main() -> None:
    client, server = ClientApp(), ServerApp()
    client.train()(train)
    client.evaluate()(evaluate)
    server.main()(serve)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}}
    run_simulation(server, client, num_supernodes=SETTINGS["devices"], backend_config=resources)
    sys.stdout.write((FOLDER / "flower.json").read_text(encoding="utf-8") + "\n")


if __name__ == "__main__":
    main()
