"""A provisioned folder of which a file was lost or damaged: it is made again where that harms nothing, else named."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from coordinator.identity.enrolment_server import Registrar
from coordinator.identity.provisioning import Provisioner
from coordinator.identity.signing_key import open_signing_key
from edge_client.errors import ConfigError, NetworkError
from edge_client.runtime import enrolment
from edge_client.transport.keys import open_private_key, signing_request
from edge_client.transport.tls import read_certificate
from tests.coordinator.identity.test_enrolment_over_https import config_of, listening
from tests.coordinator.identity.test_provisioning import invoke
from tests.support.guarded_broker import provision_federation

DAMAGES = (b"", b"\xff\x00damaged\xfe", b"half")


@pytest.fixture
def work(tmp_path: Path) -> Provisioner:
    made = provision_federation(tmp_path / "keys")
    made.add_device("d1")
    return made


def provisioned(work: Provisioner) -> tuple[int, str]:
    """-> (exit code, what is said) of a repeated `provision`."""
    said = invoke(str(work.folder))
    return said.exit_code, said.stderr


def without(work: Provisioner, name: str) -> dict[str, bytes]:
    """Remove a file; -> what is left."""
    (work.folder / name).unlink()
    return contents(work.folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("gone", [["authority/ca.key"], ["authority/ca.key", "authority/ca.crt"]])
def test_an_authority_that_is_kept_elsewhere_is_missed_by_name_and_no_other_one_is_made(
    work: Provisioner, gone: list[str]
) -> None:
    for name in gone:
        left = without(work, name)
    for more in ((), ("--check",)):
        said = invoke(str(work.folder), *more)
        assert said.exit_code == ConfigError.exit_code
        assert re.search(r"there is no \S+authority/ca.key, and .* is of that key", said.stderr)
        assert "restore it from a backup" in said.stderr
        assert contents(work.folder) == left


def test_a_lost_revocation_list_is_not_replaced_by_an_empty_one(work: Provisioner) -> None:
    work.revoke("d1")
    without(work, "authority/crl.pem")
    code, said = provisioned(work)
    assert (code, "which says who was revoked" in said) == (ConfigError.exit_code, True)
    (work.folder / "authority" / "crl.pem").write_bytes((work.folder / "broker" / "crl.pem").read_bytes())
    assert provisioned(work)[0] == 0
    assert work.revoked_names() == ["d1"]


def test_a_name_whose_certificate_a_full_disk_did_not_take_is_certified_later(work: Provisioner) -> None:
    (work.folder / "authority" / "issued" / "d2").mkdir()
    assert provisioned(work)[0] == 0
    work.add_device("d2")
    assert "d2" in work.authority.issued_names()


@pytest.mark.parametrize("damage", DAMAGES[1:])
def test_damaged_tokens_are_named_and_can_be_begun_anew(work: Provisioner, damage: bytes) -> None:
    work.add_token("d2")
    file = work.tokens.path
    file.write_bytes(damage * 300)
    code, said = provisioned(work)
    assert (code, "tokens.sqlite is damaged" in said) == (ConfigError.exit_code, True)
    file.unlink()
    assert invoke(str(work.folder), "--token", "d2").exit_code == 0
    assert work.tokens.is_open((work.folder / "devices" / "d2" / "token").read_text().strip(), 0)


def test_a_key_that_was_lost_gets_a_certificate_that_fits(work: Provisioner) -> None:
    for folder, stem in (("broker", "server"), ("enrolment", "server"), ("coordinator", "coordinator")):
        without(work, f"{folder}/{stem}.key")
        assert provisioned(work)[0] == 0
        at = work.folder / folder
        key = open_private_key(at / f"{stem}.key")
        assert key.public_key() == read_certificate(at / f"{stem}.crt").public_key()


def test_a_signing_key_that_is_gone_is_not_replaced_in_silence(work: Provisioner) -> None:
    folder = work.folder / "coordinator"
    pins, public = work._pins(), folder / "signing.pub"
    joined = (work.folder / "devices" / "d1" / "client.toml").read_bytes()
    without(work, "coordinator/signing.key")
    assert provisioned(work)[0] == 0  # it may be on the coordinator's machine alone
    assert work._pins() == pins
    with pytest.raises(ConfigError, match="the devices trust that key alone") as wrong:
        open_signing_key(folder)  # on the coordinator's machine
    public.unlink()
    code, said = provisioned(work)
    assert (code, "the devices trust that key alone" in said) == (ConfigError.exit_code, True)
    assert (work.folder / "devices" / "d1" / "client.toml").read_bytes() == joined
    for command in re.findall(r"`(.*?)`", wrong.value.hint):
        subprocess.run(["sh", "-c", command], check=True)  # what the hint says
    assert provisioned(work)[0] == 0
    assert work._pins() != pins


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("folder", ["coordinator", "release"])
def test_a_damaged_public_key_is_written_again_or_named_but_never_pinned(
    work: Provisioner, folder: str, damage: bytes
) -> None:
    file, joined = work.folder / folder / "signing.pub", work.folder / "devices" / "d1" / "client.toml"
    right, pinned = file.read_bytes(), joined.read_bytes()
    file.write_bytes(damage)
    assert provisioned(work)[0] == 0
    assert (file.read_bytes(), joined.read_bytes()) == (right, pinned)
    (work.folder / folder / "signing.key").unlink()
    file.write_bytes(damage)
    code, said = provisioned(work)
    assert (code, "signing.pub holds no public key" in said) == (ConfigError.exit_code, True)
    assert joined.read_bytes() == pinned


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_of_phones_are_named_or_written_again(work: Provisioner, damage: bytes) -> None:
    phone = ("--web-device", "p1", "--page", "https://page.example")
    assert invoke(str(work.folder), *phone).exit_code == 0
    passwords, link = work.folder / "broker" / "mosquitto.passwd", work.folder / "devices" / "p1" / "link.txt"
    for each in (damage, b"p1:$7$x$y$z\n", b"p1:$7$0$eA==$eA==\n"):
        passwords.write_bytes(each)
        assert provisioned(work)[0] == 0
        assert passwords.read_bytes().startswith(b"p1:$7$101$")
    link.write_bytes(damage)
    code, said = provisioned(work)
    assert (code, "link.txt holds no link" in said) == (ConfigError.exit_code, True)
    link.unlink()
    assert invoke(str(work.folder), *phone).exit_code == 0


def test_a_device_that_comes_while_the_tokens_cannot_be_read_keeps_its_own_and_the_operator_is_told(
    work: Provisioner,
) -> None:
    work.add_token("d2")
    told: list[str] = []
    before = work.tokens.path.read_bytes()
    with listening(work, told) as server:
        work.tokens.path.write_bytes(b"damaged" * 300)
        with pytest.raises(NetworkError, match="cannot enrol devices now"):
            enrolment.enrol(config_of(work, "d2", server))
        assert "a device could not enrol:" in told[-1]
        work.tokens.path.write_bytes(before)
        enrolment.enrol(config_of(work, "d2", server))
    assert (work.folder / "devices" / "d2" / "device.crt").exists()


def test_a_registrar_whose_disk_is_full_tells_its_operator(work: Provisioner, tmp_path: Path) -> None:
    told: list[str] = []
    tokens = type(work.tokens)(path=tmp_path / "no folder" / "tokens.sqlite")
    registrar = Registrar(authority=work.authority, tokens=tokens, tell=told.append)
    csr = signing_request(open_private_key(tmp_path / "a.key"), "d2", work.plan.federation).decode()
    status, answer = registrar.handle(b'{"token": "%s", "csr": %s}' % (b"A" * 43, repr(csr).replace("'", '"').encode()))
    assert (status, answer["error"]) == (503, "no_space")
    assert "unable to open database file" in told[0]


@pytest.mark.parametrize(
    "line",
    [
        'hosts = "broker.example"',  # was read as hosts of one letter each
        "hosts = [1]",
        'hosts = ["broker.example"]\nport = "8883"',
        'hosts = ["broker.example"]\nport = true',
        'hosts = ["broker.example"]\nfleet = 3',
    ],
)
def test_a_plan_that_was_edited_wrongly_is_named_before_anything_is_made(work: Provisioner, line: str) -> None:
    plan = work.folder / "federation.toml"
    plan.write_text(f'federation = "demo"\n{line}\n')
    before = contents(work.folder)
    code, said = provisioned(work)
    assert code == ConfigError.exit_code
    assert str(plan) in said
    assert contents(work.folder) == before


def test_a_plan_without_the_federations_name_asks_for_it(work: Provisioner) -> None:
    (work.folder / "federation.toml").write_text('hosts = ["broker.example"]\n')
    code, said = provisioned(work)
    assert (code, "--federation NAME" in said) == (ConfigError.exit_code, True)
