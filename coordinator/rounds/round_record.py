"""The record of one round: the `round` event of metrics.jsonl, as the drivers write it and the reports read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from coordinator.rounds.metrics import FleetAverage, RoundReport
from edge_client.printable import first_of
from edge_client.protocol.task import ClientId

MOST_SILENT, MOST_REASONS = 5, 2  # devices in a line
SCORES = ("accuracy", "f1_of_devices", "f1_pooled", "centers")  # the fields of a round that a run is summed up by


class AverageRecord(TypedDict):
    """A `FleetAverage`: over samples (micro) and over devices (macro); None when no device replied."""

    micro: float | None
    macro: float | None


class DeviceF1Record(TypedDict):
    """The macro F1 of each device, averaged by samples and with equal weights; None when no device replied."""

    weighted: float | None
    unweighted: float | None


class CentersRecord(TypedDict):
    """The accuracy of the centers as they are exported, each on its own devices: `per_device[k]` of center k."""

    accuracy: AverageRecord
    per_center: Sequence[float | None]
    per_device: Sequence[Mapping[ClientId, float]]


class MetricRecord(AverageRecord):
    """A score beside accuracy, or a metric of the user's own."""

    per_device: Mapping[ClientId, float]


class TrafficRecord(TypedDict):
    """Bytes of a round, from and to the coordinator."""

    down: int
    up: int


class PrivacyRecord(TypedDict):
    """The privacy spent so far (privacy_accounting.py)."""

    epsilon: float
    delta: float
    releases: int
    noise: float
    clip: float
    given_assignments: bool


class _Seen(TypedDict):
    mode: str
    least_members: int
    sees: str


class SecureRecord(_Seen, total=False):
    """What the server learns of the devices (sealed_round.py): `sees` says it in words.

    `failed` tells why sums had no result, where some had none.
    """

    failed: Sequence[str]


class StalenessRecord(TypedDict):
    """Of the updates that counted in a round; the mean is None where none did."""

    mean: float | None
    most: int


class TestedRecord(TypedDict):
    """The centers of which a record has the scores: those after this round, in these versions."""

    round: int
    versions: Sequence[int]


class _Counts(TypedDict):
    versions: Sequence[int]
    counted: int
    stale: int
    expired: int
    staleness: StalenessRecord


class AsynchronousRecord(_Counts, total=False):
    """A round that waited for no device: updates that counted, tasks that were stopped or expired.

    `versions` has the versions of each center since the run's first such round. `tested` is there where a test ended in
    this round that began with an earlier version.
    """

    tested: TestedRecord


class _Measured(TypedDict):
    """The fields of every record. `assignment` maps devices to centers; `per_center[k]` is None without a device."""

    event: Literal["round"]
    run: str
    method: str
    round: int
    of: int
    accuracy: AverageRecord
    f1_of_devices: DeviceF1Record
    f1_pooled: float | None
    per_device: Mapping[ClientId, float]
    per_center: Sequence[float | None]
    assignment: Mapping[ClientId, int]
    bytes: TrafficRecord
    seconds: float


class RoundRecord(_Measured, total=False):
    """One line of metrics.jsonl; the fields of this class are absent where they do not apply."""

    loss: AverageRecord  # absent when no device reported its loss
    loss_per_device: Mapping[ClientId, float]
    loss_per_center: Sequence[float | None]
    centers: CentersRecord  # in the last round of a method that serves other models than its centers
    local_steps: int  # SGD steps of all devices; a driver that counts them
    answered: float | None  # share of the asked devices that replied in time; an emulated fleet
    refused: Mapping[ClientId, str]  # why a reply did not count
    silent: Sequence[ClientId]  # gave no answer before the deadline; a coordinator that asks no more than it wants
    privacy: PrivacyRecord  # a method with noise
    secure: SecureRecord  # a method that works on sums of devices
    metrics: Mapping[str, MetricRecord]  # scores beside accuracy (metrics.py) and the user's own, by name
    asynchronous: AsynchronousRecord  # a round that waited for no device


