"""Codecs: a flat vector to a tensor file and back, and the statistics of a Probe.

A flat vector is [schema.size], parameters then buffers (task.py). Decoding always gives finite float32, or Malformed.
The three codecs are f32 (as is), f16 (each tensor divided by a power of two) and i8 (rows of matrices scaled to
-127..127; other tensors as is).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import tensors
from edge_client.protocol.nearest.answer_moments import AnswerLook
from edge_client.protocol.nearest.input_moments import InputMoments
from edge_client.protocol.task import Array, Flat, Reply, Schema

SCALE_SUFFIX = "#s"  # a scale's name is its tensor's with this suffix; no tensor name holds '#'
_LEAST_SCALE = np.float32(2.0**-126)  # below: subnormal, which some processors flush to zero
_BOUND = np.float32(2.0**127)  # from here on, a rounded value times its scale could be infinite
_RESERVED_INT8 = np.int8(-128)
_CANDIDATES_MAX = 16
SCORES, _ROUNDING = 3, 1e-6  # numbers of a row of `errors` and of `positions`
_OF_MIXTURES = {"confusion", "errors", "positions"}  # a probe with a prior has one of these for all candidates
_FILE_BYTES, _ENTRY_BYTES = 1_024, 256  # of a header: its metadata, and a tensor's entry without the name
_STATISTICS = {  # name in the file -> field of a Reply, dtype, dimensions
    "loss": ("losses", "float64", 1),
    "votes": ("votes", "int64", 1),
    "posterior": ("posterior", "float64", 1),
    "confusion": ("confusion", "int64", 3),
    "errors": ("errors", "float64", 2),
    "positions": ("positions", "float64", 2),
    "labels": ("labels", "float64", 1),
    "inputs": ("inputs", "float64", 1),
    "answers": ("answers", "float64", 2),
}


def encode_vector(flat: Flat, schema: Schema, *, codec: str, kind: str, base: str | None = None) -> bytes:
    """[schema.size] -> tensor file. A delta has a `base`: a sha256 or "zero". NaN and inf: Malformed("not_finite")."""
    pack = {"f32": _pack_f32, "f16": _pack_f16, "i8": _pack_i8}.get(codec)
    if pack is None:
        raise Malformed("bad_codec", f"unknown codec {codec!r:.80}")
    with np.errstate(over="ignore"):  # what does not fit float32 is found as infinity
        vector = np.asarray(flat, dtype=np.float32)
    _finite(vector)
    stored: dict[str, Array] = {}
    for name, value in schema.split(vector).items():
        stored |= pack(name, value)
    return tensors.pack_tensors(stored, kind=kind, codec=codec, schema=schema.sha256, base=base)


def decode_vector(data: bytes, schema: Schema, *, kind: str, codec: str | None = None, base: str | None = None) -> Flat:
    """Tensor file from anyone -> finite float32 [schema.size].

    `kind` must agree; `codec` and `base` too where given. Malformed: bad_codec, bad_schema, not_finite, bad_version.
    """
    stored, meta = tensors.unpack_tensors(data)
    _check_kind(meta, kind)
    if (codec is not None and meta.codec != codec) or (base is not None and meta.base != base):
        raise Malformed("bad_codec", f"codec {meta.codec} on base {meta.base}; expected {codec} on {base}")
    _check_schema(stored, meta, schema)
    return _joined(stored, schema)


def decode_frozen(data: tensors.Buffer, schema: Schema, dtype: str = "float32") -> dict[str, Array]:
    """A file of kind "frozen" -> its tensors by name, finite, in `dtype`. Those that are stored so lie in `data`."""
    stored, meta = tensors.view_tensors(data)
    _check_kind(meta, "frozen")
    _check_schema(stored, meta, schema)
    found = {}
    for t in schema.tensors:
        value, scale = stored[t.name], stored.get(t.name + SCALE_SUFFIX)
        if scale is not None:
            scaled = np.empty(t.shape, np.float32)
            _scale(t.name, value, scale, out=scaled)
            value = scaled
        _finite(value)
        found[t.name] = value.astype(dtype, copy=False)
    return found


def encode_with_feedback(
    delta: Flat, residual: Flat | None, schema: Schema, *, codec: str, base: str
) -> tuple[bytes, Flat]:
    """Send Q(delta + residual), keep what it lost -> (file, new residual [schema.size] float32)."""
    with np.errstate(over="ignore", invalid="ignore"):  # found as not finite by encode
        wanted = np.asarray(delta, dtype=np.float32)
        wanted = wanted if residual is None else wanted + np.asarray(residual, dtype=np.float32)
    data = encode_vector(wanted, schema, codec=codec, kind="delta", base=base)
    return data, wanted - decode_vector(data, schema, kind="delta")


def encode_stats(reply: Reply, schema: Schema) -> bytes:
    """A Probe's answer as a tensor file of kind "stats"; `n` travels in `rdy`."""
    given = {name: (getattr(reply, field), dtype) for name, (field, dtype, _) in _STATISTICS.items()}
    stored: dict[str, Array] = {k: np.asarray(v, dtype=dtype) for k, (v, dtype) in given.items() if v is not None}
    if reply.grad is not None:
        grad = np.asarray(reply.grad, dtype=np.float32)
        for t in _params(schema):
            stored[f"grad/{t}"] = grad[schema.slices[t]].reshape(_shapes(schema)[t])
    if reply.update is not None or not stored:
        raise ValueError("statistics hold at least one quantity of a probe, and no update")
    for value in stored.values():
        _finite(value)
    return tensors.pack_tensors(stored, kind="stats", codec="f32", schema=schema.sha256)


