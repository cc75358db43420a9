"""report.html: one self-contained page about one run folder, without scripts and without requests.

Reads `metrics.jsonl` (one event per line, written by the coordinator) and `summary.json` (written by the emulator:
the true groups, the engines, the new devices, the command).
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError
from emulator.reports import display_names

Event = Mapping[str, Any]
CSS = """
:root { color-scheme: light; font: 16px/1.5 system-ui, sans-serif; color: #111827; background: #f9fafb }
body { max-width: 76rem; margin: 0 auto; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.7rem; margin: 0 0 .3rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
.lead { font-size: 1.08rem; color: #374151; max-width: 60rem; margin: 0 0 1.4rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .7rem }
.tile, figure { background: #fff; border: 1px solid #e5e7eb; border-radius: .6rem }
.tile { padding: .7rem .9rem } .tile b { display: block; font-size: 1.45rem; line-height: 1.3 }
.tile span { color: #4b5563; font-size: .85rem }
figure { margin: 1rem 0 0; padding: 1rem } figure svg { width: 100%; height: auto; display: block }
figcaption { color: #4b5563; font-size: .88rem; margin-top: .5rem }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; background: #fff; font-size: .92rem; width: 100% }
th, td { border: 1px solid #e5e7eb; padding: .3rem .6rem; text-align: left } th { background: #f3f4f6 }
code, pre { font: .88rem/1.5 ui-monospace, monospace } pre { background: #111827; color: #f9fafb; padding: .9rem;
border-radius: .6rem; overflow-x: auto }
"""


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
    return [json.loads(line) for line in whole[: whole.rfind("\n") + 1].splitlines() if line]


def read_demo_run(folder: Path) -> DemoRun:
    """Read a run folder. Raises ConfigError when it is no finished demo."""
    try:
        events = read_events(folder / "metrics.jsonl")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise ConfigError(
            f"{folder} holds no finished run: {wrong}", hint="pass a folder that `fedcenters-emulator demo` wrote"
        ) from wrong
    return DemoRun(
        rounds=round_events(events, summary["method"]),
        baseline=round_events(events, summary["baseline"]),
        summary=summary,
    )


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
    out.write_text(demo_page(story), encoding="utf-8")
    return out


def draw_demo_pictures(folder: Path, out: Path) -> None:
    """The three pictures side by side, for a README; the ending of `out` (.png, .svg) is the format."""
    from emulator.reports import plots

    accuracy, fleet, assignment = _drawings(read_demo_run(folder))
    plots.make_figure(15, 4.4, accuracy, fleet, assignment).savefig(out, dpi=110)


def demo_page(run: DemoRun) -> str:
    """The whole document."""
    from emulator.reports import plots

    accuracy, fleet, assignment = (plots.to_svg(plots.make_figure(*size, draw)) for size, draw in _sized(run))
    result, summary = run.result, run.summary
    title = f"{result['devices']} devices, {result['clusters']} centers"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedcenters: {html_text(title)}</title><style>{CSS}</style></head><body>
<h1>{html_text(title)}</h1>
<p class="lead">{html_text(_lead(result, summary))}</p>
<div class="tiles">{"".join(_tile(value, label) for value, label in _tiles(result))}</div>
<figure>{accuracy}<figcaption>Held-out samples of every device, after each round. A center is measured on the devices
that use it, the global model on all of them.</figcaption></figure>
<div class="pair"><figure>{fleet}<figcaption>Updates of the classifier layer in the first round, in
which every device trained from the same start. The server sees these points, not the groups.</figcaption></figure>
<figure>{assignment}<figcaption>Equal colours in a row: the device stayed. The true groups are known to the emulator
only.</figcaption></figure></div>
<h2>New devices</h2>
<p>They never trained. Each compared the centers on its own samples, downloaded one file and ran it.</p>
{html_table(("device", "true group", "center", "right", "file", "accuracy"), _new_rows(summary))}
<h2>Devices</h2>
{html_table(("device", "true group", "engine", "center", "own center", "global model"), _device_rows(run))}
<h2>Processes</h2>
{html_table(("process", "devices in it", "resident memory"), _process_rows(summary))}
<h2>How to see this again</h2>
<pre>{html_text(summary["command"])}</pre>
<p>{html_text(_versions(summary))}</p>
</body></html>
"""


def _sized(run: DemoRun) -> list[tuple[tuple[float, float], Any]]:
    accuracy, fleet, assignment = _drawings(run)
    rows = len(run.rounds[-1]["assignment"]) if run.rounds else 0
    height = max(4.0, 0.27 * min(rows, 60))
    return [((11, 3.8), accuracy), ((6, height), fleet), ((6, height), assignment)]


def _drawings(run: DemoRun) -> tuple[Any, Any, Any]:
    from emulator.reports import plots

    groups, history = run.summary["groups"], [e["assignment"] for e in run.rounds]
    centers = [accuracy_by_center(e) for e in run.rounds]
    own, common = ([e["accuracy"]["micro"] for e in rows] for rows in (run.rounds, run.baseline))
    points = {device: (x, y) for device, (x, y) in run.summary["points"].items()}
    return (
        lambda axes: plots.draw_accuracy(axes, centers, own, common),
        lambda axes: plots.draw_fleet(axes, points, history[-1], groups),
        lambda axes: plots.draw_assignment(axes, history, groups),
    )


def _lead(result: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    own, common = result["accuracy"]["centers"], result["accuracy"]["global"]
    groups = len(set(summary["groups"].values()))
    method, baseline = display_names.method_label(summary["method"]), display_names.method_label(summary["baseline"])
    return (
        f"{result['devices']} devices trained over MQTT for {result['rounds']} rounds with {method}. The"
        f" server does not know that they belong to {groups} groups. With the center of its cluster a device is right"
        f" {own:.1%} of the time; one model for all ({baseline}) reaches {common:.1%}."
    )


def _tiles(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    new, moved = result["new_devices"], result["bytes"]
    return [
        (f"{result['accuracy']['centers']:.1%}", "accuracy with centers"),
        (f"{result['accuracy']['global']:.1%}", "accuracy of one global model"),
        (f"{result['ari']:.2f}", "adjusted Rand index of the clusters"),
        (f"{new['right']} of {new['asked']}", "new devices on the right center"),
        *(
            (
                f"{worst:.0e}" if worst else "0",
                f"{display_names.format_label(name)}: largest logit difference from torch",
            )
            for name, worst in result["parity"].items()
        ),
        (f"{moved['down'] / 1e6:.1f} / {moved['up'] / 1e6:.1f} MB", "sent down / up over MQTT"),
        (f"{result['seconds']:.0f} s", "for everything"),
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


def _process_rows(summary: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    used = list(summary["engines"].values())
    return [
        (f"devices that train with {display_names.engine_label(e)}", used.count(e), f"{memory:.0f} MB")
        for e, memory in summary["memory_mb"].items()
    ]


def format_share(value: float | None) -> str:
    """0.5 -> 50.0%; "" for None."""
    return "" if value is None else f"{value:.1%}"


def _versions(summary: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in summary["versions"].items())


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{html_text(value)}</b><span>{html_text(label)}</span></div>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table of texts."""
    top = "".join(f"<th>{html_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def html_text(value: object) -> str:
    """The text, escaped for HTML."""
    return html.escape(str(value))
