"""report.html: one self-contained page about one run folder, without scripts and without requests.

Reads `metrics.jsonl` (one event per line, written by the coordinator) and `summary.json` (written by the emulator:
the true groups, the engines, the new devices, the command).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.rounds.round_record import upgraded_record
from edge_client.errors import ConfigError, UsageError
from emulator.reports import display_names
from emulator.reports.html_page import (
    format_share,
    html_details,
    html_figure,
    html_page,
    html_table,
    html_text,
    html_tile,
    html_verdict,
)
from emulator.reports.output_files import write_output
from export.command_line import difference_in_words

Event = Mapping[str, Any]
ACCURACY_CAPTION = (
    "Held-out samples of every device, after each round. A center is measured on the devices that use it, the global"
    " model on all of them."
)
SPREAD_CAPTION = "A dot is a device after the last round; the band is the middle 80% of devices, the line their median."
FLEET_CAPTION = (
    "Updates of the classifier layer in the first round, in which every device trained from the same start. The server"
    " sees these points, not the groups. Dots that would cover each other are moved apart."
)
ASSIGNMENT_CAPTION = "Equal colours in a row: the device stayed. The true groups are known to the emulator only."
DEVICE_HEAD = ("device", "true group", "engine", "center", "own center", "global model")
PARITY_HEAD = ("file", "largest logit difference from torch", "values compared")


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """A finished run: `rounds` of the clustered method, `baseline` rounds of the global one, and the summary."""

    rounds: Sequence[Event]
    baseline: Sequence[Event]
    summary: Mapping[str, Any]

    @property
    def result(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.summary["result"]
        return found


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that is still being written is left out."""
    whole = path.read_text(encoding="utf-8")
    return [upgraded_record(json.loads(line)) for line in whole[: whole.rfind("\n") + 1].splitlines() if line]


def no_run(folder: Path, wrong: Exception, kind: str = "run") -> str:
    """Why `folder` holds no run of this kind, from the error of reading its files."""
    if not folder.is_dir():
        return f"{folder} does not exist"
    why = str(wrong)
    if isinstance(wrong, FileNotFoundError):
        why = f"it has no {Path(wrong.filename).name}"
    elif isinstance(wrong, IndexError):
        why = "it has no round yet"
    return f"{folder} holds no {kind}: {why}"


def read_demo_run(folder: Path) -> DemoRun:
    """Read a run folder. Raises ConfigError when it is no finished demo."""
    try:
        events = read_events(folder / "metrics.jsonl")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        hint = "pass a folder that `fedcenters-emulator demo` wrote"
        raise ConfigError(no_run(folder, wrong, "finished run"), hint=hint) from wrong
    return DemoRun(
        rounds=round_events(events, summary["method"]),
        baseline=round_events(events, summary["baseline"]),
        summary=summary,
    )


def check_demo(runs: Sequence[Path]) -> None:
    """Raise UsageError for runs that have no pictures side by side: only one finished demo has."""
    hint = "leave --picture out; `fedcenters-emulator figures RUN` draws a run that `simulate` wrote"
    if len(runs) != 1:
        raise UsageError(f"--picture is of one demo, and here are {len(runs)} runs", hint=hint)
    try:
        read_demo_run(runs[0])
    except ConfigError as wrong:
        raise UsageError(f"--picture is of a demo: {wrong.message}", hint=hint) from wrong


def round_events(events: Iterable[Event], method: str) -> list[Event]:
    """The "round" events of one method, in order; of a round with two events the last counts."""
    found = {e["round"]: e for e in events if e.get("event") == "round" and e["method"] == method}
    return [found[number] for number in sorted(found)]


def accuracy_by_center(event: Event) -> dict[int, float]:
    """Accuracy of each center over the devices that use it; centers without devices are left out."""
    return {k: float(v) for k, v in enumerate(event["per_center"]) if v is not None}


def write_report(folder: Path) -> Path:
    """`folder`/report.html from what lies in the folder."""
    story = read_demo_run(folder)
    out = folder / "report.html"
    write_output(out, demo_page(story).encode())
    return out


def draw_demo_pictures(folder: Path, out: Path) -> None:
    """The three pictures side by side, for a README; the ending of `out` (.png, .svg) is the format."""
    from emulator.reports import plots
    from emulator.reports.output_files import save_figure

    drawn = _drawings(read_demo_run(folder))
    figure = plots.make_figure(15, 4.4, *(drawn[name] for name in ("accuracy", "fleet", "assignment")))
    save_figure(figure, out, dpi=110)


