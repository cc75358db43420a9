"""The page's side panels: maps of the newest rounds, the files of the bundle, and how a new device joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.dashboard.bundle_files import BundleFiles
from coordinator.dashboard.map_worker import MapWorker

JoinInfo = Callable[[str], Mapping[str, Any]]
BUNDLE_FOLDER = "bundle"  # the bundle's folder within a run folder


class SidePanels:
    """The panels of one run folder; without a folder they are empty."""

    def __init__(self, folder: Path | None, map_worker: MapWorker | None, join_info: JoinInfo) -> None:
        self._folder, self._map_worker, self._join_info = folder, map_worker, join_info

    def map(self, run: str) -> Mapping[str, Any]:
        """The newest `map` of a run, and the round that is `missing` one with the reason; each may be None."""
        return {"map": None, "missing": None} if self._map_worker is None else self._map_worker.map(run)

    def device(self, cid: str) -> Mapping[str, Any]:
        """Run -> a device's distances to the centers, in the newest map."""
        return {} if self._map_worker is None else self._map_worker.device(cid)

    def files(self) -> BundleFiles | None:
        """The files of the bundle in the run folder now."""
        return None if self._folder is None else BundleFiles(self._folder / BUNDLE_FOLDER)

    def join(self, base: str) -> Mapping[str, Any]:
        """How a new device joins, for a page that was opened at the address `base`."""
        return self._join_info(base)


EMPTY_PANELS = SidePanels(None, None, lambda _: {})
