"""The nearest center from a site: a bundle on any web server (docs/serve-centers.md).

index.json names a generation. Each file of the generation is checked against manifest.json, and manifest.json against
the federation's key. choose_center.py chooses; the device sends its name alone. Files are cached by their hash.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData, require_fit
from edge_client.engines.base import open_engine
from edge_client.errors import Malformed, NetworkError, UsageError
from edge_client.nearest import result as answers
from edge_client.nearest.choose_center import choose_center
from edge_client.nearest.over_mqtt import NearestOptions, personalise_and_score
from edge_client.nearest.result import NearestAnswer
from edge_client.protocol import codecs, signing, validators
from edge_client.protocol.messages import parse_json
from edge_client.protocol.nearest import bundle_fields, selection_rule
from edge_client.protocol.nearest.bundle_fields import MAX_CLASSES, MAX_MANIFEST_BYTES
from edge_client.protocol.nearest.catalog import MAX_CENTERS
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router_file import read_router
from edge_client.protocol.program import FROZEN, MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Flat
from edge_client.runtime.downloader import open_cache
from edge_client.runtime.golden_results import require_golden
from edge_client.training.learner import EngineLearner
from edge_client.transport import bounded_http
from edge_client.transport.blobs import BlobFolder
from edge_client.transport.folder_lock import lock_cache, lock_state

MAX_WAITS, MAX_WAIT_S = 60, 30  # for a server with too many requests of this address, as of a whole site
MAX_INDEX_BYTES, MAX_FILE_BYTES = 1 << 16, 1 << 30
BUSY = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}  # the second is what nginx's limits answer
_AWAY = "the server behind this proxy does not answer: try again later"
UNTRUSTED_HINT = (
    "check the address and this machine's clock; where the certificate is of an authority of your own, "
    "SSL_CERT_FILE=ca.crt in the environment names that"
)
_HINTS: Mapping[int, str] = {
    HTTPStatus.SERVICE_UNAVAILABLE: "the server is busy, or being started: try again later",
    HTTPStatus.BAD_GATEWAY: _AWAY,
    HTTPStatus.GATEWAY_TIMEOUT: _AWAY,
    HTTPStatus.UNAUTHORIZED: "the server wants a token, which this command does not send",
    HTTPStatus.MISDIRECTED_REQUEST: "the server knows itself by other names: start it with --name",
    HTTPStatus.TOO_MANY_REQUESTS: "try again later, or start the server with a higher --rate",
}


def _class_name(value: Any, name: str) -> str:  # noqa: ANN401 - see `validators.Check`
    return str(value if isinstance(value, bool) else bundle_fields.NAME_FIELD(value, name))


FILE_SCHEMA = bundle_fields.file_field(MAX_FILE_BYTES)
FILES_SCHEMA = bundle_fields.files_field(FILE_SCHEMA)
INDEX_SCHEMA = validators.record(validators.required(v=validators.integer(1, 1), generation=bundle_fields.HASH_FIELD))
MANIFEST_SCHEMA = validators.record(
    validators.required(
        v=validators.integer(1, 1),
        program=FILE_SCHEMA,
        containers=validators.list_of(FILE_SCHEMA, 0, 64),
        centers=validators.list_of(
            validators.record(validators.required(model=FILE_SCHEMA, files=FILES_SCHEMA)), 1, MAX_CENTERS
        ),
    )
    | validators.optional(
        names=validators.record(validators.optional(classes=validators.list_of(_class_name, 0, MAX_CLASSES))),
    )
    | bundle_fields.newcomer_fields(FILE_SCHEMA)
)
ManifestEntry = Mapping[str, Any]


class SiteClient:
    """Files below one address. Each is fetched once, and must have the promised hash."""

    def __init__(
        self, url: str, cache: BlobFolder, *, device: str = "", sleep: Callable[[float], None] = time.sleep
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(
                f"{url!r} is no address of a site", hint="give http(s)://host:port, or mqtt(s)://host/name"
            )
        self._base, self._cache, self._device = url.rstrip("/"), cache, device
        self._opener, self._sleep = bounded_http.build_opener(), sleep
        self.fetched = 0

    def index(self) -> str:
        """The generation that is served now, to this device."""
        asked = f"?device={urllib.parse.quote(self._device)}" if self._device else ""
        told = parse_json(self._get(f"index.json{asked}", MAX_INDEX_BYTES), MAX_INDEX_BYTES)
        return str(INDEX_SCHEMA(told, "index.json")["generation"])

    def manifest(self, generation: str) -> bytes:
        """manifest.json of a generation, whose name is its hash."""
        data = self._get(f"generations/{generation}/manifest.json", MAX_MANIFEST_BYTES)
        if hashlib.sha256(data).hexdigest() != generation:
            raise Malformed("bad_hash", f"manifest.json of generation {generation:.16} has another hash")
        return data

    def signature(self, generation: str) -> bytes:
        return self._get(f"generations/{generation}/manifest.sig", signing.MAX_SIGNATURE_BYTES)

    def file(self, generation: str, entry: ManifestEntry) -> Path:
        """A file of the generation, checked; where it is now."""
        sha256 = entry["sha256"]
        if not self._cache.has(sha256):
            if ".." in entry["path"].split("/"):
                raise Malformed("bad_bundle", f"{entry['path']!r} lies outside the bundle")
            data = self._get(f"generations/{generation}/{entry['path']}", entry["size"])
            if hashlib.sha256(data).hexdigest() != sha256:
                raise Malformed("bad_hash", f"{entry['path']} is not the file that manifest.json names")
            self._cache.put(data)
        self._cache.read(sha256)  # hashed again: what is kept may have been damaged
        return self._cache.path(sha256)

    def _get(self, path: str, limit: int) -> bytes:
        url = f"{self._base}/{path}"
        try:
            data, missing = self._answer(url, limit)
        except urllib.error.HTTPError as refused:
            refused.close()
            what = f"{url} answers {refused.code}"
            hint = _HINTS.get(refused.code, "is this a site of centers?")
            if refused.code == HTTPStatus.NOT_FOUND and path.endswith("manifest.sig"):
                what = f"this bundle is not signed: {self._base} has no manifest.sig of it"
                hint = "`fedcenters-export bundle --key --federation` signs it, --unsigned accepts it"
            raise NetworkError(what, hint=hint) from None
        except bounded_http.SlowServer as slow:
            hint = "try again where the network is better; what has arrived whole is kept"
            raise NetworkError(f"{url} is too slow: {slow}", hint=hint) from None
        except (OSError, UnicodeError) as lost:
            untrusted = isinstance(getattr(lost, "reason", lost), ssl.SSLCertVerificationError)
            hint = UNTRUSTED_HINT if untrusted else "check the address"
            raise NetworkError(f"{url} cannot be reached: {lost}", hint=hint) from None
        except http.client.IncompleteRead:
            raise _cut_off(url) from None
        except http.client.HTTPException as other:
            what = f"{url} does not speak HTTP: {type(other).__name__}"
            raise NetworkError(what, hint="check the address, its port, and whether it is http or https") from None
        if len(data) > limit:
            raise Malformed("too_big", f"{path} has more than {limit} bytes")
        if missing > 0:
            raise _cut_off(url)
        self.fetched += len(data)
        return data

    def _answer(self, url: str, limit: int) -> tuple[bytes, int]:
        """See `bounded_http.get`; after a while where the server, or a proxy before it, has too many requests."""
        for _ in range(MAX_WAITS):
            try:
                return bounded_http.get(self._opener, url, limit)
            except urllib.error.HTTPError as refused:
                if refused.code not in BUSY:
                    raise
                told = refused.headers.get("Retry-After", "")
                refused.close()
            self._sleep(min(float(told), MAX_WAIT_S) if told.isdecimal() else 1.0)
        return bounded_http.get(self._opener, url, limit)


def _cut_off(url: str) -> NetworkError:
    return NetworkError(f"{url} broke off before its end", hint="try again; what has arrived whole is kept")


@dataclass(frozen=True, kw_only=True)
class TrustedKeys:
    """The trusted public keys [32 bytes]; `unsigned`: no signature is checked."""

    trusted: Sequence[bytes] = ()
    unsigned: bool = False


class SiteCenterSource:
    """See `CenterSource`; over a generation of a site."""

    def __init__(self, site: SiteClient, keys: TrustedKeys, config: ClientConfig) -> None:
        self._site, self._config = site, config
        self._generation = site.index()
        raw = site.manifest(self._generation)
        self.signed_by = (
            None if keys.unsigned else signing.verify_bundle(raw, site.signature(self._generation), keys.trusted)
        )
        self.manifest = MANIFEST_SCHEMA(parse_json(raw, MAX_MANIFEST_BYTES), "manifest.json")
        self.program = Program.from_json(parse_json(self._read(self.manifest["program"]), MAX_PROGRAM_BYTES))
        guide, tree = self.manifest.get("guide"), self.manifest.get("tree")
        self.centers, self.abstain = len(self.manifest["centers"]), selection_rule.guessing_loss(self.program)
        self.class_names = tuple(self.manifest.get("names", {}).get("classes", ()))
        self.router = None if guide is None else read_router(self._read(guide))
        self.tree = None if tree is None else CenterTree.from_json(tree["edges"], self.centers)
        if self.router is not None and self.router.centers != self.centers:
            raise Malformed("bad_field", f"a guide to {self.router.centers} centers, the bundle has {self.centers}")
        if self.tree is not None and self.tree.splits != len(tree["splits"]):
            raise Malformed("bad_field", "the bundle's tree has another number of models than splits")

    def learner(self, *, training: bool) -> EngineLearner:
        engine, files = self._config.engine, {}
        known = {entry["sha256"]: entry for entry in self.manifest["containers"]}
        held = self.program.containers.get(engine, {})
        for name in ("evaluate", *(["step"] if training else []), *([FROZEN] if FROZEN in held else [])):
            if name not in held or held[name].sha256 not in known:
                hint = f"set --engine to one of {', '.join(self.program.containers)}"
                raise UsageError(f"the bundle has no {name} for {engine}", hint=hint)
            files[name] = self._site.file(self._generation, known[held[name].sha256])
        opened = open_engine(engine, self.program, files, threads=self._config.threads, device=self._config.device)
        if training:
            require_golden(opened, self.program)
        return EngineLearner(opened, self.program)

    def models(self, centers: Sequence[int]) -> list[Flat]:
        return [self._vector(self.manifest["centers"][k]["model"]) for k in centers]

    def start(self) -> Flat | None:
        entry = self.manifest.get("start")
        return None if entry is None else self._vector(entry)

    def split(self, number: int) -> Flat:
        return self._vector(self.manifest["tree"]["splits"][number])

    def file(self, center: int, form: str) -> tuple[Path, str]:
        """A center's ready-to-run file and its hash."""
        files = self.manifest["centers"][center]["files"]
        if form not in files:
            raise UsageError(f"center {center} has no {form} file", hint=f"it has {', '.join(sorted(files))}")
        return self._site.file(self._generation, files[form]), files[form]["sha256"]

    def _vector(self, entry: ManifestEntry) -> Flat:
        return codecs.decode_vector(self._read(entry), self.program.schema, kind="model")

    def _read(self, entry: ManifestEntry) -> bytes:
        return self._site.file(self._generation, entry).read_bytes()