def demo_page(run: DemoRun) -> str:
    """The whole document."""
    from emulator.reports import plots

    result, summary = run.result, run.summary
    size = {"fleet": (4.2, 3.7), "assignment": (4.2, _height(run)), "accuracy": (4.2, 3.3), "spread": (4.2, 3.3)}
    drawn = {name: plots.to_svg(plots.make_figure(*size[name], draw)) for name, draw in _drawings(run).items()}
    body = f"""{html_verdict(_verdict(result), _beside(run))}
<div class="tiles">{"".join(html_tile(value, label) for value, label in _tiles(result))}</div>
<div class="pair">{html_figure(drawn["accuracy"], ACCURACY_CAPTION)}{html_figure(drawn["spread"], SPREAD_CAPTION)}
{html_figure(drawn["fleet"], FLEET_CAPTION)}{html_figure(drawn["assignment"], ASSIGNMENT_CAPTION)}</div>
<h2>New devices</h2>
<p>They never trained. Each compared the centers on its own samples, downloaded one file and ran it.</p>
{html_table(("device", "true group", "center", "right", "file", "accuracy"), _new_rows(summary))}
<h2>How to see this again</h2>
<pre tabindex="0">{html_text(summary["command"])}</pre>
<h2>Details</h2>
{html_details("Devices", html_table(DEVICE_HEAD, _device_rows(run)))}
{html_details("Files beside torch", html_table(PARITY_HEAD, _parity_rows(result)))}
{html_details("Processes", html_table(("process", "devices in it", "resident memory"), _process_rows(summary)))}
{html_details("Versions", f"<p>{html_text(_versions(summary))}</p>")}"""
    return html_page(f"{result['devices']} devices, {result['clusters']} centers", body)


def _height(run: DemoRun) -> float:
    rows = len(run.rounds[-1]["assignment"]) if run.rounds else 0
    return max(3.7, 0.27 * min(rows, 60))


def _drawings(run: DemoRun) -> dict[str, Any]:
    from emulator.reports import plots

    groups, history = run.summary["groups"], [e["assignment"] for e in run.rounds]
    centers = [accuracy_by_center(e) for e in run.rounds]
    own, common = ([e["accuracy"]["micro"] for e in rows] for rows in (run.rounds, run.baseline))
    points = {device: (x, y) for device, (x, y) in run.summary["points"].items()}
    spread = {name: list(e["per_device"].values()) for name, e in _last_rounds(run).items()}
    return {
        "accuracy": lambda axes: plots.draw_accuracy(axes, centers, own, common),
        "spread": lambda axes: plots.draw_spread(axes, spread, title="Accuracy of each device"),
        "fleet": lambda axes: plots.draw_fleet(axes, points, history[-1], groups),
        "assignment": lambda axes: plots.draw_assignment(axes, history, groups),
    }


def _last_rounds(run: DemoRun) -> dict[str, Event]:
    """The newest round of the clustered method and of the global one, by the words of the page."""
    named = (("own center", run.rounds), ("one model", run.baseline))
    return {name: rounds[-1] for name, rounds in named if rounds}


def _verdict(result: Mapping[str, Any]) -> str:
    own, common = result["accuracy"]["centers"], result["accuracy"]["global"]
    points = 100 * (own - common)
    how = f"beat one model for all by {points:.1f} points" if round(points, 1) > 0 else "do not beat one model for all"
    return f"{result['clusters']} centers {how}: {own:.1%} against {common:.1%}"


def _beside(run: DemoRun) -> str:
    """What stands beside the result: how it was made, and the worst device."""
    result, summary = run.result, run.summary
    method, baseline = display_names.method_label(summary["method"]), display_names.method_label(summary["baseline"])
    worst = {name: min(e["per_device"].values()) for name, e in _last_rounds(run).items() if e["per_device"]}
    told = ", ".join(f"{value:.1%} with {name}" for name, value in worst.items())
    return (
        f"{result['devices']} devices of {len(set(summary['groups'].values()))} groups trained over MQTT for"
        f" {result['rounds']} rounds with {method}; the server does not know the groups. One model for all is"
        f" {baseline}. The worst device: {told}."
    )


def _tiles(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    new, moved = result["new_devices"], result["bytes"]
    return [
        (f"{result['accuracy']['centers']:.1%}", "accuracy with centers"),
        (f"{result['accuracy']['global']:.1%}", "accuracy of one global model"),
        (f"{result['ari']:.2f}", "adjusted Rand index of the clusters"),
        (f"{new['right']} of {new['asked']}", "new devices on the right center"),
        (f"{moved['down'] / 1e6:.1f} / {moved['up'] / 1e6:.1f} MB", "sent down / up over MQTT, in the rounds"),
        (f"{result['seconds']:.0f} s", "from the command to the last new device's answer"),
    ]


def _new_rows(summary: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            d["device"],
            d["group"],
            d["center"],
            "yes" if d["right"] else "no",
            display_names.format_label(d["format"]),
            format_share(d["accuracy"]),
        )
        for d in summary["new_devices"]
    ]


def _device_rows(run: DemoRun) -> list[tuple[Any, ...]]:
    if not run.rounds:
        return []
    last, groups, engines = run.rounds[-1], run.summary["groups"], run.summary["engines"]
    common = run.baseline[-1]["per_device"] if run.baseline else {}
    return [
        (
            d,
            groups.get(d, ""),
            display_names.engine_label(engines.get(d, "")),
            k,
            format_share(last["per_device"].get(d)),
            format_share(common.get(d)),
        )
        for d, k in sorted(last["assignment"].items())
    ]


def _parity_rows(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (display_names.format_label(name), difference_in_words(worst), result["parity_values"])
        for name, worst in result["parity"].items()
    ]


def _process_rows(summary: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    used = list(summary["engines"].values())
    return [
        (f"devices that train with {display_names.engine_label(e)}", used.count(e), f"{memory:.0f} MB")
        for e, memory in summary["memory_mb"].items()
    ]


def _versions(summary: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