def decode_stats(data: bytes, schema: Schema, n: int, *, models: int | None = None, positions: int = 1) -> Reply:
    """Statistics from anyone over `n` samples (of `models` candidates, where given) -> Reply. Raises Malformed.

    `positions`: how many labels a sample has.
    """
    stored, meta = tensors.unpack_tensors(data)
    if meta.kind != "stats" or meta.codec != "f32" or meta.schema != schema.sha256:
        raise Malformed("bad_schema", f"not statistics in f32 of schema {schema.sha256}: {meta}")
    grads = {k: v for k, v in stored.items() if k.startswith("grad/")}
    plain = {k: v for k, v in stored.items() if k not in grads}
    _check_stats(plain, n, models, positions)
    grad: Flat | None = None
    if grads:
        _check_form(grads, {f"grad/{t}": ("float32", _shapes(schema)[t]) for t in _params(schema)})
        grad = np.concatenate([np.ravel(grads[f"grad/{t}"]) for t in _params(schema)])
        _finite(grad)
    return Reply(n=n, grad=grad, **{_STATISTICS[name][0]: value for name, value in plain.items()})


def _pack_f32(name: str, value: Array) -> dict[str, Array]:
    return {name: value}


def _pack_f16(name: str, value: Array) -> dict[str, Array]:
    """T / s with s = 2^e and max |T| = m 2^e, 0.5 <= m < 1: without the scale small deltas would underflow."""
    _below_bound(name, value)
    scale = np.float32(2.0 ** int(np.frexp(np.abs(value).max())[1]))
    if scale < _LEAST_SCALE or not value.any():
        return {name: np.zeros(value.shape, np.float16), name + SCALE_SUFFIX: np.zeros(1, np.float32)}
    with np.errstate(under="ignore"):
        return {name: (value / scale).astype(np.float16), name + SCALE_SUFFIX: np.array([scale], np.float32)}


def _pack_i8(name: str, value: Array) -> dict[str, Array]:
    """Rows along axis 0, s = max |row| / 127, q = rint(row / s) with ties to even; below two dimensions as is."""
    if value.ndim < 2:  # noqa: PLR2004 - a matrix has two
        return {name: value}
    _below_bound(name, value)
    rows = value.reshape(len(value), -1)
    scale = np.abs(rows).max(axis=1) / np.float32(127)
    scale[scale < _LEAST_SCALE] = 0
    divisor = np.where(scale > 0, scale, np.float32(1))[:, None]
    with np.errstate(under="ignore"):
        q = np.rint(rows / divisor)
    q[scale == 0] = 0
    return {name: q.astype(np.int8).reshape(value.shape), name + SCALE_SUFFIX: scale}


def _below_bound(name: str, value: Array) -> None:
    if (np.abs(value) >= _BOUND).any():
        raise Malformed("not_finite", f"tensor {name!r:.80} has values of 2^127 and more; only f32 carries them")


def _params(schema: Schema) -> list[str]:
    return [t.name for t in schema.tensors if t.role == "p"]


def _shapes(schema: Schema) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in schema.tensors}


