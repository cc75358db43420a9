"""The rooms stay apart: what each package may name, what importing it really loads, and what the top level holds.

import-linter reads import statements (make check); these tests look at what an import runs, which a linter cannot see.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from edge_client import __version__
from edge_client.errors import install_hint

ROOT = Path(__file__).parents[1]
ROOMS = ("edge_client", "coordinator", "export", "emulator")
BASE = {"numpy", "safetensors", "cryptography", "edge_client"}  # a device's dependencies, paho apart
RUNTIME_OF = {
    "edge_client/toml_files.py": {"tomli"},
    "edge_client/transport/mqtt.py": {"paho"},
    "edge_client/engines/onnx.py": {"onnxruntime"},
    "edge_client/engines/litert.py": {"ai_edge_litert", "tflite_runtime"},
    "edge_client/engines/litert_compiled.py": {"ai_edge_litert"},
    "edge_client/engines/pt2.py": {"torch"},
    "edge_client/data/images.py": {"PIL"},
    "edge_client/cli.py": {"argcomplete"},
}
TORCH_MAY_BE_NAMED_IN = (
    "coordinator/models/",
    "coordinator/clustering/",
    "coordinator/aggregation/centers.py",
    "export/",
    "emulator/api/",
    "emulator/engines/",
    "emulator/parallel/preload.py",
    "edge_client/engines/pt2.py",
)


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@cache
def names_in(file: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Top-level names of every import statement, those inside functions included, and the module's classes."""
    tree, names = ast.parse(file.read_text(encoding="utf-8")), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return frozenset(names), tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef))


def imported_names(file: Path) -> frozenset[str]:
    return names_in(file)[0]


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stdout.split()} | set(done.stdout.split())


