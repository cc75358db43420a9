"""The coordinator's side of one masked sum: what the answers of each stage lead to, without a network or a clock.

`open_sum` gives the rosters. `relay` ends the stage in which devices deal shares, `ask_shares` the one in which they
upload, `recover` the one in which they show shares; its secrets take the masks off (`unmask_into`). A device without an
answer has dropped out. The same answers give the same states and messages. A sum fails closed (SumFailed): too few
devices, a secret that too few neighbours can recover, and shares that do not fit end it, and no vector is unmasked. No
device is asked for both kinds of share of another: survivors are fixed once.

The answer of a device with a share that is not the one that its dealer announced is not used, and a reason names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from coordinator.aggregation.sum_graph import Graph, neighbour_graph, sum_parameters
from coordinator.rounds.secure_recovery import Secrets, checked_reveal, missing_shares, recover_secrets
from edge_client.errors import Malformed, ProtocolError
from edge_client.printable import first_of
from edge_client.protocol.secure import keys
from edge_client.protocol.secure.masks import add_masks_into, pair_sign
from edge_client.protocol.secure.parameters import LEAST_COHORT, SumParameters
from edge_client.protocol.secure.sum_messages import (
    DealtShares,
    RelayedShares,
    RevealedShares,
    SumForm,
    SumRoster,
    UnmaskRequest,
    roster_digest,
)
from edge_client.protocol.summed_task import Words

MOST_NAMES = 5  # of devices, in a message


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """The state of one masked sum."""

    form: SumForm
    parameters: SumParameters
    least_members: int
    roster: str
    devices: Mapping[str, keys.PublicPrekey]
    graph: Graph
    dealt: Mapping[str, DealtShares] = field(default_factory=dict)
    active: frozenset[str] = frozenset()  # those whose shares were relayed
    uploaded: frozenset[str] = frozenset()

    @property
    def context(self) -> keys.SumContext:
        f = self.form
        return keys.SumContext(
            federation=f.federation, run=f.run, round=f.round, exchange=f.exchange, roster=self.roster
        )


class SumFailed(ProtocolError):
    """The sum is given up; the message names the devices that it failed of."""


def open_sum(
    form: SumForm, devices: Mapping[str, keys.PublicPrekey], *, least_members: int = LEAST_COHORT
) -> tuple[SecureSum, dict[str, bytes]]:
    """Begin a sum among `devices` -> their rosters. Raises ConfigError where they are too few."""
    parameters = sum_parameters(len(devices), least_members=least_members)
    roster = roster_digest(form, parameters, devices)
    graph = neighbour_graph(bytes.fromhex(roster), devices, parameters.neighbours)
    state = SecureSum(
        form=form, parameters=parameters, least_members=max(least_members, LEAST_COHORT), roster=roster,
        devices=dict(devices), graph=graph,
    )  # fmt: skip
    return state, {cid: _roster_for(state, cid) for cid in sorted(devices)}


def relay(state: SecureSum, dealt: Mapping[str, bytes]) -> tuple[SecureSum, dict[str, bytes]]:
    """Give the shares on -> what each device gets. Raises SumFailed, and Malformed as `checked_shares` does."""
    state = replace(state, dealt={cid: checked_shares(state, cid, data) for cid, data in dealt.items()})
    active, before = frozenset(state.dealt), frozenset[str]()
    while active != before:  # a device with too few neighbours could not be recovered, and leaves others with fewer
        before = active
        active = frozenset(c for c in active if len(active & set(state.graph[c])) >= state.parameters.threshold)
    if len(active) < state.least_members:
        raise SumFailed(f"{len(active)} devices sent shares that others hold; at least {state.least_members} must")
    messages = {}
    for cid in sorted(active):
        envelopes = {other: state.dealt[other].envelopes[cid] for other in state.graph[cid] if other in active}
        messages[cid] = RelayedShares(roster=state.roster, envelopes=envelopes).to_bytes()
    return replace(state, active=active), messages


def ask_shares(state: SecureSum, uploaded: Collection[str]) -> tuple[SecureSum, dict[str, bytes]]:
    """Fix the survivors, whose vectors passed `read_upload` and are stored -> the questions. Raises SumFailed."""
    state = replace(state, uploaded=state.active.intersection(uploaded))
    if len(state.uploaded) < state.least_members:
        raise SumFailed(f"{len(state.uploaded)} devices uploaded; at least {state.least_members} must")
    lost = frozenset(_missing(state, state.uploaded))
    if lost:
        raise SumFailed(f"too few neighbours are left of {_names(lost)}: their masks cannot be removed")
    messages = {}
    for cid in sorted(state.uploaded):
        near = state.active & set(state.graph[cid])
        survivors, dropped = tuple(near & state.uploaded), tuple(near - state.uploaded)
        messages[cid] = UnmaskRequest(roster=state.roster, survivors=survivors, dropped=dropped).to_bytes()
    return state, messages


def recover(state: SecureSum, shown: Mapping[str, bytes]) -> Secrets:
    """The secrets, of the first answers that suffice. Raises SumFailed, and Malformed for bytes that are no answer."""
    revealed, liars = dict[str, RevealedShares](), set[str]()
    for cid in sorted(state.uploaded & shown.keys()):
        if next(_missing(state, revealed), None) is None:
            break
        reveal, near = RevealedShares.from_bytes(shown[cid]), state.active & set(state.graph[cid])
        survivors, dropped = near & state.uploaded, near - state.uploaded
        if reveal.roster == state.roster and checked_reveal(
            reveal, state.context, cid, dealt=state.dealt, survivors=survivors, dropped=dropped
        ):
            revealed[cid] = reveal
        else:
            liars.add(cid)
    lost = frozenset(_missing(state, revealed))
    if lost:
        lied = f"; wrong shares came from {_names(liars)}" if liars else ""
        raise SumFailed(f"too few shares of the secrets of {_names(lost)}{lied}")
    try:
        return recover_secrets(
            revealed,
            state.context,
            graph=state.graph,
            dealt=state.dealt,
            devices=state.devices,
            threshold=state.parameters.threshold,
        )
    except Malformed as wrong:
        raise SumFailed(str(wrong)) from wrong


def unmask_into(state: SecureSum, secrets: Secrets, total: Words) -> None:
    """Take the masks off `total` [words], the sum of the uploads of all survivors; the result is modulo 2^bits."""
    add_masks_into(total, _masks_to_remove(state, secrets))
    total &= total.dtype.type(2**state.form.bits - 1)


def _masks_to_remove(state: SecureSum, secrets: Secrets) -> Iterator[tuple[bytes, int]]:
    for _, secret in sorted(secrets.self_secrets.items()):
        yield keys.self_mask_key(secret, state.context), -1
    for gone, secret in sorted(secrets.mask_secrets.items()):
        private = keys.mask_private(secret)
        for cid in state.graph[gone]:
            if cid in state.uploaded:
                key = keys.pair_mask_key(private, state.devices[cid].mask, state.context, gone, cid)
                yield key, -pair_sign(cid, gone)


def _roster_for(state: SecureSum, cid: str) -> bytes:
    f = state.form
    return SumRoster(
        run=f.run,
        round=f.round,
        exchange=f.exchange,
        roster=state.roster,
        cid=cid,
        number=state.devices[cid].number,
        devices=len(state.devices),
        threshold=state.parameters.threshold,
        words=f.words,
        bits=f.bits,
        neighbours={other: state.devices[other] for other in state.graph[cid]},
    ).to_bytes()


def checked_shares(state: SecureSum, cid: str, data: bytes) -> DealtShares:
    """A device's shares for each of its neighbours. Raises Malformed."""
    dealt = DealtShares.from_bytes(data)
    if dealt.roster != state.roster or set(dealt.envelopes) != set(state.graph[cid]):
        raise Malformed("bad_task", f"the shares of {cid} are not those of this roster's neighbours")
    return dealt


def _missing(state: SecureSum, answered: frozenset[str] | Mapping[str, RevealedShares]) -> Iterator[str]:
    return missing_shares(
        state.graph,
        survivors=state.uploaded,
        dropped=state.active - state.uploaded,
        answered=answered,
        threshold=state.parameters.threshold,
    )


def _names(cids: Collection[str]) -> str:
    return first_of(sorted(cids), MOST_NAMES)
