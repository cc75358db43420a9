"""The centers of a catalog, fetched on demand: a `CenterSource` (choose_center.py). `fetch` downloads blobs.

Every file is checked before it is used: models and the router by the signed catalog that names them, containers by the
signed program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.nearest.router_file import read_router
from edge_client.protocol.task import Flat
from edge_client.runtime.task_runner import TaskRunner
from edge_client.training.learner import EngineLearner

FetchBlobs = Callable[[list[Manifest]], None]


class CatalogCenterSource:
    """See `CenterSource`."""

    def __init__(self, catalog: Catalog, runner: TaskRunner, fetch: FetchBlobs) -> None:
        self.catalog, self._workshop, self._fetch = catalog, runner, fetch
        runner.check_signature(catalog.program)
        fetch([catalog.program])
        self.program = runner.program(catalog.program)
        self._engine = runner.config.engine
        if self._engine not in catalog.containers:
            raise Malformed("no_engine", f"the catalog has no program for {self._engine}")
        self.abstain, self.tree, self.centers = catalog.abstain, catalog.tree, len(catalog.centers)
        self.router: Router | None = None
        if catalog.router is not None:
            fetch([catalog.router])
            self.router = found = read_router(runner.blobs.read(catalog.router.sha256))
            if found.centers != self.centers:
                raise Malformed("bad_field", f"a guide to {found.centers} centers, the catalog has {self.centers}")

    def learner(self, *, training: bool) -> EngineLearner:
        needed = [self.catalog.containers[self._engine]]
        if training:
            needed.append(self._step())
        for function, container in zip(("evaluate", "step"), needed, strict=False):
            self._workshop.check_container(self.program, function, container)
        functions = ["evaluate", "step"][: len(needed)]
        block = self.catalog.containers[self._engine].block
        files = self.program.files(self._engine, functions)
        self._fetch([file.manifest(name, block) for name, file in files.items()])
        if training and (refused := self._workshop.use(self.program, self._engine, self.catalog.program.sha256)):
            raise refused.error()
        return EngineLearner(self._workshop.engine(self.program, functions), self.program)

    def _step(self) -> Manifest:
        """The file of training steps: program.json names it, the catalog need not."""
        files, block = self.program.containers.get(self._engine, {}), self.catalog.containers[self._engine].block
        if "step" not in files:
            raise Malformed("no_engine", f"the program has no step for {self._engine}")
        return files["step"].manifest("step", block)

    def models(self, centers: Sequence[int]) -> list[Flat]:
        named = [self.catalog.centers[k].model for k in centers]
        self._fetch(named)
        return [self._workshop.vector(manifest, self.program.schema) for manifest in named]

    def start(self) -> Flat | None:
        return None if self.catalog.start is None else self._vector(self.catalog.start)

    def split(self, number: int) -> Flat:
        return self._vector(self.catalog.splits[number])

    def _vector(self, manifest: Manifest) -> Flat:
        self._fetch([manifest])
        return self._workshop.vector(manifest, self.program.schema)