def _form(schema: Schema, codec: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor that a file of this schema and codec holds."""
    form: dict[str, tuple[str, tuple[int, ...]]] = {}
    for t in schema.tensors:
        if codec == "f16":
            form |= {t.name: ("float16", t.shape), t.name + SCALE_SUFFIX: ("float32", (1,))}
        elif codec == "i8" and len(t.shape) > 1:
            form |= {t.name: ("int8", t.shape), t.name + SCALE_SUFFIX: ("float32", (t.shape[0],))}
        else:
            form[t.name] = ("float32", t.shape)
    return form


def max_file_bytes(schema: Schema, codec: str) -> int:
    """The most bytes of a file of this schema and codec whose header has no needless spaces."""
    form = _form(schema, codec)
    data = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in form.values())
    names = sum(len(json.dumps(name)) for name in form)  # escaped as far as JSON allows
    return data + names + _ENTRY_BYTES * len(form) + _FILE_BYTES


def _check_kind(meta: tensors.TensorFileMeta, kind: str) -> None:
    if meta.kind != kind:
        raise Malformed("bad_schema", f"the file holds a {meta.kind}, expected a {kind}")


def _check_schema(stored: Mapping[str, Array], meta: tensors.TensorFileMeta, schema: Schema) -> None:
    if meta.schema != schema.sha256:
        raise Malformed("bad_schema", f"the file's schema is {meta.schema}, expected {schema.sha256}")
    _check_form(stored, _form(schema, meta.codec))


def _check_form(stored: Mapping[str, Array], form: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    if set(stored) != set(form):
        odd = sorted(set(stored) ^ set(form))
        raise Malformed("bad_schema", f"{len(odd)} tensors too many or missing, for example {odd[0]!r:.80}")
    for name, (dtype, shape) in form.items():
        if (stored[name].dtype.name, stored[name].shape) != (dtype, shape):
            found = f"{stored[name].dtype} {stored[name].shape}"
            raise Malformed("bad_schema", f"tensor {name!r:.80} is {found}, expected {dtype} {shape}")


def _joined(stored: Mapping[str, Array], schema: Schema) -> Flat:
    """Undo the scales -> float32 [schema.size], finite."""
    out = np.empty(schema.size, np.float32)
    for t in schema.tensors:
        value, scale = stored[t.name], stored.get(t.name + SCALE_SUFFIX)
        into = out[schema.slices[t.name]].reshape(t.shape)
        if scale is None:
            into[...] = value
        else:
            _scale(t.name, value, scale, out=into)
    _finite(out)
    return out


def _scale(name: str, value: Array, scale: Array, *, out: Array) -> None:
    """Undo one tensor's scale; `out` may become infinite."""
    _finite(scale)
    if (scale < 0).any() or (value.dtype == np.int8 and (value == _RESERVED_INT8).any()):
        raise Malformed("bad_codec", f"tensor {name!r:.80} has a negative scale or a -128; no encoder writes those")
    beside = (len(scale),) + (1,) * (value.ndim - 1) if value.ndim else ()  # f16: one scale; i8: one per row
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        np.multiply(value, scale.reshape(beside), out=out)


def _finite(value: Array) -> None:
    if not np.isfinite(value).all():
        raise Malformed("not_finite", f"{int((~np.isfinite(value)).sum())} values are NaN or infinite")


def _check_stats(plain: Mapping[str, Array], n: int, models: int | None, positions: int) -> None:
    for name, value in plain.items():
        if (value.dtype.name, value.ndim) != _STATISTICS.get(name, ("",))[1:]:
            raise Malformed("bad_schema", f"statistic {name!r:.80} is {value.dtype} of shape {value.shape}")
        _finite(value)
    candidates = {len(value) for name, value in plain.items() if name not in {*_OF_MIXTURES, "labels", "inputs"}}
    candidates |= set() if models is None else {models}
    if "inputs" in plain:
        InputMoments.from_vector(plain["inputs"])
    for row in plain.get("answers", ()):
        AnswerLook.from_vector(row)
    confusion = plain.get("confusion")
    if confusion is not None and confusion.shape[1] != confusion.shape[2]:
        raise Malformed("bad_schema", f"a confusion matrix of shape {confusion.shape} is not square")
    for name in _OF_MIXTURES & plain.keys():
        candidates |= {len(plain[name])} - {1}  # one row may stand for the mixture of all candidates
    if len(candidates) > 1 or max(candidates, default=1) > _CANDIDATES_MAX:
        raise Malformed("bad_schema", f"statistics of {sorted(candidates)} candidates; one number up to 16 is expected")
    _check_counts(plain, n, positions)


def check_scores(errors: Array | None, counted: Array | None, labels: int) -> None:
    """Errors [M, 3] that some targets and outputs can have; counts of positions [M, 3], of at most `labels` labels."""
    for name, value in (("errors", errors), ("positions", counted)):
        if value is not None and (value.shape[1:] != (SCORES,) or not (value >= 0).all()):
            raise Malformed("bad_field", f"{name} are {SCORES} numbers for each model, none negative")
    with np.errstate(over="ignore"):  # an infinite square is above every other number
        if errors is not None and (errors[:, 1] ** 2 > errors[:, 0] * (1 + _ROUNDING)).any():
            raise Malformed("bad_field", "a mean absolute error above the root of the mean squared error")
    if counted is None:
        return
    if (counted[:, 1] > counted[:, 0]).any() or (counted[:, 0] > labels).any() or np.ptp(counted[:, 0]) > 0:
        raise Malformed("bad_field", f"positions count right labels, of one number of labels, at most {labels}")


def _check_counts(plain: Mapping[str, Array], n: int, positions: int) -> None:
    """Votes count samples, and confusions their positions: none negative, at most all of them."""
    check_scores(plain.get("errors"), plain.get("positions"), n * positions)
    for name in ("votes", "confusion"):
        value = plain.get(name)
        if value is None:
            continue
        sums = value.sum(axis=None if name == "votes" else (1, 2), dtype=np.float64)  # float64: no sum wraps around
        most = n if name == "votes" else n * positions
        if (value < 0).any() or np.any(sums > most):
            raise Malformed(
                "bad_field", f"{name} count {np.max(sums):.0f} or negative ones, at most {most} of {n} samples"
            )
    for name in ("posterior", "labels"):
        if name in plain and (plain[name] < 0).any():
            raise Malformed("bad_field", f"{name} must not be negative")
