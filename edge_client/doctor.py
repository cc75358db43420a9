"""`fedcenters-edge doctor`: is this device fit to take part? One line per check: ok or FAIL, what was seen, what to do.

Every installed runtime makes the golden run of a tiny program of ours (edge_client/probe), and is compared with torch:
an import alone proves nothing. The broker is always connected to, and its certificate checked. There is no login with
MQTT while a client of this device runs, because a broker that names connections after certificates would end the
client's; nor before a token is used. The check then says so. Nothing is changed but one small file in the state folder,
which is removed, and the folder's lock; the broker is sent an empty block of no upload, which the coordinator drops.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_client.config import ClientConfig, load_config
from edge_client.data.dataset import load_folder as load_data
from edge_client.engines.base import open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.engines.runtime_versions import runtime_version
from edge_client.errors import (
    EXIT_OK,
    TOO_LITTLE_MEMORY,
    ConfigError,
    DeviceRefused,
    FedcentersError,
    RuntimeMissing,
    raise_for_memory,
)
from edge_client.printable import printable_line
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from edge_client.protocol.secure import keys
from edge_client.protocol.secure.masks import stream_bytes
from edge_client.protocol.topics import Topics
from edge_client.runtime import train_conditions
from edge_client.runtime.enrolment import has_token
from edge_client.transport import tls
from edge_client.transport.blobs import write_atomically
from edge_client.transport.broker_greeting import greet, is_broker, why_refused
from edge_client.transport.folder_lock import lock_folder

EXIT_CHECK_FAILED = 1
PROBE_FOLDER = Path(__file__).parent / "probe"
STEP_FILES = {"onnx": "step.onnx", "litert": "step.tflite"}
MIN_GLIBC = (2, 27)  # what the wheels of the runtimes ask for
CHECK_TIMEOUT_S = 15.0
MIN_DISK_MIB = 256
SEAL_KEY = "c09d22ec0da1f412fa12231f706267e81f8afb2d616b5f45d12dfcd2b54fe87f"  # of the root 0 ... 31: PROTOCOL.md, 21
MASK_START = "c6a13b37878f5b826f4f8162a1c8d879"  # of the stream of the key 0 ... 15
MASK_MIB = 4  # a million parameters in words of 32 bits
EARLIEST_CLOCK = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)  # a clock before this software is wrong


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check: its name, whether it passed, what was seen, and what to do if it failed."""

    name: str
    ok: bool
    said: str
    hint: str = ""

    def line(self) -> str:
        told = f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {self.said}"
        return printable_line(told if self.ok or not self.hint else f"{told}; {self.hint}")


class CheckFailed(Exception):
    """A check found something; `hint` says what to do."""

    def __init__(self, said: str, hint: str) -> None:
        super().__init__(said)
        self.hint = hint


def run_doctor(options: argparse.Namespace) -> int:
    """The command: print, and give the exit code."""
    config = load_config(options.config, os.environ)
    found = []
    for check in run_checks(config):
        found.append(check)
        if not options.json:
            print(check.line(), flush=True)
    if options.json:
        print(json.dumps({"fit": all(c.ok for c in found), "checks": [asdict(c) for c in found]}))
    return EXIT_OK if all(check.ok for check in found) else EXIT_CHECK_FAILED


def run_checks(config: ClientConfig) -> Iterator[CheckResult]:
    """Run every check, one after another; a failed one ends no other."""
    looks: dict[str, Callable[[ClientConfig], str]] = {
        "python": _python,
        "glibc": _glibc,
        "runtime": _runtime,
        "masked sums": _masked_sums,
        "data": _data,
        "broker": _broker,
        "certificate": _certificate,
        "clock": _clock,
        "disk": _disk,
        "memory": _memory,
        "power": _power,
        "phone": _phone,
        "temperature": _temperature,
        "training now": _allowed,
    }
    for name, look in looks.items():
        yield _checked(name, look, config)


