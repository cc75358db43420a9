"""Signatures: one key, one federation, one kind, one blob."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.signing import (
    key_id,
    public_key,
    sign,
    sign_manifest,
    sign_record,
    verify,
    verify_bundle,
    verify_manifest,
    verify_record,
    verify_release,
)

PRIVATE, OTHER = bytes(range(32)), bytes(32)
PUBLIC = public_key(PRIVATE)
MANIFEST = sign_manifest(manifest_of(b"program", "program"), PRIVATE, "demo")


def test_what_was_signed_is_accepted() -> None:
    verify_manifest(MANIFEST, [public_key(OTHER), PUBLIC], "demo")
    assert MANIFEST.key == key_id(PUBLIC)


@pytest.mark.parametrize(
    "changed",
    [
        replace(MANIFEST, size=8),
        replace(MANIFEST, sha256="0" * 64),
        replace(MANIFEST, kind="container"),
        replace(MANIFEST, sig="0" * 128),
        replace(MANIFEST, key="0" * 16),
        replace(MANIFEST, key=None, sig=None),
        replace(MANIFEST, key=key_id(public_key(OTHER))),
    ],
)
def test_a_signature_covers_everything_but_the_way_it_is_cut(changed: object) -> None:
    with pytest.raises(Malformed, match=r"^bad_signature: "):
        verify_manifest(changed, [PUBLIC, public_key(OTHER)], "demo")  # type: ignore[arg-type]
    verify_manifest(replace(MANIFEST, block=4096), [PUBLIC], "demo")


@pytest.mark.parametrize("trusted", [[], [public_key(OTHER)]])
def test_only_a_pinned_key_counts(trusted: list[bytes]) -> None:
    with pytest.raises(Malformed):
        verify_manifest(MANIFEST, trusted, "demo")


def test_the_release_of_an_offer_is_the_one_that_was_signed() -> None:
    file = sign_manifest(manifest_of(b"release", "release"), PRIVATE, "demo").to_json()
    offer = {"file": file, "key": file["key"], "sig": file["sig"]}
    verify_release(offer, [PUBLIC], "demo")
    other = manifest_of(b"another", "release").to_json()
    for wrong in (offer | {"file": other}, {"file": file}, offer | {"key": "0" * 16}):
        with pytest.raises(Malformed, match=r"^bad_signature: "):
            verify_release(wrong, [PUBLIC], "demo")


def test_a_record_without_a_signature_is_told_from_one_by_another_key() -> None:
    record = {"boot": "0" * 16, "epoch": 1}
    with pytest.raises(Malformed, match=r"is not signed.*update the coordinator"):
        verify_record(record, [PUBLIC], "demo", known=0)
    with pytest.raises(Malformed, match="by no key that is trusted"):
        verify_record(record | sign_record("0" * 16, 1, OTHER, "demo"), [PUBLIC], "demo", known=0)


def test_an_epoch_is_at_most_a_million_above_the_highest_so_far() -> None:
    for epoch in (1_000_007, 1_000_008):
        record = {"boot": "0" * 16, "epoch": epoch} | sign_record("0" * 16, epoch, PRIVATE, "demo")
        if epoch == 1_000_007:
            assert verify_record(record, [PUBLIC], "demo", known=7) == epoch
        else:
            with pytest.raises(Malformed, match=r"^bad_field: epoch 1000008 is more than 1000000 above 7"):
                verify_record(record, [PUBLIC], "demo", known=7)


@pytest.mark.parametrize("trusted", [[], [public_key(OTHER)]])
def test_a_bundle_of_a_key_that_is_not_trusted_is_refused(trusted: list[bytes]) -> None:
    signature = json.dumps({"federation": "demo", "key": key_id(PUBLIC), "sig": "0" * 128}).encode()
    with pytest.raises(Malformed, match="not trusted here"):
        verify_bundle(b"manifest", signature, trusted)


def test_the_signature_of_a_bundle_has_at_most_1024_bytes() -> None:
    manifest = b"manifest"
    sig = sign(PRIVATE, "demo", "bundle", hashlib.sha256(manifest).hexdigest(), len(manifest))
    text = json.dumps({"federation": "demo", "key": key_id(PUBLIC), "sig": sig})
    inside = {size: text.replace(" ", " " * (size - len(text) + 1), 1).encode() for size in (1024, 1025)}
    assert verify_bundle(manifest, inside[1024], [PUBLIC]) == "demo"
    with pytest.raises(Malformed, match=r"^bad_signature: bundle"):
        verify_bundle(b"another", inside[1024], [PUBLIC])
    with pytest.raises(Malformed, match=r"^too_big: "):
        verify_bundle(manifest, inside[1025], [PUBLIC])


@pytest.mark.parametrize("missing", ["federation", "key", "sig"])
def test_a_signature_of_a_bundle_without_one_of_its_texts_is_none(missing: str) -> None:
    said: dict[str, object] = {"federation": "demo", "key": key_id(PUBLIC), "sig": "0" * 128}
    for wrong in (said | {missing: 7}, {name: text for name, text in said.items() if name != missing}, [said]):
        with pytest.raises(Malformed, match=r"^bad_signature: manifest.sig is not"):
            verify_bundle(b"manifest", json.dumps(wrong).encode(), [PUBLIC])


def test_another_federations_signature_is_no_signature() -> None:
    with pytest.raises(Malformed):
        verify_manifest(MANIFEST, [PUBLIC], "demo-2")
    with pytest.raises(Malformed):  # the signed text cannot be shifted between its lines
        sign_manifest(manifest_of(b"program", "program"), PRIVATE, "demo\nprogram")


@pytest.mark.parametrize("sig", ["", "zz", "00", "0" * 128, "ä" * 128])
@pytest.mark.parametrize("public", [PUBLIC, b"", bytes(31), b"\xff" * 32])
def test_garbage_is_refused_by_name(public: bytes, sig: str) -> None:
    with pytest.raises(Malformed, match=r"^bad_signature: "):
        verify(public, "demo", "program", MANIFEST.sha256, MANIFEST.size, sig)


def test_signatures_are_deterministic() -> None:
    assert sign(PRIVATE, "demo", "program", MANIFEST.sha256, MANIFEST.size) == MANIFEST.sig
