"""Dropout is part of a step and never baked in: its numbers are an input, which the device draws from the task's seed.

That the masks are torch's own is shown beside every other layer, in tests/conformance/test_architectures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client.data.dataset import Dataset
from edge_client.engines.base import run_step
from edge_client.errors import ProgramRefused
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import run_fit
from edge_client.training.learner import EngineLearner
from export.compiler.containers import EXAMPLE_BATCH
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import compile_program, make_source, vector_of
from export.compiler.program_functions import example_inputs, function_ports
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.random_ops import NoiseReader
from export.compiler.tracing import export_graph, trace_function
from export.containers.write_pt2 import run_pt2
from tests.support.programs import BATCH, compiled, feeds, model, opened, relative


def drawn(module: nn.Module, *input: int) -> int:  # noqa: A002 - the manifest's word
    """Numbers per sample."""
    return make_source(module, input=input).noise


def test_the_noise_is_an_input_of_the_step_alone() -> None:
    functions = compiled("dropout", engines=("onnx",)).program.functions
    assert {name for name, f in functions.items() if any(p.name == "noise" for p in f.inputs)} == {"step"}
    assert next(p.shape for p in functions["step"].inputs if p.name == "noise") == ("batch", 16 + 8)


def test_other_noise_is_another_step_and_the_same_noise_the_same(tmp_path: Path) -> None:
    made = compiled("dropout", engines=("onnx",))
    engine = opened(made, "onnx", tmp_path)
    given = feeds(made.program, "step", batch=BATCH)
    once, again = run_step(engine, given), run_step(engine, given)
    other = run_step(engine, given | {"noise": 1 - given["noise"] - 2**-24})
    assert all(np.array_equal(once[n], again[n]) for n in once)
    assert relative(other, once) > 0.1


def test_the_seed_of_the_task_decides_what_is_dropped(tmp_path: Path) -> None:
    made = compiled("dropout", engines=("onnx",))
    engine = opened(made, "onnx", tmp_path)
    rng = np.random.default_rng(0)
    data = Dataset(rng.standard_normal((BATCH, 5)).astype(np.float32), np.arange(BATCH) % 3)
    start = vector_of(model("dropout").module, made.program.schema)
    task = Fit(start=start, steps=3, lr=0.1, batch=BATCH, seed=1)  # one batch of all samples: their order is no matter
    one, same, other = (
        run_fit(EngineLearner(engine, made.program), replace(task, seed=seed), data).vector.astype(np.float64)
        for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same)
    assert np.abs(one - other).max() > 0.01 * np.abs(one - start).max()


def test_a_number_drops_its_value_when_it_is_below_the_probability() -> None:
    """One linear layer behind dropout: the gradient of its weights is zero where all samples were dropped."""
    module = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 2, bias=False))
    source = make_source(module, input=(4,), loss="squared-error")
    made = compile_program(module, (4,), loss="squared-error", engines=("pt2",))
    args = {
        p.name: torch.zeros([2 if d == "batch" else d for d in p.shape]) for p in function_ports(source, "step").inputs
    }
    edge = np.float32(0.3)
    args |= {"x": torch.ones(2, 4), "y": torch.ones(2, 2), "q": torch.ones(2), "noise": torch.zeros(2, 4)}
    args["noise"][:, 2] = float(edge) - 2**-24
    args["noise"][:, 3] = float(edge)
    result = run_pt2(made.files[made.program.containers["pt2"]["step"].sha256], list(args.values()))
    velocity = result[[p.name for p in function_ports(source, "step").outputs].index("velocity/1.weight")]
    assert torch.any(velocity != 0, dim=0).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("layer", "numbers"),
    [
        (nn.Dropout(0.0), 0),
        (nn.Dropout(1.0), 0),
        (nn.Dropout(0.5), 4 * 6 * 6),
        (nn.Dropout2d(0.5), 4),
        (nn.RReLU(), 4 * 6 * 6),
        (nn.Identity(), 0),
    ],
)
def test_a_step_takes_as_many_numbers_as_the_layer_draws(layer: nn.Module, numbers: int) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(144, 3))
    assert drawn(module, 1, 8, 8) == numbers


class Weights(nn.Linear):
    """Drops weights, not values."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.dropout(self.weight, 0.5, self.training), self.bias)


