"""Training steps, fits and probes of the page on ONNX Runtime Web, against torch and against Python's client.

Run from tests/conformance, where the programs are compiled anyway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol import tensors
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.summed_task import SummedFit, SumScale
from edge_client.protocol.task import Array, Fit, Flat, Optimiser, Probe
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from edge_client.training.summed_work import SummedMemory, add_words
from export.compiler.program import CompilerOutput
from tests.support.node import ROOT, run_node, run_tests, third_party
from tests.support.programs import feeds, model, opened, relative, torch_step

SCRIPT = Path(__file__).with_name("web_steps.mjs")
TO_TORCH = 1e-4  # relative; WebAssembly's sums in float32 run in another order than torch's in float64
TO_PYTHON = 1e-4  # ten steps of the same graph on two builds of ONNX Runtime
SAMPLES, SEED = 19, 7


def check_page(programs: Mapping[str, CompilerOutput], folder: Path) -> None:
    """The page's steps, fits and probes of these programs, by one Node process, are torch's and Python's client's."""
    for name, made in programs.items():
        (folder / name).mkdir()
        write(made, folder / name)
    run_node(SCRIPT, third_party(), *(folder / name for name in programs))
    for name, made in programs.items():
        check_steps(name, made, folder / name)
        check_tasks(made, folder / name)
        check_optimisers(made, folder / name)
        if made.program.schema.size == made.program.schema.n_params:  # a run on sums takes no running statistics
            check_sums(made, folder / name)


def check_life(made: CompilerOutput, folder: Path) -> None:
    """The page's client against a scripted coordinator, with a real program."""
    write(made, folder)
    scripts = [
        ROOT / "tests" / "web" / f"{name}.test.mjs" for name in ("client", "reconnected", "refusals", "no_room", "sums")
    ]
    said = run_tests(*scripts, PROGRAM=str(folder), THIRD=str(third_party()))
    assert "# fail 0" in said
    assert "# pass 43" in said


def write(made: CompilerOutput, folder: Path) -> None:
    program = made.program
    (folder / "program.json").write_bytes(canonical_json(program.to_json()))
    for name, file in program.files("onnx", ("step", "evaluate")).items():
        (folder / f"{name}.onnx").write_bytes(made.files[file.sha256])
    save(folder / "feeds.safetensors", feeds(program, "step", batch=8), made)
    data, models = material(made)
    save(folder / "samples.safetensors", {"x": data.x, "y": data.y}, made)
    save(folder / "models.safetensors", {str(k): vector for k, vector in enumerate(models)}, made)
    (folder / "task.json").write_text(
        json.dumps({"fit": FIT, "probe": PROBE, "summed": summed_tasks(), "optimised": optimised_tasks()}),
        encoding="utf-8",
    )


PROBE: dict[str, Any] = {
    "models": [{"sha256": "0"}, {"sha256": "1"}],
    "want": ["loss", "votes", "posterior", "confusion", "inputs", "answers"],
    "prior": [0.25, 0.75],
    "batch": 8,
    "seed": SEED,
}
FIT: dict[str, Any] = {
    "start": {"sha256": "0"},
    "anchor": {"sha256": "1"},
    "rows": "posterior:1",
    "lr": 0.05,
    "momentum": 0.5,
    "mu": 0.1,
    "steps": 10,
    "batch": 8,
    "seed": SEED,
}


SUMMED: dict[str, dict[str, Any]] = {  # fields of a fit's sum; `mu` and `centers` are those of the fit, `last` is kept
    "loss": {"choose": "loss"},
    "shares": {"choose": "shares", "sigma": 0.2, "mu": 0.1},
    "shares of before": {"choose": "shares", "refresh": False, "last": [0.25, 0.75]},
    "posterior": {"choose": "posterior", "last": [0.3, 0.7]},
    "nearest": {"choose": "nearest", "compare": [[0, 40], [50, 60]], "hysteresis": 0.1, "last": [0.0, 1.0], "mu": 0.1},
    "repeated": {"choose": "only", "centers": 1, "repeats": 3, "move": 0.5, "mu": 0.1},
}


