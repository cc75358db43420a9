"""Which center a client belongs to: by the losses that it reported, or by default."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from coordinator.strategies.base import Fleet, Replies, State, Strategy, some_replies
from coordinator.strategies.numbered_fleet import all_of_one_center, members_of_centers
from edge_client.protocol.task import F64, MAX_MODELS, ClientId, OwnModel

MAX_COUNTED_LOSS = 1e150  # of a loss that counts: its square is finite


def told_losses(replies: Replies) -> dict[ClientId, F64]:
    """Losses [K] of each client that reported them, sorted by client; NaN is infinite."""
    return {
        c: np.where(np.isnan(r.losses), np.inf, r.losses) for c, r in sorted(replies.items()) if r.losses is not None
    }


def capped_losses(losses: F64, cap: float) -> F64:
    """Losses [m, K] of m devices -> the same within bounds, so that false ones put no device far from all others.

    The first bound is h, the quantile `cap` of the devices' greatest losses: a greater loss counts as h, and so does
    one that is not finite. The gaps [K] of a device are how far its losses are below h. The second bound is r, the
    quantile `cap` of the Euclidean lengths of the gaps: longer ones are scaled to the length r. The result is h minus
    the gaps; where no loss of any device is finite, it is 0 throughout.
    """
    finite = np.isfinite(losses)
    told = finite.any(axis=1)
    if not told.any():
        return np.zeros_like(losses)
    some = losses.clip(-MAX_COUNTED_LOSS, MAX_COUNTED_LOSS)
    h = _quantile(np.where(finite, some, -np.inf).max(axis=1)[told], cap)
    gaps = np.where(finite, np.maximum(h - some, 0.0), 0.0)
    lengths = np.linalg.norm(gaps, axis=1, keepdims=True)
    r = _quantile(lengths[told, 0], cap)
    return h - gaps * np.where(lengths > r, r / np.where(lengths > 0, lengths, 1.0), 1.0)


def _quantile(values: F64, cap: float) -> float:
    """One of the values, and for a `cap` below 1 not the greatest, which may be a lie."""
    return float(np.quantile(values, cap, method="lower"))


def choose_by_loss(replies: Replies, rng: np.random.Generator) -> dict[ClientId, int]:
    """argmin_k losses[k] of each client that reported losses [K]; equal losses are decided by lot, NaN is the worst."""
    told = told_losses(replies)
    best = {c: np.flatnonzero(losses == losses.min()) for c, losses in told.items()}
    return {c: int(ks[0] if len(ks) == 1 else rng.choice(ks)) for c, ks in best.items()}


def newcomers(cohort: Collection[ClientId], state: State) -> list[ClientId]:
    """Devices without a center where others have one of several: they tell their losses beside the others' fits.

    They train when they are asked again, from the center of least loss (`centers_of_newcomers`). A model from the
    common start would be younger than the others, and its distances to the centers would tell its age as well as its
    data. None above MAX_MODELS centers, for which a probe has no room.
    """
    if not state.assignment or not 1 < len(state.centers) <= MAX_MODELS:
        return []
    return [c for c in cohort if c not in state.assignment]


def centers_of_newcomers(new: Collection[ClientId], replies: Replies) -> dict[ClientId, int]:
    """The center of least loss of each newcomer that told its losses; the others' updates are not read."""
    return {c: int(losses.argmin()) for c, losses in told_losses(some_replies(replies, new)).items()}


def serving_center(assignment: Mapping[ClientId, int], who: ClientId | None) -> int:
    """The center that serves `who`: its own, or the one with most clients for a client that has none."""
    if who is not None and who in assignment:
        return assignment[who]
    counts = members_of_centers(assignment)
    return min(counts, key=lambda k: (-counts[k], k), default=0)


def told_assignment(strategy: Strategy, state: State, fleet: Fleet) -> Mapping[ClientId, int]:
    """The center of each device, for reports: without an assignment all devices are on a single center.

    Not where devices are served models that they keep themselves.
    """
    if state.assignment or len(state.centers) != 1 or not fleet:
        return state.assignment
    served = strategy.predictor(state, next(iter(fleet)))
    return {} if any(isinstance(model, OwnModel) for _, model in served) else all_of_one_center(fleet)
