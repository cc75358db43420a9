"""`python -m tests.figures.nearest --data DIR --json`: does a device that never trained find its center?

The figures are in docs/results-nearest.md.

Trains WeCFL on five fleets (tests/figures/nearest_fleets.py), holds devices out, and lets them choose by every way of
edge_client/protocol/nearest/router.py after 1, 5, 20 and 100 samples. Thresholds, temperatures and weights are learned
on the training devices. One JSON object a line for each setting, seed, way and number of samples; progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.nearest import features
from edge_client.nearest.choose_center import CANDIDATE_PROBABILITY, MAX_CANDIDATES
from edge_client.protocol.nearest import selection_rule
from edge_client.protocol.nearest.router import NEED_LABELS, Router, RouterPrediction
from edge_client.protocol.nearest.router_file import write_router
from edge_client.protocol.task import Array, ClientId
from emulator.router_training import MEASUREMENTS_BY_SIZE, FinishedTraining, fit_router
from tests.figures.nearest_fleets import SETTINGS, FinishedFleet, fleet

LOOKS = {1: 2, 5: 1, 20: 1, 100: 1}
UNSEEN = 8  # devices of each other distribution
BOUNDED = ("labelled", "unlabelled")  # these look at the models of a few candidates only
BINS = 10
Row = dict[str, Any]
Told = tuple[str, int, RouterPrediction, int]  # way, samples, what it believes, models that were fetched for it


def looks(
    run: FinishedFleet, router: Router, local: DeviceData, rng: np.random.Generator, times: Mapping[int, int]
) -> Iterator[Told]:
    """What every way says after so many samples of the device's training part."""
    learner, centers = run.devices.learner, list(run.centers)
    for n, count in times.items():
        for time in range(count):
            rows = rng.permutation(len(local.train))[:n]
            few = Dataset(local.train.x[rows], local.train.y[rows])
            found = features.model_distances(learner, centers, few, labels=True)
            if router.sketch is not None:
                found["sketch"] = selection_rule.sketch_distance(
                    features.sketch_inputs(few, router.sketch), router.sketch.centers
                )
            if router.round is not None and time == 0:
                point = features.sketch_local_round(learner, run.start, few, router.round, seed=n)
                found["round"] = selection_rule.sketch_distance(point, router.round.centers)
            if (far := features.norm_distances(learner, centers, few)) is not None:
                found["norms"] = far
            if router.inputs is not None:
                found["inputs"] = features.input_distance(few, router.inputs, router.centers)
            for way in router.ways:
                if way in BOUNDED or router.ways[way].features[0] in found:
                    yield way, n, *believed(router, way, found, n)


def believed(router: Router, way: str, found: Mapping[str, Array], n: int) -> tuple[RouterPrediction, int]:
    """A bounded way sees the models of the sketch's candidates only; -> what it believes, and how many models."""
    wanted = {*router.ways[way].features, "inputs"}
    found = {f: d for f, d in found.items() if f in wanted or (f == "loss" and wanted & NEED_LABELS)}
    fetched = 0 if way in ("sketch", "round") else router.centers
    if way in BOUNDED:
        left = router.predict("sketch", found, n).candidates(MAX_CANDIDATES, CANDIDATE_PROBABILITY)
        hidden = np.setdiff1d(np.arange(router.centers), left)
        found = {f: d if f == "sketch" else _without(d, hidden) for f, d in found.items()}
        fetched = len(left)
    return router.predict(way, found, n), fetched


def _without(distances: Array, hidden: Array) -> Array:
    out = np.array(distances, np.float64)
    out[hidden] = np.inf
    return out


