from __future__ import annotations

import gc

import pytest

from edge_client.rare_collection import RARE, rare_collection


def test_the_collector_is_as_before_after_the_outermost_of_two() -> None:
    before = gc.get_threshold()
    with rare_collection():
        with rare_collection():
            assert gc.get_threshold() == RARE
        assert gc.get_threshold() == RARE
    assert gc.get_threshold() == before


def test_the_collector_is_as_before_after_a_failure() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collection():
        raise KeyError
    assert gc.get_threshold() == before
