"""A coordinator that lies tells some neighbours of a device that it uploaded, and others that it dropped out.

Each neighbour shows one kind of share, and both kinds together take the masks off. docs/security.md names this limit.
It needs twice the threshold of neighbours.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.aggregation.packed_words import add_packed_into, read_upload
from coordinator.rounds.secure_recovery import combine_shares
from edge_client.errors import Malformed
from edge_client.protocol.secure import keys
from edge_client.protocol.secure.device_sums import on_roster, on_unmask
from edge_client.protocol.secure.masks import add_masks_into, pair_sign
from edge_client.protocol.secure.parameters import threshold_of
from edge_client.protocol.secure.sum_messages import RevealedShares, SumRoster, UnmaskRequest
from edge_client.protocol.summed_task import Words
from tests.support.secure_cohort import FORM, SecureCohort, vector_of

VICTIM = "dev-000"


def told(cohort: SecureCohort, *, threshold: int, devices: int) -> None:
    """The rosters that the coordinator sends in place of its own."""
    for cid, sent in cohort.sent["roster"].items():
        roster = replace(SumRoster.from_bytes(sent), threshold=threshold, devices=devices)
        cohort.sent["roster"][cid] = roster.to_bytes()


def answer(cohort: SecureCohort, holder: str, *, dropped: bool) -> RevealedShares:
    """What a neighbour of the victim shows where the victim is said to have dropped out, or not."""
    near = set(cohort.server.graph[holder])
    gone = {VICTIM} if dropped else set[str]()
    asked = UnmaskRequest(roster=cohort.server.roster, survivors=tuple(near - gone), dropped=tuple(gone))
    return RevealedShares.from_bytes(cohort.on_device(holder, on_unmask, asked.to_bytes()))


def vector_in_two_views(cohort: SecureCohort, threshold: int) -> Words:
    """The victim's vector, from its upload and what two halves of its neighbours show."""
    near, context = cohort.server.graph[VICTIM], cohort.server.context
    told_dropped, told_alive = near[:threshold], near[-threshold:]
    of_mask = {near.index(n) + 1: answer(cohort, n, dropped=True).mask_shares[VICTIM] for n in told_dropped}
    of_self = {near.index(n) + 1: answer(cohort, n, dropped=False).self_shares[VICTIM] for n in told_alive}
    private = keys.mask_private(combine_shares(of_mask))
    masks = [(keys.self_mask_key(combine_shares(of_self), context), -1)]
    for other in near:
        key = keys.pair_mask_key(private, cohort.server.devices[other].mask, context, VICTIM, other)
        masks.append((key, -pair_sign(VICTIM, other)))
    words: Words = np.zeros(FORM.words, np.uint32)
    upload = read_upload(cohort.uploads[VICTIM], roster=cohort.server.roster, words=FORM.words, bits=FORM.bits)
    add_packed_into(words, upload, FORM.bits)
    add_masks_into(words, masks)
    return words & np.uint32(2**FORM.bits - 1)


@pytest.mark.parametrize("devices", [17, 9])
def test_two_views_of_a_sum_that_is_said_to_have_seventeen_devices_tell_a_vector_as_documented(devices: int) -> None:
    """Nine are enough: each has the eight neighbours of a sum of seventeen."""
    cohort = SecureCohort.of(devices)
    told(cohort, devices=17, threshold=3)
    cohort.deal()
    cohort.upload()
    assert vector_in_two_views(cohort, 3).tolist() == vector_of(VICTIM).tolist()


@pytest.mark.parametrize("devices", range(5, 17))
def test_a_device_of_a_small_sum_deals_no_shares_of_which_two_halves_of_its_neighbours_hold_enough(
    devices: int,
) -> None:
    for threshold in range(2, (devices - 1) // 2 + 1):
        cohort = SecureCohort.of(devices)
        told(cohort, threshold=threshold, devices=devices)
        with pytest.raises(Malformed, match=r"^bad_task: .*is not secret"):
            cohort.on_device(VICTIM, on_roster, cohort.sent["roster"][VICTIM])
    assert 2 * threshold_of(devices, devices - 1) > devices - 1
