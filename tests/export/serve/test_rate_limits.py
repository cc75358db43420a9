"""A client gets its rate and its burst, and takes nothing from others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from export.serve.rate_limits import MAX_CLIENTS, RateLimiter


def test_a_burst_then_the_rate() -> None:
    rate = RateLimiter(10, burst=3)
    assert [rate.wait_s("a", 0.0) == 0 for _ in range(4)] == [True, True, True, False]
    assert rate.wait_s("b", 0.0) == 0
    wait_s = rate.wait_s("a", 0.0)
    assert 0 < wait_s <= 0.1
    assert rate.wait_s("a", wait_s) == 0


@given(st.floats(0.1, 100), st.floats(1, 50), st.lists(st.floats(0, 5), max_size=60))
def test_no_client_ever_gets_more_than_burst_and_rate(per_s: float, burst: float, gaps: list[float]) -> None:
    rate, now_s, got = RateLimiter(per_s, burst=burst), 0.0, 0
    for gap in gaps:
        now_s += gap
        got += rate.wait_s("a", now_s) == 0
    assert got <= burst + per_s * now_s + 1e-6  # rounding of sums


def test_zero_is_no_limit() -> None:
    rate = RateLimiter(0)
    assert all(rate.wait_s("a", 0.0) == 0 for _ in range(1_000))


def test_many_clients_fill_no_memory() -> None:
    rate = RateLimiter(1)
    for i in range(2 * MAX_CLIENTS):
        rate.wait_s(str(i), 0.0)
    assert len(rate._buckets) == MAX_CLIENTS
