"""Losses beside one label per sample: a label per token or pixel, the user's own function, one output of several.

Programs are compiled for ONNX Runtime and run as a device runs them; torch trains the module itself beside it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from edge_client.data.dataset import Dataset, DeviceData, batches, describe_misfit
from edge_client.engines.base import open_engine
from edge_client.errors import Malformed, ProgramRefused
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import Array, Fit, Flat, Probe
from edge_client.training.fit_probe import run_fit, run_probe
from edge_client.training.learner import EngineLearner
from export.compiler.losses.choose_loss import layout_of
from export.compiler.losses.label_losses import gaussian_nll_loss
from export.compiler.program import CompilerOutput, compile_program, vector_of

CLASSES, TOKENS, SIDE = 3, 5, 4
CLOSE = 1e-5  # float32 steps differ by about 1e-6
RNG = np.random.default_rng(0)


class PixelLabels(nn.Sequential):
    """[batch, 1, side, side] -> logits [batch, classes, side, side]."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1))


class TokenLabels(nn.Module):
    """[batch, tokens] numbers of words -> logits [batch, tokens, classes], and what lies before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(x.long())
        return {"hidden": hidden, "logits": self.head(hidden)}


def labels_with_gaps(*shape: int) -> Array:
    y = RNG.integers(CLASSES, size=shape)
    y[RNG.random(shape) < 0.25] = IGNORED
    y[0] = IGNORED  # a sample without a label
    return y


PIXELS, WORDS = PixelLabels(), TokenLabels()
PIXEL_DATA = Dataset(RNG.standard_normal((9, 1, SIDE, SIDE)).astype(np.float32), labels_with_gaps(9, SIDE, SIDE))
WORD_DATA = Dataset(RNG.integers(7, size=(9, TOKENS)).astype(np.float32), labels_with_gaps(9, TOKENS))


@cache
def pixel_program() -> CompilerOutput:
    return compile_program(PIXELS, (1, SIDE, SIDE), engines=("onnx",))


@cache
def word_program() -> CompilerOutput:
    return compile_program(WORDS, (TOKENS,), loss="token-cross-entropy", output="logits", engines=("onnx",))


@pytest.fixture
def learner_of(tmp_path: Any) -> Callable[[CompilerOutput], EngineLearner]:  # noqa: ANN401 - pytest's
    def opened(made: CompilerOutput) -> EngineLearner:
        paths = {}
        for function, container in made.program.containers["onnx"].items():
            paths[function] = tmp_path / container.sha256
            paths[function].write_bytes(made.files[container.sha256])
        return EngineLearner(open_engine("onnx", made.program, paths), made.program)

    return opened


def trained_by_torch(module: nn.Module, data: Dataset, task: Fit, loss: Callable[[Any, Tensor], Tensor]) -> Flat:
    """Torch's own SGD over the task's batches; `loss` gives one number per sample."""
    net = copy.deepcopy(module).double().train()
    sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=task.momentum)
    for index in batches(len(data), task.batch, task.seed, task.steps, fixed=False):
        sgd.zero_grad()
        loss(net(torch.from_numpy(data.x[index]).double()), torch.from_numpy(data.y[index])).mean().backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return vector_of(net, pixel_program().program.schema if module is PIXELS else word_program().program.schema)


def mean_of_counted(scores: Tensor, y: Tensor) -> Tensor:
    """Torch's own cross-entropy of each sample alone; 0 where it has no label."""
    each = [F.cross_entropy(s[None], t[None]) if (t != IGNORED).any() else s.sum() * 0 for s, t in zip(scores, y)]  # noqa: B905
    return torch.stack(each)


def task_for(module: nn.Module, program: Program) -> Fit:
    return Fit(start=vector_of(module, program.schema), steps=4, lr=0.2, momentum=0.5, batch=4, seed=3)


def test_a_device_trains_on_a_label_per_pixel_as_torch_does(learner_of: Callable[..., EngineLearner]) -> None:
    learner = learner_of(pixel_program())
    task = task_for(PIXELS, learner.program)
    wanted = trained_by_torch(PIXELS, PIXEL_DATA, task, mean_of_counted)
    np.testing.assert_allclose(run_fit(learner, task, PIXEL_DATA).vector, wanted, atol=CLOSE)


