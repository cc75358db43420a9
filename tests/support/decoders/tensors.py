"""The decoders of tensor files: the codecs, statistics, admission, and the states that a coordinator keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordinator.rounds.update_validation import ReplySpec, decode_reply
from coordinator.storage import state_codec
from coordinator.strategies.base import State
from edge_client.protocol import codecs as compress
from edge_client.protocol import tensors
from edge_client.protocol.task import Fit, Flat, Reply
from tests.support.decoders.decoder import Decoder, anything
from tests.support.mutations import tensors_changed
from tests.support.sample_messages import SCHEMA

VECTOR = np.random.default_rng(0).standard_normal(SCHEMA.size).astype(np.float32)
N = 50


def is_a_model(_given: bytes, _valid: bytes, flat: Flat) -> None:
    assert flat.shape == (SCHEMA.size,)
    assert flat.dtype == np.float32
    assert np.isfinite(flat).all()


def counts_no_more_than_there_are(_given: bytes, _valid: bytes, reply: Reply) -> None:
    for counts in (reply.votes, reply.confusion):
        assert counts is None or (counts.min() >= 0 and counts.max() <= N)
    for numbers in (reply.losses, reply.posterior, reply.grad):
        assert numbers is None or np.isfinite(numbers).all()


def reply() -> Reply:
    return Reply(
        n=N,
        losses=np.array([0.5, 0.25]),
        votes=np.array([20, 30]),
        posterior=np.array([0.25, 0.75]),
        confusion=np.array([[[20, 5], [5, 20]], [[25, 0], [0, 25]]]),
    )


def question() -> ReplySpec:
    task = Fit(start=np.zeros(SCHEMA.size, np.float32), steps=1, lr=0.1, batch=1, seed=0)
    base = np.zeros(SCHEMA.size, np.float32)
    return ReplySpec(
        task=task, schema=SCHEMA, samples=N, codec="i8", base="zero", base_vector=base, max_update_rms=10.0
    )


def tensor_decoders() -> list[Decoder]:
    """All of them."""
    files = {
        c: compress.encode_vector(VECTOR, SCHEMA, codec=c, kind="delta", base="zero") for c in ("f32", "f16", "i8")
    }
    stats = compress.encode_stats(reply(), SCHEMA)
    state = state_codec.encode_state(
        State(centers=np.eye(2, dtype=np.float32), assignment={"d": 1}, extra={"a": np.ones(2)})
    )
    out = [
        Decoder(
            name=f"codec {codec}",
            read=lambda data, codec=codec: compress.decode_vector(data, SCHEMA, kind="delta", codec=codec),  # type: ignore[misc]
            valid=(file,),
            mutate=tensors_changed,
            check=is_a_model,
            share=3,
        )
        for codec, file in files.items()
    ]
    asked = question()
    return [
        *out,
        Decoder(
            name="tensors",
            read=tensors.unpack_tensors,
            valid=(*files.values(), stats),
            mutate=tensors_changed,
            check=_same_tensors,
            share=4,
        ),
        Decoder(
            name="statistics",
            read=lambda data: compress.decode_stats(data, SCHEMA, N),
            valid=(stats,),
            mutate=tensors_changed,
            check=counts_no_more_than_there_are,
            share=3,
        ),
        Decoder(
            name="admission",
            read=lambda data: decode_reply(asked, data, N).update,
            valid=(files["i8"],),
            mutate=tensors_changed,
            check=is_a_model,
            share=2,
        ),
        Decoder(
            name="state of a method",
            read=state_codec.decode_state,
            valid=(state,),
            mutate=tensors_changed,
            check=anything,
        ),
    ]


def _same_tensors(_given: bytes, _valid: bytes, found: tuple[dict[str, Any], tensors.TensorFileMeta]) -> None:
    arrays, meta = found
    again, meta_again = tensors.unpack_tensors(
        tensors.pack_tensors(arrays, kind=meta.kind, codec=meta.codec, schema=meta.schema, base=meta.base)
    )
    assert meta_again == meta
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in again.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in arrays.items()
    }
