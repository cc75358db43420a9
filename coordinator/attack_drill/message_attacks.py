"""Attacks with single messages and connections: topics, certificates, records, floods, blocks that no one asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np

from coordinator.attack_drill.findings import ACCESS, EPOCHS, LIMITS, Attack, Seen
from coordinator.attack_drill.loopback_copy import (
    FEDERATION,
    HONEST,
    HOSTILE,
    PATIENCE_S,
    REFUSAL_S,
    SHA256,
    TOPICS,
    LoopbackCopy,
    presence,
    request,
)
from coordinator.attack_drill.stubborn_transport import StubbornTransport
from coordinator.attack_drill.tiny_program import SCHEMA
from coordinator.runtime.catalog_server import REQUESTS_BURST, REQUESTS_PER_S
from coordinator.runtime.leadership import Superseded
from edge_client.errors import FedcentersError, NetworkError
from edge_client.protocol import codecs, messages
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.nearest.catalog import Catalog, CatalogCenter
from edge_client.protocol.task import Reply
from edge_client.transport.base import Message, Will
from edge_client.transport.mqtt import MqttTransport
from edge_client.transport.tls import Credentials

LABEL = "0123456789abcdef"
FORGED = b"forged"
FLOOD = 2_000  # requests
MAX_ANSWERS = 42  # to a flood: the burst, a refusal, and what was asked last; besides 20 a second
FILE = manifest_of(b"the file of a center", "container")
CENTER = CatalogCenter(model=manifest_of(b"a center", "model"), devices=1, files={"onnx": FILE})
CATALOG = Catalog(version=1, program=FILE, containers={}, centers=(CENTER,), abstain=9.0)


def _foreign_topics(here: LoopbackCopy) -> Seen:
    topics = (
        TOPICS.state(HONEST),
        TOPICS.request(HONEST),
        TOPICS.upload(0, HONEST, LABEL, 0),
        TOPICS.down(HONEST),
        TOPICS.coord(),
        TOPICS.catalog(),
        TOPICS.upload(9, HOSTILE, LABEL, 0),  # of an aggregator that there is not
        f"fc/v1/other/rq/{HOSTILE}",
    )
    heard = [
        m for topic in topics for keep in (False, True) for m in here.take(here.hostile, topic, FORGED, retain=keep)
    ]
    arrived = sum(message.payload == FORGED for message in heard)
    return Seen(not arrived, f"{arrived} of {2 * len(topics)} messages arrived")


def _foreign_reads(here: LoopbackCopy) -> Seen:
    here.hostile.transport.subscribe("#", f"fc/v1/{FEDERATION}/dn/+/t", f"fc/v1/{FEDERATION}/in/#")
    here.take(here.hostile, TOPICS.request(HOSTILE), b"{}")
    here.coordinator.transport.publish(TOPICS.down(HONEST), b"a secret")
    here.take(here.honest, TOPICS.upload(0, HONEST, LABEL, 0), b"an update")
    read = sum(HONEST in message.topic for message in here.told(here.hostile))
    return Seen(not read, f"{read} messages of another device were read")


def _retained_blocks(here: LoopbackCopy) -> Seen:
    for index in range(40):
        here.take(here.hostile, TOPICS.upload(0, HOSTILE, LABEL, index), bytes(10_000), retain=True)
    here.coordinator.transport.subscribe(f"fc/v1/{FEDERATION}/in/#")  # sends again what is kept
    heard = here.take(here.honest, TOPICS.request(HONEST), b"{}")
    kept = sum(message.retained and bool(message.payload) for message in heard)
    return Seen(not kept, f"the broker keeps {kept}")


def _many_samples(here: LoopbackCopy) -> Seen:
    here.take(here.hostile, TOPICS.state(HOSTILE), presence(4), retain=True)
    before, held = here.dispatcher.unreadable, True
    with suppress(FedcentersError):  # this side refuses to write it as well
        here.take(here.hostile, TOPICS.state(HOSTILE), presence(2**40), retain=True)
        held = here.dispatcher.unreadable > before
    known = here.dispatcher.fleet.devices[HOSTILE].n
    return Seen(held and known == 4, f"the device counts as one with {known} samples")  # noqa: PLR2004 - announced above


def _forged_epoch(here: LoopbackCopy) -> Seen:
    """Also where the broker's list failed: the record reaches the coordinator, which must not obey it."""
    fields: dict[str, Any] = {"boot": "f" * 16, "online": True, "proto": [1], "spread_ms": 0, "block": 4096}
    forged = messages.write_message("coord", ident="x", t_ms=0, epoch=2**53 - 1, src=["mqtt"], window=4, **fields)
    try:
        here.dispatcher.dispatch(Message(TOPICS.coord(), forged))
    except Superseded as obeyed:
        return Seen(held=False, words=str(obeyed))
    return Seen(held=True, words="the coordinator leads on")


