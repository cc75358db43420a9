"""The links that phones open, as text and as QR codes. Pure."""

from __future__ import annotations

import io
from urllib.parse import quote

PHONE_PATH = "/phone"
LINK_TITLE = "Open on a phone"


def qr_terminal(url: str) -> str:
    """A link as a QR code of half blocks, for a terminal."""
    import segno

    text = io.StringIO()
    segno.make(url, error="m", micro=False).terminal(text, compact=True)
    return text.getvalue()


def qr_svg(url: str) -> str:
    """A link as a QR code, an SVG of its own with a quiet zone; dark on light in any theme, as scanners want it."""
    import segno

    out = io.BytesIO()
    code = segno.make(url, error="m", micro=False)
    code.save(
        out, kind="svg", scale=4, border=4, dark="#000", light="#fff", omitsize=True, xmldecl=False, title=LINK_TITLE
    )
    return out.getvalue().decode("ascii")


def phone_link(base: str, *, device: str = "", secret: str = "") -> str:
    """The address that a phone opens at `base`; with a device of its own its name and secret, behind the '#'."""
    page = f"{base.rstrip('/')}{PHONE_PATH}/"
    return f"{page}#id={quote(device)}&secret={quote(secret)}" if device else page
