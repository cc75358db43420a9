"""What a device is asked and what it answers: `Fit`, `Probe`, `Reply`, over one flat vector per model.

A model is a flat vector [schema.size]: the parameters in the order of the schema, then the buffers (batch norm's
running statistics). `vector[:schema.n_params]` are the parameters; proximal terms and distances use those only. Wire
vectors are float32; in-process runs may use float64. Data only: nothing here trains, sends, or knows a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ClientId = str
Array = NDArray[Any]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Flat = NDArray[Any]  # [schema.size], float32 on the wire
Tensors = Mapping[str, Array]
OWN_MODEL: Literal["own"] = "own"  # Fit.start: resume the device's own model in `slot`

PROBE_QUANTITIES = frozenset(
    {"loss", "votes", "posterior", "grad", "confusion", "errors", "positions", "labels", "inputs", "answers"}
)
ASKED_ALONE = frozenset({"grad", "labels"})  # quantities of which a probe asks one and no other
DATA_SPLITS = frozenset({"train", "test"})
FIT_BUFFERS = frozenset({"sent", "own"})
PROBE_BUFFERS = frozenset({"sent", "own", "batch"})
MAX_DIMS = 8
MAX_STEPS = 1_000_000
MAX_BATCH = 65_536
MAX_MODELS = 16  # candidates in one probe
MAX_LABEL_TOTALS = 512  # numbers in one probe, of all candidates: a message has 8 KiB
ROWS_PATTERN = "ones|posterior:(0|[1-9][0-9]?)|all-but:[1-9][0-9]{0,8}"  # how a fit weighs its samples
SLOT_PATTERN = "[a-z0-9-]{1,32}"  # names one of the models that a device keeps
MAX_SLOTS = 64  # of a run, a model in each; and residuals of its centers
TOO_MANY_SLOTS = f"a run has {MAX_SLOTS} slots at most"
OPTIMISERS: Mapping[str, tuple[str, ...]] = {  # name -> its options
    "sgd": ("momentum", "nesterov", "weight_decay", "clip_norm"),
    "adam": ("beta1", "beta2", "eps", "weight_decay", "clip_norm"),
    "adamw": ("beta1", "beta2", "eps", "weight_decay", "clip_norm"),
}
MAX_BETA = 0.999999  # float32 still tells it from 1
OPTION_RANGES: Mapping[str, tuple[float, float]] = {
    "momentum": (0.0, 1.0),
    "beta1": (0.0, MAX_BETA),
    "beta2": (0.0, MAX_BETA),
    "eps": (1e-16, 1.0),
    "weight_decay": (0.0, math.inf),
    "clip_norm": (0.0, math.inf),
}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a model: its torch name, `p` (parameter) or `b` (buffer), and its shape."""

    name: str
    role: Literal["p", "b"]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or "#" in self.name:
            raise ValueError(f"tensor name {self.name!r} must be non-empty and hold no '#'")
        if self.role not in ("p", "b"):
            raise ValueError(f"role of {self.name} is {self.role!r}; use 'p' or 'b'")
        if len(self.shape) > MAX_DIMS or any(d < 1 for d in self.shape):
            raise ValueError(f"shape of {self.name} is {self.shape}; at most {MAX_DIMS} dimensions, each at least 1")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Schema:
    """The tensors of a model in order, parameters first, and which parameters form the classifier layer."""

    tensors: tuple[TensorSpec, ...]
    classifier: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if not names or len(set(names)) != len(names):
            raise ValueError("a schema needs at least one tensor and no name twice")
        roles = [t.role for t in self.tensors]
        if roles != sorted(roles, reverse=True):
            raise ValueError("parameters come before buffers in a schema")
        missing = set(self.classifier) - {t.name for t in self.tensors if t.role == "p"}
        if missing:
            raise ValueError(f"classifier names {sorted(missing)} are no parameters of the schema")

    @cached_property
    def n_params(self) -> int:
        """Number of trained values; they come first in the flat vector."""
        return sum(t.size for t in self.tensors if t.role == "p")

    @cached_property
    def size(self) -> int:
        """Number of all values, buffers included."""
        return sum(t.size for t in self.tensors)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each tensor lies in the flat vector."""
        out, at = {}, 0
        for t in self.tensors:
            out[t.name] = slice(at, at + t.size)
            at += t.size
        return out

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical JSON of [[name, role, shape], ...] sorted by the UTF-8 bytes of the name."""
        rows = sorted(([t.name, t.role, list(t.shape)] for t in self.tensors), key=lambda r: str(r[0]).encode())
        text = json.dumps(rows, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def split(self, flat: Flat) -> dict[str, Array]:
        """[size] -> name -> array in torch's shape; views, not copies."""
        if flat.shape != (self.size,):
            raise ValueError(f"vector of shape {flat.shape} does not fit a schema of {self.size} values")
        return {t.name: flat[self.slices[t.name]].reshape(t.shape) for t in self.tensors}

    def join(self, tensors: Tensors) -> Flat:
        """Name -> array, exactly the schema's names and shapes -> [size]."""
        if set(tensors) != set(self.slices):
            raise ValueError(f"names differ from the schema: {sorted(set(tensors) ^ set(self.slices))}")
        wrong = [t.name for t in self.tensors if tensors[t.name].shape != t.shape]
        if wrong:
            raise ValueError(f"shapes differ from the schema: {wrong}")
        return np.concatenate([np.ravel(tensors[t.name]) for t in self.tensors])


def _finite(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {value}")


def _one_of(name: str, value: str, words: frozenset[str]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {sorted(words)}, got {value!r:.80}")


def _named(slot: str) -> None:
    if re.fullmatch(SLOT_PATTERN, slot) is None:
        raise ValueError(f"slot must have the form {SLOT_PATTERN}, got {slot!r:.80}")


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """What moves the weights in place of plain SGD with momentum (training/optimiser.py has the rules).

    `name` is one of OPTIMISERS; options of other names keep their defaults. `clip_norm` 0: gradients are not clipped.

    >>> Optimiser(name="adam").to_json()["beta2"]
    0.999
    """

    name: str
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMISERS:
            raise ValueError(f"optimiser must be one of {', '.join(OPTIMISERS)}, got {self.name!r:.40}")
        for option, (low, high) in OPTION_RANGES.items():
            value = getattr(self, option)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{option} must be a number from {low:g} to {high:g}, got {value}")
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov are options of sgd, not of {self.name}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")

    def to_json(self) -> dict[str, Any]:
        """`name` and every option of that name."""
        values = {option: getattr(self, option) for option in OPTIMISERS[self.name]}
        return {"name": self.name} | {k: v if isinstance(v, bool) else float(v) for k, v in values.items()}


class _Bits:  # noqa: PLW1641
    """Equal where all bits are; numpy's `==` gives an array."""

    def __eq__(self, other: object) -> bool:
        return _bits(self) == _bits(other)


def _bits(of: object) -> object:
    if isinstance(of, np.ndarray):
        return of.dtype, of.shape, of.tobytes()
    if isinstance(of, _Bits):
        return type(of), _bits([*vars(of).values()])
    return [*map(_bits, of)] if isinstance(of, (list, tuple)) else of


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit(_Bits):
    """Minimise (1/n) sum_j q_j loss(w; x_j, y_j) + <linear, w> + (mu/2) ||w - anchor||^2 from `start`.

    `start`, `init`, `anchor` and `linear` are [schema.size] (the buffer part of anchor and linear is ignored). Each
    step is SGD with momentum; velocity starts at zero. An `optimiser` takes its place; what it keeps starts at zero,
    too. `rows` is "ones", or "posterior:m": q is candidate m's share of each sample, as this round's last probe left it
    on the device, or "all-but:m": q is 0 for the m samples that a probe with seed 0 and `limit` m evaluates, and
    n / (n - m) for the others. Batches follow `seed`. The device keeps the trained model in `slot`; without `upload`
    only the mean training loss is answered. `buffers` "own": with the running statistics of the model in `slot`, if
    there is one. `center` numbers the model that the update is for: what compression loses is made up for per center.

    >>> Fit(start=np.zeros(4), steps=20, lr=0.1, batch=16, seed=0).upload
    True
    """

    start: Flat | Literal["own"]
    steps: int
    lr: float
    batch: int
    seed: int
    init: Flat | None = None  # used when `own` is absent
    anchor: Flat | None = None
    linear: Flat | None = None
    mu: float = 0.0
    momentum: float = 0.0
    optimiser: Optimiser | None = None
    rows: str = "ones"
    slot: str = "main"
    upload: bool = True
    buffers: str = "sent"
    center: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "mu"):
            _finite(name, getattr(self, name))
        _counts(self.batch, self.seed)
        if not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"steps must be 1 to {MAX_STEPS}, got {self.steps}")
        if self.mu > 0 and self.anchor is None:
            raise ValueError("mu > 0 needs an anchor")
        if self.optimiser is not None and self.momentum:
            raise ValueError("the momentum of a fit with an optimiser is the optimiser's")
        _named(self.slot)
        if re.fullmatch(ROWS_PATTERN, self.rows) is None:
            raise ValueError(f"rows must have the form {ROWS_PATTERN}, got {self.rows!r:.80}")
        _one_of("buffers", self.buffers, FIT_BUFFERS)
        if isinstance(self.start, str):
            _one_of("start", self.start, frozenset({OWN_MODEL}))
        elif self.start is None:
            raise ValueError(f"start must be a model or {OWN_MODEL!r}, got None")
        _models("start, init, anchor and linear", self.vectors)
        if len({v.shape for v in self.vectors}) > 1:
            raise ValueError("start, init, anchor and linear must have one shape")

    @property
    def vectors(self) -> list[Flat]:
        """The models that it names, apart from the device's own."""
        named = (self.start, self.init, self.anchor, self.linear)
        return [v for v in named if v is not None and not isinstance(v, str)]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnModel(_Bits):
    """The model that the device keeps in `slot`; `init` [schema.size] stands in where it keeps none."""

    slot: str = "main"
    init: Flat | None = None

    def __post_init__(self) -> None:
        _named(self.slot)


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe(_Bits):
    """Evaluate 1 to 16 candidate models, each [schema.size], on local data, batch norm in inference mode.

    A candidate may be the device's own. `want` is a set of what is asked: "loss", which the reply has as `losses`, or
    "votes", "posterior", "confusion", "errors", "positions", "inputs", "answers", "grad" and "labels", which it has
    under these names ("grad" and "labels" only alone; "labels", the training samples of each class, need no candidate).
    `split` is "train", or "test" for held-out samples; `prior` has one weight per model, `limit` caps the samples. A
    "posterior" of all training samples stays on the device, too, for this round's fits. `buffers` says which running
    statistics the models are evaluated with: their own ("sent"), those of the device's model in slot "main", if there
    is one ("own"), or of the device's training samples under each model ("batch"). With `label_totals`, one entry per
    candidate, a classifier is corrected from the labels [C] that it was trained on to those of the device's training
    samples; an entry of None, and a model of the device's own, is not corrected. "inputs" asks for the moments of all
    inputs of the device (nearest/input_moments.py), whatever the split, "answers" for each candidate's AnswerLook
    (nearest/answer_moments.py), of a classifier. "errors" is of a model whose targets are numbers, "positions" of one
    with many classes. `least`, of losses alone: only the least one is read, the others may be lower bounds.

    >>> len(Probe(models=[np.zeros(4), np.ones(4)], want=frozenset({"loss"}), batch=16, seed=0).models)
    2
    """

    models: Sequence[Flat | OwnModel]
    want: frozenset[str]
    batch: int
    seed: int
    prior: Sequence[float] | None = None
    split: str = "train"
    limit: int | None = None
    buffers: str = "sent"
    label_totals: Sequence[Sequence[float] | None] | None = None
    least: bool = False

    def __post_init__(self) -> None:
        _one_of("buffers", self.buffers, PROBE_BUFFERS)
        _counts(self.batch, self.seed)
        if not (self.want != {"labels"}) <= len(self.models) <= MAX_MODELS:
            raise ValueError(f"a probe carries 1 to {MAX_MODELS} models, got {len(self.models)}")
        if not isinstance(self.want, (set, frozenset)):
            raise TypeError(f"want must be a set, as {{'loss'}}, got {self.want!r:.80}")
        if not self.want or not self.want <= PROBE_QUANTITIES:
            raise ValueError(f"want must be some of {sorted(PROBE_QUANTITIES)}, got {sorted(self.want)}")
        _one_of("split", self.split, DATA_SPLITS)
        if self.prior is not None and len(self.prior) != len(self.models):
            raise ValueError("prior needs one weight per model")
        if wrong := probe_contradiction(self.want, len(self.models), self.label_totals, least=self.least):
            raise ValueError(wrong)
        _models("models", self.vectors)

    @property
    def vectors(self) -> list[Flat]:
        """The candidates, apart from the device's own; what stands in for one that it does not keep is among them."""
        named = [m.init if isinstance(m, OwnModel) else m for m in self.models]
        return [v for v in named if v is not None]


def probe_contradiction(
    want: Collection[str], models: int, totals: Sequence[Sequence[float] | None] | None, *, least: bool
) -> str | None:
    """What of a `Probe` cannot be asked together, of so many models; None: nothing."""
    if least and set(want) != {"loss"}:
        return "least is asked of the losses alone"
    if len(want) > 1 and not ASKED_ALONE.isdisjoint(want):
        return f"each of {sorted(ASKED_ALONE)} is asked for alone"
    if totals is not None and len(totals) != models:
        return "label_totals needs one entry per model"
    if sum(len(row) for row in totals or () if row is not None) > MAX_LABEL_TOTALS:
        return f"label_totals holds more than {MAX_LABEL_TOTALS} numbers"
    return None


def _models(name: str, vectors: Sequence[object]) -> None:
    for v in vectors:
        if not isinstance(v, np.ndarray) or v.dtype.kind != "f":
            told = v.dtype if isinstance(v, np.ndarray) else type(v).__name__
            raise ValueError(f"{name} must be arrays of floating point numbers, got {told}")


def _counts(batch: int, seed: int) -> None:
    if not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be a whole number, got {type(seed).__name__}")
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"batch must be 1 to {MAX_BATCH}, got {batch}")
    if not 0 <= seed < 2**53:
        raise ValueError(f"seed must be 0 to 2^53 - 1, got {seed}")


