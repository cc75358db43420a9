"""The status of a coordinator in words: the lines that `fedcenters-coordinator status` prints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.rounds.round_record import reached_in_words, versions_in_words
from coordinator.storage.status import NO_BROKER, SILENT_AFTER_S
from edge_client.errors import HINT
from edge_client.printable import counted, first_of, printable_line, size_in_words

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_NAMES = 8  # device names in one line
_ALARMING = ("did not count", "no sum", "computes wrongly", " one device: ")  # parts of lines
_GROUPS = {  # of the devices of an exchange, and what they do
    "uploading": "uploading",
    "waiting": "waiting for a credit",
    "refused": "refused",
    "open": "training",
    "unasked": "in line for their task",
}


def status_lines(found: Mapping[str, Any]) -> list[str]:
    """The status as lines of text, the most important first."""
    out = [f"federation {found['federation'] or '(not known yet)'}, epoch {found['epoch']}: {_doing(found)}"]
    out.append(f"{_fleet_in_words(found)}; {_traffic(found['bytes'])}{_since(found)}")
    clients = [f"{name} on {counted(number, 'device')}" for name, number in found["clients"].items()]
    out += [f"  clients: {', '.join(clients)}"] if clients else []
    out += [f"  {cid}: {reason}" for cid, reason in _first_rows(sorted(found["runtimes"].items()))]
    for run in found["runs"]:
        out += _run_lines(run)
    exchange = found["exchange"]
    if exchange is not None:
        updates = exchange.get("updates")
        out.append(
            _updates_in_words(exchange, updates)
            if updates
            else f"now: {exchange['run']} round {exchange['round']}, exchange {exchange['exchange']}: "
            f"{len(exchange['answered'])} of {exchange['wanted']} answers ({exchange['asked']} asked), "
            f"{exchange['left_s']:.0f} s left"
        )
        out += [f"  {word}: {_names(exchange[group])}" for group, word in _GROUPS.items() if exchange.get(group)]
    out.append(f"the disk of the run folder has {size_in_words(found['free_bytes'])} left")
    if found["served"]:
        out.append(f"{counted(found['served'], 'device')} fetched a center")
    if found["error"]:
        told, _, hint = found["error"].rpartition(HINT)
        out += [f"last error: {told}", f"  hint: {hint}"] if told else [f"last error: {hint}"]
    return [printable_line(line) for line in (*out, f"fedcenters {found['version']}")]


def _run_lines(run: Mapping[str, Any]) -> list[str]:
    """One run's progress, and under it what went wrong."""
    scores = reached_in_words(run)
    reached = f", {scores}" if scores else ""
    told = run["asynchronous"]
    each = "round" if told is None else "record"
    took = "" if run["seconds"] is None else f", last {each} {run['seconds']:.1f} s, {_traffic(run['bytes'])}"
    updates = "" if told is None else f"{run['updates']} updates, {versions_in_words(told['versions'])}, "
    sizes = "" if run["devices_per_center"] is None else f", devices per center {run['devices_per_center']}"
    out = [f"{run['name']} ({run['method']}): {updates}{each} {run['round']}/{run['of']}{reached}{sizes}{took}"]
    out += _secure_in_words(run["secure"])
    out += _lone_in_words(run["devices_per_center"])
    out += [f"  {cid} did not count: {reason}" for cid, reason in _first_rows(sorted(run["refused"].items()))]
    out += [f"  late: {_names(run['late'])}"] if run["late"] else []
    return out


def _updates_in_words(exchange: Mapping[str, Any], updates: Mapping[str, Any]) -> str:
    """A run without rounds: who works, and what has come since the last record."""
    versions = ", ".join(map(str, updates["versions"]))
    asked = updates.get("test")
    test = "" if asked is None else f"; test: {asked['answered']} of {asked['wanted']} answers"
    dropped = [f"{updates[key]} {key}" for key in ("stale", "expired") if updates[key]]
    return (
        f"now: {exchange['run']} without rounds: {exchange['asked']} devices at work "
        f"(of at most {updates['concurrency']}), {updates['counted']} of {exchange['wanted']} updates"
        f"{''.join(f', {each}' for each in dropped)}; versions of the centers: {versions}{test}"
    )


