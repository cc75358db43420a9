"""The broker's files as text: who may read and write which topic, in Mosquitto's words and in EMQX's."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from coordinator.identity.broker_acl import emqx_acl, mosquitto_acl, mosquitto_conf

FOLDER = PurePosixPath("/etc/fedcenters")


def test_mosquitto_denies_the_revoked_first_and_gives_a_device_its_own_topics() -> None:
    lines = mosquitto_acl("demo", ["d1", "d2"]).splitlines()
    assert lines[:4] == ["user d1", "topic deny #", "user d2", "topic deny #"]
    assert [line for line in lines[4:] if not line.startswith("#")] == [
        "user coordinator.0",
        "topic readwrite fc/v1/demo/#",
        "pattern write fc/v1/demo/st/%u",
        "pattern write fc/v1/demo/rq/%u",
        "pattern write fc/v1/demo/in/0/%u/+/+",
        "pattern read fc/v1/demo/dn/%u/#",
        "pattern read fc/v1/demo/bc/+",
    ]


def test_emqx_denies_the_revoked_first_and_everything_that_no_line_allows() -> None:
    lines = emqx_acl("demo", ["d1"]).splitlines()
    assert (lines[0], lines[-1]) == ('{deny, {user, "d1"}, all, ["#"]}.', "{deny, all}.")
    writes = [f"fc/v1/demo/{topic}" for topic in ("st/${username}", "rq/${username}", "in/0/${username}/+/+")]
    assert lines[1:-1] == [
        '{allow, {user, "coordinator.0"}, all, ["fc/v1/demo/#"]}.',
        '{allow, all, {publish, [{retain, true}]}, ["fc/v1/demo/st/${username}"]}.',
        f"{{allow, all, {{publish, [{{retain, false}}]}}, {json.dumps(writes)}}}.",
        '{allow, all, subscribe, ["fc/v1/demo/dn/${username}/#", "fc/v1/demo/bc/+"]}.',
    ]


def test_browsers_have_a_listener_where_there_is_a_port_for_it() -> None:
    plain, both = (mosquitto_conf(FOLDER, port=8883, web_port=web_port).splitlines() for web_port in (0, 8884))
    assert [line for line in plain if line.startswith("listener")] == ["listener 8883"]
    assert [line for line in both if line.startswith("listener")] == ["listener 8883", "listener 8884"]
    assert "protocol websockets" in both
    assert both[: len(plain)] == plain
    files = [line.split()[1] for line in both if line.split()[0] in ("cafile", "certfile", "crlfile", "acl_file")]
    assert {str(PurePosixPath(path).parent) for path in files} == {str(FOLDER)}
