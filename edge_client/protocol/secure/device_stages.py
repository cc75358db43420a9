"""A device's answer to one stage of a masked sum. Pure: what changes is returned, and stored with the answer.

The rules of the keys and shares are in device_sums.py; this file ties a stage to its task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge_client.errors import Malformed
from edge_client.protocol.secure import device_sums
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.secure.keys import ROOT_BYTES
from edge_client.protocol.secure.sum_messages import MAX_PREKEYS, RelayedShares, SumRoster, UnmaskRequest
from edge_client.protocol.summed_task import SumScale, Words

Place = tuple[str, int, int]  # run, round and exchange of a task
RANDOM_BYTES = MAX_PREKEYS * ROOT_BYTES
MAX_NUMBER_JUMP = 1_000_000  # prekeys of which a device may have lost its state; numbers end at 2^53 - 1
STAGE_AFTER_ROSTER = {"add": 1, "show": 2}  # numbers of exchanges after the roster's


def offer_prekeys(sums: DeviceSums, random: bytes, after: int) -> tuple[DeviceSums, bytes]:
    """Refill the unused prekeys from RANDOM_BYTES random bytes, and offer them; fresh ones have numbers beyond `after`.

    Sums have taken all up to there, also those of which the device never saw the roster, or of whose keys it lost its
    state since. Raises Malformed for numbers that it can hardly have offered: it would soon have none left.
    """
    if after >= sums.next_number + MAX_NUMBER_JUMP:
        raise Malformed("bad_task", f"prekeys after {after}, and the next one here is {sums.next_number}")
    left = {number: root for number, root in sums.roots.items() if number > after}
    sums = replace(sums, next_number=max(sums.next_number, after + 1), roots=left)
    roots = tuple(random[at : at + ROOT_BYTES] for at in range(0, RANDOM_BYTES, ROOT_BYTES))
    return device_sums.refill(sums, roots)


def deal(sums: DeviceSums, message: bytes, key: Place) -> tuple[DeviceSums, bytes]:
    """Take part in the sum of this roster. Earlier sums are over then, and their keys are deleted."""
    roster = SumRoster.from_bytes(message)
    if (roster.run, roster.round, roster.exchange) != key:
        raise Malformed("bad_task", "the roster is that of another exchange")
    after, answer = device_sums.on_roster(sums, message)
    return replace(after, sums={roster.roster: after.sums[roster.roster]}), answer


def mask(
    sums: DeviceSums,
    message: bytes,
    key: Place,
    scale: SumScale,
    words: Words,
    between: Callable[[], None] = lambda: None,
) -> tuple[DeviceSums, bytes]:
    """Mask the device's words for the sum whose shares were relayed; `between` is called now and then."""
    name = RelayedShares.from_bytes(message).roster
    roster = _roster_of(sums, name, key, "add")
    if roster.bits != scale.bits or roster.devices > scale.devices:
        raise Malformed("bad_task", f"a sum of {roster.devices} devices in {roster.bits} bits could overflow")
    return device_sums.on_vector(device_sums.on_relay(sums, message), name, words, between)


def show(sums: DeviceSums, message: bytes, key: Place) -> tuple[DeviceSums, bytes]:
    """Show the shares that take the masks off, of one kind for each neighbour.

    The sum is over then for this device: its keys are deleted with the answer's storage, so no other question about it
    can be answered.
    """
    name = UnmaskRequest.from_bytes(message).roster
    _roster_of(sums, name, key, "show")
    sums, answer = device_sums.on_unmask(sums, message)
    return device_sums.on_end(sums, name), answer


def _roster_of(sums: DeviceSums, name: str, key: Place, stage: str) -> SumRoster:
    if name not in sums.sums:
        raise Malformed("bad_task", f"no sum {name:.16} is open here")
    roster = sums.sums[name].roster
    if (roster.run, roster.round, roster.exchange + STAGE_AFTER_ROSTER[stage]) != key:
        raise Malformed("bad_task", f"stage {stage} of the sum belongs to another exchange")
    return roster
