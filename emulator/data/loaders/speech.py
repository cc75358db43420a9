"""The Free Spoken Digit Dataset: ten English digits by six speakers, at 8 kHz, as ten MFCCs of each 20 ms.

From the publisher's wav files, `fsdd/recordings/{digit}_{speaker}_{take}.wav`, or from an .npz of the same recordings.
The publisher gives no checksum of the wav files; the .npz has one.
"""

from __future__ import annotations

import io
import re
import wave
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import I64, Array
from emulator.data.loaders.folder import DataFolderReader
from emulator.data.loaders.mfcc import mfcc
from emulator.data.loaders.samples import DataSet, RawSamples

PACKED_FILE = "fsdd/fsdd_8khz.npz"
RECORDINGS_FOLDER = "fsdd/recordings"
FILE_NAME_PATTERN = re.compile(r"(\d)_([A-Za-z]+)_(\d{1,4})\.wav")
SAMPLE_RATE = 8_000  # Hz
CLIP_SAMPLES = SAMPLE_RATE  # samples that a network hears; the longest recordings lose their end
TEST_TAKES = 5  # the publisher's: takes 0 to 4 are the test set
CLASSES = 10
MAX_BYTES, MAX_RECORDINGS = 1 << 20, 100_000


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Recording i is `heard[i]` [SECOND] of int16, says `digit[i]`, by a speaker and as a take of that digit."""

    audio: NDArray[np.int16]
    digit: I64
    speaker: I64
    take: I64


def fsdd(folder: DataFolderReader) -> DataSet:
    """3,000 recordings, x [1, 49, 10] (time, coefficient) as mfcc.py says; a user is a speaker, by alphabet.

    Shorter recordings are followed by silence, longer ones are cut after a second. Each coefficient is standardised
    over all times and recordings of the training part.
    """
    held = _from_files(folder) if (folder.path / RECORDINGS_FOLDER).is_dir() else _from_arrays(folder)
    x = mfcc(held.audio.astype(np.float32) / np.float32(1 << 15), SAMPLE_RATE)
    test = held.take < TEST_TAKES
    if test.all() or not test.any():
        raise folder.format_error(RECORDINGS_FOLDER, "no take below 5, which are the test part, or none above")
    mean, spread = x[~test].mean(axis=(0, 1)), x[~test].std(axis=(0, 1))
    x = ((x - mean) / np.where(spread > 0, spread, 1))[:, None].astype(np.float32)
    train, tested = (RawSamples(x=x[rows], y=held.digit[rows], user=held.speaker[rows]) for rows in (~test, test))
    return DataSet(train=train, test=tested)


def _from_arrays(folder: DataFolderReader) -> Recordings:
    """The .npz: `audio` of all recordings after one another, `offsets` [n + 1], `digit`, `speaker`, `take` [n]."""
    if not folder.has(PACKED_FILE):
        raise folder.missing_file_error(f"{RECORDINGS_FOLDER}/*.wav")
    held = folder.arrays(PACKED_FILE, limit=1 << 26)
    if lacking := {"audio", "offsets", "digit", "speaker", "take"} - held.keys():
        raise folder.format_error(PACKED_FILE, f"no arrays {sorted(lacking)}")
    audio, offsets = held["audio"], held["offsets"].astype(np.int64)
    columns = [held[name].astype(np.int64) for name in ("digit", "speaker", "take")]
    rising = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and (np.diff(offsets) > 0).all()
    whole = audio.dtype == np.int16 and audio.ndim == 1 and rising and offsets[-1] == len(audio)
    if not whole or any(column.shape != (len(offsets) - 1,) for column in columns) or not _digits(columns[0]):
        raise folder.format_error(PACKED_FILE, "the arrays do not fit each other")
    heard = _seconds(audio[a:b] for a, b in pairwise(offsets))
    return Recordings(audio=heard, digit=columns[0], speaker=columns[1], take=columns[2])


def _from_files(folder: DataFolderReader) -> Recordings:
    files = sorted(path.name for path in (folder.path / RECORDINGS_FOLDER).glob("*.wav"))
    named = {name: match.groups() for name in files if (match := FILE_NAME_PATTERN.fullmatch(name))}
    if not named:
        raise folder.missing_file_error(f"{RECORDINGS_FOLDER}/*.wav")
    if len(named) > MAX_RECORDINGS:
        raise folder.format_error(RECORDINGS_FOLDER, f"{len(named)} files, more than {MAX_RECORDINGS}")
    speakers = {who: i for i, who in enumerate(sorted({who for _, who, _ in named.values()}))}
    rows = np.array([(int(digit), speakers[who], int(take)) for digit, who, take in named.values()], np.int64)
    heard = _seconds(_wav(folder, f"{RECORDINGS_FOLDER}/{name}") for name in named)
    return Recordings(audio=heard, digit=rows[:, 0], speaker=rows[:, 1], take=rows[:, 2])


def _wav(folder: DataFolderReader, name: str) -> NDArray[np.int16]:
    try:
        with wave.open(io.BytesIO(folder.read(name, limit=MAX_BYTES))) as file:
            kind = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as wrong:
        raise folder.format_error(name, f"no wav file of plain samples: {wrong}") from wrong
    if kind != (1, 2, SAMPLE_RATE) or not data or len(data) % 2:
        raise folder.format_error(
            name, f"(channels, bytes, Hz) are {kind}, expected (1, 2, {SAMPLE_RATE}) and at least one sample"
        )
    return np.frombuffer(data, "<i2").astype(np.int16)


def _seconds(recordings: Iterable[Array]) -> NDArray[np.int16]:
    """[n, SECOND]: the first second of each; silence after what is shorter."""
    return np.stack(
        [np.pad(sound[:CLIP_SAMPLES], (0, CLIP_SAMPLES - len(sound[:CLIP_SAMPLES]))) for sound in recordings]
    )


def _digits(column: I64) -> bool:
    return bool(column.min() >= 0 and column.max() < CLASSES)
