"""Attacks with answers to a round's tasks: false counts, ruined buffers, far moves, answers that are said again.

A lost `ack`, which once made a device send a residual twice, is no attack of a device: what a device sends is its own
choice, and the coordinator bounds it. What a device can do is to say an accepted answer again, which is played here.
"""

from __future__ import annotations

import numpy as np

from coordinator.attack_drill.findings import LIMITS, NO_UPDATES, ROUNDS, UPDATES, Attack, Seen
from coordinator.attack_drill.loopback_copy import FLEET, HONEST_SAMPLES, HOSTILE
from coordinator.attack_drill.plausible_replies import (
    TEST_SAMPLES,
    encoded_delta,
    is_test,
    is_update,
    plausible_delta,
    plausible_statistics,
)
from coordinator.attack_drill.played_device import PlayedDevice
from coordinator.attack_drill.played_round import Outcome, PlayedRound, RoundsCopy, Task, Told
from coordinator.rounds.buffer_bounds import USUAL_BUFFER
from coordinator.rounds.update_validation import MAX_PARAMETER_MOVE
from edge_client.protocol import codecs
from edge_client.protocol.task import Array

LIE = 2**31  # samples
RUIN = 1e38
FAR = 1_000.0


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
    variances = [place for name, place in schema.slices.items() if name.endswith("var")]

    def answer(device: PlayedDevice, task: Task) -> None:
        delta = plausible_delta(task, HOSTILE, rounds.program)
        delta[schema.n_params :] = RUIN
        for place in variances:
            delta[place] = -RUIN
        device.offer(task, encoded_delta(task, delta, rounds.program))

    outcome, told = rounds.attack(is_update, answer)
    buffers = outcome.centers[:, schema.n_params :]
    sound = bool((np.abs(buffers) <= USUAL_BUFFER).all()) and all((outcome.centers[:, v] >= 0).all() for v in variances)
    refused = next((detail for status, detail in told if status == "rejected"), "")
    return Seen(sound and bool(refused), refused or f"the center's buffers reach {np.abs(buffers).max():.3g}")


def _far_move(rounds: RoundsCopy) -> Seen:
    """One parameter, which hardly shows in a mean over all of them."""
    asked = list[Task]()

    def answer(device: PlayedDevice, task: Task) -> None:
        delta = plausible_delta(task, HOSTILE, rounds.program)
        delta[0] = FAR
        device.offer(task, encoded_delta(task, delta, rounds.program))
        asked.append(task)

    _, told = rounds.attack(is_update, answer)
    if not asked:
        return NO_UPDATES
    refused = [detail or status for status, detail in told if status in ("rejected", "not_finite")]
    return Seen(len(refused) == len(asked), refused[0] if refused else _answers(told))


def _wrong_shape(rounds: RoundsCopy) -> Seen:
    def answer(device: PlayedDevice, task: Task) -> None:
        device.offer(task, _of_one_class_more(task, rounds), n=TEST_SAMPLES)

    _, told = rounds.attack(is_test, answer)
    refused = next((detail for status, detail in told if status == "bad_schema"), "")
    return Seen(bool(refused), refused or _answers(told))


def _answers(told: Told) -> str:
    return f"answered with {[status for status, _ in told]}"


def _of_one_class_more(task: Task, rounds: RoundsCopy) -> bytes:
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
    Attack(tried=f"move one parameter by {FAR:,.0f}", bound=f"{MAX_PARAMETER_MOVE:g}", where=LIMITS, play=_far_move),
    Attack(tried="an accepted update again, and another", bound="counts once", where=ROUNDS, play=_said_again),
)
