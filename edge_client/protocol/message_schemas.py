"""The kinds of control messages: one table of fields per kind, and the rules that tie fields together.

`table_of` gives the fields of one message, `check_rules` what a table cannot say. PROTOCOL.md prints the same tables
for people. Nothing here parses or writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import topics
from edge_client.protocol.blocks import (
    BLOCK_BYTES_STEP,
    KIND_LIMITS,
    MAX_BITMAP_BYTES,
    MAX_BLOCK_BYTES,
    MAX_MARK,
    decode_base64,
    is_count,
)
from edge_client.protocol.summed_task import CHOICES, MAX_BITS, MIN_BITS
from edge_client.protocol.task import (
    ASKED_ALONE,
    DATA_SPLITS,
    FIT_BUFFERS,
    MAX_BATCH,
    MAX_LABEL_TOTALS,
    MAX_MODELS,
    MAX_STEPS,
    OPTIMISERS,
    OPTION_RANGES,
    PROBE_BUFFERS,
    PROBE_QUANTITIES,
    ROWS_PATTERN,
    SLOT_PATTERN,
    probe_contradiction,
)
from edge_client.protocol.validators import (
    FieldTable,
    boolean,
    checked,
    field_error,
    integer,
    list_of,
    manifest,
    map_of,
    matching,
    named,
    number,
    one_of,
    optional,
    or_null,
    positive,
    record,
    required,
    text,
    with_field,
    word_or,
)

CODECS = ("f32", "f16", "i8")
MAX_DETAIL_CHARS = 200
RUNTIME = r"[A-Za-z0-9_.+ -]{1,64}"  # a runtime's name and version
MAX_GET_BLOCKS, MAX_CENTERS = 16, 1_024

ERR_CODES = (
    *("bad_json", "too_big", "bad_version", "bad_kind", "bad_field", "not_member", "not_yours"),
    *("unknown_blob", "bad_range", "closed", "busy", "rate", "internal"),
)
ACK_STATUSES = (
    *("ok", "dup", "late", "superseded", "bad_hash", "bad_schema", "bad_codec", "not_finite"),
    *("rejected", "retry", "too_big"),
)
NACK_CODES = (
    *("bad_version", "bad_kind", "bad_field", "bad_json", "internal", "too_big", "bad_hash", "bad_schema", "bad_codec"),
    *("not_finite", "bad_task", "old_epoch", "bad_signature", "bad_program", "no_engine", "no_own_model"),
    *("no_posterior", "no_data", "no_space", "unavailable", "unreachable", "deadline"),
)


def _bitmap(value: Any, _name: str) -> str:  # noqa: ANN401
    decode_base64(value, MAX_BITMAP_BYTES)
    return str(value)


def _block_size(value: Any, name: str) -> int:  # noqa: ANN401
    if not is_count(value, BLOCK_BYTES_STEP, MAX_BLOCK_BYTES) or value % BLOCK_BYTES_STEP:
        raise field_error(name, value, f"a multiple of {BLOCK_BYTES_STEP} up to {MAX_BLOCK_BYTES}")
    return int(value)


def _block_runs(value: Any, name: str) -> list[list[int]]:  # noqa: ANN401
    runs: list[list[int]] = list_of(list_of(integer(0, 65_535), 2, 2), 1, MAX_GET_BLOCKS)(value, name)
    if any(count < 1 or first + count > topics.MAX_TOPIC_NUMBER + 1 for first, count in runs):
        raise field_error(name, value, "runs [first, count] with count >= 1 inside 65,536 blocks")
    if sum(count for _, count in runs) > MAX_GET_BLOCKS:
        raise field_error(name, value, f"at most {MAX_GET_BLOCKS} blocks in all")
    return runs


_run, _sha256 = checked(topics.check_run), checked(topics.check_sha256)
_IDENT = matching(r"[A-Za-z0-9-]{1,36}")
_U32 = integer(0, 2**32 - 1)
_COUNT = integer(0)
_WINDOW = integer(1, 16)
_CENTER = integer(0, MAX_CENTERS - 1)
_SAMPLES = integer(1, 2**31)
_METRICS = map_of(matching(r"[A-Za-z0-9_./-]{1,64}"), number(-math.inf), 16)
_ENGINE = matching(r"[a-z0-9-]{1,16}")
_RUNTIME = matching(RUNTIME)
_REFUSED = record(required(engine=_ENGINE, runtime=_RUNTIME, difference=number()))
_STATE = record(
    required(
        doing=one_of("compile", "gather", "train", "export", "serve"),
        newcomers=one_of("now", "next-round", "next-run", "no"),
    )
    | optional(here=_COUNT, needed=_COUNT, run=_run, name=text(64), round=_U32, of=_U32)
)
_CAPS = record(
    required(engine=_ENGINE, n=integer(0, 2**31))
    | optional(ram=_COUNT, disk=_COUNT, codecs=list_of(matching(r"[A-Za-z0-9_.-]{1,32}"), 0, 16), window=_WINDOW)
    | optional(runtime=_RUNTIME, refused=list_of(_REFUSED, 0, 8))
)
_KEY = required(run=_run, round=_U32, exchange=_U32)  # with the device id of the topic: one answer of one device
_MODEL = manifest("model")
_SLOT = matching(SLOT_PATTERN)
_CANDIDATE = with_field("own", record(required(own=_SLOT) | optional(init=_MODEL)), _MODEL)

COMMON_FIELDS: FieldTable = required(id=_IDENT, t=_COUNT)
EPOCH_FIELDS: FieldTable = required(epoch=_COUNT)
_OPTIMISER = named(
    {
        name: {option: number(*OPTION_RANGES[option]) if option in OPTION_RANGES else boolean for option in options}
        for name, options in OPTIMISERS.items()
    }
)
_FIT: FieldTable = required(
    start=word_or("own", _MODEL),
    lr=number(),
    mu=number(),
    steps=integer(1, MAX_STEPS),
    batch=integer(1, MAX_BATCH),
    seed=_COUNT,
) | optional(
    momentum=number(),  # of the step's own SGD; exactly one of the two, see _fit_contradiction
    optimiser=_OPTIMISER,
    init=_MODEL,
    anchor=word_or("start", _MODEL),
    linear=manifest("linear"),
    rows=matching(ROWS_PATTERN),
    slot=_SLOT,
    upload=boolean,
    buffers=one_of(*sorted(FIT_BUFFERS)),
)
_PROBE: FieldTable = required(
    models=list_of(_CANDIDATE, 0, MAX_MODELS),
    want=list_of(one_of(*sorted(PROBE_QUANTITIES)), 1, len(PROBE_QUANTITIES)),
    batch=integer(1, MAX_BATCH),
    seed=_COUNT,
) | optional(
    prior=list_of(number(), 1, MAX_MODELS),
    split=one_of(*sorted(DATA_SPLITS)),
    limit=_SAMPLES,
    buffers=one_of(*sorted(PROBE_BUFFERS)),
    label_totals=list_of(or_null(list_of(number(), 1, MAX_LABEL_TOTALS)), 1, MAX_MODELS),
    least=boolean,
    step=manifest("container"),
)
SCALE_TABLE: FieldTable = required(
    bits=integer(MIN_BITS, MAX_BITS), devices=integer(1, 100_000), clip=positive()
) | optional(noise=number(0.0, 1e6))
SUM_TABLES: dict[str, FieldTable] = {  # `sum` of a sum's work, by the work's job
    "fit": required(
        part=one_of("choose", "add", "count", "points"),
        choose=one_of(*CHOICES),
        centers=list_of(_MODEL, 1, MAX_MODELS),
        open=list_of(integer(0, MAX_MODELS - 1), 1, MAX_MODELS),
        share=number(0.0, 1.0),
        scale=record(SCALE_TABLE),
    )
    | optional(
        group=integer(0, MAX_MODELS - 1),
        compare=list_of(list_of(_COUNT, 2, 2), 1, 64),
        points=manifest("points"),
        points_open=list_of(integer(0, 1), 1, MAX_MODELS**2),
        dealt=boolean,
        hysteresis=number(),
        sigma=number(),
        refresh=boolean,
        repeats=integer(1, MAX_STEPS),
        move=number(),
    ),
    "probe": required(
        served=one_of("asked", "center", "mixture"), usual=integer(0, MAX_MODELS - 1), scale=record(SCALE_TABLE)
    ),
}


def _work(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """What a device computes for a sum: the fields of a fit or a probe, `job`, and `sum`."""
    job = value.get("job") if isinstance(value, Mapping) else None
    if job not in ("fit", "probe"):
        raise field_error(name, value, "an object with job fit or probe")
    fields: dict[str, Any] = record(_JOBS[job] | required(job=one_of(job)) | optional(sum=record(SUM_TABLES[job])))(
        value, name
    )
    return fields


ANSWER_KINDS = ("delta", "stats", "masked")
SUM_STAGES = ("prekeys", "shares", "add", "show", "tell", "keep")
_SUM: FieldTable = required(stage=one_of(*SUM_STAGES)) | optional(
    after=_COUNT, message=manifest("sum"), work=_work, step=manifest("container")
)
_JOBS: dict[str, FieldTable] = {"fit": _FIT, "probe": _PROBE, "sum": _SUM}
_TASK: FieldTable = (
    _KEY
    | required(
        left_ms=_COUNT,
        job=one_of("fit", "probe", "sum"),
        program=manifest("program"),
        container=manifest("container"),
        schema=_sha256,
        reply=record(
            required(
                codec=one_of(*CODECS), base=one_of("start", "anchor", "zero"), max_size=integer(1, KIND_LIMITS["delta"])
            )
        ),
    )
    | optional(center=_CENTER)
)

MESSAGE_TABLES: dict[str, FieldTable] = {
    "coord": required(
        boot=matching(r"[0-9a-f]{16}"),
        online=boolean,
        proto=list_of(integer(1, 255), 1, 16),
        spread_ms=_COUNT,
        block=_block_size,
        window=_WINDOW,
        src=list_of(matching(r"bcast|mqtt|https://[!-~]{1,256}"), 0, 8),
    )
    | optional(
        release=record(
            required(version=matching(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}"), file=manifest("release"))
            | optional(key=matching(r"[0-9a-f]{16}"), sig=matching(r"[0-9a-f]{128}"))
        ),
        state=_STATE,
        link=_COUNT,
        key=matching(r"[0-9a-f]{16}"),
        sig=matching(r"[0-9a-f]{128}"),
    ),
    "cat": required(ver=_COUNT, catalog=manifest("catalog")),
    "st": required(s=one_of("on", "off", "sleep", "lost"), bd=_U32) | optional(sw=text(64), caps=_CAPS),
    "task": _TASK,
    "stop": _KEY | optional(why=text(MAX_DETAIL_CHARS)),
    "rebirth": {},
    "get": required(sha256=_sha256, block=_block_size, at=_block_runs) | optional(mark=integer(0, MAX_MARK)),
    "rdy": _KEY
    | required(attempt=_U32, n=_SAMPLES, what=one_of(*ANSWER_KINDS), update=manifest(*ANSWER_KINDS))
    | required(seconds=number())
    | optional(metrics=_METRICS),
    "go": required(re=_IDENT, sha256=_sha256, shard=integer(0, 65_535), window=_WINDOW) | optional(have=_bitmap),
    "ack": _KEY
    | required(attempt=_U32, sha256=_sha256, status=one_of(*ACK_STATUSES))
    | optional(retry_ms=_COUNT, detail=text(MAX_DETAIL_CHARS)),
    "err": required(code=one_of(*ERR_CODES)) | optional(re=_IDENT, detail=text(MAX_DETAIL_CHARS), retry_ms=_COUNT),
    "nack": required(re=_IDENT, code=one_of(*NACK_CODES))
    | optional(run=_run, round=_U32, exchange=_U32, detail=text(MAX_DETAIL_CHARS), retry_ms=_COUNT),
    "near": required(how=one_of("sketch", "loss", "round"))
    | optional(sketch=manifest("sketch"), stats=manifest("stats"), n=_SAMPLES, centers=list_of(_CENTER, 1, MAX_MODELS)),
    "near-answer": required(re=_IDENT, center=or_null(_CENTER))
    | optional(
        distance=or_null(number(-math.inf)),  # of a loss of the user's own also below zero
        fit=one_of("well", "badly", "none"),
        alternatives=list_of(record(required(center=_CENTER, distance=number(-math.inf))), 0, 8),
    ),
    "served": required(center=_CENTER, sha256=_sha256, n=_SAMPLES, metrics=_METRICS),
}
NULLABLE = frozenset({("near", "center"), ("near", "distance")})
# Which kinds belong on which topic (`Route.kind`), and which of them a coordinator sends.
ROUTES: Mapping[str, frozenset[str]] = {
    "coord": frozenset({"coord"}),
    "cat": frozenset({"cat"}),
    "st": frozenset({"st"}),
    "rq": frozenset({"get", "rdy", "near", "nack", "served"}),
    "t": frozenset({"task", "go", "ack", "near", "stop", "rebirth", "err"}),
}
MESSAGE_KINDS = frozenset[str]().union(*ROUTES.values())
DOWNLINK_KINDS = (ROUTES["t"] | ROUTES["coord"] | ROUTES["cat"]) - {"near"}


def table_of(kind: str, message: Mapping[str, Any], *, down: bool) -> FieldTable:
    """All fields of a message of this kind; a task's depend on its job, and `near` has two tables."""
    table = MESSAGE_TABLES["near-answer" if kind == "near" and down else kind]
    job = message.get("job")
    if kind == "task" and isinstance(job, str):
        table = table | _JOBS.get(job, {})
    return COMMON_FIELDS | (EPOCH_FIELDS if down else {}) | table


