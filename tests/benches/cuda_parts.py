"""`python -m tests.benches.cuda_parts`: what else runs on a CUDA device, beside the emulator's engines (gpu.py).

* Clustering: the Gram matrix of n updates of d numbers and one k-means of it, in numpy and by torch on the device.
* `pt2`: a training step of a model, beside the usual loop of torch on the same device.
* Convolutions of stacked clients, with their gradients: as torch stacks them, by groups; with `cudnn.benchmark`; by
  products of `torch.nn.functional.unfold`; by products of windows, as the engine `stacked` does; each client by itself.
* `stacked` itself: ten steps of 200 clients.

The sides take turns; figures are medians of wall seconds, with everything on the host when the clock is read. Without
CUDA it says so and exits with 3.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F  # noqa: N812 - torch's custom

from coordinator.clustering.backend import Backend, select_backend
from coordinator.clustering.gram import gram_matrix
from coordinator.clustering.kmeans import kmeans
from coordinator.models.registry import build_model
from edge_client.engines.base import open_engine
from edge_client.errors import RuntimeMissing
from edge_client.run_cli import run_cli
from emulator.engines.autotune import Workload, random_jobs
from emulator.engines.gpu.convolutions import ProductConvolutions
from emulator.engines.gpu.objective import use_exact_kernels
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import compile_program
from tests.benches.machine import described
from tests.support.programs import feeds as feeds_of
from tests.support.programs import model as model_named

SIZES = ((200, 430_000), (1_000, 430_000), (1_000, 1_150_000))
CLUSTERS = 10
MODELS = ("mnist-mlp", "wecfl-cnn", "femnist-cnn")
TURNS = 3
STEPS = 50  # of one turn
CLIENTS = 200
STACKED = ("wecfl-cnn", "cifar-lenet")
Gradients = Callable[[Tensor, Tensor], Sequence[Tensor]]
Shape = tuple[int, int, int, int, int]  # channels in and out, height and width, kernel, padding
LAYERS: tuple[Shape, ...] = (
    (1, 16, 28, 5, 2),
    (16, 32, 14, 5, 2),
    (3, 6, 32, 5, 0),
    (6, 16, 14, 5, 0),
    (32, 64, 14, 5, 2),
)


def turns(sides: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median seconds of each side, after one call that does not count."""
    for side in sides.values():
        side()
    found = {name: list[float]() for name in sides}
    for _ in range(TURNS):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in found.items()}


def clustering_row(n: int, d: int, device: str) -> str:
    """One line: seconds of both parts on both devices, and the largest difference of an inner product, relative."""
    points = np.random.default_rng(0).standard_normal((n, d), dtype=np.float32)
    sides = {"numpy": select_backend("cpu"), "CUDA": select_backend(device)}
    grams = {name: gram_matrix(points, where=where) for name, where in sides.items()}
    error = float(np.abs(grams["CUDA"] - grams["numpy"]).max() / np.abs(grams["numpy"]).max())

    def clustered(where: Backend) -> object:
        return kmeans(grams["numpy"], CLUSTERS, np.random.default_rng(0), where=where)

    grouped = turns({name: partial(clustered, where) for name, where in sides.items()})
    gram = turns({name: partial(gram_matrix, points, where=where) for name, where in sides.items()})
    cells = [f"{found[name]:.3g}" for found in (gram, grouped) for name in sides]
    return f"| {n:,} x {d:,} | {' | '.join(cells)} | {error:.0e} |"


