"""amqtt as a broker inside this process, where no mosquitto is installed; and what amqtt 0.12 needs for that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edge_client.errors import NetworkError, RuntimeMissing, install_hint

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # of a machine that is busy; one that has ended is seen at once
SHUTDOWN_TIMEOUT_S = 1.0
CLOSING_LOOP_PASSES = 4  # passes of its loop before it is closed


class SnapshotDict(dict[Any, Any]):
    """A dictionary that may change while a loop goes over it: the loop sees it as it was at its beginning.

    amqtt 0.12 waits for messages to be sent inside its loops over all subscriptions. Where another client subscribed
    meanwhile, Python ended the loop with an error: the broker then acknowledged what a device sent, and gave it to no
    one, for as long as the device was connected.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__()))

    def items(self) -> Any:  # noqa: ANN401 - pairs, in a list
        return list(super().items())


def start_amqtt(port: int) -> Callable[[], None]:
    """Serve MQTT at a loopback port, from a thread of this process; what is returned ends the broker. Idempotent.

    Raises RuntimeMissing without amqtt, NetworkError if it cannot listen.
    """
    try:
        from amqtt.broker import Broker as AmqttBroker
    except ImportError as missing:
        raise RuntimeMissing(
            "neither mosquitto nor amqtt is installed",
            hint=f"{install_hint('server')}, or apt install mosquitto",
        ) from missing
    # amqtt logs every lost client as an error, which the client reports better itself.
    for name in ("amqtt", "transitions"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = {
        "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}},
        # No persistence plugin: it decodes retained payloads as text.
        "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    }
    started: list[BaseException | None] = []
    ready, loop, leave = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        broker = _mended(AmqttBroker(config, loop=loop))
        await broker.start()
        started.append(None)
        ready.set()
        await leave.wait()
        await _shut_down(broker)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(_log_exception)
        try:
            loop.run_until_complete(serve())
        except BaseException as wrong:  # noqa: BLE001 - handed to the thread that waits
            started.append(wrong)
        finally:
            _close_loop(loop)
            ready.set()

    thread = threading.Thread(target=run, name="amqtt", daemon=True)
    thread.start()
    ready.wait(START_TIMEOUT_S)

    def stop() -> None:
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop closed on its own
                loop.call_soon_threadsafe(leave.set)
            thread.join(START_TIMEOUT_S)

    if not started or started[0] is not None:
        stop()
        raise NetworkError(
            f"the embedded broker cannot listen on port {port}: {started[0] if started else 'it does not answer'}",
            hint="install mosquitto (apt install mosquitto), or pass the URL of a broker",
        ) from (started[0] if started else None)
    return stop


def _mended(broker: Any) -> Any:  # noqa: ANN401 - amqtt's, which may be missing
    """The broker with what amqtt 0.12 lacks."""
    broker._subscriptions = SnapshotDict()  # noqa: SLF001 - no public name
    connected = broker.stream_connected

    async def close_after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str) -> None:
        try:
            await connected(reader, writer, listener_name)
        finally:  # it leaves a connection that ends without CONNECT to the garbage collector
            writer.close()

    broker.stream_connected = close_after
    return broker


async def _shut_down(broker: Any) -> None:  # noqa: ANN401 - amqtt's, which may be missing
    """End amqtt's broker within `SHUTDOWN_TIMEOUT_S`: it waits for its clients, and keeps nothing."""
    try:
        await asyncio.wait_for(broker.shutdown(), SHUTDOWN_TIMEOUT_S)
    except asyncio.TimeoutError:
        for server in broker._servers.values():  # noqa: SLF001 - no public name; its listeners are still open
            server.instance.close()


def _log_exception(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log a connection that amqtt dropped, as it does when many clients connect at once; the client retries."""
    log.debug("the embedded broker: %s", context.get("exception") or context["message"])


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close the connections and tasks that amqtt leaves open, so that no warning follows.

    Several passes: a cancelled task may close its connection, which the loop releases one pass later.
    """
    for _ in range(CLOSING_LOOP_PASSES):
        for transport in list(getattr(loop, "_transports", {}).values()):  # asyncio offers no public list of them
            transport.abort()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        with contextlib.suppress(Exception):
            loop.run_until_complete(asyncio.gather(*left, asyncio.sleep(0), return_exceptions=True))
    with contextlib.suppress(Exception):
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
