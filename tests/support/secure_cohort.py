"""A cohort that sums vectors under masks, in one process: the device's and the coordinator's real steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from coordinator.aggregation.packed_words import add_packed_into, read_upload
from coordinator.rounds.secure_recovery import Secrets
from coordinator.rounds.secure_sum import SecureSum, SumFailed, ask_shares, open_sum, recover, relay, unmask_into
from edge_client.protocol.secure import device_sums
from edge_client.protocol.secure.device_sums import (
    DeviceSums,
    on_relay,
    on_roster,
    on_unmask,
    on_vector,
)
from edge_client.protocol.secure.sum_messages import (
    DealtShares,
    PrekeyBatch,
    RelayedShares,
    RevealedShares,
    SumForm,
    SumRoster,
    UnmaskRequest,
)
from edge_client.protocol.summed_task import Words

Step = Callable[..., "DeviceSums | tuple[DeviceSums, bytes]"]
FORM = SumForm(federation="demo", run="r1", round=3, exchange=1, words=5, bits=20)
READERS = {  # of each message of a sum
    "prekeys": PrekeyBatch.from_bytes,
    "roster": SumRoster.from_bytes,
    "shares": DealtShares.from_bytes,
    "relay": RelayedShares.from_bytes,
    "unmask": UnmaskRequest.from_bytes,
    "reveal": RevealedShares.from_bytes,
}


def with_answer(done: DeviceSums | tuple[DeviceSums, bytes]) -> tuple[DeviceSums, bytes]:
    """What a step gave, as a state and an answer."""
    return done if isinstance(done, tuple) else (done, b"")


def cids(count: int) -> list[str]:
    return [f"dev-{i:03}" for i in range(count)]


def root_of(cid: str, number: int, salt: str = "") -> bytes:
    """The bytes of a prekey's root; a test wants the same ones each time."""
    return hashlib.sha256(f"{salt}/{cid}/{number}".encode()).digest()


def vector_of(cid: str, form: SumForm = FORM) -> Words:
    """A device's vector: words below 2^bits, another one for each device."""
    rng = np.random.default_rng(list(cid.encode()))
    return rng.integers(0, 2**form.bits, form.words, np.uint32)


@dataclass
class SecureCohort:
    """Devices and a coordinator between stages; `sent` has the last message of each kind to each device."""

    devices: dict[str, DeviceSums]
    form: SumForm = FORM
    server: SecureSum = field(init=False)
    sent: dict[str, dict[str, bytes]] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    shown: dict[str, bytes] = field(default_factory=dict)
    transcript: list[bytes] = field(default_factory=list)  # every byte that the coordinator received
    outcome: Secrets | SumFailed | None = None

    @staticmethod
    def of(count: int, form: SumForm = FORM, *, salt: str = "", least_members: int = 5) -> SecureCohort:
        """A cohort whose rosters are sent."""
        devices, offered = {}, {}
        for cid in cids(count):
            roots = tuple(root_of(cid, number, salt) for number in range(2))
            fresh = DeviceSums(federation=form.federation, cid=cid)
            devices[cid], batch = device_sums.refill(fresh, roots)
            offered[cid] = PrekeyBatch.from_bytes(batch).keys[0]
        cohort = SecureCohort(devices=devices, form=form)
        cohort.server, cohort.sent["roster"] = open_sum(form, offered, least_members=least_members)
        return cohort

    def on_device(self, cid: str, step: Step, *told: object) -> bytes:
        """A step of device_sums.py; -> what the device sends, empty where it sends nothing."""
        self.devices[cid], out = with_answer(step(self.devices[cid], *told))
        return out

    def deal(self, silent: Collection[str] = (), changed: Mapping[str, bytes] | None = None) -> None:
        """`changed` are shares that devices send in place of their own."""
        rosters = {cid: roster for cid, roster in self.sent["roster"].items() if cid not in silent}
        dealt = {cid: self.on_device(cid, on_roster, roster) for cid, roster in rosters.items()} | dict(changed or {})
        self.transcript += dealt.values()
        with self.may_fail():
            self.server, self.sent["relay"] = relay(self.server, dealt)

    def upload(self, silent: Collection[str] = (), vectors: Mapping[str, Words] | None = None) -> None:
        if self.outcome is not None:
            return
        for cid, shares in self.sent["relay"].items():
            if cid in silent:
                continue
            self.on_device(cid, on_relay, shares)
            words = vector_of(cid, self.form) if vectors is None else vectors[cid]
            blob = self.on_device(cid, on_vector, self.server.roster, words)
            read_upload(blob, roster=self.server.roster, words=self.form.words, bits=self.form.bits)
            self.uploads[cid] = blob
            self.transcript.append(blob)
        with self.may_fail():
            self.server, self.sent["unmask"] = ask_shares(self.server, self.uploads)

    def reveal(self, silent: Collection[str] = (), changed: Mapping[str, bytes] | None = None) -> None:
        """`changed` are answers that devices send in place of their own."""
        if self.outcome is not None:
            return
        asked = {cid: request for cid, request in self.sent["unmask"].items() if cid not in silent}
        self.shown = {cid: self.on_device(cid, on_unmask, request) for cid, request in asked.items()}
        self.shown |= changed or {}
        self.transcript += self.shown.values()
        with self.may_fail():
            self.outcome = recover(self.server, self.shown)

    @contextmanager
    def may_fail(self) -> Iterator[None]:
        try:
            yield
        except SumFailed as failed:
            self.outcome = failed

    def run(self, *silent: Collection[str], vectors: Mapping[str, Words] | None = None) -> None:
        """All stages; `silent` are those that do not answer in the first, second and third."""
        first, second, third = [*silent, (), (), ()][:3]
        self.deal(first)
        self.upload(second, vectors)
        self.reveal(third)

    def sum(self) -> Words:
        """The unmasked sum of the survivors' uploads."""
        if not isinstance(self.outcome, Secrets):
            raise TypeError(f"no sum: {self.outcome}")
        total = np.zeros(self.form.words, np.uint32)
        for cid in self.server.uploaded:
            packed = read_upload(
                self.uploads[cid], roster=self.server.roster, words=self.form.words, bits=self.form.bits
            )
            add_packed_into(total, packed, self.form.bits)
        unmask_into(self.server, self.outcome, total)
        return total

    def plain_sum(self) -> Words:
        """The sum of the survivors' vectors, modulo 2^bits."""
        total = np.sum([vector_of(cid, self.form) for cid in self.server.uploaded], axis=0, dtype=np.uint32)
        return np.asarray(total & np.uint32(2**self.form.bits - 1))
