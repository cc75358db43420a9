"""A bundle can be checked and used by anyone, and a changed byte is found."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ConfigError, Malformed, UsageError
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.signing import public_key
from export.bundle.bundle_contents import BundleNames, BundleSource, LabelledSamples, NewcomerData, make_signer
from export.bundle.commands import quantize_bundle, verify_bundle
from export.bundle.reader import MANIFEST_FILE, NAMES_SCHEMA, check_replaceable, read_bundle
from export.bundle.verify_centers import largest_difference
from export.bundle.writer import BundleOptions, write_bundle
from export.command_line import difference_in_words
from export.compiler.program import vector_of
from tests.support.bundle_material import centers, judged, material, reference
from tests.support.export_cli import run_export
from tests.support.memory_limit import refused_within
from tests.support.programs import compiled, model

PARITY = 1e-4
KEY = bytes(range(32))
VARIANTS = {"onnx", "onnx-fp16", "onnx-int8", "pt2", "tflite", "tflite-fp16", "tflite-int8"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With everything that a bundle can have."""
    out = tmp_path_factory.mktemp("run") / "bundle"
    formats = ("onnx", "tflite", "pt2")
    write_bundle(
        out,
        material(sign=make_signer(KEY, "home")),
        BundleOptions(formats=formats, schemes=("int8", "fp16"), stacked=True),
    )
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
    given = read.reference_samples()
    assert given is not None
    assert np.array_equal(given.x, reference())
    assert given.device.tolist() == ["a", "a", "b", "b"]


def test_every_center_has_each_format_with_a_measured_parity(bundle: Path) -> None:
    for center in read_bundle(bundle).manifest["centers"]:
        assert set(center["files"]) == VARIANTS
        assert all(file["parity"] < PARITY for name, file in center["files"].items() if "-" not in name)


def test_a_small_file_is_small_and_answers_nearly_like_torch(bundle: Path) -> None:
    read = read_bundle(bundle)
    for k, center in enumerate(read.manifest["centers"]):
        for fmt, scheme, share in (("onnx", "fp16", 0.6), ("onnx", "int8", 0.4), ("tflite", "fp16", 0.6)):
            small = center["files"][f"{fmt}-{scheme}"]
            assert small["size"] < share * center["files"][fmt]["size"]
            # rounding to 11 or to 8 bits: far above a float32 runtime's 1e-6, far below a wrong file's 1
            assert 1e-6 < largest_difference(read.module(k), read.read(small), fmt, reference()) < 0.1


def test_a_notebook_shows_a_strangers_card_as_text(bundle: Path) -> None:
    read = read_bundle(bundle)
    first, *others = read.manifest["centers"]
    centers = [{**first, "card": {"devices": "<script>alert(1)</script>"}}, *others]
    shown = replace(read, manifest={**read.manifest, "centers": centers})._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


@pytest.mark.parametrize("fmt", ["onnx", "tflite", "pt2"])
def test_one_stacked_file_answers_for_every_center(bundle: Path, fmt: str) -> None:
    read = read_bundle(bundle)
    file = read.read(read.manifest["stacked"][fmt])
    for k in (0, 1):
        assert largest_difference(read.module(k), file, fmt, reference(), k) < PARITY
    assert largest_difference(read.module(0), file, fmt, reference(), 1) > PARITY


def test_a_card_names_no_loss_of_ours_where_the_users_own_was_trained(tmp_path: Path) -> None:
    own = replace(compiled("digits-mlp").program, own_loss=True)
    write_bundle(tmp_path / "b", material(program=own), BundleOptions(formats=()))
    cards = read_bundle(tmp_path / "b").manifest["centers"][0]["cards"]
    assert json.loads((tmp_path / "b" / cards["json"]["path"]).read_bytes())["loss"] == "own"
    assert "trained for a loss of the user's own" in (tmp_path / "b" / cards["md"]["path"]).read_text()


def test_a_card_tells_the_same_to_programs_and_people(bundle: Path) -> None:
    read = read_bundle(bundle)
    for center in read.manifest["centers"]:
        card = json.loads(read.read(center["cards"]["json"]))
        assert (card["center"], card["devices"], card["model"]) == (
            center["center"],
            4 + 4 * card["center"],
            "digits-mlp",
        )
        assert card["files"] == center["files"]
        text = read.read(center["cards"]["md"]).decode()
        assert f"{card['devices']} devices" in text
        assert all(file["sha256"] in text and f"{file['size']:,}" in text for file in card["files"].values())