def dotted(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("file", modules("edge_client"), ids=str)
def test_a_device_names_only_what_a_board_installs(file: Path) -> None:
    allowed = BASE | set(sys.stdlib_module_names) | RUNTIME_OF.get(str(file.relative_to(ROOT)), set())
    assert imported_names(file) <= allowed


@pytest.mark.parametrize("room", ROOMS)
def test_torch_is_named_only_where_models_live(room: str) -> None:
    named = [str(f.relative_to(ROOT)) for f in modules(room) if imported_names(f) & {"torch", "litert_torch"}]
    assert [f for f in named if not f.startswith(TORCH_MAY_BE_NAMED_IN)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_package_init_runs_anything(room: str) -> None:
    for file in (f for f in modules(room) if f.name == "__init__.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        assert all(isinstance(node, (ast.Expr, ast.Assign)) for node in body), file


def test_the_protocol_loads_neither_a_transport_nor_an_engine() -> None:
    imports = ", ".join(dotted(f) for f in modules("edge_client/protocol"))
    heavy = {"paho", "onnxruntime", "ai_edge_litert", "torch", "edge_client.runtime.client", "edge_client.engines.onnx"}
    assert not loaded_by(f"import {imports}") & heavy


def test_a_whole_client_loads_no_runtime_before_it_is_asked_for_one() -> None:
    imports = ", ".join(dotted(f) for f in modules("edge_client"))
    heavy = {"onnxruntime", "ai_edge_litert", "torch", "sklearn", "scipy", "coordinator", "export", "emulator"}
    assert not loaded_by(f"import {imports}") & heavy


def test_a_coordinator_loads_neither_torch_nor_scipy_before_a_method_asks_for_one() -> None:
    assert not loaded_by("import coordinator.runtime.server") & {"torch", "scipy", "sklearn", "matplotlib"}


def test_every_module_of_the_client_imports_with_the_base_dependencies_alone() -> None:
    forbidden = {"onnxruntime", "ai_edge_litert", "torch", "typer", "rich", "sklearn", "scipy", "onnx"}
    block = (
        "class Wall:\n"
        f"    blocked = {sorted(forbidden)}\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in self.blocked: raise ImportError('not on a board: ' + name)\n"
        "import sys; sys.meta_path.insert(0, Wall())\n"
    )
    imports = "\n".join(f"import {dotted(f)}" for f in modules("edge_client"))
    done = subprocess.run(
        [sys.executable, "-c", block + imports], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", ["coordinator", "export", "emulator"])
def test_help_answers_without_loading_torch(room: str) -> None:
    assert "torch" not in loaded_by(f"import {room}.cli")


@pytest.mark.parametrize("room", ["coordinator", "export", "emulator"])
def test_the_help_of_a_room_cuts_no_summary(room: str) -> None:
    command = [sys.executable, "-m", room, "--help"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "..." not in told.stdout.partition("Commands:")[2]


@pytest.mark.parametrize("room", ROOMS)
def test_every_command_prints_the_version(room: str) -> None:
    command = [sys.executable, "-m", room, "--version"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert told.stdout == f"fedcenters {__version__}\n"


def test_the_top_level_has_no_folder_but_the_rooms_the_tests_and_the_documents() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: only git knows which folders are the project's")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {path.partition("/")[0] for path in tracked if "/" in path}
    assert folders == {*ROOMS, "tests", "docs", ".ci"}


def test_no_other_distribution_provides_our_top_level_names() -> None:
    owners = importlib.metadata.packages_distributions()
    for room in ROOMS:
        assert set(owners.get(room, ["fedcenters"])) == {"fedcenters"}


def test_every_error_has_an_exit_code_of_its_branch_and_shows_its_hint() -> None:
    from edge_client import errors

    branches = {
        errors.BeyondLimits: 1,
        errors.UsageError: 2,
        errors.ConfigError: 3,
        errors.RuntimeMissing: 3,
        errors.NetworkError: 4,
        errors.ProtocolError: 5,
        errors.ProgramRefused: 5,
    }
    for kind, code in branches.items():
        assert kind.exit_code == code
        assert str(kind("what broke", hint="what to do")).endswith("\n\nhint: what to do")
    assert errors.Malformed("bad_json", "x").exit_code == 5
    assert errors.DeviceRefused("hot", retry_s=60).exit_code == 6
    assert errors.FedcentersError("x").exit_code == 70


@pytest.mark.parametrize("room", ["coordinator", "export", "emulator"])
def test_a_device_installation_says_which_extra_a_server_command_needs(room: str) -> None:
    wall = (
        "import sys\n"
        "class Wall:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'typer': raise ModuleNotFoundError('No module named typer', name='typer')\n"
        "sys.meta_path.insert(0, Wall())\n"
        f"import {room}.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", wall], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 3
    assert "typer is not installed" in done.stderr
    assert "hint: pip install -c constraints.txt '.[server]' in a checkout" in done.stderr
    assert "Traceback" not in done.stderr


def test_messages_install_extras_as_the_readme_does_and_only_one_place_knows_how() -> None:
    said = [f for room in ROOMS for f in modules(room) if "fedcenters[" in f.read_text(encoding="utf-8")]
    own = [f for room in ROOMS for f in modules(room) if "pip install -c" in f.read_text(encoding="utf-8")]
    assert [str(f.relative_to(ROOT)) for f in (*said, *own)] == ["edge_client/errors.py"]
    assert install_hint("server").split(" in ")[0] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_class_name_has_one_meaning_in_the_whole_repository() -> None:
    defined: dict[str, list[str]] = {}
    for file in sorted(f for room in (*ROOMS, "tests") for f in modules(room)):
        for name in names_in(file)[1]:
            defined.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_no_folder_has_more_files_than_a_reader_can_scan(room: str) -> None:
    folders = {file.parent for file in (ROOT / room).rglob("*") if file.suffix in (".py", ".js")}
    full = {str(f.relative_to(ROOT)): n for f in folders if (n := len([*f.glob("*.py"), *f.glob("*.js")])) > 16}
    assert full == {}, "give files that belong together a folder below, and the folder a row in ARCHITECTURE.md"
