"""The coordinator of a testbed, which also stops when the process that started it has ended.

    python -m emulator.testbed.coordinator_process PARENT CONFIG.toml

It is `fedcenters-coordinator serve CONFIG.toml`. PARENT is the process that starts it.
"""

from __future__ import annotations

import sys
import threading

from coordinator.__main__ import start
from emulator.testbed.parent import stop_with_parent

if __name__ == "__main__":
    threading.Thread(target=stop_with_parent, args=(int(sys.argv[1]),), name="parent", daemon=True).start()
    sys.argv[1:] = ["serve", *sys.argv[2:]]
    start()
