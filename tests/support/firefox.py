"""A Firefox without its driver: WebDriver BiDi over a WebSocket, as much of it as the tests of pages need.

Source: W3C WebDriver BiDi; Firefox speaks it at `--remote-debugging-port`.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.support.patience import patience

NAMES = ("firefox-esr", "firefox")
PATIENCE_S = patience(90.0)
MAX_ANSWER_BYTES = 64 << 20
LISTENS = re.compile(r"WebDriver BiDi listening on (ws://\S+)")


def find_firefox() -> str | None:
    """The browser on PATH, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class FirefoxPage:
    """One tab."""

    line: Connection
    context: str = ""
    asked: int = field(default=0)

    def send(self, method: str, **params: Any) -> Any:  # noqa: ANN401 - JSON
        """One command; -> its result. Raises AssertionError in the browser's words."""
        self.asked += 1
        self.line.send(json.dumps({"id": self.asked, "method": method, "params": params}))
        while (answer := json.loads(self.line.recv(PATIENCE_S))).get("id") != self.asked:
            pass
        assert answer["type"] == "success", answer
        return answer["result"]

    def goto(self, url: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.send("browsingContext.navigate", context=self.context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """What an expression gives, as JSON; a promise is awaited."""
        wrapped = f"(async () => JSON.stringify(await ({expression})) ?? 'null')()"
        target = {"context": self.context}
        said = self.send("script.evaluate", expression=wrapped, target=target, awaitPromise=True)
        assert said["type"] == "success", said
        return json.loads(said["result"]["value"])

    def wait_for(self, expression: str, *, patience_s: float = PATIENCE_S) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + patience_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.1)

    def give_file(self, selector: str, path: Path) -> None:
        """Choose a file in an input."""
        target = {"context": self.context}
        query = f"document.querySelector({json.dumps(selector)})"
        said = self.send("script.evaluate", expression=query, target=target, awaitPromise=False)
        element = {"sharedId": said["result"]["sharedId"]}
        self.send("input.setFiles", context=self.context, element=element, files=[str(path)])

    def shot(self, path: Path) -> None:
        """A picture of the whole page."""
        said = self.send("browsingContext.captureScreenshot", context=self.context, origin="document")
        path.write_bytes(base64.b64decode(said["data"]))


@contextmanager
def firefox(folder: Path, *, size: tuple[int, int]) -> Iterator[FirefoxPage]:
    """A browser with a profile of its own in `folder`, and its only tab."""
    program = find_firefox()
    assert program is not None
    profile, log = folder / "firefox", folder / "firefox.log"
    profile.mkdir()
    command = [program, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "about:blank"], stdout=file, stderr=file)
    try:
        with connect(_address(log, process) + "/session", max_size=MAX_ANSWER_BYTES) as line:
            page = FirefoxPage(line)
            page.send("session.new", capabilities={})
            page.context = page.send("browsingContext.getTree")["contexts"][0]["context"]
            viewport = {"width": size[0], "height": size[1]}
            page.send("browsingContext.setViewport", context=page.context, viewport=viewport)
            yield page
            page.send("browser.close")
            process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (said := LISTENS.search(log.read_text(errors="replace"))) is None:
        assert process.poll() is None, f"firefox has ended: {log}"
        assert time.monotonic() < deadline, f"firefox does not answer: {log}"
        time.sleep(0.1)
    return said[1]
