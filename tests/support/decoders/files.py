"""The decoders of what comes in files or over HTTPS: a device's configuration, a bundle, a signing request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from coordinator.identity.certificate_authority import read_request
from edge_client import config
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol import signing
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.nearest.router import FEATURES, Router
from edge_client.protocol.nearest.router_file import read_router
from edge_client.protocol.program import Program
from export.bundle.bundle_contents import make_signer
from export.bundle.reader import MANIFEST_FILE, VERSION, Bundle, read_bundle
from tests.support.decoders.decoder import FEDERATION, SEED, Decoder, anything, only_what_was_signed
from tests.support.mutations import bytes_changed, json_changed, pem_changed

REQUEST = b"""\
-----BEGIN CERTIFICATE REQUEST-----
MIHWMH4CAQAwHDENMAsGA1UECgwEZGVtbzELMAkGA1UEAwwCZDEwWTATBgcqhkjO
PQIBBggqhkjOPQMBBwNCAAQm7869DunjSmaRh+GLOpEisvczlFtknMn5+SHp+drY
EpAji96cx7szDRUMZ3BN0lrnBVIFdEtvMb9AcHRYctDmoAAwCgYIKoZIzj0EAwID
SAAwRQIgS8eHiP23Ad58fl8xrjnptbi9tft1Zdvei0j/wpBH9NQCIQCvioCkVSmI
eFwy8Vd9PD6rKuzq2notpzZ9pKFuvkwo7w==
-----END CERTIFICATE REQUEST-----
"""  # of device d1, in federation demo; its key is the number 12345
VECTORS = Path(__file__).parents[2] / "golden" / "vectors.json"
GUIDE = json.loads(VECTORS.read_text(encoding="utf-8"))["spelled"]["guide"].encode()
FOLDER = TemporaryDirectory()  # of the bundle; removed when the process ends


def _joined(data: bytes) -> config.ClientConfig:
    """A device's configuration file."""
    with NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        return config.load_config(Path(file.name), {})


def _bundle(data: bytes) -> Bundle:
    (Path(FOLDER.name) / MANIFEST_FILE).write_bytes(data)
    return read_bundle(Path(FOLDER.name))


def _put(name: str, data: bytes) -> dict[str, Any]:
    path = Path(FOLDER.name) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _manifest(program: Program) -> bytes:
    center: Mapping[str, Any] = {
        "center": 0,
        "card": {"devices": 3},
        "model": _put("centers/center-0.safetensors", b"tensors"),
        "files": {"onnx": _put("centers/center-0.onnx", b"onnx")},
        "cards": {"text": _put("centers/center-0.md", b"card")},
    }
    manifest = {
        "v": VERSION,
        "model": program.model,
        "schema": program.schema.sha256,
        "program": _put("program.json", canonical_json(program.to_json())),
        "containers": [_put("step.onnx", b"step")],
        "reference": _put("reference.npz", b"samples"),
        "centers": [center],
    }
    return canonical_json(manifest)


def _inside(_given: bytes, _valid: bytes, bundle: Bundle) -> None:
    """Whatever it names lies in its folder."""
    root = Path(FOLDER.name).resolve()
    for center in bundle.manifest["centers"]:
        for entry in (center["model"], *center["files"].values()):
            assert (root / entry["path"]).resolve().is_relative_to(root)


def _believed(_given: bytes, _valid: bytes, router: Router) -> None:
    """Whatever it holds, belief is shares of one, or the question is refused."""
    for way in router.ways:
        try:
            shares = router.predict(way, dict.fromkeys(FEATURES, [0.5] * router.centers), 7).probabilities
        except Malformed:
            continue
        assert abs(shares.sum() - 1) < 1e-9


def _for_the_same_key(_given: bytes, _valid: bytes, found: tuple[str, Any]) -> None:
    """A request that holds is signed by its own key; ours was made for one device."""
    cid, key = found
    assert (cid, key) == ("d1", read_request(REQUEST, FEDERATION)[1])


def file_decoders(program: Program) -> list[Decoder]:
    """All of them."""
    public = signing.public_key(SEED).hex()
    join = (
        f'federation = "demo"\ndevice-id = "d1"\nbroker = "mqtts://broker:8883"\ndata = "data"\nstate = "state"\n'
        f'signing-keys = ["{public}"]\nthreads = 2\ncache-mib = 64\nengine = "onnx"\n'
    )
    signed = b'{"v":1}'
    return [
        Decoder(
            name="device's configuration",
            read=_joined,
            valid=(join.encode(),),
            mutate=bytes_changed,
            check=anything,
            refuses_with=(ConfigError,),
        ),
        Decoder(name="bundle", read=_bundle, valid=(_manifest(program),), mutate=json_changed, check=_inside),
        Decoder(name="guide", read=read_router, valid=(GUIDE,), mutate=json_changed, check=_believed),
        Decoder(
            name="signature of a bundle",
            read=lambda data: signing.verify_bundle(signed, data, [signing.public_key(SEED)]),
            valid=(make_signer(SEED, FEDERATION)(signed).encode(),),
            mutate=json_changed,
            check=only_what_was_signed(FEDERATION),
        ),
        Decoder(
            name="signing request",
            read=lambda data: read_request(data, FEDERATION),
            valid=(REQUEST,),
            mutate=pem_changed,
            check=_for_the_same_key,
        ),
    ]
