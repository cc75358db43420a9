"""The phone page's icons: three groups of devices, each around its center. Writes edge_client/web/icons.

Run with: python -m tests.figures.app_icons
"""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).parents[2] / "edge_client" / "web" / "icons"
SIZE, SIZES = 512, (192, 512)  # pixels; launchers cut a circle of 80 % out of it, in which everything stands
OVERSAMPLING = 4
GROUND, CENTER, DEVICE = "#1457b8", "#ffffff", "#a9cbff"
GROUPS = ((256, 168), (166, 318), (346, 318))  # the centers
DEVICES, DISTANCE, CENTER_RADIUS, DEVICE_RADIUS = 5, 62, 26, 13


def circles() -> list[tuple[float, float, int, str]]:
    """(x, y, radius, colour) of every disc on a square of SIZE."""
    found: list[tuple[float, float, int, str]] = []
    for x, y in GROUPS:
        found.append((x, y, CENTER_RADIUS, CENTER))
        for k in range(DEVICES):
            turn = 2 * math.pi * k / DEVICES - math.pi / 2
            found.append(
                (
                    round(x + DISTANCE * math.cos(turn), 1),
                    round(y + DISTANCE * math.sin(turn), 1),
                    DEVICE_RADIUS,
                    DEVICE,
                )
            )
    return found


def svg() -> str:
    """The icon as SVG."""
    discs = "".join(f'<circle cx="{x:g}" cy="{y:g}" r="{r}" fill="{colour}"/>' for x, y, r, colour in circles())
    ground = f'<rect width="{SIZE}" height="{SIZE}" fill="{GROUND}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}">{ground}{discs}</svg>\n'


def png(size: int) -> Image.Image:
    """The same in pixels."""
    scale = size * OVERSAMPLING / SIZE
    drawn = Image.new("RGB", (size * OVERSAMPLING,) * 2, GROUND)
    pen = ImageDraw.Draw(drawn)
    for x, y, r, colour in circles():
        pen.ellipse([scale * (x - r), scale * (y - r), scale * (x + r), scale * (y + r)], fill=colour)
    return drawn.resize((size, size), Image.Resampling.LANCZOS).quantize(32)


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "icon.svg").write_text(svg(), encoding="utf-8")
    for size in SIZES:
        png(size).save(FOLDER / f"icon-{size}.png", optimize=True)


if __name__ == "__main__":
    main()
