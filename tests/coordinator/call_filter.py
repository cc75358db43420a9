"""Run a command under the system call filter of a unit, without systemd: `python call_filter.py UNIT COMMAND...`.

systemd says which calls its groups have, libseccomp loads the filter. A call that is not allowed gets what the unit's
`SystemCallErrorNumber` says, and ends the process without one, as systemd has it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

LIBRARY = "libseccomp.so.2"
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def calls_of(group: str) -> set[str]:
    """The system calls of a group, as `@resources`, with those of the groups in it."""
    command = ["systemd-analyze", "syscall-filter", "--no-pager", group]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    names = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return {call for name in names for call in (calls_of(name) if name.startswith("@") else {name})}


def allowed(unit: str) -> set[str]:
    """What the lines `SystemCallFilter` of a unit's text allow: the first one lists, those with ~ take away."""
    calls = calls_of("@default")
    for line in re.findall(r"^SystemCallFilter=(.*)$", unit, re.MULTILINE):
        named = {c for name in line.lstrip("~").split() for c in (calls_of(name) if name[0] == "@" else {name})}
        calls = calls - named if line.startswith("~") else calls | named
    return calls | {"execve"}


def load(unit: str) -> None:
    """Filter the calls of this process and its children, for good. Raises OSError where the system has no filters."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    number = re.search(r"^SystemCallErrorNumber=(\w+)$", unit, re.MULTILINE)
    rules = library.seccomp_init(ERRNO | getattr(errno, number[1]) if number else KILL_PROCESS)
    for name in allowed(unit):
        call = library.seccomp_syscall_resolve_name(name.encode())
        if call >= 0:  # below zero: not on this machine
            library.seccomp_rule_add(rules, ALLOW, call, 0)
    if library.seccomp_load(rules) != 0:
        raise OSError("no system call filter on this machine")


if __name__ == "__main__":
    load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - a filter stays with the process that loads it