def _checked(name: str, look: Callable[[ClientConfig], str], config: ClientConfig) -> CheckResult:
    try:
        return CheckResult(name=name, ok=True, said=look(config))
    except CheckFailed as wrong:
        return CheckResult(name=name, ok=False, said=str(wrong), hint=wrong.hint)
    except FedcentersError as wrong:
        return CheckResult(name=name, ok=False, said=wrong.message, hint=wrong.hint)
    except OSError as wrong:
        return CheckResult(name=name, ok=False, said=str(wrong), hint="check the rights of the folders, and the disk")
    except MemoryError as wrong:
        return CheckResult(name=name, ok=False, said=str(wrong) or TOO_LITTLE_MEMORY, hint="stop something else")


def _python(_config: ClientConfig) -> str:
    if sys.maxsize < 2**32:
        raise CheckFailed(f"Python {platform.python_version()} is 32-bit", "install a 64-bit system: runtimes need one")
    return f"{platform.python_version()}, {platform.machine()}"


def _glibc(_config: ClientConfig) -> str:
    name, version = platform.libc_ver()
    if sys.platform != "linux":
        return f"not Linux but {sys.platform}"
    if name != "glibc":
        raise CheckFailed(
            f"the C library is {name or 'not glibc'}",
            "take a system with glibc, as Debian or Ubuntu; on a phone with Termux, Debian under proot-distro",
        )
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_GLIBC:
        raise CheckFailed(f"glibc {version}", f"the runtimes need {MIN_GLIBC[0]}.{MIN_GLIBC[1]}: a newer system")
    return f"glibc {version}"


def _runtime(config: ClientConfig) -> str:
    """The configured engine decides; the other installed ones are reported as possible replacements."""
    if config.engine not in STEP_FILES:
        raise CheckFailed(f"{config.engine} has no probe", "its programs come from the coordinator; try one round")
    said = [_golden(config.engine, config)]
    for engine in STEP_FILES:
        if engine != config.engine and runtime_version(engine) is not None:
            try:
                said.append(_golden(engine, config))
            except (FedcentersError, CheckFailed) as wrong:
                said.append(f"{wrong.message if isinstance(wrong, FedcentersError) else wrong}, and is never used")
            except MemoryError as wrong:
                said.append(f"{runtime_version(engine)} fails: {wrong}, and is never used")
    return "; ".join(said)


def _golden(engine: str, config: ClientConfig) -> str:
    """Train the probe with an engine, and compare with torch's outcome."""
    began_s, version = time.perf_counter(), runtime_version(engine) or engine
    program, files = load_probe(engine)
    golden = program.golden[engine]
    try:
        opened = open_engine(engine, program, files, threads=config.threads, device=config.device)
        off = run_golden(opened, program, golden)
    except FedcentersError:
        raise
    except Exception as wrong:
        raise_for_memory(wrong)
        raise RuntimeMissing(f"{version} fails: {wrong}", hint="install the build for this board") from wrong
    if not off <= golden.tolerance:
        raise CheckFailed(f"{version} computes wrongly: {off:.1e} from torch", "install another version of it")
    took_s = time.perf_counter() - began_s
    return f"{version} took {len(golden.losses)} steps on {opened.place}, {off:.0e} from torch's, in {took_s:.1f} s"


def _masked_sums(config: ClientConfig) -> str:
    """X25519, HKDF and AES against recorded values, and how fast a mask is made; needed where a run has `secure`."""
    began_s = time.perf_counter()
    mask = stream_bytes(bytes(range(16)), MASK_MIB << 20)
    took_s = time.perf_counter() - began_s
    if keys.public_prekey(0, bytes(range(32))).seal.hex() != SEAL_KEY or mask[:16].hex() != MASK_START:
        raise CheckFailed("keys or masks are computed wrongly", "install another version of `cryptography`")
    alone = "" if config.secure == "off" else f"; in no run without it (secure = {config.secure})"
    return f"can take part where a run has `secure`{alone}; a mask of {MASK_MIB} MiB in {1000 * took_s:.0f} ms"


