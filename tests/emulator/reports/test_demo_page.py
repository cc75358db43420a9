"""report.html: complete, self-contained, and safe to open."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from edge_client.errors import ConfigError
from emulator.reports.demo_page import draw_demo_pictures, read_demo_run, read_events, round_events, write_report
from tests.support import finished_run


class PageParser(HTMLParser):
    """Collects the tags and the words of a page, and complains about a tag that is closed wrongly."""

    VOID = frozenset({"meta", "br", "path", "use", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def page(tmp_path: Path) -> PageParser:
    out = PageParser()
    out.feed(write_report(finished_run.write_demo_run(tmp_path)).read_text(encoding="utf-8"))
    return out


def test_the_page_holds_four_vector_figures_and_asks_for_nothing_elsewhere(page: PageParser) -> None:
    assert page.tags.count("svg") == 4
    assert not {"img", "image"} & set(page.tags)
    assert "Accuracy of each device" in page.words  # the words of a figure are text
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)


def test_the_page_says_what_the_run_achieved(page: PageParser) -> None:
    for said in (
        "4 devices, 2 centers",
        "2 centers beat one model for all by 57.0 points: 80.0% against 23.0%",
        "80.0%",
        "23.0%",
        "1 of 1",
        "new-0",
        "device-03",
        "90.0%",
    ):
        assert said in page.words


def test_the_exact_command_is_shown_as_text(page: PageParser) -> None:
    assert "fedcenters-emulator demo --seed 1 <&>" in page.words


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    first = write_report(finished_run.write_demo_run(tmp_path)).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "start"}\n{"event": "rou', encoding="utf-8")
    assert read_events(path) == [{"event": "start"}]


def test_a_round_told_twice_counts_once() -> None:
    told = [finished_run.round_event("fesem", n, a, {"a": 0}) for n, a in ((1, 0.1), (2, 0.2), (2, 0.3))]
    assert [e["accuracy"]["micro"] for e in round_events(told, "fesem")] == [0.1, 0.3]


def test_a_folder_without_a_finished_run_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hint: pass a folder"):
        read_demo_run(tmp_path)
    finished_run.write_demo_run(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(finished_run.summary())[:-9], encoding="utf-8")
    with pytest.raises(ConfigError, match="no finished run"):
        read_demo_run(tmp_path)


@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_the_picture_for_a_readme_has_the_format_of_its_name(name: str, start: bytes, tmp_path: Path) -> None:
    draw_demo_pictures(finished_run.write_demo_run(tmp_path / "run"), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