def test_a_mask_of_weights_is_one_for_the_batch_and_reads_the_first_samples_numbers() -> None:
    source = make_source(nn.Sequential(nn.Dropout(0.5), Weights(5, 3)), input=(5,), loss="squared-error")
    assert source.noise == 5 + 15
    assert source.shared_draws == {1}
    graph = trace_function(ForwardPasses(source), "step", batch=EXAMPLE_BATCH, dynamic=True)
    for batch in (1, 4):
        given = example_inputs(source, "step", batch)
        at = {port.name: value for port, value in zip(function_ports(source, "step").inputs, given, strict=True)}
        noise = at["noise"]
        mask = (noise[0, 5:].reshape(3, 5) >= 0.5) * 2.0
        x = at["x"] * (noise[:, :5] >= 0.5) * 2.0
        out = x @ (at["w/1.weight"] * mask).T + at["w/1.bias"]
        told = (at["q"] * ((out - at["y"]) ** 2).mean(1)).sum()
        torch.testing.assert_close(graph(*given)[-1], told)


class DroppedInPlace(nn.Linear):
    """Reads the layer itself, not what the call returns."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        nn.functional.dropout(h, 0.5, self.training, inplace=True)
        return h


def test_dropout_in_place_changes_what_is_read_afterwards() -> None:
    source = make_source(DroppedInPlace(5, 3), input=(5,), loss="squared-error", dtype="float64")
    assert source.noise == 3
    graph = trace_function(ForwardPasses(source), "step", batch=EXAMPLE_BATCH, dynamic=True)
    given = example_inputs(source, "step", 5)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-12


class RandomSlopes(nn.Linear):
    """Slopes that are drawn, in place too, beside fixed ones in the same pass."""

    def forward(self, x: Tensor) -> Tensor:
        h, f = super().forward(x), nn.functional
        fixed = f.rrelu(h, 0.2, 0.4) + torch.rrelu(h, 0.1, 0.3)
        drawn = f.rrelu(h, 0.2, 0.4, self.training) * f.rrelu(h + 1, 0.1, 0.3, self.training, inplace=True)
        return drawn * torch.rrelu_(h - 1, 0.3, 0.5, self.training) + fixed


def test_random_slopes_below_zero_are_the_next_uniform_numbers_in_torch_and_in_the_graph() -> None:
    source = make_source(RandomSlopes(5, 3), input=(5,), loss="squared-error", dtype="float64")
    assert source.noise == 3 * 3
    given = example_inputs(source, "step", 5)
    graph = trace_function(ForwardPasses(source), "step", batch=EXAMPLE_BATCH, dynamic=True)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-12
    x, u = torch.tensor([[-1.0, 0.0, 2.0]]).requires_grad_(), torch.tensor([[0.25, 0.5, 0.75]])
    with NoiseReader(u):
        out = nn.functional.rrelu(x, 0.2, 0.6, training=True)
    (slopes,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, torch.tensor([[-0.3, 0.0, 2.0]]))
    torch.testing.assert_close(slopes, torch.tensor([[0.3, 0.4, 1.0]]))


class Pairs(nn.Linear):
    """A number for every pair of samples."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(len(x), len(x)) if self.training else torch.zeros(len(x), len(x))
        return super().forward(x + drawn.sum(1, keepdim=True))


