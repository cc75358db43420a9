"""The keys of one masked sum: what a device derives from a prekey, with whom it shares which key, and sealed shares.

A prekey is 32 random bytes on the device, its root. Everything that the device sends in the sum follows from the root
and the roster, so after a crash it sends the same bytes again. Two X25519 keys are published of a root: `seal` opens
the shares that neighbours send, `mask` makes the pair masks. They are two, because the coordinator recovers the mask
key of a device that dropped out, and must not open the shares that were sealed to that device.

Every derived key names its purpose, the sum and the devices that use it (HKDF-SHA256 without salt).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edge_client.errors import Malformed
from edge_client.protocol.secure.masks import stream_bytes
from edge_client.protocol.secure.shamir import COEFFICIENT_BYTES, SECRET_BYTES, SHARE_BYTES, split_secret
from edge_client.protocol.topics import check_cid, check_federation, check_run, check_sha256

ROOT_BYTES = 32
KEY_BYTES = 32
MASK_KEY_BYTES = 16  # AES-128: a vector is masked with k of them, and ten rounds are faster than fourteen
COMMITMENT_BYTES = 32
DIGEST_BYTES = 16  # of a share; its holder cannot find another share with the same digest
_NONCE = bytes(12)  # each sealing key is used for one message
_PREKEY = "fedcenters/v1/prekey\n"
SHARE_KINDS = ("mask", "self")
SEALED_BYTES = 2 * SHARE_BYTES + 16  # both shares, and the tag


@dataclass(frozen=True, kw_only=True)
class SumContext:
    """The name of one masked sum; `roster` is the sha256 of the whole roster, so no two sums have the same name."""

    federation: str
    run: str
    round: int
    exchange: int
    roster: str

    def __post_init__(self) -> None:
        check_federation(self.federation)
        check_run(self.run)
        check_sha256(self.roster)

    def label(self, purpose: str, *parts: str) -> bytes:
        """The text that a derived key or a digest is bound to; each part is a device id or a kind of share."""
        lines = (self.federation, self.run, str(self.round), str(self.exchange), self.roster, purpose, *parts)
        return ("fedcenters/v1/sum\n" + "".join(f"{line}\n" for line in lines)).encode("ascii")


@dataclass(frozen=True, kw_only=True)
class PublicPrekey:
    """The two public keys [32 bytes each] that a device offers under the number of a prekey."""

    number: int
    seal: bytes
    mask: bytes

    @property
    def keys(self) -> bytes:
        """Both, one behind the other [64 bytes]."""
        return self.seal + self.mask

    @staticmethod
    def of(number: int, keys: bytes) -> PublicPrekey:
        """From such bytes."""
        return PublicPrekey(number=number, seal=keys[:KEY_BYTES], mask=keys[KEY_BYTES:])


def derive(secret: bytes, label: bytes, size: int) -> bytes:
    """`size` bytes of HKDF-SHA256(secret) without salt, with `label` as the info."""
    return HKDF(algorithm=SHA256(), length=size, salt=None, info=label).derive(secret)


def public_prekey(number: int, root: bytes) -> PublicPrekey:
    """What is published of the prekey with this root [32 bytes]."""
    return PublicPrekey(
        number=number, seal=public_of(seal_private(root)), mask=public_of(mask_private(mask_secret(root)))
    )


def seal_private(root: bytes) -> bytes:
    """The private X25519 key [32 bytes] that opens what is sealed to this prekey."""
    return derive(root, f"{_PREKEY}seal\n".encode("ascii"), KEY_BYTES)


def mask_secret(root: bytes) -> bytes:
    """The secret [31 bytes] that is split into shares, of which the mask key is derived."""
    return derive(root, f"{_PREKEY}mask secret\n".encode("ascii"), SECRET_BYTES)


def mask_private(secret: bytes) -> bytes:
    """The private X25519 key [32 bytes] of the pair masks, from a mask secret [31 bytes]."""
    return derive(secret, f"{_PREKEY}mask key\n".encode("ascii"), KEY_BYTES)


def self_secret(root: bytes, context: SumContext) -> bytes:
    """The secret [31 bytes] of the mask that the device adds for itself."""
    return derive(root, context.label("self secret"), SECRET_BYTES)


def self_mask_key(secret: bytes, context: SumContext) -> bytes:
    """The AES key [16 bytes] of the self mask, from a self secret [31 bytes]."""
    return derive(secret, context.label("self mask"), MASK_KEY_BYTES)


def pair_mask_key(private: bytes, public: bytes, context: SumContext, one: str, other: str) -> bytes:
    """The AES key [16 bytes] of the mask that two devices share, the same from either side's keys."""
    low, high = sorted((check_cid(one), check_cid(other)))
    return derive(agree(private, public), context.label("pair mask", low, high), MASK_KEY_BYTES)


