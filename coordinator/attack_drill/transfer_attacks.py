"""Attacks on the time and the room of a round: held credits, ever new uploads, blocks that are not read, silence."""

from __future__ import annotations

from typing import Any

from coordinator.attack_drill.findings import NO_UPDATES, ROUNDS, TRANSFER, Attack, Seen
from coordinator.attack_drill.loopback_copy import FLEET, HOSTILE
from coordinator.attack_drill.plausible_replies import encoded_delta, is_update, plausible_delta
from coordinator.attack_drill.played_round import STEP_S, PlayedRound, RoundsCopy
from coordinator.rounds.silence import is_waited_for
from coordinator.runtime.sender import UPLOAD_WINDOW
from edge_client.protocol.blocks import Manifest

HELD_S = 90.0  # a credit without a new block returns after 30 s
ANNOUNCED = 20
HUGE = 1 << 31  # bytes
ASKED, ASK_S = 40, 0.25  # as many requests as a device may send in so many seconds, with those that settle
UNREAD_ANSWERS = 4  # two at once, two more after eight seconds
SILENT_ROUNDS, DEADLINE_S = 3, 60.0


def _repeated_block(rounds: RoundsCopy) -> Seen:
    """One credit for all, which the hostile device has first."""
    passed_s, others, served = 0.0, len(FLEET), 0
    with rounds.round(credits=1) as played:
        played.may_answer.clear()
        for number, task in enumerate(played.tasks()):
            if number == 0:
                blocks = played.hostile.answer(task).total
                go = played.hostile.wait("go")
                played.may_answer.set()
                while passed_s < HELD_S and len(played.taken(task)) < others:
                    if blocks > 1:  # a first block that is the only one would be the whole answer
                        played.hostile.send(go, 0)
                    played.pass_time(STEP_S)
                    passed_s += STEP_S
                served = len(played.taken(task))
            played.hostile.refuse(task)
        played.end()
    return Seen(served == others, f"{served} of {others} others uploaded within {passed_s:.0f} s")


def _ever_new_hashes(rounds: RoundsCopy) -> Seen:
    left: list[int] = []
    with rounds.round() as played:
        for task in played.tasks():
            if is_update(task) and not left:
                left.append(_announce_many(task, played))
            played.hostile.refuse(task)
        played.end()
        left.append(played.partial_files())
    if len(left) == 1:
        return NO_UPDATES
    held = left[0] <= 1 and left[1] == 0
    return Seen(held, f"{left[0]} partial files of {ANNOUNCED} announcements, {left[1]} after the round")


def _announce_many(task: dict[str, Any], played: PlayedRound) -> int:
    """Announce other bytes again and again, and send a first block of each; -> the files on disk then."""
    update = encoded_delta(task, plausible_delta(task, HOSTILE, played.hostile.program), played.hostile.program)
    for number in range(ANNOUNCED):
        manifest = played.hostile.offer(task, number.to_bytes(8, "little") + update[8:], attempt=number)
        said = played.hostile.wait("go", "err", "ack")
        if said["k"] == "go" and manifest.total > 1:
            played.hostile.send(said, 0)
        played.pass_time(1.0)
    return played.partial_files()


def _huge_upload(rounds: RoundsCopy) -> Seen:
    answers = list[str]()
    with rounds.round() as played:
        for task in played.tasks():
            if is_update(task) and not answers:
                huge = Manifest(sha256="ab" * 32, size=HUGE, block=1 << 20, kind="delta")
                answers.append(played.hostile.announce(task, huge).get("code", "no error"))
            played.hostile.refuse(task)
        played.end()
    return Seen(answers == ["too_big"], f"answered with {answers[0]}") if answers else NO_UPDATES


def _unread_blocks(rounds: RoundsCopy) -> Seen:
    """Ask for a model again and again, and never show that a block came."""
    asked, served = 0, 0
    with rounds.round() as played:
        for task in played.tasks():
            model = Manifest.from_json(task["start"]) if "start" in task else None
            if model is not None and not asked:
                asked = min(model.total, UPLOAD_WINDOW)
                for _ in range(ASKED):
                    played.hostile.say("get", sha256=model.sha256, block=model.block, at=[[0, asked]])
                    played.pass_time(ASK_S)
                served = played.hostile.blocks
            played.hostile.refuse(task)
        played.end()
    if not asked:
        return Seen(held=None, words="this method sends no model in its first round")
    return Seen(served <= UNREAD_ANSWERS * asked, f"{served} blocks of {ASKED * asked} were sent")


def _silence(rounds: RoundsCopy) -> Seen:
    """The others answer; then time passes until the coordinator goes on."""
    passed_s = list[float]()  # by exchange
    with rounds.round(rounds=SILENT_ROUNDS, deadline_s=DEADLINE_S) as played:
        for task in played.tasks_in_time():
            if task is None:
                passed_s[-1] += STEP_S
            else:
                passed_s.append(0.0)
        played.end()
    waited, exchanges = sum(passed > DEADLINE_S / 2 for passed in passed_s), len(passed_s)
    most = sum(is_waited_for(missed) for missed in range(exchanges))
    return Seen(waited <= most < exchanges, f"{waited} of {exchanges} exchanges waited for it until their deadline")


TRANSFER_ATTACKS = (
    Attack(tried="hold the only credit with one block", bound="new blocks only", where=TRANSFER, play=_repeated_block),
    Attack(tried="announce ever new updates", bound="one open upload", where=TRANSFER, play=_ever_new_hashes),
    Attack(tried="announce an update of 2 GiB", bound="what the task needs", where=TRANSFER, play=_huge_upload),
    Attack(tried="ask for a model and read nothing", bound="two answers at once", where=TRANSFER, play=_unread_blocks),
    Attack(tried="be on and say nothing", bound="three deadlines, then fewer", where=ROUNDS, play=_silence),
)
