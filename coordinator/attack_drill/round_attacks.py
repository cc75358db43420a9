"""Attacks with answers to a round's tasks: false counts, ruined buffers, held credits, answers that are said again.

A lost `ack`, which once made a device send a residual twice, is no attack of a device: what a device sends is its own
choice, and the coordinator bounds it. What a device can do is to say an accepted answer again, which is played here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coordinator.attack_drill.findings import LIMITS, ROUNDS, TRANSFER, UPDATES, Attack, Seen
from coordinator.attack_drill.loopback_copy import FLEET, HONEST_SAMPLES, HOSTILE
from coordinator.attack_drill.plausible_replies import (
    TEST_SAMPLES,
    encoded_delta,
    is_test,
    is_update,
    plausible_delta,
    plausible_statistics,
)
from coordinator.attack_drill.played_round import Outcome, PlayedRound, RoundsCopy
from coordinator.rounds.buffer_bounds import USUAL_BUFFER
from edge_client.protocol import codecs
from edge_client.protocol.task import Array

LIE = 2**31  # samples
RUIN = 1e38
STEP_S, HELD_S = 2.0, 90.0  # a credit without a new block returns after 30 s
ANNOUNCEMENTS = 30
NO_UPDATES = Seen(held=None, words="this method asks for no update in its first round")


def _many_samples(rounds: RoundsCopy) -> Seen:
    lied = rounds.play(n=LIE, wrong_tests=rounds.most)
    share = rounds.most / (rounds.most + HONEST_SAMPLES * len(FLEET))
    return _same(lied, rounds, f"it weighs {rounds.most} samples, {share:.0%} of this fleet's")


def _many_tests(rounds: RoundsCopy) -> Seen:
    lied = rounds.play(n=rounds.most, wrong_tests=LIE)
    return _same(lied, rounds, f"{_score(lied, rounds)}, as with {rounds.most} test samples")


def _same(lied: Outcome, rounds: RoundsCopy, words: str) -> Seen:
    if lied.equals(rounds.fair):
        return Seen(held=True, words=words)
    off = float(np.abs(lied.centers - rounds.fair.centers).max())
    return Seen(
        held=False, words=f"{_score(lied, rounds)} instead of {_score(rounds.fair, rounds)}, a center is {off:.3g} off"
    )


def _score(outcome: Outcome, rounds: RoundsCopy) -> str:
    """What is reported of the fleet's tests; a model of one output is no classifier."""
    name, shown = ("accuracy", ".1%") if rounds.program.classes > 1 else ("loss", ".3g")
    micro = outcome.record.get(name, {}).get("micro")
    return f"no {name} is reported" if micro is None else f"the fleet's {name} is {micro:{shown}}"


def _ruined_buffers(rounds: RoundsCopy) -> Seen:
    schema = rounds.program.schema
    if schema.size == schema.n_params:
        return Seen(held=None, words="this model has no buffers")
    with rounds.round() as played:
        for task in played.tasks():
            if is_update(task):
                delta = plausible_delta(task, HOSTILE, rounds.program)
                delta[schema.n_params :] = RUIN
                for name, place in schema.slices.items():
                    if name.endswith("var"):
                        delta[place] = -RUIN
                played.hostile.offer(task, encoded_delta(task, delta, rounds.program))
            else:
                played.hostile.answer(task)
        played.end()
        buffers = played.outcome().centers[:, schema.n_params :]
        variances = [played.outcome().centers[:, s] for name, s in schema.slices.items() if name.endswith("var")]
        answers = played.hostile.told
    sound = bool((np.abs(buffers) <= USUAL_BUFFER).all()) and all(bool((variance >= 0).all()) for variance in variances)
    refused = next((detail for status, detail in answers if status == "rejected"), "")
    return Seen(sound and bool(refused), refused or f"the center's buffers reach {np.abs(buffers).max():.3g}")


def _wrong_shape(rounds: RoundsCopy) -> Seen:
    with rounds.round() as played:
        for task in played.tasks():
            if is_test(task):
                data = _of_one_class_more(task, rounds)
                played.hostile.offer(task, data, n=TEST_SAMPLES)
            else:
                played.hostile.answer(task)
        played.end()
        answers = played.hostile.told
    refused = next((detail for status, detail in answers if status == "bad_schema"), "")
    return Seen(bool(refused), refused or f"answered with {[status for status, _ in answers]}")


