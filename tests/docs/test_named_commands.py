"""What a page names of the command lines and of the repository exists: commands, options, targets, modules, files."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import coordinator.cli
import emulator.cli
import export.cli
from edge_client import cli as device
from tests.support.doc_pages import DOCS, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
GONE = {"CHANGELOG.md", "DECISIONS.md"}  # which tell of what was
COMMAND = re.compile(r"fedcenters-(edge|coordinator|emulator|export) ([a-z][a-z-]*)([^\n`|]*)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
NAMED = re.compile(r"`((?:edge_client|coordinator|export|emulator|tests|docs)/[\w./-]+\.(?:py|toml|md|json|svg|sh))`")


@cache
def options() -> dict[str, set[str]]:
    """Each command of the four command lines, with its options."""
    found = {}
    for room, app in (("coordinator", coordinator.cli.app), ("export", export.cli.app), ("emulator", emulator.cli.app)):
        for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]  # a group
            found[f"{room} {name}"] = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for action in device._parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                found[f"edge {name}"] = {option for each in parser._actions for option in each.option_strings}
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in GONE], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_and_option_on_a_page_exists(page: Path) -> None:
    wrong = []
    for room, name, rest in COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", "")):
        taken = options().get(f"{room} {name}")
        if taken is None:
            wrong.append(f"fedcenters-{room} {name}")
        else:
            wrong += [f"{name} {option}" for option in OPTION.findall(rest) if option not in taken]
    assert wrong == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in GONE], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_target_module_and_file_of_the_repository_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    wrong = [t for t in re.findall(r"`make ([a-z][\w-]*)", text) if not re.search(rf"^{t}:", targets, re.MULTILINE)]
    for module in re.findall(r"python -m (tests\.[\w.]*\w)", text):
        place = ROOT / module.replace(".", "/")
        wrong += [] if place.with_suffix(".py").exists() or (place / "__main__.py").exists() else [module]
    wrong += [name for name in NAMED.findall(text) if "..." not in name and not (ROOT / name).exists()]
    assert wrong == []


def test_an_option_that_is_not_there_would_be_found() -> None:
    assert "--dashboard" in options()["coordinator serve"]
    assert "--dashbord" not in options()["coordinator serve"]
    assert {"edge flash", "export verify", "emulator simulate"} <= set(options())
