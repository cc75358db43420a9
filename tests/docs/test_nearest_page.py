"""docs/nearest-center.md is right: its commands run as they stand, in their order, against a real server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coordinator.models.registry import build_model
from edge_client.nearest.choose_center import RULE_NAMES
from emulator.cli import app as emulator
from export.cli import app as export

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nearest-center.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
APPS = {"fedcenters-emulator": emulator, "fedcenters-export": export}


def commands(text: str) -> list[str]:
    return [line.removeprefix("$ ") for line in text.splitlines()]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Every block of the page in one folder -> data folder -> what `nearest` said about it."""
    folder, said, servers = tmp_path_factory.mktemp("page"), dict[str, str](), list[subprocess.Popen[str]]()
    url = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind, text in BLOCKS:
            if kind == "python":
                subprocess.run([sys.executable, "-c", text], check=True)
            for command in commands(text) if kind == "console" else ():
                name, *arguments = shlex.split(command)
                if arguments[0] == "serve":
                    servers.append(serving(arguments[1]))
                    url = address(servers[0])
                elif name == "fedcenters-edge":
                    where = arguments[arguments.index("--data") + 1]
                    said[where] = nearest(arguments, url)
                else:
                    result = CliRunner().invoke(APPS[name], arguments)
                    assert result.exit_code == 0, f"{command}: {result.output}"
    said["folder"] = str(folder)
    try:
        yield said
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=200)


def serving(bundle: str) -> subprocess.Popen[str]:
    """The page's server on a free port."""
    line = [sys.executable, "-m", "export", "serve", bundle, "--port", "0"]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True)


def address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://[\d.]+:\d+", line):
            return found.group()
    raise AssertionError("the server ended")


def nearest(arguments: list[str], url: str) -> str:
    line = [argument.replace("http://127.0.0.1:8081", url) for argument in arguments]
    command = [sys.executable, "-m", "edge_client.cli", *line, "--state", "state", "--device", "kitchen"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_labelled_device_gets_a_signed_center_that_suits_it(told: dict[str, str]) -> None:
    said = told["samples"]
    assert re.match(r"kitchen: center \d \(by labelled\): fits (well|badly)", said)
    assert "signed by home" in said
    assert float(re.search(r"accuracy ([\d.]+)%", said)[1]) > 85  # type: ignore[index]  # a center of the other turn is below 50


def test_without_labels_it_gets_the_same_one(told: dict[str, str]) -> None:
    with_labels, without = (re.match(r"kitchen: center (\d)", told[name])[1] for name in ("samples", "inputs"))  # type: ignore[index]
    assert with_labels == without
    assert "by unlabelled" in told["inputs"]
    assert "accuracy" not in told["inputs"]


def test_inputs_that_nobody_has_are_answered_none(told: dict[str, str]) -> None:
    answer = json.loads(told["strange"])
    assert (answer["center"], answer["fit"]) == (None, "none")
    assert answer["file"] is None
    assert answer["why"]
    table = PAGE.split("\n| field | content |\n")[1].split("\n\n")[0]
    assert set(answer) == {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def test_the_personal_model_has_a_file_of_its_own(told: dict[str, str]) -> None:
    folder = Path(told["folder"])
    (path,) = (folder / "state").glob("personal-*.onnx")
    x = np.load(folder / "samples" / "train.npz")["x"]
    net = build_model("digits-mlp", seed=0).module.eval()
    net.load_state_dict(load_file(path.with_suffix(".safetensors")), strict=False)
    expected = net(torch.from_numpy(x)).detach().numpy()
    personal, center = (
        onnxruntime.InferenceSession(path.with_stem(path.stem.replace("personal", name))).run(["logits"], {"x": x})[0]
        for name in ("personal", "center")
    )
    np.testing.assert_allclose(personal, expected, atol=1e-4)
    assert np.abs(personal - center).max() > 1e-2  # of the size of scores around 5


def test_every_way_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE[PAGE.index("## 2.") : PAGE.index("## 3.")], flags=re.MULTILINE)
    assert set(rows) == set(RULE_NAMES)
