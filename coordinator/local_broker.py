"""A broker for one machine: the installed `mosquitto`, or amqtt embedded in this process. Loopback only, no accounts.

`start_broker` returns once clients can connect; `Broker.stop` ends the process and removes its files. A fleet on
several machines needs a broker with certificates (PROTOCOL.md, access), whose URL is passed instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from edge_client.errors import NetworkError, RuntimeMissing, UsageError

BROKER_KINDS = ("auto", "mosquitto", "embedded")
DEFAULT_PORT = 1883
EMBEDDED_MAX_DEVICES = 200  # amqtt takes 55 KB and milliseconds for each; a fleet of 5,000 connects in 23 s
START_TIMEOUT_S = 60.0  # of a machine that is busy; one that has ended is seen at once
CONNECT_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
PORT_ATTEMPTS = 3
# A shell beside the program ends both when nothing holds the other end of its input any more: the process that
# started them has ended, or has been killed.
UNTIL_WE_END = 'exec 3<&0; (read _ <&3; kill 0) & exec "$@" 3<&- </dev/null'
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")  # not on the PATH of every user
MOSQUITTO_CONF = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
set_tcp_nodelay true
max_inflight_messages 64
max_queued_messages 100000
max_packet_size 1114112
memory_limit 1073741824
log_dest stdout
log_type error
log_type warning
"""


