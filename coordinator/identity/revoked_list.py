"""The names that a running coordinator turns away: `revoked` in the folder of its signing key, one name a line.

`provision --revoke` writes it. A revoked device cannot say that it leaves, so that the broker's word would keep it in a
running training.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

REVOKED_FILE = "revoked"


class RevokedList:
    """The file as it is now; without one no name is revoked."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / REVOKED_FILE
        self._seen: tuple[int, int] | None = None
        self._names: frozenset[str] = frozenset()

    def names(self) -> frozenset[str]:
        """The revoked names. A name stays revoked while this process lives, also when the file cannot be read."""
        try:
            found = self._path.stat()
            if self._seen != (found.st_mtime_ns, found.st_ino):
                lines = self._path.read_text(encoding="utf-8").splitlines()
                self._seen = (found.st_mtime_ns, found.st_ino)
                self._names |= {line.strip() for line in lines if line.strip()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as wrong:
            if self._seen != (0, 0):
                log.warning("cannot read %s (%s): its devices are waited for; make it readable", self._path, wrong)
            self._seen = (0, 0)
        return self._names