def check_rules(kind: str, message: Mapping[str, Any]) -> None:
    """The rules that tie fields together. Contradictions inside a job are "bad_task", all others "bad_field"."""
    if kind == "st" and message["s"] == "on" and "caps" not in message:
        raise Malformed("bad_field", "st on needs caps")
    if kind == "rdy" and message["update"]["kind"] != message["what"]:
        raise Malformed("bad_field", f"rdy of {message['what']} carries a {message['update']['kind']}")
    if kind == "near" and "how" in message:
        needed = {"sketch": "sketch", "loss": "stats", "round": None}[message["how"]]
        if needed is not None and needed not in message:
            raise Malformed("bad_field", f"near by {message['how']} needs {needed}")
    if kind == "task":
        wrong = _CONTRADICTIONS[message["job"]](message)
        if wrong:
            raise Malformed("bad_task", wrong)


def _probe_contradiction(task: Mapping[str, Any]) -> str | None:
    prior = task.get("prior")
    if prior is not None and (len(prior) != len(task["models"]) or not 0 < sum(prior) < math.inf):
        return "prior needs one weight per model and a positive, finite sum"
    if not task["models"] and task["want"] != ["labels"]:
        return "only labels are asked for without a model"
    if len(set(task["want"])) < len(task["want"]):
        return "want names the same statistic twice"
    if task.get("buffers") == "batch" and ASKED_ALONE.isdisjoint(task["want"]) and "step" not in task:
        return "buffers of a batch need the step's file"
    least = task.get("least", False)
    return probe_contradiction(task["want"], len(task["models"]), task.get("label_totals"), least=least)


