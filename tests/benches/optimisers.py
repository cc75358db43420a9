"""`python -m tests.benches.optimisers`: a step of Adam beside one of SGD, on each runtime, against eager torch.

Adam is measured in the two ways in which a device could run it. "host": the step gives gradients and the host moves the
weights (edge_client/training/optimiser.py), which is what devices do. "graph", for ONNX only: Adam's operators are put
into the step's own graph, and its second sums are ports as the velocities are. All contestants of a model take turns in
one process, on one thread; medians. The two ways must end with the same weights, or nothing is printed.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import torch
from onnx import helper

from coordinator.models.registry import Model
from edge_client.engines.base import Engine, LocalUpdate, open_engine
from edge_client.engines.onnx import OnnxUpdate, session
from edge_client.protocol.program import ENGINES, Function, Port
from edge_client.protocol.task import Array, Optimiser
from edge_client.training.optimiser import Rule, StepScalars
from export.compiler.program import CompilerOutput, compile_program
from tests.benches.programs import LR, MOMENTUM, inputs, machine, race, say
from tests.support.programs import model as model_named

WIDE = "mlp-1m"
ADAM = Optimiser(name="adam")
SAME = 2e-2  # of the moves of twenty steps in float32, where Adam makes whole steps of gradients that are rounding only
MAX_REPEATS = 21
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A step's file with Adam in it, and its ports; `sums` are the shapes of the second sums."""

    file: bytes
    function: Function
    sums: dict[str, tuple[int, ...]]


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["wecfl-cnn", WIDE], metavar="MODEL")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=MAX_REPEATS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; batch {asked.batch}, one thread, medians of {asked.repeats} interleaved turns.\n")
    print("| model | parameters | runtime | SGD, CPU ms | Adam on the host | Adam in the graph |")
    print("|---|--:|---|--:|--:|--:|")
    for name in asked.models:
        print("\n".join(_rows(name, asked.batch, asked.repeats)), flush=True)


def _rows(name: str, batch: int, repeats: int) -> list[str]:
    model = _model(name)
    say(f"{name}: compiling")
    made = compile_program(
        model.module, name=name, input=model.input, classes=model.classes, loss=model.loss, batch=batch, engines=ENGINES
    )
    feeds = inputs(model, made.program, batch)
    with tempfile.TemporaryDirectory() as scratch:
        starts: dict[str, Callable[[], Step]] = {}
        for engine in ENGINES:
            opened = _opened(made, engine, Path(scratch))
            starts |= {f"{engine} sgd": _started(opened, feeds, None), f"{engine} host": _started(opened, feeds, ADAM)}
        graph = GraphSteps(made, feeds)
        starts["onnx graph"] = lambda: graph.start()[1]
        starts |= {
            "eager sgd": lambda: _eager(model, feeds, adam=False),
            "eager host": lambda: _eager(model, feeds, adam=True),
        }
        _check_same(_opened(made, "onnx", Path(scratch)), graph, feeds)
        say(f"{name}: {repeats} turns each")
        cpu = {key: times[0] for key, times in race(starts, repeats).items()}
    size = sum(p.numel() for p in model.module.parameters())
    rows = []
    for engine in (*ENGINES, "eager"):
        inside = f"{cpu['onnx graph']:.2f}" if engine == "onnx" else ""
        told = "torch, eager" if engine == "eager" else engine
        rows.append(
            f"| {name} | {size:,} | {told} | {cpu[f'{engine} sgd']:.2f} | {cpu[f'{engine} host']:.2f} | {inside} |"
        )
    return rows


def _model(name: str) -> Model:
    if name != WIDE:
        return model_named(name)
    sizes = (784, 800, 400, 10)
    layers: list[torch.nn.Module] = [torch.nn.Flatten()]
    for one, other in pairwise(sizes):
        layers += [torch.nn.Linear(one, other), torch.nn.ReLU()]
    torch.manual_seed(0)
    return Model(name=name, module=torch.nn.Sequential(*layers[:-1]), input=(1, 28, 28), classes=10)


def _opened(made: CompilerOutput, engine: str, folder: Path) -> Engine:
    container = made.program.containers[engine]["step"]
    (folder / container.sha256).write_bytes(made.files[container.sha256])
    return open_engine(engine, made.program, {"step": folder / container.sha256}, device="cpu")


def _started(engine: Engine, feeds: dict[str, Array], optimiser: Optimiser | None) -> Callable[[], Step]:
    still = {name: np.zeros_like(feeds[name]) for name in ("lr", "momentum")}

    def start() -> Step:
        if optimiser is None:
            return _repeated(engine.update(feeds), feeds)
        return _repeated(engine.update(feeds | still, Rule(optimiser, LR)), feeds)

    return start


def _repeated(update: LocalUpdate, feeds: dict[str, Array]) -> Step:
    return lambda: update.step(feeds)


def _eager(model: Model, feeds: dict[str, Array], *, adam: bool) -> Step:
    module = copy.deepcopy(model.module).train()
    x, y = torch.from_numpy(feeds["x"].copy()), torch.from_numpy(feeds["y"].argmax(-1))
    weights = [p for p in module.parameters() if p.requires_grad]
    made: torch.optim.Optimizer = (
        torch.optim.Adam(weights, lr=LR) if adam else torch.optim.SGD(weights, lr=LR, momentum=MOMENTUM)
    )

    def run() -> None:
        made.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        made.step()

    return run


