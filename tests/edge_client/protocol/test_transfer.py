"""The pace of a download: its window, its timeouts, and that everything is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_client.protocol.blocks import Bitmap, Manifest
from edge_client.protocol.transfer import INITIAL_WINDOW, MAX_TIMEOUTS_IN_A_ROW, MAX_WINDOW, BlobPull, missing_blocks


def asked(pull: BlobPull, now_s: float = 0.0) -> list[int]:
    return [index for first, count in pull.next_request(now_s) for index in range(first, first + count)]


def test_it_begins_with_four_blocks_and_asks_again_when_half_of_them_are_there() -> None:
    pull = BlobPull(Bitmap(100))
    assert asked(pull) == [0, 1, 2, 3]
    assert asked(pull) == []
    for index, then in ((0, []), (1, [4, 5])):
        pull.bitmap.add(index)
        pull.mark_arrived(index)
        assert asked(pull) == then


def test_the_window_grows_by_one_for_each_window_that_arrives_up_to_sixteen() -> None:
    pull = BlobPull(Bitmap(1_000))
    windows = []
    for index in range(500):
        asked(pull)
        pull.bitmap.add(index)
        pull.mark_arrived(index)
        windows.append(pull.window)
    assert windows == sorted(windows)
    assert (windows[:9], windows[-1]) == ([4, 4, 4, 5, 5, 5, 5, 5, 6], 16)


def test_a_timeout_halves_the_window_and_the_next_one_waits_longer() -> None:
    pull = BlobPull(Bitmap(100))
    waits, windows = [], []
    now_s = 0.0
    while not pull.exhausted:
        asked(pull, now_s)
        windows.append(pull.window)
        due_s = pull.next_due_s()
        if due_s is None:
            break
        waits.append(due_s - now_s)
        now_s = due_s
    assert waits == [8.0, 16.0, 32.0]
    assert windows == [4, 2, 1, 1]


def test_a_window_that_a_timeout_halved_grows_after_as_many_blocks_as_it_holds() -> None:
    pull = BlobPull(Bitmap(100))
    asked(pull, 0.0)
    pull.mark_arrived(0)
    asked(pull, 8.0)
    windows = []
    for index in (1, 2, 3):
        pull.mark_arrived(index)
        windows.append(pull.window)
    assert windows == [2, 3, 3]


def test_the_block_that_was_asked_for_first_is_due_first() -> None:
    pull = BlobPull(Bitmap(100))
    asked(pull, 0.0)
    for index in (0, 1):
        pull.mark_arrived(index)
        pull.bitmap.add(index)
    assert asked(pull, 1.0) == [4, 5]
    assert pull.next_due_s() == 8.0


def test_a_single_block_in_between_forgives_the_timeouts() -> None:
    pull = BlobPull(Bitmap(100))
    asked(pull, 0.0)
    asked(pull, 8.0)
    assert pull.timeouts == 1
    pull.mark_arrived(0)
    assert pull.timeouts == 0


def test_a_lost_link_is_no_timeout() -> None:
    pull = BlobPull(Bitmap(100))
    first = asked(pull)
    pull.forget_asked()
    assert asked(pull) == first
    assert (pull.timeouts, pull.window) == (0, INITIAL_WINDOW)


@given(total=st.integers(1, 200), losses=st.lists(st.booleans(), max_size=300))
def test_every_block_is_asked_for_and_never_more_than_the_window_at_once(total: int, losses: list[bool]) -> None:
    pull, lost, now_s = BlobPull(Bitmap(total)), iter(losses), 0.0
    under_way: set[int] = set()
    while not pull.bitmap.complete:
        under_way |= set(asked(pull, now_s))
        if pull.exhausted:
            assert pull.timeouts == MAX_TIMEOUTS_IN_A_ROW
            return
        assert 0 < len(under_way) <= MAX_WINDOW
        survivors = [index for index in sorted(under_way) if not next(lost, False)]
        for index in survivors:
            pull.bitmap.add(index)
            pull.mark_arrived(index)
        if not survivors:
            now_s = pull.next_due_s() or now_s
        under_way = set() if not survivors else under_way - set(survivors)
        if under_way:
            now_s = pull.next_due_s() or now_s
            under_way = set()
    assert asked(pull, now_s + 1_000) == []


@given(total=st.integers(1, 300), have=st.sets(st.integers(0, 299)))
def test_an_upload_owes_exactly_what_the_credit_does_not_have(total: int, have: set[int]) -> None:
    manifest = Manifest(sha256="0" * 64, size=total * 4_096, block=4_096, kind="delta")
    bitmap = Bitmap(total)
    for index in have:
        if index < total:
            bitmap.add(index)
    assert list(missing_blocks(manifest, bitmap.to_base64())) == [i for i in range(total) if i not in have]
    assert list(missing_blocks(manifest, None)) == list(range(total))
