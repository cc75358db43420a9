"""The coordinator's side of one masked sum as a pure state machine: roster, shares, uploads, unmask, then sum or fail.

`advance(state, event) -> (state, commands)`. The caller stores an event before it carries the commands out; the stored
events, played again, give the same state and the same messages. A deadline is an event. A sum fails closed: too few
devices, a secret that too few neighbours can recover, and shares that do not fit end it with the reason, and no vector
is unmasked. No device is asked for both kinds of share of another: survivors are fixed once.

A device whose share is not the one that its dealer announced is named in `liars` and its answer is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from coordinator.rounds.secure_recovery import Secrets, checked_reveal, missing_shares, recover_secrets
from edge_client.errors import Malformed
from edge_client.printable import first_of
from edge_client.protocol.secure import keys
from edge_client.protocol.secure.graph import Graph, neighbour_graph
from edge_client.protocol.secure.masks import Words, add_masks_into, pair_sign
from edge_client.protocol.secure.parameters import LEAST_COHORT, SumParameters, sum_parameters
from edge_client.protocol.secure.sum_messages import (
    DealtShares,
    RelayedShares,
    RevealedShares,
    SumForm,
    SumRoster,
    UnmaskRequest,
    roster_digest,
)

MOST_NAMES = 5  # of devices, in a message


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """The state of one masked sum. `stage` is what is awaited: shares, uploads or unmask; then done or failed."""

    form: SumForm
    parameters: SumParameters
    least_members: int
    roster: str
    devices: Mapping[str, keys.PublicPrekey]
    graph: Graph
    stage: str = "shares"
    left: frozenset[str] = frozenset()  # will not answer any more
    dealt: Mapping[str, DealtShares] = field(default_factory=dict)
    active: frozenset[str] = frozenset()  # those whose shares were relayed
    uploaded: frozenset[str] = frozenset()
    revealed: Mapping[str, RevealedShares] = field(default_factory=dict)
    liars: frozenset[str] = frozenset()

    @property
    def context(self) -> keys.SumContext:
        f = self.form
        return keys.SumContext(
            federation=f.federation, run=f.run, round=f.round, exchange=f.exchange, roster=self.roster
        )


@dataclass(frozen=True)
class SharesArrived:
    """A device's DealtShares."""

    cid: str
    data: bytes


@dataclass(frozen=True)
class MaskedVectorStored:
    """A device's masked vector is whole, passed `read_upload`, and is stored."""

    cid: str


@dataclass(frozen=True)
class RevealArrived:
    """A device's RevealedShares."""

    cid: str
    data: bytes


@dataclass(frozen=True)
class DeviceLeft:
    """A device will not answer: it refused, or is gone."""

    cid: str


@dataclass(frozen=True)
class StageDeadline:
    """The time of a stage is over; harmless in any other stage."""

    stage: str


SecureEvent = SharesArrived | MaskedVectorStored | RevealArrived | DeviceLeft | StageDeadline


@dataclass(frozen=True)
class SendSumMessage:
    """Send a message of this kind (`roster`, `relay`, `unmask`) to a device."""

    cid: str
    kind: str
    data: bytes


@dataclass(frozen=True)
class SumReady:
    """The sum of the vectors of `survivors` can be unmasked with `secrets` (`unmask_into`)."""

    survivors: tuple[str, ...]
    secrets: Secrets


@dataclass(frozen=True)
class SumFailed:
    """The sum is given up; `reason` names the devices that it failed of."""

    reason: str


SecureCommand = SendSumMessage | SumReady | SumFailed


def open_sum(
    form: SumForm, devices: Mapping[str, keys.PublicPrekey], *, least_members: int = LEAST_COHORT
) -> tuple[SecureSum, list[SendSumMessage]]:
    """Begin a sum among `devices`. Raises ConfigError where they are too few."""
    parameters = sum_parameters(len(devices), least_members=least_members)
    roster = roster_digest(form, parameters, devices)
    graph = neighbour_graph(bytes.fromhex(roster), devices, parameters.neighbours)
    state = SecureSum(
        form=form, parameters=parameters, least_members=max(least_members, LEAST_COHORT), roster=roster,
        devices=dict(devices), graph=graph,
    )  # fmt: skip
    return state, [SendSumMessage(cid, "roster", _roster_for(state, cid)) for cid in sorted(devices)]


def advance(state: SecureSum, event: SecureEvent) -> tuple[SecureSum, list[SecureCommand]]:
    """The next state and what to do. Raises Malformed for a message that is refused; its device may try again."""
    match event:
        case SharesArrived(cid, data):
            if state.stage != "shares" or cid not in state.devices or cid in state.dealt:
                return state, []
            state = replace(state, dealt=dict(state.dealt) | {cid: checked_shares(state, cid, data)})
        case MaskedVectorStored(cid):
            if state.stage != "uploads" or cid not in state.active:
                return state, []
            state = replace(state, uploaded=state.uploaded | {cid})
        case RevealArrived(cid, data):
            if state.stage != "unmask" or cid not in state.uploaded or cid in state.revealed or cid in state.liars:
                return state, []
            state = _with_reveal(state, cid, RevealedShares.from_bytes(data))
        case DeviceLeft(who):
            state = replace(state, left=state.left | {who})
        case StageDeadline(stage):
            return _close(state) if stage == state.stage else (state, [])
    return _close(state) if _is_complete(state) else (state, [])


