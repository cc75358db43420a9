"""Topics: what is built is read back, and nothing else is."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.topics import (
    MAX_TOPIC_BYTES,
    Route,
    Topics,
    check_cid,
    check_federation,
    check_run,
    client_shard,
    routing_label,
)

CIDS = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
LABELS = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
NUMBERS = st.integers(0, 65_535)
LONGEST = Topics("f" * 32)
DEMO = Topics("demo")


def all_topics(topics: Topics, cid: str, label: str, shard: int, index: int) -> dict[str, Route]:
    return {
        topics.coord(): Route(kind="coord"),
        topics.catalog(): Route(kind="cat"),
        topics.state(cid): Route(kind="st", cid=cid),
        topics.request(cid): Route(kind="rq", cid=cid),
        topics.upload(shard, cid, label, index): Route(kind="in", cid=cid, label=label, shard=shard, index=index),
        topics.down(cid): Route(kind="t", cid=cid),
        topics.down_block(cid, label, index): Route(kind="b", cid=cid, label=label, index=index),
    }


@given(CIDS, LABELS, NUMBERS, NUMBERS)
def test_every_topic_is_read_back_as_what_it_was_built_from(cid: str, label: str, shard: int, index: int) -> None:
    for topic, route in all_topics(DEMO, cid, label, shard, index).items():
        assert DEMO.parse(topic) == route


def test_the_longest_topic_stays_below_every_brokers_bounds() -> None:
    built = all_topics(LONGEST, "c" * 64, "0" * 16, 65_535, 65_535)
    assert max(len(topic) for topic in built) == 135 < MAX_TOPIC_BYTES
    assert max(topic.count("/") for topic in built) == 7


@pytest.mark.parametrize("cid", ["", "a" * 65, "+", "#", "a/b", "a b", "coordinator.0", "ä", "a\n", "a\0"])
def test_no_device_is_called_what_could_be_a_wildcard_or_a_coordinator(cid: str) -> None:
    with pytest.raises(Malformed):
        check_cid(cid)
    with pytest.raises(Malformed):
        DEMO.request(cid)


@pytest.mark.parametrize("index", ["-1", "+1", "01", "1.0", "65536", "99999999999999999999", "", "٣", "1\n"])
def test_block_numbers_in_topics_have_one_spelling(index: str) -> None:
    with pytest.raises(Malformed):
        DEMO.parse(f"fc/v1/demo/dn/dev-1/b/0123456789abcdef/{index}")


@pytest.mark.parametrize("number", [-1, 65_536])
def test_no_topic_is_built_for_a_number_out_of_range(number: int) -> None:
    with pytest.raises(Malformed):
        DEMO.upload(number, "dev-1", "0" * 16, 0)


@pytest.mark.parametrize("other", ["demo2", "dem", "omed"])
def test_a_topic_of_another_federation_is_refused(other: str) -> None:
    with pytest.raises(Malformed, match="is not of federation demo"):
        DEMO.parse(Topics(other).request("dev-1"))


@pytest.mark.parametrize("levels", ["bc", "bc/other", "st", "rq/dev-1/x", "in/0/dev-1", "dn/dev-1/c", "coord"])
def test_a_topic_that_the_protocol_does_not_have_is_refused(levels: str) -> None:
    with pytest.raises(Malformed, match=r"^bad_field: .* is none of the protocol's"):
        DEMO.parse(f"fc/v1/demo/{levels}")


def test_a_topic_of_more_than_256_characters_is_refused_unread() -> None:
    for size, says in ((256, "device id"), (257, "topic of 257 characters, at most 256")):
        with pytest.raises(Malformed, match=f"^bad_field: {says}"):
            DEMO.parse("fc/v1/demo/st/".ljust(size, "x"))


def test_the_greatest_number_of_a_topic_is_65535() -> None:
    topic = DEMO.upload(65_535, "dev-1", "0" * 16, 65_535)
    assert DEMO.parse(topic) == Route(kind="in", cid="dev-1", label="0" * 16, shard=65_535, index=65_535)


@pytest.mark.parametrize("name", ["", "Demo", "a_b", "a" * 33, "a/b", None, 7])
def test_federations_are_lower_case_and_short(name: object) -> None:
    for check in (check_federation, Topics):
        with pytest.raises(Malformed, match=r"^bad_field: "):
            check(name)  # type: ignore[arg-type]


def test_runs_are_lower_case_and_short() -> None:
    assert check_run("r1") == "r1"
    with pytest.raises(Malformed):
        check_run("R-1")


def test_filters_are_the_fewest_that_cover_a_role_with_what_is_retained_for_devices_by_name() -> None:
    assert DEMO.device_filters("dev-1") == ("fc/v1/demo/bc/coord", "fc/v1/demo/bc/cat", "fc/v1/demo/dn/dev-1/#")
    assert DEMO.coordinator_filters(2) == (
        "fc/v1/demo/st/+",
        "fc/v1/demo/rq/+",
        "fc/v1/demo/in/0/#",
        "fc/v1/demo/in/1/#",
    )
    assert DEMO.coordinator_filters() == DEMO.coordinator_filters(1)
    assert DEMO.client_id("dev-1") == "demo.dev-1"


@given(CIDS, st.integers(1, 65_536))
def test_a_device_has_one_shard(cid: str, shards: int) -> None:
    assert client_shard(cid, shards) == zlib.crc32(cid.encode()) % shards


@pytest.mark.parametrize("shards", [0, -1, 65_537])
def test_there_is_at_least_one_shard_and_no_more_than_topics_can_name(shards: int) -> None:
    with pytest.raises(Malformed):
        client_shard("dev-1", shards)


def test_a_label_is_the_first_16_digits_of_a_whole_hash() -> None:
    assert routing_label("0123456789abcdef" * 4) == "0123456789abcdef"
    with pytest.raises(Malformed):
        routing_label("e96760a87768717b")