def load_probe(engine: str) -> tuple[Program, dict[str, Path]]:
    """The probe program, and its step for an engine, if there is one."""
    raw = parse_json((PROBE_FOLDER / "program.json").read_bytes(), MAX_PROGRAM_BYTES)
    return Program.from_json(raw), {"step": PROBE_FOLDER / STEP_FILES[engine]} if engine in STEP_FILES else {}


def _data(config: ClientConfig) -> str:
    local = load_data(config.data, limit=config.max_samples)
    if not len(local.train):
        raise CheckFailed(
            f"no samples in {config.data}: this device cannot train, it can only ask for a center",
            "write train.npz with numpy.savez(path, x=samples, y=labels), or put files into a folder train",
        )
    held_out = f"{len(local.test)} held out" if local.test else "none held out"
    return f"{len(local.train)} samples of {list(local.train.x.shape[1:])}, {held_out}"


def _broker(config: ClientConfig) -> str:
    """Connect, and log in with MQTT where that is possible and ends no other connection of this device."""
    from edge_client.transport.broker_rights import try_rights
    from edge_client.transport.mqtt import parse_url

    host, port, encrypted = parse_url(config.broker)
    enrolled = not has_token(config)
    with_certificate = enrolled and config.certificate is not None
    left_out = "" if enrolled else "the token is not used yet; `enrol`, or the first `join`, uses it"
    if with_certificate and _client_runs(config):
        left_out = "this device's client is running, and a second login would end its connection"
    certificate, key = (config.certificate, config.key) if with_certificate else (None, None)
    began_s, now = time.perf_counter(), dt.datetime.now(dt.timezone.utc)

    @contextlib.contextmanager
    def failures_told() -> Iterator[None]:
        try:
            yield
        except OSError as wrong:  # ssl.SSLError is one
            reason, hint = tls.explain_failure(wrong, config.ca)
            hint = hint or "check the address, and that the broker runs"
            raise CheckFailed(f"{config.broker}: {reason}", hint) from wrong

    with failures_told(), contextlib.ExitStack() as stack:
        line = stack.enter_context(socket.create_connection((host, port), timeout=CHECK_TIMEOUT_S))
        credentials = tls.Credentials(ca=config.ca, certificate=certificate, key=key)
        context = tls.client_context(credentials, now) if encrypted else None
        if context is not None:
            line = stack.enter_context(context.wrap_socket(line, server_hostname=host))
        answer = greet(line, login=not left_out) if enrolled else b""
    took = f"in {time.perf_counter() - began_s:.2f} s"
    if left_out:
        return f"{config.broker} takes connections{' over TLS' if encrypted else ''}, {took}; not logged in: {left_out}"
    if not is_broker(answer):
        raise CheckFailed(f"{config.broker} does not answer as a broker", "check the port")
    if refusal := why_refused(answer):
        raise CheckFailed(refusal, "use the certificate made for this device of this federation")
    if config.certificate is not None:  # with another device's the list would be blamed
        tls.check_subject(config.certificate, name=config.device_id, federation=config.federation)
    with failures_told():
        topics = Topics(config.federation)
        lets, said = try_rights((host, port), context, topics, config.device_id, timeout_s=CHECK_TIMEOUT_S)
    if not lets:
        hint = "write it again with `provision`, and let the broker read it; is it the broker of this federation?"
        raise CheckFailed(said, hint)
    return f"{config.broker} answers {took}; {said}"


def _client_runs(config: ClientConfig) -> bool:
    try:
        lock_folder(config.state, by="client").close()
    except (ConfigError, OSError) as wrong:  # the check of the disk tells the second
        return isinstance(wrong, ConfigError)
    return False


