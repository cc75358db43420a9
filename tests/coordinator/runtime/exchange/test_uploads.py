from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.runtime.exchange.uploads import OpenUploads, UploadCredits, have_field
from coordinator.storage.store import Store
from edge_client.errors import Malformed
from edge_client.protocol.blocks import Bitmap, body_range, manifest_of, pack_block
from edge_client.transport.blobs import StagedBlob, publish_blobs

DATA = bytes(range(256)) * 80  # 5 blocks
MANIFEST = manifest_of(DATA, "delta", block=4096)
LABEL = MANIFEST.sha256[:16]
CIDS = (f"d{i}" for i in itertools.count())


def block(index: int, data: bytes = DATA) -> bytes:
    start, stop = body_range(MANIFEST, index)
    return pack_block(data[start:stop], index, MANIFEST.total)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("uploads"))
    yield store
    store.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.permutations(range(5)), st.lists(st.integers(0, 4), max_size=10))
def test_no_order_and_no_repetition_of_blocks_changes_the_blob(
    store: Store, order: list[int], repeated: list[int]
) -> None:
    uploads, cid = OpenUploads(store), next(CIDS)
    uploads.begin(cid, MANIFEST)
    whole: list[StagedBlob] = []
    for index in [*order[:-1], *(i for i in repeated if i != order[-1]), order[-1]]:
        found = uploads.take(cid, index, block(index))
        whole += [found] if found is not None else []
    assert [blob.read() for blob in whole] == [DATA]
    publish_blobs(whole)
    assert store.updates(cid).read(MANIFEST.sha256) == DATA


def test_what_was_not_announced_is_not_expected(store: Store) -> None:
    uploads = OpenUploads(store)
    assert not uploads.expects("stranger", LABEL)
    uploads.begin("known", MANIFEST)
    assert uploads.expects("known", LABEL)
    assert not uploads.expects("known", "0" * 16)
    uploads.abandon(["known"])


def test_right_blocks_that_make_another_blob_are_a_bad_hash_and_are_forgotten(store: Store) -> None:
    uploads = OpenUploads(store)
    uploads.begin("liar", MANIFEST)
    for index in range(MANIFEST.total - 1):
        uploads.take("liar", index, block(index, bytes(len(DATA))))
    last = MANIFEST.total - 1
    with pytest.raises(Malformed) as refused:
        uploads.take("liar", last, block(last, bytes(len(DATA))))
    assert refused.value.code == "bad_hash"
    assert uploads.begin("liar", MANIFEST).count == 0
    uploads.abandon(["liar"])


def test_the_sixteenth_unreadable_block_ends_an_upload_and_its_blocks_are_forgotten(store: Store) -> None:
    uploads = OpenUploads(store)
    uploads.begin("noisy", MANIFEST)
    uploads.take("noisy", 0, block(0))
    broken = block(1)[:-1] + bytes([block(1)[-1] ^ 1])
    for _ in range(15):
        assert uploads.take("noisy", 1, broken) is None
    assert uploads.expects("noisy", LABEL)
    with pytest.raises(Malformed, match=r"^bad_hash: 16 unreadable blocks"):
        uploads.take("noisy", 1, broken)
    assert not uploads.expects("noisy", LABEL)
    assert uploads.begin("noisy", MANIFEST).count == 0
    uploads.abandon(["noisy"])


def test_another_announcement_replaces_the_one_before(store: Store) -> None:
    uploads = OpenUploads(store)
    uploads.begin("d", MANIFEST)
    uploads.take("d", 0, block(0))
    other = manifest_of(DATA[::-1], "delta", block=4096)
    uploads.begin("d", other)
    assert not uploads.expects("d", LABEL)
    assert not uploads.begin("d", MANIFEST).has(0)  # one device cannot fill the disk with beginnings
    uploads.abandon(["d"])


def test_what_has_arrived_stays_when_nothing_more_is_expected(store: Store) -> None:
    uploads = OpenUploads(store)
    uploads.begin("stays", MANIFEST)
    uploads.take("stays", 0, block(0))
    uploads.end_all()
    assert not uploads.expects("stays", LABEL)
    assert uploads.begin("stays", MANIFEST).count == 1
    uploads.abandon(["stays"])


def test_have_is_left_out_when_nothing_is_here_or_it_would_not_fit() -> None:
    assert have_field(Bitmap(10)) is None
    some = Bitmap(10)
    some.add(0)
    assert have_field(some) == some.to_base64()
    fits, long = Bitmap(8 * 4_096), Bitmap(8 * 4_096 + 1)
    for bitmap in (fits, long):
        bitmap.add(0)
    assert have_field(fits) == fits.to_base64()
    assert have_field(long) is None


