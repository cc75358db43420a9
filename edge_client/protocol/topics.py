"""Topics: the one place where MQTT topic strings are built and read.

A topic is the identity of a message: the broker's access list checks the device id in it, so nothing in a payload can
replace it. Every level is checked against its alphabet both when a topic is built and when one is parsed, so no name
carries a wildcard or a slash.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Literal

from edge_client.errors import Malformed

TOPIC_PREFIX = "fc/v1"
MAX_TOPIC_BYTES = 256  # AWS IoT's bound; ours have at most 135 bytes, and 7 slashes
MAX_TOPIC_NUMBER = 65_535
UPLOAD_SHARDS = 1  # one aggregator so far

RouteKind = Literal["coord", "cat", "st", "rq", "in", "t", "b"]

_FEDERATION = re.compile(r"[a-z0-9-]{1,32}")
_CID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUN = re.compile(r"[a-z0-9]{1,16}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[0-9a-f]{16}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,4}")


def _matching(pattern: re.Pattern[str], what: str, value: object) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise Malformed("bad_field", f"{what} {value!r:.80} is not of the form {pattern.pattern}")
    return value


def check_federation(value: object) -> str:
    """A federation's name, or Malformed."""
    return _matching(_FEDERATION, "federation", value)


def check_cid(value: object) -> str:
    """A device id, or Malformed. The dot of `coordinator.0` keeps coordinators out of this alphabet."""
    return _matching(_CID, "device id", value)


def check_run(value: object) -> str:
    """A run's name, or Malformed."""
    return _matching(_RUN, "run", value)


def check_sha256(value: object) -> str:
    """64 lower-case hex digits, or Malformed."""
    return _matching(_SHA256, "sha256", value)


def routing_label(sha256: str) -> str:
    """The 16 digits that route a blob's blocks. Never a key: what is stored or compared is the whole hash."""
    return check_sha256(sha256)[:16]


def client_shard(cid: str, shards: int) -> int:
    """The aggregator (0 to shards - 1) that takes all uploads of `cid`."""
    if not 1 <= shards <= MAX_TOPIC_NUMBER + 1:
        raise Malformed("bad_field", f"shards must be 1 to {MAX_TOPIC_NUMBER + 1}, got {shards}")
    return zlib.crc32(check_cid(cid).encode("ascii")) % shards


def _number(value: int) -> str:
    if not 0 <= value <= MAX_TOPIC_NUMBER:
        raise Malformed("bad_field", f"a shard or block number must be 0 to {MAX_TOPIC_NUMBER}, got {value}")
    return str(int(value))


def _read_number(text: str) -> int:
    value = int(_matching(_NUMBER, "number", text))
    if value > MAX_TOPIC_NUMBER:
        raise Malformed("bad_field", f"number {value} in a topic is above {MAX_TOPIC_NUMBER}")
    return value


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a topic says. `kind` names its row in PROTOCOL.md ("t": to one device, "b": block)."""

    kind: RouteKind
    cid: str | None = None
    label: str | None = None
    shard: int | None = None
    index: int | None = None


@dataclass(frozen=True)
class Topics:
    """All topics of one federation."""

    federation: str

    def __post_init__(self) -> None:
        check_federation(self.federation)

    def coord(self) -> str:
        """Retained record of the coordinator."""
        return self._topic("bc", "coord")

    def catalog(self) -> str:
        """Retained catalog of centers."""
        return self._topic("bc", "cat")

    def state(self, cid: str) -> str:
        """A device's retained presence, also its will."""
        return self._topic("st", check_cid(cid))

    def request(self, cid: str) -> str:
        """What a device asks of, or answers to, the coordinator."""
        return self._topic("rq", check_cid(cid))

    def upload(self, shard: int, cid: str, label: str, index: int) -> str:
        """One block from a device to the aggregator of `shard`."""
        return self._topic("in", _number(shard), check_cid(cid), _matching(_LABEL, "label", label), _number(index))

    def down(self, cid: str) -> str:
        """Control messages to one device."""
        return self._topic("dn", check_cid(cid), "t")

    def down_block(self, cid: str, label: str, index: int) -> str:
        """One block to one device."""
        return self._topic("dn", check_cid(cid), "b", _matching(_LABEL, "label", label), _number(index))

    def client_id(self, cid: str) -> str:
        """The MQTT client id of a device, stable over its life."""
        return f"{self.federation}.{check_cid(cid)}"

    def device_filters(self, cid: str) -> tuple[str, ...]:
        """What a device subscribes to: records by name, since some brokers bring no retained message for a pattern."""
        return (self.coord(), self.catalog(), self._topic("dn", check_cid(cid), "#"))

    def coordinator_filters(self, shards: int = 1) -> tuple[str, ...]:
        """What a coordinator that serves all `shards` subscribes to."""
        uploads = (self._topic("in", _number(k), "#") for k in range(shards))
        return (self._topic("st", "+"), self._topic("rq", "+"), *uploads)

    def parse(self, topic: str) -> Route:
        """Read a topic of this federation; Malformed for any other string."""
        if len(topic) > MAX_TOPIC_BYTES:
            raise Malformed("bad_field", f"topic of {len(topic)} characters, at most {MAX_TOPIC_BYTES}")
        root = f"{TOPIC_PREFIX}/{self.federation}/"
        if not topic.startswith(root):
            raise Malformed("bad_field", f"topic {topic!r:.80} is not of federation {self.federation}")
        return _route(topic, topic[len(root) :].split("/"))

    def _topic(self, *levels: str) -> str:
        return "/".join((TOPIC_PREFIX, self.federation, *levels))


def _route(topic: str, levels: list[str]) -> Route:  # noqa: PLR0911 - one line per row of the topic table
    match levels:
        case ["bc", "coord"]:
            return Route(kind="coord")
        case ["bc", "cat"]:
            return Route(kind="cat")
        case ["st", cid]:
            return Route(kind="st", cid=check_cid(cid))
        case ["rq", cid]:
            return Route(kind="rq", cid=check_cid(cid))
        case ["in", shard, cid, label, index]:
            return Route(
                kind="in",
                shard=_read_number(shard),
                cid=check_cid(cid),
                label=_matching(_LABEL, "label", label),
                index=_read_number(index),
            )
        case ["dn", cid, "t"]:
            return Route(kind="t", cid=check_cid(cid))
        case ["dn", cid, "b", label, index]:
            return Route(
                kind="b",
                cid=check_cid(cid),
                label=_matching(_LABEL, "label", label),
                index=_read_number(index),
            )
    raise Malformed("bad_field", f"topic {topic!r:.80} is none of the protocol's")
