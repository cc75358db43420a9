"""What makes `lean` fast must not be seen in its numbers, and a change of torch must not slow it down unnoticed."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import fit_result, make_job
from emulator.api.models import module_of
from emulator.engines.cpu import fused_sgd, inference, steps
from emulator.engines.cpu.cpu_engine import cpu_recipe, prefers_channels_last
from emulator.engines.cpu.flat import FlatModel
from emulator.engines.cpu.recording import aten, record_operators
from emulator.engines.cpu.samples import SampleCache
from export.compiler.program import load_vector, make_source, schema_of, vector_of
from export.compiler.program_functions import TraceSource, call_module, example_inputs, function_ports
from tests.support import programs, reference_sgd
from tests.support.architectures import ENTRIES

SAME = 1e-12  # relative: float64, the same operators in another order
WHOLE = {"mobilenet-v3", "resnet-18", "resnet-18-narrow", "ds-cnn"}  # built of the parts that the others have
SMALL = sorted(set(ENTRIES) - WHOLE)


def source(name: str, dtype: str = "float64") -> TraceSource:
    model = programs.model(name)
    return make_source(model.module, name=name, input=model.input, target=model.output, loss=model.loss, dtype=dtype)


def batch_of(made: TraceSource, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    names = [port.name for port in function_ports(made, "step").inputs]
    given = dict(zip(names, example_inputs(made, "step", batch), strict=True))
    return given["x"], given["y"], given["q"], given.get("noise")


class Rotated(nn.Module):
    """Rotations in a complex buffer, as of rotary positions, and normal noise."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)).to(torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x + torch.randn_like(x) if self.training else x)
        turned = torch.view_as_complex(h.reshape(-1, 3, 2)) * self.turns
        return self.head(torch.view_as_real(turned).flatten(1))  # type: ignore[no-any-return]


class FirstTutorial(nn.Module):
    """The network of torch's first tutorial: `view`, which torch refuses of images that lie channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.max_pool2d(torch.relu(self.conv(x)), 2).view(-1, 64))  # type: ignore[no-any-return]


class Closed(nn.Module):
    """Without gradients in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(torch.relu(self.conv(x)).flatten(1))
        return out if self.training else out.detach()  # type: ignore[no-any-return]


OWN = {"rotated": (Rotated, (6,)), "view-of-images": (FirstTutorial, (1, 8, 8))}


@pytest.mark.parametrize(("module", "last"), [(FirstTutorial(), False), (Closed(), True)])
def test_images_lie_channels_last_where_a_step_and_an_evaluation_take_them_so(module: nn.Module, last: bool) -> None:  # noqa: FBT001
    assert prefers_channels_last(make_source(module, input=(1, 8, 8), dtype="float64")) is last


@pytest.mark.parametrize("name", [*SMALL, *OWN])
def test_recorded_steps_are_autograds(name: str) -> None:
    made = make_source(OWN[name][0](), input=OWN[name][1], dtype="float64") if name in OWN else source(name)
    x, y, q, noise = batch_of(made, 6)
    sides = [FlatModel(made.module, made.schema, channels_last=side) for side in (prefers_channels_last(made), False)]
    record = steps.record_step(made, sides[0], x, y, noise), steps.autograd_step(made, sides[1])
    for _ in range(2):  # buffers that a step puts in the place of others must be there for the next one
        losses = [step(x, y, q, noise) for step in record]
        torch.testing.assert_close(*losses, rtol=SAME, atol=0)
    for flat in ("weights", "gradient"):
        one, other = (side.to_schema_order(getattr(side, flat)) for side in sides)
        assert np.abs(one - other).max() <= SAME * np.abs(other).max()