def find_nearest(
    url: str, keys: TrustedKeys, config: ClientConfig, local: DeviceData, choice: NearestOptions
) -> NearestAnswer:
    """One visit to a site; everything that `nearest` says of it."""
    if not keys.trusted and not keys.unsigned:
        raise UsageError("no key is trusted", hint="give --signing-key, the federation's signing.pub, or --unsigned")
    with lock_cache(config.state), lock_state(config.state):  # two that write one file at once lose it
        return _visit(SiteClient(url, open_cache(config), device=config.device_id), keys, config, local, choice)


def _visit(
    site: SiteClient, keys: TrustedKeys, config: ClientConfig, local: DeviceData, choice: NearestOptions
) -> NearestAnswer:
    offer = SiteCenterSource(site, keys, config)
    require_fit(offer.program, local, labels=choice.labels)
    chosen = choose_center(offer, local.train, labels=choice.labels, by=choice.by)
    if chosen.center is None:
        return answers.no_center_answer(config.device_id, chosen, fetched=site.fetched, signed_by=offer.signed_by)
    path, sha256 = offer.file(chosen.center, choice.file_format)
    answer = answers.evaluate_center(
        config.device_id,
        chosen,
        path,
        local,
        file_format=choice.file_format,
        sha256=sha256,
        labels=choice.labels,
        threads=config.threads,
        program=offer.program,
        state=config.state,
        fetched=site.fetched,
        signed_by=offer.signed_by,
    )
    answer = replace(answer, class_names=local.class_names or offer.class_names)
    if choice.steps and choice.labels:
        kept = personalise_and_score(offer, chosen.center, answer.file, local, choice.steps, config)
        answer = replace(answer, personal=kept, fetched=site.fetched)
    return answer
