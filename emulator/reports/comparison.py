"""A page that compares runs: curves, a table of results, their different settings, how to repeat each.

Reads what `simulate`, `serve` and `demo` leave in their folders: metrics.jsonl and config.toml, of a simulated run also
the numbers of its pictures. The page is self-contained HTML with SVG figures.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonpath
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds.metrics import ari
from edge_client.errors import ConfigError
from edge_client.printable import counted
from edge_client.toml_files import parse_toml
from emulator.config import CONFIG_FILE, FLEET_FILE, GROUPS_FILE
from emulator.reports import demo_page, display_names, plots
from emulator.reports.html_page import (
    format_share,
    html_details,
    html_figure,
    html_page,
    html_table,
    html_text,
    html_verdict,
)
from emulator.reports.output_files import write_output
from emulator.reports.repeat import own_loss_of, repeat_in_python, show_coordinator
from emulator.reports.run_settings import differing_settings, one_sided_settings, read_settings

CURVES = {  # quantity and kind of a round's record -> how it is called
    ("accuracy", "micro"): "Accuracy, micro",
    ("f1_of_devices", "unweighted"): "F1 of devices, unweighted",
    ("f1_pooled", ""): "F1, pooled",
}
ERRORS = ("squared_error", "loss")  # of runs whose targets are no classes: the first that is known is compared
OTHER_LOSSES = "These runs minimised different losses, and no other measure compares them."
DATA_SET = "data-set"  # a setting
THREE = 3  # figures share a row
FULL_ROW_INCHES = 8  # inches: a picture that wide has a row of its own


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of one folder: its rounds in order, the folder's settings in flat keys, and true groups if known.

    `fleet` has the training samples of each device: of each class, their sum only, or none where they are unknown.
    `done`: all runs of a coordinator's folder are. `own_loss` is what a loss of the user's own is called, or empty.
    """

    name: str
    folder: Path
    rounds: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    groups: Mapping[str, int]
    fleet: Mapping[str, Sequence[int]]
    done: bool = False
    own_loss: str = ""

    @property
    def method(self) -> str:
        return display_names.method_label(str(self.rounds[0]["method"]))

    def curve(self, quantity: str, kind: str) -> list[float | None]:
        values = [event.get(quantity, event.get("metrics", {}).get(quantity)) for event in self.rounds]
        return [value.get(kind) if isinstance(value, Mapping) else value for value in values]

    def result(self, quantity: str, kind: str) -> float | None:
        """The value of the last round that was tested: what `simulate` prints, and what the exported centers have."""
        return next((value for value in reversed(self.curve(quantity, kind)) if value is not None), None)

    @property
    def accuracies(self) -> list[float]:
        """The accuracy of every device in the last round."""
        return list(self.rounds[-1].get("per_device", {}).values())

    def percentile(self, share: float) -> float | None:
        """The accuracy that `share` percent of the devices do not exceed in the last round."""
        return float(np.percentile(self.accuracies, share)) if self.accuracies else None

    def has_fleet_of(self, other: RunSummary) -> bool:
        """Whether both runs have the same data set, if known, and the same devices with as many samples each."""
        mine, its = self.settings.get(DATA_SET), other.settings.get(DATA_SET)
        return (None in (mine, its) or mine == its) and _same_fleet(self.fleet, other.fleet)

    @property
    def fleet_words(self) -> str:
        """The fleet in a few words."""
        data, part = self.settings.get(DATA_SET), self.settings.get("partition")
        return ", ".join(str(part) for part in (counted(len(self.fleet), "device"), data, part) if part)

    @property
    def ari(self) -> float | None:
        """The adjusted Rand index of the last assignment against the true groups."""
        last = self.rounds[-1].get("assignment", {})
        both = sorted(set(last) & set(self.groups))
        return ari([self.groups[c] for c in both], [last[c] for c in both]) if both else None


