"""Roll-out of a new bundle: which devices get it first, and the test on their reports that stops a worse one. Pure.

A *generation* is a bundle under the hash of its manifest. A new one is a candidate: the devices whose hash falls into
the canary's share get it, all others the stable one. Each device may report its accuracy, from 0 to 1, once.

The test is sequential: it may be evaluated after every report. Reports are taken in pairs: ya from a stable device, yb
from a canary. With bets 0 < l < 1 / max(m, 1 - m) around a value m, both fixed before the pair is seen,

    E <- E (1 + l (ya - m)) (1 - l (yb - m))

has an expectation of at most E when canaries are at least as good: for means a <= b the factor's expectation is at
most (1 + l (a - m)) (1 - l (a - m)) <= 1. By Ville's inequality E ever reaches 1 / alpha with a probability of at most
alpha. This is testing by betting (Waudby-Smith and Ramdas, 2023) for two samples (Turner, Ly and Grünwald, 2021). E is
the mean over a few bets, to which the same bound applies, so that no effect size has to be guessed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SIGNIFICANCE = 0.01  # alpha: the probability of stopping a bundle that is at least as good
BET_SIZES = (0.05, 0.1, 0.2, 0.4, 0.8)  # in parts of the largest allowed bet
MAX_WAITING_REPORTS = 64  # unpaired reports of one side; further ones are not counted


@dataclass(frozen=True, kw_only=True)
class RolloutEvidence:
    """Evidence against the candidate: log E for each bet, and the reports that are still unpaired."""

    logs: tuple[float, ...] = (0.0,) * len(BET_SIZES)
    pairs: int = 0
    total: float = 1.0  # sum of the paired reports, with one pseudo-pair (0, 1)
    stable: tuple[float, ...] = ()
    canary: tuple[float, ...] = ()

    @property
    def e_value(self) -> float:
        """The mean of E over the bets."""
        return sum(math.exp(min(log, 700.0)) for log in self.logs) / len(self.logs)

    def with_report(self, accuracy: float, *, canary: bool) -> RolloutEvidence:
        """The evidence after one more report; unchanged when MAX_WAITING_REPORTS of its side are unpaired."""
        waiting = self.canary if canary else self.stable
        if len(waiting) >= MAX_WAITING_REPORTS:
            return self
        both = (self.stable, (*waiting, accuracy)) if canary else ((*waiting, accuracy), self.canary)
        after = replace(self, stable=both[0], canary=both[1])
        return after.pair_reports() if all(both) else after

    def pair_reports(self) -> RolloutEvidence:
        """The evidence after the oldest unpaired report of each side is paired."""
        a, b = self.stable[0], self.canary[0]
        m = self.total / (2 * self.pairs + 2)  # the mean so far, fixed before this pair is seen
        most = 1 / max(m, 1 - m)
        logs = tuple(
            log + math.log1p(bet * most * (a - m)) + math.log1p(-bet * most * (b - m))
            for log, bet in zip(self.logs, BET_SIZES, strict=True)
        )
        return RolloutEvidence(
            logs=logs,
            pairs=self.pairs + 1,
            total=self.total + a + b,
            stable=self.stable[1:],
            canary=self.canary[1:],
        )


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """The canaries' share of devices, and the pairs of reports after which the candidate becomes stable."""

    share: float = 0.05
    pairs: int = 200


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The state of a roll-out. `withdrawn` generations were stopped and are not offered again."""

    stable: str | None = None
    candidate: str | None = None
    withdrawn: tuple[str, ...] = ()
    evidence: RolloutEvidence = field(default_factory=RolloutEvidence)
    reporters: frozenset[str] = frozenset()

    def offer(self, generation: str, plan: RolloutPlan) -> Rollout:
        """The state after a new bundle. The first one, and with a share of 1 every one, is stable at once.

        The stable one again takes a candidate back, which may be offered anew.
        """
        if generation in self.withdrawn:
            return self
        if generation == self.stable or self.stable is None or plan.share >= 1:
            return Rollout(stable=generation, withdrawn=self.withdrawn)
        if generation == self.candidate:
            return self
        return Rollout(stable=self.stable, candidate=generation, withdrawn=self.withdrawn)

    def keeping(self, known: Container[str]) -> Rollout:
        """The state where only the `known` generations can be served: without a stable one, the next is that."""
        if self.stable is not None and self.stable not in known:
            return Rollout(withdrawn=self.withdrawn)
        if self.candidate is not None and self.candidate not in known:
            return Rollout(stable=self.stable, withdrawn=self.withdrawn)
        return self

    def generation_for(self, device: str | None, plan: RolloutPlan) -> str | None:
        """The generation that a device is served; a device without a name gets the stable one."""
        if self.candidate is None or device is None or queue_position(device, self.candidate) >= plan.share:
            return self.stable
        return self.candidate

    def add_report(self, device: str, generation: str, accuracy: float, plan: RolloutPlan) -> Rollout:
        """The state after a report. With a candidate, the first report of each device on its own generation counts."""
        if self.candidate is None or device in self.reporters or generation != self.generation_for(device, plan):
            return self
        evidence = self.evidence.with_report(accuracy, canary=generation == self.candidate)
        if evidence is self.evidence:
            return self
        if evidence.e_value >= 1 / SIGNIFICANCE:
            return Rollout(stable=self.stable, withdrawn=(*self.withdrawn, self.candidate))
        if evidence.pairs >= plan.pairs:
            return Rollout(stable=self.candidate, withdrawn=self.withdrawn)
        return replace(self, evidence=evidence, reporters=self.reporters | {device})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"reporters": sorted(self.reporters)}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Rollout:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError."""
        e = raw["evidence"]
        rows = {name: tuple(map(float, e[name])) for name in ("logs", "stable", "canary")}
        evidence = RolloutEvidence(pairs=int(e["pairs"]), total=float(e["total"]), **rows)
        return Rollout(
            stable=raw["stable"],
            candidate=raw["candidate"],
            withdrawn=tuple(raw["withdrawn"]),
            reporters=frozenset(raw["reporters"]),
            evidence=evidence,
        )


def queue_position(device: str, generation: str) -> float:
    """A device's place in [0, 1) in the order of a generation's canaries; each generation has another order."""
    digest = hashlib.sha256(f"{generation}/{device}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # a float64 has a mantissa of 53 bits