def _of_one_class_more(task: dict[str, Any], rounds: RoundsCopy) -> bytes:
    """The statistics that a test wants, of one class (or one candidate) too many."""
    said = plausible_statistics(task, HOSTILE, rounds.program, TEST_SAMPLES)
    wider: dict[str, Array] = {}
    if said.confusion is not None:
        wider["confusion"] = np.pad(said.confusion, ((0, 0), (0, 1), (0, 1)))
    elif said.losses is not None:
        wider["losses"] = np.append(said.losses, 1.0)
    fields = {name: value for name, value in vars(said).items() if value is not None}
    return codecs.encode_stats(type(said)(**(fields | wider)), rounds.program.schema)


def _said_again(rounds: RoundsCopy) -> Seen:
    """The answer that was taken, once more; then another answer to the same task."""
    most, answers = rounds.most, list[str]()
    with rounds.round(n=most) as played:
        played.may_answer.clear()
        for task in played.tasks():
            played.hostile.answer(task, n=most, wrong_tests=most)
            if is_update(task) and not answers:
                answers = [_status(played)]
                played.hostile.answer(task, n=most)
                answers.append(_status(played))
                other = -plausible_delta(task, HOSTILE, rounds.program)
                played.hostile.offer(task, encoded_delta(task, other, rounds.program), n=most, attempt=1)
                answers.append(_status(played))
            played.may_answer.set()
        played.end()
        outcome = played.outcome()
    if not answers:
        return NO_UPDATES
    held = answers == ["ok", "dup", "superseded"] and outcome.equals(rounds.fair)
    return Seen(held, f"answers {', '.join(answers)}; the center {'moved once' if held else 'is another'}")


def _status(played: PlayedRound) -> str:
    """The coordinator's answer to an announcement, whose blocks are sent where it asks for them."""
    while True:
        said = played.hostile.wait("go", "ack", "err")
        if said["k"] != "go":
            return str(said.get("status", said.get("code")))
        played.hostile.send(said)


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
                while passed_s < HELD_S and len(played.answered) < others:
                    if blocks > 1:  # a first block that is the only one would be the whole answer
                        played.hostile.send(go, 0)
                    played.pass_time(STEP_S)
                    passed_s += STEP_S
                served = len(played.answered)
            played.refuse(task)
        played.end()
    return Seen(served == others, f"{served} of {others} others uploaded within {passed_s:.0f} s")


def _ever_new_hashes(rounds: RoundsCopy) -> Seen:
    left: list[int] = []
    with rounds.round() as played:
        for task in played.tasks():
            if is_update(task) and not left:
                left.append(_announce_many(task, played))
            played.refuse(task)
        played.end()
        left.append(played.partial_files())
    if len(left) == 1:
        return NO_UPDATES
    held = left[0] <= 1 and left[1] == 0
    return Seen(held, f"{left[0]} partial files of {ANNOUNCEMENTS} announcements, {left[1]} after the round")


def _announce_many(task: dict[str, Any], played: PlayedRound) -> int:
    """Announce other bytes again and again, and send a first block of each; -> the files on disk then."""
    update = encoded_delta(task, plausible_delta(task, HOSTILE, played.hostile.program), played.hostile.program)
    for number in range(ANNOUNCEMENTS):
        manifest = played.hostile.offer(task, number.to_bytes(8, "little") + update[8:], attempt=number)
        said = played.hostile.wait("go", "err", "ack")
        if said["k"] == "go" and manifest.total > 1:
            played.hostile.send(said, 0)
        played.pass_time(1.0)
    return played.partial_files()


ROUND_ATTACKS = (
    Attack(
        tried="answer with 2^31 samples",
        bound="max-samples-ratio times the fleet's median",
        where=LIMITS,
        play=_many_samples,
    ),
    Attack(tried="test on 2^31 samples, all wrong", bound="counts as in training", where=LIMITS, play=_many_tests),
    Attack(tried="test results of a class too many", bound="the program's shape", where=UPDATES, play=_wrong_shape),
    Attack(
        tried="buffers of 1e38, variances of -1e38",
        bound=f"{USUAL_BUFFER:,.0f}, no variance below 0",
        where=LIMITS,
        play=_ruined_buffers,
    ),
    Attack(tried="an accepted update again, and another", bound="counts once", where=ROUNDS, play=_said_again),
    Attack(tried="hold the only credit with one block", bound="new blocks only", where=TRANSFER, play=_repeated_block),
    Attack(tried="announce ever new updates", bound="one open upload", where=TRANSFER, play=_ever_new_hashes),
)
