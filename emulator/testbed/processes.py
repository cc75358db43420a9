"""Child processes that end with this process.

Children get a session of their own: a Ctrl-C in the terminal reaches this process alone, which then ends them in order.
The output of each child goes to a log file, which is shown when the child fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.local_broker import wait_or_kill
from edge_client.errors import ConfigError, FedcentersError, NetworkError, ProtocolError, UsageError
from emulator.stop_signals import DeferredSignals

LOGS_HINT = "the logs folder of the run holds what each process said"
ROOT = Path(__file__).resolve().parents[2]  # children find our packages also when nothing is installed


@dataclass(frozen=True)
class ChildProcess:
    """A running program and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class ChildProcesses:
    """The processes that we started. Leaving the `with` block ends all of them.

    Their logs are `folder`/<name>.log, and what they call temporary goes to `folder`/tmp.
    """

    def __init__(self, folder: Path, signals: DeferredSignals) -> None:
        self._folder, self._signals = folder, signals
        self._running: list[ChildProcess] = []
        self._leaving: list[ChildProcess] = []

    def __enter__(self) -> ChildProcesses:  # noqa: PYI034 - typing.Self needs 3.11
        return self

    def __exit__(self, *_: object) -> None:
        with self._signals.hold():
            self.stop()

    def python(self, name: str, *arguments: str, stdout: Path | None = None) -> ChildProcess:
        """Start this Python with `arguments`, for example "-m", "emulator"; `stdout` if data comes out there."""
        scratch = (self._folder / "tmp").resolve()  # torch and others leave things in the system's own
        scratch.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{name}.log"
        # The children's configuration is in their files; a FEDCENTERS_BROKER of this shell is not meant for them.
        kept = ("FEDCENTERS_CACHE",)
        env = {key: value for key, value in os.environ.items() if not key.startswith("FEDCENTERS_") or key in kept}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
        with self._signals.hold(), log.open("ab") as err, (stdout or log).open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)},
                start_new_session=True,
            )
            child = ChildProcess(name, process, log)
            self._running.append(child)
        return child

    @property
    def running(self) -> list[ChildProcess]:
        """The children whose exit was not observed."""
        return list(self._running)

    def ask_to_leave(self, children: Sequence[ChildProcess]) -> None:
        """Send SIGTERM to these and do not wait; from now on `check` does not mind how they end, and `stop` tells."""
        for child in children:
            if child.process.poll() is None:
                child.process.terminate()
            self._running.remove(child)
            self._leaving.append(child)

    def check(self, *, may_leave: Sequence[ChildProcess] = ()) -> None:
        """Raise if a child left by itself; those in `may_leave` may, in good order."""
        for child in self._running:
            code = child.process.poll()
            if code is not None and (code != 0 or child not in may_leave):
                raise child_failure(child)

    def wait_for_exit(self, children: Sequence[ChildProcess], *, timeout_s: float = 100.0) -> None:
        """Ask these to leave and insist on good order: raise if one ends with an error or does not end."""
        for child in children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + timeout_s
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            if child.process.poll() is None:
                raise FedcentersError(
                    f"{child.name} does not leave within {timeout_s:.0f} s of SIGTERM", hint=LOGS_HINT
                )
            if child.process.returncode != 0:
                raise child_failure(child)
            self._running.remove(child)

    def kill(self, child: ChildProcess) -> None:
        """SIGKILL, as a power cut would; nothing is said about how it left."""
        child.process.kill()
        child.process.wait()
        self._running.remove(child)

    def stop(self, *, timeout_s: float = 8.0) -> list[str]:
        """SIGTERM to all, SIGKILL to whole sessions of those that stay; -> how those ended that had an error.

        Returns when no child is left. Idempotent.
        """
        self.ask_to_leave(self.running)
        deadline, wrong = time.monotonic() + timeout_s, list[str]()
        for child in self._leaving:
            wait_or_kill(child.process, timeout_s=max(0.0, deadline - time.monotonic()))
            if child.process.returncode != 0:
                wrong.append(
                    f"{child.name} {_ending(child.process.returncode)} instead of leaving when it was asked to"
                )
        self._leaving.clear()
        return wrong


def child_failure(child: ChildProcess) -> FedcentersError:
    """What to tell about a child that left by itself: its last words, and its exit code where it is one of ours."""
    code, how = child.process.returncode, _ending(child.process.returncode)
    lines = child.log.read_text(errors="replace").strip().splitlines() if child.log.exists() else []
    said = "\n".join(f"    {line}" for line in lines[-12:]) or "    (it said nothing)"
    kinds = {kind.exit_code: kind for kind in (UsageError, ConfigError, NetworkError, ProtocolError)}
    kind = kinds.get(code, FedcentersError)
    return kind(f"{child.name} {how}; its last words:\n{said}", hint=LOGS_HINT)


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
