"""The parts of a running simulation that change from round to round, and their way into a checkpoint and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from coordinator.strategies.base import Fleet, State, Strategy
from edge_client.errors import ConfigError
from emulator.reports.pictures.recorder import RunRecorder
from emulator.run.run_parts import same_samples, samples_checksums
from emulator.simulation import checkpoint
from emulator.simulation.asynchronous_network import AsynchronousNetwork
from emulator.simulation.checkpoint import Checkpoint, Checkpoints
from emulator.simulation.emulated_devices import MAIN_SLOT, EmulatedDevices
from emulator.simulation.spill import SpilledRecords
from emulator.simulation.virtual_network import VirtualNetwork


@dataclass(kw_only=True)
class LiveRun:
    """`fleet` has the number of samples of each device; `records` and `real_seconds` have an entry for each round.

    `state` is that after the last round. `profiles` is the checksum of the kinds of devices. `asynchronous` plays the
    rounds of a run that waits for no device.
    """

    strategy: Strategy
    devices: EmulatedDevices
    fleet: Fleet
    network: VirtualNetwork
    recorder: RunRecorder
    profiles: int
    asynchronous: AsynchronousNetwork | None = None
    state: State = field(default_factory=lambda: State(centers=np.empty((0, 0))))
    records: SpilledRecords = field(default_factory=SpilledRecords)
    real_seconds: list[float] = field(default_factory=list)

    @cached_property
    def _samples(self) -> list[int]:
        return samples_checksums(self.devices.local)

    def save(self, checkpoints: Checkpoints, number: int) -> None:
        """Write the checkpoint after round `number`."""
        lost = checkpoint.begin_checkpoint(checkpoints.folder) / "lost"
        network = dict(self.network.to_json(lost))
        if self.asynchronous:
            network["asynchronous"] = self.asynchronous.to_json(lost.with_name("under-way"))
        self.recorder.keep(lost.with_name("heard"))
        if self.devices.asks_own:
            self.devices.keep(lost.with_name("own"))
        network |= {"samples": self._samples, "profiles": self.profiles}
        network["slots"] = {name: sorted(getattr(self.devices, name)) for name in ("trained", "forgotten")}
        done = Checkpoint(
            round=number,
            state=self.state,
            real_seconds=self.real_seconds,
            network=network,
            fingerprint=checkpoints.fingerprint,
            marks=checkpoints.marks,
        )
        checkpoint.finish_checkpoint(lost.parent, done, self.records)

    def restore(self, folder: Path, before: Checkpoint, *, rounds: int) -> None:
        """Make every part what it was after the checkpoint's round, of a run with `rounds` rounds.

        Raises ConfigError for one of another fleet or model: a user's own have no name that options could differ by.
        """
        size, width = self.devices.program.schema.size, before.state.centers.shape[1]
        if width != size:
            told = f"the checkpoint in {folder.parent} is of a model with {width} numbers, and this one has {size}"
            raise ConfigError(told, hint="give the run's own model, give the run another name, or leave out --resume")
        if not same_samples(
            self._samples, before.network.get("samples", self._samples)
        ):  # an older version's says nothing
            told = f"the checkpoint in {folder.parent} is of devices with other samples"
            raise ConfigError(told, hint="give the run's own fleet, give the run another name, or leave out --resume")
        if before.network.get("profiles", self.profiles) != self.profiles:
            told = f"the checkpoint in {folder.parent} is of devices with other profiles"
            raise ConfigError(told, hint="give the run's own profiles, give it another name, or leave out --resume")
        with checkpoint.reading_checkpoint(folder):
            self._recall(folder, before, rounds)

    def _recall(self, folder: Path, before: Checkpoint, rounds: int) -> None:
        for record in checkpoint.checkpoint_records(folder):
            self.records.append({**record, "of": rounds})
        if len(self.records) != before.round:
            raise ValueError(f"records.jsonl has {len(self.records)} rounds of {before.round}")
        self.network.recall(before.network, folder / "lost")
        if self.asynchronous:
            self.asynchronous.recall(before.network["asynchronous"], before.state, folder / "under-way")
        self.recorder.recall(folder / "heard")
        slots = before.network.get("slots", {"trained": [MAIN_SLOT], "forgotten": []})  # of an older version: none
        self.devices.trained, self.devices.forgotten = set(slots["trained"]), set(slots["forgotten"])
        if (folder / "own").is_dir():
            self.devices.recall(folder / "own")
            self.devices.asks_own = True
        else:
            self.devices.forgotten |= self.devices.trained
        self.real_seconds = list(before.real_seconds)
        self.state = before.state
