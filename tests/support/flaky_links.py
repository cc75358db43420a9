"""A way to the broker for each device that is cut off at random: half of the cuts are resets, half are silence.

One thread and one asyncio loop for all devices. While a device is cut off, its new connections are reset at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

CHUNK_BYTES = 65_536
MEAN_CUT_S = 60.0


@dataclass
class Link:
    """One device's way. `up` is unset while it is cut off."""

    up: asyncio.Event = field(default_factory=asyncio.Event)
    silent: bool = False  # how it is cut off: without a reset
    writers: set[asyncio.StreamWriter] = field(default_factory=set)


class FlakyLinks:
    """`urls[i]` is the way of device i. From `begin` on, each is down for `share` of the time."""

    def __init__(self, port: int, count: int, *, share: float, seed: int) -> None:
        self.urls: list[str] = []
        self.cuts = 0
        self._port, self._count, self._share = port, count, share
        self._rng = random.Random(seed)  # noqa: S311 - when links break
        self._links: list[Link] = []
        self._loop = asyncio.new_event_loop()
        self._ready, self._begun, self._over = threading.Event(), asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._live()), daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def down(self) -> int:
        """How many are cut off now."""
        return sum(not link.up.is_set() for link in self._links)

    def begin(self) -> None:
        """Start to cut."""
        self._loop.call_soon_threadsafe(self._begun.set)

    def close(self) -> None:
        """End every connection."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _live(self) -> None:
        servers = []
        for _ in range(self._count):
            link = Link()
            link.up.set()
            self._links.append(link)
            server = await asyncio.start_server(partial(self._carry, link), "127.0.0.1", 0)
            servers.append(server)
            self.urls.append(f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        self._ready.set()
        tasks = [asyncio.create_task(self._cut(link)) for link in self._links]
        await self._over.wait()
        for server in servers:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut(self, link: Link) -> None:
        """Up and down in turns, both with exponentially distributed times."""
        await self._begun.wait()
        mean_up_s = MEAN_CUT_S * (1 - self._share) / self._share
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / mean_up_s))
            link.silent = self._rng.random() < 0.5
            link.up.clear()
            self.cuts += 1
            if not link.silent:
                for writer in link.writers:
                    writer.transport.abort()
            await asyncio.sleep(self._rng.expovariate(1 / MEAN_CUT_S))
            link.up.set()

    async def _carry(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not link.up.is_set():
            writer.transport.abort()
            return
        with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled at the end, when nothing awaits it
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            link.writers |= {writer, back}
            try:
                ways = [asyncio.create_task(_pass_on(link, *way)) for way in ((reader, back), (there, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
            finally:
                link.writers -= {writer, back}
                back.transport.abort()
        writer.transport.abort()


async def _pass_on(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        await link.up.wait()
        writer.write(data)
        await writer.drain()


@contextlib.contextmanager
def flaky_links(port: int, count: int, *, share: float, seed: int = 0) -> Iterator[FlakyLinks]:
    """So many ways to the broker at `port`."""
    made = FlakyLinks(port, count, share=share, seed=seed)
    try:
        yield made
    finally:
        made.close()
