"""fedcenters-export program: what it writes runs and fits; what cannot work is one message with a hint and a code."""

from __future__ import annotations

import gc
import io
import json
import pwd
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from edge_client.rare_collection import RARE
from export.cli import app
from export.compiler.user_model import load_model
from tests.support.export_cli import run_export

SOURCE = '''
"""Models of a reader; a file of this name exists nowhere else."""
import torch
from torch import nn

print("imported")


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(width * 9, 3)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Bent(Net):
    """The same tensors, another function: what a mistake in a graph looks like from outside."""

    def forward(self, x):
        return 1.01 * super().forward(x)


class Grid(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 12), nn.Dropout(0.2), nn.Unflatten(1, (3, 4)))


class Branching(Net):
    def forward(self, x):
        return super().forward(x) if self.head.weight.sum() > 0 else super().forward(-x)


class Bessel(Net):
    def forward(self, x):
        return torch.special.i0e(super().forward(x))


class Broken(Net):
    def forward(self, x):
        return {}["head"]


def number():
    return 7


def small():
    """A function could do anything; this one is harmless."""
    return Net(2)


ready = Net()
'''
PROGRAM = ("program", "--input-shape", "1,8,8", "--classes", "3")


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "readers_models.py").write_text(SOURCE)
    (folder / "readers_typo.py").write_text("class Net(:\n")
    (folder / "readers_needs.py").write_text("import a_package_that_does_not_exist\n")
    return folder


@pytest.fixture(scope="module")
def written(readers_folder: Path) -> Path:
    """What a person would get; stdout in told.json, stderr in talk.txt."""
    out, told, talk = readers_folder / "made", io.StringIO(), io.StringIO()
    args = ("--model", "readers_models:Net", "--model-args", '{"width": 2}', "--batch", "4", "--tflite", "--pt2")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(talk):
        patch.chdir(readers_folder)
        patch.setattr(sys, "path", [*sys.path])
        assert run_export(*PROGRAM, *args, "--out", "made", "--json") == 0
    (readers_folder / "told.json").write_text(told.getvalue())
    (readers_folder / "talk.txt").write_text(talk.getvalue())
    return out


