"""Every error that fedcenters foresees, and the exit code of each.

    FedcentersError                 70  our bug, when raised by itself
    |- BeyondLimits                  1  a check that was asked for found something
    |- UsageError                    2  the command line is wrong
    |- ConfigError                   3  a configuration file or value is wrong
    |- RuntimeMissing                3  an extra or a program is not installed, or is broken
    |- NetworkError                  4  broker unreachable, port in use, transfer gave up      (retry may help)
    |- ProtocolError                 5  the other side speaks another version, or bytes are malformed
    |  `- Malformed                  5  bytes that break a rule of PROTOCOL.md; `code` names the rule
    |- ProgramRefused                5  a model that cannot become a training program, or a program that does not fit
    `- DeviceRefused                 6  battery, heat, memory, metered link; `retry_s` says when to ask again

Every message ends with what to do next: a blank line, then `hint: ...`. Ctrl-C exits with 130. `run_cli` and
`handle_errors` are how every command of ours turns an error into that message on stderr and that exit code.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from edge_client.printable import printable
from edge_client.users_code import UsersLine, users_line

log = logging.getLogger(__name__)
EXIT_OK = 0
EXIT_INTERRUPTED = 130
REPEATED_AFTER_S = 0.05  # seconds in which Python leaves the destructor
HINT = "\n\nhint: "  # between what is wrong and what to do


def install_hint(extra: str) -> str:
    """How to install an extra of pyproject.toml: from a checkout, as the README says, until a registry has releases."""
    return f"pip install -c constraints.txt '.[{extra}]' in a checkout of fedcenters"


EXTRAS_HINT = (
    f"{install_hint('server')} for a coordinator, [export] for its files, [serve] to serve them, "
    "[emulator] for everything"
)

_OS_HINT = "free disk space, or check the rights of the folder"
_OS_HINTS = {  # by errno
    errno.ENOENT: "make the folder, or correct the path",
    errno.ENOTDIR: "a part of the path is a file: name a folder",
    errno.EISDIR: "that is a folder: name a file",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.EACCES: "check the rights of the file and its folder",
    errno.EPERM: "check the rights of the file and its folder",
    errno.EROFS: "that disk is read-only: name a folder of another one",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
}
_USERS_HINT = "look at that line; where it uses fedcenters as the documentation says, report the lines above"


class FedcentersError(Exception):
    """Something foreseen went wrong; shown without a traceback."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}{HINT}{hint}" if hint else message)
        self.message, self.hint = message, hint


class BeyondLimits(FedcentersError):
    """What a command was asked to check is not within its limits."""

    exit_code = 1