def read_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder. Raises ConfigError where there is none."""
    try:
        told = demo_page.read_events(folder / "metrics.jsonl")
        events = [e for e in told if e.get("event") == "round"]
        config = parse_toml((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        hint = "pass a folder that simulate, serve or demo wrote; one that was interrupted has to be resumed first"
        raise ConfigError(demo_page.no_run(folder, wrong), hint=hint) from wrong
    found = {str(e["run"]): str(e["method"]) for e in events}
    if not found:
        raise ConfigError(f"{folder} holds no round yet", hint="wait for its first round")
    name, groups, own_loss = folder.name or folder.resolve().name, _groups(folder), own_loss_of(folder)
    return [
        RunSummary(
            name=name if len(found) == 1 else f"{name}/{run}",
            folder=folder,
            rounds=demo_page.round_events([e for e in events if str(e["run"]) == run], method),
            settings=read_settings(folder, config, run),
            groups=groups,
            fleet=_fleet(folder, told, run),
            done=next((e["event"] for e in reversed(told) if e.get("event") in {"round", "done"}), "") == "done",
            own_loss=own_loss,
        )
        for run, method in found.items()
    ]


def write_comparison(folders: Sequence[Path], out: Path, *, busy: Callable[[str], None] = lambda _: None) -> Path:
    """The page about these folders' runs; `busy` is told when it is drawn. Raises ConfigError for all without a run."""
    lines, wrong = list[RunSummary](), list[ConfigError]()
    for folder in folders:
        try:
            lines += read_runs(folder)
        except ConfigError as none:  # noqa: PERF203 - all are named
            wrong.append(none)
    if wrong:
        raise ConfigError("; ".join(none.message for none in wrong), hint=wrong[0].hint)
    busy(f"drawing {out}")
    write_output(out, comparison_page(lines).encode())
    return out


def comparison_page(lines: Sequence[RunSummary]) -> str:
    """The whole document."""
    lines = _named_apart(lines)
    shown = [which for which in CURVES if any(v is not None for line in lines for v in line.curve(*which))]
    drawings = [partial(_draw, lines, *which) for which in shown]
    if error := _error(lines):
        drawings = [partial(_draw_error, lines, error)]
    if spread := {line.name: line.accuracies for line in lines if line.accuracies}:
        drawings.insert(1, partial(plots.draw_spread, accuracies=spread, title="Accuracy of each device, last round"))
    height = max(3.4, 1.0 + 0.5 * len(lines))
    curves = "".join(html_figure(plots.to_svg(plots.make_figure(5.6, height, draw))) for draw in drawings)
    body = f"""{_verdict(lines)}
{_table(lines)}
<p class="quiet">Results are those of the last tested round, over the devices' held-out samples: micro
weighs samples alike, macro and unweighted devices. F1 of devices is the mean of the devices' macro F1; pooled F1 is the
macro F1 of all samples. "Centers alone" is the accuracy of the centers as they are exported, in the last round; it
differs where a device is served another model, such as its own. Worst and median device: the last round.</p>
<div class="pair{" three" if len(drawings) == THREE else ""}">{curves}</div>
{_differences(lines)}
<h2>How to see this again</h2>
<pre tabindex="0">{html_text(chr(10).join(dict.fromkeys(_command(line) for line in lines)))}</pre>
{"".join(_details(line) for line in lines)}"""
    return html_page(lines[0].name if len(lines) == 1 else f"{len(lines)} runs", body)


def _named_apart(lines: Sequence[RunSummary]) -> Sequence[RunSummary]:
    """A name stands for one run in all that is drawn: where two are alike, names begin where the paths differ."""
    if len({line.name for line in lines}) == len(lines):
        return lines
    places = [line.folder.resolve().parent for line in lines]
    top = commonpath(places)
    return [replace(line, name=str(up.relative_to(top) / line.name)) for up, line in zip(places, lines, strict=True)]


TABLE_HEAD = (
    "run",
    "method",
    "rounds",
    "devices",
    "centers",
    "accuracy as served, micro",
    "macro",
    "centers alone, micro",
    "F1 of devices, unweighted",
    "F1, pooled",
    "worst device",
    "median device",
    "ARI",
    "sent down / up",
)


