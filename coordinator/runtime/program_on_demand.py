"""The training program of a federation, compiled for an engine when the first device asks for that engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from coordinator.artifacts.signed_program import PROGRAM_FACT, CompiledProgram, prepare_program
from coordinator.config import CoordinatorConfig
from coordinator.identity.signing_key import SigningKey
from coordinator.runtime.event_loop import EventLoop
from coordinator.runtime.status_reporter import EventWatcher
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.transport.clock import Clock


@dataclass(kw_only=True)
class ProgramOnDemand:
    """`current` is the program as it is now. It grows between rounds only, so a replayed round names the same one.

    `progress` is told of each part that is compiled; `on_ready` is called when the first program is there; `beside`:
    the compiler has a thread of its own, so that devices are answered meanwhile.
    """

    config: CoordinatorConfig
    store: Store
    key: SigningKey
    session: EventLoop
    clock: Clock
    event_log: EventLog
    progress: EventWatcher
    on_ready: Callable[[], object]
    beside: bool
    current: CompiledProgram | None = None

    def ensure(self, engines: Collection[str], *, trained: bool = False) -> CompiledProgram:
        """The program with containers for these engines; every device can fetch it.

        While something is compiled, devices are told so; after the training (`trained`) that the centers are written.
        A program that is only read, as after a restart, takes no time and is told to none.
        """
        if self.current is not None and self.current.program.containers.keys() >= set(engines):
            return self.current
        began_s, status = self.clock.now_s(), self.session.status
        compiles = bool(engines) or self.store.facts.get(PROGRAM_FACT) is None
        if trained:
            status.announcer.set("export", "no")
        elif compiles:
            status.announcer.set("compile", "next-round" if self.store.states.enrolled() else "now")
        if trained or compiles:
            status.write("compiling")

        def tell(part: str) -> None:
            status.working_on = part
            self.progress({"event": "compiling", "part": part})

        self.current = prepare_program(
            self.config,
            self.store,
            self.key,
            engines,
            trained=trained,
            progress=tell,
            compute=self.session.run_beside if self.beside else lambda work: work(),
        )
        status.working_on = ""
        self.on_ready()
        self.session.downloads.share(self.current.blobs())
        program = self.current.program
        parity = {engine: program.parity.get(engine) for engine in program.containers}
        seconds = round(self.clock.now_s() - began_s, 3)
        self.event_log.write("program", model=self.config.model.name, parity=parity, seconds=seconds)
        return self.current