def test_numbers_that_belong_neither_to_a_sample_nor_to_the_batch_are_refused_by_layer() -> None:
    with pytest.raises(ProgramRefused, match=r"layer 0 \(Pairs\).*do not belong to one sample"):
        make_source(nn.Sequential(Pairs(5, 3)), input=(5,))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016) as it is often written: a whole sample skips the block, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.head(x + 0.7 * self.block(x))  # type: ignore[no-any-return]
        kept = (torch.rand((x.shape[0], 1), dtype=x.dtype) < 0.7).to(x.dtype)
        return self.head(x + kept * self.block(x))  # type: ignore[no-any-return]


def test_uniform_numbers_of_the_models_own_are_noise_too() -> None:
    source = make_source(DropPath(), input=(5,))
    trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)  # refuses what still draws by itself
    assert source.noise == 1


class Reparametrised(nn.Module):
    """Draws as variational autoencoders, diffusion models and the libraries that they call write them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.mean(x), torch.exp(0.5 * self.spread(x))
        if not self.training:
            return self.head(mean)  # type: ignore[no-any-return]
        drawn = mean + spread * torch.randn_like(spread) + torch.randn(x.shape[0], 4) * spread
        drawn = drawn + torch.distributions.Normal(mean, spread).rsample()
        drawn = drawn + spread * torch.randint(2, 5, (x.shape[0], 1)) * torch.randint(3, (x.shape[0], 4))
        drawn = drawn + torch.normal(mean.detach(), 0.1) + x.new_empty(x.shape[0], 1).normal_(0.5, 0.1)
        return self.head(drawn * nn.functional.gumbel_softmax(drawn, tau=0.7))  # type: ignore[no-any-return]


def test_normal_exponential_and_whole_numbers_of_the_models_own_are_noise_too() -> None:
    source = make_source(Reparametrised(), input=(5,), loss="squared-error", dtype="float64")
    assert source.noise == 4 * (2 * 4) + 2 * 1 + 4 + 1 + 4
    graph = trace_function(ForwardPasses(source), "step", batch=EXAMPLE_BATCH, dynamic=True)
    given = example_inputs(source, "step", 5)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-12


def test_uniform_numbers_become_normal_exponential_and_whole_ones() -> None:
    n = 50_000
    u = torch.from_numpy(np.random.default_rng(0).random((1, 4 * n), dtype=np.float32))
    with NoiseReader(u) as draws:
        z, e = torch.randn(1, n).double(), torch.empty(1, n).exponential_(2.0).double()
        whole = torch.randint(-1, 4, (1, n))
    draws.check()
    moments = [float((z**k).mean()) for k in (1, 2, 3, 4)]
    assert np.allclose(moments, [0, 1, 0, 3], atol=6 * np.sqrt([1 / n, 2 / n, 15 / n, 96 / n]))  # six deviations
    assert np.allclose([float(e.mean()), float((e**2).mean())], 0.5, atol=6 * np.sqrt(1.25 / n))
    assert np.allclose((whole[0] + 1).bincount(minlength=5), n / 5, atol=6 * np.sqrt(n * 0.16))
    with NoiseReader(torch.full((1, 64), 1 - 2.0**-24)):
        assert all(int(torch.randint(high, (1,))) == high - 1 for high in range(1, 65))
    with NoiseReader(torch.tensor([[0.0, 0.0, 0.0, 1 - 2.0**-24, 0.5, 1 - 2.0**-24]])):  # the ends
        ends = torch.cat([torch.randn(2), torch.empty(2).exponential_()])
    assert ends.isfinite().all()
    assert (ends[2:] > 0).all()


def test_whole_numbers_are_of_the_dtype_that_is_asked_for() -> None:
    """`~torch.randint(2, size, dtype=torch.bool)` was -1 and -2."""
    with NoiseReader(torch.tensor([[0.1, 0.9, 0.1, 0.9, 0.5]])):
        kept = ~torch.randint(2, (1, 2), dtype=torch.bool)
        like = torch.randint_like(torch.zeros(1, 2), 1, 4)
        small = torch.randint(7, (1, 1), dtype=torch.uint8)
    assert torch.equal(kept, torch.tensor([[True, False]]))
    assert torch.equal(like, torch.tensor([[1.0, 3.0]]))
    assert torch.equal(small, torch.tensor([[3]], dtype=torch.uint8))


class Seeded(nn.Linear):
    """Draws whole numbers up to `high`."""

    high = 2**24 + 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.randint(self.high, (x.shape[0], 1)) if self.training else x)


def test_whole_numbers_that_the_noise_has_too_few_digits_for_are_refused() -> None:
    """`torch.randint(2**31, size) % 2` was always 0."""
    with pytest.raises(ProgramRefused, match=r"randint: whole numbers are drawn up to 16,777,216"):
        compile_program(Seeded(5, 3), (5,), engines=("pt2",))


class FixedDraw(nn.Linear):
    """The same projection in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))