def test_a_card_tells_what_an_app_gives_the_file_and_what_its_answers_are_called(tmp_path: Path) -> None:
    names = BundleNames(classes=("run|x", "sit\nb"), columns=("age", "`p`"))
    write_bundle(tmp_path / "b", material(names=names), BundleOptions(formats=()))
    folder, x = tmp_path / "b" / "centers" / "center-1", np.load(tmp_path / "b" / "reference.npz")["x"]
    card, text = json.loads((folder / "card.json").read_bytes()), (folder / "card.md").read_text()
    assert (card["columns"], card["values"]) == (["age", "`p`"], [x.min(), x.max()])
    assert "the columns of `x`, in order: `age`, `'p'`\n" in text
    assert "the classes 0, 1, ..., in order: `run|x`, `sit b`\n" in text
    assert f"the values of `x` are from {x.min():.4g} to {x.max():.4g}." in text


def test_a_name_of_a_class_or_a_column_has_at_most_1024_characters(tmp_path: Path) -> None:
    longest, options = "x" * 1_024, BundleOptions(formats=())
    write_bundle(tmp_path / "b", material(names=BundleNames(classes=(longest,), columns=(longest,))), options)
    names = read_bundle(tmp_path / "b").manifest["names"]
    assert (names["classes"], names["columns"]) == ([longest], [longest])
    for longer in (BundleNames(classes=(longest + "x",)), BundleNames(columns=(longest + "x",))):
        with pytest.raises(Malformed, match="1024 characters"):
            write_bundle(tmp_path / "c", material(names=longer), options)


def test_verification_measures_each_file_on_the_devices_that_it_serves(bundle: Path) -> None:
    rows = verify_bundle(bundle)
    assert [(r["center"], r["format"]) for r in rows] == [(k, name) for k in (0, 1) for name in sorted(VARIANTS)]
    assert all(r["ok"] and r["samples"] == 2 and r["latency_ms"] > 0 for r in rows)
    assert all(r["accuracy"]["devices"] == 1 and r["accuracy"]["median"] == r["torch"]["median"] for r in rows)
    assert {r["accuracy"]["median"] for r in rows if r["center"] == 0} == {1.0}


def test_a_file_of_another_center_is_not_ok(copied: Path) -> None:
    manifest = json.loads((copied / MANIFEST_FILE).read_text())
    first, second = manifest["centers"]
    first["files"]["onnx"] = second["files"]["onnx"]
    (copied / MANIFEST_FILE).write_text(json.dumps(manifest))
    wrong = [(r["center"], r["format"]) for r in verify_bundle(copied) if not r["ok"]]
    assert wrong == [(0, "onnx")]


def test_a_quantized_file_is_judged_by_what_its_devices_lose(bundle: Path) -> None:
    opposite = LabelledSamples(x=reference(), y=np.full(4, 3), device=np.array(["a", "a", "b", "b"]))
    rows = verify_bundle(bundle, opposite, loss=0.0)
    assert all(r["ok"] == (r["torch"]["mean"] <= r["accuracy"]["mean"]) for r in rows if "-" in r["format"])


def test_a_bundle_can_be_made_smaller_later(bundle: Path, tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=("onnx", "tflite")))
    quantize_bundle(tmp_path / "b", tmp_path / "small", ["int8-static"], judged(), None)
    again = read_bundle(tmp_path / "small")
    assert all(
        {"onnx", "tflite", "onnx-int8-static", "tflite-int8-static"} == set(c["files"])
        for c in again.manifest["centers"]
    )
    assert all(r["difference"] < 0.2 for r in verify_bundle(tmp_path / "small"))  # logits of about 1, in 8 bits


def test_a_smaller_bundle_keeps_what_newcomers_need_and_the_variants_of_before(tmp_path: Path) -> None:
    start, tree = centers()[0] * np.float32(0.1), CenterTree(((0, -1), (0, -2)), 2)
    newcomers = NewcomerData(start=start, tree=tree, splits=[start])
    write_bundle(tmp_path / "b", material(newcomers=newcomers), BundleOptions(formats=("onnx",), schemes=("fp16",)))
    quantize_bundle(tmp_path / "b", tmp_path / "small", ["int8"], None, None)
    before, after = (read_bundle(tmp_path / name) for name in ("b", "small"))
    for name in ("guide", "start", "tree"):
        assert after.manifest[name] == before.manifest[name]
    first, second = (bundle.manifest["centers"][1]["files"] for bundle in (before, after))
    assert set(second) == {"onnx", "onnx-fp16", "onnx-int8"}
    assert {name: second[name] for name in first} == first


