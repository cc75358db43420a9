"""Short-time Fourier transforms and their inverse: a convolution with windowed cosines and sines, and its transpose.

Frames are at most MAX_LENGTH values long. See fourier.py.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001, FBT002 - the functions have torch's own signatures

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from export.compiler.decompositions.complex_pairs import ComplexPair, view_as_real
from export.compiler.decompositions.fourier import waves
from export.compiler.decompositions.supported_ops import UnsupportedOperator


def stft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> ComplexPair | Tensor:
    """[length] or [batch, length] -> [batch, frequencies, frames]: a convolution with windowed cosines and sines."""
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    rows = x.reshape(-1, 1, x.shape[-1])
    margin = n_fft // 2 if center else (n_fft - width) // 2 if align_to_window else 0
    if margin:
        rows = nn.functional.pad(rows, (margin, margin), mode=pad_mode)
    keep = n_fft // 2 + 1 if onesided is not False else n_fft
    shape = _window(window, width, n_fft, x)
    cosine, sine = waves(keep, n_fft, n_fft, x)
    scale = 1 / math.sqrt(n_fft) if normalized else 1.0
    filters = (torch.cat([cosine, -sine]) * shape * scale).unsqueeze(1)  # [2 keep, 1, n_fft]
    out = nn.functional.conv1d(rows, filters, stride=hop)
    out = out.reshape([*x.shape[:-1], *out.shape[1:]])
    found = ComplexPair(out.narrow(-2, 0, keep), out.narrow(-2, keep, keep))
    return found if return_complex else view_as_real(found)


def istft(
    x: ComplexPair,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,  # noqa: ARG001 - the first half is in both
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """[frequencies, frames] or [batch, frequencies, frames] -> [length] or [batch, length].

    Windowed frames are added where they overlap, and divided by the sum of the squared windows there. Of all
    frequencies (`onesided` false) torch reads the first half alone, which tells the other one of a real signal.
    """
    if return_complex:
        raise UnsupportedOperator("istft", "a complex signal is not covered")
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    keep, frames = n_fft // 2 + 1, x.shape[-1]
    x = x.narrow(-2, 0, keep)
    shape = _window(window, width, n_fft, x.real)
    cosine, sine = waves(keep, n_fft, n_fft, x.real)
    k = torch.arange(keep).unsqueeze(1)
    twice = torch.where((k == 0) | (2 * k == n_fft), 1.0, 2.0).to(x.real.dtype)
    scale = 1 / math.sqrt(n_fft) if normalized else 1 / n_fft
    filters = (torch.cat([cosine * twice, -sine * twice]) * shape * scale).unsqueeze(1)  # [2 keep, 1, n_fft]
    both = torch.cat([x.real, x.imag], -2).reshape(-1, 2 * keep, frames)
    out = nn.functional.conv_transpose1d(both, filters, stride=hop)[:, 0]
    ones = torch.ones(1, 1, frames, dtype=shape.dtype)
    weight = nn.functional.conv_transpose1d(ones, shape.square().reshape(1, 1, -1), stride=hop)[:, 0]
    reach = n_fft + hop * (frames - 1)
    first = n_fft // 2 if center else 0
    last = reach - first if length is None else min(first + length, reach)
    out = out[:, first:last] / weight[:, first:last]
    if length is not None and first + length > reach:
        out = nn.functional.pad(out, (0, first + length - reach))
    return out.reshape([*x.shape[:-2], out.shape[-1]])


def _window(window: Tensor | None, width: int, n_fft: int, like: Tensor) -> Tensor:
    """[n_fft]: the window, by default of ones, with as many zeros on both sides."""
    shape = torch.ones(width, dtype=like.dtype) if window is None else window.to(like.dtype)
    left = (n_fft - width) // 2
    return nn.functional.pad(shape, (left, n_fft - width - left))


SHORT_TIME_OVERRIDES: Mapping[Any, Callable[..., Any]] = {torch.stft: stft, Tensor.stft: stft, torch.istft: istft}
