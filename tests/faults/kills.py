"""SIGKILL by the hundred to real processes over a real mosquitto, in the middle of rounds; `make kills`.

    python -m tests.faults.kills --coordinator 100 --devices 100 --broker 50

One run for each codec: coordinator, devices and broker are killed in a random order, each when a random message of a
round was heard, and started again. The next kill waits until the victim is back in a round. Then the run ends, and its
state and the account of every round must be those of the same run in virtual time that nothing disturbs, to the last
bit. The exit status is 1 where they are not.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.transport.base import Message
from tests.support.live_federation import BALLAST, DEVICES, ProcessScene, nth, scene
from tests.support.virtual_federation import TOPICS, Federation

VICTIMS = ("coordinator", "devices", "broker")
MOMENTS = (  # kind of the topic, the most that are let pass before, kind of the message
    ("t", DEVICES, "task"),
    ("b", 20, ""),
    ("in", 60, ""),
    ("t", DEVICES - 1, "ack"),
)
LINE_EVERY = 10


def back(victim: str) -> Callable[[Message], bool]:
    """True for the message that tells that a victim which was started again takes part."""
    here: set[str] = set()

    def found(message: Message) -> bool:
        try:
            route = TOPICS.parse(message.topic)
            if route.kind not in ("coord", "st") or not message.payload:
                return False
            said = messages.read_message(message.payload, route.kind)
        except Malformed:
            return False
        if victim == "devices":
            if route.kind == "st" and said["s"] == "on":
                here.add(str(route.cid))
            return len(here) == DEVICES
        return route.kind == "coord" and bool(said["online"])

    return found


def killed_run(folder: Path, codec: str, counts: dict[str, int], rng: random.Random) -> bool:
    """One run of `codec`; -> whether it ended as the undisturbed one."""
    order = [victim for victim, count in counts.items() for _ in range(count)]
    rng.shuffle(order)
    changes: dict[str, Any] = {"rounds": len(order), "codec": codec, "devices": DEVICES}
    folders = [folder / name for name in ("undisturbed", "killed")]
    for each in folders:
        each.mkdir(parents=True)
    undisturbed = Federation.of(folders[0], ballast=BALLAST, **changes).play().outcome()
    done, began_s = dict.fromkeys(VICTIMS, 0), time.monotonic()
    with scene(folders[1], persistent=True, **changes) as (here, spy):
        here.start("coordinator")
        here.start("devices")
        for number, victim in enumerate(order, 1):
            kind, most, says = rng.choice(MOMENTS)
            here.listen_until(spy, nth(kind, rng.randint(1, most), says=says))
            if len(here.rounds()) >= len(order):
                say(f"{codec}: the run is over after {number - 1} kills")
                return False
            here.kill(victim)
            done[victim] += 1
            while spy.receive(0.0) is not None:  # what the dead one said
                pass
            here.start(victim)
            here.listen_until(spy, back(victim))
            if number % LINE_EVERY == 0 or number == len(order):
                seconds = round(time.monotonic() - began_s)
                say(f"{codec}: {number} kills ({told(done)}) in {len(here.rounds())} rounds, {seconds} s")
        finish(here, spy_until=lambda: here.listen_until(spy, nth("cat", 1)))
    same = here.outcome() == undisturbed
    say(f"{codec}: {told(done)} killed, {changes['rounds']} rounds, {'every bit equal' if same else 'DIFFERENT'}")
    return same


def finish(here: ProcessScene, *, spy_until: Callable[[], object]) -> None:
    """Let the run end; the rounds that are left may take longer than the patience for one message."""
    before = -1
    while len(here.rounds()) > before:
        before = len(here.rounds())
        try:
            spy_until()
        except TimeoutError:
            continue
        return
    raise TimeoutError(f"no round ends any more after {before}")


def told(done: dict[str, int]) -> str:
    return ", ".join(f"{count} {victim}" for victim, count in done.items())


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Every codec, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for victim, count in zip(VICTIMS, (100, 100, 50), strict=True):
        parser.add_argument(f"--{victim}", type=int, default=count, help=f"kills, {count}")
    parser.add_argument("--codecs", nargs="+", default=["f32", "i8"], choices=("f32", "f16", "i8"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="an empty folder, which is kept; else a temporary one")
    asked = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # the undisturbed devices are told to slow down
    counts = {victim: getattr(asked, victim) for victim in VICTIMS}
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        folder, same = asked.folder or Path(scratch), True
        for codec in asked.codecs:
            same &= killed_run(folder / codec, codec, counts, random.Random(asked.seed))  # noqa: S311 - when they die
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
