"""`python -m tests.faults.full_disk FOLDER`: a training on a tmpfs of its own that fills up in the middle.

Run within a mount namespace. Prints what was said while there was no room, and the hash of the final state.
"""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from tests.support.virtual_federation import Federation, Spy

DEVICES = 3


def hashes(fed: Federation) -> dict[str, str]:
    return {name: hashlib.sha256(state).hexdigest() for name, state in fed.final_states().items()}


def calm(folder: Path) -> Federation:
    """The same training where there is room."""
    return Federation.of(folder, devices=DEVICES).play()


def fill(folder: Path) -> None:
    """Write until nothing fits any more."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4_096))
        except OSError as full:
            if full.errno != errno.ENOSPC:
                raise


def main(folder: Path) -> None:
    fed = Federation.of(folder, devices=DEVICES)
    run = fed.config.folder
    run.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(run)], check=True)
    spy = Spy(fed.world.broker)
    fed.start()
    fed.world.run(lambda: len(spy.said("task")) == DEVICES)
    fill(run)
    fed.world.run(lambda: len(spy.said("ack")) >= 2 * DEVICES)  # beyond several heartbeats, which do not fit either
    said = [ack["detail"] for ack in spy.said("ack")]
    (run / "filler").unlink()
    fed.complete()
    print(json.dumps({"states": hashes(fed), "said": said}))  # noqa: T201 - for the test that started it


if __name__ == "__main__":
    main(Path(sys.argv[1]))
