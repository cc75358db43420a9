"""A coordinator that lies tells the devices of a sum different things about who takes part and who dropped out.

Each neighbour shows one kind of share of each device. Both kinds of the victim's shares take the masks off; they need
twice the threshold of neighbours. So do its self shares and the mask keys of all that it masked with, which need no
second view of the victim. docs/security.md names these limits.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from edge_client.protocol.secure.sum_messages import RelayedShares, RevealedShares, SumRoster, UnmaskRequest
from edge_client.protocol.summed_task import Words
from tests.support.secure_cohort import FORM, SecureCohort, vector_of

VICTIM = "dev-000"


def told(cohort: SecureCohort, *, threshold: int, devices: int) -> None:
    """The rosters that the coordinator sends in place of its own."""
    for cid, sent in cohort.sent["roster"].items():
        roster = replace(SumRoster.from_bytes(sent), threshold=threshold, devices=devices)
        cohort.sent["roster"][cid] = roster.to_bytes()


def answer(cohort: SecureCohort, holder: str, gone: set[str]) -> RevealedShares:
    """What a device shows where these of its neighbours are said to have dropped out, and the others not."""
    near = set(cohort.server.graph[holder])
    asked = UnmaskRequest(roster=cohort.server.roster, survivors=tuple(near - gone), dropped=tuple(gone))
    return RevealedShares.from_bytes(cohort.on_device(holder, on_unmask, asked.to_bytes()))


def vector_in_two_views(cohort: SecureCohort, threshold: int) -> Words:
    """The victim's vector, from its upload and what two halves of its neighbours show."""
    near = cohort.server.graph[VICTIM]
    told_dropped, told_alive = near[:threshold], near[-threshold:]
    of_mask = {near.index(n) + 1: answer(cohort, n, {VICTIM}).mask_shares[VICTIM] for n in told_dropped}
    of_self = {near.index(n) + 1: answer(cohort, n, set()).self_shares[VICTIM] for n in told_alive}
    private = keys.mask_private(combine_shares(of_mask))
    pairs = {other: (private, cohort.server.devices[other].mask) for other in near}
    return without_masks(cohort, combine_shares(of_self), pairs)


def without_masks(cohort: SecureCohort, self_secret: bytes, pairs: Mapping[str, tuple[bytes, bytes]]) -> Words:
    """The victim's vector, from its upload, its self secret, and a private and a public key of each pair mask."""
    context = cohort.server.context
    masks = [(keys.self_mask_key(self_secret, context), -1)]
    for other, (private, public) in pairs.items():
        key = keys.pair_mask_key(private, public, context, VICTIM, other)
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


def test_a_coordinator_that_lies_learns_a_vector_of_six_devices_without_a_second_view_of_it_as_documented() -> None:
    """The victim masks with three neighbours only, and each device shows mask shares of two that it is told are gone.

    The victim itself is told nothing false: each says that it uploaded.
    """
    cohort = SecureCohort.of(6)
    cohort.deal()
    a, b, c, d, e = cohort.server.graph[VICTIM]
    relay = RelayedShares.from_bytes(cohort.sent["relay"][VICTIM])
    cohort.sent["relay"][VICTIM] = replace(relay, envelopes={n: relay.envelopes[n] for n in (a, b, c)}).to_bytes()
    cohort.upload()
    shown = {n: answer(cohort, n, gone) for n, gone in {a: {b, c}, b: {a, c}, c: {a, b}, d: {a, b}, e: {a, c}}.items()}

    def recovered(dealer: str, kind: str) -> bytes:
        near = cohort.server.graph[dealer]
        held = {near.index(n) + 1: getattr(one, kind).get(dealer) for n, one in shown.items() if n != dealer}
        shares = [(x, share) for x, share in held.items() if share is not None]
        return combine_shares(dict(shares[: cohort.server.parameters.threshold]))

    own = cohort.server.devices[VICTIM].mask
    pairs = {n: (keys.mask_private(recovered(n, "mask_shares")), own) for n in (a, b, c)}
    assert without_masks(cohort, recovered(VICTIM, "self_shares"), pairs).tolist() == vector_of(VICTIM).tolist()
