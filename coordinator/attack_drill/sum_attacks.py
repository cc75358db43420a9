"""Attacks on masked sums: of a device on the coordinator, and of who holds the coordinator's messages on a device.

A device that keeps to the protocol may add what it likes within its weight (docs/privacy.md); that is no attack here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from coordinator.attack_drill.findings import SUMS, Attack, Seen
from coordinator.attack_drill.loopback_copy import HOSTILE
from coordinator.attack_drill.played_device import PlayedDevice
from coordinator.attack_drill.played_round import Outcome, RoundsCopy, Task, Told
from coordinator.attack_drill.played_sums import AskedOnce
from edge_client.errors import Malformed
from edge_client.protocol.secure import device_stages
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.secure.sum_messages import (
    UPLOAD_HEADER,
    DealtShares,
    RevealedShares,
    SumRoster,
    UnmaskRequest,
    write_upload,
)
from edge_client.protocol.summed_task import Words

DEADLINE_S = 60.0
TIMES = 1_000
OTHER_ROSTER = "ab" * 32


def _play(
    rounds: RoundsCopy, stage: str, attack: Callable[[PlayedDevice, Task], None], *, refusing: int = 0
) -> tuple[Outcome, Told]:
    """A round in which the hostile device answers every task of `stage` by `attack`; so many others drop out of it."""
    return rounds.attack(
        lambda task: task["job"] == "sum" and task["stage"] == stage, attack, refusing=(refusing, stage)
    )


def _failed(outcome: Outcome) -> list[str]:
    """Why sums of the round have no result."""
    return list(outcome.record.get("secure", {}).get("failed", []))


def _seen_in_sum(rounds: RoundsCopy, change: Callable[[Words], Words]) -> Seen:
    """The hostile device adds other words."""

    def attack(device: PlayedDevice, task: Task) -> None:
        device.offer(task, device.sums.answer(task, change))

    outcome, _ = _play(rounds, "add", attack)
    told = [reason for reason in _failed(outcome) if "did not keep to its task" in reason]
    return Seen(bool(told), told[0] if told else f"a center reaches {np.abs(outcome.centers).max():.3g}")


def _garbage(rounds: RoundsCopy) -> Seen:
    rng = np.random.default_rng(0)
    return _seen_in_sum(rounds, lambda words: rng.integers(0, 2**32, len(words), np.uint32))


def _false_count(rounds: RoundsCopy) -> Seen:
    def change(words: Words) -> Words:
        return np.append(words[:-1], words[-1] + np.uint32(TIMES)).astype(np.uint32)

    return _seen_in_sum(rounds, change)


def _named(rounds: RoundsCopy, lie: Callable[[RevealedShares], RevealedShares]) -> Seen:
    """Two others do not show their shares, so that those of the hostile device are needed."""

    def attack(device: PlayedDevice, task: Task) -> None:
        device.offer(task, lie(RevealedShares.from_bytes(device.sums.answer(task))).to_bytes())

    outcome, _ = _play(rounds, "show", attack, refusing=2)
    failed = _failed(outcome)
    named = [reason for reason in failed if reason.endswith(f"wrong shares came from {HOSTILE}")]
    return Seen(bool(named), (named or failed or ["a sum was made with them"])[0])


def _lying_shares(rounds: RoundsCopy) -> Seen:
    def lie(said: RevealedShares) -> RevealedShares:
        wrong = {dealer: bytes([share[0] ^ 1]) + share[1:] for dealer, share in said.self_shares.items()}
        return replace(said, self_shares=wrong)

    return _named(rounds, lie)


def _other_kind(rounds: RoundsCopy) -> Seen:
    return _named(rounds, lambda said: replace(said, self_shares={}, mask_shares=said.self_shares))


def _refused(told: Told, words: str) -> Seen:
    """Whether the device was told of a refusal with these words."""
    found = [detail for _, detail in told if words in detail]
    return Seen(bool(found), found[0] if found else f"answered with {[code for code, _ in told]}")


def _strangers(rounds: RoundsCopy) -> Seen:
    def attack(device: PlayedDevice, task: Task) -> None:
        dealt = DealtShares.from_bytes(device.sums.answer(task))
        strange = {f"{cid}x": envelope for cid, envelope in dealt.envelopes.items()}
        device.offer(task, replace(dealt, envelopes=strange).to_bytes())

    return _refused(_play(rounds, "shares", attack)[1], "roster's neighbours")


def _other_roster(rounds: RoundsCopy) -> Seen:
    def attack(device: PlayedDevice, task: Task) -> None:
        data = device.sums.answer(task)
        _, bits, _, words, _ = UPLOAD_HEADER.unpack_from(data)
        device.offer(task, write_upload(OTHER_ROSTER, words, bits, data[UPLOAD_HEADER.size :]))

    return _refused(_play(rounds, "add", attack)[1], "the upload's header")


def _offered_twice(rounds: RoundsCopy) -> Seen:
    """The device says that it has lost its prekeys, and offers the same ones when it is asked for others."""
    offered, asked = list[bytes](), 0
    with rounds.round() as played:
        for task in played.tasks():
            stage = task["stage"] if task["job"] == "sum" else ""
            if stage == "prekeys":
                asked += 1
                offered = offered or [played.hostile.sums.answer(task)]
                played.hostile.offer(task, offered[0])
            elif stage == "shares":
                played.hostile.refuse(task, "bad_task")
            else:
                played.hostile.answer(task)
        played.end()
        told = played.hostile.told
    return _refused(told, "offered before") if asked > 1 else Seen(held=None, words="a round of this method is one sum")


def _no_upload(rounds: RoundsCopy) -> Seen:
    """Silent in the first sum; whether that sum is made is seen by the others being asked for their shares."""
    silent = -1
    with rounds.round(deadline_s=DEADLINE_S) as played:
        for task in played.tasks_in_time():
            if task is not None and task.get("stage") == "add" and silent < 0:
                silent = task["exchange"]
            elif task is not None:
                played.hostile.answer(task)
        played.end()
        shown = [place[2] for device in played.honest for place in device.sums.shown]
        failed = [reason for reason in _failed(played.outcome()) if "too few" in reason or "uploaded" in reason]
    if silent + 1 in shown and not failed:
        return Seen(held=True, words="the sum of the others was made")
    return Seen(held=False, words=failed[0] if failed else "no shares were asked")


def _on_a_device(rounds: RoundsCopy, stage: str, again: Callable[[DeviceSums, AskedOnce], object]) -> Seen:
    """After a round of honest devices, one of them is asked with the coordinator's messages."""
    with rounds.round() as played:
        for task in played.tasks():
            played.hostile.answer(task)
        played.end()
        victim = played.honest[0]
    try:
        again(victim.sums.sums, victim.sums.asked[stage])
    except Malformed as refused:
        return Seen(held=True, words=str(refused))
    return Seen(held=False, words="the device answers")


