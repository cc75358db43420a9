"""Fourier transforms without complex numbers: torch.fft's own values, and torch's own gradients in a traced step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.decompositions.complex_pairs import ComplexPair
from export.compiler.decompositions.fourier import MAX_LENGTH
from export.compiler.forward_overrides import FORWARD_OVERRIDES
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import example_inputs
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import trace_function

EXACT = 1e-10  # float64
RNG = torch.Generator().manual_seed(0)
X = torch.randn(3, 7, 10, generator=RNG, dtype=torch.float64)


def whole(value: Any) -> Tensor:  # noqa: ANN401 - a pair or a tensor
    return torch.complex(value.real, value.imag) if isinstance(value, ComplexPair) else value


@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
@pytest.mark.parametrize("n", [None, 6, 13])
@pytest.mark.parametrize("name", ["fft", "rfft", "ifft", "irfft"])
def test_a_transform_of_one_axis_is_torchs(name: str, n: int | None, norm: str | None) -> None:
    theirs = getattr(torch.fft, name)
    given = torch.fft.fft(X, dim=1) if name == "irfft" else X
    pair = ComplexPair(given.real, given.imag) if given.is_complex() else given
    torch.testing.assert_close(whole(FORWARD_OVERRIDES[theirs](pair, n, 1, norm)), theirs(given, n, 1, norm))


@pytest.mark.parametrize("dim", [(-2, -1), (1, 0)])
@pytest.mark.parametrize("name", ["fft2", "fftn", "rfft2", "rfftn"])
def test_a_transform_of_several_axes_and_its_inverse_are_torchs(name: str, dim: tuple[int, int]) -> None:
    theirs, back = getattr(torch.fft, name), getattr(torch.fft, f"i{name}")
    told = theirs(X, dim=dim, norm="ortho")
    torch.testing.assert_close(whole(FORWARD_OVERRIDES[theirs](X, dim=dim, norm="ortho")), told)
    pair = ComplexPair(told.real, told.imag)
    torch.testing.assert_close(whole(FORWARD_OVERRIDES[back](pair, dim=dim)), back(told, dim=dim))


@pytest.mark.parametrize(
    "settings",
    [
        {"n_fft": 16, "window": torch.ones(16, dtype=torch.float64)},
        {"n_fft": 16, "hop_length": 5, "win_length": 12, "window": torch.hann_window(12, dtype=torch.float64)},
        {"n_fft": 8, "center": False, "normalized": True, "onesided": False, "window": torch.ones(8).double()},
        {"n_fft": 8, "win_length": 4, "center": False, "align_to_window": True, "window": torch.ones(4).double()},
    ],
)
def test_a_short_time_transform_is_torchs(settings: dict[str, Any]) -> None:
    x = X.reshape(3, 70)
    told = torch.stft(x, return_complex=True, **settings)
    torch.testing.assert_close(whole(FORWARD_OVERRIDES[torch.stft](x, return_complex=True, **settings)), told)


@pytest.mark.parametrize(
    "settings",
    [
        {"window": torch.hann_window(16, dtype=torch.float64), "length": 68},
        {"window": torch.hann_window(12, dtype=torch.float64), "hop_length": 5, "win_length": 12, "normalized": True},
        {"center": False, "onesided": False, "window": torch.ones(16).double(), "length": 80},
    ],
)
@pytest.mark.filterwarnings("ignore:The length of signal")
def test_an_inverse_short_time_transform_is_torchs(settings: dict[str, Any]) -> None:
    whole_signal = {name: value for name, value in settings.items() if name != "length"}
    told = torch.stft(X.reshape(3, 70), 16, return_complex=True, **whole_signal) * torch.arange(3).reshape(3, 1, 1)
    pair = ComplexPair(told.real, told.imag)
    for given in (settings, {**settings, "onesided": None}):  # None: the number of frequencies tells
        torch.testing.assert_close(FORWARD_OVERRIDES[torch.istft](pair, 16, **given), torch.istft(told, 16, **given))


def test_a_spectrum_is_shifted_back_to_its_place() -> None:
    theirs, pair = torch.fft.fft(X), ComplexPair(torch.fft.fft(X).real, torch.fft.fft(X).imag)
    for dim in (None, -1, (0, 1)):
        shift, back = FORWARD_OVERRIDES[torch.fft.fftshift], FORWARD_OVERRIDES[torch.fft.ifftshift]
        torch.testing.assert_close(whole(shift(pair, dim)), torch.fft.fftshift(theirs, dim))
        torch.testing.assert_close(whole(back(pair, dim)), torch.fft.ifftshift(theirs, dim))


def test_of_all_frequencies_the_inverse_reads_the_first_half_as_torch_does() -> None:
    window = torch.hann_window(9, periodic=False).double()
    told = torch.stft(X.reshape(3, 70), 9, window=window, onesided=False, return_complex=True)
    told = told * torch.arange(9).reshape(9, 1)  # the second half is no longer that of a real signal
    found = FORWARD_OVERRIDES[torch.istft](ComplexPair(told.real, told.imag), 9, window=window, onesided=False)
    torch.testing.assert_close(found, torch.istft(told, 9, window=window, onesided=False))


class Spectrum(nn.Module):
    """A mel-like front end behind a trained layer, and a filter between transforms, as in FNet and global filters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(24, 24), nn.Parameter(torch.linspace(0.5, 1.5, 13))
        self.window: Tensor
        self.register_buffer("window", torch.hann_window(8))
        self.head = nn.Linear(24 + 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.istft(torch.stft(x, 8, window=self.window, return_complex=True), 8, window=self.window)
        mixed = torch.fft.irfft(torch.fft.rfft(x, dim=-1) * self.gain, n=24, dim=-1)
        frames = x.stft(8, hop_length=4, window=self.window, return_complex=True)
        mel = torch.log(frames.abs().pow(2).mean(-1) + 1)
        both = torch.fft.fftn(mixed.unflatten(1, (4, 6)), dim=(1, 2)).real.flatten(1)
        return self.head(torch.cat([both, mel], 1))  # type: ignore[no-any-return]


def test_a_step_through_transforms_is_torchs_at_another_batch_size() -> None:
    source = make_source(Spectrum(), input=(24,), loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True)
    given = example_inputs(source, "step", 5)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < EXACT


class ComplexRoots(nn.Linear):
    """An operator of complex numbers that is not covered."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.fft(x).sqrt().real)


class Long(nn.Linear):
    """An axis that no product should transform."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.fft(x.repeat(1, MAX_LENGTH)).real[:, :4])


class Analytic(nn.Linear):
    """A transform whose result is complex again."""

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.stft(x.repeat(1, 9), 8, window=torch.ones(8), return_complex=True, onesided=False)
        return super().forward(
            torch.istft(frames, 8, window=torch.ones(8), onesided=False, return_complex=True).real[:, :4]
        )


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Analytic(4, 2), "test_fourier.py:.* uses istft"),
        (ComplexRoots(4, 2), "uses sqrt"),
        (Long(4, 2), f"at most {MAX_LENGTH}"),
    ],
)
def test_other_operators_of_complex_numbers_and_long_axes_are_refused(module: nn.Module, says: str) -> None:
    passes = ForwardPasses(make_source(nn.Sequential(module), input=(4,)))
    with pytest.raises(ProgramRefused, match=says):
        trace_function(passes, "infer", batch=4, dynamic=True)
