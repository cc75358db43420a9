"""The limits of PROTOCOL.md, sections 7 and 21: the least and the greatest value of each field, and nothing beyond.

And fields of a sum that contradict each other.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.messages import read_message
from tests.support.sample_messages import DOWN, FIT, MODEL, NEAR_ANSWER, PROBE, TASK, UP
from tests.support.sum_tasks import refused, task_message

U32, COUNT = 2**32 - 1, 2**53 - 1
SCALE = {"bits": 20, "devices": 9, "clip": 1.0, "noise": 0}
JOB = {name: value for name, value in FIT.items() if name not in {*TASK, "reply", "center"}} | {"job": "fit"}
POINTS = manifest_of(b"points", "points").to_json()
SUM: dict[str, Any] = {
    **TASK,
    "job": "sum",
    "stage": "add",
    "message": manifest_of(b"sum", "sum").to_json(),
    "work": JOB
    | {"sum": {"part": "add", "choose": "loss", "centers": [MODEL], "open": [0], "share": 0.5, "scale": SCALE}},
    "reply": FIT["reply"],
}
SUM_OF_PROBE = SUM | {
    "work": {name: PROBE[name] for name in ("want", "batch", "seed")}
    | {"job": "probe", "models": [MODEL] * 16, "sum": {"served": "center", "usual": 0, "scale": SCALE}}
}
SGD: dict[str, Any] = {name: value for name, value in FIT.items() if name != "momentum"} | {
    "optimiser": {"name": "sgd", "momentum": 0.5, "nesterov": False, "weight_decay": 0, "clip_norm": 0}
}
ADAM = SGD | {"optimiser": {"name": "adam", "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0, "clip_norm": 0}}
MESSAGES: dict[str, dict[str, Any]] = {
    **UP,
    **{kind: {"epoch": 3, **fields} for kind, fields in DOWN.items()},
    "probe": {"epoch": 3, **PROBE},
    "near-answer": {"epoch": 3, **NEAR_ANSWER},
    "sum": {"epoch": 3, **SUM},
    "sum of a probe": {"epoch": 3, **SUM_OF_PROBE},
    "prekeys": {"epoch": 3, **{k: v for k, v in SUM.items() if k not in ("message", "work")}, "stage": "prekeys"},
    "sgd": {"epoch": 3, **SGD},
    "adam": {"epoch": 3, **ADAM},
}
KINDS = dict.fromkeys(("probe", "sum", "sum of a probe", "prekeys", "sgd", "adam"), "task") | {"near-answer": "near"}


def is_read(message: str, path: str, value: object) -> bool:
    """Whether the message is read with that value at the path; another refusal than of the field is an error."""
    fields = copy.deepcopy(MESSAGES[message])
    *inner, last = path.split(".")
    place: Any = fields
    for name in inner:
        place = place[int(name)] if name.isdecimal() else place.setdefault(name, {})
    place[int(last) if last.isdecimal() else last] = value
    try:
        read_message(json.dumps({"v": 1, "k": KINDS.get(message, message), "id": "x-1", "t": 0} | fields).encode())
    except Malformed as refused:
        if refused.code not in ("bad_field", "bad_json"):  # no JSON of this protocol has integers above 2^53 - 1
            raise
        return False
    return True


INTEGERS = [
    *((kind, "epoch", 0, COUNT) for kind in ("coord", "cat", "task", "stop", "go", "ack", "err")),
    *((kind, field, 0, U32) for kind in ("task", "stop", "rdy", "ack", "nack") for field in ("round", "exchange")),
    *((kind, "t", 0, COUNT) for kind in ("st", "rebirth")),
    ("coord", "proto.0", 1, 255),
    ("coord", "spread_ms", 0, COUNT),
    ("coord", "window", 1, 16),
    ("coord", "link", 0, COUNT),
    ("coord", "state.here", 0, COUNT),
    ("coord", "state.needed", 0, COUNT),
    ("coord", "state.round", 0, U32),
    ("coord", "state.of", 0, U32),
    ("cat", "ver", 0, COUNT),
    ("task", "left_ms", 0, COUNT),
    ("task", "center", 0, 1_023),
    ("task", "reply.max_size", 1, 1 << 32),
    ("task", "steps", 1, 1_000_000),
    ("task", "batch", 1, 65_536),
    ("task", "seed", 0, COUNT),
    ("probe", "batch", 1, 65_536),
    ("probe", "seed", 0, COUNT),
    ("probe", "limit", 1, 2**31),
    ("go", "shard", 0, 65_535),
    ("go", "window", 1, 16),
    *((kind, "retry_ms", 0, COUNT) for kind in ("ack", "err", "nack")),
    *((kind, "attempt", 0, U32) for kind in ("ack", "rdy")),
    ("near-answer", "center", 0, 1_023),
    ("near-answer", "alternatives.0.center", 0, 1_023),
    ("st", "bd", 0, U32),
    ("st", "caps.n", 0, 2**31),
    ("st", "caps.ram", 0, COUNT),
    ("st", "caps.disk", 0, COUNT),
    ("st", "caps.window", 1, 16),
    ("get", "mark", 0, 65_535),
    ("rdy", "n", 1, 2**31),
    ("near", "n", 1, 2**31),
    ("served", "center", 0, 1_023),
    ("served", "n", 1, 2**31),
    ("prekeys", "after", 0, COUNT),
    ("sum", "work.steps", 1, 1_000_000),
    ("sum", "work.sum.scale.bits", 16, 32),
    ("sum", "work.sum.scale.devices", 1, 100_000),
    ("sum", "work.sum.group", 0, 15),
    ("sum", "work.sum.repeats", 1, 1_000_000),
    ("sum of a probe", "work.sum.usual", 0, 15),
    ("sum of a probe", "work.sum.scale.bits", 16, 32),
]


@pytest.mark.parametrize(("message", "path", "least", "greatest"), INTEGERS)
def test_an_integer_is_read_from_its_least_to_its_greatest_and_no_further(
    message: str, path: str, least: int, greatest: int
) -> None:
    read = [is_read(message, path, value) for value in (least - 1, least, greatest, greatest + 1)]
    assert read == [False, True, True, False]


NUMBERS = [  # too small, the least, the greatest, too great
    ("task", "lr", -1e-9, 0, 1e300, None),
    ("task", "momentum", -1e-9, 0, 1e300, None),
    ("task", "mu", -1e-9, 0, 1e300, None),
    ("sgd", "optimiser.momentum", -1e-9, 0, 1, 1.000001),
    ("sgd", "optimiser.weight_decay", -1e-9, 0, 1e300, None),
    ("sgd", "optimiser.clip_norm", -1e-9, 0, 1e300, None),
    ("adam", "optimiser.beta1", -1e-9, 0, 0.999999, 0.9999991),
    ("adam", "optimiser.beta2", -1e-9, 0, 0.999999, 0.9999991),
    ("adam", "optimiser.eps", 9e-17, 1e-16, 1, 1.000001),
    ("probe", "prior.0", -1e-9, 0, 1e300, None),
    ("probe", "label_totals", [[-1e-9], None, None, None], [[0], None, None, None], [[1e300], None, None, None], None),
    ("rdy", "seconds", -1e-9, 0, 1e300, None),
    ("rdy", "metrics.loss", None, -1e300, 1e300, None),
    ("near-answer", "distance", None, -1e300, 1e300, None),
    ("near-answer", "alternatives.0.distance", None, -1e300, 1e300, None),
    ("sum", "work.sum.share", -1e-9, 0, 1, 1.000001),
    ("sum", "work.sum.scale.clip", 0, 5e-324, 1e300, None),
    ("sum", "work.sum.scale.noise", -1e-9, 0, 1_000_000, 1_000_000.1),
    ("sum", "work.sum.hysteresis", -1e-9, 0, 1e300, None),
    ("sum", "work.sum.sigma", -1e-9, 0, 1e300, None),
    ("sum", "work.sum.move", -1e-9, 0, 1e300, None),
]


@pytest.mark.parametrize(("message", "path", "small", "least", "greatest", "great"), NUMBERS)
def test_a_number_is_read_from_its_least_to_its_greatest_and_no_further(
    message: str, path: str, small: object, least: object, greatest: object, great: object
) -> None:
    assert [is_read(message, path, value) for value in (least, greatest)] == [True, True]
    assert [is_read(message, path, value) for value in (small, great) if value is not None] == [False] * (
        (small is not None) + (great is not None)
    )


LENGTHS = [  # an item, the fewest and the most of them; a text's items are its characters
    ("coord", "proto", [1], 1, 16),
    ("coord", "src", ["mqtt"], 0, 8),
    ("coord", "boot", "0", 16, 16),
    ("coord", "key", "0", 16, 16),
    ("coord", "sig", "0", 128, 128),
    ("coord", "state.name", "x", 0, 64),
    ("task", "slot", "s", 1, 32),
    ("probe", "want", ["loss"], 1, None),  # none twice
    ("stop", "why", "x", 0, 200),
    ("err", "detail", "x", 0, 200),
    ("ack", "detail", "x", 0, 200),
    ("nack", "detail", "x", 0, 200),
    ("nack", "re", "x", 1, 36),
    ("go", "re", "x", 1, 36),
    ("near-answer", "alternatives", [{"center": 0, "distance": 1}], 0, 8),
    ("st", "sw", "x", 0, 64),
    ("st", "caps.engine", "x", 1, 16),
    ("st", "caps.runtime", "x", 1, 64),
    ("st", "caps.codecs", ["f32"], 0, 16),
    ("st", "caps.refused", [{"engine": "onnx", "runtime": "onnxruntime 1.20", "difference": 0.5}], 0, 8),
    ("get", "at", [[0, 1]], 1, 16),
    ("near", "centers", [0], 1, 16),
    ("sum", "work.sum.centers", [MODEL], 1, 16),
    ("sum", "work.sum.open", [0], 1, None),  # rising
    ("sum", "work.sum.compare", [[0, 9]], 1, 64),
    ("sum", "work.sum.points_open", [1], 1, 256),
]


@pytest.mark.parametrize(("message", "path", "item", "fewest", "most"), LENGTHS)
def test_a_list_or_a_text_is_read_from_its_shortest_to_its_longest_and_no_longer(
    message: str, path: str, item: str | list[object], fewest: int, most: int | None
) -> None:
    assert is_read(message, path, item * fewest)
    if fewest:
        assert not is_read(message, path, item * (fewest - 1))
    if most is not None:
        assert is_read(message, path, item * most)
        assert not is_read(message, path, item * (most + 1))


def test_metrics_are_sixteen_finite_numbers_at_most_with_names_of_at_most_64_characters() -> None:
    assert is_read("rdy", "metrics", {f"loss/{i}": 0 for i in range(16)})
    assert not is_read("rdy", "metrics", {f"loss/{i}": 0 for i in range(17)})
    assert is_read("rdy", "metrics", {"x" * 64: 0})
    assert not is_read("rdy", "metrics", {"x" * 65: 0})


RUNS = [[[65_535, 1]], [[65_520, 16]], [[0, 8], [8, 8]]]
NO_RUNS = [[[65_535, 2]], [[65_521, 16]], [[0, 8], [8, 9]], [[0, 0]], [[0, 1], [3, 0]], [[-1, 1]], [[0, 1, 1]], [[0]]]


def test_a_device_asks_for_1_to_16_blocks_of_a_blob_of_at_most_65536() -> None:
    assert [at for at in RUNS + NO_RUNS if is_read("get", "at", at)] == RUNS


@pytest.mark.parametrize(("message", "path"), [("get", "block"), ("coord", "block")])
def test_a_block_is_a_multiple_of_4_kib_up_to_1_mib(message: str, path: str) -> None:
    sizes = [0, 2048, 4096, 4097, 8192, 1 << 20, (1 << 20) + 4096]
    assert [size for size in sizes if is_read(message, path, size)] == [4096, 8192, 1 << 20]


def test_a_release_has_a_version_of_1_to_4_numbers_of_at_most_6_digits() -> None:
    file = manifest_of(b"release", "release").to_json()
    versions = ["", "1", "1.2.3.4", "1.2.3.4.5", "999999.0", "1000000.0", "1.", "1.x"]
    read = [version for version in versions if is_read("coord", "release", {"version": version, "file": file})]
    assert read == ["1", "1.2.3.4", "999999.0"]


@pytest.mark.parametrize("why", refused())
def test_a_sum_that_contradicts_itself_is_a_bad_task(why: str) -> None:
    with pytest.raises(Malformed, match="bad_task"):
        read_message(task_message(refused()[why]), "t")
