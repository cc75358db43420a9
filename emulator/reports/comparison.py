"""A page that compares runs: curves, a table of results, their different settings, the command that repeats each.

Reads what `simulate`, `serve` and `demo` leave in their folders: metrics.jsonl and config.toml, of a simulated run also
the numbers of its pictures. The page is self-contained HTML with SVG figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds.metrics import ari
from edge_client.errors import ConfigError
from edge_client.toml_files import parse_toml
from emulator.config import CONFIG_FILE, GROUPS_FILE
from emulator.reports import demo_page, display_names, plots

CURVES = (("accuracy", "micro"), ("f1", "macro"))
FULL_ROW_INCHES = 8  # inches: a picture that wide has a row of its own
LAST_ROUNDS = 3  # rounds whose mean is a run's result, as the papers' tables have it


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of one folder: its rounds in order, the folder's settings in flat keys, and true groups if known."""

    name: str
    folder: Path
    rounds: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    groups: Mapping[str, int]

    @property
    def method(self) -> str:
        return display_names.method_label(str(self.rounds[0]["method"]))

    def curve(self, quantity: str, kind: str) -> list[float | None]:
        return [event.get(quantity, {}).get(kind) for event in self.rounds]

    def result(self, quantity: str, kind: str) -> float | None:
        """The mean of the last three rounds that were tested."""
        known = [value for value in self.curve(quantity, kind) if value is not None][-LAST_ROUNDS:]
        return float(np.mean(known)) if known else None

    @property
    def ari(self) -> float | None:
        """The adjusted Rand index of the last assignment against the true groups."""
        last = self.rounds[-1].get("assignment", {})
        both = sorted(set(last) & set(self.groups))
        return ari([self.groups[c] for c in both], [last[c] for c in both]) if both else None


def read_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder. Raises ConfigError where there is none."""
    try:
        events = [e for e in demo_page.read_events(folder / "metrics.jsonl") if e.get("event") == "round"]
        config = parse_toml((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        hint = "pass a folder that simulate, serve or demo wrote; one that was interrupted has to be resumed first"
        raise ConfigError(f"{folder} holds no run: {wrong}", hint=hint) from wrong
    found = {str(e["run"]): str(e["method"]) for e in events}
    if not found:
        raise ConfigError(f"{folder} holds no round yet", hint="wait for its first round")
    groups = _groups(folder)
    return [
        RunSummary(
            name=folder.name if len(found) == 1 else f"{folder.name}/{run}",
            folder=folder,
            rounds=demo_page.round_events([e for e in events if str(e["run"]) == run], method),
            settings=_flat(config, run),
            groups=groups,
        )
        for run, method in found.items()
    ]


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """The page about these folders' runs."""
    lines = [line for folder in folders for line in read_runs(folder)]
    out.write_text(comparison_page(lines), encoding="utf-8")
    return out


def comparison_page(lines: Sequence[RunSummary]) -> str:
    """The whole document."""
    title = lines[0].name if len(lines) == 1 else f"{len(lines)} runs"
    shown = [which for which in CURVES if any(v is not None for line in lines for v in line.curve(*which))]
    drawings = [partial(_draw, lines, *which) for which in shown]
    curves = f"<figure>{plots.to_svg(plots.make_figure(13, 4, *drawings))}</figure>" if drawings else ""
    head = ("setting", *(line.name for line in lines))
    differing = f"<h2>Where they differ</h2>{demo_page.html_table(head, rows)}" if (rows := _differing(lines)) else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedcenters: {demo_page.html_text(title)}</title><style>{demo_page.CSS}</style></head><body>
