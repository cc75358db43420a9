"""The operator's commands: `provision` writes a federation's files, `enrol` turns tokens into certificates.

stdout carries data, stderr progress; no secret is on either.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from edge_client.errors import ConfigError
from edge_client.printable import counted, first_of, printable_line
from export.command_line import handle_errors

if TYPE_CHECKING:
    from coordinator.identity.provisioning import Provisioner

WEB_PORT = 8_884
FEDERATION, FLEET, PHONES, KEYS = "The federation", "Devices", "Phones", "Certificates and keys"  # in --help
RELOAD_HINT = (
    "give the broker its crl.pem and mosquitto.* files, then send it SIGHUP: open connections lose their rights too; "
    "a coordinator elsewhere needs coordinator/revoked beside its signing key, and reads it by itself"
)
AUTHORITY_HINT = (
    "no certificate outlives the authority: provision --renew authority --renew expiring, then bring each ca.crt and "
    "each new certificate to its machine, and crl.pem to the broker, before the old authority ends (docs/security.md)"
)
RENEWED_HINT = (
    "bring each new certificate or token to its machine; mosquitto reads its own at SIGHUP, but web.crt when it starts"
)
NEXT_KEY_HINT = (
    "bring each device its new client.toml, and start its client again; when all have it, --switch-signing-key"
)
SWITCHED_HINT = (
    "bring the new signing.key to the coordinator, and start it again; devices without the new key refuse its tasks"
)
MOST_NAMES = 5  # in a warning
OWNER_HINT = (
    "a mosquitto that root or the system starts becomes the user `mosquitto`, who cannot read these files of root"
)


def _port(words: str, panel: str) -> Any:  # noqa: ANN401 - typer's
    """The option of a port; 0 keeps what the plan has."""
    return typer.Option(min=0, max=65_535, show_default=False, help=words, rich_help_panel=panel)


@handle_errors
def provision(  # noqa: PLR0913 - a command line
    folder: Annotated[Path, typer.Argument(help="Where the federation's files are; made if there is none.")],
    *,
    federation: Annotated[str, typer.Option(help="Its name; needed once.", rich_help_panel=FEDERATION)] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(help="How devices dial the broker; the first is used. Needed once.", rich_help_panel=FEDERATION),
    ] = None,
    port: Annotated[int, _port("The broker's TLS port; at first 8883.", FEDERATION)] = 0,
    enrol_port: Annotated[int, _port("The port for tokens; at first 8443.", FEDERATION)] = 0,
    broker_folder: Annotated[
        str, typer.Option(help="Where the broker will find its files; FOLDER/broker.", rich_help_panel=FEDERATION)
    ] = "",
    devices: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="A whole fleet: device-0000 and on.", rich_help_panel=FLEET)
    ] = 0,
    device: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="One device; may be repeated.", rich_help_panel=FLEET)
    ] = None,
    listed: Annotated[
        Path | None, typer.Option("--list", help="A file with one device id a line.", rich_help_panel=FLEET)
    ] = None,
    token: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="A one-time token instead of a certificate.", rich_help_panel=FLEET),
    ] = None,
    web: Annotated[
        int, typer.Option(min=0, max=10_000, help="Phones: web-0000 and on, each with a link.", rich_help_panel=PHONES)
    ] = 0,
    web_device: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="One phone with a link; may be repeated.", rich_help_panel=PHONES),
    ] = None,
    web_port: Annotated[int, _port("The broker's port for browsers; at first 8884.", PHONES)] = 0,
    page: Annotated[
        str, typer.Option(help="How phones reach the coordinator's web app: https://HOST:PORT.", rich_help_panel=PHONES)
    ] = "",
    revoke: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Refuse a device or a phone for ever.", rich_help_panel=KEYS)
    ] = None,
    renew: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A new certificate; `expiring` for all that end soon.", rich_help_panel=KEYS),
    ] = None,
    next_signing_key: Annotated[
        bool, typer.Option(help="Make the next signing key; join files pin both.", rich_help_panel=KEYS)
    ] = False,
    switch_signing_key: Annotated[
        bool, typer.Option(help="Sign with it; join files pin it alone.", rich_help_panel=KEYS)
    ] = False,
    sign_release: Annotated[
        Path | None, typer.Option(metavar="FILE.tar", help="Sign a client release.", rich_help_panel=KEYS)
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Make nothing; fail when a certificate ends within 30 days.", rich_help_panel=KEYS)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a federation's keys and its broker's files.

    The authority, certificates, join files and the broker's configuration; repeating it changes nothing.

    example: fedcenters-coordinator provision keys --federation demo --host broker.example --devices 12
    """
    from coordinator.identity.provision_plan import open_plan
    from coordinator.identity.provisioning import Provisioner

    if check and not (folder / "federation.toml").is_file():
        raise ConfigError(f"{folder} is not provisioned", hint="run `provision` without --check first")
    changes = {
        "federation": federation,
        "hosts": tuple(host or ()),
        "port": port,
        "enrol_port": enrol_port,
        "broker_folder": broker_folder,
        "page": page,
        "web_port": web_port or (WEB_PORT if web or web_device else 0),
    }
    os.umask(os.umask(0o077) | 0o002)  # who may write the access list, or the keys that devices trust, has it all
    plan = open_plan(folder, {} if check else changes)
    work = Provisioner(folder=folder, plan=plan, now=dt.datetime.now(dt.timezone.utc))
    told = list[str]()
    if not check:
        work.write_infrastructure()
        enrolled = [name for name in token or () if work.authority.certificates_of(name)]
        renewed = _expanded(renew, work)
        fleet = [*(f"device-{i:04d}" for i in range(devices)), *_listed(listed)]
        _for_each(
            (work.add_device, [*_unrevoked(work, fleet), *(device or ())]),
            (work.add_token, token),
            (work.add_web_device, [*_unrevoked(work, [f"web-{i:04d}" for i in range(web)]), *(web_device or ())]),
            (work.revoke, revoke),
            (work.renew, renewed),
        )
        _write_keys(work, announce=next_signing_key, switch=switch_signing_key)
        _sign(work, sign_release)
        steps_left = ((renewed, RENEWED_HINT), (next_signing_key, NEXT_KEY_HINT), (switch_signing_key, SWITCHED_HINT))
        told = [*_not_as_asked(work, enrolled, device or ()), *(hint for done, hint in steps_left if done)]
    found = _facts(work)
    typer.echo(json.dumps(found) if as_json else _in_words(found))
    for hint in (*told, *_hints(folder, work, revoked=bool(revoke), made=bool(found["made"])), *_stranded(work)):
        typer.echo(printable_line(hint), err=True)
    if check:
        _fail_where_one_ends(work, found)


