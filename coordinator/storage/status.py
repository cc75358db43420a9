"""The status of a coordinator that runs or has run: its rounds, the state of each device, and its errors.

The coordinator writes `status.json` into its run folder every two seconds. Everything else is read from its database,
read-only, so that the status of a finished run can be read too. No other file is opened and no folder is listed: a run
folder may hold a file for each device and round. Of the events only those are read that are shown: the database has an
index of their kinds and runs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.rounds.round_record import SCORES, center_sizes, reached_in_words, upgraded_record
from coordinator.storage.event_log import COUNTED_UPDATES
from coordinator.storage.key_value_store import DONE_FACT, REVOKED_FACT, SETTINGS_FACT
from coordinator.storage.run_reader import NoRunYet, open_database
from edge_client import __version__
from edge_client.errors import ConfigError
from edge_client.transport.blobs import open_beside

STATUS_FILE = "status.json"
WRITE_INTERVAL_S = 2.0
SILENT_AFTER_S = 15.0  # a file that is older means that the coordinator has stopped, or is busy with a long step
# queries that the indices events_by_kind and scored_rounds answer
_LAST_ROUND = """
select line from events where json_extract(line, '$.event') = 'round' and json_extract(line, '$.run') = ?
order by id desc limit 1"""
_SCORED_ROUNDS = """
select line from events where json_extract(line, '$.event') = 'round' and json_extract(line, '$.run') = ?
and (coalesce(json_extract(line, '$.accuracy.micro'), json_extract(line, '$.loss.micro'),
json_extract(line, '$.metrics')) is not null) = true order by id desc"""
_SERVED = """
select count(distinct json_extract(line, '$.device')) from events where json_extract(line, '$.event') = 'served'"""
_TAKING_PART = """
select (select count(*) from devices) - count(*) from devices where cid in (select value from json_each(?))"""
_ERROR = """
select (select json_extract(line, '$.message') from events where json_extract(line, '$.event') = 'error' and id > (
    select coalesce(max(id), 0) from events where json_extract(line, '$.event') = 'start') order by id desc limit 1)"""
NO_BROKER = "no broker"  # the phase while a coordinator waits for a lost broker


class StatusWriter:
    """Writes `folder`/status.json. A full disk leaves the old file and raises nothing."""

    def __init__(self, folder: Path) -> None:
        self._path, self.due_s = folder / STATUS_FILE, 0.0

    def write(self, now_s: float, phase: str, numbers: Mapping[str, Any]) -> None:
        """Replace the file."""
        self.due_s = now_s + WRITE_INTERVAL_S
        beside = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            with open_beside(beside) as file:
                file.write(json.dumps({"phase": phase, **numbers}).encode())
            beside.replace(self._path)


def run_folder_of(path: Path) -> Path:
    """The run folder of a configuration file; a folder is returned as it is.

    Raises ConfigError for a path that does not exist: a run's folder that `serve` makes, or no file.
    """
    if path.is_dir():
        return path
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist",
            hint="the folder of a run is made by `serve` when it starts; before, pass a coordinator's TOML file",
        )
    from coordinator.config import read_config

    return read_config(path).folder


def read_status(folder: Path) -> dict[str, Any]:
    """The enrolled fleet, the rounds of each run, the newest error, and the current exchange, as JSON values."""
    with open_database(folder) as db:
        facts = dict(db.execute("select key, value from meta").fetchall())
        gone = "[]" if DONE_FACT in facts else facts.get(REVOKED_FACT, "[]")  # revoked after the end: it took part
        devices = db.execute(_TAKING_PART, (gone,)).fetchone()[0]
        query = "select name, runs.run, max(round) from runs left join states on states.run = runs.run group by name"
        rounds = {name: (run, number) for name, run, number in db.execute(query).fetchall()}
        settings = json.loads(facts.get(SETTINGS_FACT, "{}"))
        runs = {run["name"]: run for run in settings.get("runs", [])}
        newest = {name: _newest_rounds(db, name) for name in runs}
        served, error = (db.execute(query).fetchone()[0] for query in (_SERVED, _ERROR))
        refused = {name: _refusals(db, run) for name, (run, _) in rounds.items()}
        live = _live(folder)
        exchange = _without_refused(db, live["exchange"])
    return {
        "version": __version__,
        "free_bytes": shutil.disk_usage(folder).free,
        "devices": devices,
        **live,
        "federation": settings.get("federation") or live.get("federation"),
        "epoch": int(facts.get("epoch", 0)),
        "exchange": _named(exchange, {run: name for name, (run, _) in rounds.items()}),
        "runs": [
            {
                "name": name,
                "method": run["method"],
                "round": rounds.get(name, ("", 0))[1] or 0,
                "of": run["rounds"],
                **_of_newest_rounds(newest[name], run),
                **refused.get(name, {"refused": {}, "late": []}),
            }
            for name, run in runs.items()
        ],
        "served": served,
        "done": DONE_FACT in facts,
        "error": error,
    }


@dataclass(frozen=True, kw_only=True)
class _NewestRounds:
    """Of one run: its last round, the last one with scores, and the updates that counted where it has no rounds."""

    last: Mapping[str, Any]
    tested: Mapping[str, Any]
    updates: int | None


def _newest_rounds(db: Any, name: str) -> _NewestRounds:  # noqa: ANN401 - as `_refusals`
    """Those with scores are read from the newest on, as far as the first that tells one; most runs need one."""
    last = upgraded_record(json.loads(next(db.execute(_LAST_ROUND, (name,)), ("{}",))[0]))
    scored = (upgraded_record(json.loads(line)) for (line,) in db.execute(_SCORED_ROUNDS, (name,)))
    tested = next(filter(reached_in_words, scored), last)
    updates = db.execute(COUNTED_UPDATES, (name,)).fetchone()[0] if last.get("asynchronous") else None
    return _NewestRounds(last=last, tested=tested, updates=updates)


def _of_newest_rounds(newest: _NewestRounds, run: Mapping[str, Any]) -> dict[str, Any]:
    """Of one run's status what its last round and its last scores tell."""
    return {
        "secure": newest.last.get("secure") or _secure_setting(run),
        **{key: newest.last.get(key) for key in ("bytes", "seconds", "asynchronous")},
        **{key: newest.tested.get(key) for key in (*SCORES, "loss")},
        "devices_per_center": _devices_per_center(newest.last),
        "updates": newest.updates,
        "metrics": _averages(newest.tested),
    }


