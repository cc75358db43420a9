"""Wheels for a board's own Python and architecture, resolved and hashed on the workstation: the board needs no network.

pip resolves once into a lock file (`name==version --hash=...`) in the cache folder; every later run takes exactly
those, until `--update`. Then each wheel is unpacked into entries below /opt/fedcenters/site: no console scripts, whose
first line would name this machine's interpreter.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edge_client.board.board_files import SITE_FOLDER, BoardFile
from edge_client.board.profiles import BoardProfile
from edge_client.errors import ConfigError, NetworkError, RuntimeMissing
from edge_client.transport.blobs import write_atomically

# The base dependencies of pyproject.toml (a test compares), with what their wheels need on Python 3.10 only: pip looks
# at such conditions with the Python of this machine.
BASE_REQUIREMENTS = ("cryptography>=42", "numpy>=1.24", "paho-mqtt>=2.1", "safetensors>=0.4.3")
BASE_REQUIREMENTS_3_10 = ("tomli>=2", "typing-extensions>=4.13", "exceptiongroup>=1")
ENGINE_REQUIREMENTS = {"onnx": ("onnxruntime>=1.19",), "litert": ("ai-edge-litert>=2.1",), "pt2": ()}
IMAGE_REQUIREMENTS = ("pillow>=10",)
DROPPED_FOLDERS = ("scripts", "headers", "data")  # of a wheel's .data folder
UNUSED_SUFFIXES = (".pyi", ".pxd", ".a", ".lib", ".h", ".hpp")  # what only compilers and type checkers read
MAX_FILE_BYTES = 1 << 30
# `flash` itself, and the page that a coordinator serves
WORKSTATION_ONLY = ("board/", "web/")


@dataclass(frozen=True, kw_only=True)
class WheelSpec:
    """The packages of a board's site folder."""

    profile: BoardProfile
    python: str  # "3.11"
    engines: tuple[str, ...]
    images: bool = False
    wheels: tuple[Path, ...] = ()  # files of one's own, as NVIDIA's
    index: tuple[str, ...] = ()  # further package indexes
    constraints: Path | None = None

    def requirements(self) -> tuple[str, ...]:
        """The requirements for pip, apart from the files."""
        own = {wheel.name.split("-")[0].lower().replace("_", "-") for wheel in self.wheels}
        wanted = [
            *BASE_REQUIREMENTS,
            *(BASE_REQUIREMENTS_3_10 if self.python == "3.10" else ()),
            *(IMAGE_REQUIREMENTS if self.images else ()),
        ]
        wanted += [need for engine in self.engines for need in ENGINE_REQUIREMENTS[engine]]
        return tuple(need for need in wanted if not any(name.startswith(need.split(">")[0]) for name in own))

    def key(self) -> str:
        """The key of the lock file; equal specifications have equal keys."""
        files = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in self.wheels]
        constraints = "" if self.constraints is None else self.constraints.read_text(encoding="utf-8")
        said = [self.python, self.profile.platforms(), self.requirements(), files, self.index, constraints]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def lock_wheels(spec: WheelSpec, cache: Path, *, fresh: bool = False) -> str:
    """The lock file's text; resolved when there is none, or when `fresh`. Raises NetworkError, RuntimeMissing."""
    path = cache / "locks" / f"{spec.key()}.txt"
    if path.exists() and not fresh:
        return path.read_text(encoding="utf-8")
    report = _pip(
        "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-",
        "--target", str(cache / "nowhere"), *_about(spec), *map(str, spec.wheels), *spec.requirements(),
    )  # fmt: skip
    found = sorted(_pinned(item) for item in json.loads(report)["install"] if not _own(item, spec))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in found)
    write_atomically(path, text.encode())
    return text


def fetch_wheels(spec: WheelSpec, cache: Path, *, fresh: bool = False) -> list[Path]:
    """The wheels of a specification on this disk, sorted by name; each downloaded one has the hash of the lock file."""
    text = lock_wheels(spec, cache, fresh=fresh)
    folder = cache / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    here = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.whl")}
    wanted = {line.partition("--hash=sha256:")[2].strip(): line for line in text.splitlines()}
    missing = [line for sha256, line in wanted.items() if sha256 not in here]
    if missing:
        asked = cache / "missing.txt"
        asked.write_text("\n".join(missing), encoding="utf-8")
        _pip("download", "--quiet", "--no-deps", "--require-hashes", "-d", str(folder), *_about(spec), "-r", str(asked))
        here = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.whl")}
    return sorted([*(here[sha256] for sha256 in wanted), *spec.wheels], key=lambda path: path.name)


def client_files(package: Path, engines: Sequence[str]) -> list[BoardFile]:
    """The client itself, from the folder of this package, with these engines, without what no board needs."""
    left_out = (*WORKSTATION_ONLY, *(f"engines/{name}.py" for name in ENGINE_REQUIREMENTS if name not in engines))
    found = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    inside = [(path, path.relative_to(package).as_posix()) for path in found]
    wanted = [(path, name) for path, name in inside if not name.startswith(left_out)]
    return [BoardFile(path=f"{SITE_FOLDER}/edge_client/{name}", data=path.read_bytes()) for path, name in wanted]


def unpack_wheel(wheel: Path) -> list[BoardFile]:
    """The files of a wheel below the site folder. Raises ConfigError for a file that is no wheel."""
    made = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                place = None if info.is_dir() else _place(info.filename)
                if place is None:
                    continue
                if info.file_size > MAX_FILE_BYTES:
                    raise ConfigError(f"{wheel.name} holds a file of {info.file_size} bytes", hint="is it a wheel?")
                made.append(BoardFile(path=f"{SITE_FOLDER}/{place}", data=archive.read(info)))
    except (zipfile.BadZipFile, OSError) as wrong:
        raise ConfigError(f"{wheel} is no wheel: {wrong}", hint="download it again") from wrong
    return made


def _place(name: str) -> str | None:
    """Where a wheel's file belongs below the site folder; None: nowhere."""
    parts = PurePosixPath(name).parts
    if parts[0].endswith(".data"):
        if parts[1] in DROPPED_FOLDERS:
            return None
        parts = parts[2:]
    if name.endswith(UNUSED_SUFFIXES) or (parts[0] == "numpy" and "tests" in parts[1:-1]):
        return None
    return "/".join(parts)


def _about(spec: WheelSpec) -> list[str]:
    """The board, in pip's words."""
    about = ["--only-binary=:all:", "--implementation", "cp", "--python-version", spec.python.replace(".", "")]
    for platform in spec.profile.platforms():
        about += ["--platform", platform]
    for url in spec.index:
        about += ["--extra-index-url", url]
    return about if spec.constraints is None else [*about, "-c", str(spec.constraints)]


def _pinned(item: dict[str, dict[str, dict[str, dict[str, str]] | str]]) -> str:
    about, archive = item["metadata"], item["download_info"]["archive_info"]
    return f"{about['name']}=={about['version']} --hash=sha256:{archive['hashes']['sha256']}"  # type: ignore[index]


def _own(item: dict[str, dict[str, str]], spec: WheelSpec) -> bool:
    """Whether pip took it from one of the files that were given, which need no downloading."""
    return item["download_info"]["url"].rpartition("/")[2] in {wheel.name for wheel in spec.wheels}


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    if "No module named pip" in done.stderr:
        raise RuntimeMissing("pip is not here", hint="python -m ensurepip")
    why = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    raise NetworkError(
        f"the board's wheels cannot be had: {(why or done.stderr.splitlines() or ['pip failed'])[-1]}",
        hint="check the network of this machine; for a board without wheels give them with --wheel or --index",
    )
