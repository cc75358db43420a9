"""Every model on every engine against torch. A new model is one more row of MODELS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.protocol.messages import canonical, parse_json
from edge_client.protocol.program import FUNCTIONS, LIMIT_BYTES, Program
from export.onnx import MAX_IR_VERSION, OPSET, run_onnx
from tests.programs import BATCH, compiled, feeds, model, opened, relative, torch_evaluate, torch_step

MODELS = ("digits-mlp", "wecfl-cnn", "gn-cnn")
ENGINES = ("onnx", "litert", "pt2")
SINGLE_STEP = 1e-5  # float32: sums over 32 x 784 products round differently in each runtime, by a few 1e-6
TRAJECTORY = 1e-9  # float64, 20 steps: rounding only; a wrong gradient shows in the first digit

each_model = pytest.mark.parametrize("name", MODELS)
each_engine = pytest.mark.parametrize("engine", ENGINES)


@each_engine
@each_model
def test_one_step_is_torchs_step(name: str, engine: str, tmp_path: Path) -> None:
    made = compiled(name)
    given = feeds(made.program, "step", batch=BATCH)
    got = opened(made, engine, tmp_path).step(given)
    assert relative(got, torch_step(model(name).module, given)) < SINGLE_STEP


@each_engine
@each_model
def test_evaluation_is_torchs_in_inference_mode(name: str, engine: str, tmp_path: Path) -> None:
    made = compiled(name)
    given = feeds(made.program, "evaluate", batch=BATCH)
    got = opened(made, engine, tmp_path).evaluate(given)
    assert relative(got, torch_evaluate(model(name).module, given)) < SINGLE_STEP


@pytest.mark.parametrize("batch", [1, 2, 13])
@pytest.mark.parametrize("engine", ["onnx", "pt2"])
@each_model
def test_a_batch_of_any_size_steps_like_torch(name: str, engine: str, batch: int, tmp_path: Path) -> None:
    made = compiled(name)
    given = feeds(made.program, "step", batch=batch)
    engine_opened = opened(made, engine, tmp_path)
    assert engine_opened.fixed_batch is None
    assert relative(engine_opened.step(given), torch_step(model(name).module, given)) < SINGLE_STEP


@pytest.mark.parametrize(
    ("name", "engine"), [("digits-mlp", "onnx"), *((name, "pt2") for name in MODELS)]
)  # ONNX Runtime has no float64 convolution
def test_twenty_steps_in_float64_end_where_torch_ends(name: str, engine: str, tmp_path: Path) -> None:
    made = compiled(name, "float64", (engine,))
    running = opened(made, engine, tmp_path)
    ours = feeds(made.program, "step", batch=BATCH)
    theirs = dict(ours)
    for k in range(20):
        batch = {n: v for n, v in feeds(made.program, "step", batch=BATCH, seed=k).items() if n in ("x", "y", "q")}
        ours |= running.step(ours | batch)
        theirs |= torch_step(model(name).module, theirs | batch)
    moved = {n: v for n, v in theirs.items() if n.startswith(("w/", "buffers/", "velocity/"))}
    assert relative({n: ours[n] for n in moved}, moved) < TRAJECTORY


@each_engine
def test_the_second_step_still_pulls_towards_the_anchor_it_was_given(engine: str, tmp_path: Path) -> None:
    """Exporters merge two example inputs that are one object; the graph would then restart from the anchor."""
    made = compiled("digits-mlp")
    running = opened(made, engine, tmp_path)
    given = feeds(made.program, "step", batch=BATCH)
    given |= {n: v.copy() for n, v in given.items()}
    given |= {f"w/{t.name}": given[f"anchor/{t.name}"].copy() for t in made.program.schema.tensors}
    second = given | running.step(given)
    assert relative(running.step(second), torch_step(model("digits-mlp").module, second)) < SINGLE_STEP


@each_engine
@each_model
def test_an_engine_never_changes_its_feeds(name: str, engine: str, tmp_path: Path) -> None:
    made = compiled(name)
    given = feeds(made.program, "step", batch=BATCH)
    before = {n: v.copy() for n, v in given.items()}
    result = opened(made, engine, tmp_path).step(given)
    for value in result.values():
        if value.ndim:
            value[:] = np.nan  # a result is the caller's own
    assert all(np.array_equal(given[n], before[n]) for n in given)


@each_engine
def test_momentum_lr_and_mu_are_inputs_and_not_constants(engine: str, tmp_path: Path) -> None:
    made = compiled("digits-mlp")
    running = opened(made, engine, tmp_path)
    given = feeds(made.program, "step", batch=BATCH)
    for scalar in ("lr", "momentum", "mu"):
        changed = given | {scalar: np.asarray(0.9, dtype=np.float32)}
        assert relative(running.step(changed), torch_step(model("digits-mlp").module, changed)) < SINGLE_STEP


@each_model
def test_inference_gives_the_logits_of_evaluation(name: str) -> None:
    made = compiled(name)
    given = feeds(made.program, "evaluate", batch=BATCH)
    inputs = [p.name for p in made.program.functions["infer"].inputs]
    file = made.files[made.program.containers["onnx"]["infer"].sha256]
    (logits,) = run_onnx(file, {n: given[n] for n in inputs})
    expected = torch_evaluate(model(name).module, given)["logits"]
    assert relative({"logits": logits}, {"logits": expected}) < SINGLE_STEP


@pytest.mark.parametrize("function", FUNCTIONS)
@each_model
def test_onnx_files_stay_within_what_old_runtimes_read(name: str, function: str) -> None:
    import onnx

    made = compiled(name)
    proto = onnx.load_model_from_string(made.files[made.program.containers["onnx"][function].sha256])
    assert proto.ir_version <= MAX_IR_VERSION
    assert {(o.domain, o.version) for o in proto.opset_import} == {("", OPSET)}


@each_model
def test_no_file_names_a_path_of_the_machine_that_made_it(name: str) -> None:
    here = str(Path(__file__).parents[2]).encode()
    libraries = str(Path(np.__file__).parents[1]).encode()
    assert not [sha for sha, data in compiled(name).files.items() if here in data or libraries in data]


@each_model
def test_the_manifest_survives_the_wire(name: str) -> None:
    program = compiled(name).program
    assert Program.from_json(parse_json(canonical(program.to_json()), LIMIT_BYTES)) == program


@pytest.mark.parametrize("engine", ["onnx", "litert"])
def test_a_device_without_torch_trains_without_torch(engine: str, tmp_path: Path) -> None:
    made = compiled("digits-mlp")
    opened(made, engine, tmp_path)  # writes the files
    (tmp_path / "program.json").write_bytes(canonical(made.program.to_json()))
    named: dict[str, Any] = dict(feeds(made.program, "step", batch=BATCH))
    np.savez(tmp_path / "feeds.npz", **named)
    code = f"""
import sys
from pathlib import Path
import numpy as np
from edge_client.engines.base import open_engine
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import LIMIT_BYTES, Program
folder = Path({str(tmp_path)!r})
program = Program.from_json(parse_json((folder / "program.json").read_bytes(), LIMIT_BYTES))
engine = open_engine({engine!r}, program, {{"step": folder / program.containers[{engine!r}]["step"].sha256}})
engine.step(dict(np.load(folder / "feeds.npz")))
print(sorted({{"torch", "sklearn", "scipy", "onnx", "litert_torch", "coordinator", "export"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
    assert "XNNPACK" not in ran.stderr
