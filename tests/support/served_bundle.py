"""Bundles without torch, and a real server process for them."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.protocol.messages import canonical_json
from export.bundle.reader import MANIFEST_FILE, VERSION, encode_manifest
from tests.support.softmax_program import program

ROOT = Path(__file__).parents[2]
LARGE = 3 << 20  # bytes; more than the server keeps in memory


def write_bundle(out: Path, mark: str, *, centers: int = 2, large: int = 2_000, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - of the manifest
    """A bundle whose every file says `mark`, put in the place of an older one as writer.py does it."""
    part = out.with_name(f".{out.name}.part")
    part.mkdir(parents=True)

    def put(name: str, data: bytes) -> dict[str, Any]:
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}

    made = program()
    manifest: dict[str, Any] = {
        "v": VERSION,
        "model": made.model,
        "schema": made.schema.sha256,
        "program": put("program/program.json", canonical_json(made.to_json())),
        "containers": [],
        "reference": None,
        "centers": [
            {
                "center": k,
                "card": {"mark": mark, "center": k},
                "model": put(f"centers/center-{k}/model.safetensors", f"{mark} {k} ".encode() * 100),
                "files": {"onnx": put(f"centers/center-{k}/model.onnx", (f"{mark} {k} ".encode() * large)[:large])},
            }
            for k in range(centers)
        ],
        **more,
    }
    (part / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    if out.exists():
        out.rename(out.with_name(f".{out.name}.old{os.urandom(4).hex()}"))
    part.rename(out)
    return manifest


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """A server process."""

    port: int

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> HttpAnswer:  # noqa: ANN401
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        own = {} if data is None else {"Content-Type": "application/json"}
        given = own | {k.replace("_", "-"): v for k, v in headers.items()}
        connection.request(method, path, body=data, headers=given)
        response = connection.getresponse()
        answer = HttpAnswer(status=response.status, headers=dict(response.getheaders()), body=response.read())
        connection.close()
        return answer


@contextmanager
def run_serve(bundle: Path, *options: str) -> Iterator[ServerProcess]:
    """`fedcenters-export serve` on a free port, ended at the end."""
    command = [sys.executable, "-m", "export", "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:  # what is served, then where
                said += line
                if found := re.search(r"https?://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                raise RuntimeError(f"the server did not start: {said}")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # else a full pipe would stop the server
            yield ServerProcess(port=int(found[1]))
        finally:
            process.terminate()
            process.wait(timeout=60)