OPTIMISERS = {
    "nesterov": Optimiser(name="sgd", momentum=0.9, nesterov=True, clip_norm=0.5),
    "adam": Optimiser(name="adam", eps=1e-4, weight_decay=0.01),
    "adamw": Optimiser(name="adamw", eps=1e-4, weight_decay=0.2, clip_norm=0.5),
}
OPTIMISED: dict[str, Any] = {"lr": 0.01, "mu": 0.1, "steps": 20, "batch": 8, "seed": SEED}
OF_MOVES = 2e-2  # Adam makes whole steps of gradients that are rounding only, such as a bias's before a batch norm


def optimised_tasks() -> dict[str, Any]:
    """A fit for each of OPTIMISERS, as the page reads it."""
    given = {**OPTIMISED, "start": {"sha256": "0"}, "anchor": {"sha256": "1"}}
    return {name: {**given, "optimiser": optimiser.to_json()} for name, optimiser in OPTIMISERS.items()}


def check_optimisers(made: CompilerOutput, folder: Path) -> None:
    """A fit under each optimiser moves as it does under Python's client."""
    got = answered(folder, "optimised")
    data, models = material(made)
    learner = EngineLearner(opened(made, "onnx", folder), made.program)
    for name, optimiser in OPTIMISERS.items():
        fit = Fit(**OPTIMISED, start=models[0], anchor=models[1], optimiser=optimiser)
        wanted = fit_probe.run_fit(learner, fit, data).vector
        assert np.linalg.norm(got[name] - wanted) < OF_MOVES * np.linalg.norm(wanted - models[0]), name


def summed_tasks() -> dict[str, Any]:
    """SUMMED as the page reads it: a task's work, and the choice that the device kept."""
    plain = {name: FIT[name] for name in ("start", "lr", "momentum", "steps", "batch", "seed")}
    tasks = {}
    for name, given in SUMMED.items():
        how, centers = dict(given), range(given.get("centers", 2))
        mu, last = how.pop("mu", 0.0), how.pop("last", None)
        more = {"centers": [{"sha256": str(k)} for k in centers], "open": list(centers), "part": "add", "share": 1.0}
        work = {"job": "fit", **plain, "mu": mu, **({"anchor": "start"} if mu else {}), "sum": how | more}
        work["sum"]["scale"] = {"bits": 32, "devices": 10, "clip": 10.0}
        tasks[name] = {"work": work, "last": last}
    return tasks


def check_sums(made: CompilerOutput, folder: Path) -> None:
    """What is trained, chosen and kept for sums is that of Python's client."""
    got = answered(folder, "summed")
    data, models = material(made)
    learner = EngineLearner(opened(made, "onnx", folder), made.program)
    for name, given in SUMMED.items():
        how = dict(given)
        mu, last, k = how.pop("mu", 0.0), how.pop("last", None), how.pop("centers", 2)
        how["compare"] = tuple(map(tuple, how.get("compare", ())))
        plain = {part: FIT[part] for part in ("lr", "momentum", "steps", "batch", "seed")}
        scale = SumScale(bits=32, devices=10, clip=10.0)
        task = SummedFit(
            **plain, start=models[0], anchor=models[0] if mu else None, mu=mu, upload=False, stage="add",
            centers=np.stack(models[:k]), open=tuple(range(k)), scale=scale, **how,
        )  # fmt: skip
        memory = SummedMemory(trained=None, choice=None if last is None else np.array(last), own=lambda _: None)
        found = add_words(learner, task, DeviceData(train=data), memory)
        assert found.trained is not None
        assert found.choice is not None
        near(got[f"{name}/models"], found.trained.models.ravel())
        near(got[f"{name}/weights"], found.trained.weights)
        near(got[f"{name}/choice"], found.choice)
        assert (f"{name}/own" in got) == (found.own is not None), name
        if found.own is not None:
            near(got[f"{name}/own"], found.own[1])


def save(path: Path, arrays: dict[str, Array], made: CompilerOutput) -> None:
    schema = made.program.schema.sha256
    path.write_bytes(tensors.pack_tensors(arrays, kind="stats", codec="f32", schema=schema))


def material(made: CompilerOutput) -> tuple[Dataset, list[Flat]]:
    """Samples with labels, and two models near the program's own."""
    program, rng = made.program, np.random.default_rng(SEED)
    x = rng.standard_normal((SAMPLES, *program.input)).astype(np.float32)
    state = model(program.model).module.state_dict()
    start = np.concatenate([state[t.name].numpy().ravel() for t in program.schema.tensors]).astype(np.float32)
    other = start.copy()
    n = program.schema.n_params
    other[:n] += 0.05 * rng.standard_normal(n).astype(np.float32)
    other[n:] *= rng.uniform(0.5, 1.5, len(other) - n).astype(np.float32)
    return Dataset(x, rng.integers(program.classes, size=SAMPLES)), [start, other]