class GraphSteps:
    """Updates with Adam in the graph: a step is given its rate and its floor, as the host's rule has them."""

    def __init__(self, made: CompilerOutput, feeds: dict[str, Array]) -> None:
        graph = adam_graph(made)
        self._session, self._function = session(graph.file, threads=1), graph.function
        self._given = dict(feeds) | {f"velocity/{n}": np.zeros(shape, np.float32) for n, shape in graph.sums.items()}
        self._given["momentum"] = np.asarray(ADAM.beta1, np.float32)

    def start(self) -> tuple[LocalUpdate, Step]:
        """A new update, and its next step."""
        update, t = OnnxUpdate(self._session, self._function, {}, self._given), count(1)

        def step() -> float:
            numbers = StepScalars.of(ADAM, next(t))
            rate, floor = (np.asarray(v, np.float32) for v in (LR * numbers.scale, numbers.floor))
            return update.step({**self._given, "rate": rate, "floor": floor})

        return update, step


def adam_graph(made: CompilerOutput) -> Graph:
    """The step's own file with u' = beta2 u + g^2 and w' = w - lr s / (sqrt(u') + floor); s is its velocity.

    The port lr becomes `rate` and mu becomes `floor`, both fresh in each step; the pull to an anchor is times 0.
    """
    proto = onnx.load_model_from_string(made.files[made.program.containers["onnx"]["step"].sha256])
    shapes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in proto.graph.input}
    shapes |= {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in proto.graph.value_info}
    shapes |= {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in proto.graph.output}
    by_output = {name: node for node in proto.graph.node for name in node.output}
    nodes, sums, outputs = list[onnx.NodeProto](), dict[str, tuple[int, ...]](), []
    initial = helper.make_tensor("beta2", onnx.TensorProto.FLOAT, [], [ADAM.beta2])
    for node in proto.graph.node:
        if node.op_type == "Mul" and node.input[0] == "lr":
            s = node.input[1]
            gradient, port = by_output[s].input[1], f"u{len(sums)}"
            sums[port], into = shapes[s], f"velocity/{port}"
            nodes += [
                helper.make_node("Mul", ["beta2", into], [f"{port}.old"]),
                helper.make_node("Mul", [gradient, gradient], [f"{port}.square"]),
                helper.make_node("Add", [f"{port}.old", f"{port}.square"], [f"new/{into}"]),
                helper.make_node("Sqrt", [f"new/{into}"], [f"{port}.root"]),
                helper.make_node("Add", [f"{port}.root", "floor"], [f"{port}.floored"]),
                helper.make_node("Div", [s, f"{port}.floored"], [f"{port}.step"]),
            ]
            node.input[0], node.input[1] = "rate", f"{port}.step"
            proto.graph.input.append(helper.make_tensor_value_info(into, onnx.TensorProto.FLOAT, sums[port]))
            outputs.append(helper.make_tensor_value_info(f"new/{into}", onnx.TensorProto.FLOAT, sums[port]))
        if node.op_type == "Mul" and node.input[0] == "mu":  # no pull: mu (w - anchor) is zero
            node.input[0] = "nothing"
        nodes.append(node)
    zero = helper.make_tensor("nothing", onnx.TensorProto.FLOAT, [], [0.0])
    proto.graph.initializer.extend([initial, zero])
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.output.extend(outputs)
    ports = tuple(Port(name=f"velocity/{name}", dtype="float32", shape=shape) for name, shape in sums.items())
    function, renamed = made.program.functions["step"], {"lr": "rate", "mu": "floor"}
    for value in proto.graph.input:
        value.name = renamed.get(value.name, value.name)
    own = (replace(port, name=renamed.get(port.name, port.name)) for port in function.inputs)
    function = replace(function, inputs=(*own, *ports), outputs=(*function.outputs, *ports))
    onnx.checker.check_model(proto)
    return Graph(file=proto.SerializeToString(), function=function, sums=sums)


def _check_same(engine: Engine, graph: GraphSteps, feeds: dict[str, Array]) -> None:
    """Twenty steps in both ways end with the same weights."""
    still = {name: np.zeros_like(feeds[name]) for name in ("lr", "momentum")}
    host, (inside, step) = engine.update(feeds | still, Rule(ADAM, LR)), graph.start()
    for _ in range(20):
        host.step(feeds)
        step()
    one, other = host.read(), inside.read()
    names = [name for name in one if name.startswith("w/")]
    moved = np.concatenate([(one[n] - feeds[n]).ravel() for n in names])
    apart = np.concatenate([(one[n] - other[n]).ravel() for n in names])
    far = float(np.linalg.norm(apart) / np.linalg.norm(moved))
    if not far < SAME:
        raise SystemExit(f"the two ways end {far:.1e} of the moves apart")
    say(f"the two ways end {far:.0e} of the moves apart")


if __name__ == "__main__":
    main()
