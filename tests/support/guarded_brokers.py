"""Brokers of other makers with `provision`'s certificates, and with PROTOCOL.md's access list in their own words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from tests.support.brokers import (
    Daemon,
    find_program,
    rabbitmq_node,
    skip_unless_installed,
    start_epmd,
)
from tests.support.guarded_broker import FEDERATION, Guarded, guarded_broker, provision_federation
from tests.support.ports import free_port

NATS_CONF = """\
listen: 127.0.0.1:{inner}
server_name: guarded
jetstream {{ store_dir: "{folder}/store" }}
mqtt {{
  listen: 127.0.0.1:{port}
  tls {{
    cert_file: "{keys}/server.crt", key_file: "{keys}/server.key"
    ca_file: "{keys}/ca.crt", verify_and_map: true
  }}
}}
authorization {{ users = [
  {{ user: "CN={coordinator},O={federation}" }}
{devices}
] }}
"""
NATS_DEVICE = """\
  {{ user: "CN={cid},O={federation}", permissions: {{
    publish: {{ allow: ["{root}.st.{cid}", "{root}.rq.{cid}", "{root}.in.0.{cid}.*.*"] }}
    subscribe: {{ allow: ["{root}.dn.{cid}", "{root}.dn.{cid}.>", "{root}.bc.*", "$MQTT.sub.>"] }}
  }} }}"""
RABBITMQ_CONF = """\
listeners.tcp = none
mqtt.listeners.tcp = none
mqtt.listeners.ssl.default = 127.0.0.1:{port}
mqtt.allow_anonymous = false
mqtt.ssl_cert_login = true
ssl_cert_login_from = common_name
ssl_options.cacertfile = {keys}/ca.crt
ssl_options.certfile = {keys}/server.crt
ssl_options.keyfile = {keys}/server.key
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
load_definitions = {definitions}
log.console = true
log.file = false
vm_memory_high_watermark.absolute = 1GB
disk_free_limit.absolute = 1MB
"""
QUEUES = "mqtt-subscription-.*"  # of the plug-in, one for each client


@contextmanager
def guarded(name: str, folder: Path, *devices: str) -> Iterator[Guarded]:
    """A broker of this kind that admits these devices and the coordinator. Skips where it is not installed."""
    skip_unless_installed(name)
    if name == "mosquitto":
        with guarded_broker(folder, *devices) as found:
            yield found
        return
    port = free_port()
    work = provision_federation(folder / "keys", *devices, port=port)
    with contextlib.ExitStack() as stack:
        start = {"nats": _nats, "rabbitmq": _rabbitmq}[name]
        server = start(folder, work.folder / "broker", port, devices, stack)
        stack.callback(server.kill)
        server.start()
        assert server.process is not None
        found = Guarded(work, server.process)
        stack.callback(found.leave)
        yield found


def _nats(folder: Path, keys: Path, port: int, devices: Sequence[str], _: contextlib.ExitStack) -> Daemon:
    names = {"federation": FEDERATION, "root": f"fc.v1.{FEDERATION}"}
    conf = folder / "nats.conf"
    conf.write_text(
        NATS_CONF.format(
            inner=free_port(),
            folder=folder,
            port=port,
            keys=keys,
            coordinator=COORDINATOR_CLIENT_ID,
            devices="\n".join(NATS_DEVICE.format(cid=cid, **names) for cid in devices),
            federation=FEDERATION,
        )
    )
    return Daemon([str(find_program("nats-server")), "-c", str(conf)], folder / "nats.log", port)


def _rabbitmq(folder: Path, keys: Path, port: int, devices: Sequence[str], stack: contextlib.ExitStack) -> Daemon:
    definitions = folder / "definitions.json"
    definitions.write_text(json.dumps(_definitions(devices)))
    conf = RABBITMQ_CONF.format(port=port, keys=keys, definitions=definitions)
    return rabbitmq_node(folder / "node", f"guarded{port}@localhost", port, conf, start_epmd(folder, stack))


def _definitions(devices: Sequence[str]) -> dict[str, Any]:
    """Users without passwords: their certificates have their names."""
    everyone, root, host = (COORDINATOR_CLIENT_ID, *devices), rf"fc\.v1\.{FEDERATION}", {"vhost": "/"}
    both = f"^({QUEUES}|amq\\.topic)$"
    return {
        "vhosts": [{"name": "/"}],
        "users": [{"name": name, "password_hash": "", "tags": ""} for name in everyone],
        "permissions": [
            {"user": name, "configure": f"^{QUEUES}$", "write": both, "read": both, **host} for name in everyone
        ],
        "topic_permissions": [
            {
                "user": cid,
                "exchange": "amq.topic",
                "write": rf"^{root}\.((st|rq)\.{cid}|in\.0\.{cid}\.[0-9a-f]+\.[0-9]+)$",
                "read": rf"^{root}\.(bc\.(coord|cat)|dn\.{cid}\.(#|t|b\..*))$",
                **host,
            }
            for cid in devices
        ],
    }
