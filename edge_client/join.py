"""`fedcenters-edge join`: train with the federation until stopped; stdout carries data, stderr talk."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue

from edge_client.config import ClientConfig
from edge_client.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, FedcentersError, NetworkError
from edge_client.malloc import give_back_large_blocks, share_one_heap
from edge_client.printable import put_on_stderr, write_line
from edge_client.runtime import enrolment
from edge_client.runtime.client import Client
from edge_client.runtime.factory import make_client
from edge_client.runtime.progress import Event, Tell, format_device_event
from edge_client.transport.clock import Clock, SystemClock
from edge_client.transport.folder_lock import lock_state
from edge_client.update.self_update import TRIAL_PATIENCE_S, SelfUpdater

log = logging.getLogger(__name__)
STOP_TIMEOUT_S = 2.0  # for a task under way, after a signal to stop
POLL_S = 0.5
TRIAL_RETRY_S = 5.0


def join(options: argparse.Namespace) -> int:
    """Run the clients of these configurations in this process."""
    give_back_large_blocks()
    share_one_heap()
    tell = log.info if options.quiet else write_line
    configs = [enrolment.load_enrolled(path, tell=tell) for path in options.config]

    def made(config: ClientConfig) -> Client:
        with _told_of(config, several=len(configs) > 1):
            tell = reporter(config.device_id, quiet=options.quiet, as_json=options.json)
            return make_client(config, insecure=options.insecure, tell=tell)

    with ExitStack() as locks:
        for config in configs:
            locks.enter_context(lock_state(config.state))
        return start_patiently(
            lambda: run_clients([made(config) for config in configs], quiet=options.quiet),
            SelfUpdater.from_environment(os.environ),
            SystemClock(),
        )


def start_patiently(
    start: Callable[[], int], updates: SelfUpdater, clock: Clock, *, wait: Callable[[float], object] = time.sleep
) -> int:
    """Run clients. A release on trial tries again for a while where a broker, a clock or a disk is not there yet.

    It has few starts: a broker that was away for a minute would end the trial of a release that works.
    """
    until_s = clock.now_s() + TRIAL_PATIENCE_S
    while True:
        try:
            return start()
        except (NetworkError, ConfigError) as wrong:
            if clock.now_s() >= until_s or not updates.on_trial:
                raise
            log.warning("%s; this release is on trial and tries again", wrong.message)
        wait(TRIAL_RETRY_S)


def reporter(device_id: str, *, quiet: bool = False, as_json: bool = False) -> Tell:
    """What prints a device's events: a line of text each on stderr, or with `as_json` an object each on stdout."""

    def tell(event: Event) -> None:
        if as_json:
            print(json.dumps({"device": device_id, **event}), flush=True)
        elif not quiet and (text := format_device_event(event)):
            put_on_stderr(f"{device_id}: {text}\n")

    return tell


def run_clients(clients: Sequence[Client], *, quiet: bool = False) -> int:
    """Run clients, one thread each, until SIGTERM, Ctrl-C, or the first of them fails; -> the exit code."""
    failures: list[BaseException] = []
    over = SimpleQueue[int]()  # a signal, or 0; Event.set waits for a lock that the interrupted thread may hold

    def run(client: Client) -> None:
        try:
            with _told_of(client.config, several=len(clients) > 1):
                client.run()
        except Exception as wrong:  # noqa: BLE001 - raised again in the main thread
            failures.append(wrong)
        finally:
            over.put(0)

    before = {number: signal.signal(number, lambda n, _: over.put(n)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
        for client, thread in zip(clients, threads, strict=True):
            if not quiet:
                where = f"{client.config.federation} at {client.config.broker}"
                write_line(f"{client.config.device_id}: joining {where}")
            thread.start()
        while over.empty():  # a signal whose handler another thread took does not wake this one
            threads[0].join(POLL_S)
        came = over.get()
        _stop(clients, threads)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]
    return EXIT_INTERRUPTED if came == signal.SIGINT else EXIT_OK


@contextmanager
def _told_of(config: ClientConfig, *, several: bool) -> Iterator[None]:
    """An error that is raised within begins with the device's name, where this process has several."""
    try:
        yield
    except FedcentersError as wrong:
        if several:
            wrong.say_of(config.device_id)
        raise


def _stop(clients: Sequence[Client], threads: Sequence[threading.Thread]) -> None:
    """Wait for the tasks under way, at most STOP_TIMEOUT_S; a longer one is killed and loses nothing on disk."""
    for client in clients:
        client.stop()
    until = time.monotonic() + STOP_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