@dataclass(frozen=True, kw_only=True)
class Broker:
    """A running broker: `url` is what clients connect to, `kind` is "mosquitto", "embedded" or "external"."""

    url: str
    kind: str
    pid: int | None = None  # of the broker's process; None for an embedded or an external broker
    web: Sequence[str] = ()  # ws://... for browsers
    has_ended: Callable[[], bool] = field(default=lambda: False, repr=False)  # by itself; known of its process alone
    _stop: Callable[[], None] = field(default=lambda: None, repr=False)

    def stop(self) -> None:
        """End the broker and remove its files. Idempotent; an external broker keeps running."""
        self._stop()

    def __enter__(self) -> Broker:  # noqa: PYI034 - typing.Self needs 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_mosquitto() -> str | None:
    """The path of the `mosquitto` program, which may be in a folder that only root's PATH has; or None."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=os.pathsep.join(SYSTEM_FOLDERS))


def free_port() -> int:
    """A TCP port on loopback that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port_free(port: int) -> None:
    """Raise NetworkError when something on this machine listens on `port` already."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as wrong:
        raise NetworkError(
            f"port {port} cannot be used: {wrong.strerror or wrong}",
            hint="choose another port, or end the program that listens there",
        ) from wrong


def local_broker(broker: str) -> tuple[str, int] | None:
    """(kind, port) of a broker that `serve` must start: "embedded" or "mosquitto", ":PORT" or 1883; None for a URL.

    Raises UsageError for anything else.
    """
    if "://" in broker:
        return None
    kind, colon, port = broker.partition(":")
    if kind not in BROKER_KINDS[1:] or (colon and not (port.isdecimal() and 0 < int(port) < 2**16)):
        raise UsageError(
            f"unknown broker {broker!r}", hint="use embedded, mosquitto, embedded:PORT, or a URL like mqtts://host:8883"
        )
    return kind, int(port or DEFAULT_PORT)


def broker_url(broker: str) -> str:
    """The URL of the broker that `local_broker` describes; a URL is returned as it is."""
    own = local_broker(broker)
    return broker if own is None else f"mqtt://127.0.0.1:{own[1]}"


def embedded_broker_warning(devices: int) -> str:
    """A warning for a fleet that is too large for the embedded broker; else an empty text."""
    if devices <= EMBEDDED_MAX_DEVICES:
        return ""
    return (
        f"fleet of {devices}: the embedded broker is meant for about {EMBEDDED_MAX_DEVICES} devices; "
        "install mosquitto (apt install mosquitto), or pass --broker mqtts://host"
    )


def start_broker(
    folder: Path, prefer: str = "auto", *, port: int | None = None, web_ports: Collection[int] = ()
) -> Broker:
    """Start a broker, or check the one at a URL.

    `prefer` is "auto" (mosquitto when it is installed and works, else embedded), "mosquitto", "embedded", or the URL of
    a broker that runs already. `folder` receives the generated configuration; without `port` a free one is taken. At
    `web_ports` pages of this machine reach it, over WebSockets.
    Raises NetworkError for a port in use or an unreachable URL, RuntimeMissing for an absent or broken broker.
    """
    if "://" in prefer:
        return _external(prefer)
    if prefer not in BROKER_KINDS:
        raise UsageError(
            f"unknown broker {prefer!r}", hint=f"use one of {', '.join(BROKER_KINDS)}, or a URL like mqtt://host:1883"
        )
    for each in web_ports:
        check_port_free(each)
    broker = _start(folder, prefer, port)
    for each in web_ports:
        broker = _with_browsers(broker, each)
    return broker


def _start(folder: Path, prefer: str, port: int | None) -> Broker:
    program = None if prefer == "embedded" else find_mosquitto()
    if prefer == "mosquitto" and program is None:
        raise RuntimeMissing("mosquitto is not installed", hint="apt install mosquitto, or use --broker embedded")
    if program is not None:
        try:
            return _on_a_port(partial(_start_mosquitto, program, folder), port)
        except RuntimeMissing:
            if prefer == "mosquitto":
                raise
    return _on_a_port(_start_embedded, port)


def _with_browsers(broker: Broker, web_port: int) -> Broker:
    """The broker with one more listener for the pages of this machine."""
    from coordinator.browser_listener import listen_for_browsers  # its library takes 0.1 s to import

    try:
        end = listen_for_browsers(web_port, int(broker.url.rpartition(":")[2]))
    except OSError as wrong:
        broker.stop()
        what = f"port {web_port} cannot be used: {wrong.strerror or wrong}"
        raise NetworkError(what, hint="choose another web-port") from wrong

    def stop() -> None:
        end()
        broker.stop()

    return replace(broker, web=(*broker.web, f"ws://127.0.0.1:{web_port}"), _stop=stop)


def _external(url: str) -> Broker:
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port or (8883 if parts.scheme == "mqtts" else 1883)
    except ValueError:
        scheme, host, port = "", None, 0
    if scheme not in ("mqtt", "mqtts") or not host:
        raise UsageError(f"{url!r} is no broker URL", hint="write it as mqtt://host:1883 or mqtts://host:8883")
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as wrong:
        raise NetworkError(
            f"no broker answers at {url}: {wrong.strerror or wrong}",
            hint="start it, or leave --broker out: a broker on this machine is then started",
        ) from wrong
    return Broker(url=url, kind="external")


def _on_a_port(start: Callable[[int], Broker], port: int | None) -> Broker:
    """Start at the port, or at a free one: what was found free can be taken before the broker binds it."""
    if port is not None:
        return start(port)
    for _ in range(PORT_ATTEMPTS - 1):
        with contextlib.suppress(NetworkError):
            return start(free_port())
    return start(free_port())


def _start_mosquitto(program: str, folder: Path, port: int) -> Broker:
    conf, log = folder / f"mosquitto-{port}.conf", folder / f"mosquitto-{port}.log"
    check_port_free(port)
    folder.mkdir(parents=True, exist_ok=True)
    conf.write_text(MOSQUITTO_CONF.format(port=port))
    with log.open("wb") as out:
        process = start_until_we_end([program, "-c", str(conf)], out)

    def stop() -> None:
        terminate_process(process, timeout_s=STOP_TIMEOUT_S)
        conf.unlink(missing_ok=True)
        log.unlink(missing_ok=True)

    try:
        _wait_for(port, lambda: process.poll() is None, lambda: log.read_text(errors="replace"), program)
    except BaseException:
        stop()
        raise
    url = f"mqtt://127.0.0.1:{port}"
    ended = partial(_has_ended, process)
    return Broker(url=url, kind="mosquitto", pid=process.pid, has_ended=ended, _stop=stop)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def _wait_for(port: int, alive: Callable[[], bool], log: Callable[[], str], program: str) -> None:
    """Return once the started broker listens on `port`. Raises RuntimeMissing."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        # `alive` after connecting: if the broker has died, another program has answered.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            if alive() and "in use" not in log():
                return
        if not alive() or "in use" in log():
            break
        time.sleep(0.02)
    if "in use" in log():  # taken since check_port_free
        check_port_free(port)
    raise RuntimeMissing(
        f"{program} does not start: {log().strip()[-500:] or 'it says nothing'}", hint="use --broker embedded"
    )


def _start_embedded(port: int) -> Broker:
    from coordinator.embedded_broker import start_amqtt

    check_port_free(port)
    return Broker(url=f"mqtt://127.0.0.1:{port}", kind="embedded", _stop=start_amqtt(port))


def start_until_we_end(command: Sequence[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process, however that ends.

    Its own session: a Ctrl-C in the terminal does not reach a broker, which has to outlive the clients.
    """
    shell = ["sh", "-c", UNTIL_WE_END, "sh", *command]
    return subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)


def terminate_process(process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Send SIGTERM, and after `timeout_s` SIGKILL to the process's session; return when the process has ended."""
    if process.poll() is None:
        process.terminate()
    wait_or_kill(process, timeout_s=timeout_s)


def wait_or_kill(process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Wait for a process that was asked to leave; after `timeout_s` send SIGKILL to its session."""
    if process.stdin is not None:
        process.stdin.close()  # the shell beside it ends
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
