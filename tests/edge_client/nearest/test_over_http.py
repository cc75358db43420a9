"""A site is believed only as far as its signature and its hashes go."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import http.server
import json
import ssl
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest

from edge_client.config import ClientConfig
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError, FedcentersError, Malformed, NetworkError, UsageError
from edge_client.nearest.over_http import SiteCenterSource, SiteClient, TrustedKeys, find_nearest
from edge_client.nearest.over_mqtt import NearestOptions
from edge_client.protocol import codecs, signing
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import run_fit
from edge_client.transport import bounded_http
from edge_client.transport.blobs import BlobFolder
from edge_client.transport.folder_lock import lock_cache, lock_state
from export.bundle.bundle_contents import BundleNames, BundleSource, make_signer
from export.bundle.writer import BundleOptions, write_bundle
from export.compiler.program import vector_of
from tests.support import softmax_program
from tests.support.programs import compiled, model

PRIVATE = bytes(range(32))
RAW = {
    "other": b"\x15\x03\x01\r\n\r\n",
    "short": b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"v": 1,',
    "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc",
    "guarded": b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
    "behind": b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
}
DRIPS = {  # the beginning of an answer, and what then comes for ever
    "head": (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"a"),
    "parts": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
}
BUSY = {"busy": 429, "limited": 503}  # the second is nginx's, where `limit_req_status` does not say otherwise
KEYS = TrustedKeys(trusted=(signing.public_key(PRIVATE),))


class StaticSiteHandler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; /away leads elsewhere, those of BUSY are free at the third request, others answer as named."""

    asked: ClassVar[Counter[str]] = Counter()
    never: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        kind, _, rest = self.path.strip("/").partition("/")
        self.asked[self.path] += 1
        if kind in DRIPS:
            with contextlib.suppress(OSError):  # the device hangs up
                self.wfile.write(DRIPS[kind][0])
                while not self.never.wait(0.002):
                    self.wfile.write(DRIPS[kind][1])
        elif kind in RAW:
            self.wfile.write(RAW[kind])
        elif kind in BUSY and self.asked[self.path] % 3:
            self.send_response(BUSY[kind])
            self.send_header("Retry-After", "7")
            self.end_headers()
        elif kind in BUSY:
            self.path = f"/{rest}"
            super().do_GET()
        elif self.path.startswith("/away/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/away"))
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class StaticSite:
    """A static site on this machine, and what a device keeps."""

    def __init__(self, folder: Path, url: str) -> None:
        self.root, self.url, self.state = folder / "site", url, folder / "state"

    def publish(self, *, sign: bool = True, **changes: Any) -> Path:  # noqa: ANN401 - of the manifest
        """A generation of two centers; -> its folder."""
        files = {
            "program/program.json": canonical_json(softmax_program.program().to_json()),
            "model": codecs.encode_vector(
                np.zeros(softmax_program.schema().size), softmax_program.schema(), codec="f32", kind="model"
            ),
        }
        entries = {
            name: {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            for name, data in files.items()
        }
        center = {"model": entries["model"], "files": {}}
        manifest: Mapping[str, Any] = {
            "v": 1,
            "program": entries["program/program.json"],
            "containers": [],
            "centers": [center, center],
            **changes,
        }
        raw = json.dumps(manifest).encode()
        name = hashlib.sha256(raw).hexdigest()
        folder = self.root / "generations" / name
        for path, data in {**files, "manifest.json": raw}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        if sign:
            (folder / "manifest.sig").write_text(make_signer(PRIVATE, "home")(raw))
        (self.root / "index.json").write_text(json.dumps({"v": 1, "generation": name}))
        return folder

    def offer(self, keys: TrustedKeys = KEYS, url: str = "") -> SiteCenterSource:
        return SiteCenterSource(SiteClient(url or self.url, BlobFolder(self.state / "cache")), keys, self.config())

    def config(self) -> ClientConfig:
        return ClientConfig(
            federation="site", device_id="d", broker="", data=self.state, state=self.state, signing_keys=()
        )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StaticSite]:
    (tmp_path / "site").mkdir()
    handler = functools.partial(StaticSiteHandler, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield StaticSite(tmp_path, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_a_center_is_evaluated_and_trained_over_the_base_of_its_bundle(place: StaticSite) -> None:
    made, known = compiled("frozen-body", engines=("onnx", "pt2")), model("frozen-body")
    start = vector_of(known.module, made.program.schema)
    put_bundle(place, BundleSource(program=made.program, files=made.files, centers=[start], cards=[{}]))
    learner = place.offer().learner(training=True)
    rng = np.random.default_rng(0)
    data = Dataset(rng.standard_normal((6, *known.input)).astype(np.float32), rng.integers(3, size=6))
    before = learner.evaluate([start], data, batch=6)[0].mean()
    trained = run_fit(learner, Fit(start=start, steps=20, lr=0.05, batch=6, seed=0), data).vector
    assert learner.evaluate([trained], data, batch=6)[0].mean() < before


def put_bundle(place: StaticSite, source: BundleSource, *formats: str) -> None:
    write_bundle(place.root / "new", replace(source, sign=make_signer(PRIVATE, "home")), BundleOptions(formats=formats))
    name = hashlib.sha256((place.root / "new" / "manifest.json").read_bytes()).hexdigest()
    (place.root / "generations").mkdir()
    (place.root / "new").rename(place.root / "generations" / name)
    (place.root / "index.json").write_text(json.dumps({"v": 1, "generation": name}))


def test_predictions_have_the_names_of_the_fleet_unless_the_device_has_its_own(place: StaticSite) -> None:
    made, known = compiled("frozen-body", engines=("onnx", "pt2")), model("frozen-body")
    start, names = vector_of(known.module, made.program.schema), BundleNames(classes=("cat", "dog", True))
    put_bundle(
        place,
        BundleSource(program=made.program, files=made.files, centers=[start], cards=[{}], names=names),
        "onnx",
    )
    x = np.random.default_rng(0).standard_normal((6, *known.input)).astype(np.float32)
    blank = Dataset(x, np.zeros(6, np.int64))
    y = place.offer().learner(training=False).evaluate([start], blank, batch=6)[1][0].argmax(axis=1)
    local = DeviceData(train=Dataset(x, y))
    answer = find_nearest(place.url, KEYS, place.config(), local, NearestOptions(file_format="onnx"))
    assert answer.class_names == ("cat", "dog", "True")
    assert "class " not in answer.in_words()
    own = replace(local, class_names=("Katze", "Hund", "Maus"))
    answer = find_nearest(place.url, KEYS, place.config(), own, NearestOptions(file_format="onnx"))
    assert answer.class_names == own.class_names


def test_a_signed_site_is_read_and_each_file_fetched_once(place: StaticSite) -> None:
    place.publish()
    offer = place.offer()
    assert (offer.signed_by, offer.centers, offer.router) == ("home", 2, None)
    assert [len(v) for v in offer.models([0, 1])] == [softmax_program.schema().size] * 2
    site = SiteClient(place.url, BlobFolder(place.state / "cache"))
    again = SiteCenterSource(site, KEYS, place.config())
    before = site.fetched
    again.models([0, 1])
    assert site.fetched == before


def test_a_second_visit_with_one_state_folder_begins_when_the_first_is_over(
    place: StaticSite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The two wrote their files under one name beside the places, and ended with FileNotFoundError."""
    place.publish()
    local = DeviceData(train=Dataset(np.zeros((6, 3), np.float32), np.zeros(6, np.int64)))
    begun, lock = threading.Event(), fcntl.flock  # a second lock waits
    index = f"/index.json?device={place.config().device_id}"
    before = StaticSiteHandler.asked[index]

    def visit() -> None:
        with contextlib.suppress(FedcentersError):  # there are no containers
            find_nearest(place.url, KEYS, place.config(), local, NearestOptions(file_format="onnx"))
        begun.set()

    def told_lock(file: int, how: int) -> None:
        if not how & fcntl.LOCK_NB:
            begun.set()
        lock(file, how)

    second = threading.Thread(target=visit)
    with lock_cache(place.state):
        monkeypatch.setattr(fcntl, "flock", told_lock)
        second.start()
        begun.wait()
        assert StaticSiteHandler.asked[index] == before
        assert "is in use by another nearest: waiting for its end" in caplog.text
    second.join()
    assert StaticSiteHandler.asked[index] == before + 1


def test_no_visit_shares_its_cache_with_a_client_that_runs(place: StaticSite) -> None:
    """Each removed what the other had just fetched, and one of two that wrote center-0.onnx at once failed."""
    local = DeviceData(train=Dataset(np.zeros((6, 3), np.float32), np.zeros(6, np.int64)))
    with lock_state(place.state), pytest.raises(ConfigError, match="in use by another client") as told:
        find_nearest(place.url, KEYS, place.config(), local, NearestOptions(file_format="onnx"))
    assert told.value.hint.endswith("name another --state to visit a site")


def test_a_signature_of_an_untrusted_key_is_refused(place: StaticSite) -> None:
    place.publish()
    with pytest.raises(Malformed, match="not trusted"):
        place.offer(TrustedKeys(trusted=(bytes(32),)))
    with pytest.raises(UsageError, match="no key is trusted"):
        find_nearest(place.url, TrustedKeys(), place.config(), None, None)  # type: ignore[arg-type]  # refused before they are looked at
    place.publish(sign=False, model="other")
    with pytest.raises(NetworkError, match="this bundle is not signed"):
        place.offer()
    assert place.offer(TrustedKeys(unsigned=True)).signed_by is None


def test_samples_of_another_shape_are_a_matter_of_the_data(place: StaticSite) -> None:
    place.publish()
    local = DeviceData(train=Dataset(np.ones((4, 7)), np.zeros(4, np.int64)))
    with pytest.raises(ConfigError, match=r"^x has samples of shape \[7\], the program reads \[5\]: save x"):
        find_nearest(place.url, KEYS, place.config(), local, NearestOptions(file_format="onnx"))


def test_a_changed_file_is_refused(place: StaticSite) -> None:
    folder = place.publish()
    (folder / "model").write_bytes((folder / "model").read_bytes()[:-1] + b"\1")
    with pytest.raises(Malformed, match="bad_hash"):
        place.offer().models([0])
    (folder / "manifest.json").write_bytes(b"{}")
    with pytest.raises(Malformed, match="another hash"):
        place.offer()


def test_a_file_is_read_no_further_than_its_size(place: StaticSite) -> None:
    folder = place.publish()
    (folder / "model").write_bytes(bytes(1 << 20))
    with pytest.raises(Malformed, match="too_big"):
        place.offer().models([0])


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"centers": []},
        {"guide": {"path": "../x", "sha256": "0" * 64, "size": 1}},
        {"guide": {"path": "x", "sha256": "0" * 64, "size": 1 << 40}},
        {"tree": {"edges": [[0, -1], [0, -2]], "splits": []}},
        {"tree": {"edges": [[0, -1], [0, -1]], "splits": [{"path": "x", "sha256": "0" * 64, "size": 1}]}},
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused_although_it_is_signed(
    place: StaticSite, changes: dict[str, Any]
) -> None:
    place.publish(**changes)
    with pytest.raises(Malformed):
        place.offer()


def test_a_redirection_is_not_followed(place: StaticSite) -> None:
    place.publish()
    with pytest.raises(NetworkError, match="302"):
        place.offer(url=f"{place.url}/away")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("other", "does not speak HTTP"),
        ("short", "broke off before its end"),
        ("chunk", "broke off before its end"),
        ("guarded", "answers 401"),
        ("behind", "answers 502"),
        ("größe", "cannot be reached"),  # no path of HTTP
    ],
    ids=["other", "short", "chunk", "guarded", "behind", "letters"],
)
def test_an_answer_that_is_none_is_a_fault_of_the_network(place: StaticSite, kind: str, told: str) -> None:
    with pytest.raises(NetworkError, match=told) as refused:
        place.offer(url=f"{place.url}/{kind}")
    assert kind != "guarded" or "token" in str(refused.value.hint)
    assert kind != "behind" or "behind this proxy" in str(refused.value.hint)


@pytest.mark.parametrize("kind", DRIPS)
def test_a_site_that_sends_a_byte_now_and_then_holds_no_device(
    place: StaticSite, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "PATIENCE_S", 0.2)
    with pytest.raises(NetworkError, match=r"/index.json is too slow: \d+ bytes in 0 s") as wrong:
        SiteClient(f"{place.url}/{kind}", BlobFolder(place.state)).index()
    assert "try again" in wrong.value.hint


def test_a_slow_transfer_goes_on_while_enough_of_it_comes(place: StaticSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "PATIENCE_S", 0.2)
    monkeypatch.setattr(bounded_http, "PART_BYTES", 1)
    monkeypatch.setattr(bounded_http, "LEAST_BYTES_PER_S", 1)
    with pytest.raises(Malformed, match="more than 300 bytes"):
        SiteClient(f"{place.url}/body", BlobFolder(place.state))._get("index.json", 300)


@pytest.mark.parametrize("kind", BUSY)
def test_a_site_with_too_many_requests_is_asked_again_when_it_says(place: StaticSite, kind: str) -> None:
    place.publish()
    waits: list[float] = []
    site = SiteClient(f"{place.url}/{kind}", BlobFolder(place.state / "cache"), sleep=waits.append)
    assert len(SiteCenterSource(site, KEYS, place.config()).models([0, 1])) == 2
    assert waits == [7.0] * 10  # five files, two refusals each


@pytest.mark.parametrize("url", ["ftp://host", "http://", "file:///etc/passwd", "http://host/?x=1"])
def test_what_is_no_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no address"):
        SiteClient(url, BlobFolder(tmp_path))


def test_a_certificate_of_an_authority_of_ones_own_is_told_with_the_variable_that_names_it(
    place: StaticSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSL: CERTIFICATE_VERIFY_FAILED` had the hint to check the address."""

    def untrusted(*_: object) -> NoReturn:
        raise urllib.error.URLError(ssl.SSLCertVerificationError("self-signed certificate"))

    monkeypatch.setattr(bounded_http, "get", untrusted)
    with pytest.raises(NetworkError) as refused:
        place.offer()
    assert "SSL_CERT_FILE=ca.crt" in str(refused.value.hint)
