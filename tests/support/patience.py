"""How long tests wait for what must come: FEDCENTERS_PATIENCE times as long as on the machine of CI."""

from __future__ import annotations

import os


def patience(seconds: float) -> float:
    """As many seconds, or milliseconds, as this machine may take for what takes another one `seconds` at most."""
    return seconds * float(os.environ.get("FEDCENTERS_PATIENCE", "1"))
