"""A test runs each command of a page, or NOT_RUN holds the reason why none can.

A new page with commands needs a test that follows it (tests/support/doc_pages.py, `followed`), named test_..._page.py.
The pages in HERE are short enough to be followed right here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from coordinator.strategies.registry import METHODS
from tests.support.doc_pages import DOCS, FILES, ROOT, TYPED, WORDS, PageBlock, PageReader, blocks, links

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
TESTS = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "docs").glob("test_*_page*.py")}
HERE = ("README.md", "docs/methods.md", "docs/hostile-devices.md")

CHOWN = "needs root and the user mosquitto; test_provisioning.py reads it in what `provision` prints"
DATA = "needs a data set that is not shipped; tests/emulator/data/test_registry.py and test_cli.py take small ones"
INSTALLS = "changes the environment in which the tests run; CI starts from a fresh one with `make install`"
DEMO = "tests/e2e/test_demo.py runs it"
OTHER_MACHINES = "is for a second machine; tests/e2e/test_mutual_tls.py runs broker, coordinator and devices over TLS"
ROADS = "tests/docs/test_roads.py follows it (`make roads`), with what it needs from other sections"
MAKE = "a target of the Makefile; CI runs `make test` and `make check`, the long ones are for people"
CONTAINER = "needs podman and root; tests/coordinator/test_deploy.py holds the file against the package"

NOT_RUN: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        r"make demo\b.*": DEMO,
        r"make test\b.*": MAKE,
        r"pip install .*": INSTALLS,
        r"fedcenters-coordinator (provision|serve|status) .*|mosquitto .*": ROADS,
        r"fedcenters-edge (doctor|join|nearest) .*|fedcenters-export (bundle|verify|serve) .*": ROADS,
        r"fedcenters-edge flash .*": "needs a board; tests/edge_client/board flashes folders",
        r"chown .*": CHOWN,
        r".* --data DIR .*": DATA,
        r"fedcenters-emulator experiment .*": "a minute of training; tests/emulator/experiments runs a table",
    },
    "docs/plug-ins.md": {
        r"PYTHONPATH=my-methods python -m pytest .*": "tests/conformance/test_own_method.py runs it with other methods",
    },
    "docs/train-on-android.md": {
        r"sudo apt install .*": INSTALLS,
        r"g\+\+ .*|\./train .*": "tests/edge_client/engines/test_train_cc.py runs it where the headers are",
    },
    "CONTRIBUTING.md": {r"make .*|\.ci/run.*": MAKE},
    "docs/bring-your-own-data.md": {r".* --data DIR": DATA},
    "docs/flash-a-board.md": {
        r"sudo .*|systemctl .*|.* --ssh .*": "needs a board or its root; tests/edge_client/board flashes folders"
    },
    "docs/one-base-many-adapters.md": {
        r"pip install .*": INSTALLS,
        r"python (prepare|simulate|use)\.py": "test_adapters_page.py runs these files where peft is installed",
        r"python three_devices\.py|kill .*|fedcenters-\w+ .*": "needs peft, which CI lacks; quick-start.md has them",
    },
    "docs/open-on-a-phone.md": {
        r"mosquitto .*|fedcenters-coordinator (serve|phone) phones.toml .*": OTHER_MACHINES,
        r"sed .*|python phone_devices\.py": "test_phone_page.py runs them",
        r"fedcenters-edge join .*": "quick-start.md has it, with the devices that this one is made from",
    },
    "docs/train-on-a-phone-with-termux.md": {
        r"fedcenters-coordinator provision .*|fedcenters-edge flash .*": "test_board_page.py runs them for a board",
        r"termux-setup-storage|sh .*|proot-distro .*": "needs a phone; tests/boards/test_termux.py runs the script",
    },
    "docs/privacy.md": {
        r"pip install .*": INSTALLS,
        r".* --data-set mnist .*": DATA,
        r".* -c secure=updates": "tests/emulator/simulation/test_sealed_simulation.py plays such a run",
    },
    "docs/quick-start.md": {r"python3 -m venv .*|\. .*|pip install .*": INSTALLS, r"fedcenters-emulator demo": DEMO},
    "docs/run-as-a-service.md": {
        r"podman .*": CONTAINER,
        r".* fleet .* --identities .*": "tests/emulator/testbed/test_large_fleet.py starts such a fleet",
        r"nohup .*": "test_service.py starts `serve` with logs of its own",
        r"(/usr/bin/python3|/opt/\S+) .*|(cp|mkdir|chmod|ln) .*|systemctl .*": "needs root and systemd; test_deploy.py",
        r"chown .*": CHOWN,
    },
    "docs/serve-centers.md": {
        r"fedcenters-export serve .*": "serves until it is stopped; tests/export/serve/test_serve.py starts it so",
        r"curl .*": "test_serve_page.py asks what it asks",
    },
    "docs/run-at-scale.md": {
        r"mosquitto .*|fedcenters-coordinator serve .*": OTHER_MACHINES,
        r"ray .*|.* --ray .*|export RAY_AUTH_MODE=token": "tests/emulator/parallel/test_ray_pool.py starts clusters",
        r".* --engine stacked": "needs a GPU; pytest -m gpu, and tests/benches/gpu.py",
    },
    "docs/runs.md": {
        r"sbatch .*|.*/sweep --kept": "needs SLURM; tests/emulator/experiments/test_cells.py has processes share cells",
    },
    "docs/security.md": {
        r"mosquitto .*|fedcenters-(coordinator|edge) .*": OTHER_MACHINES,
        r"chown .*": CHOWN,
        r"kill -HUP .*": "tests/attacks/test_foreign_certificates.py has a broker read its revocation list again",
    },
}


def called(page: Path) -> str:
    """A page's path from the root of the repository."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def reason(page: Path, command: str) -> str:
    """Why no test runs this command of a page; empty when one must."""
    known = NOT_RUN.get(called(page), {})
    return next((why for pattern, why in known.items() if re.fullmatch(pattern, command)), "")