def step_row(name: str, device: torch.device) -> str:
    """One line: milliseconds of a step of 32 samples, and the relative difference of the weights after the first."""
    model = model_named(name)
    made = compile_program(model.module, **model.program_facts, engines=("pt2",))
    given = feeds_of(made.program, "step", batch=32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step"
        path.write_bytes(made.files[made.program.containers["pt2"]["step"].sha256])
        update = open_engine("pt2", made.program, {"step": path}, device=device.type).update(given)
    module = model.module.to(device).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    x, y = (torch.from_numpy(given[port]).to(device) for port in ("x", "y"))

    def eager() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()

    def ours() -> None:
        for _ in range(STEPS):
            update.step(given)

    found = turns({"eager": eager, "pt2": ours})
    cells = [f"{seconds / STEPS * 1e3:.3g}" for seconds in found.values()]
    return f"| {name} | {' | '.join(cells)} | {found['pt2'] / found['eager']:.2f} |"


def by_unfold(x: Tensor, w: Tensor, padding: int) -> Tensor:
    """F.conv2d of square images by one product; x [n, c, h, h], w [o, c, k, k]."""
    columns = F.unfold(x, w.shape[-1], padding=padding)  # [n, c k k, h' h']
    out = torch.einsum("oc,ncl->nol", w.flatten(1), columns)
    return out.reshape(*out.shape[:2], math.isqrt(out.shape[2]), -1)


def convolution_row(clients: int, shape: Shape, device: torch.device) -> str:
    """One line: milliseconds of one pass with its gradients by each way, float32 without TF32.

    The last column is the largest difference of a gradient by windows from that by groups, relative.
    """
    inputs, outputs, size, kernel, padding = shape
    x = torch.randn(clients, 32, inputs, size, size, device=device)
    w = torch.randn(clients, outputs, inputs, kernel, kernel, device=device)
    plain = grad(lambda x, w: F.conv2d(x, w, padding=padding).square().sum(), argnums=(0, 1))
    unfolded = grad(lambda x, w: by_unfold(x, w, padding).square().sum(), argnums=(0, 1))
    grads: dict[str, Sequence[Tensor]] = {}

    def apart(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        return [torch.stack(each) for each in zip(*map(plain, x, w), strict=True)]

    def run(name: str, each: Gradients, how: Callable[[], AbstractContextManager[object]], *, search: bool) -> None:
        with use_exact_kernels(device, search=search), how():
            grads[name] = each(x, w)
        float(grads[name][0].sum())  # waits for the device

    ways: dict[str, Callable[[], object]] = {
        "groups": partial(run, "groups", vmap(plain), nullcontext, search=False),
        "searched": partial(run, "searched", vmap(plain), nullcontext, search=True),
        "unfold": partial(run, "unfold", vmap(unfolded), nullcontext, search=False),
        "windows": partial(run, "windows", vmap(plain), ProductConvolutions, search=False),
        "apart": partial(run, "apart", apart, nullcontext, search=False),
    }
    found = turns(ways)
    pairs = zip(grads["windows"], grads["groups"], strict=True)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    cells = [f"{seconds * 1e3:.3g}" for seconds in found.values()]
    layer = f"{inputs} to {outputs}, {size} x {size}, {kernel} x {kernel}"
    return f"| {clients} | {layer} | {' | '.join(cells)} | {error:.0e} |"


def stacked_row(name: str, clients: int, device: torch.device) -> str:
    """One line: seconds of ten steps of 32 samples of so many clients by the engine `stacked`."""
    model = build_model(name, seed=0)
    learner = StackedRecipe(model=model, device=device.type).open()
    jobs = random_jobs(model, learner.program, Workload(clients=clients, steps=10, batch=32))
    found = turns({"stacked": lambda: list(learner.train(jobs))})
    return f"| {name} | {clients} | {found['stacked']:.3g} |"


def measure() -> None:
    """Of a CUDA machine. Raises RuntimeMissing elsewhere."""
    if not torch.cuda.is_available():
        raise RuntimeMissing(
            f"torch {torch.__version__} finds no CUDA device here, so nothing was measured",
            hint="run it on a machine with a CUDA device and a torch build for its driver",
        )
    say = sys.stdout.write
    say(f"Medians of {TURNS} turns on {torch.cuda.get_device_name()}, {described()}.\n\n")
    say("| points | Gram, numpy, s | Gram, CUDA, s | k-means, numpy, s | k-means, CUDA, s | difference |\n")
    say("|---|---|---|---|---|---|\n")
    for n, d in SIZES:
        say(clustering_row(n, d, "cuda") + "\n")
        sys.stdout.flush()
    say("\n| clients | layer | groups, ms | searched | unfold | windows | apart | difference |\n|")
    say("---|" * 8 + "\n")
    for layer in LAYERS:
        say(convolution_row(CLIENTS, layer, torch.device("cuda")) + "\n")
        sys.stdout.flush()
    say("\n| model | clients | seconds of ten steps |\n|---|---|---|\n")
    for name in STACKED:
        say(stacked_row(name, CLIENTS, torch.device("cuda")) + "\n")
        sys.stdout.flush()
    say("\n| model | eager, ms a step | pt2, ms a step | ratio |\n|---|---|---|---|\n")
    for name in MODELS:
        say(step_row(name, torch.device("cuda")) + "\n")
        sys.stdout.flush()


def main() -> int:
    """Measure; the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    return run_cli(measure)


if __name__ == "__main__":
    raise SystemExit(main())
