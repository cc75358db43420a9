"""The names that a running coordinator turns away: `revoked` in the folder of its signing key, one name a line.

`provision --revoke` writes it. A revoked device cannot say that it leaves, so that the broker's word would keep it in a
running training.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

REVOKED_FILE = "revoked"
UNREAD, UNREADABLE = (0, 0, 0), (0, 0, -1)  # in place of a file's time, number and size


class RevokedList:
    """The file as it is now; without one no name is revoked."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / REVOKED_FILE
        self._seen = self._unended = UNREAD
        self._names: frozenset[str] = frozenset()

    def names(self) -> frozenset[str]:
        """The revoked names. A name stays revoked while this process lives, also when the file cannot be read.

        A last line without an end may be a part of a name that is copied at this moment: it counts from the next look
        on, if the file is the same then.
        """
        try:
            found = self._path.stat()
            now = (found.st_mtime_ns, found.st_ino, found.st_size)
            if self._seen != now:
                whole, end, rest = self._path.read_text(encoding="utf-8").rpartition("\n")
                if rest and self._unended != now:
                    self._unended = now
                else:
                    self._seen, whole = now, whole + end + rest
                self._names |= {line.strip() for line in whole.splitlines() if line.strip()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as wrong:
            if self._seen != UNREADABLE:
                log.warning("cannot read %s (%s): its devices are waited for; make it readable", self._path, wrong)
            self._seen = UNREADABLE
        return self._names
