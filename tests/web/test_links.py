"""A phone's own link on a real mosquitto with what `provision --web` wrote: it lets in one name, to its own topics."""

from __future__ import annotations

import queue
import ssl
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import paho.mqtt.client as paho
import pytest
import tomli_w
from cryptography import x509
from paho.mqtt.enums import CallbackAPIVersion
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.provision_plan import ProvisionPlan
from coordinator.identity.provisioning import WEB_NAME, Provisioner
from coordinator.identity.web_passwords import hash_password, verify_password
from edge_client.errors import ConfigError
from edge_client.transport.base import Connected, Message
from edge_client.transport.mqtt import MqttTransport
from edge_client.transport.tls import Credentials, read_certificate
from tests.support.browser import PHONE, Open
from tests.support.guarded_broker import FEDERATION, HOSTS, now, run_mosquitto
from tests.support.patience import patience
from tests.support.phone_page import served, text
from tests.support.ports import free_port

PATIENCE_S = patience(60.0)
PHONE_ID = "web-0000"
ROOT = f"fc/v1/{FEDERATION}"

THREADS = """async () => {
    const third = document.querySelector("meta[name=third-party]").content;
    const ort = await import(`/phone/${third}ort.wasm.min.mjs`);
    await ort.InferenceSession.create(new Uint8Array(8)).catch(() => {});
    return [crossOriginIsolated, ort.env.wasm.numThreads];
}"""


def provisioned(folder: Path, port: int, web_port: int) -> Provisioner:
    plan = ProvisionPlan(federation=FEDERATION, hosts=HOSTS, port=port, web_port=web_port, page="http://127.0.0.1:8080")
    work = Provisioner(folder=folder, plan=plan, now=now())
    work.add_web_device(PHONE_ID)
    work.write_infrastructure()
    return work


def link(work: Provisioner, cid: str = PHONE_ID) -> tuple[str, str]:
    """-> what is behind the '#', and the password in it."""
    fragment = urlsplit((work.folder / "devices" / cid / "link.txt").read_text().strip()).fragment
    return fragment, parse_qs(fragment)["secret"][0]


