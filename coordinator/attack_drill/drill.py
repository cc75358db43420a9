"""The attacks, each with its bound and where that is written; `run_drill` plays them on a copy (loopback_copy.py).

Attacks on rounds are not among them: tests/attacks has those.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.attack_drill.loopback_copy import (
    FEDERATION,
    HONEST,
    HOSTILE,
    PATIENCE_S,
    REFUSAL_S,
    SHA256,
    TOPICS,
    LoopbackCopy,
    loopback_copy,
    presence,
    request,
)
from coordinator.local_broker import find_mosquitto
from edge_client.errors import FedcentersError, NetworkError, RuntimeMissing
from edge_client.printable import printable_line
from edge_client.protocol import messages
from edge_client.transport.base import Message
from edge_client.transport.mqtt import MqttTransport
from edge_client.transport.tls import Credentials

LABEL = "0123456789abcdef"
FORGED = b"forged"
FLOOD = 2_000  # requests
MAX_ANSWERS = 42  # to a flood: the burst, a refusal, and what was asked last; besides 20 a second


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack: what is tried, the bound and where it is written, and whether the bound held."""

    tried: str
    bound: str
    where: str
    held: Callable[[LoopbackCopy], bool]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one attack; `why` names the error of an attack that ended otherwise than by its bound."""

    attack: Attack
    held: bool
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        attack = self.attack
        return {"tried": attack.tried, "bound": attack.bound, "where": attack.where, "held": self.held, "why": self.why}

    def in_words(self) -> str:
        """One line: what was tried, the bound, where it is written."""
        attack, result = self.attack, "held" if self.held else "BROKEN"
        return f"{result:6}  {attack.tried:35} {attack.bound:26} {attack.where}  {printable_line(self.why)}".rstrip()


def _foreign_topics(here: LoopbackCopy) -> bool:
    topics = (
        TOPICS.state(HONEST),
        TOPICS.request(HONEST),
        TOPICS.upload(0, HONEST, LABEL, 0),
        TOPICS.down(HONEST),
        TOPICS.coord(),
        TOPICS.catalog(),
        f"fc/v1/other/rq/{HOSTILE}",
    )
    heard = [
        m for topic in topics for keep in (False, True) for m in here.take(here.hostile, topic, FORGED, retain=keep)
    ]
    return all(message.payload != FORGED for message in heard)


def _foreign_reads(here: LoopbackCopy) -> bool:
    here.hostile.transport.subscribe("#", f"fc/v1/{FEDERATION}/dn/+/t", f"fc/v1/{FEDERATION}/in/#")
    here.take(here.hostile, TOPICS.request(HOSTILE), b"{}")
    here.coordinator.transport.publish(TOPICS.down(HONEST), b"a secret")
    here.take(here.honest, TOPICS.upload(0, HONEST, LABEL, 0), b"an update")
    return all(HONEST not in message.topic for message in here.told(here.hostile))


def _retained_blocks(here: LoopbackCopy) -> bool:
    for index in range(40):
        here.take(here.hostile, TOPICS.upload(0, HOSTILE, LABEL, index), bytes(10_000), retain=True)
    here.coordinator.transport.subscribe(f"fc/v1/{FEDERATION}/in/#")  # sends again what is kept
    kept = here.take(here.honest, TOPICS.request(HONEST), b"{}")
    return not any(message.retained and message.payload for message in kept)


def _many_samples(here: LoopbackCopy) -> bool:
    here.take(here.hostile, TOPICS.state(HOSTILE), presence(4), retain=True)
    before = here.dispatcher.unreadable
    with suppress(FedcentersError):  # this side refuses to write it as well
        here.take(here.hostile, TOPICS.state(HOSTILE), presence(2**40), retain=True)
        return here.dispatcher.unreadable > before
    return here.dispatcher.fleet.devices[HOSTILE].n == 4  # noqa: PLR2004 - announced above


def _forged_epoch(here: LoopbackCopy) -> bool:
    """Also where the broker's list failed: the record reaches the coordinator, which must not obey it."""
    fields: dict[str, Any] = {"boot": "f" * 16, "online": True, "proto": [1], "spread_ms": 0, "block": 4096}
    forged = messages.write_message("coord", ident="x", t_ms=0, epoch=2**53 - 1, src=["mqtt"], window=4, **fields)
    here.dispatcher.dispatch(Message(TOPICS.coord(), forged))  # raises Superseded if it obeys
    return True