def _disowned(here: LoopbackCopy) -> Seen:
    try:
        for _ in range(3):
            here.take(here.hostile, TOPICS.request(HOSTILE), request("nack", re="c1-1", code="old_epoch"))
    except Superseded as believed:
        return Seen(held=False, words=str(believed))
    return _others_are_served(here)


def _flood(here: LoopbackCopy) -> Seen:
    here.told(here.hostile)
    payload = request("get", sha256=SHA256, block=4096, at=[[0, 1]])
    began_s = time.monotonic()
    for _ in range(FLOOD):
        here.hostile.transport.publish(TOPICS.request(HOSTILE), payload)
    here.take(here.hostile, TOPICS.request(HOSTILE), payload)
    answers = len({message.payload for message in here.told(here.hostile)})  # one for each filter that matches
    took_s = time.monotonic() - began_s
    others = _others_are_served(here)
    few = answers <= MAX_ANSWERS + 20 * took_s
    return Seen(few and others.held is True, f"{answers} answers in {took_s:.1f} s; {others.words}")


def _reports(here: LoopbackCopy) -> Seen:
    began_s = time.monotonic()
    payloads = [
        request("served", center=0, sha256=FILE.sha256, n=1, metrics={"loss": float(number)}) for number in range(FLOOD)
    ]
    _send_all(here, payloads)
    written = sum(event["event"] == "served" for event in map(json.loads, here.store.events.lines()))
    return Seen(0 < written <= _paced(began_s), f"{written} of {FLOOD} were written to the log")


def _questions(here: LoopbackCopy) -> Seen:
    began_s = time.monotonic()
    stats = manifest_of(codecs.encode_stats(Reply(n=9, losses=np.ones(1)), SCHEMA), "stats", inline=True)
    here.told(here.hostile)
    _send_all(here, [request("near", how="loss", stats=stats, n=9)] * FLOOD)
    answers = len({message.payload for message in here.told(here.hostile) if b'"k":"near"' in message.payload})
    return Seen(0 < answers <= _paced(began_s), f"{answers} of {FLOOD} were answered")


def _send_all(here: LoopbackCopy, payloads: Sequence[bytes]) -> None:
    here.take(here.hostile, TOPICS.state(HOSTILE), presence(4), retain=True)
    here.dispatcher.catalog.publish(CATALOG, manifest_of(CATALOG.to_bytes(), "catalog"), SCHEMA)
    for payload in payloads:
        here.hostile.transport.publish(TOPICS.request(HOSTILE), payload)
    here.take(here.hostile, TOPICS.request(HOSTILE), payloads[-1])


def _paced(began_s: float) -> float:
    return REQUESTS_BURST + REQUESTS_PER_S * (time.monotonic() - began_s)


def _wills(here: LoopbackCopy) -> Seen:
    """What the broker would publish for it when it is gone; a second connection of its own name ends the first."""
    arrived, credentials = 0, here.site.credentials(HOSTILE)
    here.hostile.transport.close()
    for number, topic in enumerate((TOPICS.coord(), TOPICS.state(HONEST), TOPICS.request(HONEST))):
        with ExitStack() as stack:
            for will in (Will(topic, FORGED), None):
                made = StubbornTransport(
                    here.site.work.plan.broker, TOPICS.client_id(HOSTILE), will=will, credentials=credentials
                )
                stack.callback(made.close)
                with suppress(NetworkError):  # the broker may refuse a connection for its will
                    made.connect()
            made.publish(TOPICS.request(HOSTILE), mark := f"after will {number}".encode())
            arrived += sum(message.payload == FORGED for message in here.coordinator.until(mark))
    return Seen(not arrived, f"{arrived} of 3 were published")


