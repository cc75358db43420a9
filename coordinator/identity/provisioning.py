"""`provision`: every file that gives a fleet access to its federation, in one folder.

    federation.toml    the plan, so that a later command need not repeat it
    authority/         the certificate authority: stays on the operator's machine, offline at best
    coordinator/       ca.crt, coordinator.crt, coordinator.key, signing.key, signing.pub
    broker/            mosquitto.conf, mosquitto.acl, emqx.acl.conf, ca.crt, server.crt, server.key, crl.pem
    release/           signing.key, signing.pub: signs client releases; the key can be kept elsewhere
    enrolment/         ca.crt, server.crt, server.key: the listener where a token becomes a certificate
    devices/{cid}/     client.toml, ca.crt, device.crt, device.key; or client.toml, ca.crt, token; or link.txt, link.svg

Repeating a command changes nothing. Time is an argument; nothing is sent over a network, and no secret is returned.
"""

from __future__ import annotations

import datetime as dt
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.identity import broker_acl, revocation, signing_key
from coordinator.identity.certificate_authority import open_authority, subject_alternative_name
from coordinator.identity.provision_plan import READ_HINT, ProvisionPlan, plan_table
from coordinator.identity.release_signature import sign_release
from coordinator.identity.revoked_list import REVOKED_FILE
from coordinator.identity.tokens import TokenStore
from coordinator.identity.web_passwords import WebDevices
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.topics import check_cid
from edge_client.toml_files import read_toml
from edge_client.transport.blobs import write_atomically
from edge_client.transport.keys import open_private_key, write_private_file
from edge_client.transport.tls import EXPIRY_WARNING_DAYS, read_certificate

# The dot keeps them out of the devices' alphabet.
BROKER_NAME, ENROLMENT_NAME, WEB_NAME = "server.broker", "server.enrol", "server.web"
AUTHORITY_NAME = "authority"
WORDS_OF_RENEW = frozenset({AUTHORITY_NAME, "expiring"})  # which mean no device
REVOKED_HINT = "give the device another name: a revoked one never comes back"
PRIVATE_FILES = frozenset({"mosquitto.acl"})  # Mosquitto 2.1 warns that later versions refuse one that others can read


@dataclass(frozen=True, kw_only=True)
class CertificateExpiry:
    """When a certificate in use ends."""

    name: str
    days: int  # left; negative after the end
    ends: dt.datetime


