"""docs/quick-start.md is right: followed from top to bottom, it ends as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge_client.toml_files import parse_toml
from tests.support.doc_pages import DOCS, ROOT, PageReader, blocks
from tests.support.ports import free_port

PAGE = "quick-start.md"
pytestmark = pytest.mark.timeout(600)  # four processes and a compiler, on a machine that may be busy


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    port = free_port()
    return {'"embedded"': f'"embedded:{port}"', "127.0.0.1:1883": f"127.0.0.1:{port}"}


def percent(words: str, text: str) -> float:
    """The number before the last percent sign of the line with these words."""
    line = next(line for line in text.splitlines() if words in line)
    return float(re.findall(r"([\d.]+) ?%", line)[-1])


def test_python_prints_what_the_page_says_and_what_the_command_prints(reader: PageReader) -> None:
    shown = next(block.text for block in blocks(DOCS / PAGE) if block.kind == "text" and "one model" in block.text)
    printed = reader.printed["python first_run.py"].splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []
    command = next(text for words, text in reader.printed.items() if "--method fesem" in words)
    assert percent("accuracy", command) == percent("accuracy (micro", "\n".join(printed))


def test_the_table_of_extras_has_every_extra() -> None:
    table = (DOCS / PAGE).read_text(encoding="utf-8").split("\n| extra | for |\n")[1].split("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row.split(" | ")[0])}
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert listed | {"images"} == set(project["optional-dependencies"])


def test_one_model_fails_where_three_centers_do_not(reader: PageReader) -> None:
    one, three = (text for command, text in reader.printed.items() if " simulate " in command)
    assert percent("accuracy", one) < 40
    assert percent("accuracy", three) > 85
    assert "Rand index 1.000" in three


def test_the_two_devices_get_a_center_each(reader: PageReader) -> None:
    told = next(text for command, text in reader.printed.items() if "status" in command)
    rounds = [line for line in told.splitlines() if "round 10/10" in line]
    assert percent("round 10/10", rounds[-1]) > 85


def test_one_center_suits_the_first_device_and_the_other_does_not(reader: PageReader) -> None:
    printed = reader.printed["python use_center.py"]
    shares = sorted(percent(f"center {k}", printed) for k in (0, 1))
    assert shares[0] < 20
    assert shares[1] > 85


def test_the_script_needs_nothing_of_ours(reader: PageReader) -> None:
    imported = re.findall(r"^(?:import|from) (\w+)", (reader.folder / "use_center.py").read_text(), flags=re.MULTILINE)
    assert set(imported) == {"numpy", "onnxruntime"}


def test_the_folders_of_the_page_are_there(reader: PageReader) -> None:
    for name in ("runs/home/metrics.jsonl", "runs/home/bundle/manifest.json", "pi-1/state", "pi-2/state"):
        assert Path(reader.folder / name).exists()
