"""Tries to make a device read, fetch or allocate what it should not by way of the models that it keeps itself."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.protocol import messages
from edge_client.protocol.message_schemas import MAX_DETAIL_CHARS
from tests.support.memory_limit import refused_within
from tests.support.sample_messages import LINEAR, MODEL, PROBE

HOSTILE: list[Any] = [
    {"own": None},
    {"own": 7},
    {"own": ["main"]},
    {"own": {"own": "main"}},
    {"own": "x" * 33},
    {"own": "x" * 5_000},
    {"own": "../main"},
    {"own": "main\n"},
    {"own": "main", "init": "own"},
    {"own": "main", "init": {"own": "main"}},
    {"own": "main", "init": LINEAR},
    {"own": "main", "init": {**MODEL, "size": 1 << 50}},
    {"own": "main", "init": None},
    "own",
    "own:main",
    {},
    None,
]


def task(*models: object) -> bytes:
    fields = {"v": 1, "k": "task", "id": "x", "t": 0, "epoch": 1, **PROBE, "models": list(models), "prior": None}
    return messages.canonical_json({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize("model", HOSTILE, ids=repr)
def test_a_hostile_reference_is_refused_by_name_before_anything_is_allocated(model: object) -> None:
    code = refused_within(1 << 20, lambda: messages.read_message(task(MODEL, model), "t"))
    assert code in {"bad_field", "too_big"}


def test_seventeen_own_models_are_one_too_many() -> None:
    own = {"own": "main"}
    assert len(messages.read_message(task(*[own] * 16), "t")["models"]) == 16
    assert refused_within(1 << 20, lambda: messages.read_message(task(*[own] * 17), "t")) == "bad_field"


def test_whatever_else_a_reference_holds_is_dropped() -> None:
    model = {"own": "main", "sha256": "0" * 64, "path": "/etc/passwd", "padding": "x" * MAX_DETAIL_CHARS}
    assert messages.read_message(task(model), "t")["models"] == [{"own": "main"}]
