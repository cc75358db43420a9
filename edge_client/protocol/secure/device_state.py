"""What a device stores of its secure sums, as bytes: canonical JSON with the roots. The file is secret.

The caller writes these bytes durably before it sends what `advance` gave with the state.
"""

from __future__ import annotations

import base64
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol.blocks import decode_base64
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.secure.device_sums import DeviceSum, DeviceSums
from edge_client.protocol.secure.keys import ROOT_BYTES
from edge_client.protocol.secure.shamir import SHARE_BYTES
from edge_client.protocol.secure.sum_messages import SumRoster

VERSION = 1
MAX_STATE_BYTES = 16 << 20  # some hundred open sums


def write_state(state: DeviceSums) -> bytes:
    """The whole state; `read_state` gives it back."""
    return canonical_json(
        {
            "v": VERSION,
            "federation": state.federation,
            "cid": state.cid,
            "next": state.next_number,
            "roots": [[number, _text(root)] for number, root in sorted(state.roots.items())],
            "sums": [_sum_to_json(mine) for _, mine in sorted(state.sums.items())],
        }
    )


def read_state(data: bytes) -> DeviceSums:
    """The state of `write_state`. Raises Malformed for a damaged file, which must not be replaced by an empty one."""
    said = parse_json(data, MAX_STATE_BYTES)
    try:
        if said["v"] != VERSION:
            raise Malformed("bad_version", f"secure sums of version {said['v']!r:.80}, this client reads {VERSION}")
        sums = [_sum_from_json(row) for row in said["sums"]]
        return DeviceSums(
            federation=said["federation"],
            cid=said["cid"],
            next_number=said["next"],
            roots={number: decode_base64(root, ROOT_BYTES) for number, root in said["roots"]},
            sums={mine.roster.roster: mine for mine in sums},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        raise Malformed("bad_field", f"the stored secure sums are damaged: {wrong!r:.80}") from wrong


def _sum_to_json(mine: DeviceSum) -> dict[str, Any]:
    shares = None if mine.shares is None else {cid: _text(both) for cid, both in mine.shares.items()}
    return {
        "roster": mine.roster.to_bytes().decode(),
        "root": _text(mine.root),
        "shares": shares,
        "upload": mine.upload,
        "shown": dict(mine.shown),
    }


def _sum_from_json(row: dict[str, Any]) -> DeviceSum:
    shares = row["shares"]
    return DeviceSum(
        roster=SumRoster.from_bytes(row["roster"].encode()),
        root=decode_base64(row["root"], ROOT_BYTES),
        shares=None if shares is None else {cid: decode_base64(both, 2 * SHARE_BYTES) for cid, both in shares.items()},
        upload=row["upload"],
        shown=row["shown"],
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
