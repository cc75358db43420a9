"""What a module answers is checked before it is traced: a refusal names the fault and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.program import compile_program, make_source
from export.compiler.signatures.packed_inputs import Example, read_example

IDS, LENGTHS = torch.randint(1, 9, (6, 5)), torch.randint(1, 6, (6,))
WORDS = torch.arange(9)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.exp() * self.image(x[:, :4]) @ self.text(x[:, 4:]).T  # type: ignore[no-any-return]


def test_logits_of_pairs_of_a_batch_are_refused_with_their_shapes_and_what_to_do() -> None:
    with pytest.raises(ProgramRefused) as refused:
        make_source(TwoTowers(), input=(9,))
    assert "gives (2, 2) for 2 samples and (3, 3) for 3" in str(refused.value)
    assert "as one sample, [pairs, ...]" in str(refused.value)


class ScaledWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 2)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return self.head(nn.functional.one_hot(ids, 9).float().mean(1) * scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "example", "line"),
    [
        (nn.Linear(5, 3), torch.zeros(5), "give x[None]"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3)), np.zeros((3, 8, 8)), "give x[None]"),
        (ScaledWords(), {"ids": WORDS, "scale": torch.ones(9)}, "give {name: values[None] for name, values in x."),
        (ScaledWords(), (WORDS, torch.ones(9)), "give tuple(values[None] for values in x)"),
    ],
)
def test_an_example_without_its_batch_axis_is_told_with_the_line_to_write(
    module: nn.Module, example: Example, line: str
) -> None:
    with pytest.raises(ProgramRefused, match="does not take samples") as refused:
        compile_program(module, example, engines=("pt2",))
    assert "the first axis of an example is its batch" in refused.value.hint
    assert line in refused.value.hint


@pytest.mark.parametrize("example", [torch.zeros(4), torch.zeros(2, 4), (4,)])
def test_an_example_of_another_shape_is_not_told_to_lack_a_batch_axis(example: Example) -> None:
    with pytest.raises(ProgramRefused, match="does not take samples") as refused:
        compile_program(nn.Linear(5, 3), example, engines=("pt2",))
    assert "check the input's shape" in refused.value.hint


@pytest.mark.parametrize("shape", [(8, 8, 3), (8, 8)])
def test_images_without_their_channels_in_front_are_told_the_right_order(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProgramRefused, match="does not take samples") as refused:
        compile_program(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), shape, engines=("pt2",))
    assert "x.transpose(0, 3, 1, 2)" in refused.value.hint


class Ended(nn.Linear):
    """Wants as many end marks in each text, as BART's classifier does."""

    def forward(self, ids: Tensor) -> Tensor:
        if bool(((ids > 4).sum(1) != (ids[0] > 4).sum()).any()):
            raise ValueError("all examples must have as many end marks")
        return super().forward(ids.float())


@pytest.mark.parametrize(
    ("module", "example", "hint"),
    [
        (ScaledWords(), {"ids": WORDS[None], "scale": torch.ones(1, 7)}, "check the arrays' shapes"),
        (Ended(9, 2), {"ids": WORDS[None]}, "checks draw numbers at random"),
    ],
    ids=["shape", "values"],
)
def test_packed_samples_that_a_module_does_not_take_are_refused_where_their_shape_is_given(
    module: nn.Module, example: Example, hint: str
) -> None:
    packed, shape, parts = read_example(module, example)
    with pytest.raises(ProgramRefused, match="does not take samples of ids") as refused:
        compile_program(packed, shape, parts=parts, engines=("pt2",))
    assert hint in refused.value.hint


