from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import ConfigError
from edge_client.protocol import codecs
from edge_client.protocol.task import Schema, TensorSpec
from emulator.reports import plots
from emulator.reports.pictures.device_map import NO_GROUP
from emulator.reports.pictures.records import (
    PICTURES_FILE,
    CenterImages,
    CenterShares,
    PictureData,
    RoundPoints,
    write_picture_data,
)
from emulator.reports.run_figures import PanelRow, draw_run, read_run_folder, run_pictures
from tests.support import finished_run


def simulated(folder: Path, *, centers: int) -> Path:
    """What `simulate` leaves, made by hand."""
    schema = Schema((TensorSpec(name="head.weight", role="p", shape=(3, 2)),), ("head.weight",))
    (folder / "centers" / "fesem").mkdir(parents=True)
    for k in range(centers):
        blob = codecs.encode_vector(np.arange(6, dtype=np.float32) - k, schema, codec="f32", kind="model")
        (folder / "centers" / "fesem" / f"center-{k}.safetensors").write_bytes(blob)
    devices = {who: {"group": group, "labels": [3, 4]} for who, group in finished_run.GROUPS.items()}
    (folder / "fleet.json").write_text(json.dumps({"classifier": ["head.weight"], "devices": devices}))
    lines = [
        json.dumps(finished_run.round_event("fesem", t, 0.5, row)) for t, row in enumerate(finished_run.ASSIGNMENTS, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def keeping(run: Path, *, devices: int = 4, shares: bool = True, images: bool = True) -> Path:
    """Adds what newer runs keep; devices beyond the story's four have no group and no center."""
    who = tuple(sorted(finished_run.GROUPS) + [f"other-{i:02d}" for i in range(devices - 4)])
    rng = np.random.default_rng(0)
    points = [rng.standard_normal((devices, 6)).astype(np.float32) for _ in (1, 3)]
    moments = tuple(RoundPoints(round=n, who=who, points=p) for n, p in zip((1, 3), points, strict=True))
    told = CenterShares(name="weight", rounds=(1, 2, 3), who=who, values=np.full((3, devices, 2), 0.5, np.float32))
    seen = CenterImages(pixels=np.zeros((2, 1, 8, 8), np.uint8), center=np.array([0, 1]), label=np.array([3, 4]))
    held = PictureData(
        representation="all", moments=moments, shares=told if shares else None, images=seen if images else None
    )
    write_picture_data(run / PICTURES_FILE, held)
    return run


def drawn(run: Path, out: Path) -> tuple[list[str], dict[str, str]]:
    """The names of the pictures, and why the others are left out."""
    said: list[str] = []
    names = [path.stem for path in draw_run(run, out, say=said.append)]
    return names, {line.partition(".png")[0]: line.partition(" is left out: ")[2] for line in said}


ALWAYS = ["labels", "curves", "assignment"]
KEPT = ["devices-pca", "devices-tsne", "cosines-within", "weights", "weights-devices", "images"]


@pytest.mark.parametrize(("centers", "cosines"), [(1, []), (3, ["cosines"])])
def test_a_run_that_kept_nothing_gives_its_pictures_and_why_the_others_are_left_out(
    tmp_path: Path, centers: int, cosines: list[str]
) -> None:
    names, left = drawn(simulated(tmp_path / "run", centers=centers), tmp_path / "pictures")
    assert names == [*ALWAYS, *cosines]
    assert set(left) == {*KEPT, *({"cosines"} - set(cosines))}
    assert all("simulate it again" in left[name] for name in KEPT)
    assert all((tmp_path / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)


def test_a_run_that_kept_everything_gives_every_picture(tmp_path: Path) -> None:
    run = keeping(simulated(tmp_path / "run", centers=2), devices=17)
    assert drawn(run, tmp_path / "pictures") == ([*ALWAYS, "cosines", *KEPT], {})


def test_too_few_devices_have_no_t_sne_and_other_methods_no_weights_and_no_images(tmp_path: Path) -> None:
    run = keeping(simulated(tmp_path / "run", centers=2), shares=False, images=False)
    names, left = drawn(run, tmp_path / "pictures")
    assert names == [*ALWAYS, "cosines", "devices-pca", "cosines-within"]
    assert left == {
        "devices-tsne": "it needs the models of 16 devices, and the run kept those of 4",
        "weights": "FeSEM gives devices no shares of centers",
        "weights-devices": "FeSEM gives devices no shares of centers",
        "images": "the devices hold no square images, or none has a center",
    }


def test_devices_that_sent_no_models_have_no_map(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", centers=2)
    write_picture_data(run / PICTURES_FILE, PictureData(representation="classifier"))
    left = drawn(run, tmp_path / "pictures")[1]
    assert {left[name].rpartition(", and ")[2] for name in ("devices-pca", "devices-tsne", "cosines-within")} == {
        "no device sent one in the rounds that were kept"
    }


def test_true_groups_have_panels_of_their_own_and_a_map_has_one_per_round(tmp_path: Path) -> None:
    found = run_pictures(read_run_folder(keeping(simulated(tmp_path / "run", centers=2))))
    panels = {name: len(picture.panels) for name, picture in found.items() if not isinstance(picture, str)}
    assert panels["weights"] == 2
    assert panels["devices-pca"] == 2
    assert panels["images"] == panels["labels"] == 1


def test_a_map_shows_the_centers_of_its_own_round(tmp_path: Path) -> None:
    run = read_run_folder(keeping(simulated(tmp_path / "run", centers=2), devices=5))
    who = ["device-00", "device-01", "device-02", "device-03", "other-00"]
    assert [run.center(who, number).tolist() for number in (1, 3, 9, 0)] == [
        [0, 1, 1, 1, NO_GROUP],
        [0, 1, 0, 1, NO_GROUP],
        [NO_GROUP] * 5,
        [NO_GROUP] * 5,
    ]
    assert run.group(who).tolist() == [0, 1, 0, 1, NO_GROUP]


def test_a_run_without_classes_or_centers_of_devices_says_so(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", centers=1)
    events = [finished_run.round_event("fesem", 1, 0.5, {"device-00": 0}) | {"assignment": {}}]
    events[0] |= {name: {"micro": None, "macro": None} for name in ("accuracy", "f1")}
    (run / "metrics.jsonl").write_text(json.dumps(events[0]) + "\n")
    names, left = drawn(run, tmp_path / "pictures")
    assert names == ["labels"]
    assert "no round has an accuracy" in left["curves"]
    assert "no device a center" in left["assignment"]


@pytest.mark.parametrize("lost", ["metrics.jsonl", "fleet.json", "centers/fesem/center-0.safetensors"])
def test_a_folder_that_lacks_a_file_is_no_simulated_run(tmp_path: Path, lost: str) -> None:
    run = simulated(tmp_path / "run", centers=1)
    (run / lost).unlink()
    with pytest.raises(ConfigError, match="no simulated run"):
        draw_run(run, tmp_path / "pictures")


@pytest.mark.parametrize("damaged", [PICTURES_FILE, "centers/fesem/center-0.safetensors"])
@pytest.mark.parametrize("data", [b"junk", b"", bytes(1_000)])
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str, data: bytes) -> None:
    """A damaged center was told as a bug."""
    run = simulated(tmp_path / "run", centers=1)
    (run / damaged).write_bytes(data)
    with pytest.raises(ConfigError, match=damaged):
        draw_run(run, tmp_path / "pictures")


def test_a_folder_without_a_run_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nofolder does not exist\n"):
        read_run_folder(tmp_path / "nofolder")
    with pytest.raises(ConfigError, match=r"holds no simulated run: it has no metrics\.jsonl\n"):
        read_run_folder(tmp_path)


@pytest.mark.parametrize(("width", "told"), [(1.0, False), (1e-4, True)])
def test_a_map_of_devices_says_that_its_near_dots_are_moved_apart(tmp_path: Path, width: float, *, told: bool) -> None:
    run = simulated(tmp_path, centers=2)
    who = tuple(sorted(finished_run.GROUPS))
    points = np.array([[0, 0], [0, width], [9, 1], [9, 5]], np.float32)
    held = PictureData(representation="all", moments=(RoundPoints(round=1, who=who, points=points),))
    write_picture_data(run / PICTURES_FILE, held)
    row = run_pictures(read_run_folder(run))["devices-pca"]
    assert not isinstance(row, str)
    (axes, *_) = plots.make_figure(row.width, row.height, *row.panels).axes
    assert ("near dots are moved apart" in axes.get_xlabel()) == told


def test_labels_of_positions_are_not_told_as_samples(tmp_path: Path) -> None:
    run = simulated(tmp_path, centers=1)
    told = json.loads((run / "fleet.json").read_text())
    for samples, word in ((7, "samples"), (2, "labels")):
        devices = {who: held | {"samples": samples} for who, held in told["devices"].items()}
        (run / "fleet.json").write_text(json.dumps(told | {"devices": devices}))
        picture = run_pictures(read_run_folder(run))["labels"]
        assert isinstance(picture, PanelRow)
        (axes,) = plots.make_figure(4, 3, *picture.panels).axes
        assert (axes.get_title(loc="left"), axes.get_ylabel()) == (f"Training {word} of each device", word)
