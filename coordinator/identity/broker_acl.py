"""The broker's configuration and access lists, as text for Mosquitto and EMQX. Pure.

The common name of the client certificate is the user name. A topic that no line allows is refused. Topics name the
federation, never a wildcard. A revoked name has a line of its own: the revocation list refuses new connections, and the
line takes every right from a connection that is still open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePosixPath

from edge_client.protocol.topics import UPLOAD_SHARDS, check_federation

COORDINATOR_CLIENT_ID = "coordinator.0"
# A device's topics; PROTOCOL.md 14. Only presence is retained, and the coordinator hears all the others.
RETAINED_PATTERNS = ("st/{name}",)
PUBLISH_PATTERNS = (*RETAINED_PATTERNS, "rq/{name}", *(f"in/{k}/{{name}}/+/+" for k in range(UPLOAD_SHARDS)))
SUBSCRIBE_PATTERNS = ("dn/{name}/#", "bc/+")
# Only `pattern` lines hold for every user, so the topics that all devices read are such lines too.
SHARED_TOPICS_COMMENT = "# Mosquitto warns that one pattern lacks '%c' and '%u': every device may read these topics."
MOSQUITTO_CONF_TEMPLATE = """\
# Written by `fedcenters-coordinator provision`. A plain listener is not among it, on purpose.
listener {port}
cafile {folder}/ca.crt
certfile {folder}/server.crt
keyfile {folder}/server.key
crlfile {folder}/crl.pem
tls_version tlsv1.2
require_certificate true
use_identity_as_username true
use_username_as_clientid true
allow_anonymous false
acl_file {folder}/mosquitto.acl
persistence false
# Clients of fedcenters leave no session behind; one that a device leaves keeps its subscriptions no longer.
persistent_client_expiration 1h
set_tcp_nodelay true
max_inflight_messages 64
# An explicit number: 0 means unlimited in some versions and "drop everything" in others.
max_queued_messages 100000
# The largest block with its header and topic.
max_packet_size 1114112
memory_limit 1073741824
"""

WEB_LISTENER_TEMPLATE = """\
# For browsers: TLS, and a password of each device's own. Put a certificate that phones trust into web.crt and web.key.
listener {port}
protocol websockets
certfile {folder}/web.crt
keyfile {folder}/web.key
use_username_as_clientid true
password_file {folder}/mosquitto.passwd
"""


def mosquitto_conf(folder: PurePosixPath, *, port: int, web_port: int) -> str:
    """mosquitto.conf for a broker with its files in `folder`, on all addresses.

    With a `web_port` other than 0 it has a second listener, for browsers.
    """
    web = WEB_LISTENER_TEMPLATE.format(port=web_port, folder=folder) if web_port else ""
    return MOSQUITTO_CONF_TEMPLATE.format(port=port, folder=folder) + web


def mosquitto_acl(federation: str, revoked: Sequence[str]) -> str:
    """The acl_file of Mosquitto 2."""
    root = f"fc/v1/{check_federation(federation)}"
    denied = [line for name in revoked for line in (f"user {name}", "topic deny #")]
    writes = [f"pattern write {root}/{topic.format(name='%u')}" for topic in PUBLISH_PATTERNS]
    reads = [f"pattern read {root}/{topic.format(name='%u')}" for topic in SUBSCRIBE_PATTERNS]
    coordinator = [f"user {COORDINATOR_CLIENT_ID}", f"topic readwrite {root}/#"]
    return "\n".join([*denied, SHARED_TOPICS_COMMENT, *coordinator, *writes, *reads]) + "\n"


def emqx_acl(federation: str, revoked: Sequence[str]) -> str:
    """acl.conf of EMQX 5, whose listener has `peer_cert_as_username = cn` and `peer_cert_as_clientid = cn`.

    `authorization.no_match = deny` belongs to it; the last line says it again.
    """
    root = f"fc/v1/{check_federation(federation)}"
    writes, reads, retained = (
        _list(root, [topic.format(name="${username}") for topic in patterns])
        for patterns in (PUBLISH_PATTERNS, SUBSCRIBE_PATTERNS, RETAINED_PATTERNS)
    )
    lines = [f'{{deny, {{user, "{name}"}}, all, ["#"]}}.' for name in revoked]
    lines.append(f'{{allow, {{user, "{COORDINATOR_CLIENT_ID}"}}, all, ["{root}/#"]}}.')
    lines.append(f"{{allow, all, {{publish, [{{retain, true}}]}}, {retained}}}.")
    lines.append(f"{{allow, all, {{publish, [{{retain, false}}]}}, {writes}}}.")
    lines.append(f"{{allow, all, subscribe, {reads}}}.")
    return "\n".join([*lines, "{deny, all}."]) + "\n"


def _list(root: str, topics: Sequence[str]) -> str:
    return json.dumps([f"{root}/{topic}" for topic in topics])
