"""A reader's own Python by import path, or registered by an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.strategies.registry import make_method, method_name
from edge_client.errors import UsageError
from edge_client.users_code import users_line
from emulator.data import partition_schemes, registry
from export.diagnostics import MAX_SENTENCE_CHARS
from export.plugins import describe_error, find_by_name, import_path, nearest_name_hint

MINE = """
from dataclasses import dataclass
from coordinator.strategies.baselines.fedavg import FedAvg
from emulator.data.registry import DATA_SETS
from emulator.data.partition_schemes import Iid

DIGITS = DATA_SETS["digits"]


@dataclass(frozen=True, kw_only=True)
class Half(FedAvg):
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Same(Iid):
    twice: int = 1
"""
REGISTERED = """
[fedcenters.methods]
half = {0}:Half
[fedcenters.data-sets]
ours = {0}:DIGITS
[fedcenters.partitions]
same = {0}:Same
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reader's module, in a package that is installed as far as Python can tell."""
    name = f"plugged_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MINE)
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(REGISTERED.format(name))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("how", ["{}:Half", "half"])
def test_a_method_comes_by_import_path_or_registered_with_its_settings(module: str, how: str) -> None:
    made = make_method(how.format(module), **{"share": "0.25", "local-steps": "3"})
    assert (getattr(made, "share", None), getattr(made, "local_steps", None)) == (0.25, 3)
    assert method_name(made) == "half"


@pytest.mark.parametrize("how", ["{}:DIGITS", "ours"])
def test_a_data_set_comes_by_import_path_or_registered(module: str, how: str) -> None:
    assert registry.load_data_set(how.format(module)).classes == 10


@pytest.mark.parametrize("how", ["{}:Same:twice=2", "same:twice=2"])
def test_a_partition_comes_by_import_path_or_registered_with_its_settings(module: str, how: str) -> None:
    assert getattr(partition_schemes.parse_scheme(how.format(module)), "twice", None) == 2


@pytest.mark.parametrize(
    "make_it", [lambda: make_method("json:dumps"), lambda: partition_schemes.parse_scheme("json:dumps")]
)
def test_what_is_no_class_of_settings_is_refused(make_it: object) -> None:
    with pytest.raises(UsageError, match="json:dumps is no"):
        make_it()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("json", "is no import path"),
        (":dumps", "is no import path"),
        ("mine.py:Mine", "is no import path"),
        ("methods/mine:Mine", "is no import path"),
        ("no_such_module_here:x", "there is no module 'no_such_module_here'"),
        ("json:dumpz", "has no 'dumpz'"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        import_path(path)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown data set 'digit'") as wrong:
        find_by_name("data-sets", "digit", {"digits": 1, "faces": 2})
    assert wrong.value.hint is not None
    assert wrong.value.hint.startswith("did you mean 'digits'? use one of digits, faces")


def test_of_very_many_names_a_hint_has_the_nearest_and_the_first_ones() -> None:
    """A wrong column of a table of 99 columns was answered by all of them."""
    columns = [f"a{i:02}" for i in range(98)]
    told = nearest_name_hint("usr", [*columns, "user"])
    assert told.startswith("did you mean 'user'? use one of a00, a01, ")
    assert told.endswith(", a11 and 87 more")
    assert nearest_name_hint("b", columns[:60]).endswith(", a58, a59")


@pytest.mark.parametrize(("wrong", "meant"), [("lr", "learning_rate"), ("epochs", "local-steps"), ("k", "clusters")])
def test_the_usual_name_of_a_setting_elsewhere_is_answered_with_ours(wrong: str, meant: str) -> None:
    valid = ["batch-size", "clusters", "lam", "learning_rate", "local-steps"]
    assert nearest_name_hint(wrong, valid).startswith(f"did you mean {meant!r}?")


def test_an_error_with_a_very_long_line_is_told() -> None:
    """As of a text or a number of a whole array: the search for paths in it took hours, without a sign."""
    assert describe_error(ValueError("a" * 200_000)) == f"ValueError: {'a' * MAX_SENTENCE_CHARS}"
    assert describe_error(ValueError(f"no {'/a/b' * 2_000}")) == "ValueError: no"


def test_a_module_of_python_is_not_taken_for_the_users_own() -> None:
    """A full disk was then told as a line of pathlib.py to correct."""
    import_path("pathlib:Path")
    with pytest.raises(FileNotFoundError) as raised:
        Path("/nowhere").read_bytes()
    assert users_line(raised.value) is None