def _garbage(here: LoopbackCopy) -> Seen:
    for payload in (b"", b"{" * 50_000, b'{"v":1e999}', bytes(1_000_000), b"\x1b[2J", b'{"v":1,"k":"rdy"}'):
        here.take(here.hostile, TOPICS.request(HOSTILE), payload)
        here.take(here.hostile, TOPICS.upload(0, HOSTILE, LABEL, 65_535), payload)
    return _others_are_served(here)


def _others_are_served(here: LoopbackCopy) -> Seen:
    served = here.honest_is_served()
    return Seen(served, f"another device's request {'was' if served else 'was NOT'} answered")


def _unasked_update(here: LoopbackCopy) -> Seen:
    for index in range(100):
        here.take(here.hostile, TOPICS.upload(0, HOSTILE, LABEL, index), bytes(4_112))
    files = len(list((here.store.folder / "updates").glob("*/partial/*")))
    return Seen(not files, f"100 blocks left {files} files")


def _borrowed_name(here: LoopbackCopy) -> Seen:
    """A valid certificate with the id of another: the broker gives it its certificate's name."""
    credentials = here.site.credentials(HOSTILE)
    made = StubbornTransport(here.site.work.plan.broker, TOPICS.client_id(HONEST), credentials=credentials)
    with closing(made):
        made.connect()
        made.receive(PATIENCE_S)
        made.publish(TOPICS.request(HONEST), FORGED)
        made.publish(TOPICS.request(HOSTILE), b"after it")
        arrived = sum(message.payload == FORGED for message in here.coordinator.until(b"after it"))
    return Seen(not arrived, f"{arrived} messages arrived under the other name")


def _no_certificate(here: LoopbackCopy) -> Seen:
    ca = Credentials(ca=here.site.credentials(HOSTILE).ca)
    made = MqttTransport(here.site.work.plan.broker, "anyone", credentials=ca, connect_timeout_s=REFUSAL_S)
    with ExitStack() as stack:
        stack.callback(made.close)
        try:
            made.connect()
        except NetworkError as refused:
            return Seen(held=True, words=refused.message.partition(": ")[2].partition(" (")[0])
    return Seen(held=False, words="connected")


MESSAGE_ATTACKS = (
    Attack(tried="connect without a certificate", bound="refused", where=ACCESS, play=_no_certificate),
    Attack(tried="write to topics of others", bound="nothing arrives", where=ACCESS, play=_foreign_topics),
    Attack(tried="read all topics", bound="only its own", where=ACCESS, play=_foreign_reads),
    Attack(tried="leave 40 retained blocks", bound="deleted", where=LIMITS, play=_retained_blocks),
    Attack(tried="announce 2^40 samples", bound="2^31 at most", where=LIMITS, play=_many_samples),
    Attack(tried="forge a record, epoch 2^53 - 1", bound="signed records only", where=EPOCHS, play=_forged_epoch),
    Attack(tried="say that another one leads", bound="two devices and half of all", where=EPOCHS, play=_disowned),
    Attack(tried="blocks of an update not asked for", bound="no file", where=LIMITS, play=_unasked_update),
    Attack(tried="garbage on its own topics", bound="others are served", where=LIMITS, play=_garbage),
    Attack(tried="2,000 requests at once", bound="40, then 20 a second", where=LIMITS, play=_flood),
    Attack(tried="2,000 reports of a center", bound="6, then 6 a minute", where=LIMITS, play=_reports),
    Attack(tried="2,000 questions for a center", bound="6, then 6 a minute", where=LIMITS, play=_questions),
    Attack(tried="wills on topics of others", bound="nothing arrives", where=ACCESS, play=_wills),
    Attack(tried="take another device's client id", bound="nothing arrives", where=ACCESS, play=_borrowed_name),
)
