"""How every command of ours ends: an error becomes a message on stderr and an exit code; Ctrl-C is never lost."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from edge_client.console_script import interrupts_raise
from edge_client.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXTRAS_HINT,
    FedcentersError,
    RuntimeMissing,
    UsageError,
    blamed_line,
    describe_error,
)
from edge_client.printable import open_closed_streams, printable, put_on_stderr

log = logging.getLogger(__name__)
REPEATED_AFTER_S = 0.05  # seconds in which Python leaves the destructor


def run_cli(action: Callable[[], int | None], *, interrupted: str = "") -> int:  # noqa: PLR0911 - one per way to end
    """Run a command; turn what it raises into a message on stderr and an exit code.

    `interrupted` is what Ctrl-C says. A raised KeyboardInterrupt may carry an `exit_code` of its own.
    """
    open_closed_streams()
    try:
        interrupts_raise()
        with _interrupts_repeated():
            return action() or EXIT_OK
    except FedcentersError as wrong:
        _say(f"error: {wrong}")
        return wrong.exit_code
    except ModuleNotFoundError as missing:
        return _report_users(missing) if blamed_line(missing) else report_missing_extra(missing)
    except BrokenPipeError:  # the reader of stdout has left
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (OSError, MemoryError) as wrong:  # disk full, no rights, no descriptors: no bug of the program
        _say(f"error: {describe_error(wrong)}")
        return FedcentersError.exit_code if blamed_line(wrong) is None else UsageError.exit_code
    except KeyboardInterrupt as stopped:
        _drop_what_is_half_made(stopped)
        if interrupted:
            _say(interrupted)
        return int(getattr(stopped, "exit_code", EXIT_INTERRUPTED))
    except Exception as wrong:  # noqa: BLE001 - not foreseen: a bug, shown with its traceback
        if blamed_line(wrong):
            return _report_users(wrong)
        _say(f"{traceback.format_exc()}\nerror: this is a bug of fedcenters\n\nhint: please report the lines above")
        return FedcentersError.exit_code


def _report_users(wrong: Exception) -> int:
    """Tell a mistake in the user's own code; with the traceback where a line of ours raised it."""
    users = blamed_line(wrong)
    if users and users.raised_in:
        _say(traceback.format_exc())
    log.debug("the user's own code failed", exc_info=wrong)
    _say(f"error: {describe_error(wrong)}")
    return UsageError.exit_code


def _drop_what_is_half_made(stopped: BaseException) -> None:
    """Destroy what the frames of an interrupt hold, silently.

    An interrupt may come inside a constructor, as that of zipfile.ZipFile; the destructor of the half-made object then
    raises, and Python prints that as "Exception ignored in ...".
    """
    with _quiet_destructors():
        chain: BaseException | None = stopped
        while chain is not None:
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__context__


@contextmanager
def _interrupts_repeated() -> Iterator[None]:
    """Interrupt the main thread again where Ctrl-C came inside a destructor or a callback of the garbage collector.

    Python prints such an exception as "Exception ignored in ..." and goes on; imports have such callbacks.
    """
    before = sys.unraisablehook

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
            return
        signum = getattr(ignored.exc_value, "exit_code", EXIT_INTERRUPTED) - 128
        later = threading.Timer(REPEATED_AFTER_S, signal.pthread_kill, [threading.main_thread().ident, signum])
        later.daemon = True
        later.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def _quiet_destructors() -> Iterator[None]:
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def report_missing_extra(missing: ImportError) -> int:
    """Say which package is not installed and how to get it; the exit code. Base installations are a device's."""
    _say(f"error: {missing.name or missing} is not installed\n\nhint: {EXTRAS_HINT}")
    return RuntimeMissing.exit_code


def _say(text: str) -> None:
    put_on_stderr(f"{printable(text)}\n")
