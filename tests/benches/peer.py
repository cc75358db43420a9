"""A peer in its own virtual environment, told over a pipe to do one repeat (peers/turns.py is its side).

`.peers/NAME` is made by `make bench-peers`. What cannot be started or ends raises `PeerMissing` with the reason.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tests.benches.turns import Turn

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
ANSWER_S = 240.0  # a compilation and a first turn on a busy machine take a minute
LEAVE_S = 10.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class PeerMissing(Exception):
    """A peer cannot be measured; says why."""


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment."""
    found = PEERS / name / "bin" / "python"
    if not (PEERS / name / ".installed").is_file():
        raise PeerMissing(f"{name} is not installed; run make bench-peers")
    return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, with one thread each, our tree on the path, and no telemetry."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0", **(extra or {})}


class Peer:
    """A running peer; each call is one line there and one back."""

    def __init__(self, name: str, process: subprocess.Popen[str], said: IO[str]) -> None:
        self._name, self._process, self._said = name, process, said
        self.versions: dict[str, str] = self._answer()["ready"]

    def turn(self) -> Turn:
        """One repeat there."""
        took = self._ask("turn")
        return Turn(cpu_s=took["cpu_s"], wall_s=took["wall_s"])

    def update(self) -> NDArray[np.float64]:
        """The averaged update of its last turn, [parameters]."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "update.npy"
            self._ask(f"update {path}")
            found: NDArray[np.float64] = np.load(path, allow_pickle=False)
            return found

    def _ask(self, line: str) -> dict[str, Any]:
        stdin = self._process.stdin
        if stdin is None:
            raise PeerMissing(f"{self._name} has no input")
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None or not select.select([stdout], [], [], ANSWER_S)[0]:
            raise self._failed(f"was silent for {ANSWER_S:.0f} s")
        line = stdout.readline()
        if not line:
            raise self._failed("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, how: str) -> PeerMissing:
        self._said.seek(0)
        last = [line for line in self._said.read().splitlines() if line.strip()][-1:]
        return PeerMissing(f"{self._name} {how}: {' '.join(last) or 'it said nothing'}")


@contextmanager
def running(name: str, module: str, *args: str, extra: Mapping[str, str] | None = None) -> Iterator[Peer]:
    """`python -m tests.benches.peers.MODULE ARGS` in the environment of `name`, ready for its first turn."""
    command = [str(python_of(name)), "-m", f"tests.benches.peers.{module}", *args]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment(extra),
            cwd=ROOT,
        )
        try:
            yield Peer(name, process, said)
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
