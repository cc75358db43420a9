"""The parts of a running simulation that change from round to round, and their way into a checkpoint and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from coordinator.strategies.base import Fleet, State
from emulator.reports.pictures.recorder import RunRecorder
from emulator.simulation import checkpoint
from emulator.simulation.checkpoint import Checkpoint, Checkpoints
from emulator.simulation.spill import SpilledRecords
from emulator.simulation.virtual_network import EmulatedDevices, VirtualNetwork


@dataclass(kw_only=True)
class LiveRun:
    """`fleet` has the number of samples of each device; `records` and `real_seconds` have an entry for each round."""

    devices: EmulatedDevices
    fleet: Fleet
    network: VirtualNetwork
    recorder: RunRecorder
    records: SpilledRecords = field(default_factory=SpilledRecords)
    real_seconds: list[float] = field(default_factory=list)

    def save(self, checkpoints: Checkpoints, number: int, state: State) -> None:
        """Write the checkpoint after round `number`, which ended with `state`."""
        lost = checkpoint.begin_checkpoint(checkpoints.folder) / "lost"
        network = self.network.to_json(lost)
        self.recorder.keep(lost.with_name("heard"))
        if self.devices.asks_own:
            self.devices.keep(lost.with_name("own"))
        done = Checkpoint(
            round=number, state=state, real_seconds=self.real_seconds, network=network, lesson=checkpoints.lesson
        )
        checkpoint.finish_checkpoint(lost.parent, done, self.records)

    def restore(self, folder: Path, before: Checkpoint) -> State:
        """Make every part what it was after the checkpoint's round; -> the state after that round."""
        for record in checkpoint.checkpoint_records(folder):
            self.records.append(record)
        self.network.recall(before.network, folder / "lost")
        self.recorder.recall(folder / "heard")
        if (folder / "own").is_dir():
            self.devices.recall(folder / "own")
            self.devices.asks_own = True
        else:
            self.devices.forgotten = True
        self.real_seconds = list(before.real_seconds)
        return before.state
