"""What stands for calls of torch in a forward pass is torch's: a ReLU behind a max-pool to the bit, others closely."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.decompositions.supported_ops import UnsupportedOperator
from export.compiler.forward_overrides import ForwardOverrides
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import TraceSource, example_inputs
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import trace_function
from tests.support.programs import model

NETWORKS: dict[str, Callable[[Tensor], Tensor]] = {
    "pooled": lambda x: F.max_pool2d(F.relu(x), 2),
    "as methods": lambda x: torch.max_pool2d(x.relu(), 3, 2, 1),
    "by name": lambda x: torch.max_pool2d(input=torch.relu(input=x), kernel_size=2),
    "along one axis": lambda x: F.max_pool1d(torch.relu(x[:, 0]), 2),
    "the ReLU is read twice": lambda x: F.max_pool2d(y := F.relu(x), 3, 1, 1) + y,
    "another ReLU between": lambda x: F.max_pool2d(y := F.relu(x), 2) * F.max_pool2d(F.relu(y - 1), 2),
    "the pooled values are written into": lambda x: F.max_pool2d(F.relu(x), 2).add_(1.5),
    "the ReLU is written into": lambda x: F.max_pool2d(F.relu(x.detach()).add_(1), 2) * x[..., :3, :3],
    "ceil": lambda x: F.max_pool2d(F.relu(x), 2, ceil_mode=True),
}


def step_difference(module: nn.Module, shape: tuple[int, ...], function: str = "step") -> float:
    """How far a traced step, or another function, in float64 of another batch size is from torch's."""
    source = make_source(module, input=shape, loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), function, batch=4, dynamic=True)
    given = example_inputs(source, function, 3)
    found = [value.detach().numpy() for value in graph(*given)]
    return max(output_differences(found, torch_outputs(source, function, given)))


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_values_and_gradients_keep_every_bit_where_windows_tie_and_hold_nothing_positive(
    network: Callable[[Tensor], Tensor],
) -> None:
    values = torch.randint(-4, 3, (3, 2, 7, 7), generator=torch.Generator().manual_seed(0)).double()

    def run() -> list[Tensor]:
        x = values.clone().requires_grad_()
        out = network(x)
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out.detach(), *torch.autograd.grad(out, x, weight)]

    expected = run()
    with ForwardOverrides():
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