@pytest.fixture(autouse=True)
def _in_the_readers_folder(readers_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(readers_folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("command", ["cache", "verify", "bundle"])
def test_every_command_finds_modules_of_the_current_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    CliRunner().invoke(app, [command, "nowhere", "--out", "out"])
    assert sys.path[0] == str(tmp_path)


def test_the_garbage_collector_seldom_runs_while_a_command_works(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tells_threshold.py").write_text("import gc\nprint('threshold', gc.get_threshold())\n")
    assert run_export(*PROGRAM, "--model", "tells_threshold:Net", "--out", "none") != 0
    assert f"threshold {RARE}" in capsys.readouterr().err
    assert gc.get_threshold() != RARE


def test_the_cache_of_a_user_without_a_home_says_so_and_what_gives_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that the cache is off, which only FEDCENTERS_CACHE=off turns off."""
    for name in ("FEDCENTERS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a number without an account, as in a container
    assert run_export("cache") == 0
    said = capsys.readouterr().out
    assert said.startswith("nothing is cached, as this user has no home folder: set HOME, or XDG_CACHE_HOME, ")
    assert said.endswith("or name a folder by FEDCENTERS_CACHE\n")
    monkeypatch.setenv("FEDCENTERS_CACHE", "off")
    assert run_export("cache") == 0
    assert capsys.readouterr().out == "the cache is off\n"


def test_the_folder_holds_readable_names(written: Path) -> None:
    names = {p.name for p in written.iterdir()}
    containers = {f"{function}.{ending}" for function in ("step", "evaluate", "infer") for ending in ("onnx", "pt2")}
    assert names == containers | {"program.tflite", "program.json", "weights.npz"}


def test_json_is_one_object_and_everything_else_is_talk(written: Path) -> None:
    told = json.loads((written.parent / "told.json").read_text())
    assert {row["file"]: row["size"] for row in told["files"]} == {p.name: p.stat().st_size for p in written.iterdir()}
    assert all(row["difference"] < 1e-4 for row in told["files"] if "engine" in row)
    assert {row["engine"]: row["batch"] for row in told["files"] if "engine" in row} == {
        "onnx": "any",
        "litert": 4,
        "pt2": "any",
    }
    talk = (written.parent / "talk.txt").read_text()
    assert "imported" in talk
    assert "compiling readers_models:Net for onnx, litert, pt2" in talk
    assert "\ncompiling litert\n" in talk
    assert "\ncompiling golden run\n" in talk


def test_the_weights_are_the_inputs_of_infer(written: Path) -> None:
    inputs = json.loads((written / "program.json").read_text())["functions"]["infer"]["inputs"]
    with np.load(written / "weights.npz", allow_pickle=False) as weights:
        assert {name: list(weights[name].shape) for name in weights} == {n: s for n, _, s in inputs if n != "x"}


def check(folder: Path, model: str, *more: str) -> int:
    args = ("--check", str(folder), "--model", model, "--model-args", "[2]", *more)
    return run_export("program", *args)


def test_check_compares_every_function_of_every_file(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written, "readers_models:Net", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert {(row["engine"], row["function"]) for row in told["files"]} == {
        (engine, function) for engine in ("onnx", "litert", "pt2") for function in ("step", "evaluate", "infer")
    }
    assert all(0 < row["difference"] < told["tolerance"] for row in told["files"])


def test_a_folder_alone_says_what_it_was_made_from_and_is_checked_against_that(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = json.loads((written / "program.json").read_text())["origin"]
    assert origin == {"model": "readers_models:Net", "args": {"width": 2}, "seed": 0}
    assert run_export("program", "--check", str(written)) == 0
    assert capsys.readouterr().out.count("ok  ") == 9


def recorded(folder: Path, tmp_path: Path, **changed: Any) -> Path:  # noqa: ANN401 - JSON
    """A copy of the folder that says it was made from something else."""
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    raw = json.loads((copied / "program.json").read_text())
    raw["origin"] = raw["origin"] | changed if changed else None
    (copied / "program.json").write_text(json.dumps(raw))
    return copied


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "os:system", "args": ["touch ran"]}, "os:system, which is no class of torch modules"),
        ({"model": "readers_models:small", "args": []}, "--model readers_models:small"),
        ({"model": "gone_models:Net"}, "there is no module 'gone_models'"),
        ({"args": {"wide": 2}}, "unexpected keyword argument 'wide'"),
        ({}, "name it with --model"),
    ],
)
def test_a_recorded_origin_that_cannot_be_used_is_one_error_and_runs_nothing(
    changed: dict[str, Any],
    said: str,
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = recorded(written, tmp_path, **changed)
    monkeypatch.chdir(tmp_path)
    assert run_export("program", "--check", str(folder)) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("hint: ") == 1
    assert not (tmp_path / "ran").exists()


def test_check_finds_a_graph_that_computes_something_else(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written, "readers_models:Bent") == 5
    told = capsys.readouterr()
    assert told.out.count("FAIL") == 9
    assert "ok  " not in told.out
    assert "hint: " in told.err


def test_check_fails_above_the_tolerance_it_was_given(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written, "readers_models:Net", "--tolerance", "1e-12") == 5
    assert "by more than 1e-12" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step.onnx", "program.tflite", "infer.pt2"])
def test_check_finds_a_changed_byte(
    name: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(written, tmp_path / "copied"))
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    assert check(copied, "readers_models:Net") == 5
    assert f"{name} is not the file that program.json names" in capsys.readouterr().err


def test_check_refuses_a_model_with_other_tensors(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--check", str(written), "--model", "readers_models:Net", "--model-args", '{"width": 3}')
    assert run_export("program", *args) == 5
    assert "body.0.weight [2, 1, 3, 3]" in capsys.readouterr().err


def test_squared_error_is_called_mse_and_the_table_is_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ("--model", "torch.nn:Linear", "--model-args", "[4, 2]", "--input-shape", "4", "--classes", "2")
    pt2 = ("--no-onnx", "--pt2", "--loss", "mse", "--out", str(out))
    assert run_export("program", *args, *pt2) == 0
    assert json.loads((out / "program.json").read_text())["loss"] == "squared-error"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "file", "step.pt2", "evaluate.pt2", "infer.pt2", "weights.npz", "program.json",
    ]  # fmt: skip
    assert run_export("program", "--check", str(out), *args[:4]) == 0


def test_targets_of_any_shape_are_written_and_checked(readers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = readers_folder / "grid"
    args = ("--model", "readers_models:Grid", "--input-shape", "5", "--loss", "mse", "--target-shape", "3,4")
    assert run_export("program", *args, "--no-onnx", "--pt2", "--out", str(out)) == 0
    program = json.loads((out / "program.json").read_text())
    assert program["target"] == [3, 4]
    assert ["y", "float32", ["batch", 3, 4]] in program["functions"]["step"]["inputs"]
    assert run_export("program", "--check", str(out)) == 0
    assert capsys.readouterr().out.count("ok  ") == 3


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (load_model("torch.nn:Linear", [4, 2], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.state_dict()["weight"], same.state_dict()["weight"])
    assert not torch.equal(one.state_dict()["weight"], other.state_dict()["weight"])


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--model", "readers_models"), 2, "is no import path"),
        (("--model", "no_such_module:Net"), 2, "there is no module 'no_such_module'"),
        (("--model", "readers_needs:Net"), 2, "needs a_package_that_does_not_exist"),
        (("--model", "readers_typo:Net"), 2, "SyntaxError"),
        (("--model", "readers_models:Nett"), 2, "did you mean 'Net'?"),
        (("--model", "readers_models:SOURCE"), 2, "has no 'SOURCE'"),
        (("--model", "readers_models:number"), 2, "int, which is no torch.nn.Module"),
        (("--model", "readers_models:ready", "--model-args", "[2]"), 2, "cannot be called"),
        (("--model", "readers_models:Net", "--model-args", '{"wide": 2}'), 2, "unexpected keyword argument 'wide'"),
        (("--model", "readers_models:Net", "--model-args", "{width: 2}"), 2, "is not JSON"),
        (("--model", "readers_models:Net", "--model-args", "2"), 2, "neither an object nor a list"),
        (("--model", "readers_models:Net", "--input-shape", "1,eight"), 2, "is no list of numbers"),
        (("--model", "readers_models:Net", "--input-shape", "1,0,8"), 2, "a size below 1"),
        (("--model", "readers_models:Net", "--input-shape", "8"), 5, "does not take samples of shape (8,)"),
        (("--model", "readers_models:Net", "--classes", "4"), 5, "expected (2, 4)"),
        (("--model", "readers_models:Net", "--classes", "0"), 2, "--classes is missing"),
        (("--model", "readers_models:Net", "--target-shape", "3"), 2, "either --classes or --target-shape"),
        (("--model", "readers_models:Net", "--classes", "0"), 2, "or --target-shape"),
        (("--model", "readers_models:Net", "--classes", "0", "--target-shape", "3,x"), 2, "--target-shape '3,x' is no"),
        (("--model", "readers_models:Net", "--no-onnx"), 2, "no format is left"),
        (("--model", "readers_models:Net", "--tolerance", "1"), 2, "--tolerance belongs to --check"),
        (("--model", "readers_models:Net", "--loss", "hinge"), 2, "hinge"),
        (("--model", "readers_models:Branching"), 5, "'readers_models:Branching' cannot be traced"),
        (("--model", "readers_models:Bessel"), 5, "aten.special_i0e"),
        (("--model", "readers_models:Broken"), 5, "KeyError: 'head'"),
        (("--model", "readers_models:Net", "--check", "x"), 2, "either --out or --check"),
        ((), 2, "--model"),
    ],
)
def test_bad_input_is_one_error_with_a_hint_and_leaves_no_folder(
    args: tuple[str, ...], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_export(*PROGRAM, "--out", str(out), *args) == code
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.count("\nhint: ") == (1 if "error: " in told.err else 0)
    assert "Traceback" not in told.err
    assert not told.out
    assert not out.exists()


@pytest.mark.parametrize("used", ["a file", "a folder with something in it"])
def test_nothing_is_written_over(used: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    if used == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    assert run_export(*PROGRAM, "--model", "readers_models:Net", "--out", str(out)) == 2
    assert "hint: " in capsys.readouterr().err
    assert (out.read_text() if out.is_file() else (out / "mine").read_text()) == "mine"


def test_check_of_a_folder_without_a_program_says_what_it_wants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, "readers_models:Net") == 3
    assert "the folder that --out wrote" in capsys.readouterr().err
