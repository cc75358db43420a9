"""A device's answers to the stages of a sum: what a coordinator may not ask, and what is deleted when."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from coordinator.rounds.secure_sum import SecureSum, open_sum, relay
from edge_client.errors import Malformed
from edge_client.protocol.secure import device_stages
from edge_client.protocol.secure.device_stages import RANDOM_BYTES, Place
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.secure.sum_messages import PrekeyBatch, RelayedShares, SumForm, UnmaskRequest
from edge_client.protocol.summed_task import SumScale

FORM = SumForm(federation="demo", run="r1", round=3, exchange=1, words=4, bits=24)
SCALE = SumScale(bits=24, devices=6, clip=1.0)
CIDS = [f"dev-{i}" for i in range(6)]
WORDS = np.arange(4, dtype=np.uint32)
ME = CIDS[0]


def at(stage: int) -> Place:
    return (FORM.run, FORM.round, FORM.exchange + stage)


def random_of(cid: str, times: int = 0) -> bytes:
    return hashlib.shake_256(f"{cid}/{times}".encode()).digest(RANDOM_BYTES)


def dealt() -> tuple[DeviceSums, bytes, bytes, SecureSum]:
    """The device `ME` after its roster, that roster, the shares for it, and the coordinator's state."""
    fleet, prekeys = {}, {}
    for cid in CIDS:
        fresh = DeviceSums(federation=FORM.federation, cid=cid)
        fleet[cid], batch = device_stages.offer_prekeys(fresh, random_of(cid), -1)
        prekeys[cid] = PrekeyBatch.from_bytes(batch).keys[0]
    server, sent = open_sum(FORM, prekeys)
    answers = {}
    for cid in CIDS:
        fleet[cid], answers[cid] = device_stages.deal(fleet[cid], sent[cid], at(0))
    server, relays = relay(server, answers)
    return fleet[ME], sent[ME], relays[ME], server


def test_a_sum_is_dealt_masked_and_shown_once_and_then_its_keys_are_gone() -> None:
    mine, _, relay, server = dealt()
    mine, upload = device_stages.mask(mine, relay, at(1), SCALE, WORDS)
    assert device_stages.mask(mine, relay, at(1), SCALE, WORDS)[1] == upload
    asked = UnmaskRequest(roster=server.roster, survivors=tuple(CIDS[1:]), dropped=()).to_bytes()
    mine, _ = device_stages.show(mine, asked, at(2))
    assert mine.sums == {}
    other = UnmaskRequest(roster=server.roster, survivors=tuple(CIDS[1:5]), dropped=(CIDS[5],)).to_bytes()
    for question in (asked, other):  # both kinds of one device's shares are never shown
        with pytest.raises(Malformed, match="no sum"):
            device_stages.show(mine, question, at(2))


def test_a_roster_of_another_exchange_and_a_prekey_that_was_used_are_refused() -> None:
    mine, roster, _, _ = dealt()
    with pytest.raises(Malformed, match="another exchange"):
        device_stages.deal(mine, roster, at(4))
    with pytest.raises(Malformed, match="was used"):
        device_stages.deal(replace(mine, sums={}), roster, at(0))


def test_a_stage_out_of_its_place_is_refused() -> None:
    mine, _, relay, server = dealt()
    with pytest.raises(Malformed, match="another exchange"):
        device_stages.mask(mine, relay, at(5), SCALE, WORDS)
    asked = UnmaskRequest(roster=server.roster, survivors=tuple(CIDS[1:]), dropped=()).to_bytes()
    with pytest.raises(Malformed, match="before the upload"):
        device_stages.show(mine, asked, at(2))
    with pytest.raises(Malformed, match="no sum"):
        device_stages.mask(mine, RelayedShares(roster="0" * 64, envelopes={}).to_bytes(), at(1), SCALE, WORDS)


@pytest.mark.parametrize("scale", [replace(SCALE, devices=5), replace(SCALE, bits=20)])
def test_words_whose_sum_could_overflow_are_not_masked(scale: SumScale) -> None:
    mine, _, relay, _ = dealt()
    with pytest.raises(Malformed, match="could overflow"):
        device_stages.mask(mine, relay, at(1), scale, WORDS)


def test_the_next_roster_ends_the_sum_before() -> None:
    mine, _, _, server = dealt()
    offered = PrekeyBatch.from_bytes(device_stages.offer_prekeys(mine, random_of(ME, 1), -1)[1]).keys[0]
    others = {
        cid: PrekeyBatch.from_bytes(
            device_stages.offer_prekeys(DeviceSums(federation="demo", cid=cid), random_of(cid), -1)[1]
        ).keys[0]
        for cid in CIDS[1:]
    }
    _, rosters = open_sum(replace(FORM, exchange=5), {ME: offered, **others})
    after, _ = device_stages.deal(mine, rosters[ME], at(4))
    assert len(after.sums) == 1
    assert server.roster not in after.sums


def test_prekeys_that_the_coordinator_has_taken_are_deleted_and_later_ones_have_higher_numbers() -> None:
    mine, first = device_stages.offer_prekeys(DeviceSums(federation="demo", cid=ME), random_of(ME), -1)
    mine, second = device_stages.offer_prekeys(mine, random_of(ME, 1), 9)
    assert [key.number for key in PrekeyBatch.from_bytes(second).keys] == list(range(10, 26))
    assert PrekeyBatch.from_bytes(second).keys[:6] == PrekeyBatch.from_bytes(first).keys[10:]
    lost, third = device_stages.offer_prekeys(DeviceSums(federation="demo", cid=ME), random_of(ME, 2), 25)
    assert [key.number for key in PrekeyBatch.from_bytes(third).keys] == list(range(26, 42))
    assert set(lost.roots) == set(range(26, 42))


def test_numbers_that_a_device_can_hardly_have_offered_are_refused_and_change_nothing() -> None:
    """A message that named the last one would leave the device without a prekey for ever, and its state unreadable."""
    fresh = DeviceSums(federation="demo", cid=ME)
    for after in (1_000_000, 2**53 - 1):
        with pytest.raises(Malformed, match=r"^bad_task: "):
            device_stages.offer_prekeys(fresh, random_of(ME), after)
    later, batch = device_stages.offer_prekeys(fresh, random_of(ME), 1_000_000 - 1)
    assert PrekeyBatch.from_bytes(batch).keys[0].number == 1_000_000
    device_stages.offer_prekeys(later, random_of(ME), later.next_number + 1_000_000 - 1)