BAGS = torch.tensor([[0, 4, 4, 2], [4, 4, 4, 4], [1, 3, 0, 4]])
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"{mode} of a bag{'' if padding is None else ' beside padding'}": lambda x, mode=mode, padding=padding: (
            F.embedding_bag(BAGS, x[0, 0, :5], mode=mode, padding_idx=padding)  # type: ignore[misc]
        )
        for mode in ("sum", "mean", "max")
        for padding in (None, -1)
    },
    "a pool of volumes with a list of strides": lambda x: F.max_pool3d(x, [1, 2, 2], [1, 2, 1]),
    "an average of volumes with no strides": lambda x: F.avg_pool3d(x, 2, []),
    "dropout by torch's own name of its switch": lambda x: torch.dropout(x, p=0.5, train=False),
    "a similarity by torch's own names": lambda x: F.cosine_similarity(x1=x, x2=x + 1, dim=-1),
    "means without NaN": lambda x: torch.where(x > 0, x, torch.nan).nanmean((1, -1)),
    "a bag with weights": lambda x: F.embedding_bag(
        BAGS, x[0, 0, :5], mode="sum", per_sample_weights=x[0, 1, :3, :4], padding_idx=2
    ),
    "fewer pixels": lambda x: F.interpolate(x, (3, 9), mode="bilinear", antialias=True),
    "half as many pixels": lambda x: F.interpolate(x, scale_factor=0.6, mode="bicubic", antialias=True),
    "ends kept": lambda x: F.interpolate(x, 4, mode="bilinear", antialias=True, align_corners=True),
    "columns alone": lambda x: F.interpolate(x, (7, 1), mode="bilinear", antialias=True),
    "one pixel": lambda x: F.interpolate(x, 1, mode="bicubic", antialias=True),
    "a cosine with one number": lambda x: F.cosine_similarity(x, x[:, :1] * 2 - 1, 1),
    "a cosine with fewer axes": lambda x: F.cosine_similarity(x, x[0, 0] - 1, 3),
    "a ring without its first column": lambda x: F.pad(x, (-1, 2, 1, 0), mode="circular"),
    "an edge without its last row": lambda x: F.pad(x, (2, 1, 1, -2), mode="replicate"),
    **{
        f"powers of volumes, {norm}": lambda x, norm=norm: F.lp_pool3d(
            x.abs().unsqueeze(1) + 0.1, norm, (1, 2, 3), ceil_mode=True
        )  # type: ignore[misc]
        for norm in (3, 1.5, float("inf"), -float("inf"))
    },
    "means of parts of a volume": lambda x: F.adaptive_avg_pool3d(x, (None, 3, 2)),
    "largest values of parts of a volume": lambda x: F.adaptive_max_pool3d(x, (1, 7, 1)),
    "a mean over three axes": lambda x: F.avg_pool3d(x.unsqueeze(1), kernel_size=2, stride=(1, 2, 2)),
    "a product by numpy's names": lambda x: x[:, :2].prod(axis=1, keepdims=True) + torch.cumprod(x / 4, axis=3),  # type: ignore[call-arg, call-overload]
    "the farthest axis of several": lambda x: torch.cdist(
        x - x.detach().frac(), torch.ones(5, 7, dtype=x.dtype), p=torch.inf
    ),
    "values along an axis by number": lambda x: (
        torch.take_along_dim(x, x.argsort(-1), 3) * x.take_along_dim(torch.tensor([6, 0]).reshape(1, 1, 2, 1), -2).sum()
    ),
    "values of all by number": lambda x: torch.take_along_dim(x, torch.tensor([[9, 0], [0, 200]])),
    "without antialias": lambda x: F.interpolate(x, scale_factor=(2, 1), mode="bilinear"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_values_and_gradients_are_torchs(rule: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(3, 2, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run() -> list[Tensor]:
        x = values.clone().requires_grad_()
        out = rule(x)
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out.detach(), *torch.autograd.grad(out, x, weight)]

    expected = run()
    with ForwardOverrides():
        found = run()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("x", [torch.randn(2, 1, 4, 6), torch.randn(2, 1, 4, 1)])
def test_images_one_pixel_wide_whose_rows_torch_itself_makes_equal_are_refused(x: Tensor) -> None:
    """As of torch 2.13. Where the rows differ, the refusal can go."""
    rows = F.interpolate(x, (3, 1), mode="bilinear", antialias=True)
    assert torch.equal(rows, rows[:, :, :1].expand_as(rows))
    with ForwardOverrides(), pytest.raises(UnsupportedOperator, match="one pixel wide"):
        F.interpolate(x, (3, 1), mode="bilinear", antialias=True)


class Bags(nn.Module):
    """The mean of a sample's words, and a small picture of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 8, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        picture = self.bag(x.long()).reshape(-1, 1, 2, 4)
        return self.head(F.interpolate(picture, 2, mode="bilinear", antialias=True).flatten(1))  # type: ignore[no-any-return]


def test_a_step_of_bags_and_of_smaller_pictures_is_torchs() -> None:
    assert step_difference(Bags(), (5,)) < 1e-12


class Picked(nn.Linear):
    """Values in an order of their own, and in one for all samples, by numpy's way to pick along an axis; signs."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return torch.take_along_dim(h, h.argsort(1), 1) + h.take_along_dim(torch.tensor([[2, 0, 0]]), -1) * h.sgn()


def test_values_picked_along_an_axis_and_signs_keep_any_batch_size() -> None:
    assert step_difference(Picked(5, 3), (5,)) < 1e-12


class OfWords(nn.Module):
    """A table whose gradient torch keeps by its rows, and a mean without NaN on the way to its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.long()).nanmean(1))  # type: ignore[no-any-return]


def test_a_step_of_a_sparse_table_and_of_a_mean_without_nan_is_torchs() -> None:
    assert step_difference(OfWords(), (5,)) < 1e-12


class MaskedProbabilities(nn.Linear):
    """Masks as forward often makes them, a probability's logarithm, and losses inside which torch writes."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        mask = h > -1
        mask &= h < 1
        mask |= torch.isclose(h.round(), h, atol=0.2)
        mask ^= h.isclose(h.detach().flip(1), 1.0)
        side = 2.0 * (x[:, 0] > 0) - 1
        ranked = F.margin_ranking_loss(h[:, 0], h[:, 1], side, 0.1, reduction="none")
        apart = F.cosine_embedding_loss(h, h.flip(1) + 1, side, reduction="none")
        near = F.hinge_embedding_loss(h[:, 2], side, reduction="none")
        return torch.special.log_ndtr(4 * h * mask) + torch.stack([ranked, apart, near], 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", ["infer", "step"])
def test_masks_that_are_written_into_and_the_logarithm_of_a_probability_are_torchs(function: str) -> None:
    assert step_difference(MaskedProbabilities(5, 3), (5,), function) < 1e-12


def test_bags_that_divide_gradients_by_how_often_a_word_occurs_are_refused() -> None:
    """Their gradient was another one where a batch has a word twice."""
    with ForwardOverrides(), pytest.raises(UnsupportedOperator, match="scale_grad_by_freq"):
        nn.EmbeddingBag(6, 8, scale_grad_by_freq=True)(BAGS)


def test_a_traced_step_rectifies_only_what_the_pools_chose() -> None:
    wecfl = model("wecfl-cnn")
    source: TraceSource = make_source(wecfl.module, input=wecfl.input)
    graph = trace_function(ForwardPasses(source), "step", batch=2, dynamic=False).graph
    assert isinstance(graph, torch.fx.GraphModule)
    relus = [n.meta["val"].shape for n in graph.graph.nodes if n.target is torch.ops.aten.relu.default]
    assert relus == [(2, 16, 14, 14), (2, 32, 7, 7)]


class ChannelsLast(nn.Module):
    """A norm over channels that lie last, then the mean of the image, as ConvNeXt has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pool, self.head = nn.LayerNorm(4), nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.pool(h).flatten(1))  # type: ignore[no-any-return]


def test_the_mean_of_an_image_whose_channels_lie_last_asks_for_no_strides() -> None:
    passes = ForwardPasses(make_source(ChannelsLast(), input=(4, 5, 5)))
    trace_function(passes, "step", batch=3, dynamic=True)  # refuses as_strided


@pytest.mark.parametrize("function", ["infer", "step"])
def test_a_linear_layer_of_a_batch_of_vectors_reshapes_nothing(function: str) -> None:
    """A reshape to the same shape was in each file, with the operators that compute the shape."""
    source = make_source(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), input=(5,))
    graph = trace_function(ForwardPasses(source), function, batch=2, dynamic=True).graph
    assert isinstance(graph, torch.fx.GraphModule)
    views = [node for node in graph.graph.nodes if node.target is torch.ops.aten.view.default]
    assert not [node for node in views if node.meta["val"].shape == node.args[0].meta["val"].shape]
