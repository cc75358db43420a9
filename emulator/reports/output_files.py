"""Files that a command writes for its user."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.transport.blobs import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_output(path: Path, data: bytes) -> None:
    """Write a user's file, which keeps its rights: what was there stays until the new one is whole, as on a full disk.

    A pipe, a device, or a file in a folder that may not be written is written as it is.
    """
    place = path.resolve()  # of a link, what it names
    if not place.exists():
        write_atomically(place, data)
    elif place.is_file() and os.access(place.parent, os.W_OK):
        rights = stat.S_IMODE(place.stat().st_mode)
        write_atomically(place, data, private=True)
        place.chmod(rights)
    else:
        place.write_bytes(data)


def save_figure(figure: Figure, out: Path, **options: Any) -> None:  # noqa: ANN401 - those of `Figure.savefig`
    """Write it in the format that the ending of `out` names; a picture that was there stays until this one is whole."""
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:], **options)
    write_output(out, picture.getvalue())
