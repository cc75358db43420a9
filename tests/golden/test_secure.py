"""The recorded bytes of masked sums: `secure.json`, for any language. A change here is a change of the protocol.

The cohort has seven devices; dev-002 sends no shares and dev-004 no upload.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation.sum_graph import neighbour_graph, sum_parameters
from coordinator.rounds.secure_recovery import Secrets
from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.secure import keys, masks
from edge_client.protocol.secure.sum_messages import SumForm
from edge_client.protocol.sum_codec import read_work
from edge_client.protocol.summed_task import SummedFit, SumScale
from edge_client.training.summed import TrainedChoice, contribution
from tests.support.secure_cohort import READERS, SecureCohort, cids, root_of, vector_of
from tests.support.sum_tasks import STAGES, get, job, named_vectors, refused, task_message

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "secure.json").read_text(encoding="utf-8"))
FORM = SumForm(federation="demo", run="r1", round=3, exchange=1, words=5, bits=20)
CONTEXT = keys.SumContext(federation="demo", run="r1", round=3, exchange=1, roster="ab" * 32)
ROOT, OTHER = bytes(range(32)), bytes(range(32, 64))
SEED = bytes(range(32))


def derived() -> dict[str, str]:
    """Everything that follows from one root, a neighbour's root and the name of a sum."""
    secret, of_self = keys.mask_secret(ROOT), keys.self_secret(ROOT, CONTEXT)
    public, near = keys.public_prekey(0, ROOT), keys.public_prekey(0, OTHER)
    shares = keys.deal_shares(ROOT, CONTEXT, threshold=3, count=4)
    found: dict[str, bytes] = {
        "root": ROOT,
        "other_root": OTHER,
        "seal_private": keys.seal_private(ROOT),
        "seal": public.seal,
        "mask_secret": secret,
        "mask_private": keys.mask_private(secret),
        "mask": public.mask,
        "other_seal": near.seal,
        "other_mask": near.mask,
        "self_secret": of_self,
        "self_mask_key": keys.self_mask_key(of_self, CONTEXT),
        "commitment": keys.commitment(of_self, CONTEXT, "a"),
        "pair_mask_key": keys.pair_mask_key(keys.mask_private(secret), near.mask, CONTEXT, "a", "b"),
        "mask_shares": b"".join(shares["mask"]),
        "self_shares": b"".join(shares["self"]),
        "share_digest": keys.share_digest(shares["mask"][0], CONTEXT, "mask", "a", "b"),
        "sealed": keys.seal(keys.seal_private(ROOT), near.seal, CONTEXT, "a", "b", bytes(range(64))),
        "stream": masks.stream_bytes(bytes(range(16)), 40),
    }
    return {name: value.hex() for name, value in found.items()} | {
        "label": CONTEXT.label("pair mask", "a", "b").decode()
    }


def cohort() -> dict[str, Any]:
    """One sum, and what passes between the coordinator and dev-000."""
    made = SecureCohort.of(7, FORM)
    made.run(["dev-002"], ["dev-004"])
    if not isinstance(made.outcome, Secrets):
        raise TypeError(made.outcome)
    own = made.devices["dev-000"]
    dealt, reveal = made.server.dealt["dev-000"], made.shown["dev-000"]
    from edge_client.protocol.secure import device_sums

    _, batch = device_sums.refill(
        device_sums.DeviceSums(federation="demo", cid="dev-000"),
        (root_of("dev-000", 0), root_of("dev-000", 1)),
    )
    messages = {
        "prekeys": batch,
        "roster": made.sent["roster"]["dev-000"],
        "shares": dealt.to_bytes(),
        "relay": made.sent["relay"]["dev-000"],
        "unmask": made.sent["unmask"]["dev-000"],
        "reveal": reveal,
    }
    return {
        "devices": {cid: root_of(cid, 0).hex() for cid in cids(7)},
        "later_root": root_of("dev-000", 1).hex(),
        "digest": made.server.roster,
        "vector": vector_of("dev-000", FORM).tolist(),
        "messages": {name: data.decode() for name, data in messages.items()},
        "upload": made.uploads["dev-000"].hex(),
        "shown": dict(own.sums[made.server.roster].shown),
        "survivors": sorted(made.server.uploaded),
        "self_secrets": {cid: secret.hex() for cid, secret in made.outcome.self_secrets.items()},
        "mask_secrets": {cid: secret.hex() for cid, secret in made.outcome.mask_secrets.items()},
        "sum": made.sum().tolist(),
    }


def words() -> list[dict[str, Any]]:
    """The words of a device for a recorded task, of which some fields are replaced; its trained models are given."""
    far, near = [6.0, 7.5, 8.0, 9.0, 10.0, 11.25], [0.5, 0.75, 2.0, 3.125, 4.0, 5.0]
    kept, chosen, soft = (near,), {"weights": [1.0, 0.0], "order": [0, 1]}, {"weights": [0.25, 0.75], "order": None}
    rows: list[tuple[str, dict[str, Any], tuple[list[float], ...], dict[str, Any]]] = [
        ("tell", {"part": "choose"}, kept, chosen),
        ("tell", {"part": "choose", "choose": "shares"}, kept, soft),
        ("tell", {"part": "choose", "choose": "shares", "open": [0]}, kept, soft),
        ("add", {}, kept, chosen),  # its own center is closed, so the next one; far from it, so clipped
        ("add", {"open": [0, 1], "share": 1.0}, kept, chosen),
        ("add", {"open": [0, 1], "choose": "shares"}, kept, soft),
        ("add", {"open": [0, 1], "choose": "posterior"}, (near, far), soft),
        ("add, k-means", {}, kept, chosen),
        ("add, k-means", {"part": "count"}, kept, chosen),
        ("add, k-means", {"part": "count", "points_open": [1] * 4, "dealt": False}, ([0.0] * 6,), chosen),
        ("add, k-means", {"part": "count", "points_open": [1] * 4}, ([0.0] * 6,), chosen),
    ]
    return [
        {"task": name, "sum": changes, "models": list(models), **how, "words": _words(name, changes, models, how)}
        for name, changes, models, how in rows
    ]


