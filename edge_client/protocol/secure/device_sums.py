"""A device's side of masked sums: pure steps from a state to the next one and, where it has an answer, what to send.

The caller stores the new state before it sends anything. All that is sent follows from the stored state, so after a
crash or a repeated message the device sends the same bytes again. A step that breaks a rule raises Malformed and
changes nothing. The rules:

* a prekey is used for one roster, ever: its root leaves `roots` with the first one;
* one vector is masked per sum: two vectors under the same masks would tell their difference;
* of one neighbour a device shows one kind of share, ever: the self share of a survivor, the mask share of a dropped
  one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from edge_client.errors import Malformed
from edge_client.protocol.secure import keys
from edge_client.protocol.secure.masks import add_masks_into, pack_words, pair_sign
from edge_client.protocol.secure.parameters import threshold_of
from edge_client.protocol.secure.shamir import SHARE_BYTES
from edge_client.protocol.secure.sum_messages import (
    MAX_PREKEYS,
    DealtShares,
    PrekeyBatch,
    RelayedShares,
    RevealedShares,
    SumRoster,
    UnmaskRequest,
    write_upload,
)
from edge_client.protocol.summed_task import Words


@dataclass(frozen=True, kw_only=True)
class DeviceSum:
    """One sum that the device takes part in."""

    roster: SumRoster
    root: bytes  # of the prekey
    shares: Mapping[str, bytes] | None = (
        None  # per neighbour that takes part: both shares [64 bytes]; empty if unreadable
    )
    upload: str | None = None  # sha256 of the masked upload
    shown: Mapping[str, str] = field(default_factory=dict)  # per neighbour the kind of share that was shown


@dataclass(frozen=True, kw_only=True)
class DeviceSums:
    """All that a device stores for secure sums. Roots [32 bytes] are secret; each is deleted when its sum ends."""

    federation: str
    cid: str
    roots: Mapping[int, bytes] = field(default_factory=dict)  # of unused prekeys, by number
    next_number: int = 0
    sums: Mapping[str, DeviceSum] = field(default_factory=dict)  # by the sha256 of the roster


def refill(state: DeviceSums, random: tuple[bytes, ...]) -> tuple[DeviceSums, bytes]:
    """Refill to 16 unused prekeys from fresh random roots [32 bytes each]; roots beyond that are ignored."""
    fresh = random[: max(0, MAX_PREKEYS - len(state.roots))]
    if any(len(root) != keys.ROOT_BYTES for root in fresh) or len(set(fresh)) < len(fresh):
        raise Malformed("bad_field", f"a root has {keys.ROOT_BYTES} random bytes")
    roots = dict(state.roots) | dict(enumerate(fresh, state.next_number))
    batch = PrekeyBatch(keys=tuple(keys.public_prekey(number, roots[number]) for number in sorted(roots)))
    return replace(state, roots=roots, next_number=state.next_number + len(fresh)), batch.to_bytes()


def on_roster(state: DeviceSums, data: bytes) -> tuple[DeviceSums, bytes]:
    """Take part in the sum of a roster for this device, and deal shares of its secrets."""
    roster = SumRoster.from_bytes(data)
    known = state.sums.get(roster.roster)
    if known is not None:
        if known.roster != roster:
            raise Malformed("bad_task", "another roster under the same name")
        return state, _dealt(state, known)
    if roster.cid != state.cid:
        raise Malformed("bad_task", f"a roster for {roster.cid}")
    if roster.number not in state.roots:
        raise Malformed("bad_task", f"prekey {roster.number} was used, or never offered")
    if roster.threshold != threshold_of(roster.devices, len(roster.neighbours)):
        raise Malformed(
            "bad_task", f"threshold {roster.threshold} of {len(roster.neighbours)} neighbours is not secret"
        )
    roots = {number: root for number, root in state.roots.items() if number != roster.number}
    mine = DeviceSum(roster=roster, root=state.roots[roster.number])
    sealed = _dealt(state, mine)  # may refuse a neighbour's key, before anything is used
    return replace(state, roots=roots, sums=dict(state.sums) | {roster.roster: mine}), sealed


def _dealt(state: DeviceSums, mine: DeviceSum) -> bytes:
    roster, context = mine.roster, mine.roster.context(state.federation)
    near = sorted(roster.neighbours)
    dealt = keys.deal_shares(mine.root, context, threshold=roster.threshold, count=len(near))
    private, envelopes = keys.seal_private(mine.root), {}
    for cid, of_mask, of_self in zip(near, dealt["mask"], dealt["self"], strict=True):
        sealed = keys.seal(private, roster.neighbours[cid].seal, context, state.cid, cid, of_mask + of_self)
        digests = _digests(of_mask + of_self, context, state.cid, cid)
        envelopes[cid] = sealed + digests
    committed = keys.commitment(keys.self_secret(mine.root, context), context, state.cid)
    return DealtShares(roster=roster.roster, commitment=committed, envelopes=envelopes).to_bytes()


def on_relay(state: DeviceSums, data: bytes) -> DeviceSums:
    """Open the envelopes of the neighbours that take part."""
    relay = RelayedShares.from_bytes(data)
    mine = _sum_of(state, relay.roster)
    roster, private = mine.roster, keys.seal_private(mine.root)
    if not set(relay.envelopes) <= set(roster.neighbours):
        raise Malformed("bad_task", "shares of a device that is no neighbour")
    if len(relay.envelopes) < roster.threshold:
        raise Malformed(
            "bad_task", f"{len(relay.envelopes)} neighbours take part, at least {roster.threshold} are needed"
        )
    shares = {}
    for cid, envelope in sorted(relay.envelopes.items()):
        shares[cid] = _opened(state, mine, private, cid, envelope)
    if mine.shares is not None and mine.shares != shares:
        raise Malformed("bad_task", "other shares than before")
    return _with(state, replace(mine, shares=shares))


def _opened(state: DeviceSums, mine: DeviceSum, private: bytes, dealer: str, envelope: bytes) -> bytes:
    """Both shares [64 bytes] of a neighbour; empty where they do not open or are not the announced ones."""
    context = mine.roster.context(state.federation)
    sealed, digests = envelope[: keys.SEALED_BYTES], envelope[keys.SEALED_BYTES :]
    try:
        plain = keys.unseal(private, mine.roster.neighbours[dealer].seal, context, dealer, state.cid, sealed)
    except Malformed:  # the others can recover the neighbour's secrets without this device
        return b""
    return plain if _digests(plain, context, dealer, state.cid) == digests else b""


def _digests(plain: bytes, context: keys.SumContext, dealer: str, holder: str) -> bytes:
    of_mask, of_self = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
    return keys.share_digest(of_mask, context, "mask", dealer, holder) + keys.share_digest(
        of_self, context, "self", dealer, holder
    )


def on_vector(
    state: DeviceSums, name: str, words: Words, between: Callable[[], None] = lambda: None
) -> tuple[DeviceSums, bytes]:
    """Mask the device's own vector, uint32 [words], for the sum of this roster; it is not changed."""
    mine = _sum_of(state, name)
    roster, context = mine.roster, mine.roster.context(state.federation)
    if mine.shares is None:
        raise Malformed("bad_task", "no shares have come yet: a vector without pair masks is never sent")
    if words.shape != (roster.words,) or words.dtype != "uint32":
        raise Malformed("bad_field", f"a vector {words.dtype}{list(words.shape)} for {roster.words} words of uint32")
    private = keys.mask_private(keys.mask_secret(mine.root))
    masks = [(keys.self_mask_key(keys.self_secret(mine.root, context), context), 1)]
    for cid in mine.shares:
        key = keys.pair_mask_key(private, roster.neighbours[cid].mask, context, state.cid, cid)
        masks.append((key, pair_sign(state.cid, cid)))
    masked = words.copy()
    add_masks_into(masked, masks, between)
    upload = write_upload(roster.roster, roster.words, roster.bits, pack_words(masked, roster.bits))
    sha256 = hashlib.sha256(upload).hexdigest()
    if mine.upload not in (None, sha256):
        raise Malformed("bad_task", "another vector was masked in this sum")
    return _with(state, replace(mine, upload=sha256)), upload


