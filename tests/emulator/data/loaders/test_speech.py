from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ConfigError
from edge_client.protocol.task import Array
from emulator.data.loaders import speech
from emulator.data.loaders.mfcc import mel_bands, mfcc
from tests.support.raw_data_files import unknown


def tone(hertz: float, seconds: float = 1.0) -> Array:
    return (8_000 * np.sin(2 * np.pi * hertz * np.arange(round(8_000 * seconds)) / 8_000)).astype(np.int16)


SPOKEN = {  # (digit, speaker, take): what is heard; names and takes are out of order on purpose
    (1, "theo", 7): tone(500),
    (0, "george", 3): tone(1_000, 0.3),
    (2, "theo", 0): tone(250, 1.5),
    (9, "george", 10): tone(2_000, 0.5),
}


def write_wav(path: Path, sound: Array, *, channels: int = 1, width: int = 2, rate: int = 8_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(sound.astype("<i2").tobytes())


def as_files(folder: Path) -> Path:
    for (digit, who, take), sound in SPOKEN.items():
        write_wav(folder / "fsdd" / "recordings" / f"{digit}_{who}_{take}.wav", sound)
    (folder / "fsdd" / "recordings" / "notes.wav").write_bytes(b"not a recording of a digit")
    return folder


def packed() -> dict[str, Any]:
    ordered = sorted(SPOKEN)  # as the files sort by name
    return {
        "audio": np.concatenate([SPOKEN[key] for key in ordered]),
        "offsets": np.cumsum([0, *(len(SPOKEN[key]) for key in ordered)]),
        "digit": np.array([digit for digit, _, _ in ordered], np.uint8),
        "speaker": np.array([("george", "theo").index(who) for _, who, _ in ordered], np.uint8),
        "take": np.array([take for _, _, take in ordered], np.uint8),
    }


def as_arrays(folder: Path, **changed: object) -> Path:
    (folder / "fsdd").mkdir(parents=True)
    np.savez(folder / "fsdd" / "fsdd_8khz.npz", **{**packed(), **changed})
    return folder


def test_the_first_takes_are_the_test_part_and_speakers_are_users(tmp_path: Path) -> None:
    data = speech.fsdd(unknown(as_files(tmp_path)))
    assert data.test is not None
    assert data.train.user is not None
    assert data.test.user is not None
    assert list(zip(data.train.y, data.train.user, strict=True)) == [(1, 1), (9, 0)]
    assert list(zip(data.test.y, data.test.user, strict=True)) == [(0, 0), (2, 1)]
    assert data.train.x.shape == (2, 1, 49, 10)
    assert data.train.x.dtype == np.float32


def test_files_and_arrays_give_the_same(tmp_path: Path) -> None:
    files, arrays = (
        speech.fsdd(unknown(made)) for made in (as_files(tmp_path / "files"), as_arrays(tmp_path / "arrays"))
    )
    assert files.test is not None
    assert arrays.test is not None
    for one, other in ((files.train, arrays.train), (files.test, arrays.test)):
        np.testing.assert_array_equal(one.x, other.x)
        np.testing.assert_array_equal(one.y, other.y)
        np.testing.assert_array_equal(one.user, other.user)


def test_training_coefficients_are_standard_and_a_short_recording_ends_in_silence(tmp_path: Path) -> None:
    data = speech.fsdd(unknown(as_arrays(tmp_path)))
    np.testing.assert_allclose(data.train.x.mean(axis=(0, 1, 2)), 0, atol=1e-5)  # float32 sums of 98 numbers
    np.testing.assert_allclose(data.train.x.std(axis=(0, 1, 2)), 1, atol=1e-5)
    short = data.train.x[1, 0]  # half a second
    assert np.ptp(short[26:], axis=0).max() == 0
    assert np.abs(short[:24] - short[26:50].mean(axis=0)).max(axis=1).min() > 1


@pytest.mark.parametrize(
    "changed",
    [
        {"digit": np.array([0, 1, 2, 10])},
        {"digit": np.array([0, 1, 2])},
        {"offsets": np.array([0, 5, 5, 9, len(packed()["audio"])])},
        {"offsets": np.array([0, 1, 2, 3, 4])},
        {"audio": packed()["audio"].astype(np.float32)},
        {"take": np.array([0, 1, 2, 3])},
        {"take": np.array([5, 6, 7, 8])},
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        speech.fsdd(unknown(as_arrays(tmp_path, **changed)))


@pytest.mark.parametrize("kind", [{"channels": 2}, {"rate": 16_000}, {"width": 1}])
def test_a_wav_file_of_another_kind_is_refused_by_name(tmp_path: Path, kind: dict[str, int]) -> None:
    write_wav(as_files(tmp_path) / "fsdd" / "recordings" / "3_theo_9.wav", tone(300), **kind)
    with pytest.raises(ConfigError, match=r"3_theo_9\.wav"):
        speech.fsdd(unknown(tmp_path))


def test_a_file_that_is_no_wav_is_refused_and_a_folder_without_any_says_where_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "fsdd" / "recordings").mkdir(parents=True)
    with pytest.raises(ConfigError, match="recordings") as wrong:
        speech.fsdd(unknown(tmp_path))
    assert "free-spoken-digit-dataset" in wrong.value.hint
    (tmp_path / "fsdd" / "recordings" / "3_theo_9.wav").write_bytes(b"RIFF....junk")
    with pytest.raises(ConfigError, match=r"3_theo_9\.wav"):
        speech.fsdd(unknown(tmp_path))


def test_bands_peak_in_rising_order_and_neighbours_add_up_to_one() -> None:
    bands = mel_bands(512, 8_000)
    assert bands.shape == (40, 257)
    at = np.arange(257) * 8_000 / 512
    middles = 700 * np.expm1(np.linspace(np.log1p(20 / 700), np.log1p(4_000 / 700), 42))[1:-1]
    inside = (at >= middles[0]) & (at <= middles[-1])
    np.testing.assert_allclose(bands.sum(axis=0)[inside], 1.0)
    np.testing.assert_allclose(bands[-1] @ at / bands[-1].sum(), middles[-1], rtol=0.02)  # bins are 16 Hz wide
    assert not bands[:, 0].any()


def test_a_louder_sound_changes_only_the_first_coefficient_and_its_pitch_the_others() -> None:
    # By log(2) in all 40 bands: sqrt(40) log(2) in the orthonormal DCT's first. The floor of 1e-6 leaves 1e-3.
    rng = np.random.default_rng(0)
    quiet = rng.uniform(-0.4, 0.4, size=(1, 8_000))
    one, two = mfcc(quiet, 8_000), mfcc(2 * quiet, 8_000)
    assert one.shape == (1, 49, 10)
    np.testing.assert_allclose((two - one)[..., 0], np.sqrt(40) * np.log(2), atol=1e-3)
    np.testing.assert_allclose(two[..., 1:], one[..., 1:], atol=1e-3)
    low, high = (mfcc(tone(hertz)[None] / 32_768, 8_000) for hertz in (300, 3_000))
    assert low[0, :, 1].min() > high[0, :, 1].max()  # the first cosine falls from low bands to high ones


def test_sound_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 320"):
        mfcc(np.zeros((1, 319)), 8_000)