@handle_errors
def enrol(
    folder: Annotated[Path, typer.Argument(help="The provisioned folder.")],
    *,
    listen: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",  # noqa: S104 - devices are elsewhere
) -> None:
    """Turn one-time tokens of devices into certificates.

    Over HTTPS, until stopped.

    example: fedcenters-coordinator enrol keys
    """
    from coordinator.identity.enrolment_server import run_enrolment_server

    run_enrolment_server(folder, listen, tell=lambda text: typer.echo(printable_line(text), err=True))


def _listed(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # Windows' editors write a mark before the first line
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"cannot read {path}: {wrong}", hint="one device id a line") from wrong
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def _unrevoked(work: Provisioner, names: Iterable[str]) -> list[str]:
    """Those of a whole fleet that were not revoked; a revoked one that is named alone is an error."""
    gone = set(work.revoked_names())
    return [name for name in names if name not in gone]


def _for_each(*steps: tuple[Callable[[str], object], Iterable[str] | None]) -> None:
    for step, names in steps:
        for name in names or ():
            step(name)


def _write_keys(work: Provisioner, *, announce: bool, switch: bool) -> None:
    """Announce the next signing key, switch to it, or both; then the phones' passwords and every join file's keys."""
    from coordinator.identity import signing_key

    if announce:
        signing_key.announce_next_key(work.folder / "coordinator")
    if work.plan.web_port:
        work.web.write_passwords()
    if switch:
        signing_key.switch_key(work.folder / "coordinator")
    work.pin_keys()


def _sign(work: Provisioner, release: Path | None) -> None:
    if release is not None:
        typer.echo(f"signed: {work.sign_release(release)}", err=True)


def _not_as_asked(work: Provisioner, enrolled: Iterable[str], named: Iterable[str]) -> list[str]:
    """What was not made, or replaced something: `enrolled` asked for a token, `named` for a certificate."""
    keeping = [name for name in named if work.keeps_its_key(name)]
    return [
        *(f"{name} has a certificate, so it gets no token; {_how_to_renew(work, name)}" for name in enrolled),
        *(f"{path.with_suffix('')} is another one now; the one before is {path}" for path in work.kept),
        *(f"{name} has a certificate for a key of its own; {_how_to_renew(work, name)}" for name in keeping),
        *(f"the unused token of {cid} is taken back; {_instead_of_it(work, cid)}" for cid in work.withdrawn),
    ]


