"""Shares become secrets: which are still missing, whether a shown share is the dealt one, and the recovered secrets.

A share's `x` is 1 + the place of its holder among the sorted neighbours of its dealer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain

from coordinator.aggregation.sum_graph import Graph
from edge_client.errors import Malformed
from edge_client.protocol.secure import keys
from edge_client.protocol.secure.shamir import MAX_SHARES, PRIME, SECRET_BYTES, read_share
from edge_client.protocol.secure.sum_messages import DealtShares, RevealedShares


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """The self secrets of the survivors and the mask secrets of the dropped, [31 bytes] each."""

    self_secrets: Mapping[str, bytes]
    mask_secrets: Mapping[str, bytes]


def missing_shares(
    graph: Graph,
    *,
    survivors: AbstractSet[str],
    dropped: AbstractSet[str],
    answered: AbstractSet[str] | Mapping[str, RevealedShares],
    threshold: int,
) -> Iterator[str]:
    """The devices whose needed secret fewer than `threshold` of `answered` hold, one at a time, in no order.

    Needed are the secrets of all survivors, and of those dropped ones that are neighbours of a survivor. Where answers
    are given, a share counts only if it is among them.
    """
    for cid in chain(survivors, dropped):
        near = graph[cid]
        if cid in dropped and survivors.isdisjoint(near):
            continue
        if isinstance(answered, Mapping):
            answers = [answered[n] for n in near if n in answered]
            held = sum(cid in one.self_shares or cid in one.mask_shares for one in answers)
        else:
            held = sum(n in answered for n in near)
        if held < threshold:
            yield cid


def checked_reveal(
    reveal: RevealedShares,
    context: keys.SumContext,
    holder: str,
    *,
    survivors: Collection[str],
    dropped: Collection[str],
    dealt: Mapping[str, DealtShares],
) -> bool:
    """Whether `holder` shows nothing but what it was asked for, and each share as its dealer announced it."""
    if not (set(reveal.self_shares) <= set(survivors) and set(reveal.mask_shares) <= set(dropped)):
        return False
    for kind, shares in (("mask", reveal.mask_shares), ("self", reveal.self_shares)):
        for dealer, share in shares.items():
            digests = dealt[dealer].envelopes[holder][keys.SEALED_BYTES :]
            said = digests[: keys.DIGEST_BYTES] if kind == "mask" else digests[keys.DIGEST_BYTES :]
            if keys.share_digest(share, context, kind, dealer, holder) != said:
                return False
    return True


def recover_secrets(
    revealed: Mapping[str, RevealedShares],
    context: keys.SumContext,
    *,
    graph: Graph,
    dealt: Mapping[str, DealtShares],
    devices: Mapping[str, keys.PublicPrekey],
    threshold: int,
) -> Secrets:
    """All secrets of which `threshold` shares were shown. Raises Malformed with the name of a dealer that lied."""
    shown: dict[str, dict[str, dict[int, bytes]]] = {"self": {}, "mask": {}}
    for holder, answer in sorted(revealed.items()):
        for kind, shares in (("self", answer.self_shares), ("mask", answer.mask_shares)):
            for dealer, share in shares.items():
                of_dealer = shown[kind].setdefault(dealer, {})
                if len(of_dealer) < threshold:
                    of_dealer[graph[dealer].index(holder) + 1] = share
    enough = {
        kind: {dealer: shares for dealer, shares in of_kind.items() if len(shares) == threshold}
        for kind, of_kind in shown.items()
    }
    self_secrets = {dealer: _combined(dealer, shares) for dealer, shares in enough["self"].items()}
    mask_secrets = {dealer: _combined(dealer, shares) for dealer, shares in enough["mask"].items()}
    for dealer, secret in self_secrets.items():
        if keys.commitment(secret, context, dealer) != dealt[dealer].commitment:
            raise Malformed("bad_hash", f"the shares of {dealer} are not those of the self secret that it announced")
    for dealer, secret in mask_secrets.items():
        if keys.public_of(keys.mask_private(secret)) != devices[dealer].mask:
            raise Malformed("bad_hash", f"the shares of {dealer} are not those of the mask key that it announced")
    return Secrets(self_secrets=self_secrets, mask_secrets=mask_secrets)


def _combined(dealer: str, shares: Mapping[int, bytes]) -> bytes:
    try:
        return combine_shares(shares)
    except Malformed as wrong:
        raise Malformed("bad_hash", f"the shares of {dealer} belong to no secret") from wrong


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """The secret [31 bytes] from exactly `threshold` shares by their x. Raises Malformed where there is no such secret.

    Wrong or too few shares may also give another secret: the caller compares it with what its owner announced.
    """
    values = {x: read_share(share) for x, share in shares.items()}
    if not values or not all(1 <= x <= MAX_SHARES for x in values):
        raise Malformed("bad_field", f"shares of x {sorted(values)}")
    secret = 0
    for x, value in values.items():
        top = bottom = 1
        for other in values:
            if other != x:
                top = top * other % PRIME
                bottom = bottom * (other - x) % PRIME
        secret += value * top * pow(bottom, -1, PRIME)
    secret %= PRIME
    if secret >> (8 * SECRET_BYTES):
        raise Malformed("bad_field", "the shares are not those of a secret of 31 bytes")
    return secret.to_bytes(SECRET_BYTES, "little")
