"""Tables of results on stdout, coloured where the terminal supports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from coordinator.rounds.round_record import is_squared_error
from coordinator.rounds.update_validation import FAR_UPDATES
from edge_client.printable import counted
from emulator.reports import display_names
from emulator.reports.display_names import signed
from export.command_line import difference_in_words

NOT_ALL = 0.999  # the largest share with one decimal that is less than all


def demo_table(result: Mapping[str, Any], new_devices: list[dict[str, Any]]) -> None:
    """The results of the demo, and the centers of the new devices."""
    console = Console(highlight=False)
    console.print()
    console.print(_pairs(_demo_rows(result)))
    if new_devices:
        table = Table("new device", "true group", "center", "file", "accuracy", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in new_devices:
            center = f"{row['center']} {'ok' if row['right'] else 'WRONG'}"
            table.add_row(
                row["device"],
                str(row["group"]),
                center,
                display_names.format_label(row["format"]),
                share(row["accuracy"]),
            )
        console.print(table)


def _demo_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    engines = ", ".join(f"{count} {name}" for name, count in result["engines"].items())
    worst = result["parity"].items()
    parity = ", ".join(f"{display_names.format_label(name)} {difference_in_words(each)}" for name, each in worst)
    new, moved = result["new_devices"], result["bytes"]
    return [
        ("devices", f"{result['devices']} ({engines})"),
        (
            "centers",
            f"{result['clusters']}, after {result['rounds']} rounds of {display_names.method_label(result['method'])}",
        ),
        ("clusters against true groups", f"adjusted Rand index {result['ari']:.3f}"),
        ("accuracy, own center", f"{result['accuracy']['centers']:.1%}"),
        ("accuracy, one global model", f"{result['accuracy']['global']:.1%}"),
        ("new devices on the right center", f"{new['right']} of {new['asked']}, accuracy {share(new['accuracy'])}"),
        ("largest logit difference from torch", f"{parity} of {result['parity_values']} values"),
        ("sent in the rounds", f"{moved['down'] / 1e6:.1f} MB down, {moved['up'] / 1e6:.1f} MB up"),
        ("command to last new device's answer", f"{result['seconds']:.0f} s"),
    ]


def simulate_table(result: Mapping[str, Any]) -> None:
    """The results of a simulated run, in virtual time or over MQTT."""
    Console(highlight=False).print(_pairs(summary_rows(result)))


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The results of a simulated run in words: what the command prints, and what a result is shown as in Python."""
    method, size = result["method"].removeprefix("__main__:"), counted(result["devices"], "device")
    virtual = f"; {result['virtual_seconds']:.0f} s in the devices' own time" if "virtual_seconds" in result else ""
    return [
        ("method", f"{method}, {counted(result['rounds'], 'round')}, {size}"),
        ("clusters", f"{result['clusters']}{_empty(result['clusters_without_devices'])}{_rand(result['ari'])}"),
        *_without_center(result),
        *_scores(result),
        *([("did not count in the last round", _refused(result["refused"]))] if "refused" in result else []),
        *_unanswered(result),
        *([("privacy", _privacy(result["privacy"]))] if "privacy" in result else []),
        *([("the server sees", result["secure"]["sees"])] if "secure" in result else []),
        *((name, _number(value)) for name, value in result.get("metrics", {}).items()),
        ("time", f"{result['seconds']:.1f} s{virtual}"),
        *([("run", str(result["run"]))] if result["run"] is not None else []),
    ]


def _privacy(spent: Mapping[str, Any]) -> str:
    """What the centers cost, as `privacy_spent` says: with all its decimals, which are rounded up."""
    given = "; given the center of each device" if spent["given_assignments"] else ""
    releases = counted(spent["releases"], "release")
    return f"epsilon {spent['epsilon']} for delta {spent['delta']:g}, {releases}{given}"


def _number(value: float | None) -> str:
    """A dash where no device has measured it, as where each number is beyond float32."""
    return "-" if value is None else f"{value:.4g}"


def _refused(reasons: Mapping[str, int]) -> str:
    told = ", ".join(f"{counted(count, 'answer')} ({why})" for why, count in reasons.items())
    far = reasons.keys() & {"rejected", "not_finite"}
    return f"{told}; {FAR_UPDATES}" if far else told


def _unanswered(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tasks of the last round without an answer, as of devices that drop out or are too slow for the deadline."""
    answered = result.get("answered")
    if answered in (None, 1):
        return []
    return [("answered in the last round", f"{share(min(answered, NOT_ALL))} of the tasks")]


def _without_center(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    bare = result.get("devices_without_center")
    return [("without a center", f"{bare} of the devices; served as new ones")] if bare else []


def _empty(centers: int | None) -> str:
    return f", {centers} without devices" if centers else ""


def _scores(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Accuracy, of the centers too where devices are served other models, and F1."""
    served, centers = result["accuracy"], result["centers_accuracy"]
    pairs = {"accuracy": served} if centers == served else {"accuracy as served": served, "of the centers": centers}
    devices = result["f1_of_devices"]
    if served["micro"] is None:  # targets that are no classes
        loss = result.get("loss")
        shown = loss is not None and not is_squared_error(loss, result.get("metrics", {}))
        return [("loss", _number(loss))] if shown else []
    return [
        *((f"{label} (micro, macro)", f"{share(one['micro'])} {share(one['macro'])}") for label, one in pairs.items()),
        ("F1 of devices (weighted, unweighted)", f"{share(devices['weighted'])} {share(devices['unweighted'])}"),
        ("F1, pooled", share(result["f1_pooled"])),
    ]


def choice_table(result: Mapping[str, Any]) -> None:
    """The result of each number of centers, and the recommended one."""
    console, table = Console(highlight=False), Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("centers", "in use", "accuracy", "silhouette", "distance within", "recommended by"):
        table.add_column(column, justify="left" if column == "recommended by" else "right")
    for row in result["trials"]:
        by = ", ".join(name for name, k in result["recommended"].items() if k == row["clusters"])
        numbers = f"{row['silhouette']:.3f}", f"{row['distance']:.4g}"
        table.add_row(str(row["clusters"]), str(row["used"]), share(row["accuracy"]), *numbers, by)
    console.print(table)
    console.print(f"take {result['clusters']} centers, by {result['by']}")


def differences_table(result: Mapping[str, Any]) -> None:
    """Paired differences between rows of a table, by data and measure. Bold: the interval leaves out zero."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["comparisons"]:
        groups.setdefault(f"{row['data']}, {row['title']}", []).append(row)
    console = Console(highlight=False)
    for title, rows in groups.items():
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("row", "less", "difference", "95 % interval", "seeds"):
            table.add_column(column, justify="left" if column in ("row", "less") else "right")
        for row in rows:
            difference = "-" if row["difference"] is None else signed(row["difference"])
            between = "none" if row["interval"] is None else " to ".join(map(signed, row["interval"]))
            style = "bold" if row["clear"] else None
            table.add_row(row["first"], row["second"], difference, between, str(row["n"]), style=style)
        console.print(table)


def share(value: float | None) -> str:
    """0.5 -> 50.0%; a dash for None."""
    return "-" if value is None else f"{value:.1%}"


def _rand(ari: float | None) -> str:
    return "" if ari is None else f", adjusted Rand index {ari:.3f}"


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