def _how_to_renew(work: Provisioner, name: str) -> str:
    if name in work.revoked_names():
        return "it was revoked: take another name"
    return f"--renew {name} makes a new {'certificate' if work.has_key_of(name) else 'token'}"


def _instead_of_it(work: Provisioner, cid: str) -> str:
    return "it has a certificate" if work.authority.certificates_of(cid) else f"--token {cid} makes a new one"


def _authority_ends(work: Provisioner) -> bool:
    """Whether the authority itself ends soon."""
    from coordinator.identity.provisioning import AUTHORITY_NAME

    return any(each.name == AUTHORITY_NAME for each in work.expiring_soon())


def _fail_where_one_ends(work: Provisioner, found: Mapping[str, Any]) -> None:
    """Raise ConfigError where a certificate ends soon, of our authority or the browsers' listener's from elsewhere."""
    web = _foreign_web_end(work)
    ways = [_ways_to_renew(work, found)] if found["expiring"] else []
    ways += ["renew web.crt where it came from, and start mosquitto again: SIGHUP does not read it"] if web else []
    if ways:
        raise ConfigError(web or "certificates end soon", hint="; ".join(ways))


def _foreign_web_end(work: Provisioner) -> str:
    """What to say of a browsers' certificate of another authority that ends within WARNING_DAYS, or has; else ""."""
    from edge_client.transport.tls import read_certificate
    from export.serve.renewed_certificate import WARNING_DAYS

    path = work.folder / "broker" / "web.crt"
    if not path.exists() or work.web_is_ours():
        return ""
    days = (read_certificate(path).not_valid_after_utc - work.now).days
    return f"{path} {_end_in_words(days)}" if days < WARNING_DAYS else ""


def _ways_to_renew(work: Provisioner, found: Mapping[str, Any]) -> str:
    """What helps each certificate that ends: a new one, or a token where the device keeps its key."""
    if _authority_ends(work):
        return AUTHORITY_HINT
    names = [each["name"] for each in found["expiring"]]
    away = [name for name in names if not work.has_key_of(name)]
    asked = [name for name in away if name not in found["tokens"]]
    ways = ["provision --renew expiring"] if len(away) < len(names) else []
    ways += (
        [f"--renew NAME makes a new token for {first_of(asked, MOST_NAMES)}, whose keys are not here"] if asked else []
    )
    waiting = [name for name in away if name in found["tokens"]]
    ways += [f"bring the token that waits to {first_of(waiting, MOST_NAMES)}"] if waiting else []
    return "; ".join(ways)


def _other_addresses(work: Provisioner) -> dict[str, tuple[str, int]]:
    """The devices whose join file dials a host that the broker's certificate is not for, or another port.

    -> what each of them dials. Raises ConfigError for an address that is none.
    """
    from coordinator.identity.provision_plan import READ_HINT
    from edge_client.toml_files import read_toml
    from edge_client.transport.mqtt import PORTS

    known, gone = {host.lower() for host in work.plan.hosts}, set(work.revoked_names())
    found = dict[str, tuple[str, int]]()
    for file in sorted((work.folder / "devices").glob("*/client.toml")):
        broker = str(read_toml(file, hint=READ_HINT).get("broker", ""))
        try:
            url = urlsplit(broker)
            host, port = url.hostname or "", url.port or PORTS["mqtts"]
        except ValueError as wrong:
            raise ConfigError(f"{file}: broker is {broker!r}: {wrong}", hint=f"write {work.plan.broker}") from wrong
        if (host not in known or port != work.plan.port) and file.parent.name not in gone:
            found[file.parent.name] = host, port
    return found