Task = Fit | Probe


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply(_Bits):
    """What a device answered. Only what was asked for is present, else None; M is the number of candidate models.

    `n` is the number of samples behind it, of the split that was asked. A fit has `update` [schema.size], the whole
    trained model, or without upload `losses` [1], that of training. A probe has what it `want`s: `losses` [M], mean
    ones; `votes` [M] int64, for how many samples a candidate is the best; `posterior` [M], mean responsibilities;
    `confusion` [M, C, C] int64, rows the true class; `errors` [M, 3], squared, absolute, variance of the targets;
    `positions` [M, 3], labels that count, right ones, summed loss; `grad` [n_params], the mean gradient; `labels` [C],
    training samples by class, soft ones by shares; `inputs`, `answers` [M, d]: moments. All are float64 but `update`
    and `grad`. `words` uint32 are a part of a sum (summed_task.py): only sums of many reach a method.

    >>> Reply(n=1, losses=np.ones(2)) == Reply(n=1, losses=np.ones(2))
    True
    """

    n: int
    update: Flat | None = None
    losses: Array | None = None
    votes: Array | None = None
    posterior: Array | None = None
    grad: Flat | None = None
    confusion: Array | None = None
    errors: Array | None = None
    positions: Array | None = None
    labels: Array | None = None
    inputs: Array | None = None
    answers: Array | None = None
    words: Array | None = None
