"""Compile a torch model into a training program: containers for the engines and the manifest that describes them.

    compiled = compile_program(module, samples)   # a batch of samples; or the shape of one: (1, 28, 28)
    compiled.program     what devices read (program.json)
    compiled.files       sha256 -> bytes of each container

Trained weights are inputs of the files, so one program serves every center, round and method. Frozen weights are one
file beside them (adapters/): a device fetches it once, and no round sends it. A model that cannot be expressed is
refused here with the name of the operator and the layer, before any device sees it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.engines.pt2 import files_read_once
from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.golden_run import Golden
from edge_client.protocol.program import ENGINES, FUNCTIONS, BatchSize, Container, Loss, Origin, Program, class_axis
from edge_client.protocol.samples.input_parts import Parts
from edge_client.protocol.task import Array, Flat, Schema, TensorSpec
from edge_client.rare_collection import rare_collection
from export.compiler.adapters.frozen import freeze, travels
from export.compiler.adapters.peft_names import adapter_of
from export.compiler.containers import EXAMPLE_BATCH, Progress, log_progress, make_containers, refusal_context
from export.compiler.forward_pass import MAX_BATCH, uncompiled
from export.compiler.golden_run import checked_run
from export.compiler.hints.difference_hints import difference_hint
from export.compiler.losses.choose_loss import (
    Targets,
    check_own_loss,
    loss_of_output,
    loss_of_targets,
    refuse_trained_loss,
    warn_of_probabilities,
)
from export.compiler.losses.sample_losses import LossFunction
from export.compiler.operator_watch import check_gradient, check_samples, check_writes, count_random_numbers
from export.compiler.program_functions import (
    TraceSource,
    call_module,
    example_inputs,
    function_ports,
    private_copy,
    tensors_of,
)
from export.compiler.program_parity import (
    MAX_RELATIVE_DIFFERENCE,
    max_difference,
    moved_network,
    one_sample_differs,
)
from export.compiler.signatures.answers import ONE_SAMPLE, check_answers, check_company, check_zeros
from export.compiler.signatures.choose_output import choose_output
from export.compiler.signatures.lasting_state import (
    check_repeats,
    check_tensors,
    refuse_unheld,
    warn_of_evaluation_mode,
)
from export.compiler.signatures.packed_inputs import Example, read_example
from export.containers.write_onnx import OPSET
from export.float64_mode import as_in
from export.own_thread import own_random

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class CompilerOutput:
    """The manifest, and the containers by their sha256."""

    program: Program
    files: Mapping[str, bytes] = field(repr=False)


@rare_collection()
@uncompiled()
def compile_program(  # noqa: PLR0913 - the facts of a model
    module: nn.Module,
    input: Example,  # noqa: A002 - the manifest's word
    *,
    name: str | None = None,
    parts: Parts = (),
    classes: int | None = None,
    target: Sequence[int] | None = None,
    loss: Loss | LossFunction = "cross-entropy",
    targets: Targets = None,
    output: str | int | None = None,
    dtype: str = "float32",
    frozen: str = "f32",
    batch: int = 32,
    engines: Sequence[str] = ENGINES,
    origin: Origin | None = None,
    progress: Progress = log_progress,
) -> CompilerOutput:
    """Trace, convert and measure. `batch`: of engines that need a fixed one (LiteRT), and of models that do.

    `input`: a batch of samples [batch, ...], of which only the shape counts; the shape of one sample; or, for a forward
    of several tensors, a batch of each, as a dict by the names of its parameters or as a tuple in their order. Their
    whole numbers tell how far those of drawn examples go. `parts`: for a module that cuts packed samples apart itself
    (`pack_module`), with the shape of such a sample as `input`. `target`: the shape of one sample's output, and
    `classes` stands for (classes,); the default is the shape that the model gives.
    `loss`: a word of the manifest, or a function of outputs [batch, *target] and `targets` that gives one number per
    sample. `targets`, for such a function: a batch of targets [batch, ...], of which shape and dtype count and integers
    are class labels; or the shape of one sample's numbers, by default that of its output. `output`: the name or number
    of the one that counts, for a module that gives several. `frozen`: how the parameters with requires_grad=False are
    stored: "f32", "f16", or "i8", which rounds each row of a matrix to 255 values.
    The module itself is not changed. `progress` is called with what is worked on, like "onnx step" or "golden run".
    Raises ProgramRefused when the model cannot be expressed for one of `engines`.
    """
    if classes is not None:
        target = (classes,)
    word: Loss = "squared-error" if callable(loss) else loss
    name = type(module).__name__ if name is None else name
    module = module if output is None else choose_output(module, output)
    progress("checks of the model")
    module, shape, packed = read_example(module, input)
    source = make_source(
        module,
        name=name,
        input=shape,
        target=target,
        loss=word,
        own_loss=loss if callable(loss) else None,
        own_targets=targets,
        dtype=dtype,
        frozen=frozen,
        parts=packed or parts,
        example=input,
    )
    _check_own_loss(source)
    _check_engines(source, engines, batch)
    made = make_containers(source, engines, batch, progress)
    blobs = made.files
    files = {hashlib.sha256(blob).hexdigest(): blob for functions in blobs.values() for blob in functions.values()}
    with files_read_once():
        program = replace(
            program_without_containers(source),
            containers={
                engine: {f: Container(sha256=hashlib.sha256(b).hexdigest(), size=len(b)) for f, b in functions.items()}
                for engine, functions in blobs.items()
            },
            batch=made.batch,
            versions={"torch": torch.__version__, **{p: version(p) for p in ("onnxscript", "litert-torch")}},
            parity={e: _parity(source, e, blobs[e], made.batch[e], progress) for e in engines},
            origin=origin,
            adapter=adapter_of(module, source.schema),
        )
        progress("golden run")
        golden = dict[str, Golden]()
        for size in {*made.batch.values()}:
            these = {engine: blobs[engine] for engine in engines if made.batch[engine] == size}
            fixed = None if size == "any" else size
            golden |= dict.fromkeys(these, checked_run(source, program, these, fixed=fixed, progress=progress))
        program = replace(program, golden=golden)
    return CompilerOutput(program=program, files=files)


def program_without_containers(source: TraceSource) -> Program:
    """The program without containers, for a learner that trains the module itself."""
    return Program(
        model=source.name,
        loss=source.loss,
        own_loss=source.own_loss is not None,
        optimizer="sgd",
        schema=source.schema,
        input=source.input,
        target=source.target,
        dtype=source.dtype,
        functions={f: function_ports(source, f) for f in FUNCTIONS},
        containers={},
        batch={},
        opset=OPSET,
        versions={"torch": torch.__version__},
        frozen=None if source.frozen is None else source.frozen.schema,
        parts=source.parts,
    )


def make_source(  # noqa: PLR0913 - the facts of a model
    module: nn.Module,
    *,
    input: tuple[int, ...],  # noqa: A002 - the manifest's word
    name: str | None = None,
    target: Sequence[int] | None = None,
    loss: Loss = "cross-entropy",
    own_loss: LossFunction | None = None,
    own_targets: Targets = None,
    dtype: str = "float32",
    frozen: str = "f32",
    parts: Parts = (),
    example: Example | None = None,
) -> TraceSource:
    """What the tracer works on: a private copy of the module, its shapes and its random numbers, all checked.

    `own_targets`: as `targets` of `compile_program`. `parts`: what packed samples hold, which the module cuts apart.
    `example`: what the user gave in place of `input`, for a refusal to judge.
    Cross-entropy of more than one row of logits per sample is that of torch's own layout: the classes come first.
    Raises ProgramRefused for a model that cannot become a training program.
    """
    name = type(module).__name__ if name is None else name
    refuse_unheld(name, module)
    refuse_trained_loss(own_loss)
    _warn_of_halves(module, name, dtype)
    mine = private_copy(module, dtype)
    warn_of_evaluation_mode(name, module, mine.train())
    check_tensors(name, mine)
    stored = freeze(mine, frozen)
    source = TraceSource(
        name=name,
        module=mine,
        schema=schema_of(mine),
        input=input,
        target=(),
        loss=loss,
        own_loss=own_loss,
        dtype=dtype,
        frozen=stored,
        parts=parts,
    )
    samples, expected = example_inputs(source, "infer", 3)[-1], None if target is None else tuple(target)
    with as_in(dtype):
        check_zeros(source.name, source.module.eval(), samples, source.parts)
        found = check_answers(source.name, source.module, samples, expected, parts=source.parts, example=example)
        check_samples(source)
        check_company(source.name, moved_network(source), samples, limit=MAX_RELATIVE_DIFFERENCE)
        if own_loss is not None and loss == "squared-error":
            word, shape = loss_of_targets(name, found, own_targets)
            source = replace(source, target=found, loss=word, own_targets=shape)
        else:
            source = replace(source, target=found, loss=loss_of_output(loss, name, found))
            if source.loss != "squared-error":
                with own_random(), torch.no_grad():
                    warn_of_probabilities(name, source.module.eval()(samples), 1 + class_axis(source.loss, found))
        check_writes(source)
        _check_repeats(source)
        check_gradient(source)
        noise, shared = count_random_numbers(source)
    return replace(source, noise=noise, shared_draws=shared)


def _warn_of_halves(module: nn.Module, name: str, dtype: str) -> None:
    """Say what happens to float16 and bfloat16: no runtime trains in them, so the program widens them."""
    halves = {n: p for n, p in module.named_parameters() if p.dtype in HALVES}
    if not halves:
        return
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in halves.values()}))
    said = f"model {name!r} has {len(halves)} parameters in {kinds}: they are trained, sent and stored as {dtype}"
    frozen = not all(p.requires_grad for p in halves.values())
    more = '; frozen="f16" stores the frozen ones in half the bytes' if frozen else ""
    warnings.warn(said + more, stacklevel=3)


def _check_own_loss(source: TraceSource) -> None:
    if source.own_loss is not None:
        *_, x, y = example_inputs(source, "evaluate", 3)
        with own_random(), torch.no_grad():
            check_own_loss(source.own_loss, source.module.eval()(x), y, labels=source.has_labels)


def _check_repeats(source: TraceSource) -> None:
    mine, (*given, x) = private_copy(source.module, source.dtype), example_inputs(source, "infer", 2)
    held = tensors_of(source.module) | dict(zip(source.params, given, strict=False))  # moved weights: none is zero

    def forward(training: bool) -> Tensor:  # noqa: FBT001 - torch's `train`
        state = {name: value.clone() for name, value in held.items()}
        with own_random(), torch.no_grad():
            torch.default_generator.manual_seed(0)  # that of the CPU alone
            return call_module(mine.train(training), state, x)[0]

    check_repeats(source.name, mine, forward)


def schema_of(module: nn.Module) -> Schema:
    """The tensors that a round exchanges, in torch's order: trainable parameters, then the saved float buffers.

    Frozen parameters are in a file of their own. Other buffers, a mask of infinities and empty tensors are constants. A
    shared parameter counts once, under its first name. The classifier is the last linear or convolution layer that is
    trained. Raises ProgramRefused when there is nothing to train.
    """
    params = [
        TensorSpec(name=n, role="p", shape=tuple(p.shape))
        for n, p in module.named_parameters()
        if p.requires_grad and p.numel()
    ]
    saved = module.state_dict()
    buffers = [
        TensorSpec(name=n, role="b", shape=tuple(b.shape))
        for n, b in module.named_buffers()
        if b.is_floating_point() and b.numel() and n in saved and travels(b)
    ]
    if not params:
        frozen = any(True for _ in module.parameters())
        raise ProgramRefused(
            f"this model cannot be trained: {'every parameter is frozen' if frozen else 'it has no parameters'}",
            hint="give some parameter requires_grad=True",
        )
    return Schema((*params, *buffers), tuple(last_layer(module)))


def last_layer(module: nn.Module) -> list[str]:
    """The names of the trained parameters of the last linear or convolution layer; none without such a layer."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = {
        id(p): n for n, p in module.named_parameters() if p.requires_grad and p.numel()
    }  # a shared one by its first name
    for layer in reversed([layer for layer in module.modules() if isinstance(layer, kinds)]):
        own = [names[id(p)] for p in layer.parameters(recurse=False) if id(p) in names]
        if own:
            return own
    return []


