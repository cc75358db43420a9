"""Masked sums over a real store without a network: the devices of an exchange answer one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.exchange.masked_sums import MaskedSums
from coordinator.runtime.exchange.task_messages import NetworkExchange
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.store import Store
from edge_client.protocol.secure import device_stages
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.sum_codec import Work
from edge_client.protocol.summed_task import SummedFit, SummedProbe, Words
from edge_client.protocol.task import ClientId

FEDERATION = "demo"
WordsOf = Callable[[ClientId, Work], Words]


def stage_answer(sums: DeviceSums, task: AskedStage, key: ExchangeKey, words_of: WordsOf) -> tuple[DeviceSums, bytes]:
    """A device's answer to one stage, and what it keeps."""
    place = (key.run, key.round, key.exchange)
    if task.stage == "prekeys":
        random = b"".join(
            hashlib.sha256(f"{sums.cid}/{key}/{i}".encode()).digest() for i in range(device_stages.RANDOM_BYTES // 32)
        )
        return device_stages.offer_prekeys(sums, random, task.after)
    if task.stage == "shares":
        return device_stages.deal(sums, task.message, place)
    if task.stage == "show":
        return device_stages.show(sums, task.message, place)
    if not isinstance(task.work, SummedFit | SummedProbe):
        raise TypeError(f"stage {task.stage} adds nothing")
    return device_stages.mask(sums, task.message, place, task.work.scale, words_of(sums.cid, task.work))


@dataclass
class StoredCohort:
    """The devices of a federation, whose words are `words_of`; those in `silent` do not answer that stage."""

    store: Store
    words_of: WordsOf
    silent: dict[str, Collection[ClientId]] = field(default_factory=dict)
    devices: dict[ClientId, DeviceSums] = field(default_factory=dict)

    def masked_sums(self) -> MaskedSums:
        return MaskedSums(ask=self.ask, store=self.store, federation=FEDERATION)

    def ask(self, key: ExchangeKey, tasks: NetworkExchange) -> list[ClientId]:
        """Each answer is checked and stored before the next device begins."""
        self.store.exchanges.open(key, dict.fromkeys(tasks, ""), 60.0)
        answered = []
        for cid, task in tasks.items():
            if not isinstance(task, AskedStage):
                raise TypeError("only sums are played")
            if cid not in self.silent.get(task.stage, ()):
                self.take(key, cid, task, self.answer(key, cid, task))
                answered.append(cid)
        self.store.exchanges.close(key, set(answered), refused={}, scales={})
        return answered

    def answer(self, key: ExchangeKey, cid: ClientId, task: AskedStage) -> bytes:
        sums = self.devices.get(cid) or DeviceSums(federation=FEDERATION, cid=cid)
        self.devices[cid], data = stage_answer(sums, task, key, self.words_of)
        return data

    def take(self, key: ExchangeKey, cid: ClientId, task: AskedStage, data: bytes) -> None:
        """Check and store an answer, as the coordinator does when it arrives."""
        task.decode(data)
        sha256 = self.store.updates(cid).put(data)
        self.store.exchanges.put_replies(key, [StoredReply(cid, sha256, len(data), 1, "masked", "", 0.0)])
