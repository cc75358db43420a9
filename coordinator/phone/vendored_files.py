"""The third-party files of the phone's page: ONNX Runtime Web and MQTT.js, fetched once from npm's registry.

Each package is pinned by version and by the SHA-512 of its archive. Only the named files are taken from an archive, as
plain files. A folder that lacks a file is not served; the page loads nothing from other hosts.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.errors import NetworkError, ProtocolError, RuntimeMissing
from edge_client.transport.blobs import write_atomically
from edge_client.user_cache import user_cache

REGISTRY = "https://registry.npmjs.org"
TIMEOUT_S = 60.0
MIB = 1 << 20
MAX_FILE_BYTES = 32 * MIB
GZIP_SUFFIX = ".gz"  # the compressed copy of each file, which browsers are sent
FOLDER_VARIABLE = "FEDCENTERS_WEB_FILES"
Fetch = Callable[[str, int], bytes]  # (url, maximum bytes) -> the body


@dataclass(frozen=True, kw_only=True)
class NpmPackage:
    """One npm package: the archive's integrity as npm writes it, its maximum size, and the files that are served."""

    name: str
    version: str
    license: str
    integrity: str
    archive_max: int
    files: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"{REGISTRY}/{self.name}/-/{self.name}-{self.version}.tgz"


NPM_PACKAGES = (
    NpmPackage(
        name="onnxruntime-web",
        version="1.30.0",
        license="MIT",
        integrity="sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        archive_max=40 * MIB,
        files=("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
    ),
    NpmPackage(
        name="mqtt",
        version="5.16.0",
        license="MIT",
        integrity="sha512-G0VsEtuJz5sJUgZJaaADMVfW7SIFPzkIuHR+d6rk+tBeSwdCfd9BaIRycRfd2AbyFDEmLlFM+SDQeti/+IbOnw==",
        archive_max=2 * MIB,
        files=("mqtt.esm.js",),
    ),
)
VENDORED_FILES = tuple(file for package in NPM_PACKAGES for file in package.files)


def default_folder() -> Path:
    """FEDCENTERS_WEB_FILES, or a folder of this version in the user's cache."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    return user_cache() / "-".join(["web", *(package.version for package in NPM_PACKAGES)])


def is_complete(folder: Path) -> bool:
    """Whether `folder` has every file, of these versions."""
    stamp = folder / "packages.txt"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp(NPM_PACKAGES) and not missing_files(folder)


def missing_files(folder: Path) -> list[str]:
    """The names of the files that `folder` lacks."""
    return [
        name
        for name in VENDORED_FILES
        if not ((folder / name).is_file() and (folder / f"{name}{GZIP_SUFFIX}").is_file())
    ]


def require_files(folder: Path) -> Path:
    """The same folder, or RuntimeMissing that says how to get its files."""
    if not is_complete(folder):
        raise RuntimeMissing(
            f"the phone's page needs {', '.join(missing_files(folder)) or 'other versions of its files'} in {folder}",
            hint="fedcenters-coordinator web-files (33 MB from npm's registry, once), or set FEDCENTERS_WEB_FILES",
        )
    return folder


def fetch_all(folder: Path, *, fetch: Fetch | None = None, packages: Sequence[NpmPackage] = NPM_PACKAGES) -> list[Path]:
    """Fetch, check and extract every package into `folder`; -> the files written, none when they are there already.

    Raises NetworkError when the registry cannot be reached, ProtocolError for an archive that is not the pinned one.
    """
    if packages is NPM_PACKAGES and is_complete(folder):
        return []
    made = []
    for package in packages:
        data = (fetch or _download)(package.url, package.archive_max)
        check_archive(package, data)
        for name, content in extract_files(package, data).items():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, content)
            write_atomically(folder / f"{name}{GZIP_SUFFIX}", gzip.compress(content, mtime=0))
            made.append(folder / name)
    write_atomically(folder / "packages.txt", _stamp(packages).encode())
    return made


def check_archive(package: NpmPackage, data: bytes) -> None:
    """Raise ProtocolError unless these bytes are the pinned archive."""
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode("ascii")
    if found != package.integrity:
        raise ProtocolError(
            f"{package.url} is not the file that this version of fedcenters was tested with ({found:.20}...)",
            hint="try again; if it stays so, the archive was changed on its way",
        )


def extract_files(package: NpmPackage, data: bytes) -> dict[str, bytes]:
    """The wanted files of an npm archive: `package/dist/NAME`, plain files of at most MAX_FILE_BYTES."""
    found: dict[str, bytes] = {}
    wanted = {f"package/dist/{name}": name for name in package.files}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive:
                name = wanted.get(member.name)
                if name is None or name in found or not member.isfile() or member.size > MAX_FILE_BYTES:
                    continue
                file = archive.extractfile(member)
                if file is not None:
                    found[name] = file.read(MAX_FILE_BYTES)
    except (tarfile.TarError, EOFError, OSError) as wrong:
        raise ProtocolError(f"{package.url} is no archive: {wrong}", hint="try again") from wrong
    absent = sorted(set(package.files) - set(found))
    if absent:
        raise ProtocolError(f"{package.url} holds no {', '.join(absent)}", hint="another version of fedcenters may fit")
    return found


def _download(url: str, limit: int) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - https, written above
            data: bytes = answer.read(limit + 1)
    except (urllib.error.URLError, OSError) as wrong:
        raise NetworkError(
            f"cannot fetch {url}: {wrong}", hint="on a machine with internet run web-files --out DIR, and copy DIR here"
        ) from wrong
    if len(data) > limit:
        raise ProtocolError(f"{url} has more than {limit} bytes", hint="try again")
    return data


def _stamp(packages: Sequence[NpmPackage]) -> str:
    """The content of packages.txt: what the folder holds, for people and for `is_complete`."""
    rows = (f"{p.name} {p.version} {p.license} {p.integrity} {' '.join(p.files)}\n" for p in packages)
    return "".join(rows)
