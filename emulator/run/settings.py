"""What the rounds of a simulated run depend on besides the method, the first model and the devices."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.rounds.asynchronous.options import Asynchronous
from coordinator.rounds.round import EVERY_ROUND, EvaluationPlan
from coordinator.rounds.update_validation import MAX_UPDATE_RATIO
from emulator.run.own_metrics import Metric
from emulator.simulation.attacks import Attack, no_attack
from emulator.simulation.codec_channel import ChannelFactory, CodecChannel
from emulator.simulation.device_profiles import DEVICE_PROFILES, DeviceProfile

DEADLINE_S = 600.0  # virtual seconds of an exchange


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """`batch` is the batch size of the engine, `profiles` the kinds of devices, `channel` makes the run's codec.

    `over_select`: a cohort that is so many times as large is asked, and the first replies count. `asynchronous`: no
    device is waited for.
    """

    rounds: int
    seed: int
    batch: int
    deadline_s: float = DEADLINE_S
    over_select: float = 1.0
    asynchronous: Asynchronous | None = None
    profiles: Sequence[DeviceProfile] = DEVICE_PROFILES
    evaluation: EvaluationPlan = EVERY_ROUND
    channel: ChannelFactory = CodecChannel
    attack: Attack = no_attack
    max_update_ratio: float = MAX_UPDATE_RATIO
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # the user's own, by name

    @property
    def profiles_checksum(self) -> int:
        """Of the kinds of devices, which a run's options name by a file that may change."""
        return zlib.crc32(repr(tuple(self.profiles)).encode())
