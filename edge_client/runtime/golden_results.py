"""Whether a runtime computes correctly on this device: the results of golden runs, stored in a file.

    state/golden.json   how far each (program, engine, place, runtime version) was from its golden run

The file may be deleted: the runs are made again. A file that is damaged counts as deleted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_client.engines.base import Engine
from edge_client.engines.golden_run import run_golden
from edge_client.engines.runtime_versions import runtime_version
from edge_client.errors import Malformed, RuntimeMissing, raise_for_memory
from edge_client.protocol.golden_run import Golden
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.program import Program
from edge_client.transport.blobs import write_atomically

log = logging.getLogger(__name__)

Check = Callable[[Engine, Program, Golden], float]  # edge_client.engines.golden_run.run_golden
FILE = "golden.json"
VERSION = 1
LIMIT_BYTES = 1 << 16
KEPT_MAX = 64  # results; the newest stay
FAR = 1e9  # replaces a difference that is not finite, in files and messages
HINT = "install another version of the runtime, or set engine to another one"


@dataclass(frozen=True, kw_only=True)
class RefusedRuntime:
    """A runtime that failed a golden run: its name and place, and its difference from the expected values."""

    engine: str
    runtime: str
    place: str
    difference: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"{self.runtime} computes wrongly on {self.place}: {self.difference:.1e} from the program's golden run, "
            f"at most {self.tolerance:.0e}"
        )

    def to_json(self) -> dict[str, str | float]:
        """As the presence message carries it."""
        return {"engine": self.engine, "runtime": self.runtime, "difference": self.difference}

    def error(self) -> RuntimeMissing:
        """The error that ends a command or a task."""
        return RuntimeMissing(str(self), hint=HINT)


class GoldenResults:
    """The results in one file. `check` runs at most once per program, engine, place and runtime version."""

    def __init__(self, file: Path, check: Check = run_golden) -> None:
        self._file, self._check, self._found = file, check, _read(file)

    def refused(self, engine: Engine, program: Program, sha256: str) -> RefusedRuntime | None:
        """Why an opened engine may not train this program; None when it may, or when the program has no golden run."""
        golden = program.golden.get(engine.name)
        if golden is None:
            return None
        key = f"{sha256}/{engine.name}/{engine.place}/{_runtime(engine)}"
        if key not in self._found:
            self._keep(key, _far(self._check, engine, program, golden))
        return _judged(engine, self._found[key], golden.tolerance)

    def _keep(self, key: str, difference: float) -> None:
        self._found = dict([*self._found.items(), (key, difference)][-KEPT_MAX:])
        write_atomically(self._file, canonical_json({"v": VERSION, "found": list(self._found.items())}))


def require_golden(engine: Engine, program: Program) -> None:
    """Run the program's golden run now, and raise RuntimeMissing where the engine fails it; nothing is kept."""
    golden = program.golden.get(engine.name)
    if golden is not None and (refused := _judged(engine, _far(run_golden, engine, program, golden), golden.tolerance)):
        raise refused.error()


def _runtime(engine: Engine) -> str:
    return runtime_version(engine.name) or engine.name


def _judged(engine: Engine, off: float, tolerance: float) -> RefusedRuntime | None:
    if off <= tolerance:
        return None
    return RefusedRuntime(
        engine=engine.name, runtime=_runtime(engine), place=engine.place, difference=off, tolerance=tolerance
    )


def _far(check: Check, engine: Engine, program: Program, golden: Golden) -> float:
    """The difference; FAR if the runtime fails in the run, or its result is not finite."""
    try:
        off = check(engine, program, golden)
    except Exception as wrong:  # noqa: BLE001 - each runtime raises its own kinds
        log.warning("%s fails in its golden run: %s", engine.name, raise_for_memory(wrong))
        return FAR
    return min(off, FAR) if math.isfinite(off) else FAR


def _read(file: Path) -> dict[str, float]:
    try:
        raw = parse_json(file.read_bytes(), LIMIT_BYTES)
        found = dict(raw["found"])
        if raw["v"] == VERSION and all(isinstance(k, str) and isinstance(v, float) for k, v in found.items()):
            return found
    except FileNotFoundError:
        return {}
    except (Malformed, OSError, KeyError, TypeError, ValueError) as wrong:
        log.warning("%s is damaged: %s", file, wrong)
    log.warning("%s is not used; golden runs are made again", file)
    return {}
