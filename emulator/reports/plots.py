"""The pictures of one run, drawn from arrays. Colour shows the center, marker shape shows the true group.

Each `draw_*` draws on one Axes, so that a report shows the pictures one by one and a README side by side; `make_figure`
makes a figure. Colours are those of Okabe and Ito, which most eyes distinguish; words and shapes repeat them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import BboxBase

from edge_client.protocol.task import Array

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
CURVE_ORDER = (0, 1, 2, 3, 7, 5, 4, 6)  # COLOURS of curves side by side: the two oranges stand apart
EDGES = ("white", "#808080", "#ff00ff", "#00ff00")  # of dots of centers 0 to 7, 8 to 15, ...
MARKERS, GLOBAL_COLOUR = "osD^vP*X<>", "#6b7280"
LINES = ("-", "--", "-.", ":")
MAX_NAMED_CLASSES = 10  # as many classes or centers have words or colours of their own
HEAT_SHADES = 40
SVG_DPI = 72  # points are the units of SVG files
LAP = 0.6  # points by which squares overlap, so that no seam shows between them
DARK_THRESHOLD = 0.6  # a cosine above that has a dark cell
MAX_LABELLED_ROWS = 40  # more devices than that leave no room for words
MAX_BARS = 256  # classes of a device in a bar; of more several are one
MAX_NAMES_INSIDE, MAX_LEGEND_ROWS = 6, 15  # of a map: more names would cover its dots; more rows are two columns
MAX_SHAPES = 5_000  # of a picture; more cells are one image
STYLE: Any = {  # matplotlib types every single key
    "font.family": "sans-serif",
    "font.size": 10,
    "pdf.fonttype": 42,  # TrueType: publishers refuse matplotlib's Type 3
    "text.color": "black",  # this and the next four are matplotlib's own, whatever the user has set
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "auto",
    "axes.grid": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "svg.fonttype": "path",  # looks the same where the font is not installed
    "svg.hashsalt": "fedcenters",  # the same numbers give the same bytes
}

# text on a colour; a page in dark mode has lighter centers and dark ink there
DARK_INK, LIGHT_INK = "#08131f", "#fffffe"
CONSTANT_LIGHT_INK = "#fffffd"  # text on a shade that is the same in dark mode
THEME = {  # a colour of a figure -> the variable that a page sets for light and dark
    "#111827": "ink",
    "#374151": "quiet",
    "#9ca3af": "axis",
    "#e5e7eb": "line",
    "#6b7280": "all",
    "#ffffff": "card",
    LIGHT_INK: "on-dark",
    **{colour.lower(): f"c{k}" for k, colour in enumerate(COLOURS)},
}
SPREAD_PERCENTILES = (10, 50, 90)  # percentiles of devices
SMALL_TEXT = 9.5  # points: a figure of 4.2 inches is read on a phone
NEAREST_DOTS = 0.045  # the least distance of two dots of a fleet, in parts of the picture
MAX_MOVED_DOTS = 2000  # more dots cover each other however they are moved
FILLED = 0.3  # of the picture by dots, where they are many
MAX_PUSHES = 200  # 1,000 dots take a second
DOT_WIDTH = 0.022  # of a dot of the spread, in accuracy

Assignment = Mapping[str, int]


def center_colour(center: int) -> str:
    """The colour of a center, the same in every picture."""
    return COLOURS[center % len(COLOURS)]


def curve_colour(i: int) -> str:
    """The colour of curve i of a picture, and of what else is shown of the same run or row."""
    return COLOURS[CURVE_ORDER[i % len(CURVE_ORDER)]]


def ink_on(center: int) -> str:
    """The colour of text on the colour of a center."""
    return LIGHT_INK if center % len(COLOURS) in (0, 7) else DARK_INK  # blue and black


def nested(i: int, n: int, widest: float, least: float) -> float:
    """The size of mark i of n that may lie on one another: each is drawn later and smaller, so that all are seen."""
    return widest - (widest - least) * i / max(1, n - 1)


def draw_accuracy(
    axes: Axes, centers: Sequence[Mapping[int, float]], overall: Sequence[float], baseline: Sequence[float]
) -> None:
    """Held-out accuracy (0..1) per round: one line per center, all devices together, and one global model."""
    steps = range(1, len(overall) + 1)
    axes.plot(steps, overall, color="#111827", lw=5, alpha=0.35, label="own center, all devices")
    axes.plot(
        range(1, len(baseline) + 1), baseline, color=GLOBAL_COLOUR, lw=2.4, ls=(0, (4, 2)), label="one global model"
    )
    shown = sorted({k for row in centers for k in row})
    for i, k in enumerate(shown):
        seen = [(t, row[k]) for t, row in enumerate(centers, 1) if k in row]
        width, size = nested(i, len(shown), 2.6, 1.2), nested(i, len(shown), 7, 3.5)
        axes.plot(*zip(*seen, strict=True), color=center_colour(k), marker="o", label=f"center {k}", lw=width, ms=size)
    axes.set(title="Accuracy on held-out samples", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    name_rounds(axes, max(len(centers), len(overall), len(baseline), 1))
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)
    axes.legend(loc="best", fontsize=SMALL_TEXT)


def draw_fleet(
    axes: Axes, points: Mapping[str, tuple[float, float]], assignment: Assignment, groups: Assignment
) -> None:
    """Devices where their first update lies (two principal components), coloured by the center they ended with.

    Dots that would cover each other are moved apart. From the ninth center on colours come again, with another edge.
    """
    ends = {d: k for d, k in assignment.items() if d in points}
    named = sorted(ends)
    nearest = least_distance(len(named))
    moved = move_apart(np.array([points[d] for d in named]).reshape(-1, 2), nearest)
    places = dict(zip(named, moved, strict=True))
    size = 70 * (nearest / NEAREST_DOTS) ** 2
    for k, group in (shown := sorted({(k, groups.get(d, 0)) for d, k in ends.items()})):
        here = np.array([places[d] for d, c in sorted(ends.items()) if (c, groups.get(d, 0)) == (k, group)])
        look: dict[str, Any] = {"color": center_colour(k), "marker": MARKERS[group % len(MARKERS)]}
        look["edgecolor"] = EDGES[k // len(COLOURS) % len(EDGES)]
        look["label"] = f"group {group} → center {k}" if groups else f"center {k}"
        axes.scatter(here[:, 0], here[:, 1], s=size, lw=1.3 if k >= len(COLOURS) else 0.8, **look)
    axes.set(title="Where each device's first update points", xlabel="first component", ylabel="second component")
    axes.set(xticks=[], yticks=[])
    axes.margins(0.15)
    beside: Any = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if len(shown) > MAX_NAMES_INSIDE else {}
    axes.legend(fontsize=SMALL_TEXT, ncols=1 + len(shown) // MAX_LEGEND_ROWS, **beside)


def least_distance(n: int) -> float:
    """How far n dots are apart at least, in parts of the picture: many have less room than few."""
    return min(NEAREST_DOTS, math.sqrt(FILLED / max(1, n)))


def move_apart(points: Array, nearest: float = NEAREST_DOTS) -> Array:
    """[n, 2] places -> places [n, 2] of which no two are nearer than `nearest` parts of the extent; far ones stay.

    Near pairs are pushed from each other until none is left, or MAX_PUSHES times. More than MAX_MOVED_DOTS points stay
    as they are. Where most points are moved, they take more room than before.
    """
    from scipy.spatial import cKDTree

    n = len(points)
    extent = np.ptp(points, axis=0) if n else np.ones(2)
    extent = np.where(extent > 0, extent, extent.max() or 1.0)
    placed = points.astype(np.float64) / extent
    if not 1 < n <= MAX_MOVED_DOTS:
        return placed * extent
    angles = np.arange(n) * 2.4  # points in one place leave it in n directions
    reach = 1e-6 * np.sqrt(np.arange(n) / n)
    apart = np.stack([np.cos(angles), np.sin(angles)], axis=1) * reach[:, None]
    for _ in range(MAX_PUSHES):
        pairs = cKDTree(placed + apart).query_pairs(nearest, output_type="ndarray")
        if not len(pairs):
            break
        one, other = pairs.T
        ways = (placed + apart)[one] - (placed + apart)[other]
        far = np.linalg.norm(ways, axis=1)
        push = ways * ((nearest * 1.01 - far) / np.maximum(far, 1e-12) / 2)[:, None]
        moves = np.zeros_like(placed)
        np.add.at(moves, one, push)
        np.add.at(moves, other, -push)
        longest = np.linalg.norm(moves, axis=1, keepdims=True)
        placed = placed + moves * np.minimum(1.0, nearest / np.maximum(longest, 1e-12))
    moved: Array = placed * extent
    return moved


def draw_assignment(axes: Axes, history: Sequence[Assignment], groups: Assignment) -> None:
    """One row per device, sorted by true group, one column per round; the cell's colour and number are its center."""
    devices = sorted({d for row in history for d in row}, key=lambda d: (groups.get(d, 0), d))
    few, rounds, last = len(devices) <= MAX_LABELLED_ROWS, len(history), len(devices) - 0.5
    cells = [(t, y, row[d]) for t, row in enumerate(history) for y, d in enumerate(devices) if d in row]
    if len(cells) > MAX_SHAPES:
        colours, (t, y, k) = np.ones((len(devices), rounds, 3)), np.transpose(cells)
        colours[y, t] = np.array([to_rgb(center_colour(center)) for center in range(max(k) + 1)])[k]
        axes.imshow(colours, aspect="auto", interpolation="nearest", extent=(0.5, rounds + 0.5, last, -0.5))
    for t, y, k in cells if len(cells) <= MAX_SHAPES else ():
        axes.add_patch(Rectangle((t + 0.53, y - 0.44), 0.94, 0.88, color=center_colour(k), lw=0))
        if few:
            axes.text(t + 1, y, str(k), color=ink_on(k), size=SMALL_TEXT, weight="bold", ha="center", va="center")
    names = [f"{d} (group {groups[d]})" if d in groups else d for d in devices] if few else []
    axes.set_yticks(range(len(names)), names, fontsize=SMALL_TEXT)
    axes.set(title="Centers, round by round", xlabel="round", xlim=(0.4, rounds + 0.6), ylim=(last + 0.1, -0.6))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_labels(
    axes: Axes, labels: Mapping[str, Sequence[int]], groups: Mapping[str, int | None], names: Sequence[str] = ()
) -> None:
    """One bar per device, sorted by true group: how many training samples of each class it holds."""
    devices = sorted(labels, key=lambda d: (groups.get(d) or 0, d))
    width = max(len(labels[d]) for d in devices)
    counts = np.array([[*labels[d], *[0] * (width - len(labels[d]))] for d in devices], dtype=np.float64)
    if width > MAX_BARS:  # as of the words of a language: neighbours are one bar
        counts, width = np.add.reduceat(counts, np.arange(MAX_BARS) * width // MAX_BARS, axis=1), MAX_BARS
    below = np.zeros(len(devices))
    edges_of_bars = np.arange(len(devices) + 1) - 0.5
    for c in range(width):  # one outline for all bars of a class: a picture of 200 devices stays small
        called = f"class {c}{f': {names[c]:.20}' if c < len(names) else ''}".replace("$", r"\$")  # no formula
        look = {"color": class_colour(c, width), "label": called if width <= MAX_NAMED_CLASSES else None}
        axes.stairs(below + counts[:, c], edges_of_bars, baseline=below.copy(), fill=True, lw=0, **look)
        below += counts[:, c]
    known = [groups.get(d) for d in devices]
    edges = [i for i in range(1, len(devices)) if known[i] != known[i - 1]]
    for edge in edges:
        axes.axvline(edge - 0.5, color="#111827", lw=0.7)
    by = ", by true group" if edges else ""
    axes.set(title="Training samples of each device", xlabel=f"device{by}", ylabel="samples", xticks=[])
    axes.set(xlim=(-0.5, len(devices) - 0.5))
    if 1 < width <= MAX_NAMED_CLASSES:  # targets have no classes
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=SMALL_TEXT)


