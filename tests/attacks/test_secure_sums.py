"""Tries to learn one device's vector, or to spoil a sum: both kinds of share, replays, lies, and small rosters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.packed_words import read_upload
from coordinator.config_sections import RunConfig
from coordinator.rounds.secure_sum import SumFailed
from edge_client.errors import Malformed
from edge_client.protocol.secure import device_sums
from edge_client.protocol.secure.device_sums import (
    DeviceSums,
    on_end,
    on_relay,
    on_roster,
    on_unmask,
)
from edge_client.protocol.secure.masks import add_masks_into
from edge_client.protocol.secure.sum_messages import (
    DealtShares,
    PrekeyBatch,
    RelayedShares,
    RevealedShares,
    SumRoster,
    UnmaskRequest,
)
from edge_client.protocol.summed_task import Words
from tests.support.secure_cohort import FORM, READERS, SecureCohort, cids, vector_of
from tests.support.virtual_federation import Federation

VICTIM, HOLDER = "dev-000", "dev-001"


@pytest.fixture
def cohort() -> SecureCohort:
    """Six devices that have dealt and uploaded, but for dev-005, which dropped out."""
    made = SecureCohort.of(6)
    made.deal()
    made.upload(["dev-005"])
    return made


def question(cohort: SecureCohort) -> UnmaskRequest:
    return UnmaskRequest.from_bytes(cohort.sent["unmask"][HOLDER])


def swapped(request: UnmaskRequest) -> bytes:
    """The same question with the victim among the dropped."""
    survivors = tuple(cid for cid in request.survivors if cid != VICTIM)
    return replace(request, survivors=survivors, dropped=(*request.dropped, VICTIM)).to_bytes()


def test_a_crash_between_two_questions_does_not_obtain_the_other_kind(cohort: SecureCohort) -> None:
    """The state that is stored before the answer leaves remembers the choice; a lost answer is sent again."""
    stored, answer = device_sums.on_unmask(cohort.devices[HOLDER], swapped(question(cohort)))
    with pytest.raises(Malformed, match="only one kind"):
        device_sums.on_unmask(stored, question(cohort).to_bytes())
    assert device_sums.on_unmask(stored, swapped(question(cohort))) == (stored, answer)


def test_a_prekey_is_used_for_one_roster_also_after_its_end(cohort: SecureCohort) -> None:
    roster = SumRoster.from_bytes(cohort.sent["roster"][VICTIM])
    again = replace(roster, exchange=9, roster="cd" * 32).to_bytes()
    for _ in range(2):
        with pytest.raises(Malformed, match="prekey 0 was used"):
            cohort.on_device(VICTIM, on_roster, again)
        cohort.on_device(VICTIM, on_end, cohort.server.roster)


def test_a_replayed_roster_gives_the_same_shares_and_none_after_the_end(cohort: SecureCohort) -> None:
    roster, before = cohort.sent["roster"][VICTIM], cohort.devices[VICTIM]
    dealt = cohort.on_device(VICTIM, on_roster, roster)
    assert cohort.devices[VICTIM] == before
    assert dealt in cohort.transcript
    cohort.on_device(VICTIM, on_end, cohort.server.roster)
    with pytest.raises(Malformed, match="was used"):
        cohort.on_device(VICTIM, on_roster, roster)


def test_another_roster_under_the_same_name_is_refused(cohort: SecureCohort) -> None:
    roster = SumRoster.from_bytes(cohort.sent["roster"][VICTIM])
    with pytest.raises(Malformed, match="another roster under the same name"):
        cohort.on_device(VICTIM, on_roster, replace(roster, exchange=9).to_bytes())


def test_a_roster_that_is_too_small_is_refused_by_the_device() -> None:
    cohort = SecureCohort.of(5)
    roster = SumRoster.from_bytes(cohort.sent["roster"][VICTIM])
    near = dict(list(roster.neighbours.items())[:3])
    with pytest.raises(Malformed, match="bad_field"):
        cohort.on_device(VICTIM, on_roster, replace(roster, devices=4, neighbours=near).to_bytes())


def lie(cohort: SecureCohort, cid: str) -> bytes:
    answer = RevealedShares.from_bytes(cohort.on_device(cid, on_unmask, cohort.sent["unmask"][cid]))
    wrong = {dealer: bytes([share[0] ^ 1]) + share[1:] for dealer, share in answer.self_shares.items()}
    return replace(answer, self_shares=wrong).to_bytes()


def test_a_lying_share_changes_nothing_where_others_suffice(cohort: SecureCohort) -> None:
    cohort.reveal(changed={HOLDER: lie(cohort, HOLDER)})
    assert cohort.sum().tolist() == cohort.plain_sum().tolist()


def test_lying_shares_end_the_sum_with_their_names_where_too_few_are_left(cohort: SecureCohort) -> None:
    cohort.reveal(changed={cid: lie(cohort, cid) for cid in cids(5)[:3]})
    assert isinstance(cohort.outcome, SumFailed)
    assert "wrong shares came from dev-000, dev-001, dev-002" in cohort.outcome.message


def shares_of_the_victim(cohort: SecureCohort) -> DealtShares:
    return DealtShares.from_bytes(cohort.on_device(VICTIM, on_roster, cohort.sent["roster"][VICTIM]))


def test_a_dealer_whose_shares_are_of_another_secret_ends_the_sum_with_its_name() -> None:
    cohort = SecureCohort.of(6)
    cohort.deal(changed={VICTIM: replace(shares_of_the_victim(cohort), commitment=bytes(32)).to_bytes()})
    cohort.upload()
    cohort.reveal()
    assert isinstance(cohort.outcome, SumFailed)
    assert f"the shares of {VICTIM} are not those" in cohort.outcome.message


def test_an_envelope_that_does_not_open_costs_one_share_and_blames_nobody_else() -> None:
    cohort = SecureCohort.of(6)
    dealt = shares_of_the_victim(cohort)
    damaged = replace(dealt, envelopes=dict(dealt.envelopes) | {HOLDER: bytes(112)})
    cohort.deal(changed={VICTIM: damaged.to_bytes()})
    cohort.upload()
    cohort.reveal()
    assert cohort.sum().tolist() == cohort.plain_sum().tolist()


def test_relayed_envelopes_cannot_be_swapped_between_senders() -> None:
    cohort = SecureCohort.of(6)
    cohort.deal()
    relay = RelayedShares.from_bytes(cohort.sent["relay"][VICTIM])
    first, second = sorted(relay.envelopes)[:2]
    crossed = dict(relay.envelopes) | {first: relay.envelopes[second], second: relay.envelopes[first]}
    cohort.on_device(VICTIM, on_relay, replace(relay, envelopes=crossed).to_bytes())
    (mine,) = cohort.devices[VICTIM].sums.values()
    assert mine.shares is not None
    assert [cid for cid, both in mine.shares.items() if not both] == [first, second]


@pytest.mark.parametrize("at", [0, 1, 2, 4, 8, 39])
def test_an_upload_with_another_header_is_refused(cohort: SecureCohort, at: int) -> None:
    blob = bytearray(cohort.uploads[VICTIM])
    blob[at] ^= 1
    with pytest.raises(Malformed):
        read_upload(bytes(blob), roster=cohort.server.roster, words=5, bits=20)


@pytest.mark.parametrize("kind", list(READERS))
@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"v":2}', b'{"v":1,"v":1}', b'{"v":1,"keys":[[0,"AA=="]]}', b" " * 65_537]
)
def test_messages_of_another_form_are_refused(kind: str, data: bytes) -> None:
    with pytest.raises(Malformed):
        READERS[kind](data)


def test_lists_that_are_unsorted_or_name_a_device_twice_are_refused() -> None:
    for survivors in ('["b","a"]', '["a","a"]', '["a/b"]', "[1]"):
        text = f'{{"dropped":[],"roster":"{"ab" * 32}","survivors":{survivors},"v":1}}'
        with pytest.raises(Malformed, match="bad_field"):
            UnmaskRequest.from_bytes(text.encode())


def test_masked_words_are_uniform_bytes_and_do_not_follow_the_plain_ones() -> None:
    """60,000 masked words of six devices with the same skewed vector; five standard deviations of what noise gives."""
    form = replace(FORM, words=10_000, bits=16)
    plain = np.random.default_rng(5).geometric(0.01, form.words).astype(np.uint32)
    cohort = SecureCohort.of(6, form)
    cohort.deal()
    cohort.upload(vectors=dict.fromkeys(cids(6), plain))
    masked = [np.frombuffer(cohort.uploads[cid], "<u2", offset=40) for cid in cids(6)]
    counts = np.bincount(np.concatenate(masked).view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * np.sqrt(2 * 255)
    rows = np.corrcoef([plain.astype(float), *(words.astype(float) for words in masked)])
    assert np.abs(rows - np.eye(7)).max() < 5 / np.sqrt(form.words)


def test_ten_thousand_sums_do_not_tell_which_of_two_sets_of_vectors_was_added() -> None:
    """Three devices, fresh keys in each sum, the sets by lot, with equal sums. What a distinguisher may read of a sum:
    each masked bit, and whether it equals the next device's. Five standard deviations of what chance gives.
    """
    sums, words, drawn = 10_000, 4, np.random.default_rng(11)
    sets = np.array([[[0] * words, [7] * words, [9] * words], [[16] * words, [0] * words, [0] * words]], np.uint32)
    lots = drawn.integers(2, size=sums)
    uploads = sets[lots]
    for uploaded in uploads:
        own, pair = ([drawn.bytes(16) for _ in range(3)] for _ in range(2))
        for i, vector in enumerate(uploaded):  # pair[i] masks the devices i and i + 1
            add_masks_into(vector, [(own[i], 1), (pair[i], 1), (pair[i - 1], -1)])
    bits = np.unpackbits(uploads.view(np.uint8).reshape(sums, 3, -1), axis=2).astype(np.float64)
    read = np.concatenate([bits, bits == np.roll(bits, 1, axis=1)], axis=1).reshape(sums, -1)
    told = (lots - lots.mean()) @ (read - read.mean(axis=0)) / (sums * lots.std() * read.std(axis=0))
    assert np.abs(told).max() < 5 / np.sqrt(sums)
    assert np.abs(read.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(sums)


def test_two_sets_of_vectors_with_equal_sums_leave_transcripts_that_differ_in_masked_words_alone() -> None:
    """The shares, digests and answers are equal bytes: of the vectors the coordinator receives masked words only."""
    spread = {cid: vector_of(cid) for cid in cids(6)}
    total: Words = np.asarray(np.sum(list(spread.values()), axis=0, dtype=np.uint32))
    alone: dict[str, Words] = dict.fromkeys(cids(6), np.zeros(5, np.uint32)) | {VICTIM: total}
    seen = []
    for vectors in (spread, alone):
        cohort = SecureCohort.of(6)
        cohort.run(vectors=vectors)
        seen.append((cohort.transcript, cohort.sum().tolist()))
        plain = [words.astype("<u4").tobytes() for words in vectors.values() if words.any()]
        assert not any(word in message for word in plain for message in cohort.transcript)
    (one, sum_of_one), (other, sum_of_other) = seen
    assert sum_of_one == sum_of_other
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 6 + [False] * 6 + [True] * (len(one) - 12)
    with pytest.raises(TypeError, match="no sum"):
        SecureCohort.of(6).sum()


@pytest.mark.parametrize("kind", ["seal", "mask"])
def test_a_device_that_offers_keys_with_which_nothing_can_be_agreed_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Zeros are a key of small order; with one in a roster each neighbour would refuse the sum."""
    refill = device_sums.refill

    def lie(state: DeviceSums, random: tuple[bytes, ...]) -> tuple[DeviceSums, bytes]:
        after, offer = refill(state, random)
        if state.cid == "d00":
            keys = PrekeyBatch.from_bytes(offer).keys
            offer = PrekeyBatch(keys=tuple(replace(key, **{kind: bytes(32)}) for key in keys)).to_bytes()  # type: ignore[arg-type]
        return after, offer

    monkeypatch.setattr(device_sums, "refill", lie)
    settings = {"local-steps": 3, "batch-size": 8, "secure": "updates"}
    run = RunConfig(method="fedavg", rounds=2, name="run", settings=settings)
    fed = Federation.of(tmp_path, runs=(run,), devices=7, quorum=0.5, deadline_s=60.0, below_quorum="continue")
    fed.start(7)
    fed.finish()
    for record in fed.rounds():
        assert list(record["refused"]) == ["d00"]
        assert "failed" not in record.get("secure", {})
        assert record["accuracy"]["micro"] is not None