class CalledOperators(TorchDispatchMode):
    """The operators that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["digits-mlp", "gn-cnn"])
def test_a_recorded_step_computes_no_more_operators_than_autograd(name: str) -> None:
    made = source(name)
    x, shares, q, noise = batch_of(made, 6)
    y = shares.argmax(1)  # labels, as devices have them
    flat = FlatModel(made.module, made.schema, channels_last=False)
    counted, losses = [], []
    for step in steps.record_step(made, flat, x, y, noise), steps.autograd_step(made, flat):
        with CalledOperators() as called:
            losses.append(step(x, y, q, noise))
        counted.append(called.names)
    assert len(counted[0]) <= len(counted[1]), counted
    assert torch.equal(*losses)


def test_an_lstm_is_recorded_in_float32_too_where_onednn_has_one_operator_for_it() -> None:
    made = source("lstm", "float32")
    x, y, q, noise = batch_of(made, 6)
    sides = [FlatModel(made.module, made.schema, channels_last=False) for _ in range(2)]
    losses = [
        step(x, y, q, noise)
        for step in (steps.record_step(made, sides[0], x, y, noise), steps.autograd_step(made, sides[1]))
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    one, other = (side.to_schema_order(side.gradient) for side in sides)
    assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


class ValueBranching(nn.Module):
    """What no recorder follows: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.one if float(x.detach().sum()) > 0 else self.other
        out: Tensor = chosen(x) + self.other(x)
        return out


def branching() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(name="branching", module=ValueBranching(), input=(4,), classes=3)


def test_a_forward_that_cannot_be_recorded_trains_and_evaluates_all_the_same() -> None:
    model = branching()
    terms = frozenset({"anchor", "linear", "momentum", "q"})
    asked = reference_sgd.job_of(model, reference_sgd.JobFacts(n=9, steps=6, batch=4, terms=terms))
    learner = cpu_recipe(model, dtype="float64").open()
    reference_sgd.check_same_as_loop(learner, model, [asked])
    _, logits = learner.evaluate([asked.start], asked.data, batch=4)
    with torch.no_grad():
        whole = torch.from_numpy(asked.data.x)
        filled = torch.cat([whole, whole.new_zeros(inference.BATCH_MULTIPLE - len(whole), 4)])
        np.testing.assert_allclose(logits[0], model.module.double()(filled)[:9].numpy(), rtol=SAME)


def test_a_frozen_parameter_and_a_shared_one_have_their_place() -> None:
    made = source("tied-embedding")
    flat = FlatModel(made.module, made.schema, channels_last=False)
    assert isinstance(flat.module.tokens, nn.Embedding)
    assert isinstance(flat.module.out, nn.Linear)
    assert flat.module.tokens.weight is flat.module.out.weight
    flat.load(np.arange(float(made.schema.size)))
    assert float(flat.module.out.weight.detach()[0, 1]) == 1.0


class Gated(nn.Linear):
    """Its weights come from a function in an attribute."""

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)
        self.gate: Callable[[], Tensor] = lambda: self.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.gate())


def test_a_function_that_a_module_keeps_reads_the_vector_that_was_loaded() -> None:
    net, vector = Gated(), np.arange(3.0, dtype=np.float32)
    schema = schema_of(net)
    flat = FlatModel(net, schema, channels_last=False)
    flat.load(vector)
    for module in (flat.module, module_of(net, schema, vector)):
        np.testing.assert_array_equal(module(torch.eye(3)).detach()[:, 0], 2 * vector)