def _sum_contradiction(task: Mapping[str, Any]) -> str | None:
    stage, work = task["stage"], task.get("work", {})
    needed = {"message": ("shares", "add", "show"), "work": ("add", "tell", "keep")}
    for field, stages in needed.items():
        if (field in task) != (stage in stages):
            return f"stage {stage} has a {field}, or lacks one"
    if "after" in task and stage != "prekeys":
        return "numbers are asked of prekeys only"
    if not work:
        return None
    if ("sum" in work) != (stage != "keep"):
        return f"the work of stage {stage} has a sum, or lacks one"
    return _added_contradiction(work) or _CONTRADICTIONS[work["job"]](work)


def _added_contradiction(work: Mapping[str, Any]) -> str | None:
    added = work.get("sum", {})
    opened, compare = added.get("open", []), added.get("compare", ())
    if added.get("served") == "center" and added["usual"] >= len(work["models"]):
        return "usual is the number of no model"
    if any(one >= other for one, other in pairwise(opened)) or (opened and opened[-1] >= len(added["centers"])):
        return "open names no rising numbers of centers"
    means = added.get("part") in ("count", "points")
    if ((means or added.get("choose") == "nearest") and not compare) or any(start >= end for start, end in compare):
        return "models are compared in columns, start before end"
    if means and not {"points", "points_open"} <= added.keys():
        return "a part of k-means has no centroids"
    return None


def _fit_contradiction(task: Mapping[str, Any]) -> str | None:
    anchor, base = task.get("anchor"), task.get("reply", {}).get("base")
    if task["mu"] > 0 and anchor is None:
        return "mu > 0 needs an anchor"
    if ("momentum" in task) == ("optimiser" in task):
        return "a fit has a momentum or an optimiser"
    if task.get("optimiser", {}).get("nesterov") and not task["optimiser"]["momentum"]:
        return "nesterov needs a momentum above 0"
    if task["start"] == "own" and "start" in (anchor, base):
        return "the server does not hold the model that start: own names"
    if base == "anchor" and anchor is None:
        return "the reply's base is an anchor that is not there"
    return None


_CONTRADICTIONS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "fit": _fit_contradiction,
    "probe": _probe_contradiction,
    "sum": _sum_contradiction,
}