def vector_of(module: nn.Module, schema: Schema) -> Flat:
    """The module's weights and buffers as one vector [schema.size], float32 unless the module is float64."""
    return schema.join(weights_of(module, schema))


def weights_of(module: nn.Module, schema: Schema) -> dict[str, Array]:
    """Copies of the module's weights and buffers, under the names of the schema."""
    state = tensors_of(module)
    return {t.name: _widened(state[t.name].cpu()).numpy().copy() for t in schema.tensors}


def _widened(value: Tensor) -> Tensor:
    """float16 and bfloat16, which numpy or no codec of ours has, as float32."""
    return value.float() if value.dtype in HALVES else value


def load_vector(module: nn.Module, schema: Schema, flat: Flat) -> None:
    """Write a vector [schema.size] into the module, in place."""
    state = tensors_of(module)
    with torch.no_grad():
        for name, value in schema.split(flat).items():
            state[name].copy_(torch.from_numpy(np.array(value)))


def _check_engines(source: TraceSource, engines: Sequence[str], batch: int) -> None:
    if not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"batch={batch}", hint=f"give LiteRT's batch size, from 1 to {MAX_BATCH}")
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown or not engines:
        raise UsageError(f"unknown engine {', '.join(unknown) or '(none)'}", hint=f"use some of {', '.join(ENGINES)}")
    if source.dtype == "float64" and "litert" in engines:
        raise ProgramRefused("LiteRT has no float64", hint="compile float64 programs for onnx and pt2 only")


def _parity(source: TraceSource, engine: str, files: Mapping[str, bytes], size: BatchSize, progress: Progress) -> float:
    """The largest difference of any function from torch, relative to each output's largest value."""
    progress(f"{engine} beside torch")
    # another size than the traced one, so that a graph for one size only fails
    batch = EXAMPLE_BATCH + 1 if size == "any" else size
    with refusal_context(source, engine):
        worst = max(
            max_difference(source, engine, f, files[f], batch=batch, seed=1, limit=MAX_RELATIVE_DIFFERENCE)
            for f in FUNCTIONS
        )
    if worst > MAX_RELATIVE_DIFFERENCE:
        raise ProgramRefused(
            f"model {source.name!r} on {engine} differs from torch by {worst:.1e}, limit {MAX_RELATIVE_DIFFERENCE:.0e}",
            hint=difference_hint(source, engine, worst),
        )
    with refusal_context(source, engine):
        differs = size == "any" and one_sample_differs(source, engine, files["step"])
    if differs:
        raise ProgramRefused(
            f"model {source.name!r} computes a batch of one sample in another way than larger ones, and no program can",
            hint=ONE_SAMPLE,
        )
    return worst