def round_record(  # noqa: PLR0913 - one line of metrics.jsonl has these fields
    report: RoundReport,
    *,
    run: str,
    method: str,
    round: int,  # noqa: A002 - the protocol's word
    of: int,
    bytes_down: int,
    bytes_up: int,
    seconds: float,
    local_steps: int | None = None,
) -> RoundRecord:
    """The record of a report; a driver that counts the devices' SGD steps passes `local_steps`."""
    record: RoundRecord = {
        "event": "round",
        "run": run,
        "method": method,
        "round": round,
        "of": of,
        "accuracy": _average(report.accuracy),
        "f1_of_devices": {"weighted": report.f1_of_devices.micro, "unweighted": report.f1_of_devices.macro},
        "f1_pooled": report.f1_pooled,
        "per_device": dict(report.per_device),
        "per_center": list(report.per_center),
        "loss": _average(report.loss),
        "loss_per_device": dict(report.loss_per_device),
        "loss_per_center": list(report.loss_per_center),
        "assignment": dict(report.assignment),
        "bytes": {"down": bytes_down, "up": bytes_up},
        "seconds": seconds,
    }
    if report.loss.micro is None:
        del record["loss"], record["loss_per_device"], record["loss_per_center"]
    if report.centers is not None:
        record["centers"] = {
            "accuracy": _average(report.centers.accuracy),
            "per_center": list(report.centers.per_center),
            "per_device": [dict(devices) for devices in report.centers.per_device],
        }
    if report.scores:
        record["metrics"] = {
            name: {"micro": score.average.micro, "macro": score.average.macro, "per_device": dict(score.per_device)}
            for name, score in report.scores.items()
        }
    if local_steps is not None:
        record["local_steps"] = local_steps
    return record


def place_in_words(record: Mapping[str, Any]) -> str:
    """Which round a record is of; of a run without rounds how many updates it counts, and the versions."""
    told, of = record.get("asynchronous"), f"{record['round']}/{record['of']}"
    if told is None:
        return f"round {of}"
    return f"record {of}: {told['counted']} more updates, {versions_in_words(told['versions'])}"


def versions_in_words(versions: Sequence[int]) -> str:
    """The versions of the centers, in the order of the centers."""
    return f"version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}"


def tested_in_words(record: Mapping[str, Any]) -> str:
    """Where a run without rounds tested earlier versions than those of its record: which."""
    told = record.get("asynchronous", {}).get("tested")
    return "" if told is None else f" of {versions_in_words(told['versions'])}"


def reached_in_words(record: Mapping[str, Any]) -> str:
    """The accuracy of a round, or where it has none its loss, and its other scores; "" where nothing was measured."""
    found = {name: value["micro"] for name, value in (record.get("metrics") or {}).items()}
    micro, loss = ((record.get(name) or {}).get("micro") for name in ("accuracy", "loss"))
    words = [] if micro is None else [f"accuracy {micro:.1%}{_centers_apart(record)}"]
    if micro is None and loss is not None and not is_squared_error(loss, found):
        words = [f"loss {loss:.4g}"]
    words += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.items() if value is not None]
    return ", ".join(words)


def is_squared_error(loss: float, scores: Mapping[str, float | None]) -> bool:
    """Whether a loss is the squared error among the scores, in the digits that are shown: one of them is enough."""
    squared = scores.get("squared_error")
    return squared is not None and f"{squared:.4g}" == f"{loss:.4g}"


def left_out_in_words(record: Mapping[str, Any]) -> str:
    """The devices of a round that gave no answer, or one that did not count; "" without any."""
    refused, silent = record.get("refused") or {}, record.get("silent") or ()
    words = f"; no answer from {first_of(list(silent), MOST_SILENT)}" if silent else ""
    if refused:
        words += f"; did not count: {first_of([f'{cid} ({why})' for cid, why in refused.items()], MOST_REASONS)}"
    return words


def no_sums_in_words(record: Mapping[str, Any]) -> str:
    """Why masked sums of a round were not made, each reason once; "" where all were."""
    reasons = dict.fromkeys((record.get("secure") or {}).get("failed", ()))
    return "".join(f"; no sum: {reason}" for reason in reasons)


def _centers_apart(record: Mapping[str, Any]) -> str:
    """The accuracy of the centers themselves, where devices are served other models."""
    micro = ((record.get("centers") or {}).get("accuracy") or {}).get("micro")
    return "" if micro is None else f" as served, {micro:.1%} with the centers alone"


def center_sizes(assignment: Mapping[ClientId, int], centers: int) -> list[int]:
    """How many devices each of so many centers has, also those that have none."""
    chosen = Counter(assignment.values())
    return [chosen[k] for k in range(centers)]


def upgraded_record(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event with the present names: a round of an older version has "f1", its micro and macro.

    Its pooled F1 and the accuracies of its centers are not known.
    """
    old = event.get("f1")
    if old is None:
        return dict(event)
    k = len(event.get("per_center", ()))
    found = {key: value for key, value in event.items() if key != "f1"}
    found |= {"f1_of_devices": {"weighted": old["micro"], "unweighted": old["macro"]}, "f1_pooled": None}
    unknown: dict[str, Any] = {
        "accuracy": {"micro": None, "macro": None},
        "per_center": [None] * k,
        "per_device": [{}] * k,
    }
    return found | {"centers": unknown}


def _average(average: FleetAverage) -> AverageRecord:
    return {"micro": average.micro, "macro": average.macro}
