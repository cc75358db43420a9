"""The published catalog of centers: which center is nearest to a new device, and how well a served center does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from coordinator.nearest.answer import answer_near
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.envelope import Envelope
from coordinator.runtime.presence import TokenBucket
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.nearest.router_file import read_router
from edge_client.protocol.task import ClientId, Schema

REQUESTS_PER_S, REQUESTS_BURST = 0.1, 6.0  # of each kind and device
NEWS_PER_S, NEWS_BURST = 1 / 3600, 6.0  # reports of a device that are logged: 24 a day
REPORTED = ("accuracy", "loss")  # what is kept of a device's metrics


class CatalogServer:
    """Answers `near` and `served` from the catalog that was published last."""

    def __init__(self, store: Store, sender: CoordinatorSender, downloads: BlockServer, event_log: EventLog) -> None:
        self._store, self._sender, self._downloads, self._event_log = store, sender, downloads, event_log
        self._published: tuple[Catalog, Manifest, Schema] | None = None
        self._router: tuple[str, Router] | None = None  # with the hash of its file
        self._buckets: dict[tuple[str, ClientId], TokenBucket] = {}
        self._news: dict[ClientId, TokenBucket] = {}
        self._reported: dict[ClientId, dict[str, Any]] = {}  # what each device reported last

    @property
    def catalog(self) -> Catalog | None:
        return None if self._published is None else self._published[0]

    def publish(self, catalog: Catalog, manifest: Manifest, schema: Schema) -> None:
        """Let every device fetch the catalog and its files, and say where it is."""
        self._downloads.share([manifest, *catalog.blobs()])
        self._published = (catalog, manifest, schema)
        self.publish_again()

    def publish_again(self) -> None:
        """Repeat the retained pointer; the broker may have lost it. Before there is a catalog, delete an earlier one.

        A run that goes on, or a folder begun anew, has left it: nothing that it names can be fetched.
        """
        if self._published is None:
            self._sender.delete_retained(self._sender.topics.catalog())
            return
        catalog, manifest, _ = self._published
        self._sender.publish_catalog(catalog.version, manifest)

    def on_near(self, question: Envelope) -> None:
        """Answer which center is nearest. Raises Malformed with the code of the error answer."""
        if not self._is_in_time(question):
            return
        if self._published is None:
            raise Malformed("busy", "there is no catalog yet")
        catalog, _, schema = self._published
        answer = answer_near(catalog, question.fields, schema, self._read_router(catalog))
        self._sender.send(question.cid, "near", re=question.ident, **answer)

    def on_served(self, served: Envelope) -> None:
        """Log how well a device does with the file that it was given, if that is news."""
        if not self._is_in_time(served):
            return
        center, sha256 = served.fields["center"], served.fields["sha256"]
        if self.catalog is None or center >= len(self.catalog.centers):
            raise Malformed("bad_field", "no such center")
        files = self.catalog.centers[center].files
        form = next((f for f, manifest in files.items() if manifest.sha256 == sha256), None)
        if form is None:
            raise Malformed("bad_field", "that file is not this center's")
        metrics = {name: value for name, value in served.fields["metrics"].items() if name in REPORTED}
        report = {"center": center, "format": form, "n": served.fields["n"], "metrics": metrics, "sha256": sha256}
        if self._reported.get(served.cid) == report:
            return
        news = self._news.setdefault(served.cid, TokenBucket(NEWS_PER_S, NEWS_BURST))
        if news.allow(self._sender.clock.now_s()):
            if self._event_log.note("served", device=served.cid, **report):
                self._reported[served.cid] = report
        elif news.first_refusal():
            raise Malformed("rate", "at most one new report an hour is logged, after the first six")

    def forget_all_but(self, devices: Collection[ClientId]) -> None:
        """Keep what is known of these devices alone."""
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name[1] in devices}
        self._news = {cid: bucket for cid, bucket in self._news.items() if cid in devices}
        self._reported = {cid: report for cid, report in self._reported.items() if cid in devices}

    def _is_in_time(self, request: Envelope) -> bool:
        """Whether the device's pace allows this request. The first one too many raises Malformed("rate")."""
        name = request.fields["k"], request.cid
        bucket = self._buckets.setdefault(name, TokenBucket(REQUESTS_PER_S, REQUESTS_BURST))
        if bucket.allow(self._sender.clock.now_s()):
            return True
        if bucket.first_refusal():
            raise Malformed("rate", "at most 6 a minute")
        return False

    def _read_router(self, catalog: Catalog) -> Router | None:
        """The catalog's router for new devices, read from disk once."""
        if catalog.router is None:
            return None
        sha256 = catalog.router.sha256
        if self._router is None or self._router[0] != sha256:
            self._router = (sha256, read_router(self._store.blobs.read(sha256)))
        return self._router[1]
