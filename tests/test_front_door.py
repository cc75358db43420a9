"""`import fedcenters as fc`: its names, what the import loads, and `python -m fedcenters`."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fedcenters as fc
from coordinator.strategies.registry import METHODS
from edge_client import __version__
from edge_client.toml_files import parse_toml
from emulator.data.partition_schemes import PARTITION_SCHEMES
from emulator.data.registry import DATA_SETS

ROOT = Path(__file__).parents[1]
NAMES = """
    Bundle ClusterCounts Comparison Fit Fleet LocalSgd MultiCenter Probe Reply Result ServerOptions State
    TrainingProgram __version__ choose_k compare compile federation fleet fleets load partitions read_bundle
    rounds simulate
"""


def printed(*command: str) -> str:
    return subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_the_names_are_those_that_users_were_promised_and_the_methods() -> None:
    methods = {kind.__name__ for kind in METHODS.values()}
    assert sorted(fc.__all__) == sorted({*NAMES.split(), *methods}) == dir(fc)


def test_completion_shows_data_sets_and_partitions_and_nothing_else() -> None:
    """`fc.fleets.` and `fc.partitions.` offered Any, Path and other imports too."""
    assert dir(fc.fleets) == sorted(["named", *(name.replace("-", "_") for name in DATA_SETS)])
    assert dir(fc.partitions) == sorted([*(kind.__name__ for kind in PARTITION_SCHEMES.values()), "for_flower"])


@pytest.mark.parametrize("name", fc.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(fc, name) is not None


@pytest.mark.parametrize("name", [name for name in fc.__all__ if not isinstance(getattr(fc, name), str)])
def test_every_name_has_a_docstring_with_an_example(name: str) -> None:
    """tests/docs/test_docstring_examples.py runs those with a prompt; the others are runs of some seconds."""
    text = inspect.getdoc(getattr(fc, name)) or ""
    if ">>> " not in text:
        example = text.partition("\nExample:\n")[2]
        assert f"fc.{name}" in example
        ast.parse(inspect.cleandoc(example))


def test_every_method_of_the_command_line_is_a_class_here() -> None:
    assert set(METHODS.values()) == {getattr(fc, kind.__name__) for kind in METHODS.values()}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fc.simulat  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_loads_nothing_that_is_slow() -> None:
    loaded = printed("-c", "import sys, fedcenters; print(*sys.modules)").split()
    heavy = {"numpy", "torch", "pandas", "scipy", "sklearn", "matplotlib", "edge_client", "coordinator", "emulator"}
    assert not {name.partition(".")[0] for name in loaded} & heavy


def test_the_module_prints_the_version_and_the_commands_that_are_installed() -> None:
    said = printed("-m", "fedcenters")
    assert said.startswith(f"fedcenters {__version__}\n")
    assert all(name in said for name in fc._COMMANDS)
    assert set(fc._COMMANDS) == set(parse_toml((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


@pytest.mark.parametrize("name", ["export.py", "coordinator.py"])
def test_a_file_that_hides_one_of_our_packages_is_named_with_what_to_do(name: str, tmp_path: Path) -> None:
    """Also where that file is the user's script, which Python then runs once more in the package's place."""
    hiding, script = tmp_path / name, tmp_path / "mine.py"
    uses = f"import sys; sys.path.append({str(ROOT)!r}); import fedcenters as fc; fc.FeSEM; fc.read_bundle"
    for text, started in (("", script), (uses, hiding)):
        hiding.write_text(text)
        script.write_text(uses)
        done = subprocess.run([sys.executable, str(started)], capture_output=True, text=True, check=False)
        assert f"{hiding} hides {hiding.stem!r}, a package of fedcenters" in done.stderr.splitlines()[-1]
        assert "give it another name" in done.stderr


def test_a_command_runs_beside_a_file_with_the_name_of_one_of_our_packages(tmp_path: Path) -> None:
    (tmp_path / "coordinator.py").write_text("raise SystemExit('this file was run')\n")
    words = ["-m", "emulator", "simulate", "--method", "coordinator:Mine"]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-P", *words] if sys.version_info >= (3, 11) else [sys.executable, "-I", *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "'coordinator' is a package of fedcenters: give your own coordinator.py another name" in done.stderr
