"""A peer's side of the pipe: one line of JSON per answer. Runs in the peer's own environment.

"turn"          -> {"cpu_s": ..., "wall_s": ...}    do the work once
"update PATH"   -> {"saved": PATH}                  the averaged update of the last turn, [parameters] float64
end of input    -> leave
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def serve(turn: Callable[[], None], update: Callable[[], Any], versions: Mapping[str, str]) -> None:
    """Warm up, say "ready" with the versions, then answer until the other side closes the pipe."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what the peer itself prints must not end up among the answers

        def say(what: Mapping[str, object]) -> None:
            out.write(json.dumps(what) + "\n")
            out.flush()

        turn()
        say({"ready": dict(versions)})
        for line in sys.stdin:
            word, _, path = line.strip().partition(" ")
            if word == "turn":
                cpu, wall = time.process_time(), time.perf_counter()
                turn()
                say({"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall})
            else:
                np.save(Path(path), np.asarray(update(), dtype=np.float64), allow_pickle=False)
                say({"saved": path})
