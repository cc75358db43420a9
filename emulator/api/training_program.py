"""A torch module as a training program that stands alone: `compile`, one step on arrays, a folder on disk and back.

A program that was opened again needs numpy and one runtime (ONNX Runtime by default), and no torch.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import ArrayLike

from edge_client.data.dataset import Dataset, describe_misfit
from edge_client.engines.base import Engine, open_engine, run_step
from edge_client.engines.targets import no_targets, port_targets
from edge_client.errors import UsageError
from edge_client.protocol.program import ENGINES, LOSSES, Program
from edge_client.protocol.samples.input_parts import pack_arrays
from edge_client.protocol.task import F64, Array, Tensors
from edge_client.training.learner import EngineLearner
from edge_client.training.noise import step_noise
from emulator.api.data.columns import as_array
from export.compiler.program_folder import PREFIXES, container_files, read_folder, read_weights, write_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from export.compiler.losses.sample_losses import LossFunction
    from export.compiler.signatures.packed_inputs import Example

LOSS_WORDS = {**{name: name for name in LOSSES}, "mse": "squared-error"}
EVALUATED_AT_ONCE = 256  # samples
Samples = ArrayLike | Mapping[str, ArrayLike]  # [n, ...], or an array by the name of each of forward's parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """A model between two steps.

    `weights`: parameters and buffers under the module's own names; `velocity`: momentum of the parameters, zero at the
    start; `loss`: of the last step, before it moved the weights (None at the start); `steps`: how many were made.
    """

    weights: Tensors = field(repr=False)
    velocity: Tensors = field(repr=False)
    loss: float | None = None
    steps: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingProgram:
    """A module's training step as files for stock runtimes; `fc.compile` makes it, `TrainingProgram.open` reads it.

    `manifest` is program.json, `files` the containers by sha256, `weights` the module's own weights, `engine` the
    runtime that runs it here: one of those it was compiled for. No method changes the program or its arguments.

    >>> import numpy as np, torch, tempfile, fedcenters as fc
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = fc.compile(torch.nn.Linear(4, 2), (4,)).save(f"{folder}/program")
    ...     program = TrainingProgram.open(place)
    >>> program, program.predict(program.weights, np.zeros((3, 4), np.float32)).shape
    (TrainingProgram(Linear: (4,) -> (2,), cross-entropy, 10 parameters, for onnx), (3, 2))
    """

    manifest: Program = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)
    weights: Tensors = field(repr=False)
    engine: str = "onnx"

    def __repr__(self) -> str:
        """The model, its shapes and its runtimes."""
        m = self.manifest
        shapes = f"{tuple(m.input)} -> {tuple(m.target)}, {m.loss}"
        return f"TrainingProgram({m.model}: {shapes}, {m.schema.n_params} parameters, for {', '.join(sorted(m.batch))})"

    @staticmethod
    def open(folder: str | Path, *, engine: str = "") -> TrainingProgram:
        """Read what `save`, or `fedcenters-export program`, wrote; every file is checked against its hash.

        `engine`: "onnx", "litert" or "pt2"; by default the first of these that the program was compiled for. Raises
        ConfigError for a folder without a program, Malformed for a changed one, UsageError for another engine.
        """
        read = read_folder(Path(folder))
        files = {f.sha256: read.blobs[f.name] for f in container_files(read.program)}
        weights = read_weights(Path(folder), read.program.schema, read.program.dtype)
        return TrainingProgram(
            manifest=read.program, files=files, weights=weights, engine=_chosen(read.program, engine)
        )

    def save(self, folder: str | Path) -> Path:
        """Write program.json, one file per function and runtime, and weights.npz into a new folder.

        Raises UsageError for a folder that holds something.
        """
        write_folder(Path(folder), self.manifest, self.files, self.weights)
        return Path(folder)

    def start(self, weights: Tensors | None = None) -> TrainingState:
        """The state before the first step, from the module's own weights or from `weights`."""
        mine = self.weights if weights is None else weights
        params = [t for t in self.manifest.schema.tensors if t.role == "p"]
        return TrainingState(weights=mine, velocity={t.name: np.zeros(t.shape, self.manifest.dtype) for t in params})

    def step(  # noqa: PLR0913 - the inputs of a proximal step
        self,
        state: TrainingState,
        x: Samples,
        y: ArrayLike,
        *,
        lr: float = 0.01,
        momentum: float = 0.0,
        anchor: Tensors | None = None,
        mu: float = 0.0,
        seed: int = 0,
    ) -> TrainingState:
        """One step of SGD on the mean loss of a batch, with momentum and a proximal term; -> the next state.

        g = gradient + mu (weights - anchor); velocity' = momentum velocity + g; weights' = weights - lr velocity'.
        `x` [n, ...], `y` [n] class labels or [n, ...] targets. `anchor`: parameters under the module's names. `seed`
        draws dropout's numbers, together with the number of the step. Raises UsageError for samples that do not fit.
        """
        data, m = self._samples(x, y), self.manifest
        zero = {name: np.zeros_like(value) for name, value in state.velocity.items()}
        width = self._engine.fixed_batch
        if width is not None and len(data) != width:
            raise UsageError(f"{len(data)} samples; {self.engine} takes batches of {width}", hint=f"give {width}")
        mine = self._complete(state.weights)
        feeds = {f"{PREFIXES[t.role]}/{t.name}": mine[t.name] for t in m.schema.tensors}
        groups = {"velocity": state.velocity, "anchor": zero if anchor is None else anchor, "linear": zero}
        feeds |= {f"{group}/{name}": as_array(values[name]) for group, values in groups.items() for name in zero}
        feeds |= {name: np.asarray(value, m.dtype) for name, value in (("lr", lr), ("momentum", momentum), ("mu", mu))}
        feeds |= {"x": data.x.astype(m.dtype), "y": port_targets(m, data.y)}
        feeds |= {"q": np.full(len(data), 1 / len(data), m.dtype)} | step_noise(m, seed, state.steps, len(data))
        moved = run_step(self._engine, {name: np.asarray(value, m.dtype, order="C") for name, value in feeds.items()})
        return TrainingState(
            weights={t.name: moved[f"{PREFIXES[t.role]}/{t.name}"] for t in m.schema.tensors},
            velocity={name: moved[f"velocity/{name}"] for name in zero},
            loss=float(moved["loss"]),
            steps=state.steps + 1,
        )

    def evaluate(self, weights: Tensors, x: Samples, y: ArrayLike) -> tuple[F64, Array]:
        """-> the loss of each sample [n], float64, and the outputs [n, ...], in inference mode."""
        learner = EngineLearner(self._engine, self.manifest)
        vector = self.manifest.schema.join(self._complete(weights))
        losses, outputs = learner.evaluate([vector], self._samples(x, y), batch=EVALUATED_AT_ONCE)
        return losses[0], outputs[0]

    def predict(self, weights: Tensors, x: Samples) -> Array:
        """The module's outputs [n, ...]: logits of a classifier, in inference mode."""
        rows = cast("Sized", next(iter(x.values())) if isinstance(x, Mapping) else x)
        return self.evaluate(weights, x, no_targets(self.manifest, len(rows)))[1]

    def _complete(self, weights: Tensors) -> dict[str, Array]:
        """The weights in the schema's order. Raises UsageError when one is missing or has another shape."""
        shapes = {t.name: t.shape for t in self.manifest.schema.tensors}
        if wrong := [name for name, shape in shapes.items() if name not in weights or np.shape(weights[name]) != shape]:
            hint = "give arrays under the names and with the shapes of program.weights"
            raise UsageError(f"no weights of the right shape for {', '.join(wrong)}", hint=hint)
        return {name: as_array(weights[name]) for name in shapes}

    def _samples(self, x: Samples, y: ArrayLike) -> Dataset:
        try:
            data = Dataset(self._rows(x), as_array(y))
        except ValueError as wrong:
            raise UsageError(str(wrong), hint="give x [n, ...] and y [n] as arrays, several inputs as a dict") from None
        if misfit := describe_misfit(self.manifest, data):
            raise UsageError(misfit, hint=f"the program was compiled for samples of shape {self.manifest.input}")
        return data

    def _rows(self, x: Samples) -> Array:
        """One array; several by name are packed."""
        if not isinstance(x, Mapping):
            return as_array(x)
        return pack_arrays({name: as_array(values) for name, values in x.items()}, self.manifest.parts)

    @cached_property
    def _engine(self) -> Engine:
        """The opened runtime. Its files stay as long as this object: LiteRT reads that of a function when used."""
        folder, paths = tempfile.mkdtemp(prefix="fedcenters-"), {}
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for function, container in self.manifest.containers[self.engine].items():
            paths[function] = Path(folder) / f"{container.sha256}-{function}"
            paths[function].write_bytes(self.files[container.sha256])
        return open_engine(self.engine, self.manifest, paths)


