"""What a phone downloads at its first opening of the page and at the next, by file; bodies as they are sent.

    python -m tests.benches.phone_download

A Chromium with an empty cache opens the page of a coordinator whose model is known, until its service worker has kept
all files. Then it opens the page again.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.browser import FLAGS, find_chromium
from tests.support.phone_federation import known_model
from tests.support.phone_page import PATIENCE_MS, served

OPENED = "#entry:not([hidden])"
KEPT = "navigator.serviceWorker.ready.then(() => true)"
LARGE_BYTES = 50_000  # a file from here on has a row of its own


@dataclass
class SentBodies:
    """Bytes and answers of each path."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Count what `app` sends."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            name = str(scope["path"]).rpartition("/")[2] or "index.html"

            async def counted(message: Message) -> None:
                if message["type"] == "http.response.body":
                    self.sent[name] += len(message.get("body", b""))
                else:
                    self.answers[name] += 1
                await send(message)

            await app(scope, receive, counted)

        return answer

    def table(self) -> str:
        """A Markdown table: large files by name, the others together."""
        large = {name: size for name, size in self.sent.most_common() if size >= LARGE_BYTES}
        rows = [f"| {name} | {self.answers[name]} | {size:,} |" for name, size in large.items()]
        rest = [name for name in self.answers if name not in large]
        rows.append(f"| others | {sum(self.answers[name] for name in rest)} | {sum(self.sent[n] for n in rest):,} |")
        rows.append(f"| all | {self.answers.total()} | {self.sent.total():,} |")
        return "\n".join(["| file | answers | bytes |", "|---|--:|--:|", *rows])


def main() -> None:
    """Open the page twice, and print a table of each."""
    from playwright.sync_api import sync_playwright

    bodies = SentBodies()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(known_model(Path(folder)), around=bodies.around) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=list(FLAGS))
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        for opening in ("first", "next"):
            page.goto(url)
            page.wait_for_selector(OPENED)
            page.evaluate(KEPT)
            page.goto("about:blank")
            sys.stdout.write(f"{opening} opening\n\n{bodies.table()}\n\n")
            bodies.sent.clear()
            bodies.answers.clear()
        browser.close()


if __name__ == "__main__":
    main()
