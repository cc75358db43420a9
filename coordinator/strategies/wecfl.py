"""WeCFL (Ma 2022): FeSEM without its pull; a device counts by its n_i samples, for the clusters and for the mean.

    F = sum_k sum_i r_ik n_i ||w_i - c_k||^2 / sum_i n_i,    c_k = sum_i r_ik n_i w_i / sum_i r_ik n_i

Clusters are computed anew in every round and get the numbers of the nearest old centers. n_i counts samples; the public
code counts batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.strategies.fesem import FeSEM


@dataclass(frozen=True, kw_only=True, repr=False)
class WeCFL(FeSEM):
    """FeSEM with other settings. With equal n_i it is FeSEM(lam=0, e_step="k-means")."""

    lam: float = 0.0
    e_step: str = "k-means"
    weights: str = "samples"
