"""`fedcenters-edge release`: this client as a release for a fleet of boards; `provision --sign-release` signs it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edge_client import __version__
from edge_client.board.board_files import SITE_FOLDER
from edge_client.board.flash import PACKAGE
from edge_client.board.wheels import ENGINE_REQUIREMENTS, client_files
from edge_client.errors import EXIT_OK
from edge_client.transport.blobs import write_atomically
from edge_client.update.self_update import pack_release

EXAMPLE = 'example: fedcenters-edge release client.tar, then release = "client.tar" in the coordinator\'s file'


def add_arguments(release: argparse.ArgumentParser) -> None:
    """The options of `release`."""
    release.add_argument("file", type=Path, metavar="FILE.tar", help="what the coordinator's `release` names")
    release.set_defaults(command=release_client)


def release_client(options: argparse.Namespace) -> int:
    """Write the file."""
    files = {
        entry.path.removeprefix(f"{SITE_FOLDER}/"): entry.data
        for entry in client_files(PACKAGE, tuple(ENGINE_REQUIREMENTS))
    }
    data = pack_release(files, __version__)
    write_atomically(options.file, data)
    print(f"{options.file}: version {__version__}, {len(files)} files, {len(data)} bytes", file=sys.stderr)
    return EXIT_OK