def browserlike(work: Provisioner, user: str, password: str) -> tuple[paho.Client, str]:
    """A client over WebSockets and TLS, and what the broker said to it."""
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="whatever", transport="websockets")
    client.username_pw_set(user, password)
    client.tls_set(ca_certs=str(work.folder / "broker" / "ca.crt"), cert_reqs=ssl.CERT_REQUIRED)
    said: queue.Queue[str] = queue.Queue()

    def on_connect(_client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:  # noqa: ANN401 - paho's
        said.put(str(reason))

    client.on_connect = on_connect
    client.connect("127.0.0.1", work.plan.web_port)
    client.loop_start()
    return client, said.get(timeout=PATIENCE_S)


def ended(client: paho.Client) -> None:
    client.disconnect()
    client.loop_stop()


def test_a_password_is_kept_in_mosquittos_own_form() -> None:
    line = hash_password("secret", bytes(12))
    assert line.startswith("$7$101$AAAAAAAAAAAAAAAA$")
    assert verify_password(line, "secret")
    assert not verify_password(line, "Secret")
    assert not verify_password("", "secret")


def test_links_are_made_once_kept_private_and_revoked_for_ever(tmp_path: Path) -> None:
    asked = ["provision", str(tmp_path / "k"), "--federation", "demo", "--host", "h", "--web", "2"]
    page = ["--page", "https://h:8080"]
    assert CliRunner().invoke(app, asked).exit_code == 3  # no page
    first = CliRunner().invoke(app, [*asked, *page])
    assert first.exit_code == 0, first.output
    file = tmp_path / "k" / "devices" / "web-0001" / "link.txt"
    kept, passwords = file.read_text(), (tmp_path / "k" / "broker" / "mosquitto.passwd").read_text()
    assert kept.startswith("https://h:8080/phone/#id=web-0001&secret=")
    assert kept.strip().partition("secret=")[2] not in first.output
    assert file.stat().st_mode & 0o077 == 0
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert (file.read_text(), (tmp_path / "k" / "broker" / "mosquitto.passwd").read_text()) == (kept, passwords)
    assert CliRunner().invoke(app, ["provision", str(tmp_path / "k"), "--revoke", "web-0001"]).exit_code == 0
    assert not file.exists()
    assert "web-0001" not in (tmp_path / "k" / "broker" / "mosquitto.passwd").read_text()
    assert "user web-0001\ntopic deny #" in (tmp_path / "k" / "broker" / "mosquitto.acl").read_text()
    again = Provisioner(
        folder=tmp_path / "k", plan=ProvisionPlan(federation="demo", hosts=("h",), page="https://h"), now=now()
    )
    with pytest.raises(ConfigError, match="was revoked"):
        again.add_web_device("web-0001")


def test_a_phone_and_a_certificate_never_share_a_name(tmp_path: Path) -> None:
    work = provisioned(tmp_path, 8883, 8884)
    work.add_device("pump")
    work.add_token("new")
    for name in ("pump", "new"):
        with pytest.raises(ConfigError, match="with a certificate"):
            work.add_web_device(name)
    for way in (work.add_device, work.add_token):
        with pytest.raises(ConfigError, match="is a phone"):
            way(PHONE_ID)


def test_a_public_certificate_for_browsers_is_left_alone(tmp_path: Path) -> None:
    work, other = provisioned(tmp_path / "a", 8883, 8884), provisioned(tmp_path / "b", 8883, 8884)
    assert WEB_NAME in [each.name for each in work.expiries()]
    work.renew(WEB_NAME)
    for name in ("web.crt", "web.key"):
        (work.folder / "broker" / name).write_bytes((other.folder / "broker" / name).read_bytes())
    public = (work.folder / "broker" / "web.crt").read_bytes()
    work.write_infrastructure()
    with pytest.raises(ConfigError, match="not of this authority"):
        work.renew(WEB_NAME)
    assert (work.folder / "broker" / "web.crt").read_bytes() == public
    assert WEB_NAME not in [each.name for each in work.expiries()]


def test_a_broker_that_is_dialled_by_another_name_gets_another_certificate_for_browsers_too(tmp_path: Path) -> None:
    work = provisioned(tmp_path, 8883, 8884)
    moved = Provisioner(folder=tmp_path, plan=replace(work.plan, hosts=("new.example",)), now=now())
    moved.write_infrastructure()
    names = read_certificate(tmp_path / "broker" / "web.crt").extensions
    assert [str(n.value) for n in names.get_extension_for_class(x509.SubjectAlternativeName).value] == ["new.example"]


@pytest.mark.broker
def test_the_broker_lets_a_phone_in_by_its_password_and_holds_it_to_its_own_topics(tmp_path: Path) -> None:
    work = provisioned(tmp_path, free_port(), free_port())
    _, secret = link(work)
    folder = work.folder / "coordinator"
    credentials = Credentials(
        ca=folder / "ca.crt", certificate=folder / "coordinator.crt", key=folder / "coordinator.key"
    )
    with run_mosquitto(work.folder / "broker" / "mosquitto.conf", work.plan.web_port):
        for user, password in ((PHONE_ID, "guessed"), ("coordinator.0", secret), ("", "")):
            client, said = browserlike(work, user, password)
            assert said in ("Not authorized", "Bad user name or password")
            ended(client)
        with closing(
            MqttTransport(work.plan.broker, COORDINATOR_CLIENT_ID, will=None, credentials=credentials)
        ) as coordinator:
            coordinator.connect()
            assert isinstance(coordinator.receive(PATIENCE_S), Connected)
            coordinator.subscribe(f"{ROOT}/st/+")
            phone, said = browserlike(work, PHONE_ID, secret)
            assert said == "Success"
            phone.publish(f"{ROOT}/st/other", b"forged", qos=1)
            phone.publish(f"{ROOT}/bc/coord", b"forged", qos=1, retain=True)
            phone.publish(f"{ROOT}/st/{PHONE_ID}", b"mine", qos=1)
            heard = coordinator.receive(PATIENCE_S)
            assert isinstance(heard, Message)
            assert (heard.topic, heard.payload) == (f"{ROOT}/st/{PHONE_ID}", b"mine")
            ended(phone)


@pytest.mark.broker
@pytest.mark.browser
def test_a_browser_comes_in_by_its_link_and_wipes_the_secret_from_its_address(visit: Open, tmp_path: Path) -> None:
    work = provisioned(tmp_path / "keys", free_port(), free_port())
    fragment, _ = link(work)
    config = tmp_path / "coordinator.toml"
    table = {
        "federation": FEDERATION,
        "broker": work.plan.broker,
        "web-broker": f"wss://127.0.0.1:{work.plan.web_port}",
        "folder": "run",
        "signing-folder": str(work.folder / "coordinator"),
        "formats": [],
        "model": {"name": "digits-mlp", "engines": ["onnx"]},
        "runs": [{"method": "fedavg", "num-rounds": 1}],
    }
    config.write_text(tomli_w.dumps(table))
    with run_mosquitto(work.folder / "broker" / "mosquitto.conf", work.plan.web_port), served(config) as url:
        stranger = visit(url, size=PHONE, touch=True, any_certificate=True)
        assert "a link of this phone's own is needed" in text(stranger.page, "trouble", "link")
        guesser = visit(f"{url}#id={PHONE_ID}&secret=guessed", size=PHONE, touch=True, any_certificate=True)
        assert "does not let this phone in" in text(guesser.page, "trouble", "ask for a new link")
        guesser.page.goto("about:blank")
        stranger.page.goto(f"{url}#{fragment}")  # the page is there already: only its fragment is another
        text(stranger.page, "link", "connected")
        assert stranger.page.locator("#name").inner_text() == PHONE_ID
        stranger.page.goto("about:blank")
        opened = visit(f"{url}?threads=2#{fragment}", size=PHONE, touch=True, any_certificate=True)
        text(opened.page, "link", "connected")
        assert "#" not in opened.page.url
        assert opened.page.locator("#name").inner_text() == PHONE_ID
        assert opened.page.evaluate(THREADS) == [True, 2]
        opened.page.reload()  # it knows who it is
        text(opened.page, "link", "connected")
        opened.page.goto("about:blank")
