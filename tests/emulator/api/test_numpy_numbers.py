"""Numbers of numpy as settings and options, as loops over `np.arange` give them."""

from __future__ import annotations

from abc import ABC
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

import fedcenters as fc


def test_a_run_with_numbers_of_numpy_is_the_one_with_those_of_python(tmp_path: Path) -> None:
    """The run ended in a TypeError when its first checkpoint was written."""
    fleet = fc.fleets.digits(devices=4)
    plain: dict[str, Any] = {"fleet": fleet, "rounds": 2, "seed": 1, "out": tmp_path, "name": "mine"}
    server = fc.ServerOptions(server_momentum=0.5)
    first = fc.simulate(fc.FeSEM(2, local_steps=2, learning_rate=0.25, server=server), **plain)
    same = {**plain, "rounds": np.int64(3), "seed": np.int32(1), "resume": True, "evaluate_every": np.int64(1)}
    server = fc.ServerOptions(server_momentum=np.float32(0.5))  # type: ignore[arg-type]
    method = fc.FeSEM(np.int64(2), local_steps=np.int8(2), learning_rate=np.float32(0.25), server=server)  # type: ignore[arg-type]
    again = fc.simulate(method, **same)
    assert again.folder == first.folder
    assert len(again.history) == 3
    assert repr(method) == "FeSEM(2, local_steps=2, learning_rate=0.25, server=ServerOptions(server_momentum=0.5))"


def test_seeds_and_numbers_of_centers_may_be_those_of_numpy() -> None:
    fleet = fc.fleets.digits(devices=4)
    counts = fc.choose_k(fc.FeSEM(local_steps=1), fleet=fleet, ks=np.arange(1, 3), rounds=np.int64(1), seed=np.int64(3))  # type: ignore[arg-type]
    assert list(counts.table["clusters"]) == [1, 2]
    for seeds in (np.arange(2), np.int64(2)):
        found = fc.compare([fc.FedAvg(local_steps=1)], fleet=fleet, seeds=seeds, rounds=1)  # type: ignore[arg-type]
        assert sorted(found.results["FedAvg(local_steps=1)"]) == [0, 1]


def test_a_method_shows_its_own_settings_and_may_have_other_bases() -> None:
    class Plain(fc.FedAvg, ABC):
        pass

    assert {"clusters", "lam", "local_steps"} <= signature(fc.FeSEM).parameters.keys()
    assert Plain(local_steps=np.int64(3)) == Plain(local_steps=3)  # type: ignore[arg-type]