def answered(folder: Path, name: str) -> dict[str, Array]:
    return tensors.unpack_tensors((folder / f"{name}-answer.safetensors").read_bytes())[0]


def check_steps(name: str, made: CompilerOutput, folder: Path) -> None:
    """A step is torch's, and the next one begins where it ended."""
    got = answered(folder, "step")
    given = feeds(made.program, "step", batch=8)
    for k in (1, 2):
        wanted = torch_step(model(name).module, given)
        loss = float(wanted.pop("loss"))
        # Not velocities: that of a bias before a batch norm is zero but for rounding, and relative to nothing.
        visible = {port: value for port, value in wanted.items() if not port.startswith("velocity/")}
        assert relative({port: got[f"{k}/{port}"] for port in visible}, visible) < TO_TORCH, name
        assert got["losses"][k - 1] == pytest.approx(loss, rel=TO_TORCH), name
        given = given | {port: np.asarray(value, np.float32) for port, value in wanted.items()}


def check_tasks(made: CompilerOutput, folder: Path) -> None:
    """A probe, a gradient and a fit with weights of the probe are those of Python's client."""
    got = answered(folder, "task")
    data, models = material(made)
    learner, shares = EngineLearner(opened(made, "onnx", folder), made.program), list[Array]()
    asked = Probe(**{**PROBE, "models": models, "want": frozenset(PROBE["want"])})
    reply = fit_probe.run_probe(learner, asked, DeviceData(train=data), keep=shares.append)
    assert reply.losses is not None
    assert reply.posterior is not None
    assert reply.confusion is not None
    assert got["losses"] == pytest.approx(reply.losses, rel=TO_PYTHON)
    assert got["posterior"] == pytest.approx(reply.posterior, rel=TO_PYTHON)
    assert got["votes"].tolist() == np.asarray(reply.votes).tolist()
    assert got["confusion"].tolist() == reply.confusion.ravel().tolist()
    assert reply.inputs is not None
    assert got["inputs"] == pytest.approx(reply.inputs, rel=TO_PYTHON)
    assert reply.answers is not None
    assert got["answers"] == pytest.approx(reply.answers.ravel(), rel=TO_PYTHON, abs=TO_PYTHON)
    totals = [None, [1.0 + k for k in range(made.program.classes)]]  # as in web_steps.mjs
    corrected = fit_probe.run_probe(learner, replace(asked, label_totals=totals), DeviceData(train=data))
    assert corrected.losses is not None
    assert corrected.confusion is not None
    assert got["corrected_losses"] == pytest.approx(corrected.losses, rel=TO_PYTHON)
    assert got["corrected_confusion"].tolist() == corrected.confusion.ravel().tolist()
    labels = Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0)
    assert (
        got["labels"].tolist()
        == np.asarray(fit_probe.run_probe(learner, labels, DeviceData(train=data)).labels).tolist()
    )
    slope = Probe(models=models[:1], want=frozenset({"grad"}), batch=8, seed=SEED)
    near(got["grad"], fit_probe.run_probe(learner, slope, DeviceData(train=data)).grad)
    fit = Fit(**{**FIT, "start": models[0], "anchor": models[1]})
    trained = fit_probe.run_fit(learner, fit, data, posterior=shares[0])
    near(got["vector"], trained.vector)
    near(
        got["own_vector"],
        fit_probe.run_fit(learner, replace(fit, buffers="own"), data, own=models[1], posterior=shares[0]).vector,
    )
    for buffers in ("batch", "own"):
        reply = fit_probe.run_probe(
            learner, replace(asked, buffers=buffers), DeviceData(train=data), own=lambda _: models[1]
        )
        assert got[f"{buffers}_losses"] == pytest.approx(reply.losses, rel=TO_PYTHON)
    assert got["loss"][0] == pytest.approx(trained.loss, rel=TO_PYTHON)


def near(got: Array, wanted: Array | None) -> None:
    assert wanted is not None
    assert np.linalg.norm(got - wanted) < TO_PYTHON * np.linalg.norm(wanted)
