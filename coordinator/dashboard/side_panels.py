"""What the page shows beside the view: maps of the newest rounds, the files of the bundle, what a new device needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.dashboard.bundle_files import BundleFiles
from coordinator.dashboard.map_worker import MapWorker

JoinInfo = Callable[[str], Mapping[str, Any]]
BUNDLE_FOLDER = "bundle"  # the bundle's folder within a run folder


class PageData:
    """Of one run folder; without one there is nothing."""

    def __init__(self, folder: Path | None, map_worker: MapWorker | None, joining: JoinInfo) -> None:
        self._folder, self._surveyor, self._joining = folder, map_worker, joining

    def map(self, run: str) -> Mapping[str, Any] | None:
        """The newest survey of a run, or None as long as there is none."""
        return None if self._surveyor is None else self._surveyor.map(run)

    def device(self, cid: str) -> Mapping[str, Any]:
        """Run -> a device's distances to the centers, in the newest survey."""
        return {} if self._surveyor is None else self._surveyor.device(cid)

    def files(self) -> BundleFiles | None:
        """The bundle as it is now."""
        return None if self._folder is None else BundleFiles(self._folder / BUNDLE_FOLDER)

    def join(self, base: str) -> Mapping[str, Any]:
        """What a new device must know, for someone who has reached us at `base`."""
        return self._joining(base)


EMPTY_PAGE_DATA = PageData(None, None, lambda _: {})
