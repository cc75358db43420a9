"""One process at a time writes a run's folder: two that did would mix their checkpoints, or remove each other's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edge_client.errors import ConfigError
from export.folder_lock import locked_folder


class FolderInUse(ConfigError):
    """Another run writes the folder."""


@contextmanager
def hold_folder(folder: Path, *, hint: str) -> Iterator[None]:
    """Hold a folder that is there. Raises FolderInUse when another run holds it."""
    with ExitStack() as held:
        try:
            held.enter_context(locked_folder(folder, wait=False))
        except BlockingIOError as taken:
            raise FolderInUse(f"{folder} is in use by a run that has not ended", hint=hint) from taken
        yield
