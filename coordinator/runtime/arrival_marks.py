"""Which blocks may still be on their way to each device, and what shows that they have arrived.

The blocks of one answer carry a random number, the mark, and the device's next `get` names the mark that it saw last.
So a device that does not read cannot claim that it did. Blocks count against the budget of all devices until they are
proven, or for ASSUMED_ARRIVAL_S; a device that does not prove waits longer and longer for more.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field

from edge_client.protocol.blocks import MAX_MARK
from edge_client.protocol.task import ClientId

ASSUMED_ARRIVAL_S = 8.0  # a device asks again after this time for a block that did not come
MAX_UNPROVEN = 2  # answers to one device; the second one because a broken link loses the proof of the first
MAX_HOLD_S = 3_600.0


@dataclass(eq=False)
class _Answer:
    mark: int
    size: int  # bytes
    sent_s: float
    counts: bool = True  # against the budget


@dataclass
class ArrivalMarks:
    """`under_way` is the sum of the bytes that count against the budget, `proven` how many answers have arrived.

    Times are seconds.
    """

    under_way: int = 0
    proven: int = 0
    _answers: deque[_Answer] = field(default_factory=deque)  # of all devices, oldest first
    _unproven: dict[ClientId, list[_Answer]] = field(default_factory=dict)
    _unanswered: dict[ClientId, int] = field(default_factory=dict)  # answers in a row that were not proven in time

    def prove(self, cid: ClientId, mark: int | None) -> None:
        """The device says which mark it saw last: what was sent up to there has arrived."""
        answers = self._unproven.get(cid, [])
        at = next((k for k, answer in enumerate(answers) if answer.mark == mark), None)
        if at is not None:
            for answer in answers[: at + 1]:
                self._release(answer)
            self.proven += at + 1
            self._unproven[cid] = answers[at + 1 :]
            self._unanswered.pop(cid, None)

    def may_send(self, cid: ClientId, now_s: float) -> bool:
        """Whether the device may be sent more. What it did not prove is given up after a time that doubles."""
        unproven = self._unproven.get(cid, [])
        failures = self._unanswered.get(cid, 0)
        hold_s = min(MAX_HOLD_S, ASSUMED_ARRIVAL_S * 2**failures)
        held = [answer for answer in unproven if now_s < answer.sent_s + hold_s]
        if len(held) < len(unproven):
            self._unproven[cid], self._unanswered[cid] = held, min(failures + 1, 10)
        return len(held) < MAX_UNPROVEN

    def sent(self, cid: ClientId, size: int, now_s: float) -> int:
        """Note an answer of so many bytes; -> its mark."""
        answer = _Answer(mark=1 + secrets.randbelow(MAX_MARK), size=size, sent_s=now_s)
        self._answers.append(answer)
        self._unproven.setdefault(cid, []).append(answer)
        self.under_way += size
        return answer.mark

    def expire(self, now_s: float) -> None:
        """What was sent long ago does not count against the budget any more."""
        while self._answers and (not self._answers[0].counts or self._answers[0].sent_s + ASSUMED_ARRIVAL_S <= now_s):
            self._release(self._answers.popleft())

    def _release(self, answer: _Answer) -> None:
        if answer.counts:
            answer.counts = False
            self.under_way -= answer.size
