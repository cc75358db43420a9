"""A device that crashes after every step, and reads its state again, sends the same bytes and keeps its choices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_client.errors import Malformed
from edge_client.protocol.secure.device_state import read_state, write_state
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.secure.shamir import SHARE_BYTES
from tests.support.secure_cohort import SecureCohort, Step, with_answer


class CrashingCohort(SecureCohort):
    """Every device restarts from its stored bytes before and after each step, and takes each step twice."""

    def on_device(self, cid: str, step: Step, *told: object) -> bytes:
        stored, out = with_answer(step(read_state(write_state(self.devices[cid])), *told))
        again, repeated = with_answer(step(read_state(write_state(stored)), *told))
        if (again, repeated) != (stored, out):
            raise AssertionError(f"{cid} answers {step} differently after a restart")
        self.devices[cid] = again
        return out


def test_a_sum_is_exact_though_every_device_crashes_after_every_step() -> None:
    whole = SecureCohort.of(7)
    cohort = CrashingCohort(devices=whole.devices, form=whole.form)
    cohort.server, cohort.sent = whole.server, whole.sent
    cohort.run(["dev-002"], ["dev-004"])
    assert cohort.sum().tolist() == cohort.plain_sum().tolist()
    for state in cohort.devices.values():
        assert read_state(write_state(state)) == state


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b'{"v":2}', b"null"])
def test_a_damaged_file_is_refused(damage: bytes) -> None:
    with pytest.raises(Malformed):
        read_state(damage)


def test_a_cut_file_is_refused() -> None:
    data = write_state(DeviceSums(federation="demo", cid="a", roots={3: bytes(32)}, next_number=4))
    for size in range(len(data)):
        with pytest.raises(Malformed):
            read_state(data[:size])


def test_a_stored_share_longer_than_the_two_of_a_neighbour_is_damage() -> None:
    cohort = SecureCohort.of(5)
    cohort.deal()
    cohort.upload()
    state = cohort.devices["dev-000"]
    ((name, mine),) = state.sums.items()
    assert mine.shares is not None
    assert {len(both) for both in mine.shares.values()} == {2 * SHARE_BYTES}
    longer = replace(mine, shares=dict.fromkeys(mine.shares, bytes(2 * SHARE_BYTES + 3)))
    with pytest.raises(Malformed, match=r"^too_big: "):
        read_state(write_state(replace(state, sums={name: longer})))


def test_a_file_has_sixteen_mebibytes_at_most() -> None:
    state = DeviceSums(federation="demo", cid="a", roots={3: bytes(32)}, next_number=4)
    data = write_state(state)
    most = data + b" " * ((16 << 20) - len(data))
    assert read_state(most) == state
    with pytest.raises(Malformed, match=r"^too_big: "):
        read_state(most + b" ")
    with pytest.raises(Malformed, match=r"^bad_version: "):
        read_state(data.replace(b'"v":1', b'"v":2'))
    with pytest.raises(Malformed, match=r"^bad_field: the stored secure sums are damaged"):
        read_state(data.replace(b'"cid"', b'"dic"'))
