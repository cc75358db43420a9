"""A bundle can be checked and used by anyone, and a changed byte is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.protocol import compress
from edge_client.protocol.task import Array, Flat
from export import cli
from export.bundle import read_bundle, write_bundle
from export.checks import bundle_run, verify_bundle
from export.program import vector_of
from tests.programs import compiled, model

PARITY = 1e-4


def centers() -> list[Flat]:
    start = vector_of(model("digits-mlp").module, compiled("digits-mlp").program.schema)
    return [start, start * np.float32(0.5)]


def reference() -> Array:
    return np.random.default_rng(1).random((4, 1, 8, 8), dtype=np.float32)


def write(out: Path, **settings: Any) -> dict[str, Any]:  # noqa: ANN401 - write_bundle's own
    made = compiled("digits-mlp")
    usual: dict[str, Any] = {
        "program": made.program,
        "files": made.files,
        "centers": centers(),
        "cards": [{"devices": 4}, {"devices": 8}],
        "reference": reference(),
    }
    return write_bundle(out, **usual | settings)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "bundle"
    write(out)
    return out


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def test_a_bundle_gives_back_what_went_in(bundle: Path) -> None:
    read = read_bundle(bundle)
    assert read.program == compiled("digits-mlp").program
    assert all(np.array_equal(read.vector(k), center) for k, center in enumerate(centers()))
    assert [c["card"]["devices"] for c in read.manifest["centers"]] == [4, 8]
    assert read.files() == compiled("digits-mlp").files
    given = read.reference()
    assert given is not None
    assert np.array_equal(given, reference())


def test_every_center_has_both_formats_with_a_measured_parity(bundle: Path) -> None:
    for center in read_bundle(bundle).manifest["centers"]:
        assert set(center["files"]) == {"onnx", "tflite"}
        assert all(file["parity"] < PARITY for file in center["files"].values())


def test_a_bundle_that_is_written_from_the_users_module_is_measured_against_it(tmp_path: Path) -> None:
    module = model("digits-mlp").module
    before = vector_of(module, compiled("digits-mlp").program.schema)
    manifest = write(tmp_path / "b", module=module, formats=("onnx",))
    assert all(c["files"]["onnx"]["parity"] < PARITY for c in manifest["centers"])
    assert np.array_equal(vector_of(module, compiled("digits-mlp").program.schema), before)


def test_verification_measures_each_file(bundle: Path) -> None:
    rows = verify_bundle(bundle)
    assert [(r["center"], r["format"]) for r in rows] == [(k, f) for k in (0, 1) for f in ("onnx", "tflite")]
    assert all(r["ok"] and r["samples"] == len(reference()) for r in rows)


def test_a_changed_byte_is_found_in_any_file(copied: Path) -> None:
    files = [p for p in copied.rglob("*") if p.is_file() and p.name != "manifest.json"]
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(Malformed, match="bad_hash"):
            read_bundle(copied)
        path.write_bytes(data)
    read_bundle(copied)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "centers/../../x"])
def test_a_path_that_leaves_the_bundle_is_refused(copied: Path, path: str) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["program"]["path"] = path
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Malformed, match="outside"):
        read_bundle(copied)


@pytest.mark.parametrize("text", ["[]", "{}", '{"v": 2}', '{"v": 1, "program": 3, "containers": []}'])
def test_a_manifest_of_another_shape_is_malformed(copied: Path, text: str) -> None:
    (copied / "manifest.json").write_text(text)
    with pytest.raises(Malformed):
        read_bundle(copied)


def test_a_folder_that_is_no_bundle_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a bundle[\s\S]*hint: "):
        read_bundle(tmp_path)


def test_a_failed_bundle_leaves_no_folder_that_looks_complete(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        write_bundle(
            tmp_path / "b",
            program=compiled("digits-mlp").program,
            files={},
            centers=centers(),
            cards=[{}, {}],
            formats=(),
        )
    assert not (tmp_path / "b").exists()


def test_the_manifest_can_be_signed(tmp_path: Path) -> None:
    write(tmp_path / "b", formats=(), signer=lambda data: f"signed {len(data)} bytes")
    size = (tmp_path / "b" / "manifest.json").stat().st_size
    assert (tmp_path / "b" / "manifest.sig").read_text() == f"signed {size} bytes"


def test_a_run_can_be_bundled_again_with_the_centers_of_another_method(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(bundle, run / "bundle")
    schema = compiled("digits-mlp").program.schema
    (run / "centers" / "fedavg").mkdir(parents=True)
    blob = compress.encode(centers()[1], schema, codec="f32", kind="model")
    (run / "centers" / "fedavg" / "center-0.safetensors").write_bytes(blob)
    bundle_run(run, tmp_path / "again", "fedavg", ["onnx"])
    again = read_bundle(tmp_path / "again")
    assert np.array_equal(again.vector(0), centers()[1])
    assert list(again.manifest["centers"][0]["files"]) == ["onnx"]
    with pytest.raises(ConfigError, match="fedavg"):
        bundle_run(run, tmp_path / "never", "ifca", ["onnx"])


def run_cli(*args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fedcenters-export", *args])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_verify_prints_one_json_object(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("verify", str(bundle), "--json", monkeypatch=monkeypatch) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert len(told["files"]) == 4


def test_verify_takes_other_samples(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "s.npz", x=reference()[:2])
    assert run_cli("verify", str(bundle), "--samples", str(tmp_path / "s.npz"), monkeypatch=monkeypatch) == 0
    assert "over 2 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("verify", "nowhere"), 3, "hint: "),
        (("verify",), 2, "Missing argument"),
        (("polish",), 2, "No such command"),
        (("bundle", "nowhere", "--out", "x"), 3, "hint: "),
    ],
)
def test_a_foreseen_error_ends_with_its_code_and_no_traceback(
    args: tuple[str, ...],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(*args, monkeypatch=monkeypatch) == code
    told = capsys.readouterr()
    assert said in told.err
    assert "Traceback" not in told.err
    assert not told.out