def on_unmask(state: DeviceSums, data: bytes) -> tuple[DeviceSums, bytes]:
    """Answer the coordinator's question for shares."""
    asked = UnmaskRequest.from_bytes(data)
    mine = _sum_of(state, asked.roster)
    if mine.shares is None or mine.upload is None:
        raise Malformed("bad_task", "asked for shares before the upload")
    if {*asked.survivors, *asked.dropped} != set(mine.shares):
        raise Malformed("bad_task", "survivors and dropped are not the neighbours that take part")
    if len(asked.survivors) < mine.roster.threshold:
        raise Malformed("bad_task", f"{len(asked.survivors)} neighbours survive, at least {mine.roster.threshold} must")
    shown = dict.fromkeys(asked.survivors, "self") | dict.fromkeys(asked.dropped, "mask")
    if mine.shown and mine.shown != shown:
        raise Malformed("bad_task", "other shares were shown before; of one device only one kind is ever shown")
    readable = {cid: both for cid, both in mine.shares.items() if both}
    answer = RevealedShares(
        roster=asked.roster,
        self_shares={cid: both[SHARE_BYTES:] for cid, both in readable.items() if shown[cid] == "self"},
        mask_shares={cid: both[:SHARE_BYTES] for cid, both in readable.items() if shown[cid] == "mask"},
    )
    return _with(state, replace(mine, shown=shown)), answer.to_bytes()


def on_end(state: DeviceSums, name: str) -> DeviceSums:
    """The sum is over for this device: its root and shares are deleted."""
    return replace(state, sums={other: of for other, of in state.sums.items() if other != name})


def _sum_of(state: DeviceSums, roster: str) -> DeviceSum:
    if roster not in state.sums:
        raise Malformed("bad_task", f"no sum {roster:.16} is open here")
    return state.sums[roster]


def _with(state: DeviceSums, mine: DeviceSum) -> DeviceSums:
    return replace(state, sums=dict(state.sums) | {mine.roster.roster: mine})
