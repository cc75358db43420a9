"""With `label-prior = device`, the number of training samples of each class that each center was trained on.

    t_kc = sum_i r_ik n_ic        r_ik: the share of device i's samples that center k was trained on (`label_shares`)

After a round's exchanges, the devices whose updates came, also late ones, are asked for n_i once, and again when their
number of samples has changed. The counts stay in the state, so that the totals cover devices of earlier cohorts. A
center without devices keeps its totals, as it keeps its values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from coordinator.strategies.base import (
    PartOfCohort,
    Replies,
    Round,
    State,
    Strategy,
    late_replies,
    relay,
    vector_samples,
)
from coordinator.strategies.common.label_totals import COUNTS_KEY, check_room, label_counts, with_label_totals
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.updates import pack_by_client
from edge_client.errors import ConfigError
from edge_client.protocol.program import Program
from edge_client.protocol.task import ClientId, Probe

SAME_NUMBER = 0.5  # samples by which a sum of soft labels may differ from their number


def corrects_labels(strategy: Strategy) -> TypeGuard[LocalSgd]:
    """Whether devices correct centers to their own label counts."""
    return isinstance(strategy, LocalSgd) and strategy.label_prior == "device"


def check_label_totals(strategy: Strategy, program: Program) -> None:
    """Raise ConfigError, before the first round, where devices would refuse each probe, or no task has room.

    A label prior corrects a cross-entropy, and a task has the label totals of all centers.
    """
    if not corrects_labels(strategy):
        return
    if program.loss != "cross-entropy" or program.own_loss:
        told = "has a loss of its own" if program.own_loss else f"is trained for {program.loss}"
        raise ConfigError(
            f"label-prior device corrects the cross-entropy of one class for each sample, and {program.model} {told}",
            hint="set label-prior = model; fedrc is fedem then",
        )
    check_room(strategy.compared_centers, program.classes)


def count_labels(strategy: Strategy, before: State, exchanges: Round) -> Round:
    """The exchanges of a round, and one for label counts that are not known; the new state has the centers' totals."""
    if not corrects_labels(strategy):
        return (yield from exchanges)
    samples = dict[ClientId, int]()

    def count(replies: Replies) -> None:
        samples.update(vector_samples(late_replies(replies), "update"))
        samples.update(vector_samples(replies, "update"))

    after = yield from relay(exchanges, see=count)
    counts = dict(label_counts(before))
    unknown = [c for c, n in sorted(samples.items()) if c not in counts or abs(counts[c].sum() - n) > SAME_NUMBER]
    if unknown:
        task = Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0)
        replies = yield PartOfCohort(dict.fromkeys(unknown, task), of=len(samples))
        counts |= {c: reply.labels for c, reply in sorted(replies.items()) if reply.labels is not None}
    if not counts:
        return after
    after = replace(after, extra={**after.extra, **pack_by_client(COUNTS_KEY, counts)})
    return with_label_totals(after, strategy.label_shares(after), before)