def _table(lines: Sequence[RunSummary]) -> str:
    """The columns that some run has a value for; scores that are no shares stand behind the others."""
    scores = dict.fromkeys(name for line in lines for event in line.rounds for name in event.get("metrics", {}))
    scores |= {"loss": None} if _error(lines) == "loss" else {}
    head = (*TABLE_HEAD, *scores)
    rows = [[*_row(line), *(_number(line.result(name, "micro")) for name in scores)] for line in lines]
    kept = [k for k in range(len(head)) if any(row[k] for row in rows)]
    return html_table([head[k] for k in kept], [[row[k] for k in kept] for row in rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _row(line: RunSummary) -> list[str]:
    last = line.rounds[-1]
    down, up = (sum(event["bytes"][way] for event in line.rounds if "bytes" in event) for way in ("down", "up"))
    return [
        line.name,
        line.method,
        f"{last['round']} of {last['of']}",
        str(len(line.fleet) or ""),
        str(len(last.get("per_center", ())) or ""),
        *(format_share(line.result("accuracy", kind)) for kind in ("micro", "macro")),
        format_share(_centers_alone(last)),
        *(format_share(line.result(*which)) for which in (("f1_of_devices", "unweighted"), ("f1_pooled", ""))),
        *(format_share(line.percentile(share)) for share in (0, 50)),
        "" if line.ari is None else f"{line.ari:.3f}",
        f"{down / 1e6:.1f} / {up / 1e6:.1f} MB",
    ]


def _centers_alone(last: Mapping[str, Any]) -> float | None:
    """The accuracy of the centers, which a run that was stopped has not measured."""
    if "centers" not in last and last["round"] < last["of"]:
        return None
    found: float | None = last.get("centers", last)["accuracy"]["micro"]
    return found


def _draw(lines: Sequence[RunSummary], quantity: str, kind: str, axes: Any) -> None:  # noqa: ANN401 - matplotlib's
    title = f"{CURVES[quantity, kind]}, on held-out samples"
    plots.draw_curves(axes, {line.name: line.curve(quantity, kind) for line in lines}, title=title)


def _error(lines: Sequence[RunSummary]) -> str:
    """What runs without accuracy are compared by; empty where nothing was measured, or where nothing compares them.

    A loss of the user's own that all minimised says more than the squared error, as of outputs that are logits.
    """
    if any(line.result("accuracy", "micro") is not None for line in lines):
        return ""
    losses = {line.own_loss for line in lines}
    names = ERRORS if losses == {""} else ERRORS[::-1] if len(losses) == 1 else ERRORS[:1]
    return next((name for name in names if any(line.result(name, "micro") is not None for line in lines)), "")


def _draw_error(lines: Sequence[RunSummary], error: str, axes: Any) -> None:  # noqa: ANN401 - matplotlib's
    title = f"{error.capitalize().replace('_', ' ')}, on held-out samples"
    plots.draw_curves(axes, {line.name: line.curve(error, "micro") for line in lines}, title=title, shares=False)


def _verdict(lines: Sequence[RunSummary]) -> str:
    """The result in one sentence; of runs over different fleets only that they cannot be compared."""
    if any(not lines[0].has_fleet_of(line) for line in lines[1:]):
        fleets = "; ".join(f"{line.name}: {line.fleet_words}" for line in lines)
        then = f"{fleets}. A difference in accuracy can come from the data, so no run is called better."
        return html_verdict("Not comparable: these runs have different fleets.", then, warning=True)
    worst = min(lines, key=lambda line: min(line.accuracies, default=1.0))
    beside = f"The worst device has {min(worst.accuracies):.1%}, in {worst.name}." if worst.accuracies else ""
    return html_verdict(_lead(lines), beside)


def _lead(lines: Sequence[RunSummary]) -> str:
    known = [(found, line) for line in lines if (found := line.result("accuracy", "micro")) is not None]
    if not known:
        return _lead_by_error(lines)
    ranked = sorted(known, key=lambda pair: -pair[0])
    (best, line), *others = ranked
    if not others:
        return f"{line.method} ends at {best:.1%} of the held-out samples."
    second, next_one = others[0]
    both = f"{line.name} ({line.method}) and {next_one.name} ({next_one.method})"
    if best == second:
        lead = f"{both} end equal, at {best:.1%}"
    elif (points := f"{100 * (best - second):.1f}") == "0.0":
        lead = f"{both} end less than 0.1 points apart, at {best:.1%}"
    else:
        lead = f"{line.name} ({line.method}) ends highest, at {best:.1%}"
        lead += f", {points} points above {next_one.name} ({next_one.method})"
    worst, last = others[-1]
    return f"{lead}." if len(others) == 1 else f"{lead}; lowest {last.name} ({last.method}), at {worst:.1%}."


def _lead_by_error(lines: Sequence[RunSummary]) -> str:
    error = _error(lines)
    known = [(found, line) for line in lines if (found := line.result(error, "micro")) is not None]
    if not known:
        tested = any(line.result("loss", "micro") is not None for line in lines)
        return OTHER_LOSSES if tested else "None of these runs was tested."
    words = error.replace("_", " ")
    (least, line), *others = sorted(known, key=lambda pair: pair[0])
    if not others:
        return f"{line.method} ends with a {words} of {least:.4g} on the held-out samples."
    most, last = others[-1]
    lead = f"{line.name} ({line.method}) ends with the least {words}, {least:.4g}"
    return f"{lead}; the greatest has {last.name} ({last.method}), {most:.4g}."


def _differences(lines: Sequence[RunSummary]) -> str:
    """A table of the settings that differ; then, in a line for each, those that are of some of the runs only."""
    settings = {line.name: line.settings for line in lines}
    if len(settings) == 1:
        return ""
    rows = differing_settings(settings.values())
    table = html_table(("setting", *settings), rows) if rows else ""
    others = "".join(f'<p class="quiet">{html_text(told)}</p>' for told in one_sided_settings(settings))
    return f"<h2>Where they differ</h2>{table}{others}" if rows or others else ""


def _details(line: RunSummary) -> str:
    """The center of every device by round; of a simulated run also its other pictures."""
    drawings = _pictures(line.folder)
    if not drawings and any(event.get("assignment") for event in line.rounds):
        history = [event["assignment"] for event in line.rounds]
        height = max(4.0, 0.17 * min(len(history[-1]), 120))
        drawings = {
            "assignment": plots.make_figure(7, height, lambda axes: plots.draw_assignment(axes, history, line.groups))
        }
    wide, narrow = list[str](), list[str]()
    for drawn in drawings.values():
        is_wide = drawn.get_figwidth() > FULL_ROW_INCHES
        (wide if is_wide else narrow).append(html_figure(plots.to_svg(drawn), wide=is_wide))
    settings = html_table(("setting", "value"), [(key, str(value)) for key, value in line.settings.items()])
    pictures = f'{"".join(wide)}<div class="pair">{"".join(narrow)}</div>'
    return f"<h2>{html_text(line.name)}</h2>{pictures}{html_details('Settings', settings)}"


def _pictures(folder: Path) -> dict[str, Any]:
    """What `figures` draws of a simulated run but for its curves; nothing of other runs."""
    if not (folder / FLEET_FILE).is_file():
        return {}
    from emulator.reports import run_figures

    drawn = run_figures.run_pictures(run_figures.read_run_folder(folder))
    del drawn["curves"]
    return {
        name: plots.make_figure(picture.width, picture.height, *picture.panels)
        for name, picture in drawn.items()
        if not isinstance(picture, str)
    }


def _fleet(folder: Path, events: Sequence[Mapping[str, Any]], run: str) -> dict[str, Sequence[int]]:
    """The training samples of the devices of a run: of each class, or their sum; empty where neither is known."""
    if (folder / FLEET_FILE).is_file():
        held = json.loads((folder / FLEET_FILE).read_text(encoding="utf-8"))["devices"]
        return {who: [int(count) for count in one["labels"]] for who, one in held.items()}
    joined = {e["device"]: [int(e["n"])] for e in events if e.get("event") == "joined"}
    trained = ({*e.get("assignment", ()), *e.get("per_device", ())} for e in events if e.get("run") == run)
    return {who: joined.get(who, []) for who in sorted(set[str]().union(*trained))}


def _same_fleet(mine: Mapping[str, Sequence[int]], its: Mapping[str, Sequence[int]]) -> bool:
    """Equal names, and equal samples as far as both sides know them."""
    if mine.keys() != its.keys():
        return False
    pairs = ((mine[who], its[who]) for who in mine)
    return all(not a or not b or (a == b if len(a) == len(b) else sum(a) == sum(b)) for a, b in pairs)


def _groups(folder: Path) -> dict[str, int]:
    """True groups, where the emulator made them."""
    if (folder / FLEET_FILE).is_file():
        held = json.loads((folder / FLEET_FILE).read_text(encoding="utf-8"))["devices"]
        told = {who: one["group"] for who, one in held.items()}
    elif (folder / "summary.json").is_file():
        told = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["groups"]
    elif (folder / GROUPS_FILE).is_file():
        told = json.loads((folder / GROUPS_FILE).read_text(encoding="utf-8"))
    else:
        told = {}
    return {who: int(group) for who, group in told.items() if group is not None}


def _command(line: RunSummary) -> str:
    asked, demo, settings = line.folder / CONFIG_FILE, line.folder / "summary.json", line.settings
    if asked.is_file() and (text := asked.read_text(encoding="utf-8")):
        settings = parse_toml(text)
    if own := repeat_in_python(settings, line.folder):
        return f"# in Python, where your {own[0]} {'are' if own[0] != 'model' else 'is'}:\n{own[1]}"
    if asked.is_file() or ("broker" not in settings and not demo.is_file()):
        file = asked if asked.is_file() else line.folder / "config.toml"
        return shlex.join(("fedcenters-emulator", "simulate", str(file)))
    if demo.is_file():
        return str(json.loads(demo.read_text(encoding="utf-8"))["command"])
    return show_coordinator(line.folder, settings, done=line.done)