class UsageError(FedcentersError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class ConfigError(FedcentersError):
    """A configuration file or value is wrong."""

    exit_code = 3


class RuntimeMissing(FedcentersError):
    """An extra or a program is not installed, or does not work."""

    exit_code = 3


class NetworkError(FedcentersError):
    """The broker or a peer cannot be reached; trying again may help."""

    exit_code = 4


class ProtocolError(FedcentersError):
    """The other side speaks another version or breaks a promise."""

    exit_code = 5


class Malformed(ProtocolError):
    """Bytes that break a rule; `code` is the protocol's name for it (PROTOCOL.md, error answers).

    Raises ValueError for a code that is no single word: it would be sent to the other side, which refuses it.
    """

    def __init__(self, code: str, message: str) -> None:
        if not code.isidentifier():
            raise ValueError(f"{code!r:.80} is no code of an answer")
        super().__init__(f"{code}: {message}")
        self.code = code


class ProgramRefused(ProtocolError):
    """A model cannot become a training program, or a program does not fit this device."""


class DeviceRefused(FedcentersError):
    """The device will not train now; `retry_s` (seconds) says when asking again makes sense."""

    exit_code = 6

    def __init__(self, reason: str, *, retry_s: float, hint: str = "") -> None:
        super().__init__(f"not training now: {reason}", hint=hint)
        self.reason, self.retry_s = reason, retry_s


Command = TypeVar("Command", bound=Callable[..., Any])


def run_cli(action: Callable[[], int | None], *, interrupted: str = "") -> int:  # noqa: PLR0911 - one per way to end
    """Run a command; turn what it raises into a message on stderr and an exit code.

    `interrupted` is what Ctrl-C says. A raised KeyboardInterrupt may carry an `exit_code` of its own.
    """
    try:
        with _interrupts_repeated():
            return action() or EXIT_OK
    except FedcentersError as wrong:
        _say(f"error: {wrong}")
        return wrong.exit_code
    except ModuleNotFoundError as missing:
        return _report_users(missing) if _users_line(missing) else report_missing_extra(missing)
    except BrokenPipeError:  # the reader of stdout has left
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (OSError, MemoryError) as wrong:  # disk full, no rights, no descriptors: no bug of the program
        _say(f"error: {describe_error(wrong)}")
        return FedcentersError.exit_code if _users_line(wrong) is None else UsageError.exit_code
    except KeyboardInterrupt as stopped:
        _drop_what_is_half_made(stopped)
        if interrupted:
            _say(interrupted)
        return int(getattr(stopped, "exit_code", EXIT_INTERRUPTED))
    except Exception as wrong:  # noqa: BLE001 - not foreseen: a bug, shown with its traceback
        if _users_line(wrong):
            return _report_users(wrong)
        _say(f"{traceback.format_exc()}\nerror: this is a bug of fedcenters\n\nhint: please report the lines above")
        return FedcentersError.exit_code


def describe_error(wrong: Exception) -> str:
    """What ended a command, with its hint, for people who do not see its stderr."""
    if isinstance(wrong, FedcentersError):
        return str(wrong)
    if users := _users_line(wrong):
        kind = f"{type(wrong).__name__}: {wrong}" if str(wrong) else type(wrong).__name__
        below = f" (raised in {users.raised_in})" if users.raised_in else ""
        return f"{users.place}: {kind}{below}{HINT}{_USERS_HINT if users.raised_in else 'correct that line'}"
    if isinstance(wrong, ModuleNotFoundError):
        return f"{wrong.name or wrong} is not installed{HINT}{EXTRAS_HINT}"
    if isinstance(wrong, MemoryError):
        return f"this machine: {str(wrong) or 'too little memory'}{HINT}use fewer or smaller samples, devices or models"
    if isinstance(wrong, OSError):
        return f"this machine: {wrong}{HINT}{_OS_HINTS.get(wrong.errno or 0, _OS_HINT)}"
    kind = f"{type(wrong).__name__}: {wrong}"
    return f"{kind} (a bug of fedcenters){HINT}please report the traceback that the command printed"


def _users_line(wrong: Exception) -> UsersLine | None:
    """The line of the user's own code that is to blame; not for what this machine lacks where ours was at work."""
    users = users_line(wrong)
    lacking = isinstance(wrong, (OSError, MemoryError, ModuleNotFoundError))
    return None if users and users.raised_in and lacking else users


def _report_users(wrong: Exception) -> int:
    """Tell a mistake in the user's own code; with the traceback where a line of ours raised it."""
    users = _users_line(wrong)
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


def handle_errors(command: Command) -> Command:
    """A decorator: `run_cli` around a command of a command line library, which keeps the command's parameters."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the command's own
        code = run_cli(lambda: command(*args, **kwargs), interrupted="interrupted")
        if code != EXIT_OK:
            raise SystemExit(code)

    return wrapped  # type: ignore[return-value]  # same parameters, read through functools.wraps


def report_missing_extra(missing: ImportError) -> int:
    """Say which package is not installed and how to get it; the exit code. Base installations are a device's."""
    _say(f"error: {missing.name or missing} is not installed\n\nhint: {EXTRAS_HINT}")
    return RuntimeMissing.exit_code


def _say(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")