def unmask_into(state: SecureSum, ready: SumReady, total: Words) -> None:
    """Take the masks off `total` [words], the sum of the uploads of all survivors; the result is modulo 2^bits."""
    add_masks_into(total, _masks_to_remove(state, ready.secrets))
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


def _with_reveal(state: SecureSum, cid: str, reveal: RevealedShares) -> SecureSum:
    near = state.active & set(state.graph[cid])
    if reveal.roster != state.roster or not checked_reveal(
        reveal, state.context, cid, survivors=near & state.uploaded, dropped=near - state.uploaded, dealt=state.dealt
    ):
        return replace(state, liars=state.liars | {cid})
    return replace(state, revealed=dict(state.revealed) | {cid: reveal})


def _is_complete(state: SecureSum) -> bool:
    """Whether nothing more is awaited in this stage."""
    match state.stage:
        case "shares":
            return set(state.devices) <= set(state.dealt) | state.left
        case "uploads":
            return state.active <= state.uploaded | state.left
        case "unmask":
            answered = set(state.revealed) | state.liars | state.left
            return state.uploaded <= answered or next(_missing(state, state.revealed), None) is None
    return False


def _missing(state: SecureSum, answered: frozenset[str] | Mapping[str, RevealedShares]) -> Iterator[str]:
    return missing_shares(
        state.graph,
        survivors=state.uploaded,
        dropped=state.active - state.uploaded,
        answered=answered,
        threshold=state.parameters.threshold,
    )


def _close(state: SecureSum) -> tuple[SecureSum, list[SecureCommand]]:
    """End the present stage with what has come."""
    match state.stage:
        case "shares":
            return _relay(state)
        case "uploads":
            return _ask_shares(state)
        case "unmask":
            return _finish(state)
    return state, []


def _relay(state: SecureSum) -> tuple[SecureSum, list[SecureCommand]]:
    active, before = frozenset(state.dealt), frozenset[str]()
    while active != before:  # a device with too few neighbours could not be recovered, and leaves others with fewer
        before = active
        active = frozenset(c for c in active if len(active & set(state.graph[c])) >= state.parameters.threshold)
    if len(active) < state.least_members:
        return _failed(
            state, f"{len(active)} devices sent shares that others hold; at least {state.least_members} must"
        )
    commands: list[SecureCommand] = []
    for cid in sorted(active):
        envelopes = {other: state.dealt[other].envelopes[cid] for other in state.graph[cid] if other in active}
        commands.append(
            SendSumMessage(cid, "relay", RelayedShares(roster=state.roster, envelopes=envelopes).to_bytes())
        )
    return replace(state, stage="uploads", active=active), commands


def _ask_shares(state: SecureSum) -> tuple[SecureSum, list[SecureCommand]]:
    if len(state.uploaded) < state.least_members:
        return _failed(state, f"{len(state.uploaded)} devices uploaded; at least {state.least_members} must")
    lost = frozenset(_missing(state, state.uploaded))
    if lost:
        return _failed(state, f"too few neighbours are left of {_names(lost)}: their masks cannot be removed")
    commands: list[SecureCommand] = []
    for cid in sorted(state.uploaded):
        near = state.active & set(state.graph[cid])
        request = UnmaskRequest(
            roster=state.roster,
            survivors=tuple(near & state.uploaded),
            dropped=tuple(near - state.uploaded),
        )
        commands.append(SendSumMessage(cid, "unmask", request.to_bytes()))
    return replace(state, stage="unmask"), commands


def _finish(state: SecureSum) -> tuple[SecureSum, list[SecureCommand]]:
    lost = frozenset(_missing(state, state.revealed))
    if lost:
        lied = f"; wrong shares came from {_names(state.liars)}" if state.liars else ""
        return _failed(state, f"too few shares of the secrets of {_names(lost)}{lied}")
    try:
        secrets = recover_secrets(
            state.revealed,
            state.context,
            graph=state.graph,
            dealt=state.dealt,
            devices=state.devices,
            threshold=state.parameters.threshold,
        )
    except Malformed as wrong:
        return _failed(state, str(wrong))
    return replace(state, stage="done"), [SumReady(tuple(sorted(state.uploaded)), secrets)]


def _failed(state: SecureSum, reason: str) -> tuple[SecureSum, list[SecureCommand]]:
    return replace(state, stage="failed"), [SumFailed(reason)]


def _names(cids: frozenset[str] | tuple[str, ...]) -> str:
    return first_of(sorted(cids), MOST_NAMES)
