"""The files of a bundle that the dashboard lists, where its folder is not as `export` left it."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from coordinator.dashboard.bundle_files import BundleFiles
from edge_client.protocol.nearest.bundle_fields import MAX_MANIFEST_BYTES
from export.bundle.reader import MANIFEST_FILE


def test_a_manifest_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_FILE).open("wb") as file:
        file.truncate(16 * MAX_MANIFEST_BYTES)
    tracemalloc.start()
    try:
        assert BundleFiles(tmp_path).entries() == []
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_MANIFEST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_in_the_place_of_the_manifest_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST_FILE)
    assert BundleFiles(tmp_path).entries() == []