def _certificate(config: ClientConfig) -> str:
    if config.certificate is None:
        return "none is configured"
    if has_token(config):
        return "comes with the first start: a one-time token is here"
    tls.check_subject(config.certificate, name=config.device_id, federation=config.federation)
    now = dt.datetime.now(dt.timezone.utc)
    tls.client_context(tls.Credentials(ca=config.ca, certificate=config.certificate, key=config.key), now)
    left = (tls.read_certificate(config.certificate).not_valid_after_utc - now).days
    said = f"valid for {left} days" + "; renew it soon with `provision --renew`" * (left < tls.EXPIRY_WARNING_DAYS)
    if config.ca is None:
        return said
    ends = tls.read_certificate(config.ca).not_valid_after_utc
    if ends < now:
        raise CheckFailed(f"{config.ca} expired on {ends:%Y-%m-%d}", "ask the federation's operator for a new ca.crt")
    soon = (ends - now).days < tls.EXPIRY_WARNING_DAYS
    return said + (f"; its authority ends in {(ends - now).days} days: `provision --renew authority`" if soon else "")


def _clock(config: ClientConfig) -> str:
    now = dt.datetime.now(dt.timezone.utc)
    begins = [EARLIEST_CLOCK]
    files = [path for path in (config.certificate, config.ca) if path is not None and path.is_file()]
    begins += [tls.read_certificate(path).not_valid_before_utc for path in files]
    if now < max(begins):
        raise CheckFailed(
            f"{now:%Y-%m-%d %H:%M} UTC is before our certificate began", "set the clock, or let NTP set it"
        )
    synchronised = Path("/run/systemd/timesync/synchronized").exists()
    return f"{now:%Y-%m-%d %H:%M} UTC{', synchronised' if synchronised else ', not known to be synchronised'}"


def _disk(config: ClientConfig) -> str:
    config.state.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(config.state).free >> 20
    if free < MIN_DISK_MIB:
        raise CheckFailed(
            f"{free} MiB are free in {config.state}", f"free {MIN_DISK_MIB} MiB: a card that is full loses updates"
        )
    trial = config.state / "doctor"
    write_atomically(trial, b"doctor")
    trial.unlink()
    return f"{free} MiB free, and writable"


def _memory(config: ClientConfig) -> str:
    free = train_conditions.read_device_status().free_mib
    if free is None:
        return "unknown"
    if free < config.min_free_memory_mib:
        hint = "stop something else, choose engine = litert, or in a container raise its memory limit"
        raise CheckFailed(f"{free} MiB available", hint)
    return f"{free} MiB available"


def _power(config: ClientConfig) -> str:
    draining = train_conditions.read_device_status().draining
    if not draining:
        return "on mains or charging, or no battery that Linux shows"
    low = [f"{name} at {percent} %" for name, percent in draining if percent < config.min_battery_percent]
    if low:
        raise CheckFailed(", ".join(low), "connect a charger")
    return ", ".join(f"{name} at {percent} %" for name, percent in draining)


def _phone(_config: ClientConfig) -> str:
    """On a phone with Termux, Android is asked about battery and Wi-Fi; silence there would let a task run anywhere."""
    if not train_conditions.has_termux():
        return "not a phone with Termux and its package termux-api"
    battery, wifi = train_conditions.ask_termux(0)
    status = train_conditions.termux_status(battery, wifi)
    missing = [
        what for what, said in (("battery", battery), ("Wi-Fi", wifi if status.metered is not None else "")) if not said
    ]
    if missing:
        raise CheckFailed(
            f"Android says nothing of the {' and the '.join(missing)}",
            "install the app Termux:API from where Termux came from, and let it run in the background",
        )
    power = ", ".join(f"on battery at {percent} %" for _, percent in status.draining) or "plugged in"
    return f"{power}, {'no Wi-Fi' if status.metered else 'Wi-Fi'}; Android answers through Termux:API"


def _temperature(config: ClientConfig) -> str:
    found = train_conditions.read_device_status().temperatures
    if not found:
        return "no sensor that Linux shows"
    name, celsius = max(found, key=lambda each: each[1])
    if config.max_temperature and celsius > config.max_temperature:
        raise CheckFailed(f"{name} at {celsius:.0f} °C", "give it air, or raise max-temperature")
    return f"{name} at {celsius:.0f} °C"


def _allowed(config: ClientConfig) -> str:
    try:
        train_conditions.check_may_train(config)
    except DeviceRefused as refused:
        raise CheckFailed(refused.reason, refused.hint) from refused
    return "allowed"
