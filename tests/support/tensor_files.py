"""Tensor files made by hand, as an attacker would."""

from __future__ import annotations

FC = (
    '"__metadata__":{"fc":"{\\"codec\\":\\"f32\\",\\"kind\\":\\"model\\",\\"schema\\":\\"'
    + "0" * 64
    + '\\",\\"v\\":1}"}'
)


def tensor_file(tensors: str, body: bytes) -> bytes:
    """A file with our metadata and the given header text for the tensors."""
    raw = f"{{{FC},{tensors}}}".encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + body
