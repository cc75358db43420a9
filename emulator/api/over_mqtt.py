"""The same run over MQTT: a broker, a coordinator and real clients on this machine, as one value in a `with` block."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from coordinator.local_broker import Broker, start_broker
from coordinator.storage.run_reader import last_state, read_program
from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import method_path, method_settings, summed_members
from edge_client.errors import UsageError
from emulator.api.checks import check_fleet, check_method, check_own, in_words_of_python
from emulator.api.data import fleets
from emulator.api.result import Result
from emulator.console import ConsoleProgress
from emulator.data.fleet import Fleet
from emulator.options import OPTIONS, SimulateArgs
from emulator.run.execute import SimulationResult
from emulator.run.load import make_fleet
from emulator.testbed.simulate_over_mqtt import checked_options, keep_asked, run_name, run_over_mqtt

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from export.compiler.losses.sample_losses import LossFunction


@dataclass(kw_only=True)
class MqttFederation:
    """A broker that runs as long as the `with` block; see `federation`. `url` is its address."""

    broker: str
    model: nn.Module | Callable[[], nn.Module] | str | None
    fleet: Fleet
    out: Path
    loss: LossFunction | None = None
    url: str = ""
    _broker: Broker | None = field(default=None, repr=False)
    _open: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> Self:
        with in_words_of_python(), ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="fedcenters-"))
            self._broker = stack.enter_context(start_broker(Path(folder), self.broker))
            self.url = self._broker.url
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.url, self._broker = "", None
        self._open.close()

    def run(self, method: Strategy, *, rounds: int = 10, seed: int = 0, name: str = "", engine: str = "onnx") -> Result:
        """Train a method's centers: a coordinator in a process, and a client for each device of the fleet.

        `engine`: the runtime of the devices, "onnx", "litert" or "pt2". `name`: of the run's folder in `out`. The
        numbers are those of `fc.simulate` with the same engine. Raises UsageError outside of the `with` block, and for
        a method of a notebook's cell, which the coordinator's process cannot import; NetworkError when the broker that
        the `with` block started has ended.
        """
        if not self.url:
            raise UsageError("this federation is not running", hint="with fc.federation(...) as home: home.run(...)")
        if type(method).__module__ == "__main__":
            hint = f"put class {type(method).__name__} into a file, as mine.py, and import it from there"
            raise UsageError("the coordinator is a process of its own and cannot import from __main__", hint=hint)
        check_method(method)
        with in_words_of_python():
            OPTIONS["num-rounds"].check(rounds)
            OPTIONS["seed"].check(seed)
            return self._run(method, rounds=rounds, seed=seed, name=name, engine=engine)

    def _run(self, method: Strategy, *, rounds: int, seed: int, name: str, engine: str) -> Result:
        began = time.perf_counter()
        args = checked_options(
            SimulateArgs(
                method=method_path(method),
                settings=method_settings(method),
                rounds=rounds,
                seed=seed,
                engine=engine,
                broker=self.url,
                out=self.out,
                name=name,
            )
        )
        own, progress = None, ConsoleProgress()
        if self.model is not None or self.loss is not None or not self.fleet.model:
            from emulator.api.models import own_model

            model = self.model if self.model is not None else self.fleet.model or None
            members = summed_members(args.method)
            with progress.during("recording what the model computes"):
                own = own_model(model, self.fleet.cut(seed), loss=self.loss, seed=seed, members=members)
        args, split = make_fleet(args if own is None else replace(args, model=own.name), self.fleet)
        found: list[Result] = []

        def finish(folder: Path, records: Any) -> None:  # noqa: ANN401 - see run_over_mqtt
            keep_asked(folder, replace(args, broker=self.broker), method, split)
            state, start = last_state(folder, run_name(method))
            state = replace(state, assignment=state.assignment or records[-1]["assignment"])
            seconds = [record["seconds"] for record in records]
            schema = read_program(folder).schema
            run = SimulationResult(
                records=records, real_seconds=seconds, state=state, schema=schema, virtual_seconds=sum(seconds)
            )
            found.append(
                Result(
                    method=method,
                    args=args,
                    run=run,
                    split=split,
                    start=start,
                    own_model=own,
                    seconds=time.perf_counter() - began,
                    folder=folder.absolute(),
                )
            )

        # one at an address is asked again whether it answers
        mine = self._broker if self._broker is not None and self._broker.kind != "external" else None
        run_over_mqtt(args, method, split, progress, finish, model=own, broker=mine)
        return found[0]


def federation(
    broker: str = "auto",
    *,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    fleet: Fleet | None = None,
    loss: LossFunction | None = None,
    out: str | Path = "runs",
) -> MqttFederation:
    """A fleet over MQTT on this machine: real clients in real time, in place of the virtual time of `fc.simulate`.

    Args:
        broker: "embedded" (in this process), "mosquitto", "auto" (mosquitto where it is installed), or the address of
            one that runs, as "mqtt://host:1883".
        model: as for `fc.simulate`.
        fleet: the devices, 200 at most. Default: `fc.fleets.digits()`.
        loss: a function of outputs and targets that gives one number per sample; it is compiled into the program.
        out: the folder in which each run gets a folder: the coordinator's, which `bundle`, `report` and the dashboard
            read.

    For devices on other machines see `fedcenters-coordinator serve` and docs/run-as-a-service.md.

    >>> import fedcenters as fc
    >>> with fc.federation("embedded", fleet=fc.fleets.digits(devices=3)) as home:  # doctest: +SKIP
    ...     result = home.run(fc.FeSEM(3), rounds=5)
    """
    fleet = fleets.digits() if fleet is None else fleet
    check_fleet(fleet)
    check_own(loss=loss, out=out)
    return MqttFederation(broker=broker, model=model, fleet=fleet, out=Path(out), loss=loss)