@pytest.mark.parametrize("turned", [False, True])
def test_vectors_go_in_and_out_in_the_schemas_order(turned: bool) -> None:  # noqa: FBT001 - a parameter of the test
    made = source("wecfl-cnn")
    flat = FlatModel(made.module, made.schema, channels_last=turned)
    vector = np.random.default_rng(0).standard_normal(made.schema.size)
    flat.load(vector)
    np.testing.assert_array_equal(flat.to_schema_order(flat.weights), vector)
    np.testing.assert_array_equal(flat.to_schema_order(flat.to_flat_order(vector)), vector[: made.schema.n_params])
    np.testing.assert_array_equal(vector_of(flat.module, made.schema), vector)
    weight = flat.state["4.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last) == turned


def graph_of(name: str, *, width: int) -> fx.Graph:
    made = source(name)
    flat = FlatModel(made.module, made.schema, channels_last=True)
    flat.module.eval()
    names, x = list(flat.state), batch_of(made, width)[0]
    return record_operators(
        lambda *given: call_module(flat.module, dict(zip(names, given, strict=False)), given[-1])[0],
        [*flat.state.values(), x],
    )


def calls(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_batch_norm_is_folded_away_and_relu_waits_for_the_pool() -> None:
    graph = graph_of("wecfl-cnn", width=16)
    assert sum(target in inference.BATCH_NORM_OPERATORS for target in calls(graph)) == 2
    inference.fold_batch_norm(graph)
    assert not any(target in inference.BATCH_NORM_OPERATORS for target in calls(graph))
    order = [target for target in calls(graph) if target in (aten.relu.default, aten.max_pool2d_with_indices.default)]
    assert order == [aten.max_pool2d_with_indices.default, aten.relu.default] * 2


@pytest.mark.parametrize("name", ["wecfl-cnn", "gn-cnn", "har-cnn", "frozen-body", "instance-norm", "decoder"])
def test_candidates_of_any_number_of_samples_have_torchs_own_logits(name: str) -> None:
    model, rng = programs.model(name), np.random.default_rng(0)
    learner, module = cpu_recipe(model, dtype="float64").open(), source(name).module.eval()
    start = vector_of(model.module, learner.program.schema).astype(np.float64)
    models = [start + 0.1 * rng.random(start.shape) for _ in range(2)]
    for samples in (145, 1, 17, 128):
        data = Dataset(rng.standard_normal((samples, *model.input)), rng.integers(model.classes, size=samples))
        losses, logits = learner.evaluate(models, data, batch=7)
        for m, vector in enumerate(models):
            load_vector(module, learner.program.schema, vector)
            with torch.no_grad():
                expected = module(torch.from_numpy(data.x))
            assert np.abs(logits[m] - expected.numpy()).max() <= SAME * expected.abs().max()
            each = nn.functional.cross_entropy(expected, torch.from_numpy(data.y), reduction="none")
            assert np.abs(losses[m] - each.numpy()).max() <= SAME * each.abs().max()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_torchs_private_kernel_is_there_and_does_what_is_written(momentum: float, decay: float) -> None:
    assert fused_sgd.FUSED_SGD is not None, (
        "torch has taken it away: `plain_sgd_step` serves, at a third more per small step"
    )
    draw = torch.Generator().manual_seed(0)
    one = [torch.randn(1_003, generator=draw, dtype=torch.float64) for _ in range(3)]
    other = [tensor.clone() for tensor in one]
    for _ in range(2):
        fused_sgd.sgd_step(*one, lr=0.1, momentum=momentum, decay=decay)
        gradient = other[1].clone()
        fused_sgd.plain_sgd_step(other[0], gradient, other[2], lr=0.1, momentum=momentum, decay=decay)
    torch.testing.assert_close(one[0], other[0], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(one[2], other[2], rtol=1e-14, atol=1e-14)


def test_without_the_kernel_updates_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = programs.model("digits-mlp")
    asked = reference_sgd.job_of(
        model, reference_sgd.JobFacts(n=9, steps=4, terms=frozenset({"anchor", "linear", "momentum", "q"}))
    )
    monkeypatch.setattr(fused_sgd, "FUSED_SGD", None)
    reference_sgd.check_same_as_loop(cpu_recipe(model, dtype="float64").open(), model, [asked])


def test_a_recipe_travels_by_value_and_gives_the_same_bits() -> None:
    model = programs.model("wecfl-cnn")
    recipe = cpu_recipe(model)
    sent = ForkingPickler.dumps(recipe)  # what multiprocessing does; torch would send handles of shared memory
    assert len(sent) > 4 * recipe.program.schema.size
    start = vector_of(model.module, recipe.program.schema)
    rng = np.random.default_rng(0)
    data = Dataset(rng.random((9, 1, 28, 28)), rng.integers(10, size=9))
    task = Fit(start=start, steps=2, lr=0.1, batch=4, seed=0)
    asked = make_job(recipe.program, task, data)
    one, other = (next(iter(r.open().train([asked]))) for r in (recipe, pickle.loads(bytes(sent))))  # noqa: S301
    np.testing.assert_array_equal(one.vector, other.vector)
    assert one.vector.dtype == np.float32
    assert torch.get_num_threads() == 1


def data_sets(count: int) -> Sequence[Dataset]:
    rng = np.random.default_rng(0)
    return [Dataset(rng.random((4, 3, 5, 5)), rng.integers(3, size=4)) for _ in range(count)]


def test_samples_are_converted_once_and_given_up_beyond_the_limit() -> None:
    one, two, three = data_sets(3)
    each = 4 * 3 * 5 * 5 * 4 + 4 * 8
    samples = SampleCache("float32", turned=True, limit=2 * each)
    first = samples.tensors_of(one)
    assert samples.tensors_of(one) is first
    assert samples.tensors_of(two) is samples.tensors_of(two)
    assert samples.tensors_of(one) is first
    samples.tensors_of(three)  # gives up two, which was used before one
    assert samples.tensors_of(one) is first
    assert first.x.shape == (4, 5, 5, 3)
    np.testing.assert_array_equal(next(first.slices(4, 1)).numpy(), one.x.astype(np.float32))


def test_samples_of_data_that_is_gone_are_gone() -> None:
    samples = SampleCache("float64", turned=False)
    held = weakref.ref(samples.tensors_of(data_sets(1)[0]).x)
    gc.collect()
    assert held() is None


def test_batches_carry_weights_over_their_size_however_many_are_brought_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (data,) = data_sets(1)
    indices = [np.array([3, 1]), np.array([0]), np.array([2, 2, 2])]
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    held = SampleCache("float64", turned=True).tensors_of(data)
    for limit in (1, 1 << 24):
        monkeypatch.setattr("emulator.engines.cpu.samples.MAX_GATHERED_BYTES", limit)
        for index, (x, y, q) in zip(indices, held.batches(indices, weights), strict=True):
            np.testing.assert_array_equal(x.numpy(), data.x[index])
            np.testing.assert_array_equal(y.numpy(), data.y[index])
            np.testing.assert_array_equal(q.numpy(), weights[index] / len(index))


@pytest.mark.parametrize("recording", [True, False])
def test_a_last_batch_of_one_sample_leaves_batch_norms_statistics_as_on_a_device(
    recording: bool,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no variance; torch would end the whole simulation with a ValueError."""
    if not recording:
        monkeypatch.setattr("emulator.engines.cpu.cpu_engine.record_step", None)  # calling it fails: autograd serves
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = Model(name="normed", module=module, input=(4,), classes=3)
    learner = cpu_recipe(model, dtype="float64").open()
    ends = []
    for number in (1, 2):
        asked = reference_sgd.job_of(model, reference_sgd.JobFacts(n=5, steps=number, batch=4))
        (trained,) = learner.train([asked])
        ends.append(learner.program.schema.split(fit_result(asked.task, trained).vector))
    one, two = ends
    assert all(np.array_equal(one[name], two[name]) for name in ("1.running_mean", "1.running_var"))
    assert not np.array_equal(one["1.bias"], two["1.bias"])


def test_a_step_that_diverges_says_so_in_its_numbers() -> None:
    model = programs.model("digits-mlp")
    asked = reference_sgd.job_of(model, reference_sgd.JobFacts(settings={"lr": 1e300}, steps=6))
    (trained,) = cpu_recipe(model, dtype="float64").open().train([asked])
    assert not math.isfinite(float(trained.vector.sum()))


def test_one_sample_behind_batch_norm_is_exactly_its_shift_as_in_a_program() -> None:
    """Rounding of x - mean, times 1 / sqrt(eps), opened the ReLU behind it for some units: a program trains none."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    recipe = cpu_recipe(Model(name="net", module=module, input=(6,), classes=3))
    data = Dataset(np.random.default_rng(0).normal(size=(1, 6)).astype(np.float32), np.array([1]))
    start = vector_of(module, recipe.program.schema)
    task = Fit(start=start, steps=3, lr=0.1, batch=1, seed=0)
    (trained,) = recipe.open().train([make_job(recipe.program, task, data)])
    moved = recipe.program.schema.split(trained.vector - start)
    assert [name for name, value in moved.items() if value.any()] == ["3.bias"]
