"""The frame of the reports' pages: one HTML document without scripts and without requests, light and dark.

The variables have the names that plots.to_svg gives to the figures' colours.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

MIN_TEXT_PX = 10  # of the words of a figure, on any screen
PHONE_PX = 348  # the width of a figure on a phone of 390 pixels
CSS = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
--page: #f6f7f9; --card: #ffffff; --ink: #111827; --quiet: #4b5563; --axis: #9ca3af; --line: #e5e7eb; --soft: #f0f2f5;
--all: #6b7280; --good: #0b62a8; --warn: #7a4a00; --warn-soft: #fdf1dc; --on-dark: #ffffff;
--c0: #0072b2; --c1: #e69f00; --c2: #009e73; --c3: #cc79a7; --c4: #d55e00; --c5: #56b4e9; --c6: #b8a800; --c7: #000000 }
@media (prefers-color-scheme: dark) { :root {
--page: #0f141a; --card: #171e26; --ink: #e7ecf2; --quiet: #a4b0bd; --axis: #66727f; --line: #2a343f; --soft: #202933;
--all: #a4b0bd; --good: #6cb6ff; --warn: #f4c16b; --warn-soft: #33280f; --on-dark: #08131f;
--c0: #4ba3e3; --c1: #f0b429; --c2: #2cc295; --c3: #e39ac6; --c4: #ff8748; --c5: #8ed1fb; --c6: #e9dc4b; --c7: #d4dae1
} }
* { box-sizing: border-box }
body { max-width: 76rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .8rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
.verdict { border-left: .35rem solid var(--good); background: var(--card); padding: .8rem 1.1rem; margin: 0 0 1rem;
border-radius: .3rem .6rem .6rem .3rem } .verdict b { display: block; font-size: 1.25rem; line-height: 1.35 }
.verdict span { color: var(--quiet) } .verdict.warning { border-color: var(--warn); background: var(--warn-soft) }
.warning b { color: var(--warn) } .quiet, figcaption { color: var(--quiet); font-size: .88rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10.5rem), 1fr)); gap: .7rem }
.tile, figure { background: var(--card); border: 1px solid var(--line); border-radius: .6rem }
.tile { padding: .6rem .9rem } .tile b { display: block; font-size: 1.35rem; line-height: 1.3 }
.tile span { color: var(--quiet); font-size: .85rem }
figure { margin: 1rem 0 0; padding: .9rem; overflow-x: auto }
figure svg { width: 100%; max-width: 44rem; height: auto; display: block; margin: 0 auto }
figure.wide svg { max-width: none }
figure svg text { fill: var(--ink); font-family: system-ui, sans-serif !important }
figcaption { margin-top: .5rem }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 1rem }
.pair.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
.pair > * { min-width: 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; background: var(--card); font-size: .9rem; width: 100%; overflow-wrap: normal }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left } th { background: var(--soft) }
td { font-variant-numeric: tabular-nums; white-space: nowrap }
details { margin-top: 1rem } summary { cursor: pointer; font-weight: 600; padding: .3rem 0 }
:focus-visible { outline: 3px solid var(--good); outline-offset: 2px }
code, pre { font: .85rem/1.5 ui-monospace, monospace } pre { background: var(--soft); padding: .9rem;
border-radius: .6rem; white-space: pre-wrap; overflow-wrap: anywhere }
@media (max-width: 34rem) { body { padding: 1.1rem .75rem 2rem } h1 { font-size: 1.35rem } .tiles {
grid-template-columns: 1fr 1fr } figure { padding: .5rem } table { font-size: .8rem }
th, td { padding: .25rem .35rem } td { white-space: normal } }
"""


def html_page(title: str, body: str) -> str:
    """The whole document about `title`; `body` is HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>fedcenters: {html_text(title)}</title><style>{CSS}</style></head><body>
<h1>{html_text(title)}</h1>
{body}
</body></html>
"""


def html_verdict(first: str, then: str, *, warning: bool = False) -> str:
    """The result in one sentence, and what to know about it in a second."""
    kind = "verdict warning" if warning else "verdict"
    return f'<p class="{kind}"><b>{html_text(first)}</b><span>{html_text(then)}</span></p>'


def html_figure(svg: str, caption: str = "", *, wide: bool = False) -> str:
    """An SVG element with its caption. It scrolls in its frame where its words would be smaller than MIN_TEXT_PX.

    A `wide` one takes the page's whole width.
    """
    told = f"<figcaption>{html_text(caption)}</figcaption>" if caption else ""
    least = least_width(svg)
    sized = svg.replace("<svg", f'<svg style="min-width: {least}px"', 1)
    kind = ("class=wide " if wide else "") + ("tabindex=0" if least > PHONE_PX else "")
    return f"<figure {kind.strip()}>{sized}{told}</figure>".replace("<figure >", "<figure>")


def least_width(svg: str) -> int:
    """The width in CSS pixels at which the smallest words of a figure have MIN_TEXT_PX; 0 for one without words."""
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )*([\d.]+)px", svg)]
    box = re.search(r'viewBox="0 0 ([\d.]+) ', svg)
    return ceil(MIN_TEXT_PX / min(sizes) * float(box[1])) if sizes and box else 0


def html_tile(value: str, label: str) -> str:
    """A figure in large type over its name."""
    return f'<div class="tile"><b>{html_text(value)}</b><span>{html_text(label)}</span></div>'


def html_details(summary: str, body: str) -> str:
    """A folded part of the page."""
    return f"<details><summary>{html_text(summary)}</summary>{body}</details>"


def html_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table of texts; it scrolls in its frame where it is wider than the page."""
    top = "".join(f"<th>{html_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def html_text(value: object) -> str:
    """The text, escaped for HTML."""
    return html.escape(str(value))


def format_share(value: float | None) -> str:
    """0.5 -> 50.0%; "" for None."""
    return "" if value is None else f"{value:.1%}"
