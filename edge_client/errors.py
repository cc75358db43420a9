"""Every error that fedcenters foresees, and the exit code of each.

    FedcentersError                 70  our bug, when raised by itself
    |- BeyondLimits                  1
    |- UsageError                    2
    |- ConfigError                   3
    |  `- DiskFull                  70  (retry may help)
    |- RuntimeMissing                3
    |- NetworkError                  4  (retry may help)
    |- ProtocolError                 5
    |  `- Malformed                  5
    |- ProgramRefused                5
    `- DeviceRefused                 6  `retry_s` says when to ask again

Every message ends with what to do next: a blank line, then `hint: ...`. Ctrl-C exits with 130. run_cli.py turns an
error into that message on stderr and that exit code.
"""

from __future__ import annotations

import errno
import traceback

from edge_client import console_script
from edge_client.users_code import UsersLine, users_line

EXIT_OK = 0
EXIT_INTERRUPTED = console_script.EXIT_INTERRUPTED
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
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the rights of the file and its folder"),
    errno.EIO: "the disk may fail: look at dmesg",
    errno.EROFS: "that disk is read-only: name a folder of another one, or look at dmesg whether it failed",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
}
_USERS_HINT = "look at that line; where it uses fedcenters as the documentation says, report the lines above"


_NO_MEMORY = ("bad_alloc", "bad allocation", "t allocate memory", "to allocate memory", "out of memory")
TOO_LITTLE_MEMORY = "too little memory"


def lacks_memory(wrong: BaseException) -> bool:
    """Whether memory has ended: then neither a model nor a runtime is to blame."""
    return isinstance(wrong, MemoryError) or any(words in str(wrong) for words in _NO_MEMORY)


def raise_for_memory(wrong: BaseException) -> str:
    """The first line of what a runtime says. Raises MemoryError where memory has ended."""
    if lacks_memory(wrong):
        raise MemoryError(TOO_LITTLE_MEMORY) from wrong
    return (str(wrong).strip().splitlines() or [repr(wrong)])[0][:300]


class FedcentersError(Exception):
    """Something foreseen went wrong; shown without a traceback."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}{HINT}{hint}" if hint else message)
        self.message, self.hint = message, hint

    def say_of(self, who: str) -> None:
        """Begin the message with the one of several that it is about."""
        self.message = f"{who}: {self.message}"
        self.args = (f"{who}: {self.args[0]}",)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: no frames of ours. Of an error of no kind it shows all, the user's own among them."""
        if type(self) is FedcentersError:
            return ["".join(traceback.format_exception(None, self, self.__traceback__))]
        return [f"{type(self).__name__}: {self}"]


class BeyondLimits(FedcentersError):
    """What a command was asked to check is not within its limits."""

    exit_code = 1


class UsageError(FedcentersError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class ConfigError(FedcentersError):
    """A configuration file or value is wrong."""

    exit_code = 3


class DiskFull(ConfigError):
    """The folder that a configuration names has no room; once there is some, the same start works."""

    exit_code = 70


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

    def __init__(self, code: str, message: str, *, hint: str = "") -> None:
        if not code.isidentifier():
            raise ValueError(f"{code!r:.80} is no code of an answer")
        super().__init__(f"{code}: {message}", hint=hint)
        self.code, self.words = code, message  # the words alone are for people


class ProgramRefused(ProtocolError):
    """A model cannot become a training program, or a program does not fit this device."""


class DeviceRefused(FedcentersError):
    """The device will not train now; `retry_s` (seconds) says when asking again makes sense."""

    exit_code = 6

    def __init__(self, reason: str, *, retry_s: float, hint: str = "") -> None:
        super().__init__(f"not training now: {reason}", hint=hint)
        self.reason, self.retry_s = reason, retry_s


def describe_error(wrong: Exception) -> str:
    """What ended a command, with its hint, for people who do not see its stderr."""
    if isinstance(wrong, FedcentersError):
        return str(wrong)
    if users := blamed_line(wrong):
        kind = f"{type(wrong).__name__}: {wrong}" if str(wrong) else type(wrong).__name__
        below = f" (raised in {users.raised_in})" if users.raised_in else ""
        return f"{users.place}: {kind}{below}{HINT}{_USERS_HINT if users.raised_in else 'correct that line'}"
    if isinstance(wrong, ModuleNotFoundError):
        return f"{wrong.name or wrong} is not installed{HINT}{EXTRAS_HINT}"
    if isinstance(wrong, MemoryError):
        return f"this machine: {str(wrong) or TOO_LITTLE_MEMORY}{HINT}use fewer or smaller samples, devices or models"
    if isinstance(wrong, OSError):
        return f"this machine: {wrong}{HINT}{_OS_HINTS.get(wrong.errno or 0, _OS_HINT)}"
    kind = f"{type(wrong).__name__}: {wrong}"
    return f"{kind} (a bug of fedcenters){HINT}please report the traceback that the command printed"


def blamed_line(wrong: Exception) -> UsersLine | None:
    """The line of the user's own code that is to blame; not for what this machine lacks where ours was at work."""
    users = users_line(wrong)
    lacking = isinstance(wrong, (OSError, MemoryError, ModuleNotFoundError))
    return None if users and users.raised_in and lacking else users
