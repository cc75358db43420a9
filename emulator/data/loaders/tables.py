"""Data sets that are not images: WISDM's movements by user, Shakespeare's plays by part, FedSoft's regression.

The last is drawn from a seed and needs no file. Digits ship with scikit-learn.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from edge_client.errors import RuntimeMissing, install_hint
from edge_client.protocol.task import I64, Array
from emulator.data.loaders.folder import DataFolderReader
from emulator.data.loaders.samples import DataSet, RawSamples, concatenate

DIGITS = "datasets/data/digits.csv.gz"  # within scikit-learn
FEATURES = 10
POOL_SAMPLES, TEST_POOL_SAMPLES = 50_000, 1_000  # FedSoft's, for each of two thetas
MANY_POOL, MANY_TEST_POOL = 15_000, 5_000
SQUARED_DISTANCE = 165.0  # ||theta_1 - theta_2||^2 of the draw behind FedSoft's Table 1, which its numbers pin down
WINDOW_CHARS = 80  # LEAF's: characters that a sample shows before the one to be predicted
MIN_SPEECHES = 20


def digits() -> DataSet:
    """1,797 scans of handwritten digits by 43 people, [1, 8, 8], ink from 0 to 16; no official test part."""
    library = find_spec("sklearn")  # found, not imported: that takes longer than the training of a short run
    if library is None or library.origin is None:
        raise RuntimeMissing("scikit-learn is not installed", hint=install_hint("emulator"))
    table = np.loadtxt(Path(library.origin).parent / DIGITS, delimiter=",")  # [1797, 65], the label last
    pixels, labels = table[:, :-1], table[:, -1]
    samples = RawSamples(x=pixels.reshape(-1, 1, 8, 8).astype(np.float32), y=labels.astype(np.int64))
    return DataSet(train=samples, ready=lambda x: x / np.float32(16))


def wisdm(folder: DataFolderReader) -> DataSet:
    """5,418 spans of ten seconds of a phone's accelerometer, 43 features, six activities, 36 users (Kwapisz 2010).

    Features are standardised over all samples, those that will test among them: they are dealt later. A peak that the
    lab left undefined becomes the mean.
    """
    name = "wisdm/wisdm_v1.1_transformed.npz"
    held = folder.arrays(name, limit=1 << 26)
    if not {"x", "y", "user"} <= held.keys():
        raise folder.format_error(name, f"arrays {sorted(held)}, expected x, y and user")
    x = held["x"].astype(np.float64)
    spread = np.nanstd(x, axis=0)
    standard = np.nan_to_num((x - np.nanmean(x, axis=0)) / np.where(spread > 0, spread, 1.0), nan=0.0)
    y, user = (held[key].astype(np.int64) for key in ("y", "user"))
    return DataSet(train=RawSamples(x=standard.astype(np.float32), y=y, user=user))


def shakespeare(folder: DataFolderReader) -> DataSet:
    """The next character after 80, by speaking part; x [80] and y are numbers in the sorted alphabet of the file.

    A device's samples are floating point, so the character numbers are too; a model turns them back.
    """
    name = "shakespeare/tinyshakespeare.txt"
    data = folder.read(name, limit=1 << 26)
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as wrong:
        raise folder.format_error(name, wrong) from wrong
    number = {char: i for i, char in enumerate(sorted(set(text)))}
    parts = {who: said for who, said in sorted(_speeches(text).items()) if len(said) >= MIN_SPEECHES}
    rows, users = [], []
    for i, said in enumerate(parts.values()):
        codes = np.array([number[char] for char in "\n\n".join(said)], np.int64)
        count = (len(codes) - 1) // WINDOW_CHARS
        rows.append(np.lib.stride_tricks.sliding_window_view(codes, WINDOW_CHARS + 1)[::WINDOW_CHARS][:count])
        users.append(np.full(len(rows[-1]), i, np.int64))
    if not rows:
        raise folder.format_error(name, f"no part with {MIN_SPEECHES} speeches of the form NAME: speech")
    table = np.concatenate(rows)
    return DataSet(train=RawSamples(x=table[:, :-1].astype(np.float32), y=table[:, -1], user=np.concatenate(users)))


def regression(domains: int, seed: int) -> DataSet:
    """FedSoft's y = <x, theta_s> + eps: x ~ N(0, I_10), eps ~ N(0, 1), theta_s ~ N(0, 10 I_10); the domain is s.

    Two thetas are stretched to the distance of the paper's draw, since errors scale with it. y is [n, 1] float32.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, domains])))
    theta = np.sqrt(10.0) * rng.standard_normal((domains, FEATURES))
    pool, test_pool = (POOL_SAMPLES, TEST_POOL_SAMPLES) if domains == 2 else (MANY_POOL, MANY_TEST_POOL)  # noqa: PLR2004 - two thetas
    if domains == 2:  # noqa: PLR2004 - two thetas
        middle, half = theta.mean(axis=0), (theta[0] - theta[1]) / 2
        half *= np.sqrt(SQUARED_DISTANCE) / (2 * np.linalg.norm(half))
        theta = np.stack([middle + half, middle - half])
    train, test = (concatenate(*(_drawn(t, s, n, rng) for s, t in enumerate(theta))) for n in (pool, test_pool))
    return DataSet(train=train, test=test)


def _drawn(theta: Array, domain: int, n: int, rng: np.random.Generator) -> RawSamples:
    x = rng.standard_normal((n, FEATURES))
    y = (x @ theta + rng.standard_normal(n))[:, None]
    whole: I64 = np.full(n, domain, np.int64)
    return RawSamples(x=x.astype(np.float32), y=y.astype(np.float32), domain=whole)


def _speeches(text: str) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for block in text.strip().split("\n\n"):
        who, named, said = block.partition(":\n")
        if named:
            out.setdefault(who, []).append(said)
    return out
