"""The site of `make site`: its pages, the headings that links name, and, as a slow test, the build itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedcenters
from tests.support.browser import Open
from tests.support.doc_pages import DOCS, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("*.ipynb")])
SITE = DOCS / "site"


def headings(page: Path) -> set[str]:
    """The names by which GitHub and the site know a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def test_the_site_lists_every_page_once() -> None:
    listed = re.findall(r"^\.\./(?:\.\./)?\S+$", (SITE / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = sorted(str((SITE / entry).resolve()) for entry in listed)
    assert found == sorted(str(page.with_suffix("")) for page in PAGES)


def test_the_reference_has_every_name_once() -> None:
    text = (SITE / "reference.md").read_text(encoding="utf-8")
    found = re.findall(r"^\.\. auto(?:class|function):: fedcenters\.(\S+)$", text, flags=re.MULTILINE)
    found += re.findall(r"^\.\. automodule:: emulator\.api\.data\.(\S+)$", text, flags=re.MULTILINE)
    names = [name for name in fedcenters.__all__ if not name.startswith("__")]
    parts = [f"partitions.{name}" for name in fedcenters.partitions.__all__]
    assert sorted(found) == sorted([*names, *parts, "fleets.named"])


@pytest.mark.parametrize("page", [p for p in PAGES if p.suffix == ".md"], ids=lambda page: page.name)
def test_each_linked_heading_exists(page: Path) -> None:
    named = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    wrong = [
        (file, heading)
        for file, heading in named
        if (target := page.parent / file if file else page).suffix == ".md" and heading not in headings(target)
    ]
    assert wrong == []


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's page of ARCHITECTURE.md, which has the widest blocks that do not wrap."""
    out = tmp_path_factory.mktemp("site")
    words = ["-Q", "-D", "include_patterns=docs/site/index.md,ARCHITECTURE.md", "-c", "docs/site", "-b", "html", "."]
    subprocess.run([sys.executable, "-m", "sphinx", *words, str(out)], cwd=ROOT, check=True)
    return out / "ARCHITECTURE.html"


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1000, 1200, 1330, 1600])
def test_a_page_of_the_site_is_no_wider_than_its_window(drawings: Path, width: int, visit: Open) -> None:
    page = visit(drawings.as_uri(), size=(width, 900)).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width >= 1600:
        assert (
            page.evaluate("[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth).length")
            == 0
        )


@pytest.mark.slow
@pytest.mark.timeout(600)  # it runs the notebooks too
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = ["--quiet", "--fail-on-warning", "--keep-going", "-c", "docs/site", "-b", "html", ".", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fedcenters.FeSEM" in (tmp_path / "docs/site/reference.html").read_text(encoding="utf-8")
    assert (tmp_path / "searchindex.js").is_file()
    assert {path.name for path in tmp_path.glob("_downloads/*/*.ipynb")} == {"first-run.ipynb", "your-own.ipynb"}
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    linked = re.findall(r'(?:href|src)="(?!\w+:|/|#)([^"#?]+)', first)
    assert "docs/quick-start.html" in linked
    assert [path for path in linked if not (tmp_path / path).exists()] == []
    assert "fc.FeSEM(clusters=3)" in re.sub(r"<[^>]+>", "", first)
