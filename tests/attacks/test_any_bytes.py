"""Tries whatever damage chance finds, on every decoder: refused by name, or read as what holds, within limits.

`make fuzz` does the same with millions of cases.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.message_schemas import MESSAGE_TABLES, ROUTES
from tests.attacks.fuzz import attack, unexpected
from tests.support.decoders.decoder import Decoder
from tests.support.decoders.files import file_decoders
from tests.support.decoders.wire import program, wire_decoders
from tests.support.sample_messages import ALL

DECODERS = [*wire_decoders(), *file_decoders(program())]
NAMES = [decoder.name for decoder in DECODERS]
FIELDS = sorted({"v", "k", "id", "t", "epoch", "models", "inline"}.union(*MESSAGE_TABLES.values()))
KINDS = sorted(set[str]().union(*ROUTES.values()))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(KINDS)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=8)
    ),
    max_leaves=30,
)
NAMES_OF_FIELDS = st.sampled_from(FIELDS) | st.text(max_size=5)
MESSAGES = st.fixed_dictionaries({"v": st.just(1) | SCALARS, "k": st.sampled_from(KINDS)})
SAMPLES = st.sampled_from([{"v": 1, "k": kind, "id": "x", "t": 0} | fields for kind, fields in ALL])
ROUTE = st.none() | st.sampled_from(sorted(ROUTES))


@pytest.mark.parametrize("decoder", DECODERS, ids=NAMES)
def test_valid_bytes_are_read(decoder: Decoder) -> None:
    for valid in decoder.valid:
        decoder.check(valid, valid, decoder.read(valid))


@pytest.mark.parametrize("decoder", DECODERS, ids=NAMES)
def test_damaged_bytes_are_refused_by_name_or_read_as_what_holds_and_cost_little(decoder: Decoder) -> None:
    tally = attack(decoder, 300, seed=0)
    assert unexpected(tally) == ""
    assert sum(tally.refused.values()) > tally.accepted or decoder.name == "json"


def test_a_reader_is_found_that_takes_much_memory_each_time_and_only_that_one() -> None:
    """Memory that is taken once is that of another thread, or of what is loaded at the first use."""
    first = DECODERS[0]
    greedy = replace(first, read=lambda data: len(bytes(8 << 20)) and first.read(data))
    taken = iter([8 << 20])
    once = replace(first, read=lambda data: len(bytes(next(taken, 0))) >= 0 and first.read(data))
    assert "bytes for" in unexpected(attack(greedy, 64, seed=0))
    assert unexpected(attack(once, 64, seed=0)) == ""


@pytest.mark.parametrize("decoder", DECODERS, ids=NAMES)
@settings(max_examples=50)
@given(data=st.binary(max_size=300))
def test_any_bytes_at_all_are_refused_by_name(decoder: Decoder, data: bytes) -> None:
    with suppress(*decoder.refuses_with):
        decoder.check(data, data, decoder.read(data))


def test_any_json_is_a_valid_message_or_refused_by_name() -> None:
    """Messages with other fields, of which some hold, and any other objects."""
    held = 0

    @given(head=MESSAGES | SAMPLES, rest=st.dictionaries(NAMES_OF_FIELDS, TREES, max_size=2), route=ROUTE)
    def tried(head: dict[str, object], rest: dict[str, object], route: str | None) -> None:
        nonlocal held
        with suppress(Malformed):
            message = messages.read_message(messages.canonical_json({**head, **rest}), route)
            held += 1
            assert messages.read_message(messages.canonical_json(message), route) == message

    tried()
    assert held > 10
