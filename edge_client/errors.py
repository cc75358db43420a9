"""Every error that fedcenters foresees, and the exit code of each.

    FedcentersError                 70  our bug, when raised by itself
    |- UsageError                    2  the command line is wrong
    |- ConfigError                   3  a configuration file or value is wrong
    |- RuntimeMissing                3  an extra or a program is not installed, or is broken
    |- NetworkError                  4  broker unreachable, port in use, transfer gave up      (retry may help)
    |- ProtocolError                 5  the other side speaks another version, or bytes are malformed
    |  `- Malformed                  5  bytes that break a rule of PROTOCOL.md; `code` names the rule
    |- ProgramRefused                5  a model that cannot become a training program, or a program that does not fit
    `- DeviceRefused                 6  battery, heat, memory, metered link; `retry_s` says when to ask again

Every message ends with what to do next: a blank line, then `hint: ...`. Ctrl-C exits with 130.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_INTERRUPTED = 130


class FedcentersError(Exception):
    """Something foreseen went wrong; shown without a traceback."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}\n\nhint: {hint}" if hint else message)
        self.message, self.hint = message, hint


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
    """Bytes that break a rule; `code` is the protocol's name for it (PROTOCOL.md, error answers)."""

    def __init__(self, code: str, message: str) -> None:
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