def test_the_blocks_of_an_open_upload_are_counted_and_those_of_another_device_are_not(store: Store) -> None:
    uploads = OpenUploads(store)
    assert (uploads.blocks("c"), uploads.sizes()) == (0, {})
    uploads.begin("c", MANIFEST)
    for _ in range(2):  # the second time it changes nothing
        uploads.take("c", 0, block(0))
        assert (uploads.blocks("c"), uploads.blocks("other")) == (1, 0)
    assert uploads.sizes() == {"c": len(DATA)}
    assert uploads.begin("c", MANIFEST).count == 1  # announced again, it goes on
    uploads.end("never began")
    uploads.abandon(["c"])
    assert (uploads.sizes(), uploads.begin("c", MANIFEST).count) == ({}, 0)
    uploads.abandon(["c"])


def held(store: Store, credits: int, budget: int) -> UploadCredits:  # noqa: A002 - the protocol's word
    """Two uploads of 20,480 bytes that began at 0 s and at 10 s, and may take 100 s while others wait."""
    found = UploadCredits(OpenUploads(store), credits, budget, turn_s=100.0)
    for cid, begun_s in (("one", 0.0), ("two", 10.0)):
        found.give(cid, MANIFEST, begun_s)
        found.uploads.begin(cid, MANIFEST)
    return found


@pytest.mark.parametrize(
    ("credits", "budget", "size", "full"),
    [
        (3, 10 * len(DATA), 1, False),
        (2, 10 * len(DATA), 1, True),
        (3, 3 * len(DATA), len(DATA), False),
        (3, 3 * len(DATA), len(DATA) + 1, True),
    ],
)
def test_there_is_a_credit_while_uploads_are_fewer_and_their_bytes_fit(
    store: Store,
    credits: int,  # noqa: A002 - the protocol's word
    budget: int,
    size: int,
    full: bool,  # noqa: FBT001 - a row
) -> None:
    found = held(store, credits, budget)
    assert found.is_full("three", size, 10.0) == full
    assert not found.is_full("one", size, 10.0)  # it has one
    found.uploads.abandon(["one", "two"])
    assert not found.is_full("three", 99 * len(DATA), 10.0)  # one may always go on


def test_an_upload_that_stood_still_for_thirty_seconds_gives_its_credit_back(store: Store) -> None:
    found = held(store, 2, 10 * len(DATA))
    assert found.is_full("three", 1, 29.9)
    assert not found.is_full("three", 1, 30.0)
    assert list(found.uploads.sizes()) == ["two"]
    found.uploads.abandon(["one", "two"])


def test_a_repeated_announcement_prolongs_nothing(store: Store) -> None:
    found = held(store, 2, 10 * len(DATA))
    found.give("one", MANIFEST, 20.0)
    assert not found.is_full("three", 1, 30.0)
    assert list(found.uploads.sizes()) == ["two"]
    found.uploads.abandon(["one", "two"])


@pytest.mark.parametrize("announced", [MANIFEST.size, 1])
def test_a_slow_upload_gives_its_credit_to_a_device_that_has_none(store: Store, announced: int) -> None:
    """Half of its bytes are worth half of 100 s after the first 30, whatever it announced at first."""
    found = held(store, 2, 10 * len(DATA))
    found.uploads.end("one")
    found.give("one", replace(MANIFEST, size=announced), 0.0)
    found.uploads.begin("one", MANIFEST)
    found.give("one", MANIFEST, 1.0)
    for time_s in (20.0, 45.0, 70.0):
        found.heard("one", len(DATA) // 6, time_s)
        found.heard("two", len(DATA), time_s)
    assert found.is_full("three", 1, 79.9)
    assert not found.is_full("three", 1, 80.1)
    assert list(found.uploads.sizes()) == ["two"]
    assert not found.is_full("one", len(DATA), 80.1)  # there is room again
    found.uploads.abandon(["one", "two"])


def test_a_slow_upload_goes_on_while_there_is_room(store: Store) -> None:
    found = held(store, 3, 10 * len(DATA))
    for time_s in (29.0, 58.0, 87.0):
        for cid in ("one", "two"):
            found.heard(cid, 1, time_s)
    assert not found.is_full("three", 1, 88.0)
    assert list(found.uploads.sizes()) == ["one", "two"]
    found.uploads.abandon(["one", "two"])
