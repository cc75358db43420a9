"""The coordinator of a testbed, which also stops when the process that started it has ended.

    python -m emulator.testbed.coordinator_process PARENT BROKER CONFIG.toml

It is `fedcenters-coordinator serve CONFIG.toml`. PARENT is the process that starts it. BROKER is that of a broker which
was started there too, and which stops then; 0: none.
"""

from __future__ import annotations

import sys
import threading

from coordinator.__main__ import start
from emulator.testbed.parent import stop_with_parent

if __name__ == "__main__":
    parent, broker = (int(word) for word in sys.argv[1:3])
    others = (broker,) if broker else ()
    threading.Thread(target=stop_with_parent, args=(parent, *others), name="parent", daemon=True).start()
    sys.argv[1:] = ["serve", *sys.argv[3:]]
    start()
