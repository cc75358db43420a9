"""The neighbours: symmetric, of one degree, connected after removals, and a function of public data."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.sum_graph import Graph, neighbour_graph, sum_parameters
from edge_client.errors import Malformed

SEED = bytes(range(32))


def parts(graph: Graph, left: set[str]) -> int:
    """Connected parts of the graph between the devices `left`."""
    count = 0
    while left:
        count, edge = count + 1, [left.pop()]
        while edge:
            new = left & set(graph[edge.pop()])
            left -= new
            edge += new
    return count


@given(
    st.sets(st.text("abcXYZ019_-", min_size=1, max_size=4), min_size=5, max_size=60),
    st.binary(min_size=32, max_size=32),
)
def test_neighbours_are_mutual_and_of_one_degree(cids: set[str], seed: bytes) -> None:
    k = sum_parameters(len(cids)).neighbours
    graph = neighbour_graph(seed, cids, k)
    assert set(graph) == cids
    assert all(len(set(near)) == k and cid not in near and list(near) == sorted(near) for cid, near in graph.items())
    assert all(cid in graph[other] for cid, near in graph.items() for other in near)
    assert graph == neighbour_graph(seed, sorted(cids, reverse=True), k)


def test_it_stays_connected_without_any_k_minus_1_devices() -> None:
    cids = [f"d{i}" for i in range(9)]
    graph = neighbour_graph(SEED, cids, 4)
    assert all(parts(graph, set(cids) - set(gone)) == 1 for gone in itertools.combinations(cids, 3))


def test_another_seed_gives_another_graph() -> None:
    cids = [f"d{i}" for i in range(40)]
    assert neighbour_graph(SEED, cids, 18) != neighbour_graph(bytes(32), cids, 18)


@pytest.mark.parametrize(("cids", "k"), [("abcde", 3), ("abcde", 0), ("abcde", 5), ("abcd", 4), ("abcda", 2), ("", 0)])
def test_a_graph_that_does_not_exist_is_refused(cids: str, k: int) -> None:
    with pytest.raises(Malformed, match="bad_field"):
        neighbour_graph(SEED, cids, k)


@pytest.mark.parametrize(
    ("devices", "degrees"),
    [(0, []), (1, []), (2, [1]), (3, [2]), (4, [2, 3]), (5, [2, 4]), (6, [2, 4, 5]), (7, [2, 4, 6])],
)
def test_there_is_a_ring_of_each_even_degree_and_the_complete_graph(devices: int, degrees: list[int]) -> None:
    found = []
    for k in range(-2, devices + 2):
        try:
            graph = neighbour_graph(SEED, "abcdefg"[:devices], k)
        except Malformed:
            continue
        found.append(k)
        assert {len(set(near) - {cid}) for cid, near in graph.items()} == {k}
        assert parts(graph, set(graph)) == 1
    assert found == degrees


def test_a_seed_of_another_size_is_refused() -> None:
    with pytest.raises(Malformed, match="31 bytes"):
        neighbour_graph(SEED[1:], "abcde", 2)