def compile(  # noqa: A001, PLR0913 - `fc.compile`, and what a loss needs
    module: nn.Module,
    example_input: Example,
    loss: str | LossFunction = "cross-entropy",
    *,
    targets: Tensor | Array | Sequence[int] | None = None,
    output: str | int | None = None,
    engines: Sequence[str] = ("onnx",),
    batch: int = 32,
    progress: bool | None = None,
) -> TrainingProgram:
    """Trace one training step of a torch module, forward, backward and update, into files for stock runtimes.

    `example_input`: a batch of samples [n, ...], of which only the shape counts, or the shape of one sample; for a
    forward of several tensors a batch of each, as a dict by the names of its parameters, or as a tuple in their order.
    `step` and the others then take such a dict as x. `loss`:
    "cross-entropy" of class labels, one per sample or one per pixel (outputs [n, classes, ...], as torch has them);
    "token-cross-entropy" of one label per token (outputs [n, tokens, classes]); "squared-error" ("mse") of float
    targets; or a function of outputs and targets that gives one number per sample [n]. `targets`, for such a function:
    a batch of targets, of which shape and kind count (integers are class labels), or the shape of one sample's numbers;
    by default numbers of the output's shape. `output`: the name or number of the output that counts, for a module that
    gives several. `engines`: one or some of "onnx" (ONNX Runtime), "litert" (TFLite) and "pt2" (torch); the first one
    runs the program here. `batch`: the batch size of LiteRT, which needs a fixed one. The module itself is not changed;
    of a Lightning module its `forward` is taken. `progress`: show what goes on in a terminal and in a notebook;
    elsewhere a line on stderr every ten seconds. False: nothing. Another thread that compiles waits. torch's default
    dtype is float32 for all threads meanwhile: where it is another one, other threads name the dtype of what they make.

    Raises ProgramRefused, with the operator and the layer, for a module that cannot be expressed.

    >>> import numpy as np, torch, fedcenters as fc
    >>> x = np.eye(4, dtype=np.float32)
    >>> program = fc.compile(torch.nn.Linear(4, 4), x)
    >>> state = program.start()
    >>> for _ in range(20):
    ...     state = program.step(state, x, np.arange(4), lr=1.0)
    >>> program.predict(state.weights, x).argmax(axis=1).tolist()
    [0, 1, 2, 3]
    """
    import torch
    from torch import nn

    from emulator.api.progress import show_work
    from export.compiler.program import compile_program, weights_of
    from export.compiler.user_model import refusing_errors_of

    if not isinstance(module, nn.Module):
        raise UsageError(f"{type(module).__name__} is no torch module", hint="give the module itself, as Net()")
    if not callable(loss) and loss not in LOSS_WORDS:
        raise UsageError(f"unknown loss {loss!r}", hint=f"use one of {', '.join(LOSS_WORDS)}, or give a function")
    if isinstance(targets, (list, tuple)) and not all(isinstance(size, int) and size > 0 for size in targets):
        raise UsageError(
            "targets are a list, and no shape", hint="give a batch of them as one array: np.array(targets)"
        )
    engines = (engines,) if isinstance(engines, str) else tuple(engines)  # a generator is read once
    name = type(module).__name__
    with show_work(f"compiling {name}", shown=progress) as busy, refusing_errors_of(name):
        made = compile_program(
            module,
            example_input,
            name=name,
            loss=loss if callable(loss) else LOSS_WORDS[loss],
            targets=torch.from_numpy(targets) if isinstance(targets, np.ndarray) else targets,
            output=output,
            batch=batch,
            engines=engines,
            progress=busy,
        )
    weights = weights_of(module, made.program.schema)
    return TrainingProgram(manifest=made.program, files=made.files, weights=weights, engine=engines[0])


def _chosen(program: Program, engine: str) -> str:
    known = [name for name in ENGINES if name in program.containers]
    if not (known if not engine else engine in known):
        raise UsageError(
            f"no files for {engine or 'any engine'}", hint=f"this program has {', '.join(known) or 'none'}"
        )
    return engine or known[0]