def _stranded(work: Provisioner) -> list[str]:
    """Which devices will not find the broker, or refuse its certificate, and what to do."""
    hosts, found, warnings = work.plan.hosts, _other_addresses(work), []
    moved = {name: port for name, (_, port) in found.items() if port != work.plan.port}
    others = {name: host for name, (host, _) in found.items() if host not in {each.lower() for each in hosts}}
    if moved:
        told = f"warning: the broker's port is {work.plan.port}, and {first_of(list(moved), MOST_NAMES)} dial"
        ways = "Name these devices with --device and carry their client.toml out again"
        warnings.append(f"{told} {', '.join(map(str, sorted(set(moved.values()))))}. {ways}")
    if others:
        names, old = list(others), sorted(set(others.values()))
        told = f"warning: the broker's certificate is for {', '.join(hosts)}, and {first_of(names, MOST_NAMES)} dial"
        both = " ".join(f"--host {host}" for host in (*hosts, *old))
        ways = f"Keep both with {both}, or name these devices with --device and carry their files out again"
        warnings.append(f"{told} {', '.join(old)}: they will refuse it. {ways}")
    return warnings


def _hints(folder: Path, work: Provisioner, *, revoked: bool, made: bool) -> list[str]:
    """What is left to do by hand."""
    hints = [RELOAD_HINT] if revoked else []
    hints += [AUTHORITY_HINT] if _authority_ends(work) else []
    if made and (there := work.plan.broker_folder):
        what = f"copy the files of {folder / 'broker'} to {there} on the broker's machine"
        hints.append(f"{what}; where mosquitto has a user of its own, run there as root: chown -R mosquitto {there}")
    elif made and os.name == "posix" and os.geteuid() == 0 and not _given_away(folder):
        through = f"chgrp mosquitto {folder} && chmod g+x {folder}"
        hints.append(f"{OWNER_HINT}; run once: chown -R mosquitto {folder / 'broker'} && {through}")
        closed = [str(above) for above in folder.resolve().parents if not above.stat().st_mode & stat.S_IXOTH]
        if closed:
            hints.append(
                f"{closed[0]} is closed to that user, too; keep the keys elsewhere, for example in /etc/fedcenters"
            )
    return hints


def _given_away(folder: Path) -> bool:
    """Whether all files of the broker belong to another user than the keys: then mosquitto has them already."""
    owner, broker = folder.stat().st_uid, folder / "broker"
    return all(path.stat().st_uid != owner for path in (broker, *broker.iterdir()))


def _expanded(names: list[str] | None, work: Provisioner) -> list[str]:
    """Replace `expiring` by the names whose certificates end soon and whose keys are here, without the authority."""
    soon = [each.name for each in work.expiring_soon() if work.has_key_of(each.name)]
    return [found for name in names or () for found in (soon if name == "expiring" else [name])]


def _facts(work: Provisioner) -> dict[str, Any]:
    now_s = work.now.timestamp()
    tokens = work.tokens.states()
    return {
        "folder": str(work.folder),
        "federation": work.plan.federation,
        "broker": work.plan.broker,
        "enrol_url": work.plan.enrol_url,
        "made": len(work.written),
        "names": [each.name for each in work.expiries()],
        "revoked": work.revoked_names(),
        "phones": work.web.names(),
        "expiring": [{"name": each.name, "days": each.days} for each in work.expiring_soon()],
        "tokens": [each.cid for each in tokens if not each.used and each.expires_s > now_s],
        "tokens_expired": [each.cid for each in tokens if not each.used and each.expires_s <= now_s],
        "tokens_tried_twice": [each.cid for each in tokens if each.refused],
    }


def _end_in_words(days: int) -> str:
    return f"expires in {days} days" if days >= 0 else f"expired {-days} days ago"


def _in_words(found: dict[str, Any]) -> str:
    from coordinator.identity.tokens import TOKEN_LIFETIME_HOURS

    numbers = f"{counted(len(found['names']), 'certificate')}, {counted(found['made'], 'file')} written"
    lines = [f"{found['folder']}: {found['federation']} at {found['broker']}, {numbers}"]
    lines += [f"{each['name']} {_end_in_words(each['days'])}" for each in found["expiring"]]
    lines += [f"revoked: {', '.join(found['revoked'])}"] if found["revoked"] else []
    lines += [f"{cid} has a link: {found['folder']}/devices/{cid}/link.txt" for cid in found["phones"]]
    waits = f"has a token that waits to be used, for {TOKEN_LIFETIME_HOURS:g} hours after it was made"
    lines += [f"{cid} {waits}" for cid in found["tokens"]]
    lines += [
        f"the token of {cid} ended before it was used: --token {cid} makes another one"
        for cid in found["tokens_expired"]
    ]
    lines += [
        f"the token of {cid} was tried again with another key: was it stolen?" for cid in found["tokens_tried_twice"]
    ]
    return "\n".join(lines)