def _both_kinds(rounds: RoundsCopy) -> Seen:
    def again(sums: DeviceSums, once: AskedOnce) -> object:
        asked = UnmaskRequest.from_bytes(once.message)
        other = replace(asked, survivors=asked.survivors[1:], dropped=(*asked.dropped, asked.survivors[0]))
        return device_stages.show(sums, other.to_bytes(), once.place)

    return _on_a_device(rounds, "show", again)


def _old_roster(rounds: RoundsCopy) -> Seen:
    return _on_a_device(rounds, "shares", lambda sums, once: device_stages.deal(sums, once.message, once.place))


def _prekey_twice(rounds: RoundsCopy) -> Seen:
    def again(sums: DeviceSums, once: AskedOnce) -> object:
        run, number, exchange = once.place
        later = (run, number, exchange + 9)
        roster = replace(SumRoster.from_bytes(once.message), exchange=later[2], roster=OTHER_ROSTER)
        return device_stages.deal(sums, roster.to_bytes(), later)

    return _on_a_device(rounds, "shares", again)


SUM_ATTACKS = (
    Attack(tried="add masked words of garbage", bound="what devices can give", where=SUMS, play=_garbage),
    Attack(tried=f"add {TIMES:,} to a count in a sum", bound="one for each device", where=SUMS, play=_false_count),
    Attack(tried="show shares that lie", bound="the dealer's digest", where=SUMS, play=_lying_shares),
    Attack(tried="show the other kind of share", bound="the kind that was asked", where=SUMS, play=_other_kind),
    Attack(tried="deal shares to strangers", bound="the roster's neighbours", where=SUMS, play=_strangers),
    Attack(tried="upload words for another roster", bound="the roster of the sum", where=SUMS, play=_other_roster),
    Attack(tried="offer used prekeys again", bound="rising numbers", where=SUMS, play=_offered_twice),
    Attack(tried="deal shares and never upload", bound="the stage's deadline", where=SUMS, play=_no_upload),
    Attack(tried="ask a device for both kinds of share", bound="one kind, once", where=SUMS, play=_both_kinds),
    Attack(tried="send a device an old roster", bound="a prekey is used once", where=SUMS, play=_old_roster),
    Attack(tried="use a device's prekey twice", bound="a prekey is used once", where=SUMS, play=_prekey_twice),
)
