from __future__ import annotations

import numpy as np
import pytest

from edge_client.errors import UsageError
from edge_client.protocol import codecs
from edge_client.protocol.task import Array, Fit, Flat, Probe, Reply, Schema, TensorSpec
from emulator.simulation.codec_channel import STATISTICS_BYTES, CodecChannel, protocol_codec, reply_bytes

SCHEMA = Schema((TensorSpec(name="w", role="p", shape=(4, 9)), TensorSpec(name="b", role="p", shape=(4,))))
RNG = np.random.default_rng(0)
ZERO: Flat = np.zeros(SCHEMA.size, np.float32)


def fit(center: int | None = 0, start: Array = ZERO) -> Fit:
    return Fit(start=start, steps=1, lr=0.1, batch=8, seed=0, center=center)


def update() -> Flat:
    return RNG.standard_normal(SCHEMA.size).astype(np.float32)


def arrived(channel: CodecChannel, vector: Flat, *, round_: int, center: int | None = 0, counts: bool = True) -> Flat:
    reply, _ = channel.send("d00", fit(center), Reply(n=1, update=vector), round_)
    if counts:
        channel.mark_counted("d00")
    assert reply.update is not None
    return reply.update


def test_without_a_code_a_reply_travels_as_it_is() -> None:
    reply = Reply(n=1, update=update())
    assert CodecChannel(SCHEMA).send("d00", fit(), reply, 1) == (reply, 4 * SCHEMA.size)
    assert reply_bytes(Reply(n=1, losses=np.zeros(1))) == STATISTICS_BYTES


@pytest.mark.parametrize("codec", ["f32", "f16", "i8"])
def test_an_update_is_the_start_plus_what_the_codec_decodes_and_as_large_as_its_file(codec: str) -> None:
    start, vector = update(), update()
    data = codecs.encode_vector(vector - start, SCHEMA, codec=codec, kind="delta", base="zero")
    reply, size = CodecChannel(SCHEMA, protocol_codec(codec)).send(
        "d00", fit(start=start), Reply(n=1, update=vector), 1
    )
    np.testing.assert_array_equal(reply.update, start + codecs.decode_vector(data, SCHEMA, kind="delta"))
    assert size == len(data)


def test_with_feedback_it_sends_what_a_device_sends() -> None:
    wire, rest = CodecChannel(SCHEMA, protocol_codec("i8"), feedback=True), None
    for number in range(1, 5):
        vector = update()
        data, rest = codecs.encode_with_feedback(vector, rest, SCHEMA, codec="i8", base="zero")
        found = arrived(wire, vector, round_=number)
        np.testing.assert_array_equal(found, codecs.decode_vector(data, SCHEMA, kind="delta"))


def test_over_many_rounds_feedback_loses_less() -> None:
    vector = update()
    sums = {
        feedback: sum(arrived(wire, vector, round_=number).astype(np.float64) for number in range(1, 31))
        for feedback, wire in ((f, CodecChannel(SCHEMA, protocol_codec("i8"), feedback=f)) for f in (False, True))
    }
    errors = {feedback: np.abs(total - 30 * vector.astype(np.float64)).max() for feedback, total in sums.items()}
    assert errors[True] < errors[False] / 5  # one step of rounding instead of thirty equal ones


def test_what_was_lost_waits_for_its_center_and_for_an_update_that_counts() -> None:
    first, second = update(), update()
    plain = arrived(CodecChannel(SCHEMA, protocol_codec("i8")), second, round_=2)
    for change in ({"center": 1}, {"counts": False}):
        channel = CodecChannel(SCHEMA, protocol_codec("i8"), feedback=True)
        arrived(channel, first, round_=1, **change)
        np.testing.assert_array_equal(arrived(channel, second, round_=2), plain)


def test_a_round_that_was_sat_out_halves_it() -> None:
    first, lost = update(), []
    for number in (2, 3, 5):
        channel = CodecChannel(SCHEMA, lambda delta, schema: (np.zeros_like(delta), 1), feedback=True)
        arrived(channel, first, round_=1)
        arrived(channel, ZERO, round_=number)
        lost.append(channel._lost["d00", "0"] / first)
    np.testing.assert_allclose(np.mean(lost, axis=1), [1.0, 0.5, 0.125])


def test_a_probe_is_not_coded_and_an_unknown_codec_is_refused() -> None:
    reply = Reply(n=1, losses=np.ones(1))
    probe = Probe(models=[ZERO], want=frozenset({"loss"}), batch=8, seed=0)
    assert CodecChannel(SCHEMA, protocol_codec("i8"), feedback=True).send("d00", probe, reply, 1) == (
        reply,
        STATISTICS_BYTES,
    )
    with pytest.raises(UsageError, match="f8"):
        protocol_codec("f8")