def _words(name: str, changes: dict[str, Any], models: tuple[list[float], ...], how: dict[str, Any]) -> list[int]:
    said = messages.read_message(task_message(job(name)), "t")
    said["work"]["sum"] |= changes
    work = read_work(said, get)
    order = None if how["order"] is None else np.array(how["order"])
    mine = TrainedChoice(models=np.array(models, np.float32), weights=np.array(how["weights"]), order=order)
    if not isinstance(work, SummedFit):
        raise TypeError(work)
    drawn = np.random.Generator(np.random.PCG64(np.random.SeedSequence(work.seed, spawn_key=(1,))))
    found = contribution(work, mine, drawn).words
    return [] if found is None else found.tolist()


def scales() -> list[dict[str, float]]:
    """What both sides compute from a scale: the levels of a word, and the deviation of a device's noise in it."""
    given: list[dict[str, Any]] = [
        {"bits": 32, "devices": 10, "clip": 1.0},
        {"bits": 16, "devices": 7, "clip": 2.5},
        {"bits": 24, "devices": 50, "clip": 1.5, "noise": 0.75},
        {"bits": 32, "devices": 1000, "clip": 0.5, "noise": 0.03125},
        {"bits": 20, "devices": 6, "clip": 10.0, "noise": 3.0},
    ]
    made = [(fields, SumScale(**fields)) for fields in given]
    return [{**fields, "levels": scale.levels, "deviation": scale.deviation} for fields, scale in made]


def built() -> dict[str, Any]:
    """All vectors, computed; `json.dump(built(), ..., indent=1)` wrote the file."""
    packed = np.array([0, 1, 2**16 - 1, 2**20 - 1, 2**32 - 1, 12345, 7, 2**31, 99], np.uint32)
    parameters = [[n, sum_parameters(n).neighbours, sum_parameters(n).threshold] for n in (5, 16, 17, 50, 100, 1000)]
    return {
        "parameters": parameters,
        "graph": {"seed": SEED.hex(), "neighbours": 4, "of": _lists(neighbour_graph(SEED, cids(9), 4))},
        "context": {"federation": "demo", "run": "r1", "round": 3, "exchange": 1, "roster": "ab" * 32},
        "derived": derived(),
        "packed": {
            "words": packed.tolist(),
            "by_bits": {str(bits): masks.pack_words(packed, bits).hex() for bits in (16, 17, 20, 27, 32)},
        },
        "form": {"words": FORM.words, "bits": FORM.bits},
        "cohort": cohort(),
        "refused": REFUSED,
        "vectors": named_vectors(),
        "tasks": {name: task_message(job(name)).decode() for name in STAGES},
        "refused_jobs": refused(),
        "words": words(),
        "scales": scales(),
    }


def _lists(graph: Any) -> dict[str, list[str]]:  # noqa: ANN401
    return {cid: list(near) for cid, near in sorted(graph.items())}


_NAME = "ab" * 32
REFUSED = [
    ["prekeys", '{"keys":[[0,"AA=="]],"v":1}', "bad_field"],
    ["prekeys", '{"keys":[],"v":2}', "bad_version"],
    ["prekeys", "[]", "bad_json"],
    ["shares", f'{{"commitment":"","envelopes":[],"roster":"{_NAME}","v":1}}', "bad_field"],
    ["relay", f'{{"envelopes":[["a","AA=="]],"roster":"{_NAME}","v":1}}', "bad_field"],
    ["relay", f'{{"envelopes":[["a"]],"roster":"{_NAME}","v":1}}', "bad_field"],
    ["relay", '{"envelopes":[],"roster":"xy","v":1}', "bad_field"],
    ["unmask", f'{{"dropped":["a"],"roster":"{_NAME}","survivors":["a"],"v":1}}', "bad_task"],
    ["unmask", f'{{"dropped":[],"roster":"{_NAME}","survivors":["b","a"],"v":1}}', "bad_field"],
    ["unmask", f'{{"dropped":[],"roster":"{_NAME}","survivors":["a","a"],"v":1}}', "bad_field"],
    ["unmask", f'{{"dropped":[],"roster":"{_NAME}","survivors":["a/b"],"v":1}}', "bad_field"],
    ["reveal", f'{{"mask":[],"roster":"{_NAME}","v":1}}', "bad_field"],
]


BUILT = built()


@pytest.mark.parametrize("name", list(BUILT))
def test_masked_sums_keep_their_bytes(name: str) -> None:
    assert BUILT[name] == RECORDED[name]


@pytest.mark.parametrize("kind", list(READERS))
def test_each_message_is_read_and_written_as_it_stands(kind: str) -> None:
    text = RECORDED["cohort"]["messages"][kind].encode()
    assert READERS[kind](text).to_bytes() == text  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "text", "code"), RECORDED["refused"])
def test_each_hostile_message_is_refused_with_its_code(kind: str, text: str, code: str) -> None:
    with pytest.raises(Malformed) as refused:
        READERS[kind](text.encode())
    assert refused.value.code == code