def test_a_device_trains_on_a_label_per_token_as_torch_does(learner_of: Callable[..., EngineLearner]) -> None:
    learner = learner_of(word_program())
    task = task_for(WORDS, learner.program)
    wanted = trained_by_torch(WORDS, WORD_DATA, task, lambda out, y: mean_of_counted(out["logits"].transpose(1, 2), y))
    np.testing.assert_allclose(run_fit(learner, task, WORD_DATA).vector, wanted, atol=CLOSE)


@pytest.mark.parametrize("prior", [None, [0.25, 0.75]])
def test_positions_that_are_not_ignored_are_counted_once(
    learner_of: Callable[..., EngineLearner], prior: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, other = learner_of(pixel_program()), copy.deepcopy(PIXELS)
    nn.init.normal_(next(other.parameters()))
    monkeypatch.setattr("edge_client.training.fit_probe.PROBED_VALUES", 1)  # a batch at a time
    models = [vector_of(module, learner.program.schema) for module in (PIXELS, other)]
    want = frozenset({"confusion", "loss"})
    probe = Probe(models=models, prior=prior, want=want, split="train", batch=4, seed=0)
    reply = run_probe(learner, probe, DeviceData(train=PIXEL_DATA))
    with torch.no_grad():
        x = torch.from_numpy(PIXEL_DATA.x)
        scores = [torch.softmax(module(x), 1).numpy() for module in (PIXELS, other)]
        losses = [
            mean_of_counted(module(x), torch.from_numpy(PIXEL_DATA.y))[PIXEL_DATA.counted].mean().item()
            for module in (PIXELS, other)
        ]
    if prior is not None:
        scores = [np.tensordot(prior, scores, axes=1)]
    wanted = np.zeros((len(scores), CLASSES, CLASSES), int)
    for m, rows in enumerate(scores):
        for truth, found in zip(PIXEL_DATA.y.ravel(), rows.argmax(axis=1).ravel(), strict=True):
            if truth != IGNORED:
                wanted[m, truth, found] += 1
    np.testing.assert_array_equal(reply.confusion, wanted)
    assert reply.losses is not None
    np.testing.assert_allclose(reply.losses, np.array(losses), atol=CLOSE)


def test_a_program_of_tokens_knows_its_classes_and_positions_after_a_trip() -> None:
    program = word_program().program
    assert (program.target, program.classes, program.truth, program.positions) == (
        (TOKENS, CLASSES),
        CLASSES,
        (TOKENS,),
        TOKENS,
    )
    assert Program.from_json(program.to_json()) == program
    assert pixel_program().program.truth == (SIDE, SIDE)
    assert pixel_program().program.loss == "pixel-cross-entropy"  # torch's own layout needs no word


@pytest.mark.parametrize(
    ("y", "told"),
    [
        (np.zeros(9, int), r"labels of shape \[\], the program reads \[5\]"),
        (np.full((9, TOKENS), CLASSES), "the label 3, the program has 3 classes: use 0 to 2, and -100 to leave"),
        (np.zeros((9, TOKENS)), "save y as integers"),
        (np.full((9, TOKENS), IGNORED), "^$"),
    ],
)
def test_labels_that_do_not_fit_the_positions_are_told(y: Array, told: str) -> None:
    found = describe_misfit(word_program().program, Dataset(WORD_DATA.x, y))
    with pytest.raises(ValueError, match=told):
        raise ValueError(found)


def test_a_label_prior_and_looks_at_answers_are_refused_for_positions(learner_of: Callable[..., EngineLearner]) -> None:
    learner = learner_of(word_program())
    probe = Probe(
        models=[vector_of(WORDS, learner.program.schema)], want=frozenset({"answers"}), split="train", batch=4, seed=0
    )
    for asked in (probe, replace(probe, want=frozenset({"labels"}), models=())):
        with pytest.raises(Malformed, match="one label per sample"):
            run_probe(learner, asked, DeviceData(train=WORD_DATA))


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.huber_loss(outputs.sum(1), targets, reduction="none", delta=0.5)


def counts(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.poisson_nll_loss(outputs, targets, full=True, reduction="none").mean(1)


def dice(outputs: Tensor, labels: Tensor) -> Tensor:
    shares = torch.softmax(outputs, 1).flatten(2)
    truth = F.one_hot(labels, CLASSES).movedim(-1, 1).flatten(2).to(shares.dtype)
    return (1 - (2 * (shares * truth).sum(2) + 1) / (shares.sum(2) + truth.sum(2) + 1)).mean(1)


def shifted(out: Tensor, y: Tensor) -> Tensor:
    """Writes into what it is given; the outputs of an evaluation are the model's all the same."""
    out -= y.clamp_(max=1.0)
    return out.square().mean(1)


LINE = nn.Linear(4, CLASSES)
X = RNG.standard_normal((6, 4)).astype(np.float32)
OWN: dict[str, tuple[nn.Module, Any, Array, Array]] = {
    "label smoothing": (LINE, smoothed, X, RNG.integers(CLASSES, size=6)),
    "bce": (LINE, bce, X, RNG.integers(2, size=(6, CLASSES)).astype(np.float32)),
    "huber": (LINE, huber, X, RNG.standard_normal(6).astype(np.float32)),
    "counts": (LINE, counts, X, RNG.poisson(2.0, size=(6, CLASSES)).astype(np.float32)),
    "written into": (LINE, shifted, X, RNG.standard_normal((6, CLASSES)).astype(np.float32)),
    "dice": (PIXELS, dice, PIXEL_DATA.x, RNG.integers(CLASSES, size=(9, SIDE, SIDE))),
}


@pytest.mark.parametrize("name", OWN)
def test_a_loss_of_the_users_trains_as_in_torch(learner_of: Callable[..., EngineLearner], name: str) -> None:
    module, loss, x, y = OWN[name]
    made = compile_program(module, x.shape[1:], loss=loss, targets=torch.from_numpy(y), engines=("onnx",))
    assert Program.from_json(made.program.to_json()) == made.program
    assert made.program.to_json()["loss"] == "own"
    task, net = task_for(module, made.program), copy.deepcopy(module).double()
    sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=task.momentum)
    for index in batches(len(x), task.batch, task.seed, task.steps, fixed=False):
        sgd.zero_grad()
        truth = torch.from_numpy(y[index])
        loss(
            net(torch.from_numpy(x[index]).double()), truth.double() if y.dtype == np.float32 else truth
        ).mean().backward()
        sgd.step()
    found = run_fit(learner_of(made), task, Dataset(x, y)).vector
    np.testing.assert_allclose(found, vector_of(net, made.program.schema), atol=CLOSE)


@pytest.mark.parametrize("facts", [{}, {"loss": dice, "targets": torch.zeros(1, SIDE, SIDE, dtype=torch.int64)}])
def test_the_other_runtimes_take_labels_for_each_position_too(facts: dict[str, Any]) -> None:
    made = compile_program(PIXELS, (1, SIDE, SIDE), batch=4, engines=("litert", "pt2"), **facts)
    assert made.program.positions == SIDE * SIDE
    assert max(made.program.parity.values()) < CLOSE


def test_an_older_device_refuses_a_loss_of_the_users_by_its_word() -> None:
    made = {**pixel_program().program.to_json(), "loss": "own", "targets": "another"}
    with pytest.raises(Malformed, match="targets"):
        Program.from_json(made)
    with pytest.raises(Malformed, match="loss"):
        Program.from_json({**made, "loss": "newer"})


@pytest.mark.parametrize(
    ("loss", "targets", "told"),
    [
        (
            nn.CrossEntropyLoss(),
            torch.zeros(2, dtype=torch.int64),
            "loss CrossEntropyLoss gives .*expected one floating",
        ),
        (lambda outputs, targets: (outputs - outputs.mean(0) - targets).sum(1), None, "in other company"),
        (smoothed, (4,), "loss smoothed fails for outputs"),
        (smoothed, torch.zeros(2, 4, dtype=torch.int64), r"labels of shape \(4,\): the output needs one more axis"),
        ("token-cross-entropy", None, "needs one row of logits per position"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_by_name(loss: Any, targets: Any, told: str) -> None:  # noqa: ANN401
    with pytest.raises(ProgramRefused, match=told):
        compile_program(LINE, (4,), loss=loss, targets=targets, engines=("onnx",))


def test_labels_as_fractions_and_labels_for_a_loss_of_numbers_are_told_as_such() -> None:
    x, y = np.zeros((2, 4), np.float32), np.array([0, 1])
    labels = compile_program(LINE, (4,), engines=("onnx",)).program
    assert "save class labels as integers" in describe_misfit(labels, Dataset(x, y.astype(np.float32)))
    numbers = compile_program(LINE, (4,), loss=nn.CrossEntropyLoss(reduction="none"), engines=("onnx",)).program
    assert "or compile its loss with labels as `targets`" in describe_misfit(numbers, Dataset(x, y))


class WithInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.line(x)


def test_one_output_of_several_is_chosen_by_name_or_number_and_parameters_keep_their_names() -> None:
    made = compile_program(WithInput(), (4,), output=1, engines=("pt2",))
    assert (made.program.target, made.program.schema.tensors[0].name) == ((CLASSES,), "line.weight")
    assert word_program().program.schema.tensors[0].name == "embed.weight"


@pytest.mark.parametrize(
    ("module", "input", "output", "told", "hint"),
    [
        (WORDS, (TOKENS,), None, "gives dict of logits, hidden, expected one tensor", "output='logits'"),
        (WORDS, (TOKENS,), "scores", "has no output 'scores'", "'logits', 'hidden'"),
        (WithInput(), (4,), 2, "has no output 2: it gives tuple of 0, 1", "use one of 0, 1"),
        (LINE, (4,), "logits", "has no output 'logits': it gives Tensor", "leave `output` out"),
    ],
)
def test_several_outputs_without_a_choice_and_a_choice_that_is_not_there_are_refused(
    module: nn.Module,
    input: tuple[int, ...],  # noqa: A002 - the manifest's word
    output: Any,  # noqa: ANN401
    told: str,
    hint: str,
) -> None:
    with pytest.raises(ProgramRefused, match=told) as refused:
        compile_program(module, input, output=output, engines=("onnx",))
    assert hint in refused.value.hint


@pytest.mark.parametrize(("tokens", "warned"), [(CLASSES, True), (CLASSES + 1, False)])
def test_as_many_labels_as_classes_are_told_which_axis_is_that_of_the_classes(tokens: int, *, warned: bool) -> None:
    """A run took the tokens for the classes, without a word."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        layout = layout_of((tokens, CLASSES), (tokens,))
    assert (layout, len(told)) == (("pixel-cross-entropy", 1) if warned else ("token-cross-entropy", 0))
    assert not warned or "the first axis is taken for the classes" in str(told[0].message)


def test_the_likelihood_of_a_variance_that_the_model_gives_is_torchs() -> None:
    draw = torch.Generator().manual_seed(0)
    mean, target = (torch.randn(4, 3, generator=draw).double() for _ in range(2))
    for shape in ((4, 3), (4,), (4, 1)):
        var = torch.randn(*shape, generator=draw).double().square()
        var[0] = 0
        for facts in ({"reduction": "none", "full": True}, {"reduction": "sum"}, {"eps": 0.1}):
            found = list[list[Tensor]]()
            for loss in (gaussian_nll_loss, F.gaussian_nll_loss):
                given = [mean.clone().requires_grad_(), var.clone().requires_grad_()]
                out: Tensor = loss(given[0], target, given[1], **facts)
                found.append([out, *torch.autograd.grad(out.sum(), given)])
            torch.testing.assert_close(*found)


def test_losses_that_look_at_the_values_of_a_variance_compile() -> None:
    def gaussian(out: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(out, y, out.exp(), reduction="none").mean(1)

    def normal(out: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Normal(out, 1.0).log_prob(y).mean(1)  # type: ignore[no-any-return, no-untyped-call]

    for loss in (gaussian, normal):
        compile_program(nn.Linear(4, 3), (4,), loss=loss, engines=("onnx",))
