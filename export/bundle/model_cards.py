"""A center's model card, as a JSON object and as Markdown.

    {"center", "method", "rounds", "devices", "samples"      which center, made how, for how many devices and samples
     "accuracy": {"devices", "mean", "min", "p10", "p25", "median", "p75", "p90", "max"} or null
                                                             of this file on each of its devices' held-out samples
     "served": the same, or null                             of the models that devices are served, where others
     "labels": {"of", "counts"} or null                      how often each class occurs: `of` says in which samples
     "classes": the user's values of classes 0, 1, ..., where they are no numbers
     "columns": the names of a table's columns, in the order of the input
     "values": [least, greatest] of the input in reference.npz, where there is one
     "model", "input", "output", "loss", "parameters"        what the network takes and gives; loss "own": the user's
     "files": {variant: {"path", "sha256", "size", "parity", ...}}}

The reader of a run gives the first eight (`center_facts`), the bundle adds the others. Other keys are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from edge_client.printable import counted
from edge_client.protocol.program import OWN, Program
from edge_client.protocol.samples.input_parts import InputPart
from edge_client.protocol.task import Array, ClientId

SERVED = "The method serves devices other models than this file, as their own models or mixtures. These, on"
QUANTILES = {"min": 0.0, "p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "max": 1.0}


def center_facts(  # noqa: PLR0913 - the parts of a card
    center: int,
    members: Iterable[ClientId] | None,
    *,
    method: str,
    rounds: int,
    samples: Mapping[ClientId, int],
    served: Mapping[ClientId, float],
    centers: Sequence[Mapping[ClientId, float]] | None,
    labels: Mapping[ClientId, Sequence[int]],
    labels_of: str,
) -> dict[str, Any]:
    """The part of a card that comes from a run. Each map may lack some devices of `members`.

    `served` is the accuracy of each device's served model, `centers[k]` that of center k; None: they are the same.
    Where it is not known which `members` the center has (None), the card does not tell how many.
    """
    names = sorted(members or ())
    own = served if centers is None else centers[center]
    counts = [labels[c] for c in names if c in labels]
    return {
        "center": center,
        "method": method,
        "rounds": rounds,
        **({} if members is None else {"devices": len(names), "samples": sum(samples.get(c, 0) for c in names)}),
        "accuracy": quantiles([own[c] for c in names if c in own]),
        "served": None if centers is None else quantiles([served[c] for c in names if c in served]),
        "labels": {"of": labels_of, "counts": np.sum(counts, axis=0).tolist()} if counts else None,
    }


def quantiles(values: Sequence[float] | Array) -> dict[str, float] | None:
    """Quantiles and mean of one number per device, linear between neighbours; None without numbers."""
    if len(values) == 0:
        return None
    found = {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}
    return {"devices": len(values), "mean": float(np.mean(values)), **found}


def program_facts(program: Program) -> dict[str, Any]:
    """The part of a card that all centers of a program share."""
    return {
        "model": program.model,
        "input": list(program.input),
        **({"parts": [part.to_json() for part in program.parts]} if program.parts else {}),
        "output": list(program.target),
        "loss": OWN if program.own_loss else program.loss,
        "parameters": program.schema.n_params,
    }


def markdown(card: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    lines = [f"# Center {card['center']} of {card['model']}", "", *_method_lines(card), "", *_runs(card), ""]
    if card.get("accuracy"):
        lines += ["## Accuracy", "", *_accuracy(card["accuracy"], "This center, on"), ""]
    if card.get("served"):
        lines += ["## Accuracy of the served models", "", *_accuracy(card["served"], SERVED), ""]
    if card.get("labels"):
        lines += ["## Labels", "", *_labels(card["labels"], card.get("classes", ())), ""]
    if card.get("files"):
        lines += ["## Files", "", *_files(card["files"]), ""]
    return "\n".join(lines)


def _method_lines(card: Mapping[str, Any]) -> list[str]:
    method = f"{card['method']}, {card['rounds']} rounds" if "rounds" in card else card.get("method", "unknown")
    loss = "a loss of the user's own" if card["loss"] == OWN else card["loss"]
    return [
        f"* made by {method}",
        f"* cluster: {_count(card, 'device')} with {_count(card, 'training sample', 'samples')}",
        f"* {card['parameters']:,} parameters, trained for {loss}",
    ]


def _count(card: Mapping[str, Any], what: str, key: str = "devices") -> str:
    """1 device, 2 devices, unknown devices."""
    return counted(card[key], what) if key in card else f"unknown {what}s"


def _runs(card: Mapping[str, Any]) -> list[str]:
    shape, out = (", ".join(map(str, card[key])) for key in ("input", "output"))
    lines = [f"Input `x` [n, {shape}] float32, output `logits` [n, {out}] float32; TFLite files take one sample."]
    lines.append("The file scales nothing: give `x` as training read it, after all that was done to the samples.")
    if "values" in card:
        lines.append("In `reference.npz` the values of `x` are from {:.4g} to {:.4g}.".format(*card["values"]))
    at = 0
    for part in map(InputPart.from_json, card.get("parts", ())):
        lines.append(f"* columns {at} to {at + part.size - 1} of `x`: `{part.name}` {list(part.shape)}, {part.kind}")
        at += part.size
    for key, of in (("columns", "the columns of `x`"), ("classes", "the classes 0, 1, ...")):
        if key in card:
            lines.append(f"* {of}, in order: {', '.join(_in_line(str(name)) for name in card[key])}")
    return lines


def _in_line(name: str) -> str:
    return f"`{' '.join(name.split()).replace('`', chr(39))}`"


def _accuracy(found: Mapping[str, float], of: str) -> list[str]:
    names, n = ("mean", *QUANTILES), round(found["devices"])
    whose = "the one device" if n == 1 else f"each of the {n} devices"
    return [
        f"{of} the held-out samples of {whose} assigned to it:",
        "",
        f"| {' | '.join(names)} |",
        f"|{'---:|' * len(names)}",
        f"| {' | '.join(f'{found[name]:.1%}' for name in names)} |",
    ]


def _labels(found: Mapping[str, Any], classes: Sequence[str | bool]) -> list[str]:
    counts = found["counts"]
    total, names = max(1, sum(counts)), [*map(str, classes), *map(str, range(len(classes), len(counts)))]
    shown = [name.replace("|", "\\|").replace("\n", " ") for name in names]
    rows = [f"| {name} | {count} | {count / total:.1%} |" for name, count in zip(shown, counts, strict=False)]
    return [f"In its devices' {found['of']}:", "", "| class | count | share |", "|---:|---:|---:|", *rows]


def _files(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        f"| {name} | `{file['path']}` | {file['size']:,} | {file['parity']:.1e} | `{file['sha256']}` |"
        for name, file in sorted(files.items())
    ]
    return ["| file | path | bytes | largest difference from torch | sha256 |", "|---|---|---:|---:|---|", *rows]