def _disowned(here: LoopbackCopy) -> bool:
    for _ in range(3):
        here.take(here.hostile, TOPICS.request(HOSTILE), request("nack", re="c1-1", code="old_epoch"))
    return here.honest_is_served()


def _flood(here: LoopbackCopy) -> bool:
    here.told(here.hostile)
    payload = request("get", sha256=SHA256, block=4096, at=[[0, 1]])
    began_s = time.monotonic()
    for _ in range(FLOOD):
        here.hostile.transport.publish(TOPICS.request(HOSTILE), payload)
    here.take(here.hostile, TOPICS.request(HOSTILE), payload)
    answers = len({message.payload for message in here.told(here.hostile)})  # one for each filter that matches
    return answers <= MAX_ANSWERS + 20 * (time.monotonic() - began_s) and here.honest_is_served()


def _garbage(here: LoopbackCopy) -> bool:
    for payload in (b"", b"{" * 50_000, b'{"v":1e999}', bytes(1_000_000), b"\x1b[2J", b'{"v":1,"k":"rdy"}'):
        here.take(here.hostile, TOPICS.request(HOSTILE), payload)
        here.take(here.hostile, TOPICS.upload(0, HOSTILE, LABEL, 65_535), payload)
    return here.honest_is_served()


def _unasked_update(here: LoopbackCopy) -> bool:
    for index in range(100):
        here.take(here.hostile, TOPICS.upload(0, HOSTILE, LABEL, index), bytes(4_112))
    return not list((here.store.folder / "updates").glob("*/partial/*"))


def _borrowed_name(here: LoopbackCopy) -> bool:
    """A valid certificate with the id of another: the broker gives it its certificate's name."""
    made = MqttTransport(here.work.plan.broker, TOPICS.client_id(HONEST), credentials=here.credentials(HOSTILE))
    with closing(made):
        made.connect()
        made.receive(PATIENCE_S)
        made.publish(TOPICS.request(HONEST), FORGED)
        made.publish(TOPICS.request(HOSTILE), b"after it")
        return all(message.payload != FORGED for message in here.coordinator.until(b"after it"))


def _no_certificate(here: LoopbackCopy) -> bool:
    ca = Credentials(ca=here.credentials(HOSTILE).ca)
    made = MqttTransport(here.work.plan.broker, "anyone", credentials=ca, connect_timeout_s=REFUSAL_S)
    try:
        with closing(made):
            made.connect()
    except NetworkError:
        return True
    return False


ACCESS, EPOCHS, LIMITS = "docs/security.md", "PROTOCOL.md, section 10", "PROTOCOL.md, section 14"
ATTACKS = (
    Attack(tried="connect without a certificate", bound="refused", where=ACCESS, held=_no_certificate),
    Attack(tried="write to topics of others", bound="nothing arrives", where=ACCESS, held=_foreign_topics),
    Attack(tried="read all topics", bound="only its own", where=ACCESS, held=_foreign_reads),
    Attack(tried="leave 40 retained blocks", bound="deleted", where=LIMITS, held=_retained_blocks),
    Attack(tried="announce 2^40 samples", bound="refused", where=LIMITS, held=_many_samples),
    Attack(tried="forge a record, epoch 2^53 - 1", bound="not obeyed", where=EPOCHS, held=_forged_epoch),
    Attack(tried="say that another one leads", bound="one device is not believed", where=EPOCHS, held=_disowned),
    Attack(tried="blocks of an update not asked for", bound="no file", where=LIMITS, held=_unasked_update),
    Attack(tried="garbage on its own topics", bound="others are served", where=LIMITS, held=_garbage),
    Attack(tried="2,000 requests at once", bound="40, then 20 a second", where=LIMITS, held=_flood),
    Attack(tried="take another device's client id", bound="nothing arrives", where=ACCESS, held=_borrowed_name),
)


def run_drill(say: Callable[[Finding], None], attacks: Sequence[Attack] = ATTACKS) -> list[Finding]:
    """Play all attacks, one after another, on one copy; each finding is also told at once.

    Raises RuntimeMissing without mosquitto.
    """
    program = find_mosquitto()
    if program is None:
        raise RuntimeMissing("the drill needs mosquitto on this machine", hint="apt install mosquitto")
    found = []
    with tempfile.TemporaryDirectory(prefix="attack-drill-") as name, loopback_copy(Path(name), program) as here:
        for attack in attacks:
            try:
                finding = Finding(attack=attack, held=attack.held(here))
            except FedcentersError as wrong:
                finding = Finding(attack=attack, held=False, why=wrong.message)
            say(finding)
            found.append(finding)
    return found
