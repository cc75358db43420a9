"""The links that open the phone's page, as text and as QR codes. Pure."""

from __future__ import annotations

import io
from urllib.parse import quote

PHONE_PATH = "/phone"
PHONE_FACTS = f"{PHONE_PATH}/join.json"  # reads the database at each request
LINK_TITLE = "Open on a phone"


def qr_terminal(url: str) -> str:
    """A link as a QR code of half blocks, for a terminal."""
    import segno

    text = io.StringIO()
    segno.make(url, error="m", micro=False).terminal(text, compact=True)
    return text.getvalue()


def qr_svg(url: str) -> str:
    """A link as a QR code in SVG with a quiet zone; dark on light in any theme, which scanners need."""
    import segno

    out = io.BytesIO()
    code = segno.make(url, error="m", micro=False)
    code.save(
        out, kind="svg", scale=4, border=4, dark="#000", light="#fff", omitsize=True, xmldecl=False, title=LINK_TITLE
    )
    return out.getvalue().decode("ascii")


def phone_link(base: str, *, device: str = "", secret: str = "") -> str:
    """The page's address below `base`; for a named device with its name and secret after the '#'."""
    page = f"{base.rstrip('/')}{PHONE_PATH}/"
    return f"{page}#id={quote(device)}&secret={quote(secret)}" if device else page
