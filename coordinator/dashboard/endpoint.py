"""The dashboard's address and tokens, from the configuration. Opens no port.

On the loopback reading needs no token; steering needs the token that the link holds after `#control=`, which a browser
sends to no server. On any other address both tokens and TLS are needed, and a configuration without them is refused.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.config import CoordinatorConfig
from edge_client.errors import ConfigError
from export.serve.listener import is_loopback

MAX_PORT = 65_535
LINK_FILE = "dashboard.url"  # in the run folder while the server runs, mode 0600: the link gives the right to steer


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An address with its tokens and its certificate. `read` None: no token is needed to read.

    `is_lasting`: the control token is the operator's own, for each start.
    """

    host: str
    port: int
    control: str = field(repr=False)
    read: str | None = field(default=None, repr=False)
    certificate: Path | None = None
    key: Path | None = None
    is_lasting: bool = False

    def link(self, port: int) -> str:
        """The address for a browser, with the right to steer. `port` is the one in use; a configured one may be 0."""
        return f"{self._address(port)}#control={self.control}"

    def link_in_logs(self, port: int) -> str:
        """The same, for what a service manager may keep for others to read: without a token that lasts."""
        if not self.is_lasting:
            return self.link(port)
        return f"{self._address(port)} (to steer, put #control= and the text of dashboard-control-token behind it)"

    def _address(self, port: int) -> str:
        scheme = "http" if self.certificate is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}/"


def dashboard_endpoint(config: CoordinatorConfig) -> Endpoint:
    """The endpoint that `dashboard` and the settings dashboard-* describe. Raises ConfigError."""
    host, port = _address(config.dashboard.address)
    read, control = (_token(path) for path in (config.dashboard.read_token, config.dashboard.control_token))
    if (config.dashboard.certificate is None) != (config.dashboard.key is None):
        raise ConfigError(
            "the dashboard's TLS needs a certificate and its key", hint="set dashboard-certificate and dashboard-key"
        )
    if not is_loopback(host):
        if read is None or control is None:
            raise ConfigError(
                f"a dashboard at {host} can be reached by others, so it needs two tokens",
                hint="openssl rand -hex 32 > read.token; the same for control.token; chmod 600 both; then set "
                "dashboard-read-token and dashboard-control-token, or listen on 127.0.0.1",
            )
        if config.dashboard.certificate is None:
            raise ConfigError(
                f"a dashboard at {host} can be reached by others, so it needs TLS",
                hint="set dashboard-certificate and dashboard-key, or listen on 127.0.0.1 behind a proxy that has them",
            )
    if read is not None and read == control:
        raise ConfigError("both tokens of the dashboard are the same", hint="who may read need not be who may steer")
    return Endpoint(
        host=host,
        port=port,
        control=control or secrets.token_urlsafe(24),
        read=read,
        certificate=config.dashboard.certificate,
        key=config.dashboard.key,
        is_lasting=control is not None,
    )


def _address(text: str) -> tuple[str, int]:
    """Parse '8080', 'host:8080' or '[::1]:8080'; port 0 is any free one."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"dashboard is {text!r}", hint="dashboard is a port, as 8080, or an address, as 0.0.0.0:8080")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    from export.serve.server import read_token

    return read_token(path)