def test_static_ranges_need_samples(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs calibration samples"):
        quantize_bundle(bundle, tmp_path / "small", ["int8-static"], None, None)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("wish", [{"formats": ["coreml"]}, {"schemes": ["int4"]}])
def test_an_unknown_wish_is_named_with_those_that_exist(wish: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"(coreml|int4)[\s\S]*use some of"):
        BundleOptions(**wish)


def test_a_changed_byte_is_found_in_any_file(copied: Path) -> None:
    files = [p for p in copied.rglob("*") if (p.is_file() and p.parent != copied) or p.name == "reference.npz"]
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


@pytest.mark.skipif(os.name != "posix", reason="this system has no such files")
@pytest.mark.parametrize("place", ["manifest.json", "manifest.sig", "program/program.json", "reference.npz"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_file_that_has_no_end_is_refused(copied: Path, kind: str, place: str) -> None:
    (copied / place).unlink()
    if kind == "device":
        (copied / place).symlink_to("/dev/null")
    else:
        os.mkfifo(copied / place)
    refusal = "is not signed" if place == "manifest.sig" else "it is no plain file"
    with pytest.raises((ConfigError, Malformed), match=refusal):
        read_bundle(copied, [public_key(KEY)])


@pytest.mark.parametrize("place", ["manifest.json", "manifest.sig", "program/program.json"])
def test_no_more_is_read_of_a_file_than_it_may_have(copied: Path, place: str) -> None:
    os.truncate(copied / place, 1 << 30)
    code = refused_within(64 << 20, lambda: read_bundle(copied, [public_key(KEY)]))
    assert code in {"bad_hash", "bad_signature", "too_big"}


@pytest.mark.parametrize("text", ["[]", "{}", '{"v": 2}', '{"v": 1, "program": 3, "containers": []}'])
@pytest.mark.parametrize(("size", "code"), [(1, "bad_field"), (16 << 20, "bad_field"), ((16 << 20) + 1, "too_big")])
def test_a_manifest_of_another_shape_or_above_16_mib_is_malformed(
    tmp_path: Path, text: str, size: int, code: str
) -> None:
    (tmp_path / "manifest.json").write_text(text.ljust(size))
    with pytest.raises(Malformed, match=f"^{code}: "):
        read_bundle(tmp_path)


def test_a_folder_that_is_no_bundle_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a bundle[\s\S]*hint: "):
        read_bundle(tmp_path)


def test_what_a_bundle_replaces_is_told_with_its_files(bundle: Path, tmp_path: Path) -> None:
    place = tmp_path / "b"
    assert check_replaceable(place) == ""
    place.mkdir()
    assert check_replaceable(place) == ""
    what = f"an export of 2 centers of digits-mlp with {', '.join(sorted(VARIANTS))} files"
    assert check_replaceable(bundle) == f"{bundle} has {what}; it is replaced"


def test_the_signature_vouches_for_the_manifest_and_so_for_all(bundle: Path, copied: Path) -> None:
    read_bundle(bundle, [public_key(bytes(32)), public_key(KEY)])
    with pytest.raises(Malformed, match="not trusted"):
        read_bundle(bundle, [public_key(bytes(32))])
    manifest = (copied / MANIFEST_FILE).read_bytes()
    (copied / MANIFEST_FILE).write_bytes(manifest.replace(b'"devices": 4', b'"devices": 5'))
    with pytest.raises(Malformed, match="bad_signature"):
        read_bundle(copied, [public_key(KEY)])
    (copied / "manifest.sig").unlink()
    with pytest.raises(Malformed, match="is not signed"):
        read_bundle(copied, [public_key(KEY)])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"federation": 1, "key": "", "sig": ""}', "\xff"])
def test_what_is_no_signature_is_malformed(copied: Path, text: str) -> None:
    (copied / "manifest.sig").write_text(text, encoding="latin-1")
    with pytest.raises(Malformed):
        read_bundle(copied, [public_key(KEY)])


def test_few_samples_are_every_devices_share() -> None:
    many = LabelledSamples(x=np.zeros((9, 2)), device=np.array(list("aaaaaabbc")))
    assert many.subsample(5).device.tolist() == ["a", "a", "b", "b", "c"]
    assert len(many.subsample(20)) == 9


def test_verify_says_what_it_compares_in_which_runtime_before_it_does(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_export("verify", str(bundle), "--json") == 0
    told = capsys.readouterr()
    files = json.loads(told.out)["files"]
    said = [line for line in told.err.splitlines() if line.startswith("comparing ")]
    assert len(said) == len(files)
    assert "comparing centers/center-0/model.onnx in ONNX Runtime with torch on" in said[0]
    assert any("in LiteRT with torch" in line for line in said)
    assert all(row["values"] % row["samples"] == 0 for row in files)


def test_no_difference_reads_equal_and_any_other_is_a_number() -> None:
    assert [difference_in_words(each) for each in (0.0, 2.5e-7, float("nan"))] == ["equal", "2.5e-07", "nan"]


def test_verify_prints_one_json_object(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_export("verify", str(bundle), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert len(told["files"]) == 2 * len(VARIANTS)


def test_verify_names_its_columns_in_plain_words(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_export("verify", str(bundle)) == 0
    told = capsys.readouterr()
    heads, *lines = told.out.splitlines()
    assert heads.endswith("  accuracy in torch   accuracy of the file")
    for name in ("accuracy in torch", "accuracy of the file"):
        place = heads.index(name)
        assert all(re.match(r"\d+\.\d\d%( \(\d+\.\d\d%\))? *", line[place:]) for line in lines)
    assert "difference: the largest between an output (logit) of the file and torch's" in told.err
    brackets = "in brackets of the device with the lowest where that differs"
    assert f"accuracy: of the median device, and {brackets}" in told.err


def test_verify_takes_other_samples(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "s.npz", x=reference()[:2])
    assert run_export("verify", str(bundle), "--samples", str(tmp_path / "s.npz")) == 0
    told, lines = "  not measured: samples without class labels", capsys.readouterr().out.splitlines()[1:]
    assert all(line.split()[6:8] == ["20", "2"] and line.endswith(told) for line in lines)
    np.savez(tmp_path / "huge.npz", x=np.full_like(reference()[:2], 3e38))  # infinite in any runtime's first layer
    assert run_export("verify", str(bundle), "--samples", str(tmp_path / "huge.npz")) != 0
    assert "torch's own outputs for these samples are not finite" in capsys.readouterr().err


def test_verify_names_quantized_files_that_lose_too_much_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a few samples one wrong answer is more than the limit: the model is not at fault."""
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=("onnx",), schemes=("int8-static",)))
    np.savez(tmp_path / "s.npz", x=1e4 * reference()[:2])  # beyond what the ranges were measured on
    assert run_export("verify", str(tmp_path / "b"), "--samples", str(tmp_path / "s.npz")) == 1
    told = capsys.readouterr().err
    assert "quantized, and more than 0.02 worse than torch on 2 samples: onnx-int8-static of center 0" in told
    assert "hint: measure on more samples" in told


def test_a_text_model_without_samples_is_compared_on_tokens(tmp_path: Path) -> None:
    made = compiled("tied-embedding", engines=("onnx", "pt2"))
    start = vector_of(model("tied-embedding").module, made.program.schema)
    text = BundleSource(program=made.program, files=made.files, centers=[start], cards=[{}])
    manifest = write_bundle(tmp_path / "b", text, BundleOptions(formats=("onnx",)))
    assert manifest["centers"][0]["files"]["onnx"]["parity"] < 1e-5


def test_verify_says_when_it_had_random_inputs_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "b", material(reference=None), BundleOptions(formats=("onnx",)))
    assert run_export("verify", str(tmp_path / "b")) == 0
    told = capsys.readouterr()
    assert all(line.endswith("  not measured: random inputs") for line in told.out.splitlines()[1:])
    assert "the bundle holds no samples" in told.err
    assert "--samples" in told.err


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
    assert run_export(*args) == code
    told = capsys.readouterr()
    assert said in told.err
    assert "Traceback" not in told.err
    assert not told.out


def test_a_bundle_names_at_most_65536_classes() -> None:
    names = {"classes": ["c"] * 65_536, "columns": [], "devices": {}}
    assert NAMES_SCHEMA(names, "names") == names
    with pytest.raises(Malformed):
        NAMES_SCHEMA({**names, "classes": ["c"] * 65_537}, "names")