def commitment(secret: bytes, context: SumContext, cid: str) -> bytes:
    """What a device announces of its self secret: 32 bytes by which a recovered one is checked."""
    return hashlib.sha256(context.label("commitment", check_cid(cid)) + secret).digest()


def share_digest(share: bytes, context: SumContext, kind: str, dealer: str, holder: str) -> bytes:
    """The 16 bytes by which a share is checked that `holder` shows of the secret `kind` of `dealer`."""
    label = context.label("share", kind, check_cid(dealer), check_cid(holder))
    return hashlib.sha256(label + share).digest()[:DIGEST_BYTES]


def deal_shares(root: bytes, context: SumContext, *, threshold: int, count: int) -> dict[str, list[bytes]]:
    """The shares of both secrets of this root, by kind: `mask` and `self`, each [count] of 32 bytes."""
    secrets = {"mask": mask_secret(root), "self": self_secret(root, context)}
    shares = {}
    for kind in SHARE_KINDS:
        key = derive(root, context.label("polynomial", kind), MASK_KEY_BYTES)
        random = stream_bytes(key, COEFFICIENT_BYTES * (threshold - 1))
        shares[kind] = split_secret(secrets[kind], random, threshold=threshold, count=count)
    return shares


def seal(private: bytes, public: bytes, context: SumContext, sender: str, receiver: str, plain: bytes) -> bytes:
    """`plain` sealed by `sender` (its private seal key) to `receiver` (its public one): 16 bytes longer."""
    cipher, label = _sealing(private, public, context, sender, receiver)
    return cipher.encrypt(_NONCE, plain, label)


def unseal(private: bytes, public: bytes, context: SumContext, sender: str, receiver: str, sealed: bytes) -> bytes:
    """What `sender` (its public seal key) sealed to `receiver` (its private one); Malformed for anything else."""
    cipher, label = _sealing(private, public, context, sender, receiver)
    try:
        return cipher.decrypt(_NONCE, sealed, label)
    except (InvalidTag, ValueError) as wrong:
        raise Malformed("bad_signature", f"the sealed shares from {sender} do not open at {receiver}") from wrong


def _sealing(private: bytes, public: bytes, context: SumContext, sender: str, receiver: str) -> tuple[AESGCM, bytes]:
    label = context.label("seal", check_cid(sender), check_cid(receiver))
    return AESGCM(derive(agree(private, public), label, KEY_BYTES)), label


def public_of(private: bytes) -> bytes:
    """The public X25519 key [32 bytes] of a private one [32 bytes]."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def check_public(public: bytes) -> None:
    """Refuse (`bad_field`) a public X25519 key with which nothing can be agreed, whatever the private key is."""
    agree(bytes(KEY_BYTES), public)  # a private key is clamped: a multiple of every small order


def agree(private: bytes, public: bytes) -> bytes:
    """The shared secret [32 bytes] of X25519; Malformed for a public key of small order, or of another size."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as wrong:
        raise Malformed("bad_field", f"X25519 refuses the key {public.hex():.64}: {wrong}") from wrong
