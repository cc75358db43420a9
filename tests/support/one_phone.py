"""A coordinator and one phone whose page trains for it; tests compare what it trained with Python's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coordinator.models.registry import build_model
from coordinator.storage.store import Store
from edge_client.protocol.task import Flat
from emulator.stop_signals import DeferredSignals
from emulator.testbed import testbed_files as stage
from emulator.testbed.processes import ChildProcesses
from export.compiler.program import CompilerOutput, vector_of
from tests.support.browser import PHONE, Open, Visit
from tests.support.phone_page import PATIENCE_MS, listens, served
from tests.support.ports import free_port
from tests.support.process_fleet import FleetScene, until
from tests.support.virtual_federation import put_program

ME, SAMPLES = "phone-1", 120
TRAIN = SAMPLES - SAMPLES // 5  # the page keeps every fifth to test
KEPT = [i for i in range(SAMPLES) if i % 5 != 4]
ROUNDS, STEPS, RATE = 2, 20, 0.5
SETTINGS: dict[str, Any] = {
    "local-steps": STEPS,
    "batch-size": TRAIN,  # every step sees all samples, in whatever order
    "learning-rate": RATE,
    "momentum": 0.0,
}


@contextmanager
def one_phone(
    visit: Open, folder: Path, made: CompilerOutput, model: str, run: Mapping[str, Any], *, port: int | None = None
) -> Iterator[tuple[Visit, Callable[[], None]]]:
    """The phone's page, which waits for its samples, and what lets it take part until the run is done.

    `folder`/run is the coordinator's, which finds its program compiled. `port` is the broker's.
    """
    port = port or free_port()
    with DeferredSignals() as signals, ChildProcesses(folder / "logs", signals) as children:
        scene = FleetScene(folder / "run", f"mqtt://127.0.0.1:{port}", children, (run,))
        config = scene.work / "coordinator.toml"
        facts: dict[str, Any] = {"broker": f"mosquitto:{port}", "web-port": free_port(), "devices": 1, "seed": 3}
        more: dict[str, Any] = {"model": {"name": model, "engines": ["onnx"]}, "formats": []}
        stage.write_coordinator(config, scene.folder, runs=scene.runs, exit_when_done=False, **facts, **more)
        scene.folder.mkdir(parents=True)
        with closing(Store(scene.folder / "store")) as store:
            put_program(store, made.program, made.files.values(), start_of(made, model))
        children.python("coordinator", "-m", "coordinator", "serve", str(config))
        until(lambda: listens(port), children, "the coordinator's broker")
        with served(config) as url:
            opened = visit(f"{url}#id={ME}", size=PHONE, touch=True)
            opened.page.wait_for_selector("#entry:not([hidden])", timeout=PATIENCE_MS)

            def take_part() -> None:
                opened.page.get_by_role("button", name="Take part").click()
                scene.wait_for("done")
                opened.page.goto("about:blank")  # before the broker ends

            yield opened, take_part


def start_of(made: CompilerOutput, model: str) -> Flat:
    return vector_of(build_model(model, seed=0).module, made.program.schema)
