"""docs/emulate-a-fleet.md is right: its commands run as they stand, and it lists every engine and every key."""

from __future__ import annotations

import re

from emulator.engines.base import ENGINES
from emulator.simulation.profile_files import PROFILE_KEYS, read_profiles
from tests.support.doc_pages import DOCS, PageReader

PAGE = "emulate-a-fleet.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")


def test_each_command_runs_as_it_stands(reader: PageReader) -> None:
    assert len(reader.printed) == 4
    assert [command for command, text in reader.printed.items() if "4 rounds" not in text] == []


def test_the_profiles_of_the_page_have_every_key_once_at_least(reader: PageReader) -> None:
    profiles = reader.folder / "profiles.toml"
    assert [kind.name for kind in read_profiles(profiles)] == ["solar sensor", "mains"]
    assert PROFILE_KEYS.keys() <= set(re.findall(r"^([\w-]+) = ", profiles.read_text(), flags=re.MULTILINE))


def test_every_engine_has_its_row() -> None:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(ENGINES)