<h1>{demo_page.html_text(title)}</h1>
<p class="lead">{demo_page.html_text(_lead(lines))}</p>
{demo_page.html_table(TABLE_HEAD, [_row(line) for line in lines])}
<p>Results are means of the last {LAST_ROUNDS} tested rounds, over the devices' held-out samples: micro weighs samples
alike, macro devices.</p>
{curves}
{differing}
{"".join(_details(line) for line in lines)}
<h2>How to see this again</h2>
<pre>{demo_page.html_text(chr(10).join(dict.fromkeys(_command(line) for line in lines)))}</pre>
</body></html>
"""


TABLE_HEAD = (
    "run",
    "method",
    "rounds",
    "devices",
    "centers",
    "accuracy, micro",
    "macro",
    "F1, macro",
    "ARI",
    "sent down / up",
)


def _row(line: RunSummary) -> list[str]:
    last = line.rounds[-1]
    down, up = (sum(event["bytes"][way] for event in line.rounds if "bytes" in event) for way in ("down", "up"))
    return [
        line.name,
        line.method,
        f"{last['round']} of {last['of']}",
        str(len(last.get("per_device", ())) or ""),
        str(len(last.get("per_center", ())) or ""),
        *(
            demo_page.format_share(line.result(*which))
            for which in (("accuracy", "micro"), ("accuracy", "macro"), ("f1", "macro"))
        ),
        "" if line.ari is None else f"{line.ari:.3f}",
        f"{down / 1e6:.1f} / {up / 1e6:.1f} MB",
    ]


def _draw(lines: Sequence[RunSummary], quantity: str, kind: str, axes: Any) -> None:  # noqa: ANN401 - matplotlib's
    title = f"{'Accuracy' if quantity == 'accuracy' else 'F1'} on held-out samples, {kind}"
    plots.draw_curves(axes, {line.name: line.curve(quantity, kind) for line in lines}, title=title)


def _lead(lines: Sequence[RunSummary]) -> str:
    known = [(found, line) for line in lines if (found := line.result("accuracy", "micro")) is not None]
    if not known:
        return "None of these runs was tested."
    best, line = max(known, key=lambda pair: pair[0])
    if len(known) == 1:
        return f"{line.method} ends at {best:.1%} of the held-out samples."
    worst, other = min(known, key=lambda pair: pair[0])
    return f"{line.name} ({line.method}) ends highest, at {best:.1%}; {other.name} ({other.method}) at {worst:.1%}."


def _details(line: RunSummary) -> str:
    """The center of every device by round; of a simulated run also its other pictures."""
    drawings = _pictures(line.folder)
    if not drawings and any(event.get("assignment") for event in line.rounds):
        history = [event["assignment"] for event in line.rounds]
        height = max(4.0, 0.17 * min(len(history[-1]), 120))
        drawings = {
            "assignment": plots.make_figure(7, height, lambda axes: plots.draw_assignment(axes, history, line.groups))
        }
    shown = {drawn: f"<figure>{plots.to_svg(drawn)}</figure>" for drawn in drawings.values()}
    wide, narrow = (
        "".join(t for d, t in shown.items() if bool(d.get_figwidth() > FULL_ROW_INCHES) is w) for w in (True, False)
    )
    settings = demo_page.html_table(("setting", "value"), [(key, str(value)) for key, value in line.settings.items()])
    folded = f"<details><summary>Settings</summary>{settings}</details>"
    return f'<h2>{demo_page.html_text(line.name)}</h2>{wide}<div class="pair">{narrow}</div>{folded}'


def _pictures(folder: Path) -> dict[str, Any]:
    """What `figures` draws of a simulated run but for its curves; nothing of other runs."""
    if not (folder / "fleet.json").is_file():
        return {}
    from emulator.reports import run_figures

    drawn = run_figures.run_pictures(run_figures.read_run_folder(folder))
    del drawn["curves"]
    return {
        name: plots.make_figure(picture.width, picture.height, *picture.panels)
        for name, picture in drawn.items()
        if not isinstance(picture, str)
    }


def _differing(lines: Sequence[RunSummary]) -> list[list[str]]:
    """Settings that are not the same in all runs."""
    keys = sorted({key for line in lines for key in line.settings})
    rows = [[key, *(str(line.settings.get(key, "")) for line in lines)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(config: Mapping[str, Any], run: str) -> dict[str, Any]:
    """A simulated run's keys as they are; of a coordinator's, its own and those of its [[runs]] table."""
    runs = [row for row in config.get("runs", ()) if row.get("name", row.get("method")) == run]
    model = {f"model.{key}": value for key, value in config.get("model", {}).items()} if runs else {}
    plain = {key: value for key, value in config.items() if key != "runs" and (key != "model" or not runs)}
    return plain | model | (runs[0] if runs else {})


def _groups(folder: Path) -> dict[str, int]:
    """True groups, where the emulator made them."""
    if (folder / "fleet.json").is_file():
        held = json.loads((folder / "fleet.json").read_text(encoding="utf-8"))["devices"]
        told = {who: one["group"] for who, one in held.items()}
    elif (folder / "summary.json").is_file():
        told = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["groups"]
    elif (folder / GROUPS_FILE).is_file():
        told = json.loads((folder / GROUPS_FILE).read_text(encoding="utf-8"))
    else:
        told = {}
    return {who: int(group) for who, group in told.items() if group is not None}


def _command(line: RunSummary) -> str:
    if (line.folder / CONFIG_FILE).is_file():
        return f"fedcenters-emulator simulate {line.folder / CONFIG_FILE}"
    kind = "fedcenters-coordinator serve" if "broker" in line.settings else "fedcenters-emulator simulate"
    return f"{kind} {line.folder / 'config.toml'}"
