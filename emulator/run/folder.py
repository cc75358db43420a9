"""The folder of a simulated run. A run never replaces that of another: with other settings, samples or tensors."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.strategies.common.representation import annotate_representations
from edge_client.errors import ConfigError, FedcentersError, UsageError
from edge_client.toml_files import parse_toml
from edge_client.transport.blobs import write_atomically
from emulator.config import fingerprint, made_with
from emulator.options import SimulateArgs
from emulator.reports.repeat import repeat_in_python
from emulator.run.holding import hold_folder
from emulator.run.replaced_files import finish_replacing
from emulator.run.run_parts import RunParts, other_parts
from emulator.simulation.checkpoint import CHECKPOINT_FOLDER, other_setting, read_checkpoint

FILE = "config.toml"
# Keys that decide where and how fast a run is computed, and not its numbers.
NOT_COMPARED = frozenset({"out", "name", "data", "workers", "ray", "loggers", "checkpoint-every"})
Table = Mapping[str, Any]
Say = Callable[[str], None]
MACHINES_ERRORS = (FedcentersError, OSError, MemoryError)  # a worker that was killed, a full disk
USERS_ERRORS = (UsageError, ConfigError)
_NAME = "give the run's own --out and --name, or its config.toml"


class NothingToResume(ConfigError):
    """No round of this run is kept."""


@contextmanager
def open_run_folder(
    args: SimulateArgs, table: Table, *, resume: bool, say: Say, parts: Callable[[], RunParts] = dict
) -> Iterator[Path]:
    """The run's folder, absolute, with `table`, the resolved settings, as its config.toml.

    A folder with the same settings and `parts` is used again. Where they differ, a name that was made from method and
    seed gets a number. A name that was given is refused (UsageError), and so is a run to resume (NothingToResume).
    `say` is told what was there. A new folder is removed when the run ends before it has written anything else. A run
    to resume keeps its config.toml: `write_settings` writes the new one once it goes on. Raises ConfigError where a run
    that has not ended has the folder.
    """
    with ExitStack() as held:
        try:
            found: list[str] = []
            folder, is_new = _find(args, table, parts, resume=resume, say=found.append)
            home = folder.absolute()  # the caller may change the working folder before the run ends
            held.enter_context(hold_folder(folder, hint="wait for its end, stop it, or give this one another --name"))
            for line in found:  # not before: a run that another process writes is not replaced
                say(line)
            finish_replacing(folder)
            if not resume:
                write_settings(folder, table)
        except OSError as wrong:
            raise UsageError(f"cannot write to {args.folder}: {wrong.strerror}", hint="choose another --out") from wrong
        try:
            yield home
        except BaseException as ended:
            if told := _told_where_to_go_on(folder if folder.absolute() == home else home, args, table, ended):
                say(told)
            if is_new and [path.name for path in home.iterdir()] == [FILE]:
                (home / FILE).unlink()
                home.rmdir()
            raise


def write_settings(folder: Path, table: Table) -> None:
    """Write config.toml of the resolved settings; its first line has our versions."""
    import tomli_w

    by = ", ".join(f"{name} {version}" for name, version in made_with().items())
    text = f"# Written by {by}.\n{annotate_representations(tomli_w.dumps(table))}"
    write_atomically(folder / FILE, text.encode())


def in_own_folder(args: SimulateArgs, config: Path) -> SimulateArgs:
    """`args` of the file `config`, to go on where it lies: a run's folder may have been moved, or copied, since."""
    place = config.parent
    is_kept = any((place / f"{CHECKPOINT_FOLDER}{ending}").is_dir() for ending in ("", ".old"))
    if config.name != FILE or not is_kept or (args.folder.is_dir() and args.folder.samefile(place)):
        return args
    place = place.resolve()
    return replace(args, out=place.parent, name=args.name if args.folder.name == place.name else place.name)


def _told_where_to_go_on(folder: Path, args: SimulateArgs, table: Table, ended: BaseException) -> str:
    """What a run keeps that was interrupted, or ended by its machine, and what goes on with it.

    That is a command, or a call where no command finds what was given in Python. Empty where the user's own options or
    code end the run, or an error comes before anything is kept.
    """
    asked = isinstance(ended, KeyboardInterrupt)
    if not asked and (isinstance(ended, USERS_ERRORS) or not isinstance(ended, MACHINES_ERRORS)):
        return ""
    try:
        kept = read_checkpoint(folder)
    except ConfigError as broken:
        return f"interrupted; {broken.message}" if asked else ""
    if kept is None:
        why = (
            "no round was written" if args.checkpoint_every is None else f"checkpoint-every is {args.checkpoint_every}"
        )
        return f"interrupted; nothing is kept: {why}" if asked else ""
    command, last = shlex.join(["fedcenters-emulator", "simulate", str(folder / FILE), "--resume"]), kept[1].round
    rounds = f"round 1 of {args.rounds} is" if last == 1 else f"rounds 1 to {last} of {args.rounds} are"
    how = "interrupted" if asked else "ended by an error"
    on = f"In Python give resume=True. Go on with: {command}"
    parts = list[str]()
    with suppress(ConfigError):  # a damaged fleet.json
        parts += [part for told in (repeat_in_python(table, folder) or ())[:1] for part in told.split(" and ")]
    if kept[1].marks.get("loss", [""])[0] and "loss" not in parts:  # the folder does not tell of it yet
        parts.append("loss")
    if parts:
        on = f"Go on with the same call and out={str(folder.parent)!r}, name={folder.name!r}, resume=True"
        on += f" (no command has the {' and '.join(parts)} that you gave in Python)"
    return f"{how}; {rounds} kept in {folder}. {on}"


def _find(
    args: SimulateArgs, table: Table, parts: Callable[[], RunParts], *, resume: bool, say: Say
) -> tuple[Path, bool]:
    """-> the run's folder, and whether it was made here. mkdir decides between runs that begin at the same time."""
    folder, number, taken = args.folder, 1, ""
    if resume and not folder.exists():
        raise NothingToResume(
            f"{folder} is not there: there is no run to resume", hint=f"leave out --resume, or {_NAME}"
        )
    while True:
        if taken and resume and not folder.exists():
            hint = "give what that run had, give this one another --name, or leave out --resume"
            raise NothingToResume(taken, hint=hint)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            found = _difference(folder, table, resume=resume) or other_parts(folder, parts())
        else:
            if taken:
                say(f"{taken}; this one goes to {folder}")
            return folder, True
        if not found:
            if not resume:
                say(f"{folder} has a run with the same settings; it is replaced")
            return folder, False
        taken, number = taken or f"{folder} has {found}", number + 1
        if args.name and not resume:
            other = _difference(folder, table, resume=True) or other_parts(folder, parts())
            more = "" if other else "--resume goes on from it to more rounds; or "
            is_run = (folder / FILE).is_file()  # what is none is not ours to delete
            raise UsageError(taken, hint=f"{more}choose another --name{', or delete that folder' if is_run else ''}")
        folder = folder.with_name(f"{args.folder.name}-{number}")


def _difference(folder: Path, table: Table, *, resume: bool) -> str:
    """What is in the folder, unless it is a run with the settings of `table`, which `resume` may give more rounds."""
    try:
        held = parse_toml((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"no {FILE} that can be read"
    if resume:
        mine, theirs = fingerprint(table), fingerprint(held)
    else:
        mine, theirs = ({k: v for k, v in each.items() if k not in NOT_COMPARED} for each in (table, held))
    key = other_setting(mine, theirs)
    return f"a run with {key} = {theirs.get(key, 'unset')}, not {mine.get(key, 'unset')}" if key else ""