def newest_rounds(folder: Path) -> list[Mapping[str, Any]]:
    """The events of the last round of each run, each behind the one with the run's newest scores."""
    with open_database(folder) as db:
        found = [_newest_rounds(db, name) for (name,) in db.execute("select name from runs order by name").fetchall()]
    return [record for each in found for record in (each.tested, each.last) if record]


def _devices_per_center(record: Mapping[str, Any]) -> list[int] | None:
    """Of a round with several centers; None where there is no such round, or no device's center is known."""
    sizes = center_sizes(record.get("assignment", {}), len(record.get("per_center", ())))
    return sizes if len(sizes) > 1 and any(sizes) else None


def _averages(record: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """The scores of a round beside accuracy, without those of single devices."""
    return {
        name: {kind: value[kind] for kind in ("micro", "macro")} for name, value in record.get("metrics", {}).items()
    }


def _secure_setting(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is known of a run on sums before its first round is over; None for a run on single updates."""
    mode = run.get("secure", "off")
    return None if mode == "off" else {"mode": mode, "sees": "sums of updates"}


SIGN_OF_LIFE: dict[str, Any] = {"silent_s": 0, "unix_ms": 0, "free_bytes": 0}  # differ while nothing else does


def await_run(folder: Path, tell: Callable[[str], None]) -> None:
    """Return when `folder` has a run; one that has none yet is told once."""
    told = False
    while True:
        try:
            with open_database(folder):
                return
        except NoRunYet as missing:
            if not told:
                tell(f"{missing.message}; waiting for `serve`, which makes it when it starts")
                told = True
        time.sleep(WRITE_INTERVAL_S)


def follow_status(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the status whenever it changes, until the coordinator has stopped, or is done and silent."""
    before: dict[str, Any] = {}
    while True:
        found = read_status(folder)
        if found | SIGN_OF_LIFE != before | SIGN_OF_LIFE:
            yield found
        if found["phase"] == "stopped" or (found["done"] and found["silent_s"] > SILENT_AFTER_S):
            return
        before = found
        time.sleep(WRITE_INTERVAL_S)


def _live(folder: Path) -> dict[str, Any]:
    """The content of status.json, or zeros where there is none; of a stopped coordinator nothing of its last moment."""
    moment: dict[str, Any] = {"connected": 0, "without_samples": 0, "exchange": None, "clients": {}, "runtimes": {}}
    nothing: dict[str, Any] = {"phase": "not started", "unix_ms": 0, "since_ms": 0, "bytes": {"down": 0, "up": 0}}
    nothing |= moment
    try:
        left = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
        silent_s = max(0.0, time.time() - (folder / STATUS_FILE).stat().st_mtime)
    except (OSError, ValueError):
        return {**nothing, "silent_s": 0.0}
    over = moment if left.get("phase") == "stopped" else {}
    return {**nothing, **left, **over, "silent_s": round(silent_s, 1)}


def _without_refused(db: Any, exchange: Mapping[str, Any] | None) -> Mapping[str, Any] | None:  # noqa: ANN401 - as `_refusals`
    """The exchange of status.json, where devices whose refusal was stored after that file are not `open` any more."""
    if exchange is None:
        return None
    key = tuple(exchange[name] for name in ("run", "round", "exchange"))
    rows = db.execute("select cid from refusals where run = ? and round = ? and exchange = ?", key).fetchall()
    refused = {cid for (cid,) in rows} & set(exchange["open"])
    return {
        **exchange,
        "open": [cid for cid in exchange["open"] if cid not in refused],
        "refused": sorted({*exchange["refused"], *refused}),
    }


def _named(exchange: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, Any] | None:
    return None if exchange is None else {**exchange, "run": names.get(exchange["run"], exchange["run"])}


def _refusals(db: Any, run: str) -> dict[str, Any]:  # noqa: ANN401 - sqlite3.Connection, which only run_reader.py names
    """Devices whose reply did not count in the newest round: `refused` with the reason, and `late` ones."""
    query = (
        "select f.cid, f.reason from refusals f left join replies r using (run, round, exchange, cid)"
        " left join closings c using (run, round, exchange, cid) join exchanges e using (run, round, exchange)"
        " where f.run = ? and (r.cid is null or e.closed and c.cid is null)"
        " and f.round = (select max(round) from tasks where run = ?)"
        " order by f.cid, f.exchange"
    )
    found = dict(db.execute(query, (run, run)).fetchall())
    late = [cid for cid, reason in found.items() if reason == "late"]
    return {"refused": {cid: reason for cid, reason in found.items() if reason != "late"}, "late": late}
