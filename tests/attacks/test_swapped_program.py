"""Tries to have a device load foreign code: unsigned, signed by another key, for another fleet or another kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.signing import public_key, sign_manifest, verify_manifest

OURS, THEIRS = bytes(range(32)), bytes(range(1, 33))
PROGRAM = manifest_of(b"program", "program")
CONTAINER = manifest_of(b"program", "container")


@pytest.mark.parametrize(
    "manifest",
    [
        PROGRAM,
        sign_manifest(PROGRAM, THEIRS, "demo"),
        sign_manifest(PROGRAM, OURS, "demo-2"),
        replace(sign_manifest(CONTAINER, OURS, "demo"), kind="program"),
        replace(sign_manifest(PROGRAM, OURS, "demo"), sha256="0" * 64),
        replace(sign_manifest(PROGRAM, OURS, "demo"), size=8),
        replace(sign_manifest(PROGRAM, THEIRS, "demo"), key=sign_manifest(PROGRAM, OURS, "demo").key),
    ],
)
def test_only_a_program_signed_here_for_this_federation_is_one(manifest: Manifest) -> None:
    with pytest.raises(Malformed) as refused:
        verify_manifest(manifest, [public_key(OURS)], "demo")
    assert refused.value.code == "bad_signature"


def test_the_signed_text_cannot_be_shifted_between_its_lines() -> None:
    with pytest.raises(Malformed):
        sign_manifest(PROGRAM, OURS, "demo\nprogram")