def of_one(name: str, seed: int, run: FinishedFleet) -> list[Row]:
    """The rows of one setting and seed."""
    ended = FinishedTraining(
        learner=run.devices.learner,
        method=run.setting.method,
        start=run.start,
        centers=list(run.centers),
        assignment=run.assignment,
        devices=run.trained,
    )
    guide = fit_router(ended, seed=seed)
    rng = np.random.Generator(np.random.PCG64(10_000 + seed))
    known = [
        (way, n, (belief, accuracy, run.truth.get(c) if run.setting.judged_by_group else None, fetched))
        for c, local in sorted(run.held_out.items())
        for accuracy in [_accuracy(run, local)]
        for way, n, belief, fetched in looks(run, guide, local, rng, LOOKS)
    ]
    other = {
        kind: [(way, n, belief.center is None) for way, n, belief, _ in _strangers(run, guide, devices, rng)]
        for kind, devices in run.unseen.items()
    }
    guide_bytes = len(write_router(guide))
    rows = []
    for way in guide.ways:
        for n in MEASUREMENTS_BY_SIZE:
            mine = [look for w, m, look in known if (w, m) == (way, n)]
            if mine:
                nones = {
                    f"none_{kind}": _mean([none for w, m, none in found if (w, m) == (way, n)])
                    for kind, found in other.items()
                }
                facts = {"setting": name, "seed": seed, "way": way, "n": n, "centers": guide.centers}
                rows.append(facts | scored(mine, run.start.size * 4, guide_bytes) | nones)
    return rows


def _strangers(
    run: FinishedFleet, router: Router, devices: Mapping[ClientId, DeviceData], rng: np.random.Generator
) -> Iterator[Told]:
    for c in sorted(devices)[:UNSEEN]:
        yield from looks(run, router, devices[c], rng, dict.fromkeys(MEASUREMENTS_BY_SIZE, 1))


def scored(found: Sequence[tuple[RouterPrediction, Array, int | None, int]], model_bytes: int, guide_bytes: int) -> Row:
    """(belief, accuracy of every center, the true center if there is one, models fetched) -> the row's figures.

    Right is the center of the true group; where there is none, any that is as good as the best one.
    """
    best = [b.best for b, *_ in found]
    oracle = [accuracy.max() for _, accuracy, *_ in found]
    gained = [accuracy[k] for k, (_, accuracy, *_) in zip(best, found, strict=True)]
    right = [
        k == truth if truth is not None else accuracy[k] >= accuracy.max()
        for k, (_, accuracy, truth, _) in zip(best, found, strict=True)
    ]
    fetched = _mean([models for *_, models in found])
    return {
        "right": _mean(right),
        "accuracy": _mean(gained),
        "oracle": _mean(oracle),
        "ece": calibration_error([float(b.probabilities.max()) for b, *_ in found], right),
        "none_known": _mean([b.center is None for b, *_ in found]),
        "models": fetched,
        "bytes": round(guide_bytes + (max(1.0, fetched)) * model_bytes),
        "looks": len(found),
    }


def calibration_error(confidence: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error over equal bins (Guo 2017)."""
    sure, hit = np.asarray(confidence), np.asarray(right, dtype=np.float64)
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs(float(sure[bins == b].mean() - hit[bins == b].mean())) * (bins == b).mean() for b in set(bins.tolist())]
    return float(sum(gaps))


def _accuracy(run: FinishedFleet, local: DeviceData) -> Array:
    """Of every center on the device's test part [K]."""
    test = local.test or local.train
    _, logits = run.devices.learner.evaluate(list(run.centers), test, batch=128)
    found: Array = (logits.argmax(axis=-1) == test.y).mean(axis=1)
    return found


def _mean(values: Sequence[Any]) -> float:
    return round(float(np.mean(values)), 4) if len(values) else float("nan")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of data sets; else FEDCENTERS_DATA")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--keep", type=Path, help="a folder that keeps trained centers for the next time")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the only form there is")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(asked.first, asked.first + asked.seeds):
        for name in asked.settings:
            began = process_time()
            with fleet(name, seed=seed, data=asked.data, keep=asked.keep) as run:
                for row in of_one(name, seed, run):
                    sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            sys.stderr.write(f"{name}, seed {seed}: {process_time() - began:.0f} CPU s\n")


if __name__ == "__main__":
    main()