def draw_curves(
    axes: Axes,
    curves: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    looks: Sequence[str] = (),
    shares: bool = True,
) -> None:
    """Shares (0..1) per round, one line each, in the order given; a round without a value is passed over.

    Their axis begins at 0 and ends above the highest. Without `shares` they are numbers of any size. Three of four
    lines are dashed, and later ones are thinner: those below are seen between the dashes. Where rounds are passed over,
    those that have a value are marked. `looks` names all lines of several pictures, to look the same in each.
    """
    for name, values in curves.items():
        i = list(looks or curves).index(name)
        seen = [(t, v) for t, v in enumerate(values, 1) if v is not None]
        marker = "o" if len(seen) < len(values) or len(seen) == 1 else ""
        look: dict[str, Any] = {"ls": LINES[(i + i // len(LINES) + i // len(COLOURS)) % len(LINES)], "marker": marker}
        look |= {"lw": nested(i, len(looks or curves), 3.2, 1.6), "ms": nested(i, len(looks or curves), 7, 4)}
        axes.plot([t for t, _ in seen], [v for _, v in seen], color=curve_colour(i), label=name, **look)
    axes.set_title(title)
    if shares:
        axes.set_ylim(0, min(1.02, 1.25 * max(axes.dataLim.ymax, 0) or 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    name_rounds(axes, max((len(values) for values in curves.values()), default=1))
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)
    axes.legend(loc="best", fontsize=SMALL_TEXT)


def draw_spread(axes: Axes, accuracies: Mapping[str, Sequence[float]], *, title: str) -> None:
    """A row per name: each device's accuracy (0..1) as a dot, equal ones stacked; a band has the middle 80%."""
    for row, (name, values) in enumerate(accuracies.items()):
        if not values:
            continue
        low, middle, high = np.percentile(np.asarray(values), SPREAD_PERCENTILES)
        look: dict[str, Any] = {"color": curve_colour(list(accuracies).index(name)), "lw": 0}
        axes.add_patch(Rectangle((low, row - 0.42), high - low, 0.84, alpha=0.15, **look))
        axes.plot([middle, middle], [row - 0.46, row + 0.46], color="#111827", lw=2, zorder=2)
        x, y = _stack(np.asarray(values))
        outlined = look | {"lw": 0.5, "edgecolor": "white"}  # above the median's line, which is longer than the dots
        axes.scatter(x, row + 0.3 - y * 0.6, s=22, zorder=3, **outlined)
    axes.set(title=title, xlim=(-0.02, 1.02), ylim=(len(accuracies) - 0.4, -0.6), yticks=range(len(accuracies)))
    axes.set_yticklabels(list(accuracies))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)


def _stack(values: Array) -> tuple[Array, Array]:
    """Values [n] in 0..1 -> their places x, and heights in 0..1: dots of one height are DOT_WIDTH or more apart."""
    x = np.sort(values.astype(np.float64))
    ends: list[float] = []  # of each level, its last dot
    levels = []
    for value in x.tolist():
        level = next((i for i, end in enumerate(ends) if value - end >= DOT_WIDTH), len(ends))
        ends[level : level + 1] = [value]
        levels.append(level)
    heights: Array = np.array(levels, np.float64) * min(0.2, 1 / max(1, len(ends) - 1))
    return x, heights


def name_rounds(axes: Axes, last: int) -> None:
    """The x axis of rounds 1 to `last`: whole numbers of rounds that exist, and room beside a single one."""
    room = max(0.5 if last == 1 else 0.2, 0.03 * last)
    places = MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10]).tick_values(1, last)
    axes.set(xlabel="round", xlim=(1 - room, last + room), xticks=[float(t) for t in places if 1 <= t <= last])


def draw_cosines(axes: Axes, vectors: Array, *, title: str) -> None:
    """[n, d] vectors -> the cosine of every pair, its lower triangle (WeCFL, figure 4)."""
    cos = cosines(vectors)
    shown = np.where(np.tri(len(cos), dtype=bool), cos, np.nan)
    draw_heat(axes, shown, low=min(0.0, float(cos.min())))
    if len(cos) <= MAX_NAMED_CLASSES:
        for i, j in zip(*np.tril_indices(len(cos)), strict=True):
            ink = CONSTANT_LIGHT_INK if cos[i, j] > DARK_THRESHOLD else DARK_INK
            axes.text(float(j), float(i), f"{cos[i, j]:.2f}", ha="center", va="center", fontsize=SMALL_TEXT, color=ink)
        axes.set(xticks=range(len(cos)), yticks=range(len(cos)))
    axes.set(title=title, xlabel="center", ylabel="center")
    axes.tick_params(length=0)


def draw_heat(axes: Axes, values: Array, *, low: float) -> None:
    """[rows, columns] values from `low` to 1 as squares with a scale beside them, all vectors; NaN has no square."""
    edges = [np.arange(n + 1) - 0.5 for n in (values.shape[1], values.shape[0])]
    shades = colormaps["YlGnBu"].resampled(HEAT_SHADES)
    mesh = axes.pcolormesh(*edges, values, cmap=shades, vmin=low, vmax=1.0, edgecolors="face", linewidth=LAP)
    axes.set(aspect="equal", xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
    scale = axes.figure.colorbar(mesh, ax=axes, shrink=0.8)  # with at most 50 shades matplotlib draws it as vectors
    if scale.solids is not None:
        scale.solids.set(edgecolor="face", linewidth=LAP)


def cosines(vectors: Array) -> Array:
    """[n, d] -> [n, n] in float64; a vector of zeros has cosine 0 with every other and 1 with itself."""
    x = vectors.astype(np.float64)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    unit = x / np.where(length > 0, length, 1.0)
    found: Array = np.clip(unit @ unit.T, -1.0, 1.0)
    np.fill_diagonal(found, 1.0)
    return found


def class_colour(c: int, classes: int) -> Any:  # noqa: ANN401 - matplotlib's
    """A colour of class c: told apart up to ten, a gradient beyond."""
    return colormaps["tab10"](c) if classes <= MAX_NAMED_CLASSES else colormaps["viridis"](c / (classes - 1))


def principal_plane(rows: Array) -> Array:
    """[n, d] rows -> [n, 2]: their first two principal components, from the n x n Gram matrix, so d may be large."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred @ centred.T)  # ascending
    plane = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0.0))
    plane = np.pad(plane, ((0, 0), (0, 2 - plane.shape[1])))  # a single device has one component
    tallest = plane[np.abs(plane).argmax(axis=0), [0, 1]]
    flipped: Array = plane * np.where(tallest < 0, -1.0, 1.0)  # an eigenvector's sign is free; fix it
    return flipped


def make_figure(width: float, height: float, *drawings: Callable[[Axes], object], style: Any = STYLE) -> Figure:  # noqa: ANN401 - matplotlib's
    """A figure of `width` x `height` inches with the drawings side by side; `style` are matplotlib's settings."""
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        for axes, draw in zip(figure.subplots(1, len(drawings), squeeze=False)[0], drawings, strict=True):
            draw(axes)
    return figure


def to_svg(figure: Figure) -> str:
    """The figure as an <svg> element for a page; the same numbers give the same text.

    Words stay text, and the colours of THEME are variables, so that a page can be dark.
    """
    out = io.StringIO()
    with rc_context({**STYLE, "svg.fonttype": "none"}):
        part = _laid_out(figure)
        figure.savefig(out, format="svg", bbox_inches=part, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    element = re.sub(r"#[0-9a-f]{6}", _themed, text[text.index("<svg") :])
    return re.sub(
        r'(<svg[^>]*?) (?:width|height)="[\d.]+pt"([^>]*?) (?:width|height)="[\d.]+pt"', r"\1\2", element, count=1
    )


def _laid_out(figure: Figure) -> BboxBase:
    """Settle where all parts are; -> the part that `bbox_inches="tight"` keeps, for which it would draw all twice."""
    FigureCanvasSVG(figure)
    figure.dpi = SVG_DPI
    if layout := figure.get_layout_engine():
        layout.execute(figure)
        figure.set_layout_engine(None)
    return figure.get_tightbbox().padded(rcParams["savefig.pad_inches"])


def _themed(found: re.Match[str]) -> str:
    name = THEME.get(found[0])
    return f"var(--{name})" if name else found[0]
