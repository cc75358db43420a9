"""A figure as a user's file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from export.output_paths import replace_file


def save_figure(figure: Figure, out: Path, **options: Any) -> None:  # noqa: ANN401 - those of `Figure.savefig`
    """Write it in the format that the ending of `out` names; a picture that was there stays until this one is whole."""
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:], **options)
    replace_file(out, picture.getvalue())