@cache
def followers(page: str) -> tuple[str, ...]:
    """The sources of the tests that follow a page."""
    return tuple(source for source in TESTS.values() if f'"{page}"' in source)


def is_run(page: Path, kind: str) -> bool:
    """Whether a test runs the blocks of this kind; a follower by `followed` runs commands and writes files."""
    if called(page) in HERE:
        return True
    follows = re.compile(rf'followed\(|reader: PageReader|"{kind}"')
    return any(follows.search(source) for source in followers(page.name))


def unrun(page: Path, block: PageBlock) -> list[str]:
    """The commands of a block that no test runs, without a reason in NOT_RUN."""
    if block.kind in (*WORDS, ""):
        return [line for line in block.commands if re.match(r"(\$ )?fedcenters-", line) and not reason(page, line)]
    if block.kind in FILES:
        return [] if is_run(page, block.kind) or page.parent == ROOT else [block.text.splitlines()[0]]
    if block.kind == "console" and is_run(page, "console"):
        return []
    return [command for command in block.commands if not reason(page, command)]


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_every_command_of_a_page_is_run_or_excused(page: Path) -> None:
    missing = [command for block in blocks(page) for command in unrun(page, block)]
    assert missing == [], "write a test_..._page.py that follows the page, or say in NOT_RUN why no test can"


def test_a_line_of_a_console_block_is_a_command() -> None:
    for page in PAGES:
        for block in (b for b in blocks(page) if b.kind == "console"):
            assert [line for line in block.text.splitlines() if line.strip() and not line.startswith("$ ")] == [], page


def test_no_reason_has_outlived_its_command() -> None:
    typed = {called(page): [c for block in blocks(page) for c in block.commands] for page in PAGES}
    for page, known in NOT_RUN.items():
        for pattern in known:
            assert any(re.fullmatch(pattern, command) for command in typed[page]), (page, pattern)


def test_a_page_that_somebody_adds_does_not_go_unseen(tmp_path: Path) -> None:
    new = tmp_path / "new.md"
    new.write_text("```console\n$ fedcenters-edge fly\n```\n\ntext\n\n    fedcenters-edge swim --far\n\n")
    assert [unrun(new, block) for block in blocks(new)] == [["fedcenters-edge fly"], ["fedcenters-edge swim --far"]]
    assert TYPED.match("pip install x")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageReader]:
    reader = PageReader(folder=tmp_path_factory.mktemp("reader"))
    for page in (ROOT / name for name in HERE):
        commands = [command for block in blocks(page) if block.kind == "console" for command in block.commands]
        for command in (c for c in commands if not reason(page, c)):
            reader.run(command)
    yield reader
    reader.leave()


@pytest.mark.timeout(600)
def test_short_pages_and_the_readme_run_as_they_stand(reader: PageReader) -> None:
    assert len(reader.printed) >= 4
    assert all(reader.printed.values())


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_each_linked_file_exists(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


def test_the_index_lists_every_page() -> None:
    listed = set(links(DOCS / "README.md"))
    assert {page.name for page in DOCS.glob("*.md")} - listed - {"README.md"} == set()


def test_the_papers_page_names_every_method() -> None:
    named = set(re.findall(r"`([\w-]+)`", (DOCS / "papers.md").read_text(encoding="utf-8")))
    assert set(METHODS) - named - {"nonfed"} == set()


def test_the_readme_counts_all_methods_and_no_other_page_counts_them() -> None:
    found = [(called(page), n) for page in PAGES for n in re.findall(r"(\d+) methods\]", words_of(page))]
    assert found == [("README.md", str(len(METHODS)))]


def test_a_page_installs_a_checkout_while_no_registry_has_a_release() -> None:
    asked = {called(page) for page in PAGES if re.search(r"pip install [^\n`]*fedcenters\b", words_of(page))}
    assert asked <= {"DECISIONS.md", "CHANGELOG.md"}  # which tell of it


def words_of(page: Path) -> str:
    """The text of a page."""
    return page.read_text(encoding="utf-8")


def test_measured_rows_of_the_comparison_are_those_of_the_benchmarks() -> None:
    section = (DOCS / "comparison.md").read_text(encoding="utf-8").split("## Measured")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "x |" in line]
    measured = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert len(rows) > 4
    assert [row for row in rows if f"| {' | '.join(row)} |" not in measured] == []


@pytest.mark.parametrize("room", ["edge_client", "coordinator", "export", "emulator"])
def test_the_architecture_page_has_the_docstring_of_every_part(room: str) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    for init in sorted((ROOT / room).rglob("__init__.py")):
        words = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        assert f"| `{init.parent.relative_to(ROOT).as_posix()}/` | {words.splitlines()[0]} |" in page