def test_a_generator_of_the_models_own_is_refused_where_it_draws() -> None:
    with pytest.raises(ProgramRefused, match=r"FixedDraw\) at test_random_ops.py:\d+ uses aten.randn: a generator"):
        make_source(FixedDraw(5, 3), input=(5,))


def test_rows_are_channels_where_torch_takes_a_batch_for_one_sample() -> None:
    """`nn.Dropout1d` of [batch, features] drops whole rows."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout1d(0.5), nn.Linear(6, 3))
    assert drawn(module, 4) == 1
    assert compile_program(module, (4,), engines=("pt2",)).program.batch == {"pt2": "any"}


class TimeFirst(nn.Module):
    """Dropout of values that stand as [steps, batch, features], as between recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(x.transpose(0, 1), 0.5, self.training).mean(0))  # type: ignore[no-any-return]


def test_a_mask_with_as_many_steps_as_the_example_has_samples_fits_every_batch() -> None:
    source = make_source(TimeFirst(), input=(EXAMPLE_BATCH, 5))
    graph = trace_function(ForwardPasses(source), "step", batch=EXAMPLE_BATCH, dynamic=True)
    export_graph(source, "step", graph, batch=EXAMPLE_BATCH)  # refuses a graph that took the one for the other


class AlwaysDropping(nn.Linear):
    """Forgets to ask whether it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


def test_a_draw_in_inference_mode_is_refused() -> None:
    with pytest.raises(ProgramRefused, match="differently each time"):
        make_source(AlwaysDropping(5, 64), input=(5,))


class Drawing(nn.Linear):
    """Draws with each sample while it trains."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(5, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.draw(x) if self.training else x)


OTHER_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randperm": lambda x: x[:, torch.randperm(5)],
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(5), 5)],
    "poisson": lambda x: x + torch.poisson(torch.ones_like(x)),
    "binomial": lambda x: x * torch.binomial(torch.ones_like(x), torch.full_like(x, 0.5)),
    "random_": lambda x: x + torch.empty_like(x).random_(2),
    "cauchy_": lambda x: x + torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: x + torch.empty_like(x).geometric_(0.5),
    "log_normal_": lambda x: x + torch.empty_like(x).log_normal_(),
    "_standard_gamma": lambda x: x + torch.ops.aten._standard_gamma(torch.ones_like(x)),
    "_sample_dirichlet": lambda x: x + torch.ops.aten._sample_dirichlet(torch.ones_like(x)),
}


@pytest.mark.parametrize("operator", OTHER_DRAWS)
def test_a_draw_that_no_noise_can_stand_for_is_refused_for_every_engine(operator: str) -> None:
    """The engine `lean`, which calls the module, drew with torch's own generator: a task done twice gave two models."""
    with pytest.raises(ProgramRefused, match=f"{operator}: a step draws masks"):
        make_source(Drawing(OTHER_DRAWS[operator]), input=(5,))


def test_tracing_leaves_torchs_global_generator_as_it_was() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    before = torch.random.get_rng_state()
    trace_function(ForwardPasses(make_source(module, input=(4,))), "step", batch=4, dynamic=True)
    assert torch.equal(torch.random.get_rng_state(), before)
