"""The files of the phone's page and their version, a hash of them all.

Every file but three is served below the version's own folder (/phone/VERSION/main.js), so that a browser may keep it
for ever and never mixes two versions. Third-party files are below a version of theirs alone (/phone/third/THIRD/NAME):
an upgrade of the page sends no megabytes that a phone has. The three entries name these folders: index.html and
app.webmanifest say VERSION and THIRD where they stand, and worker.js, the service worker, is preceded by VERSION and
FILES, the address and the checksum of each file that it keeps for a start without the coordinator.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coordinator.phone import vendored_files
from edge_client.errors import FedcentersError

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".wasm": "application/wasm",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
INDEX, MANIFEST, WORKER = "index.html", "app.webmanifest", "worker.js"
PLACEHOLDER, THIRD_PLACEHOLDER = b"VERSION/", b"THIRD/"
VERSION_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class PageFile:
    """One file as it is sent: plain, and with gzip."""

    data: bytes
    zipped: bytes
    sha256: bytes

    @property
    def tag(self) -> str:
        """The ETag."""
        return f'"{self.sha256.hex()[:32]}"'


@dataclass(frozen=True, kw_only=True)
class PageFiles:
    """`entries` are at /phone/NAME, `assets` at /phone/VERSION/NAME, third-party files at /phone/third/THIRD/NAME."""

    version: str
    third_version: str
    entries: Mapping[str, PageFile]
    assets: Mapping[str, PageFile]


def read_page_files(third: Path) -> PageFiles:
    """The page with the third-party files in `third`. Raises FedcentersError where the installation lacks a file."""
    own = dict(_own_files())
    foreign = {name: hashlib.sha256((third / name).read_bytes()).digest() for name in vendored_files.VENDORED_FILES}
    hashes = {name: hashlib.sha256(data).digest() for name, data in own.items()}
    third_version = _version_of(foreign)
    version = _version_of(hashes | {f"third/{name}": each for name, each in foreign.items()})
    places = {PLACEHOLDER: f"{version}/".encode(), THIRD_PLACEHOLDER: f"third/{third_version}/".encode()}
    entries = {name: _with_places(own.pop(name), places) for name in (INDEX, MANIFEST)}
    worker = own.pop(WORKER)
    checked = {"./": _integrity(hashlib.sha256(entries[INDEX]).digest())}
    checked |= {f"{version}/{name}": _integrity(hashes[name]) for name in own}
    checked |= {f"third/{third_version}/{name}": _integrity(each) for name, each in foreign.items()}
    head = f"const VERSION = {json.dumps(version)};\nconst FILES = {json.dumps(checked, indent=0)};\n"
    entries[WORKER] = head.encode() + worker
    return PageFiles(
        version=version,
        third_version=third_version,
        entries={name: _sent(data) for name, data in entries.items()},
        assets={name: _sent(data) for name, data in own.items()},
    )


@cache
def _own_files() -> Mapping[str, bytes]:
    import edge_client

    folder = Path(edge_client.__file__).parent / "web"
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in MEDIA_TYPES and path.is_file()
    }
    for name in (INDEX, MANIFEST, WORKER):
        if name not in found:
            raise FedcentersError(f"the installation lacks {folder / name}", hint="install fedcenters again")
    return found


def _version_of(hashes: Mapping[str, bytes]) -> str:
    """What changes with any of the files."""
    everything = json.dumps({name: each.hex() for name, each in sorted(hashes.items())}).encode()
    return hashlib.sha256(everything).hexdigest()[:VERSION_CHARS]


def _with_places(data: bytes, places: Mapping[bytes, bytes]) -> bytes:
    for name, place in places.items():
        data = data.replace(name, place)
    return data


def _sent(data: bytes) -> PageFile:
    return PageFile(data=data, zipped=gzip.compress(data, mtime=0), sha256=hashlib.sha256(data).digest())


def _integrity(sha256: bytes) -> str:
    """As Subresource Integrity writes it."""
    return "sha256-" + base64.b64encode(sha256).decode("ascii")