class LastWord(nn.Module):
    """The output of a sequence's last word; `at_least`: the shortest sequence that it takes."""

    def __init__(self, how: str, at_least: int) -> None:
        super().__init__()
        self.how, self.at_least = how, at_least
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        words, lengths = self.embed(ids), lengths.clamp(min=self.at_least)
        if self.how == "mean":
            return self.head(words.sum(1) / lengths.unsqueeze(1))  # type: ignore[no-any-return]
        places = (lengths - 1).view(-1, 1, 1).expand(-1, 1, 4)
        return self.head(words.gather(1, places).squeeze(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("how", "told"), [("last", "index -1 is out of bounds"), ("mean", "its answer is not finite")])
def test_a_module_that_takes_no_length_of_zero_is_refused_by_the_arrays_name(how: str, told: str) -> None:
    module, shape, parts = read_example(LastWord(how, 0), {"ids": IDS, "lengths": LENGTHS})
    with pytest.raises(ProgramRefused) as refused:
        make_source(module, input=shape, parts=parts)
    assert f"fails for a 0 in lengths: {told}" in str(refused.value)
    assert "lengths.clamp(min=1)" in str(refused.value)


def test_a_module_that_takes_a_length_of_zero_is_not_refused() -> None:
    module, shape, parts = read_example(LastWord("last", 1), {"ids": IDS, "lengths": LENGTHS})
    assert make_source(module, input=shape, parts=parts).target == (2,)


class PaddedByZeros(nn.Module):
    """Attention over the words that are not 0: a sample without words has no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(9, 4), nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.embed(ids)
        return self.attention(words, words, words, key_padding_mask=ids == 0)[0].mean(1)  # type: ignore[no-any-return]


def test_a_module_whose_zeros_pad_sequences_is_not_refused() -> None:
    module, shape, parts = read_example(PaddedByZeros(), {"ids": torch.randint(9, (6, 40))})
    assert make_source(module, input=shape, parts=parts).target == (4,)


class Sampled(nn.Linear):
    """A reparameterisation that draws in inference mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(x.shape[0], 1)


def test_a_module_that_draws_in_inference_mode_is_told_to_draw_in_training_only() -> None:
    with pytest.raises(ProgramRefused, match="the same samples differently each time") as refused:
        make_source(Sampled(4, 2), input=(4,))
    assert "if self.training" in refused.value.hint


@dataclass
class Found:
    """What a model gives that follows the custom of no library."""

    hidden: Tensor
    logits: Tensor


class Autoencoder(nn.Linear):
    """Two outputs, of 4 and 2 numbers, in the container that it is told."""

    def __init__(self, gives: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__(4, 2)
        self.gives = gives

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - what the user's gives
        return self.gives(x * 2, super().forward(x))


@pytest.mark.parametrize(
    ("gives", "one", "several"),
    [
        (lambda a, b: {"back": a, "code": b}, "['back']", "out['back'].flatten(1), out['code'].flatten(1)"),
        (lambda a, b: (a, b), "[0]", "out[0].flatten(1), out[1].flatten(1)"),
        (Found, ".logits", "out.hidden.flatten(1), out.logits.flatten(1)"),
    ],
)
def test_a_module_of_several_outputs_is_told_the_lines_for_one_and_for_a_loss_of_all(
    gives: Callable[[Tensor, Tensor], object], one: str, several: str
) -> None:
    with pytest.raises(ProgramRefused, match="expected one tensor") as refused:
        make_source(Autoencoder(gives), input=(4,))
    assert f"def forward(self, x): return self.body(x){one};" in refused.value.hint
    assert f"torch.cat([{several}], 1)" in refused.value.hint
    assert refused.value.hint.endswith("outputs.split([4, 2], 1)")


class OfTheBatch(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0)) * self.scale


def of_the_batch(*, zeros: bool = False, scale: float = 1.0) -> nn.Module:
    module = OfTheBatch(4, 2)
    module.scale = scale
    if zeros:
        torch.nn.init.zeros_(module.weight)
    return module


@pytest.mark.parametrize("module", [of_the_batch(), of_the_batch(zeros=True), of_the_batch(scale=1e-6)])
def test_a_module_whose_answer_depends_on_the_batch_is_told_of_running_statistics(module: nn.Module) -> None:
    with pytest.raises(ProgramRefused, match="differently in other company") as refused:
        make_source(module, input=(4,))
    assert "track_running_stats" in refused.value.hint


class AlongTheBatch(nn.Module):
    """A recurrent layer whose first axis is time, as torch's are unless they are told."""

    def __init__(self, *, backwards: bool) -> None:
        super().__init__()
        self.layer, self.head, self.backwards = nn.GRU(5, 7), nn.Linear(7, 3), backwards

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flip(0) if self.backwards else x)[0]
        return self.head((out.flip(0) if self.backwards else out)[:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("backwards", [False, True])
def test_a_recurrent_layer_that_takes_the_batch_for_time_is_told_of_batch_first(*, backwards: bool) -> None:
    with pytest.raises(ProgramRefused, match="differently in other company") as refused:
        make_source(AlongTheBatch(backwards=backwards), input=(6, 5))
    assert "batch_first=True" in refused.value.hint


class DecidingByTheBatch(nn.Linear):
    """Doubles all samples, where their sum is above zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if x.sum() > 0 else x)


def test_a_decision_by_the_sum_of_a_batch_is_told_to_look_at_each_sample_alone() -> None:
    with pytest.raises(ProgramRefused, match="differently in other company") as refused:
        make_source(DecidingByTheBatch(4, 3), input=(4,))
    assert "no `if x.sum() > 0`" in refused.value.hint


class FewPlaces(nn.Module):
    """A mixture of experts of which each takes so many samples of a batch, the first ones; the others go through."""

    def __init__(self, *, least: int) -> None:
        super().__init__()
        self.gate, self.head, self.least = nn.Linear(5, 4), nn.Linear(5, 4 * 3), least

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(self.gate(x).argmax(-1), 4).to(x.dtype)
        room = torch.clamp(chosen.sum() * 1.25 / 4, min=self.least)
        taken = chosen * (chosen.cumsum(0) <= room)
        return torch.einsum("be,beo->bo", taken, self.head(x).reshape(-1, 4, 3))


@pytest.mark.parametrize("least", [1, 4, 8])
def test_experts_with_few_places_in_a_batch_are_told_of_it(least: int) -> None:
    """Of a batch of copies of a sample some answers differ, whichever expert it is for."""
    with pytest.raises(ProgramRefused, match="differently in other company") as refused:
        make_source(FewPlaces(least=least), input=(5,))
    assert "room for each sample" in refused.value.hint


class Deciding(nn.Linear):
    """Gives what a loss has no gradient of."""

    decide: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.decide(super().forward(x))


@pytest.mark.parametrize(
    ("decide", "told"),
    [
        (lambda h: h > 0, r"bool of shape \(2, 3\)"),
        (lambda h: h.round().long(), r"int64 of shape \(2, 3\)"),
        (torch.fft.fft, r"complex64 of shape \(2, 3\)"),
        (lambda h: h[:, :0], r"float32 of shape \(2, 0\)"),
    ],
)
def test_answers_that_are_no_real_numbers_are_told_by_their_kind(decide: Callable[[Tensor], Tensor], told: str) -> None:
    module = Deciding(4, 3)
    module.decide = decide
    with pytest.raises(ProgramRefused, match=told) as refused:
        make_source(module, input=(4,))
    assert "logits" in refused.value.hint


def scaled_in_place(x: Tensor) -> Tensor:
    x[:, 1:] /= 255
    return x


def summed_into(x: Tensor) -> Tensor:
    return torch.add(x, 1, out=x)


def all_scaled(x: Tensor) -> Tensor:
    torch._foreach_mul_([x], 2.0)
    return x


@pytest.mark.parametrize(
    "first", [scaled_in_place, summed_into, all_scaled, lambda x: x.t().sub_(1).t(), nn.ReLU(inplace=True)]
)
def test_a_forward_that_writes_into_its_samples_is_refused_by_the_layer(first: Callable[[Tensor], Tensor]) -> None:
    """A run reads its samples again, in each epoch and for each center."""

    class Writing(nn.Linear):
        writes_in = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(first(x) if self.training == self.writes_in else x)

    in_inference = Writing(4, 3)
    in_inference.writes_in = False
    with pytest.raises(ProgramRefused, match=r"writes into its samples in layer .*test_answers.py:[0-9]+"):
        make_source(in_inference, input=(4,))
    with pytest.raises(ProgramRefused, match=r"writes into its samples in layer .*test_answers.py:[0-9]+") as refused:
        make_source(Writing(4, 3), input=(4,))
    assert "x = x / 255" in refused.value.hint
    make_source(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), input=(4,))


def test_checks_of_a_model_leave_its_statistics_and_judge_its_answers_in_inference_mode() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="gives probabilities"):
        source = make_source(module, input=(4,))
    held = dict(source.module.named_buffers())
    assert held.keys() == {"1.running_mean", "1.running_var"}
    assert all(torch.equal(value, module.get_buffer(name)) for name, value in held.items())


INFERRED = r"when it trains, and \(2, 3\) in inference mode"


@pytest.mark.parametrize(
    ("both", "told"),
    [
        (lambda out: (out, out), f"gives tuple {INFERRED}"),
        (lambda out: out[:, :2], rf"gives \(2, 2\) {INFERRED}"),
        (lambda out: out @ out, r"fails in training mode, at test_answers.py:[0-9]+: mat1 and mat2"),
    ],
)
def test_other_outputs_in_training_are_refused(both: Callable[[Tensor], Any], told: str) -> None:
    class Helped(nn.Linear):
        def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - whatever a model gives
            out = super().forward(x)
            return both(out) if self.training else out

    with pytest.raises(ProgramRefused, match=told):
        make_source(Helped(4, 3), input=(4,))
