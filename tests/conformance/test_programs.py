"""Every model on every engine against torch. A new model is one more row of MODELS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.engines.base import FIXED_ROLES, UPDATED_ROLES, Engine, run_step
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.program import ENGINES, FUNCTIONS, MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Array
from export.containers.write_onnx import MAX_IR_VERSION, OPSET, open_onnx
from tests.support.programs import (
    BATCH,
    compiled,
    feeds,
    model,
    opened,
    relative,
    running,
    torch_evaluate,
    torch_step,
)
from tests.support.web_steps import check_life, check_page

MODELS = ("digits-mlp", "wecfl-cnn", "gn-cnn")
# ONNX Runtime has no float64 convolution
FLOAT64 = {"digits-mlp": ("onnx", "pt2"), "wecfl-cnn": ("pt2",), "gn-cnn": ("pt2",)}
SINGLE_STEP = 1e-5  # float32: sums over 32 x 784 products round differently in each runtime, by a few 1e-6
TRAJECTORY = 1e-9  # float64, 20 steps: rounding only; a wrong gradient shows in the first digit

TWO_STEPS = 2e-5  # float32: the second step divides by the batch norm's spread, which the first has rounded
TERMS = {  # what each switches on; without it the anchor, the velocity and the linear term are there and have no force
    "none": (),
    "q": ("q",),
    "linear": ("linear",),
    "prox": ("mu",),
    "momentum": ("momentum",),
    "all": ("q", "linear", "mu", "momentum"),
}

each_model = pytest.mark.parametrize("name", MODELS)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def fresh(given: dict[str, Array]) -> dict[str, Array]:
    """What a step reads anew."""
    return {n: v for n, v in given.items() if n.partition("/")[0] not in (*UPDATED_ROLES, *FIXED_ROLES)}


def neutral(name: str, value: Array) -> Array:
    """The objective is the mean loss, and the step plain SGD."""
    if name == "q":
        return np.full_like(value, 1 / len(value))
    return np.zeros_like(value) if name.partition("/")[0] in ("linear", "mu", "momentum") else value


def trained(engine: Engine, given: dict[str, Array], batches: list[dict[str, Array]]) -> dict[str, Array]:
    """One local update: what it moved, and the `loss` of every step."""
    update = engine.update(given)
    losses = [update.step(batch) for batch in batches]
    return update.read() | {"loss": np.array(losses)}


def visible(moved: dict[str, Array]) -> dict[str, Array]:
    """Without velocities: that of a bias before a batch norm is zero but for rounding, and relative to nothing."""
    return {n: v for n, v in moved.items() if not n.startswith("velocity/")}


def torch_trained(name: str, given: dict[str, Array], batches: list[dict[str, Array]]) -> dict[str, Array]:
    """The same through torch.autograd in float64."""
    feed, losses, moved = dict(given), [], dict[str, Array]()
    for batch in batches:
        moved = torch_step(model(name).module, feed | batch)
        losses.append(moved.pop("loss"))
        feed |= moved
    return moved | {"loss": np.array(losses)}


@each_engine
@each_model
def test_one_step_is_torchs_step(name: str, engine: str) -> None:
    made = compiled(name)
    given = feeds(made.program, "step", batch=BATCH)
    got = run_step(running(name, engine), given)
    assert relative(got, torch_step(model(name).module, given)) < SINGLE_STEP


@each_engine
@each_model
def test_evaluation_is_torchs_in_inference_mode(name: str, engine: str) -> None:
    made = compiled(name)
    given = feeds(made.program, "evaluate", batch=BATCH)
    got = running(name, engine).evaluate(given)
    assert relative(got, torch_evaluate(model(name).module, given)) < SINGLE_STEP


@pytest.mark.parametrize("batch", [1, 2, 13])
@pytest.mark.parametrize("engine", ["onnx", "pt2"])
@each_model
def test_a_batch_of_any_size_steps_like_torch(name: str, engine: str, batch: int) -> None:
    made = compiled(name)
    given = feeds(made.program, "step", batch=batch)
    engine_opened = running(name, engine)
    assert engine_opened.fixed_batch is None
    assert relative(run_step(engine_opened, given), torch_step(model(name).module, given)) < SINGLE_STEP


@pytest.mark.parametrize(("name", "engine"), [(name, one) for name, engines in FLOAT64.items() for one in engines])
def test_twenty_steps_in_float64_end_where_torch_ends(name: str, engine: str) -> None:
    made, used = compiled(name, "float64", FLOAT64[name]), running(name, engine, "float64", FLOAT64[name])
    given = feeds(made.program, "step", batch=BATCH)
    batches = [fresh(feeds(made.program, "step", batch=BATCH, seed=k)) for k in range(20)]
    ours = trained(used, given, batches)
    assert relative(ours, torch_trained(name, given, batches)) < TRAJECTORY


@each_engine
def test_the_second_step_still_pulls_towards_the_anchor_it_was_given(engine: str) -> None:
    """Exporters merge two example inputs that are one object; the graph would then restart from the anchor."""
    made, used = compiled("digits-mlp"), running("digits-mlp", engine)
    given = feeds(made.program, "step", batch=BATCH)
    given |= {n: v.copy() for n, v in given.items()}
    given |= {f"w/{t.name}": given[f"anchor/{t.name}"].copy() for t in made.program.schema.tensors}
    second = given | run_step(used, given)
    assert relative(run_step(used, second), torch_step(model("digits-mlp").module, second)) < SINGLE_STEP


@each_engine
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("name", ["digits-mlp", "wecfl-cnn"])
def test_every_term_of_the_objective_is_torchs_alone_and_with_the_others(name: str, term: str, engine: str) -> None:
    """Two steps, so that what the first one moved is read by the second. Half of the samples tie in every pool."""
    made = compiled(name)
    given = feeds(made.program, "step", batch=BATCH)
    off = {n: neutral(n, v) for n, v in given.items()}
    on = off | {n: v for n, v in given.items() if n.partition("/")[0] in TERMS[term]}
    assert any((on[n] != off[n]).any() for n in on) == (term != "none")
    batches = [fresh(on), fresh(on) | {"x": given["x"][::-1].copy()}]
    ours = trained(running(name, engine), on, batches)
    assert relative(visible(ours), visible(torch_trained(name, on, batches))) < TWO_STEPS


@each_engine
def test_an_update_takes_its_step_size_momentum_and_pull_from_its_feeds(engine: str) -> None:
    made, used = compiled("digits-mlp"), running("digits-mlp", engine)
    given = feeds(made.program, "step", batch=BATCH)
    for scalar in ("lr", "momentum", "mu"):
        changed = given | {scalar: np.asarray(0.9, dtype=np.float32)}
        assert relative(run_step(used, changed), torch_step(model("digits-mlp").module, changed)) < SINGLE_STEP


@each_engine
@each_model
def test_an_update_changes_neither_its_feeds_nor_what_was_read_from_it(name: str, engine: str) -> None:
    made = compiled(name)
    given = feeds(made.program, "step", batch=BATCH)
    before = {n: v.copy() for n, v in given.items()}
    update = running(name, engine).update(given)
    update.step(given)
    first = update.read()
    seen = {n: v.copy() for n, v in first.items()}
    update.step(given)
    update.step(given)
    assert all(np.array_equal(given[n], before[n]) for n in given)
    assert all(np.array_equal(first[n], seen[n]) for n in seen)


@each_engine
def test_nobody_disturbs_an_update_by_reading_it_or_by_an_evaluation_between_steps(engine: str) -> None:
    made, used = compiled("wecfl-cnn"), running("wecfl-cnn", engine)
    given = feeds(made.program, "step", batch=BATCH)
    batches = [fresh(given)] * 3
    alone = trained(used, given, batches)
    update, losses = used.update(given), []
    for batch in batches:
        losses.append(update.step(batch))
        for value in update.read().values():
            if value.ndim:
                value[:] = np.nan  # the reader's own
        used.evaluate(feeds(made.program, "evaluate", batch=BATCH))
    again = update.read() | {"loss": np.array(losses)}
    assert all(np.array_equal(again[n], alone[n]) for n in alone)


@pytest.mark.parametrize("engine", ["onnx", "pt2"])
def test_a_smaller_last_batch_trains_on_from_the_larger_ones(engine: str) -> None:
    made = compiled("wecfl-cnn")
    given = feeds(made.program, "step", batch=BATCH)
    batches = [fresh(feeds(made.program, "step", batch=size)) for size in (5, 2)]
    ours = trained(running("wecfl-cnn", engine), given, batches)
    assert relative(ours, torch_trained("wecfl-cnn", given, batches)) < TWO_STEPS


@each_model
def test_inference_gives_the_logits_of_evaluation(name: str) -> None:
    made = compiled(name)
    given = feeds(made.program, "evaluate", batch=BATCH)
    inputs = [p.name for p in made.program.functions["infer"].inputs]
    file = made.files[made.program.containers["onnx"]["infer"].sha256]
    (logits,) = open_onnx(file)({n: given[n] for n in inputs})
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
    assert Program.from_json(parse_json(canonical_json(program.to_json()), MAX_PROGRAM_BYTES)) == program


@pytest.mark.parametrize("engine", ["onnx", "litert"])
def test_a_device_without_torch_trains_without_torch(engine: str, tmp_path: Path) -> None:
    made = compiled("digits-mlp")
    opened(made, engine, tmp_path)  # writes the files
    (tmp_path / "program.json").write_bytes(canonical_json(made.program.to_json()))
    named: dict[str, Any] = dict(feeds(made.program, "step", batch=BATCH))
    np.savez(tmp_path / "feeds.npz", **named)
    code = f"""
import sys
from pathlib import Path
import numpy as np
from edge_client.engines.base import open_engine, run_step
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
folder = Path({str(tmp_path)!r})
program = Program.from_json(parse_json((folder / "program.json").read_bytes(), MAX_PROGRAM_BYTES))
engine = open_engine({engine!r}, program, {{"step": folder / program.containers[{engine!r}]["step"].sha256}})
run_step(engine, dict(np.load(folder / "feeds.npz")))
print(sorted({{"torch", "sklearn", "scipy", "onnx", "litert_torch", "coordinator", "export"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
    assert "XNNPACK" not in ran.stderr


@pytest.mark.timeout(600)  # it compiles three programs and runs them in Node
def test_the_phones_page_takes_torchs_steps_and_does_what_pythons_client_does(tmp_path: Path) -> None:
    check_page({name: compiled(name) for name in MODELS}, tmp_path)


def test_the_phones_page_lives_a_devices_life(tmp_path: Path) -> None:
    check_life(compiled("digits-mlp"), tmp_path)
