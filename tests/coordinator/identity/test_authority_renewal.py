"""The authority's own certificate ends too: it is renewed with its key, so that no device is locked out on the way."""

from __future__ import annotations

import datetime as dt
import json
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

from coordinator.cli import app
from coordinator.identity.certificate_authority import AUTHORITY_DAYS, open_authority
from coordinator.identity.enrolment_server import Registrar
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import Provisioner
from coordinator.identity.revocation import create_list, renew_authority
from edge_client.config import load_config
from edge_client.doctor import CheckResult, run_checks
from edge_client.transport.keys import open_private_key, signing_request
from edge_client.transport.tls import explain_failure, read_certificate
from tests.support.guarded_broker import now

PLAN = ProvisionPlan(federation="demo", hosts=("localhost",), port=1)  # where no broker is


def provisioned(folder: Path, *, days: int) -> Path:
    """A federation of a device, whose authority has so many days left; -> its folder."""
    Provisioner(folder=folder, plan=PLAN, now=now() - dt.timedelta(days=AUTHORITY_DAYS - days))
    work = Provisioner(folder=folder, plan=PLAN, now=now() - dt.timedelta(days=1))
    work.write_infrastructure()
    work.add_device("d1")
    return folder


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["provision", *arguments])


def certificate_check(keys: Path) -> CheckResult:
    config = load_config(keys / "devices" / "d1" / "client.toml", {})
    return next(check for check in run_checks(config) if check.name == "certificate")


def test_an_authority_that_ends_is_renewed_by_what_the_check_says(tmp_path: Path) -> None:
    """`--renew authority` was "authority has no certificate", and `--renew expiring` gave what ended as soon."""
    keys = provisioned(tmp_path / "keys", days=20)
    assert invoke(str(keys), "--device", "d2", "--revoke", "d2").exit_code == 0
    files = {"ca": keys / "authority" / "ca.crt"}
    files |= {name: keys / "devices" / name / "device.crt" for name in ("d1", "d2")}
    old = {name: read_certificate(path) for name, path in files.items()}
    asked = "provision --renew authority --renew expiring"
    assert asked in invoke(str(keys), "--check").stderr
    assert asked in invoke(str(keys), "--renew", "expiring").stderr
    assert invoke(str(keys), "--renew", "authority", "--renew", "expiring").exit_code == 0
    assert invoke(str(keys), "--check").exit_code == 0
    new = {name: read_certificate(path) for name, path in files.items()}
    assert new["ca"].not_valid_after_utc > old["ca"].not_valid_after_utc
    assert new["d1"].not_valid_after_utc > old["ca"].not_valid_after_utc
    for device, authority in ((old["d1"], new["ca"]), (new["d1"], old["ca"])):
        device.verify_directly_issued_by(authority)
    listed = x509.load_pem_x509_crl((keys / "broker" / "crl.pem").read_bytes())
    assert listed.next_update_utc == new["ca"].not_valid_after_utc  # a list that has ended locks every device out
    assert [entry.serial_number for entry in listed] == [old["d2"].serial_number]
    copies = [*keys.glob("*/ca.crt"), *keys.glob("devices/*/ca.crt")]
    assert {path.parent.name for path in copies} == {"authority", "broker", "coordinator", "enrolment", "d1", "d2"}
    assert {path.read_bytes() for path in copies} == {files["ca"].read_bytes()}


def test_a_renewed_authority_is_on_disk_before_it_is_copied(tmp_path: Path) -> None:
    old = open_authority(tmp_path, "demo", now() - dt.timedelta(days=1))
    create_list(old, now())
    renewed = renew_authority(old, now())
    assert open_authority(tmp_path, "demo", now()).certificate == renewed.certificate != old.certificate


def test_a_token_is_redeemed_under_the_renewed_authority_also_by_a_server_that_began_before(tmp_path: Path) -> None:
    """`enrol` gave certificates that ended with the old authority until it was started again."""
    keys = provisioned(tmp_path / "keys", days=20)
    work = Provisioner(folder=keys, plan=PLAN, now=now())
    server = Registrar(authority=work.authority, tokens=work.tokens, tell=list[str]().append)
    assert invoke(str(keys), "--renew", "authority", "--token", "d2").exit_code == 0
    token = (keys / "devices" / "d2" / "token").read_text().strip()
    asked = signing_request(open_private_key(tmp_path / "d2.key"), "d2", "demo")
    status, answer = server.handle(json.dumps({"token": token, "csr": asked.decode()}).encode())
    made = x509.load_pem_x509_certificate(answer["certificate"].encode())
    assert (status, made.not_valid_after_utc > now() + dt.timedelta(days=300)) == (200, True)


@pytest.mark.parametrize("option", ["--device", "--token"])
@pytest.mark.parametrize("name", ["authority", "expiring"])
def test_a_word_of_renew_is_no_name_of_a_device(tmp_path: Path, name: str, option: str) -> None:
    """`--renew authority` renewed the authority in the place of that device's certificate."""
    keys = provisioned(tmp_path / "keys", days=3000)
    done = invoke(str(keys), option, name)
    assert (done.exit_code, f"{name} is a word of --renew" in done.stderr) == (3, True)
    assert not (keys / "devices" / name).exists()


def test_doctor_tells_of_an_authority_that_ends_soon_or_has_ended(tmp_path: Path) -> None:
    keys = provisioned(tmp_path / "soon", days=20)
    assert certificate_check(keys).said.endswith("its authority ends in 19 days: `provision --renew authority`")
    fresh = provisioned(tmp_path / "fresh", days=3000)
    assert certificate_check(fresh).said == "valid for 363 days"
    ended = open_authority(tmp_path / "ended", "demo", now() - dt.timedelta(days=AUTHORITY_DAYS + 1))
    (fresh / "devices" / "d1" / "ca.crt").write_bytes((ended.folder / "ca.crt").read_bytes())
    found = certificate_check(fresh)
    assert (found.ok, "ca.crt expired on" in found.said) == (False, True)


def test_an_authority_that_has_ended_here_is_not_told_as_the_brokers_certificate(tmp_path: Path) -> None:
    open_authority(tmp_path / "ended", "demo", now() - dt.timedelta(days=AUTHORITY_DAYS + 1))
    open_authority(tmp_path / "valid", "demo", now())
    wrong = ssl.SSLCertVerificationError(1, "certificate verify failed")
    wrong.verify_code, wrong.verify_message = 10, "certificate has expired"  # of OpenSSL; the same for both
    said = {name: explain_failure(wrong, tmp_path / name / "ca.crt")[0] for name in ("ended", "valid")}
    assert said["ended"].startswith(f"the authority in {tmp_path / 'ended' / 'ca.crt'} is expired")
    assert said["valid"].startswith("the broker's certificate is expired")
