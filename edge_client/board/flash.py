"""`fedcenters-edge flash`: from the command line to files on a board. board_files.py decides what is written."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import edge_client
from edge_client.board import identity, targets, wheels
from edge_client.board.board_files import DATA_FOLDER, PYTHON_FOLDER, BoardFile, DeviceIdentity, board_files
from edge_client.board.profiles import BOARD_PROFILES, MIN_PYTHON, PYTHONS, BoardProfile, board_profile, check_python
from edge_client.board.remote import BoardInfo, RemoteBoard, check_board
from edge_client.errors import EXIT_OK, ConfigError, UsageError
from edge_client.protocol.program import ENGINES
from edge_client.transport.tls import is_loopback
from edge_client.user_cache import user_cache

EXAMPLE = (
    "example: fedcenters-edge flash --board raspberry-pi-5 --device-id porch --join keys --rootfs /media/me/rootfs"
)
LIGHT_ENGINES = ("onnx", "litert")  # whose code is always there; the third needs torch
PACKAGE = Path(edge_client.__file__).parent


def add_arguments(flash: argparse.ArgumentParser) -> None:
    """The options of `flash`."""
    flash.add_argument("--board", required=True, choices=BOARD_PROFILES, help="the kind of board")
    flash.add_argument("--device-id", required=True, metavar="ID", help="the device that it becomes")
    flash.add_argument("--federation", default="", metavar="URL", help="mqtts://host:port, if not the join file's")
    made = "what `provision` made (default: keys)"
    flash.add_argument("--join", type=Path, default=Path("keys"), metavar="DIR", help=made)
    target = flash.add_mutually_exclusive_group(required=True)
    target.add_argument("--rootfs", type=Path, metavar="DIR", help="a mounted card, or Linux_for_Tegra/rootfs")
    target.add_argument("--ssh", metavar="USER@HOST", help="a board that runs")
    archive = "FILE.tar, or FILE.tar.zst compressed, to unpack over a root file system"
    target.add_argument("--bundle", type=Path, metavar="FILE", help=archive)
    engines = ", ".join(sorted({profile.engine for profile in BOARD_PROFILES.values()}))
    flash.add_argument("--engine", choices=ENGINES, help=f"the training runtime (default: {engines})")
    flash.add_argument("--with-engine", choices=ENGINES, action="append", default=[], help="install this one, too")
    flash.add_argument("--data", default="", metavar="DIR", help=f"the board's samples (default: {DATA_FOLDER})")
    flash.add_argument("--images", action="store_true", help="install what reads image files")
    flash.add_argument("--python", default="", metavar="3.N", help="the board's Python, where it cannot be asked")
    flash.add_argument("--python-home", type=Path, metavar="DIR", help="an interpreter to install, as JetPack 5 needs")
    flash.add_argument("--wheel", type=Path, action="append", default=[], metavar="FILE", help="as NVIDIA's builds")
    flash.add_argument("--index", action="append", default=[], metavar="URL", help="a further package index")
    flash.add_argument("--constraints", type=Path, metavar="FILE", help="versions, in pip's words")
    kept = "where wheels are kept (default: %(default)s)"
    flash.add_argument("--cache", type=Path, default=_cache(), metavar="DIR", help=kept)
    flash.add_argument("--hardware-watchdog", action="store_true", help="a board that hangs is reset")
    flash.add_argument("--update", action="store_true", help="newer wheels; replace what was flashed, keep its state")
    flash.add_argument("--dry-run", action="store_true", help="list every file, write nothing")
    flash.add_argument("--json", action="store_true", help="one JSON object on stdout")
    flash.set_defaults(command=flash_board)


def flash_board(options: argparse.Namespace) -> int:
    """Read, check, resolve, write."""
    profile = board_profile(options.board)
    remote = None if options.ssh is None else RemoteBoard(host=options.ssh)
    if profile.own_python and options.python_home is None:
        raise ConfigError(f"{profile.title}: {profile.notes[0]}", hint="--python-home DIR, see docs/flash-a-board.md")
    folder = identity.join_folder(options.join, options.device_id)
    settings, who = identity.read_identity(folder, device_id=options.device_id, federation=options.federation)
    _warn_of_own_broker(settings["broker"])
    board = _checked(profile, options, remote)
    python = _python(profile, options, board)
    settings |= {"engine": options.engine} if options.engine else {}
    settings = {key: value for key, value in settings.items() if key != "data"}
    settings |= {"data": options.data} if options.data else {}
    entries = compose_files(profile, settings, who, python=python, options=options)
    told = _write(entries, options, remote, board)
    if who.token is not None and told.get("changed", 1):
        print(
            "its token becomes a certificate at the first start, if the board has none yet: until then "
            f"`fedcenters-coordinator enrol` has to run at {settings['enrol-url']}, and the token ends a day after "
            "`provision --token` made it",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps({"board": profile.name, "device": options.device_id, "python": python, **told}))
    for note in profile.notes:
        print(f"note: {note}", file=sys.stderr)
    return EXIT_OK


def compose_files(
    profile: BoardProfile, settings: dict[str, Any], who: DeviceIdentity, *, python: str, options: argparse.Namespace
) -> tuple[BoardFile, ...]:
    """The list of files, its wheels downloaded if they are not in the cache."""
    engine = settings.get("engine", profile.engine)
    spec = wheels.WheelSpec(
        profile=profile,
        python=python,
        engines=tuple(sorted({engine, *options.with_engine})),
        images=options.images,
        wheels=tuple(options.wheel),
        index=tuple(options.index),
        constraints=options.constraints,
    )
    if not spec.wheels and "pt2" in spec.engines:
        raise UsageError("pt2 needs torch", hint="give the board's own build with --wheel")
    found = wheels.fetch_wheels(spec, options.cache, fresh=options.update)
    site = [entry for wheel in found for entry in wheels.unpack_wheel(wheel)]
    home = [] if options.python_home is None else _interpreter(options.python_home, profile)
    return board_files(
        profile,
        settings,
        who,
        [*site, *wheels.client_files(PACKAGE, (*LIGHT_ENGINES, *spec.engines))],
        launcher=(PACKAGE / "update" / "launcher.py").read_bytes(),
        python=home,
        hardware_watchdog=options.hardware_watchdog,
    )


def _checked(profile: BoardProfile, options: argparse.Namespace, remote: RemoteBoard | None) -> BoardInfo | None:
    own_python = options.python_home is not None
    if options.rootfs is not None:
        targets.check_rootfs(options.rootfs, profile, own_python=own_python)
    if remote is None:
        return None
    board = remote.inspect()
    check_board(board, profile, remote.host, own_python=own_python)
    return board


def _python(profile: BoardProfile, options: argparse.Namespace, board: BoardInfo | None) -> str:
    """The Python version that wheels are made for: the board's own, the one given, or the profile's."""
    there: str | None = None
    if options.python_home is not None:
        there = _version_in(options.python_home)
    elif board is not None:
        there = board.python
    elif options.rootfs is not None:
        there = targets.python_of(options.rootfs)
    if there is not None and options.python not in ("", there):
        raise UsageError(f"--python {options.python}, but there is Python {there}", hint="leave --python out")
    if there is None and not options.python:
        print(
            f"wheels for Python {profile.python}, the usual one of this kind of board, since a --bundle is for a board "
            f"that is not here to be asked; if `python3 --version` says another there, give it with --python "
            f"({', '.join(PYTHONS)})",
            file=sys.stderr,
        )
    return check_python(there or options.python or profile.python)


def _warn_of_own_broker(broker: str) -> None:
    """On a board 127.0.0.1 is the board itself; only the user knows whether its broker runs there."""
    if is_loopback(urlsplit(broker).hostname or ""):
        print(
            f"warning: the board will dial {broker}, which is the board itself; if the broker runs elsewhere, run "
            f"`provision` again with --host ADDRESS, at which devices reach it, and flash again",
            file=sys.stderr,
        )


def _version_in(home: Path) -> str:
    found = sorted(path.name.removeprefix("python") for path in home.glob("lib/python3.*"))
    good = [
        name for name in found if name.replace(".", "").isdecimal() and tuple(map(int, name.split("."))) >= MIN_PYTHON
    ]
    if not good or not (home / "bin").is_dir():
        raise ConfigError(
            f"{home} holds no Python of {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer",
            hint="unpack a relocatable build for the board there; it has bin/python3 and lib/python3.N",
        )
    return good[-1]


def _interpreter(home: Path, profile: BoardProfile) -> list[BoardFile]:
    """A relocatable Python as entries; links inside it stay links."""
    binary = (home / "bin" / "python3").resolve()
    if not binary.is_file() or targets.machine_of_program(binary) != profile.machine:
        raise ConfigError(f"{binary} is no program for {profile.machine}", hint="take the build for the board")
    made = []
    for path in sorted(home.rglob("*")):
        place = f"{PYTHON_FOLDER}/{path.relative_to(home).as_posix()}"
        if path.is_symlink():
            made.append(BoardFile(path=place, mode=0o777, link=str(path.readlink())))
        elif path.is_file() and "__pycache__" not in path.parts:
            made.append(
                BoardFile(path=place, mode=0o755 if os.access(path, os.X_OK) else 0o644, data=path.read_bytes())
            )
    return made


def _write(
    entries: Sequence[BoardFile], options: argparse.Namespace, remote: RemoteBoard | None, board: BoardInfo | None
) -> dict[str, Any]:
    size = sum(len(entry.data) for entry in entries)
    about = {"files": len(entries), "bytes": size}
    if options.dry_run:
        for entry in () if options.json else entries:
            print(_line(entry))
        print(f"{len(entries)} files, {size / 1e6:.1f} MB; nothing was written", file=sys.stderr)
        listed = [{"path": e.path, "mode": f"{e.mode:04o}", "owner": e.owner, "size": len(e.data)} for e in entries]
        return {**about, "dry_run": True, "list": listed}
    if options.rootfs is not None:
        changes = targets.write_rootfs(options.rootfs, entries, update=options.update)
        told = f"{options.rootfs}: {len(changes)} of {len(entries)} files written, {size / 1e6:.1f} MB in all"
        print(told if changes else f"{options.rootfs}: nothing to change", file=sys.stderr)
        return {**about, "changed": len(changes)}
    if remote is not None and board is not None:
        fresh = remote.install(entries, board, update=options.update)
        print(f"{remote.host}: {'flashed, and started' if fresh else 'nothing to change'}", file=sys.stderr)
        return {**about, "changed": len(entries) if fresh else 0}
    targets.write_archive(options.bundle, entries)
    print(f"{options.bundle}: {len(entries)} files; tar -xf it over the board's /, as root", file=sys.stderr)
    return {**about, "bundle": str(options.bundle)}


def _line(entry: BoardFile) -> str:
    """The permissions in the form of `ls -l`."""
    if entry.link:
        return f"link {entry.owner:10} {0:>10} {entry.path} -> {entry.link}"
    return f"{entry.mode:04o} {entry.owner:10} {len(entry.data):>10} {entry.path}"


def _cache() -> Path:
    return user_cache() / "wheels"
