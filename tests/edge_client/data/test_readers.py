"""Files that become samples: every form reads the same numbers, new ones are picked up, the newest are kept."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.data import readers
from edge_client.data.dataset import DataFolder, load_folder
from edge_client.data.readers import read_inputs_without_labels
from edge_client.errors import ConfigError, RuntimeMissing
from edge_client.protocol.task import Array
from tests.support import softmax_program
from tests.support.scripted_coordinator import DeviceStage, Script

CSV_SCHEMA = '[csv]\nfeatures = ["a", "b"]\nlabel = "kind"\nclasses = ["low", "high"]\n'
IMAGE_SCHEMA = '[images]\nsize = [2, 3]\nchannels = 1\nclasses = ["cat", "dog"]\n'


def write(path: Path, *, at: int, **arrays: Any) -> Path:  # noqa: ANN401
    """An archive that was last changed at second `at`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return aged(path, at)


def aged(path: Path, at: int) -> Path:
    os.utime(path, (at, at))
    return path


def rows(first: int, count: int) -> tuple[Array, Array]:
    x = np.arange(first, first + count, dtype=np.float32)[:, None] * np.ones(2, np.float32)
    return x, np.arange(first, first + count) % 3


def test_archives_and_pairs_of_arrays_are_read_in_the_order_of_their_age(tmp_path: Path) -> None:
    x, y = rows(0, 6)
    write(tmp_path / "train" / "b.npz", at=1, x=x[:2], y=y[:2])
    folder = tmp_path / "train"
    np.save(folder / "a.x.npy", x[2:4])
    np.save(folder / "a.y.npy", y[2:4])
    aged(folder / "a.x.npy", 2)
    write(tmp_path / "train.npz", at=3, x=x[4:], y=y[4:])
    local = load_folder(tmp_path)
    assert (local.train.x == x).all()
    assert (local.train.y == y).all()


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), most=st.integers(1, 12))
def test_the_newest_samples_are_kept(sizes: list[int], most: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("data")
    x, y = rows(0, sum(sizes))
    at = 0
    for number, size in enumerate(sizes):
        write(folder / "train" / f"{number}.npz", at=number + 1, x=x[at : at + size], y=y[at : at + size])
        at += size
    local = load_folder(folder, limit=most)
    assert (local.train.x == x[-most:]).all()
    assert (local.train.y == y[-most:]).all()


def test_a_table_is_read_as_its_schema_says(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(CSV_SCHEMA + "mean = [1.0, 0.0]\nscale = 2.0\nshape = [1, 2]\n")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "t.csv").write_text("kind,b,unused,a\nhigh,4,x,3\nlow,8,y,-1\n\n")
    train = load_folder(tmp_path).train
    assert train.x.tolist() == [[[1.0, 2.0]], [[-1.0, 4.0]]]
    assert train.y.tolist() == [1, 0]


def test_a_table_with_targets_is_a_regression(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text('[csv]\nfeatures = ["a"]\ntargets = ["b"]\n')
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "t.csv").write_text("a,b\n1,2\n3,4\n")
    train = load_folder(tmp_path).train
    assert train.y.tolist() == [[2.0], [4.0]]


def test_a_table_that_has_no_row_yet_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text('[csv]\nfeatures = ["a"]\ntargets = ["b"]\n')
    (tmp_path / "train").mkdir()
    for day, rows_ in (("1", "1,2\n"), ("2", "")):
        (tmp_path / "train" / f"{day}.csv").write_text(f"a,b\n{rows_}")
    assert load_folder(tmp_path).train.y.tolist() == [[2.0]]


def test_a_table_may_begin_with_excels_mark_and_end_lines_with_a_separator(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(CSV_SCHEMA)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "t.csv").write_text("a,b,kind\n1,2,low,\n", encoding="utf-8-sig")
    assert load_folder(tmp_path).train.x.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("text", "told"),
    [("a,b,kind\n1,5,2,5,low\n", "line 2 is too long: the header names 3 columns"), ("a,b,a,kind\n", "called 'a'")],
    ids=["decimal commas", "a name twice"],
)
def test_a_table_whose_columns_are_not_certain_is_refused(text: str, told: str, tmp_path: Path) -> None:
    """The first is a number cut in two: a value would stand in the next column."""
    (tmp_path / "schema.toml").write_text(CSV_SCHEMA)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_folder(tmp_path)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_16_bits_has_the_range_of_others(channels: int, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install '.[images]')")
    schema = IMAGE_SCHEMA.replace("[2, 3]", "[1, 3]").replace("channels = 1", f"channels = {channels}")
    (tmp_path / "schema.toml").write_text(schema)
    (tmp_path / "train" / "dog").mkdir(parents=True)
    image.fromarray(np.array([[0, 257 * 51, 257 * 255]], np.uint16)).save(tmp_path / "train" / "dog" / "1.png")
    assert np.allclose(load_folder(tmp_path).train.x, np.broadcast_to([0, 0.2, 1], (1, channels, 1, 3)))


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P"])
def test_a_transparent_picture_lies_on_white(kind: str, tmp_path: Path) -> None:
    """Black ink on nothing was black all over, and so a sample without a drawing."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install '.[images]')")
    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA.replace("[2, 3]", "[1, 3]"))
    (tmp_path / "train" / "dog").mkdir(parents=True)
    drawn = image.fromarray(np.array([[[0, 0, 0, 255], [0, 0, 0, 0], [0, 0, 0, 51]]], np.uint8))
    drawn.convert(kind).save(tmp_path / "train" / "dog" / "1.png")
    assert np.allclose(load_folder(tmp_path).train.x, [[[[0.0, 1.0, 0.8]]]], atol=0.003)


def test_a_photo_stands_as_its_camera_says(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install '.[images]')")
    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA.replace("[2, 3]", "[2, 2]"))
    (tmp_path / "train" / "dog").mkdir(parents=True)
    lying = image.fromarray(np.array([[0, 0], [255, 255]], np.uint8))
    how = lying.getexif()
    how[0x112] = 6  # the top is on the right: to be turned clockwise
    lying.save(tmp_path / "train" / "dog" / "1.png", exif=how)
    assert load_folder(tmp_path).train.x.tolist() == [[[[1.0, 0.0], [1.0, 0.0]]]]


def test_pictures_become_samples_of_their_folders_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install '.[images]')")
    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA + "mean = 0.5\nscale = 0.5\n")
    for at, (label, value) in enumerate((("dog", 255), ("cat", 0))):
        folder = tmp_path / "train" / label
        folder.mkdir(parents=True)
        image.new("RGB", (6, 4), (value, value, value)).save(folder / "1.png")
        aged(folder / "1.png", at + 1)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no picture")
    train = load_folder(tmp_path).train
    assert train.x.shape == (2, 1, 2, 3)
    assert train.y.tolist() == [1, 0]
    assert train.x[0].tolist() == np.ones((1, 2, 3)).tolist()
    assert train.x[1].tolist() == (-np.ones((1, 2, 3))).tolist()


def test_without_pillow_pictures_say_what_to_install(tmp_path: Path) -> None:
    wall = "import sys; sys.modules['PIL'] = None\n"
    code = (
        "from pathlib import Path\nfrom edge_client.data.dataset import load_folder\n"
        "from edge_client.errors import RuntimeMissing\n"
        "try: load_folder(Path(sys.argv[1]))\nexcept RuntimeMissing as wrong: print(wrong.hint)\n"
    )
    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.png").write_bytes(b"x")
    done = subprocess.run(
        [sys.executable, "-c", wall + code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "'.[images]'" in done.stdout
    assert RuntimeMissing.exit_code == 3


@pytest.mark.parametrize(
    ("schema", "text", "says"),
    [
        ("", "a,b,kind\n1,2,low\n", r"missing or empty; it needs a table \[csv\]"),
        ("[npz]\nx = 1\n", "a,b,kind\n1,2,low\n", r"has no table \[csv\]"),
        (CSV_SCHEMA, "a,b\n1,2\n", "no column 'kind'"),
        (CSV_SCHEMA, "a,b,kind\n1,2,middle\n", "the class 'middle' is not among"),
        (CSV_SCHEMA, "a,b,kind\n\n1,two,low\n", "line 3: 'b' is 'two', not a finite number; fill the cell in, or"),
        (CSV_SCHEMA, "a,b,kind\n1,2,\udcff\n", "not UTF-8; save the table as CSV in UTF-8"),
        (CSV_SCHEMA, "a,b,kind\n1,2,low\n1, ,low\n", "line 3: 'b' is empty; fill the cell in, or leave"),
        (CSV_SCHEMA, "a,b,kind\n1,2,low\nNaN,2,low\n", "line 3: 'a' is 'NaN', not a finite number"),
        (CSV_SCHEMA, "a,b,kind\n1\n", "line 2 is too short"),
        (CSV_SCHEMA.replace("high", "low"), "a,b,kind\n1,2,low\n", "names the class 'low' twice"),
        (CSV_SCHEMA + "colour = 1\n", "a,b,kind\n1,2,low\n", "has no key 'colour'"),
        ('[csv]\nlabel = "kind"\n', "a,kind\n1,low\n", r"schema\.toml: \[csv\] has no 'features'"),
        ('[csv]\nfeatures = ["a"]\nlabel = "kind"\n', "a,kind\n1,low\n", r"schema\.toml: \[csv\] has no 'classes'"),
        ('[csv]\nfeatures = ["a"]\n', "a\n1\n", "needs either label or targets"),
        ("[csv", "a\n1\n", "is no TOML file"),
        (CSV_SCHEMA + "shape = 2\n", "a,b,kind\n1,2,low\n", r"schema\.toml: \[csv\] shape is a list"),
        ('[csv]\nfeatures = "a"\ntargets = ["a"]\n', "a\n1\n", r"schema\.toml: \[csv\] features is a list"),
    ],
)
def test_a_table_that_is_wrong_is_named_with_a_hint(tmp_path: Path, schema: str, text: str, says: str) -> None:
    (tmp_path / "train").mkdir()
    if schema:
        (tmp_path / "schema.toml").write_text(schema)
    (tmp_path / "train" / "t.csv").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=says) as wrong:
        load_folder(tmp_path)
    assert wrong.value.hint


def test_pieces_of_different_shapes_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a.npz", at=1, x=np.ones((2, 3)), y=np.zeros(2, int))
    write(tmp_path / "train" / "b.npz", at=2, x=np.ones((2, 4)), y=np.zeros(2, int))
    with pytest.raises(ConfigError, match=r"train/a.npz: samples are \[3\], others are \[4\]"):
        load_folder(tmp_path)


def damaged(kind: str) -> bytes:
    """The bytes of a train.npz that numpy cannot read."""
    whole, objects = io.BytesIO(), io.BytesIO()
    np.savez_compressed(whole, x=np.arange(4_000, dtype=np.float32).reshape(-1, 4), y=np.zeros(1_000, int))
    np.savez(objects, x=np.array([[1.0], None], dtype=object), y=np.zeros(2, int))
    sound = whole.getvalue()
    middle = len(sound) // 3
    return {
        "text": b"x,y\n1,2\n",
        "empty": b"",
        "cut": sound[:middle],
        "changed": sound[:middle] + bytes(64) + sound[middle + 64 :],
        "objects": objects.getvalue(),
    }[kind]


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "changed", "objects"])
def test_a_damaged_archive_is_told_as_one_with_how_to_write_it_and_no_unsafe_advice(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.npz").write_bytes(damaged(kind))
    with pytest.raises(ConfigError) as told:
        load_folder(tmp_path)
    said = "an array holds objects, not numbers" if kind == "objects" else "it is damaged, or no file of numpy"
    assert told.value.message.startswith(f"cannot use train.npz: {said}")
    assert told.value.hint.startswith("write it again, with numpy.savez(path, x=samples, y=labels)")
    assert "pickle" not in str(told.value)
    assert read_inputs_without_labels(tmp_path / "train.npz") is None


def test_a_damaged_pair_is_told_so_too(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.x.npy").write_bytes(b"half")
    with pytest.raises(ConfigError, match=r"cannot use train/a.x.npy: it is damaged, or no file of numpy"):
        load_folder(tmp_path)


def test_an_array_whose_header_lost_a_bracket_is_told_so_too(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.save(tmp_path / "train" / "a.x.npy", np.ones((2, 3), np.float32))
    path = tmp_path / "train" / "a.x.npy"
    path.write_bytes(path.read_bytes().replace(b"(2, 3)", b"(2, 3 ", 1))
    with pytest.raises(ConfigError, match=r"cannot use train/a.x.npy: it is damaged, or no file of numpy"):
        load_folder(tmp_path)


def test_new_samples_are_seen_and_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    x, y = rows(0, 4)
    write(tmp_path / "train" / "a.npz", at=1, x=x[:2], y=y[:2])
    samples = DataFolder(tmp_path, most=3)
    assert len(samples.load().train) == 2
    assert samples.reload_if_changed() is None
    write(tmp_path / "train" / "b.npz", at=2, x=x[2:], y=y[2:])
    fresh = samples.reload_if_changed()
    assert fresh is not None
    assert (fresh.train.x == x[1:]).all()
    assert samples.reload_if_changed() is None
    (tmp_path / "train" / "c.npz").write_bytes(b"half")
    assert samples.reload_if_changed() is None
    (tmp_path / "train" / "c.npz").unlink()
    assert samples.reload_if_changed() is not None


def test_a_file_that_is_removed_while_its_folder_is_listed_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at, name in enumerate(("a", "b")):
        write(tmp_path / "train" / f"{name}.npz", at=at, x=np.zeros((2, 3)), y=np.zeros(2, np.int64))
    look = readers._stamp

    def too_late(folder: Path, path: Path) -> readers.FileStamp:
        if path.name == "a.npz":
            path.unlink(missing_ok=True)
        return look(folder, path)

    monkeypatch.setattr(readers, "_stamp", too_late)
    assert len(load_folder(tmp_path).train) == 2


def test_samples_that_were_all_removed_are_trained_on_no_more(tmp_path: Path) -> None:
    stage = DeviceStage(tmp_path)
    held = softmax_program.samples(np.random.default_rng(1), 12)
    only = write(tmp_path / "train.npz", at=1, x=held.x, y=held.y)
    stage.samples = DataFolder(tmp_path)
    stage.samples.load()

    def script() -> Script:
        yield
        only.unlink()
        for round_ in (1, 2):
            stage.ask(stage.fit(), round_=round_)
            yield
        write(tmp_path / "train.npz", at=2, x=held.x, y=held.y)
        stage.ask(stage.fit(), round_=3)
        yield

    stage.play(script())
    assert [nack["code"] for nack in stage.said("nack")] == ["no_data", "no_data"]
    assert [rdy["n"] for rdy in stage.said("rdy")] == [12]


def test_a_device_takes_new_samples_in_between_two_rounds_and_tells_how_many_it_has(tmp_path: Path) -> None:
    stage = DeviceStage(tmp_path)
    held = softmax_program.samples(np.random.default_rng(1), 20)
    write(tmp_path / "train" / "a.npz", at=1, x=held.x[:12], y=held.y[:12])
    stage.samples = DataFolder(tmp_path)

    def script() -> Script:
        yield
        stage.ask(stage.fit(), round_=1)
        yield
        stage.go()
        yield
        stage.ack("ok")
        write(tmp_path / "train" / "b.npz", at=2, x=held.x[12:], y=held.y[12:])
        yield
        stage.ask(stage.fit(), round_=2)
        yield

    stage.play(script())
    assert [rdy["n"] for rdy in stage.said("rdy")] == [12, 20]
    assert stage.said("st")[-2]["caps"]["n"] == 20


@pytest.mark.parametrize(("schema", "names"), [(CSV_SCHEMA, ("low", "high")), ("", ()), ("[csv]\n", ())])
def test_samples_bring_the_names_of_their_classes(tmp_path: Path, schema: str, names: tuple[str, ...]) -> None:
    if schema:
        (tmp_path / "schema.toml").write_text(schema)
    np.savez(tmp_path / "train.npz", x=np.zeros((2, 3), np.float32), y=np.array([0, 1]))
    assert load_folder(tmp_path).class_names == names


def test_the_file_that_is_wrong_is_named_and_not_the_newest(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(CSV_SCHEMA)
    (tmp_path / "train").mkdir()
    for name, row in (("1", "nan,2,low"), ("2", "1,2,low")):
        (tmp_path / "train" / f"{name}.csv").write_text(f"a,b,kind\n{row}\n")
        aged(tmp_path / "train" / f"{name}.csv", int(name))
    with pytest.raises(ConfigError, match=r"cannot use train/1\.csv: line 2: 'a' is 'nan'"):
        load_folder(tmp_path)


def test_files_that_are_not_read_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "schema.toml").write_text(CSV_SCHEMA)
    (tmp_path / "train" / ".thumbnails").mkdir(parents=True)
    for name in ("train/1.CSV", "train/2.csv", "train/.3.csv", "train/.thumbnails/4.csv", "train/5.tmp"):
        (tmp_path / name).write_text("a,b,kind\n1,2,low\n")
    assert len(load_folder(tmp_path).train) == 2
    assert not caplog.text
    for name in ("test.csv", "train/cat.gif", "train/new.png"):  # a picture needs the folder of its class
        (tmp_path / name).write_bytes(b"")
    load_folder(tmp_path)
    assert "train/cat.gif and 2 more are not read" in caplog.text


@pytest.mark.parametrize("kind", ["complex64", "datetime64[s]", "U3"])
def test_samples_that_are_no_numbers_are_not_made_some(tmp_path: Path, kind: str) -> None:
    np.savez(tmp_path / "train.npz", x=np.ones((2, 3), np.int64).astype(kind), y=np.array([0, 1]))
    with pytest.raises(ConfigError, match=r"cannot use train\.npz: x is .*; use floating point numbers"):
        load_folder(tmp_path)
