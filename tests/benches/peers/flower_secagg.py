"""Flower's SecAgg+ without a network or Ray: its workflow and the mod of its clients. Runs in .peers/flower.

    python -m tests.benches.peers.flower_secagg DEVICES PARAMETERS DROPPED NEIGHBOURS THRESHOLD

The workflow asks through a grid that hands each message to one client after another, as protobuf bytes, which are
counted. The last DROPPED clients do not answer from the stage of the masked vectors on. A trained model is the start
and a normal deviate. Prints one JSON object: bytes up and down and CPU seconds of a client that answered all (means and
median), the peak MB of the first client's steps, CPU seconds and peak MB of the server, and how far the mean is off.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import flwr.compat.common.recorddict_compat as compat  # type: ignore[import-not-found]
import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict  # type: ignore[import-not-found]
from flwr.client.mod import secaggplus_mod  # type: ignore[import-not-found]
from flwr.common import (  # type: ignore[import-not-found]
    Code,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import (  # type: ignore[import-not-found]
    RECORD_KEY_CONFIGS,
    Key,
    Stage,
)
from flwr.common.serde import message_from_proto, message_to_proto  # type: ignore[import-not-found]
from flwr.proto.message_pb2 import Message as WireMessage  # type: ignore[import-not-found]
from flwr.server.client_manager import SimpleClientManager  # type: ignore[import-not-found]
from flwr.server.compat.grid_client_proxy import GridClientProxy  # type: ignore[import-not-found]
from flwr.server.compat.legacy_context import LegacyContext  # type: ignore[import-not-found]
from flwr.server.strategy import FedAvg  # type: ignore[import-not-found]
from flwr.server.workflow import SecAggPlusWorkflow  # type: ignore[import-not-found]
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD  # type: ignore[import-not-found]
from flwr.server.workflow.constant import Key as RoundKey
from flwr.supercore.task_identity import TaskIdentity  # type: ignore[import-not-found]

FIRST = 1  # client
EXAMPLES = 1_000  # of each client, the most that count


class OneByOne:
    """A grid whose clients work in turn in this process."""

    def __init__(self, dropped: set[int]) -> None:
        self.dropped, self.states = dropped, dict[int, Any]()
        self.up, self.down = defaultdict[int, int](int), defaultdict[int, int](int)
        self.seconds, self.wire_s = defaultdict[int, float](float), 0.0
        self.client_mb = self.peak_mb = 0.0
        self.total = np.zeros(0)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        answers = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{number}"
            who = message.metadata.dst_node_id
            stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            if who in self.dropped and stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK):
                continue
            asked = message_to_proto(message).SerializeToString()
            answer = self._on_client(who, asked)
            self.down[who] += len(asked)
            self.up[who] += len(answer)
            answers.append(message_from_proto(WireMessage.FromString(answer)))
        return answers

    def _on_client(self, who: int, asked: bytes) -> bytes:
        """The client's answer. Its time, with reading and writing its messages, is not the server's."""
        self.peak_mb = max(self.peak_mb, _status("VmHWM"))
        before, began = _clear_peak() if who == FIRST else 0.0, time.process_time()
        message = message_from_proto(WireMessage.FromString(asked))
        answer = secaggplus_mod(message, self.states.setdefault(who, context(who)), self._fit)
        data = message_to_proto(answer).SerializeToString()
        took = time.process_time() - began
        self.seconds[who] += took
        self.wire_s += took
        if who == FIRST:
            self.client_mb = max(self.client_mb, _status("VmHWM") - before)
        return bytes(data)

    def _fit(self, message: Any, ctxt: Any) -> Any:  # noqa: ANN401 - Flower's
        """What the user's client answers; drawing its model is not counted."""
        began = time.process_time()
        (start,) = parameters_to_ndarrays(compat.recorddict_to_fitins(message.content, keep_input=True).parameters)
        model = start + np.random.default_rng(ctxt.node_id).standard_normal(len(start), np.float32) / 100
        self.total = self.total + model if self.total.size else model.astype(np.float64)
        drawing = time.process_time() - began
        self.seconds[ctxt.node_id] -= drawing
        fitted = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([model]), EXAMPLES, {})
        return Message(compat.fitres_to_recorddict(fitted, keep_input=False), reply_to=message)


def context(who: int) -> Any:  # noqa: ANN401 - Flower's
    return Context(run_id=0, node_id=who, node_config={}, state=RecordDict(), run_config={})


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1_024 / 1e6


def _clear_peak() -> float:
    """Begin a new peak; -> the MB that the process holds now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def main() -> None:
    """Play one round and print what it took."""
    devices, size, dropped, neighbours, threshold = (int(word) for word in sys.argv[1:])
    clients = range(1, devices + 1)
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 0
    grid, manager = OneByOne(set(clients[devices - dropped :])), SimpleClientManager()
    for who in clients:
        manager.register(GridClientProxy(who, grid, 0))
    strategy = FedAvg(fraction_fit=1.0, min_fit_clients=devices, min_available_clients=devices)
    server = LegacyContext(context(0), strategy=strategy, client_manager=manager)
    start = np.random.default_rng(0).standard_normal(size).astype(np.float32) / 10
    server.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
        ndarrays_to_parameters([start]), keep_input=True
    )
    server.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({RoundKey.CURRENT_ROUND: 1})
    workflow = SecAggPlusWorkflow(neighbours + 1, threshold, max_weight=EXAMPLES)
    before, began = _clear_peak(), time.process_time()
    workflow(grid, server)
    seconds = time.process_time() - began - grid.wire_s
    peak = max(grid.peak_mb, _status("VmHWM")) - before
    (mean,) = parameters_to_ndarrays(
        compat.arrayrecord_to_parameters(server.state.array_records[MAIN_PARAMS_RECORD], keep_input=True)
    )
    kept = [who for who in clients if who not in grid.dropped]
    found = {
        "up": statistics.mean(grid.up[who] for who in kept),
        "down": statistics.mean(grid.down[who] for who in kept),
        "device_s": statistics.median(grid.seconds[who] for who in kept),
        "device_mb": grid.client_mb,
        "coordinator_s": seconds,
        "coordinator_mb": peak,
        "off": float(np.abs(mean - grid.total / len(kept)).max()),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
