"""The names that a running coordinator turns away: `revoked` in the folder of its signing key, one name a line.

`provision --revoke` writes it. A revoked device cannot say that it leaves, so that the broker's word would keep it in a
running training.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

REVOKED_FILE = "revoked"
UNREADABLE = (0,)


class RevokedList:
    """The file as it is now; without one no name is revoked."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / REVOKED_FILE
        self._seen: tuple[int, ...] = ()
        self._names: frozenset[str] = frozenset()

    def names(self) -> frozenset[str]:
        """The revoked names. A name stays revoked while this process lives, also when the file cannot be read.

        A last line without an end may be a part of a name: the file may be copied at this moment.
        """
        try:
            found = self._path.stat()
            now = (found.st_mtime_ns, found.st_ino, found.st_size)
            if self._seen != now:
                whole, _, rest = self._path.read_text(encoding="utf-8").rpartition("\n")
                self._names |= {line.strip() for line in whole.splitlines() if line.strip()}
                self._note(now, "its last line does not end" if rest else "")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as wrong:
            self._note(UNREADABLE, str(wrong))
        return self._names

    def _note(self, seen: tuple[int, ...], wrong: str) -> None:
        """Remember what was read; say once why the whole file was not, and read it again the next time."""
        if wrong and self._seen != UNREADABLE:
            log.warning("cannot read %s (%s): its devices are waited for; make it readable", self._path, wrong)
        self._seen = UNREADABLE if wrong else seen
