"""What a run is summed up as: the method, the fleet, and the scores of its last round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.rounds.metrics import ari, nmi, purity
from edge_client.protocol.task import ClientId
from emulator.options import SimulateArgs

Record = dict[str, Any]


def result_summary(args: SimulateArgs, groups: Mapping[ClientId, int], last: Mapping[str, Any]) -> Record:
    """The options of the run, and the scores of `last`, the record of the last round.

    `accuracy` is that of the models that devices are served, `centers_accuracy` of the centers as they are exported;
    `refused` counts the answers of devices that did not count, by reason, where there are some.
    `clusters_without_devices` is None where no device tells its center. `devices_without_center` is there where some
    devices have none beside others that do, as those that no round has drawn: they are served as new devices.
    """
    used = set(last["assignment"].values())
    bare = (args.devices or 0) - len(last["assignment"])
    return {
        "method": args.method,
        "data_set": args.data_set,
        "partition": args.partition,
        "rounds": last["round"],
        "devices": args.devices,
        "clusters": len(last["per_center"]),
        "clusters_without_devices": len(last["per_center"]) - len(used) if used else None,
        **({"devices_without_center": bare} if used and bare > 0 else {}),
        "accuracy": last["accuracy"],
        "f1_of_devices": last["f1_of_devices"],
        "f1_pooled": last["f1_pooled"],
        **({"loss": last["loss"]["micro"]} if last["accuracy"]["micro"] is None and "loss" in last else {}),
        "centers_accuracy": last["centers"]["accuracy"] if "centers" in last else last["accuracy"],
        **clustering_scores(groups, last["assignment"]),
        **({"refused": refusal_reasons([last])} if last.get("refused") else {}),
    }


def told_of_record(last: Mapping[str, Any]) -> Record:
    """What the record of the last round tells beside its scores: answers, privacy, sums, and metrics over samples."""
    found = {key: last[key] for key in ("answered", "privacy", "secure") if key in last}
    return found | ({"metrics": {k: v["micro"] for k, v in last["metrics"].items()}} if "metrics" in last else {})


def refusal_reasons(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many answers were refused for each reason: for its code, as what follows a colon has numbers of its own."""
    said = (reason for record in records for reason in record.get("refused", {}).values())
    return dict(Counter(reason.partition(":")[0] for reason in said))


def clustering_scores(groups: Mapping[ClientId, int], assignment: Mapping[ClientId, int]) -> dict[str, float | None]:
    """How well an assignment finds the true groups; None for a fleet without true groups."""
    known = sorted(set(assignment) & set(groups))
    labels = [groups[c] for c in known], [assignment[c] for c in known]
    return {score.__name__: score(*labels) if known else None for score in (ari, nmi, purity)}
