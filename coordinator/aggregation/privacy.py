"""Client-level differential privacy: Gaussian noise on the centers bounds what they reveal about any one device.

One release is the new centers [K, p] of one exchange. With responsibilities R and bounds C (`clip`), z (`noise`):

    r_i   = R_i / max(1, ||R_i||)                                     the weights of device i in all centers together
    S_k   = sum_i r_ik min(1, C / ||w_i - c_k||) (w_i - c_k) + N(0, (z s C)^2)
    N_k   = sum_i r_ik + N(0, (z s / b)^2)                             b = COUNT_SHARE, s = sqrt(1 + b^2)
    c_k  <- c_k + S_k / N_k,   unchanged where N_k is below MIN_NOISY_COUNT deviations of its noise

(S, b C N) is one vector, which one device more or less changes by at most s C, so a release is the Gaussian mechanism
with noise multiplier z; the number of devices is noisy too, since it depends on them. Every device counts once,
whatever its samples (McMahan, Ramage, Talwar and Zhang 2018, "Learning Differentially Private Recurrent Language
Models").

The noise is a keyed function of the sums it is added to. A replay adds the same noise to the same sums, and two
different sums never share theirs, since their difference would cancel it. The key stays with the coordinator and is
independent of the run's seed, which is public.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from coordinator.aggregation.centers import Align
from coordinator.aggregation.rows import Rows
from edge_client.errors import ConfigError, install_hint
from edge_client.protocol.task import F64, Array

COUNT_SHARE = 0.3  # b: a greater one counts more exactly and adds more noise to the sums, 4 percent here
MIN_NOISY_COUNT = 2.0
KEY_BYTES = 32
INSTALL_HINT = f"{install_hint('privacy')} brings the accountant"


def release_centers(  # noqa: PLR0913 - the formula has these parts
    centers: Array,
    rows: Array | Rows,
    R: Array,
    *,
    clip: float,
    noise: float,
    secret: bytes,
    step: float = 1.0,
    align: Align | None = None,
) -> Array:
    """New centers [K, p] of models `rows` [m, p] with responsibilities R [m, K]; the step as in centers.py.

    Raises ConfigError without a `secret` of KEY_BYTES bytes.
    """
    if len(secret) != KEY_BYTES:
        raise ConfigError("private centers need the coordinator's secret", hint="use the drivers, which hold one")
    given = R / np.maximum(1.0, np.sqrt((R * R).sum(axis=1)))[:, None]
    sums, source = np.zeros(centers.shape), Rows.of(rows)
    for k, center in enumerate(centers):
        mine = np.flatnonzero(given[:, k])
        for share, row in zip(given[mine, k], source.select(mine), strict=True):
            apart = (row if align is None else align(row[None], center)[0]).astype(np.float64) - center
            far = float(np.sqrt(apart @ apart))
            sums[k] += share * (min(1.0, clip / far) if far else 1.0) * apart
    counts = given.sum(axis=0)
    spread = noise * np.sqrt(1 + COUNT_SHARE**2)
    drawn = seeded_normals(secret, _said(centers, sums, counts, clip, noise), sums.size + len(counts))
    sums += spread * clip * drawn[: sums.size].reshape(sums.shape)
    counts = counts + spread / COUNT_SHARE * drawn[sums.size :]
    enough = counts >= max(MIN_NOISY_COUNT * spread / COUNT_SHARE, 1e-9)
    out = centers.copy()
    out[enough] = centers[enough] + step * sums[enough] / counts[enough, None]
    return out


def seeded_normals(secret: bytes, said: bytes, count: int) -> F64:
    """[count] standard normal numbers, a function of `secret` and `said`: the normal quantiles of a ChaCha20 stream.

    The guarantee is not exact in floating point (Mironov 2012): 53 bits each, no value beyond 8.2 deviations.
    """
    from scipy.special import ndtri

    key = hmac.digest(secret, said, "sha256")
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    uniform = ((np.frombuffer(stream, "<u8") >> 11).astype(np.float64) + 0.5) * 2.0**-53
    drawn: F64 = ndtri(uniform)
    return drawn


def epsilon_spent(noise: float, releases: int, delta: float, *, sampling: float = 1.0) -> float:
    """The epsilon at `delta` of a device that took part in all of `releases` releases with multiplier `noise`.

    Two runs are compared, with the device's updates and without; the answers of the others are the same. Gaussian
    mechanisms compose to one with noise over sqrt(releases), exactly. With `sampling` below one each device took part
    in each release with that probability, drawn independently (Poisson) and in secret: Renyi accounting (Mironov,
    Talwar and Zhang 2019). Raises ConfigError where the accountant is not installed.
    """
    if releases == 0:
        return 0.0
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise ConfigError("a private run needs an accountant", hint=INSTALL_HINT) from None
    if sampling == 1:
        return float(dp_accounting.get_epsilon_gaussian(noise / np.sqrt(releases), delta))
    accountant = RdpAccountant()
    one = dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(one, releases)
    return float(accountant.get_epsilon(delta))


def _said(centers: Array, sums: F64, counts: F64, clip: float, noise: float) -> bytes:
    """A digest of the values to which the noise is added."""
    digest = hashlib.sha256(b"fedcenters noise 1")
    for array in (centers.astype(np.float64), sums, counts, np.array([clip, noise])):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()
