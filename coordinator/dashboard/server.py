"""The dashboard's web server: uvicorn in a thread of the coordinator's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

import uvicorn
from starlette.routing import BaseRoute

from coordinator.config import CoordinatorConfig
from coordinator.dashboard.app import RunControl, create_app
from coordinator.dashboard.endpoint import LINK_FILE, Endpoint
from coordinator.dashboard.event_hub import Hub
from coordinator.dashboard.join import join_info
from coordinator.dashboard.map_worker import MapWorker
from coordinator.dashboard.side_panels import SidePanels
from coordinator.phone.routes import phone_routes, web_broker_url
from edge_client.errors import ConfigError, NetworkError, RuntimeMissing
from edge_client.transport.blobs import write_atomically
from export.serve.listener import ConnectionSlots, open_listener
from export.serve.uvicorn_settings import uvicorn_config

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 2.0
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS = 512, 64


class DashboardServer:
    """A running dashboard; `link` opens it in a browser."""

    def __init__(self, endpoint: Endpoint, config: CoordinatorConfig, hub: Hub, control: RunControl) -> None:
        """Raises NetworkError when it cannot listen."""
        map_worker = MapWorker(
            config.folder, hub.newest, lambda run, number: hub.broadcast("map", {"run": run, "round": number})
        )
        self._hub, self._map_worker, self._file = hub, map_worker, config.folder / LINK_FILE
        phone = _phone(config)
        app = create_app(
            hub,
            control,
            read_token=endpoint.read,
            control_token=endpoint.control,
            extra_routes=phone or (),
            panels=SidePanels(config.folder, map_worker, lambda base: join_info(config, base, phone=phone is not None)),
        )
        settings = uvicorn_config(app, certificate=endpoint.certificate, key=endpoint.key)
        try:
            settings.load()
            self._socket = open_listener(
                endpoint.host,
                endpoint.port,
                what="the dashboard",
                option="--dashboard",
                slots=ConnectionSlots(total=MAX_CONNECTIONS, per_address=MAX_CONNECTIONS_PER_ADDRESS),
            )
        except OSError as wrong:
            map_worker.close()
            raise NetworkError(f"the dashboard cannot speak TLS: {wrong}", hint="is the certificate right?") from None
        except NetworkError:
            map_worker.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self.link, self.link_in_logs = endpoint.link(self.port), endpoint.link_in_logs(self.port)
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name=config.federation, daemon=True
        )
        self._thread.start()
        self._write_link()

    def close(self) -> None:
        """End every page's stream, then the server."""
        self._hub.close()
        self._map_worker.close()
        self._server.should_exit = True
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        with suppress(OSError):
            self._file.unlink()

    def _write_link(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)  # whose owner would have the new one
            write_atomically(self._file, f"{self.link}\n".encode(), private=True)


def _phone(config: CoordinatorConfig) -> Sequence[BaseRoute] | None:
    """The routes of the phone's page; None without a broker for browsers, or, with a warning, where it lacks more."""
    if not web_broker_url(config):
        return None
    try:
        return phone_routes(config)
    except (ConfigError, RuntimeMissing) as why:
        log.warning("no page for phones: %s (%s)", why.message, why.hint)
        return None