def _secure_in_words(secure: Mapping[str, Any] | None) -> list[str]:
    if secure is None:
        return []
    seen = f"  secure = {secure['mode']}: the coordinator sees {secure['sees']}"
    return [seen, *(f"  no sum in the last round: {reason}" for reason in secure.get("failed", ()))]


def _lone_in_words(sizes: Sequence[int] | None) -> list[str]:
    """A warning of centers with a single device; none where that is each device's own."""
    lone = [k for k, size in enumerate(sizes or ()) if size == 1]
    if not lone or max(sizes or ()) == 1:
        return []
    few = f"center {lone[0]} has" if len(lone) == 1 else f"{len(lone)} centers ({first_of(lone, MAX_NAMES)}) have"
    return [f"  {few} one device: a center learns from its own devices only"]


def _fleet_in_words(found: Mapping[str, Any]) -> str:
    """Who is connected, and who trains: not a phone before *Take part*, nor a device that only asks for a center."""
    does = "took" if found["done"] else "takes" if found["devices"] == 1 else "take"
    takes_part = f"{found['devices']} {does} part in the training"
    if found["phase"] in ("stopped", NO_BROKER):
        return takes_part
    few = found["without_samples"]
    without = f" ({few} not in the training)" if few else ""
    if not found["devices"] and (ready := found["connected"] - few):  # they are enrolled when the first round begins
        what = "the training program to be compiled" if found["phase"] == "compiling" else "the first round"
        takes_part = f"{ready} wait{'s' * (ready == 1)} for {what}"
    return f"{counted(found['connected'], 'device')} connected{without}, {takes_part}"


def render_status(found: Mapping[str, Any]) -> RenderableType:
    """The lines of `status_lines` with a frame and colours, for a terminal."""
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    for number, line in enumerate(status_lines(found)):
        bad = any(word in line for word in _ALARMING) or line.startswith("last error")
        text.append(line + "\n", style="bold" if number == 0 else "red" if bad else "")
    text.rstrip()
    return Panel(text, title="fedcenters-coordinator", title_align="left", expand=False)


def _doing(found: Mapping[str, Any]) -> str:
    if found["phase"] in ("stopped", "not started") or found["silent_s"] <= SILENT_AFTER_S:
        phase = found["phase"]
        if phase == "waiting for devices" and "here" in found:
            phase = f"waiting: {found['here']} of {found['needed']} devices"
        part = found.get("working_on", "") if phase == "compiling" else ""
        part = f" the training program: {part}" if part else ""
        return f"{phase}{part}{', all runs are done' if found['done'] else ''}"
    return f"no sign of life for {found['silent_s']:.0f} s; it was {found['phase']}"


def _traffic(count: Mapping[str, int]) -> str:
    return f"{size_in_words(count['down'])} down, {size_in_words(count['up'])} up"


def _since(found: Mapping[str, Any]) -> str:
    """From when on the traffic is counted: the clock time, with the date where that is another day's."""
    if not found["since_ms"]:
        return ""
    start, now = (time.localtime(found[key] / 1000) for key in ("since_ms", "unix_ms"))
    same_day = start[:3] == now[:3]
    return f" since the coordinator's start at {time.strftime('%H:%M' if same_day else '%Y-%m-%d %H:%M', start)}"


def _names(names: Sequence[str]) -> str:
    return f"{len(names)} ({first_of(names, MAX_NAMES)})"


def _first_rows(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    rest = len(rows) - MAX_NAMES
    return [*rows[:MAX_NAMES], *([(f"{rest} more", "see --json")] if rest > 0 else [])]
