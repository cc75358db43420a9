"""`fedcenters-edge nearest`: one command on a new device. stdout carries data, stderr talk."""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData, load_with_or_without_labels
from edge_client.engines.center_file import FILE_FORMATS, FORMAT_BY_ENGINE
from edge_client.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from edge_client.nearest.choose_center import AUTO, RULE_NAMES
from edge_client.nearest.over_http import TrustedKeys, find_nearest
from edge_client.nearest.over_mqtt import NearestClient, NearestOptions
from edge_client.nearest.result import NearestAnswer
from edge_client.printable import printable, write_line
from edge_client.protocol.program import ENGINES
from edge_client.runtime import enrolment
from edge_client.runtime.factory import make_dialer
from edge_client.transport.clock import SystemClock
from edge_client.transport.folder_lock import lock_state
from edge_client.user_cache import user_cache

EXAMPLE = (
    "example: fedcenters-edge nearest --federation https://centers.example --signing-key signing.pub --data samples\n"
    "samples/train.npz holds x [n, ...] and, where they are known, labels y [n]"
)
KEY_HEX_DIGITS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nearest`."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", type=Path, help="TOML file of this device, as for join")
    where.add_argument(
        "--federation", metavar="URL", help="http(s)://host of a site of centers, or mqtt(s)://host:port/name"
    )
    device = parser.add_argument_group("this device")
    device.add_argument("--data", type=Path, help="folder with train.npz: x, and y where labels are known")
    device.add_argument("--device", default="", help="this device's name (default: the machine's)")
    device.add_argument(
        "--engine", choices=ENGINES, help="the runtime that looks at the centers (default: the file's, or onnx)"
    )
    device.add_argument(
        "--state", type=Path, help="folder for what is fetched (default: the file's, or ~/.cache/fedcenters/NAME)"
    )
    trust = parser.add_argument_group("whom it trusts")
    trust.add_argument(
        "--signing-key",
        action="append",
        default=[],
        metavar="KEY",
        help="the federation's signing.pub, or its 64 digits",
    )
    trust.add_argument("--unsigned", action="store_true", help="take what the site gives, signed or not")
    result = parser.add_argument_group("the answer")
    result.add_argument("--format", choices=FILE_FORMATS, help="file to fetch (default: what the engine runs)")
    result.add_argument("--by", choices=RULE_NAMES, default=AUTO, help="how to choose; auto uses all that is there")
    result.add_argument(
        "--personalise", type=int, default=0, metavar="STEPS", help="local steps from the center afterwards"
    )
    result.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(command=run_nearest)


def run_nearest(options: argparse.Namespace) -> int:
    """Find the center, fetch its file, print the answer."""
    if options.personalise < 0:
        raise UsageError(f"--personalise {options.personalise}", hint="0 or more steps")
    keys = TrustedKeys(trusted=tuple(_key(text) for text in options.signing_key), unsigned=options.unsigned)
    config = _config(options, keys)
    local, labels = load_with_or_without_labels(config.data)
    if options.personalise and not labels:
        raise UsageError("--personalise needs labels, which this data has not", hint="leave out --personalise")
    file_format = options.format or FORMAT_BY_ENGINE[config.engine]
    choice = NearestOptions(file_format=file_format, labels=labels, by=options.by, steps=options.personalise)
    signal.signal(signal.SIGTERM, _terminate)
    if options.federation and urlsplit(options.federation).scheme in ("http", "https"):
        answer = find_nearest(options.federation, keys, config, local, choice)
    else:
        answer = _over_mqtt(config, local, choice, insecure=options.insecure)
    _print(answer, as_json=options.json)
    return EXIT_OK


def _over_mqtt(config: ClientConfig, local: DeviceData, choice: NearestOptions, *, insecure: bool) -> NearestAnswer:
    with lock_state(config.state):  # a `join` of the same name would be disconnected
        return NearestClient(
            config=config,
            dial=make_dialer(config, insecure=insecure),
            local=local,
            clock=SystemClock(),
            rng=np.random.default_rng(time.time_ns()),
            choice=choice,
            tell=lambda text: write_line(f"{config.device_id}: {text}"),
        ).run()


def _config(options: argparse.Namespace, keys: TrustedKeys) -> ClientConfig:
    """From the device's file and the command line, or from the latter alone."""
    if options.config is not None:
        named = [f"--{name.replace('_', '-')}" for name in ("device", "signing_key", "unsigned") if vars(options)[name]]
        if named:
            raise UsageError(f"{options.config} says what {named[0]} would", hint=f"leave out {', '.join(named)}")
        instead = {name: vars(options)[name] for name in ("data", "state", "engine") if vars(options)[name] is not None}
        return replace(enrolment.load_enrolled(options.config, tell=write_line), **instead)
    if options.data is None:
        raise UsageError("--federation needs --data", hint="the folder with this device's train.npz")
    name = options.device or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "device"
    state = options.state or user_cache() / name
    hint = "give http(s)://host, or mqtt(s)://host/name; fedcenters-export serve makes a folder of centers an address"
    try:
        parts = urlsplit(options.federation)
    except ValueError as wrong:  # as of http://[::1
        raise UsageError(f"{options.federation!r} is no address: {wrong}", hint=hint) from None
    if parts.scheme not in ("http", "https", "mqtt", "mqtts"):
        raise UsageError(f"{options.federation!r} is no address", hint=hint)
    broker, federation = "", "site"
    if parts.scheme.startswith("mqtt"):
        broker, federation = f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")
        if not keys.trusted:
            raise UsageError("over MQTT --signing-key is needed", hint="the coordinator's signing.pub")
        if not federation:
            raise UsageError(f"{options.federation} names no federation", hint="mqtt(s)://host:port/name")
    if options.state is None:
        write_line(f"{name}: keeps what it fetches in {state}; --state FOLDER names another place")
    return ClientConfig(
        federation=federation,
        device_id=name,
        broker=broker,
        data=options.data,
        state=state,
        signing_keys=tuple(keys.trusted),
        engine=options.engine or "onnx",
    )


def _key(text: str) -> bytes:
    """64 hex digits, or a file of them."""
    path = Path(text)
    try:
        said = path.read_text(encoding="ascii").strip() if path.is_file() else text
        if len(said) != KEY_HEX_DIGITS:
            raise ValueError(f"{len(said)} characters")  # noqa: TRY301 - joins those of the others
        return bytes.fromhex(said)
    except (OSError, ValueError) as wrong:
        raise UsageError(f"{text!r:.80} is no public key: {wrong}", hint="give signing.pub, or 64 hex digits") from None


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_INTERRUPTED)  # a script must not go on without an answer


def _print(answer: NearestAnswer, *, as_json: bool) -> None:
    told = json.loads(json.dumps(answer.to_json()), parse_constant=lambda _: None)  # JSON has no infinity
    print(json.dumps(told) if as_json else printable(answer.in_words()))
