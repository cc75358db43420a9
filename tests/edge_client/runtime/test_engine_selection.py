"""A device whose runtime computes wrongly takes another engine, or trains nothing and says so; a run is made once."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.engines.base import Engine, open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.engines.onnx import OnnxUpdate
from edge_client.engines.runtime_versions import RUNTIME_PACKAGES, runtime_version
from edge_client.protocol import codecs
from edge_client.protocol.golden_run import Golden
from edge_client.protocol.message_schemas import RUNTIME
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit, Probe, Tensors
from edge_client.runtime import engine_selection, golden_results
from edge_client.runtime.golden_results import FAR, FILE, KEPT_MAX, LIMIT_BYTES, Check, GoldenResults
from edge_client.runtime.systemd_watchdog import Watchdog
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from tests.edge_client.engines.broken import break_engine
from tests.support.programs import BATCH, compiled
from tests.support.scripted_coordinator import DeviceStage, Script

SHA = "ab" * 32
OFF = 0.5


@dataclass
class Counted:
    """A check that counts, and gives what it is told to."""

    off: float = 0.0
    made: list[str] = field(default_factory=list)

    def __call__(self, engine: Engine, _program: Program, _golden: Golden) -> float:
        self.made.append(engine.name)
        if self.off < 0:
            raise RuntimeError("no kernel")
        return self.off


class Named:
    """An engine as far as a vetting with a check of its own asks."""

    name: str = "onnx"
    place: str = "cpu"
    fixed_batch: int | None = None

    def update(self, feeds: Any, rule: Any = None) -> Any:  # noqa: ANN401 - never called
        raise NotImplementedError

    def evaluate(self, feeds: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled("digits-mlp").program


# -- results that are kept


def test_a_result_is_kept_over_restarts_and_is_not_computed_again(tmp_path: Path, program: Program) -> None:
    check = Counted(off=OFF)
    refusals = [GoldenResults(tmp_path / FILE, check).refused(Named(), program, SHA) for _ in range(3)]
    assert check.made == ["onnx"]
    assert refusals[0] == refusals[2]
    assert refusals[0] is not None
    assert refusals[0].difference == OFF
    assert str(refusals[0]).startswith(f"{runtime_version('onnx')} computes wrongly on cpu: 5.0e-01 from")


def test_another_version_place_or_program_is_computed_anew(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Counted()
    assert GoldenResults(tmp_path / FILE, check).refused(Named(), program, SHA) is None
    monkeypatch.setattr(golden_results, "runtime_version", lambda engine: f"{engine}runtime 99.0")
    GoldenResults(tmp_path / FILE, check).refused(Named(), program, SHA)
    assert len(check.made) == 2
    elsewhere = Named()
    elsewhere.place = "cuda"
    GoldenResults(tmp_path / FILE, check).refused(elsewhere, program, SHA)
    GoldenResults(tmp_path / FILE, check).refused(Named(), program, "cd" * 32)
    assert len(check.made) == 4
    GoldenResults(tmp_path / FILE, check).refused(Named(), program, SHA)
    assert len(check.made) == 4


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"v":1}', b'{"found":[["a",1]],"v":1}', b'{"found":[[1,0.0]],"v":1}', b'{"found":[],"v":2}']
)
def test_a_damaged_file_means_that_the_runs_are_made_again(tmp_path: Path, program: Program, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    check = Counted()
    for _ in range(2):
        assert GoldenResults(tmp_path / FILE, check).refused(Named(), program, SHA) is None
    assert len(check.made) == 1


@pytest.mark.parametrize("off", [np.inf, np.nan, -1.0])
def test_a_runtime_that_gives_nonsense_or_fails_in_the_run_is_refused(
    tmp_path: Path, program: Program, off: float
) -> None:
    refused = GoldenResults(tmp_path / FILE, Counted(off=off)).refused(Named(), program, SHA)
    assert refused is not None
    assert refused.difference == FAR


@pytest.mark.parametrize(
    "wrong",
    [MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")],
)
def test_a_run_that_ends_for_want_of_memory_says_nothing_of_the_runtime(
    tmp_path: Path, program: Program, wrong: Exception
) -> None:
    """It was noted as a wrong runtime, and the device trained no more until the file was deleted."""

    def check(*_: object) -> float:
        raise wrong

    with pytest.raises(MemoryError):
        GoldenResults(tmp_path / FILE, check).refused(Named(), program, SHA)
    assert GoldenResults(tmp_path / FILE, Counted()).refused(Named(), program, SHA) is None


def test_the_file_stays_small(tmp_path: Path, program: Program) -> None:
    vets = GoldenResults(tmp_path / FILE, Counted())
    for k in range(KEPT_MAX + 5):
        vets.refused(Named(), program, f"{k:064x}")
    data = (tmp_path / FILE).read_bytes()
    assert len(parse_json(data, LIMIT_BYTES)["found"]) == KEPT_MAX


@pytest.mark.parametrize("engine", RUNTIME_PACKAGES)
def test_a_runtime_is_named_in_the_words_that_a_presence_message_takes(engine: str) -> None:
    assert re.fullmatch(RUNTIME, runtime_version(engine) or "")


# -- a device's rounds


class RealStage(DeviceStage):
    """A stage with a compiled program, real runtimes, and the containers of every engine to fetch."""

    def __post_init__(self) -> None:
        made = compiled("digits-mlp")
        self.program = made.program
        super().__post_init__()
        blobs = {sha256: self.blob(data, "container") for sha256, data in made.files.items()}
        self.of = {e: {f: blobs[c.sha256] for f, c in files.items()} for e, files in self.program.containers.items()}
        self.containers = dict(self.of["onnx"])
        rng = np.random.default_rng(3)
        data = Dataset(rng.standard_normal((20, *self.program.input)).astype(np.float32), rng.integers(10, size=20))
        self.local = DeviceData(train=data, test=data)
        self.started: list[str] = []

    def open_engine(self, name: str, program: Program, files: Mapping[str, Path], **settings: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        self.started.append(name)
        return open_engine(name, program, files, **settings)

    def round(self, number: int) -> Script:
        yield
        self.ask(self.task, round_=number)
        yield
        self.go(window=16)
        yield
        self.ack("ok")
        yield

    @property
    def task(self) -> Fit:
        return self.fit(steps=4, batch=BATCH)

    def trained_by(self, engine: str) -> Any:  # noqa: ANN401 - an array
        """What the task gives with an engine, by hand."""
        step = self.program.containers[engine]["step"].sha256
        path = self.folder / "by hand"
        path.write_bytes(self.blobs[step])
        here = open_engine(engine, self.program, {"step": path}, device="cpu")
        return fit_probe.run_fit(EngineLearner(here, self.program), self.task, self.local.train).vector


@pytest.fixture
def stage(tmp_path: Path) -> RealStage:
    return RealStage(tmp_path)


def caps(stage: DeviceStage) -> dict[str, Any]:
    return next(m["caps"] for m in reversed(stage.said("st")) if m["s"] == "on")


def test_a_right_runtime_is_used_and_named(stage: RealStage) -> None:
    stage.play(stage.round(1))
    assert set(stage.started) == {"onnx"}
    assert caps(stage)["runtime"] == runtime_version("onnx")
    assert "refused" not in caps(stage)
    assert len(stage.said("rdy")) > 0


def test_a_wrong_runtime_gives_way_to_another_engine_for_a_whole_round(
    stage: RealStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = stage.trained_by("litert")
    break_engine(monkeypatch, "onnx", "anchor", lambda a: np.full_like(a, 7.0))
    stage.play(stage.round(1))
    start = stage.put(np.asarray(stage.task.start), "model")
    delta = codecs.decode_vector(stage.uploaded(), stage.schema, kind="delta", codec="f32", base=start.sha256)
    assert np.array_equal(delta, expected.astype(np.float32) - stage.task.start)
    (refused,) = caps(stage)["refused"]
    assert (caps(stage)["engine"], caps(stage)["runtime"]) == ("litert", runtime_version("litert"))
    assert (refused["engine"], refused["runtime"]) == ("onnx", runtime_version("onnx"))
    assert refused["difference"] > 10 * stage.program.golden["onnx"].tolerance
    told = [r.getMessage() for r in caplog.records if "computes wrongly" in r.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("; using litert")
    assert stage.of["litert"]["step"].sha256 in {get["sha256"] for get in stage.said("get")}


def test_what_was_found_is_not_computed_again_in_the_next_life(
    stage: RealStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def counted(engine: Engine, program: Program, golden: Golden) -> float:
        runs.append(engine.name)
        return run_golden(engine, program, golden)

    break_engine(monkeypatch, "onnx", "lr", np.zeros_like)
    stage.check = counted
    stage.play(stage.round(1))
    stage.play(stage.round(2))
    assert runs == ["onnx", "litert"]
    assert caps(stage)["engine"] == "litert"


def test_when_no_engine_is_left_the_task_is_refused_and_the_coordinator_told_why(
    stage: RealStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("onnx", "litert", "pt2"):
        break_engine(monkeypatch, engine, "linear", lambda a: a + 1)
    first = stage.put(np.asarray(stage.task.start), "model").sha256

    stage.play_turns(
        lambda: stage.ask(stage.task),
        lambda: stage.ask(Probe(models=[stage.model(1)], want=frozenset({"loss"}), batch=BATCH, seed=1), round_=2),
    )
    assert [nack["code"] for nack in stage.said("nack")] == ["no_engine", "no_engine"]
    assert stage.last("nack")["detail"].startswith(f"{runtime_version('onnx')} computes wrongly on cpu: ")
    assert [each["engine"] for each in caps(stage)["refused"]] == ["onnx", "litert", "pt2"]
    assert caps(stage)["engine"] == "onnx"
    assert stage.said("rdy") == []
    assert first not in {get["sha256"] for get in stage.said("get")}  # no model is fetched in vain


def test_an_engine_that_is_not_installed_takes_no_place(stage: RealStage, monkeypatch: pytest.MonkeyPatch) -> None:
    break_engine(monkeypatch, "onnx", "mu", lambda a: a * 3)
    monkeypatch.setattr(engine_selection, "runtime_version", lambda engine: None if engine == "litert" else "x")
    stage.play(stage.round(1))
    assert caps(stage)["engine"] == "pt2"
    assert "litert" not in stage.started


def test_an_engine_that_cannot_be_opened_takes_no_place(stage: RealStage, monkeypatch: pytest.MonkeyPatch) -> None:
    break_engine(monkeypatch, "onnx", "mu", lambda a: a * 3)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    monkeypatch.setitem(sys.modules, "tflite_runtime.interpreter", None)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.compiled_model", None)
    stage.play(stage.round(1))
    assert caps(stage)["engine"] == "pt2"
    assert [each["engine"] for each in caps(stage)["refused"]] == ["onnx"]


def test_a_task_that_names_the_file_of_another_engine_is_done_with_ones_own(stage: RealStage) -> None:
    stage.play_turns(lambda: stage.ask(stage.task, container=stage.of["litert"]["step"]))
    assert set(stage.started) == {"onnx"}
    assert len(stage.said("rdy")) == 1


@pytest.mark.parametrize("check", [None, run_golden])
def test_a_device_is_alive_before_each_step_of_a_golden_run(
    stage: RealStage, monkeypatch: pytest.MonkeyPatch, check: Check | None
) -> None:
    """A step of a large model may take a minute; `run_golden` by itself gives no sign."""
    alive, before, step = list[float](), list[int](), OnnxUpdate.step
    monkeypatch.setattr(Watchdog, "notify_alive", lambda _, now_s: alive.append(now_s))

    def noted(self: OnnxUpdate, feeds: Tensors) -> float:
        before.append(len(alive))
        return step(self, feeds)

    monkeypatch.setattr(OnnxUpdate, "step", noted)
    stage.check = check
    probe = Probe(models=[stage.model(1)], want=frozenset({"loss"}), batch=BATCH, seed=1)
    stage.play_turns(lambda: stage.ask(probe))
    assert len(before) == len(stage.program.golden["onnx"].losses)
    assert len(set(before)) == (len(before) if check is None else 1)