@dataclass
class Provisioner:
    """One provisioned folder. Of what is done: files `written`, copies `kept` of those before, tokens `withdrawn`."""

    folder: Path
    plan: ProvisionPlan
    now: dt.datetime
    written: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)  # names

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._put(self.folder / "federation.toml", _toml(plan_table(self.plan)))
        self.authority = open_authority(self.folder / "authority", self.plan.federation, self.now)
        revocation.create_list(self.authority, self.now)
        self.tokens = TokenStore(path=self.folder / "authority" / "tokens.sqlite")
        self.web = WebDevices(self.folder)

    def write_infrastructure(self) -> None:
        coordinator = self.folder / "coordinator"
        for folder in (coordinator, self.folder / "release"):
            key = folder / signing_key.CURRENT_KEY_FILE
            if not (key.exists() or (folder / signing_key.PUBLIC_KEY_FILE).exists()):  # it may be kept elsewhere
                if folder == coordinator and self.authority.certificates_of(broker_acl.COORDINATOR_CLIENT_ID):
                    raise signing_key.lost_key(folder)
                self.written.append(key)
                signing_key.open_signing_key(folder)
        self._client(coordinator, "coordinator", broker_acl.COORDINATOR_CLIENT_ID)
        for folder, name in ((self.folder / "broker", BROKER_NAME), (self.folder / "enrolment", ENROLMENT_NAME)):
            self._server(folder, name)
        if self.plan.web_port:
            self._web_server()
        self._broker_files()

    def add_web_device(self, cid: str) -> None:
        """Write a phone's link with a name and a password, unless it has one. Raises ConfigError as `add_device`."""
        if not self.plan.page.startswith(("https://", "http://localhost", "http://127.0.0.1")):
            told = f"phones open {self.plan.page!r}"
            raise ConfigError(told, hint="--page https://HOST:PORT, the coordinator's page")
        folder = self._device_folder(cid)
        if self.authority.certificates_of(cid) or (folder / "client.toml").exists():
            raise ConfigError(f"{cid} is a device with a certificate", hint="give the phone a name of its own")
        self.written += self.web.add(cid, folder, self.plan.page)

    def add_device(self, cid: str) -> None:
        """Write a device's folder with a certificate; a token that waits is taken back.

        A device that has a certificate for a key of its own keeps it. Raises ConfigError for a bad, a phone's or a
        revoked name.
        """
        folder = self._device_folder(cid)
        self._check_no_phone(cid)
        if self.keeps_its_key(cid):
            self._enrolling(folder, cid)
            return
        self._client(folder, "device", cid)
        if self.tokens.withdraw(cid):
            self.withdrawn.append(cid)
        (folder / "token").unlink(missing_ok=True)
        self._join_file(folder, cid, {})

    def add_token(self, cid: str) -> None:
        """Write a device's folder with a one-time token, unless it has a certificate; the device makes its own key."""
        folder = self._device_folder(cid)
        self._check_no_phone(cid)
        if not self.authority.certificates_of(cid):
            self._token(folder, cid)

    def _token(self, folder: Path, cid: str) -> None:
        now_s, path = self.now.timestamp(), folder / "token"
        if not path.exists() or not self.tokens.is_open(path.read_text("ascii", "replace").strip(), now_s):
            write_private_file(path, self.tokens.issue(cid, now_s).encode("ascii") + b"\n")
            self.written.append(path)
        self._enrolling(folder, cid)

    def _enrolling(self, folder: Path, cid: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._put(folder / "ca.crt", _pem(self.authority.certificate))
        self._join_file(folder, cid, {"enrol-url": self.plan.enrol_url, "token": "token"})

    def revoke(self, name: str) -> None:
        """Revoke certificates or a phone's password; an unused token is taken back, and its name may get a new one."""
        if "." in name:  # as of the coordinator, which would never have its rights again
            hint = "--renew for a new certificate; if its key was stolen, provision another folder (docs/security.md)"
            raise ConfigError(f"{name} is no device: without it the federation could not go on", hint=hint)
        with revocation.locked(self.authority.folder):
            known = name in self.authority.issued_names()
            if withdrawn := self.tokens.withdraw(name, bound=not known):
                (self.folder / "devices" / name / "token").unlink(missing_ok=True)
            if withdrawn and not known:
                self.withdrawn.append(name)
            elif not self.web.revoke(name):
                revocation.revoke_certificates(self.authority, name, self.now)
        self._broker_files()

    def revoked_names(self) -> list[str]:
        return [*revocation.revoked_names(self.authority), *self.web.revoked()]

    def renew(self, name: str) -> None:
        """Issue a new certificate for a name and the same key; the old one stays valid until it ends.

        A device that keeps its key to itself gets a new token. The authority's is written to each folder here.
        """
        if name == AUTHORITY_NAME:
            self.authority = revocation.renew_authority(self.authority, self.now)
            self._broker_files()
            for copy in sorted([*self.folder.glob("*/ca.crt"), *self.folder.glob("devices/*/ca.crt")]):
                self._put(copy, _pem(self.authority.certificate))
            return
        folder, stem = self._place(name)
        if not self.authority.certificates_of(name):
            raise ConfigError(f"{name} has no certificate", hint="`provision --check --json` lists the names")
        if name == WEB_NAME and not self.web_is_ours():
            raise ConfigError(f"{folder / 'web.crt'} is not of this authority", hint="renew it where it came from")
        if not (folder / f"{stem}.key").exists():
            self._token(folder, name)
            return
        if name in (BROKER_NAME, ENROLMENT_NAME, WEB_NAME):
            self._server(folder, name, stem, anew=True)
        else:
            self._client(folder, stem, name, anew=True)

    def pin_keys(self) -> None:
        """Write the trusted signing keys into every join file; its other settings stay."""
        for file in sorted((self.folder / "devices").glob("*/client.toml")):
            pins = {"signing-keys": self._pins(), "release-keys": self._release_pins()}
            self._put(file, _toml({**read_toml(file, hint=READ_HINT), **pins}))

    def sign_release(self, path: Path) -> Path:
        """Sign a client release; -> the file of the signature. Raises ConfigError without the release key."""
        return sign_release(path, signing_key.read_signing_key(self.folder / "release"), self.plan.federation)

    def expiries(self) -> list[CertificateExpiry]:
        """The newest certificate of every name that is not revoked, and the authority's, sorted by their ends."""
        revoked = revocation.revoked_serials(self.authority)
        newest = {name: self.authority.certificates_of(name)[-1] for name in self.authority.issued_names()}
        current = {name: c for name, c in newest.items() if c.serial_number not in revoked}
        if not self.web_is_ours():
            current.pop(WEB_NAME, None)
        current[AUTHORITY_NAME] = self.authority.certificate
        return sorted(
            (
                CertificateExpiry(name=name, days=(c.not_valid_after_utc - self.now).days, ends=c.not_valid_after_utc)
                for name, c in current.items()
            ),
            key=lambda each: (each.ends, each.name),
        )

    def has_key_of(self, name: str) -> bool:
        """Whether a name's key is in this folder; a device that enrolled with a token keeps its own."""
        if name == AUTHORITY_NAME or revocation.is_revoked(self.authority, name):
            return False
        folder, stem = self._place(name)
        return (folder / f"{stem}.key").exists()

    def keeps_its_key(self, cid: str) -> bool:
        """Whether a device has a certificate for a key that is not in this folder."""
        return bool(self.authority.certificates_of(cid)) and not (self.folder / "devices" / cid / "device.key").exists()

    def expiring_soon(self) -> list[CertificateExpiry]:
        return [each for each in self.expiries() if each.days < EXPIRY_WARNING_DAYS]

    def _device_folder(self, cid: str) -> Path:
        try:
            check_cid(cid)
        except Malformed as wrong:
            raise ConfigError(wrong.words, hint="a device id: letters, digits, '_' and '-', at most 64") from wrong
        folder = self.folder / "devices" / cid
        if cid in WORDS_OF_RENEW and not folder.exists():
            raise ConfigError(f"{cid} is a word of --renew", hint="give the device another name")
        if revocation.is_revoked(self.authority, cid) or cid in self.web.revoked():
            raise ConfigError(f"{cid} was revoked", hint=REVOKED_HINT)
        return folder

    def _check_no_phone(self, cid: str) -> None:
        if cid in self.web.names():
            raise ConfigError(f"{cid} is a phone with a link", hint="a name is let in one way only: choose another")

    def _place(self, name: str) -> tuple[Path, str]:
        """-> (folder, stem of the file names) of a name's certificate."""
        known = {
            broker_acl.COORDINATOR_CLIENT_ID: (self.folder / "coordinator", "coordinator"),
            BROKER_NAME: (self.folder / "broker", "server"),
            ENROLMENT_NAME: (self.folder / "enrolment", "server"),
            WEB_NAME: (self.folder / "broker", "web"),
        }
        return known[name] if name in known else (self._device_folder(name), "device")

    def _client(self, folder: Path, stem: str, name: str, *, anew: bool = False) -> None:
        self._certify(folder, stem, lambda key: self._issue_client(key, name), anew=anew)

    def _issue_client(self, key: EllipticCurvePublicKey, name: str) -> x509.Certificate:
        with revocation.locked(self.authority.folder):  # another process may revoke the name at this moment
            if revocation.is_revoked(self.authority, name):
                raise ConfigError(f"{name} was revoked", hint=REVOKED_HINT)
            return self.authority.issue_client(key, name, self.now)

    def _server(self, folder: Path, name: str, stem: str = "server", *, anew: bool = False) -> None:
        """Write a server's certificate; a new one when the plan has other hosts."""
        path, wanted = folder / f"{stem}.crt", self.plan.hosts
        names = sorted(str(subject_alternative_name(h).value) for h in wanted)
        anew = anew or (path.exists() and _names_in(read_certificate(path)) != names)  # a damaged one may be renewed
        self._certify(folder, stem, lambda key: self.authority.issue_server(key, name, wanted, self.now), anew=anew)

    def _web_server(self) -> None:
        """The same for the browsers' listener, unless the operator has put another certificate there."""
        folder = self.folder / "broker"
        if self.web_is_ours() or not (folder / "web.crt").exists():
            self._server(folder, WEB_NAME, "web")

    def web_is_ours(self) -> bool:
        """Whether this authority issued the certificate of the browsers' listener."""
        path = self.folder / "broker" / "web.crt"
        return path.exists() and read_certificate(path) in self.authority.certificates_of(WEB_NAME)

    def _certify(
        self, folder: Path, stem: str, issue: Callable[[Any], x509.Certificate], *, anew: bool = False
    ) -> None:
        """Write a key, its certificate and ca.crt into a folder, unless they are there; the certificate also `anew`.

        The one before stays until then: a full disk must not leave the broker without any.
        """
        folder.mkdir(parents=True, exist_ok=True)
        key, certificate = folder / f"{stem}.key", folder / f"{stem}.crt"
        if not key.exists():
            self.written.append(key)
            certificate.unlink(missing_ok=True)  # it is of the key that is gone
        public = open_private_key(key).public_key()
        if anew or not certificate.exists():
            self._put(certificate, _pem(issue(public)))
        self._put(folder / "ca.crt", _pem(self.authority.certificate))

    def _join_file(self, folder: Path, cid: str, more: Mapping[str, str]) -> None:
        """Write client.toml, which `fedcenters-edge join` reads. Settings that a user added stay."""
        settings = {
            "federation": self.plan.federation,
            "device-id": cid,
            "broker": self.plan.broker,
            "ca": "ca.crt",
            "certificate": "device.crt",
            "key": "device.key",
            "signing-keys": self._pins(),
            "release-keys": self._release_pins(),
            **more,
        }
        path = folder / "client.toml"
        kept = read_toml(path, hint=READ_HINT) if path.exists() else {"data": "data", "state": "state"}
        kept = {key: value for key, value in kept.items() if key not in ("enrol-url", "token")}
        self._put(path, _toml({**kept, **settings}))

    def _broker_files(self) -> None:
        folder = self.folder / "broker"
        there = PurePosixPath(self.plan.broker_folder or str(folder.resolve()))
        conf = broker_acl.mosquitto_conf(there, port=self.plan.port, web_port=self.plan.web_port).encode()
        path, old = folder / "mosquitto.conf", folder / "mosquitto.conf.old"
        is_other = path.exists() and path.read_bytes() != conf  # it may have lines of the operator's
        if is_other:
            path.replace(old)  # a copy would follow a link that the broker's user put there
            self.kept.append(old)
        try:
            self._put(path, conf)
        except OSError:  # on a full disk the broker keeps its own
            if is_other:
                old.replace(path)
            raise
        with revocation.locked(self.authority.folder):  # a copy of an older list must not follow a newer one
            if self.plan.web_port:
                self.written += self.web.write_passwords()
            revoked = self.revoked_names()
            for name, data in revocation.broker_files(self.authority, revoked).items():
                self._put(folder / name, data, private=name in PRIVATE_FILES)
            told = self.folder / "coordinator" / REVOKED_FILE
            if revoked or told.exists():
                self._put(told, "".join(f"{name}\n" for name in sorted(revoked)).encode())

    def _pins(self) -> list[str]:
        return signing_key.trusted_keys(self.folder / "coordinator")

    def _release_pins(self) -> list[str]:
        return [signing_key.public_key(self.folder / "release")]

    def _put(self, path: Path, data: bytes, *, private: bool = False) -> None:
        """Write a file unless it has this content already, and no other user can read it where it is `private`.

        Any user can read the others, whatever the umask: a broker has a user of its own. What root writes belongs to
        the owner of the file before, or of the folder, as in `write_private_file`.
        """
        wide = private and path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077
        if path.exists() and path.read_bytes() == data and not wide:
            return
        there = (path if path.exists() else path.parent).stat()
        (write_private_file if private else write_atomically)(path, data)
        if not private and os.name == "posix":
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # by now the folder's user may have put a link there
            try:
                os.fchmod(file, 0o644)
                if os.geteuid() == 0:
                    os.fchown(file, there.st_uid, there.st_gid)
            finally:
                os.close(file)
        self.written.append(path)


def _toml(table: Mapping[str, Any]) -> bytes:
    import tomli_w

    return tomli_w.dumps(dict(table)).encode("utf-8")


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _names_in(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return sorted(str(name.value) for name in names)
