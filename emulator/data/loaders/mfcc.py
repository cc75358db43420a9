"""Sound to mel-frequency cepstral coefficients, the features of small keyword networks. numpy and scipy only.

The settings are those of "Hello Edge" (Zhang et al. 2017) and MLPerf Tiny's keyword task: windows of 40 ms every 20 ms,
40 mel bands from 20 to 4,000 Hz, the first 10 coefficients; one second gives [49, 10]. TensorFlow's `mfcc`, which both
use, works on magnitudes with a periodic Hann window and the FFT length rounded up to a power of two, and so does this.
Its floor inside the logarithm, 1e-12, would make padded silence the loudest feature of all; ours is 1e-6, that of
`tf.signal`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import F64

WINDOW_S, STRIDE_S = 0.040, 0.020
MEL_BANDS, LOWEST_HZ, HIGHEST_HZ = 40, 20.0, 4_000.0
COEFFICIENTS = 10
MIN_ENERGY = 1e-6
BLOCK_RECORDINGS = 128  # recordings at a time, so that their spectra stay below 100 MB


def mfcc(sound: NDArray[np.floating], rate: int) -> NDArray[np.float32]:
    """[n, samples] in -1..1 at `rate` Hz -> [n, frames, COEFFICIENTS]; no frame reaches past the end.

    Raises ValueError for less than one window of sound.
    """
    window = round(WINDOW_S * rate)
    if sound.ndim != 2 or sound.shape[1] < window:  # noqa: PLR2004 - recordings and their samples
        raise ValueError(f"sound of shape {sound.shape}, expected [n, at least {window}]")
    blocks = [_block(sound[i : i + BLOCK_RECORDINGS], rate, window) for i in range(0, len(sound), BLOCK_RECORDINGS)]
    empty = np.empty((0, 1 + (sound.shape[1] - window) // round(STRIDE_S * rate), COEFFICIENTS), np.float32)
    return np.concatenate([empty, *blocks])


def _block(sound: NDArray[np.floating], rate: int, window: int) -> NDArray[np.float32]:
    from scipy.fft import dct, rfft

    stride, length = round(STRIDE_S * rate), 1 << (window - 1).bit_length()
    frames = np.lib.stride_tricks.sliding_window_view(sound, window, axis=1)[:, ::stride]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    magnitudes = np.abs(rfft(frames * hann, n=length, axis=-1))
    loudness = np.log(magnitudes @ mel_bands(length, rate).T + MIN_ENERGY)
    coefficients = dct(loudness, type=2, norm="ortho", axis=-1)[..., :COEFFICIENTS]
    return np.asarray(coefficients, np.float32)


@lru_cache(maxsize=4)
def mel_bands(length: int, rate: int) -> F64:
    """[BANDS, length // 2 + 1]: how much each FFT frequency counts in each band, triangles on the HTK mel scale.

    A band rises from the middle of the one below to 1 at its own middle and falls to the middle of the one above. The
    constant term, below the lowest edge, is in none.
    """
    edges = np.linspace(_mel(np.array(LOWEST_HZ)), _mel(np.array(min(HIGHEST_HZ, rate / 2))), MEL_BANDS + 2)
    at = _mel(np.arange(length // 2 + 1) * rate / length)
    rises = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falls = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    bands: F64 = np.maximum(0.0, np.minimum(rises, falls))
    return bands


def _mel(hertz: F64) -> F64:
    return np.asarray(1127.0 * np.log1p(hertz / 700.0))
