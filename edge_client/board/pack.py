"""`fedcenters-edge release`: this client as a release for a fleet of boards; `provision --sign-release` signs it."""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from edge_client import __version__
from edge_client.board.board_files import SITE_FOLDER
from edge_client.board.flash import PACKAGE
from edge_client.board.wheels import ENGINE_REQUIREMENTS, client_files
from edge_client.errors import EXIT_OK
from edge_client.transport.blobs import write_atomically
from edge_client.update.launcher import version_numbers
from edge_client.update.self_update import NOTE_FILE, unpack_release

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


def pack_release(files: Mapping[str, bytes], version: str) -> bytes:
    """A release: the same files give the same bytes. `files` are named as in `edge_client/cli.py`."""
    version_numbers(version)
    made = io.BytesIO()
    note = json.dumps({"version": version}).encode()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in [(NOTE_FILE, note), *sorted(files.items())]:
            header = tarfile.TarInfo(name)
            header.size, header.mode = len(data), 0o644
            tar.addfile(header, io.BytesIO(data))
    unpack_release(made.getvalue())
    return made.getvalue()
