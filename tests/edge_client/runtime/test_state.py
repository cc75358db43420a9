"""What survives: after a power cut at any write the state is the one before or the one after, never a mixture."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.secure.device_sums import DeviceSums
from edge_client.protocol.task import MAX_SLOTS, Flat, Schema, TensorSpec
from edge_client.runtime import state as state_module
from edge_client.runtime.state import DeviceState, StoredResult, SumProgress, TaskKey, residual_name
from edge_client.transport import blobs

SCHEMA = Schema((TensorSpec(name="w", role="p", shape=(3,)),))
KEY, NEXT_KEY, OTHER_KEY = "1" * 16, "2" * 16, "3" * 16  # ids of signing keys


class PowerCut(BaseException):
    """Everything stops here."""


def open_state(folder: Path, *trusted: str) -> DeviceState:
    return DeviceState(folder, federation="test", device_id="dev-1", trusted_keys=trusted or None)


def flat(*values: float) -> Flat:
    return np.array(values, dtype=np.float32)


def result_of(number: int, update: bytes) -> StoredResult:
    key = TaskKey(run="r1", round=number, exchange=0)
    manifest = manifest_of(update, "delta", inline=True)
    return StoredResult(key=key, n=7, what="delta", update=manifest, seconds=0.5, metrics={"loss": 0.25})


def finish(state: DeviceState, number: int) -> None:
    """A task with an own model, a residual and responsibilities, all different from round to round."""
    update = b"update %d" % number
    rest = state.keep_residual(flat(number, 0, 0), SCHEMA)
    done = replace(result_of(number, update), residual=residual_name("r1", 0, SCHEMA), residual_sha256=rest)
    shares = np.full((2, 4), number / 8)
    state.store_result(done, update, SCHEMA, own=("main", flat(number, number, number)), posterior=shares)


def test_a_task_with_a_false_epoch_does_not_bar_those_of_the_next_coordinator(tmp_path: Path) -> None:
    """A task is not signed: the result of a last round and epoch would make each later task too late, for ever."""
    state = open_state(tmp_path)
    state.see_epoch(5, KEY)
    state.store_result(replace(result_of(2**32 - 1, b"x"), epoch=2**53 - 1), b"x", SCHEMA, own=None)
    earlier = TaskKey(run="r1", round=2, exchange=0)
    for one in (state, open_state(tmp_path)):
        assert [one.is_over(earlier, epoch) for epoch in (5, 6)] == [True, False]


def test_tasks_that_name_ever_new_slots_do_not_fill_the_disk(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    for number in range(MAX_SLOTS):
        state.store_result(result_of(number, b"x"), b"x", SCHEMA, own=(f"s{number}", flat(number, 0, 0)))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    kept = state.keep_residual(flat(9, 9, 9), SCHEMA)
    refused = replace(result_of(99, b"y"), residual="r1/0/s", residual_sha256=kept)
    with pytest.raises(Malformed, match="64 slots at most"):
        state.store_result(refused, b"y", SCHEMA, own=("more", flat(1, 2, 3)))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    state.store_result(result_of(99, b"x"), b"x", SCHEMA, own=("s0", flat(1, 2, 3)))
    other_run = replace(result_of(1, b"x"), key=TaskKey(run="r2", round=1, exchange=0))
    state.store_result(other_run, b"x", SCHEMA, own=("more", flat(1, 2, 3)))


def test_tasks_that_name_ever_new_centers_do_not_fill_the_disk_and_the_newest_residuals_stay(tmp_path: Path) -> None:
    """Tasks and acknowledgements are not signed: who has the broker may name any of 1,024 centers."""
    state = open_state(tmp_path)
    for number in range(2 * MAX_SLOTS):
        rest = state.keep_residual(flat(number + 1, 0, 0), SCHEMA)
        done = result_of(number, b"x")
        made = replace(done, residual=residual_name("r1", number, SCHEMA), residual_sha256=rest)
        state.store_result(made, b"x", SCHEMA, own=None)
        state.commit_acknowledgement("ok")
    again, last = open_state(tmp_path), TaskKey(run="r1", round=2 * MAX_SLOTS, exchange=0)
    kept = [number for number in range(2 * MAX_SLOTS) if again.residual(last, number, SCHEMA) is not None]
    assert kept == list(range(MAX_SLOTS, 2 * MAX_SLOTS))
    files = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert len(files) == MAX_SLOTS + 1  # with the update


def seen(folder: Path) -> tuple[object, ...]:
    """Everything that a fresh process finds."""
    state = open_state(folder)
    own, result = state.own_model("r1", "main", SCHEMA), state.result
    rest = state.residual(TaskKey(run="r1", round=3, exchange=0), 0, SCHEMA)
    update = None if result is None else state.pending_result.read(result.update.sha256)
    shares = [state.posterior(TaskKey(run="r1", round=r, exchange=1)) for r in (1, 2)]
    return (
        state.epoch,
        [None if found is None else found.tolist() for found in shares],
        None if own is None else own.tolist(),
        None if result is None else (result.key.round, result.status),
        update,
        None if rest is None else rest.tolist(),
    )


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    state.see_epoch(3, KEY)
    made = replace(result_of(1, b"bytes"), epoch=3, told=True)
    done = state.store_result(made, b"bytes", SCHEMA, own=None)
    assert open_state(tmp_path).result == done
    assert open_state(tmp_path).pending_result.read(done.update.sha256) == b"bytes"


def test_births_are_counted_over_restarts(tmp_path: Path) -> None:
    assert [open_state(tmp_path).next_birth() for _ in range(3)] == [1, 2, 3]


def test_the_highest_epoch_is_remembered(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    assert state.see_epoch(4, KEY)
    assert state.see_epoch(4, KEY)
    again = open_state(tmp_path)
    assert not again.see_epoch(3, KEY)
    assert again.see_epoch(5, KEY)


def test_an_epoch_counts_as_long_as_the_key_that_signed_it_is_trusted(tmp_path: Path) -> None:
    """A federation that begins anew, with another key, begins with epoch 1; one that changes its key goes on."""
    assert open_state(tmp_path, KEY).see_epoch(7, KEY)
    state = open_state(tmp_path, KEY, NEXT_KEY)
    assert not state.see_epoch(6, NEXT_KEY)
    assert state.see_epoch(8, NEXT_KEY)
    assert not open_state(tmp_path, NEXT_KEY).see_epoch(7, NEXT_KEY)
    anew = open_state(tmp_path, OTHER_KEY)
    assert anew.epoch == 0
    assert anew.see_epoch(1, OTHER_KEY)
    assert open_state(tmp_path, OTHER_KEY).epoch == 1


def test_an_epoch_that_an_earlier_version_noted_without_its_key_counts_and_gets_one(tmp_path: Path) -> None:
    open_state(tmp_path).see_epoch(7, "")
    assert not open_state(tmp_path, KEY).see_epoch(6, KEY)
    assert open_state(tmp_path, KEY).see_epoch(7, KEY)
    assert open_state(tmp_path, OTHER_KEY).epoch == 0


def test_a_model_of_another_run_slot_or_schema_is_not_ours(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    finish(state, 1)
    other = Schema((TensorSpec(name="w", role="p", shape=(4,)),))
    assert state.own_model("r1", "main", SCHEMA) is not None
    assert state.own_model("r2", "main", SCHEMA) is None
    assert state.own_model("r1", "other", SCHEMA) is None
    assert state.own_model("r1", "main", other) is None


def test_responsibilities_are_those_of_this_run_and_round_bit_by_bit(tmp_path: Path) -> None:
    shares = np.random.default_rng(0).random((3, 5))
    open_state(tmp_path).store_result(result_of(2, b"bytes"), b"bytes", SCHEMA, own=None, posterior=shares)
    again = open_state(tmp_path)
    found = again.posterior(TaskKey(run="r1", round=2, exchange=3))
    assert found is not None
    np.testing.assert_array_equal(found, shares)
    assert again.posterior(TaskKey(run="r1", round=3, exchange=0)) is None
    assert again.posterior(TaskKey(run="r2", round=2, exchange=3)) is None


@pytest.mark.parametrize(("status", "kept"), [("ok", True), ("dup", True), ("late", False), ("rejected", False)])
def test_a_residual_is_committed_only_when_its_update_was_taken(tmp_path: Path, status: str, kept: bool) -> None:  # noqa: FBT001
    state = open_state(tmp_path)
    finish(state, 1)
    state.commit_acknowledgement(status)
    found = open_state(tmp_path).residual(TaskKey(run="r1", round=2, exchange=0), 0, SCHEMA)
    assert (found is not None) == kept


def test_a_residual_is_halved_for_each_round_that_the_device_sat_out(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    finish(state, 1)
    state.commit_acknowledgement("ok")
    rests = [state.residual(TaskKey(run="r1", round=r, exchange=0), 0, SCHEMA) for r in (2, 3, 4)]
    assert [rest[0] for rest in rests if rest is not None] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("answers", "status"), [(("ok", "late"), "ok"), (("late", "ok"), "ok"), (("dup", "ok"), "dup")]
)
def test_an_update_that_was_taken_stays_taken_also_after_an_earlier_try_refused_it(
    tmp_path: Path, answers: tuple[str, str], status: str
) -> None:
    state = open_state(tmp_path)
    finish(state, 1)
    for answer in answers:
        state.commit_acknowledgement(answer)
    assert state.result is not None
    assert state.result.status == status
    assert state.residual(TaskKey(run="r1", round=2, exchange=0), 0, SCHEMA) is not None


def test_a_folder_belongs_to_one_device(tmp_path: Path) -> None:
    open_state(tmp_path).see_epoch(1, KEY)
    with pytest.raises(ConfigError, match="belongs to device dev-1 of federation test"):
        DeviceState(tmp_path, federation="test", device_id="dev-2")


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_state_file_begins_afresh(tmp_path: Path, damage: bytes) -> None:
    finish(open_state(tmp_path), 1)
    (tmp_path / "state.json").write_bytes(damage)
    assert open_state(tmp_path).result is None


@pytest.mark.parametrize("name", ["state.json", "birth"])
def test_a_file_that_the_disk_cannot_read_begins_afresh(tmp_path: Path, name: str) -> None:
    """It ended each start of a board, for good: a bad sector is read as an error, seldom as other bytes."""
    open_state(tmp_path).next_birth()
    finish(open_state(tmp_path), 1)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/proc/self/mem")  # its first page is not mapped: EIO
    state = open_state(tmp_path)
    assert (state.result is None, state.birth) == (name == "state.json", 0 if name == "birth" else 1)
    state.next_birth()
    finish(state, 2)
    again = open_state(tmp_path)
    assert again.result is not None
    assert again.birth == state.birth


def test_a_damaged_model_is_a_model_that_was_never_kept(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    finish(state, 1)
    named = json.loads((tmp_path / "state.json").read_bytes())["own"]["r1/main"][0]
    (tmp_path / "kept" / named).write_bytes(b"rot")
    assert open_state(tmp_path).own_model("r1", "main", SCHEMA) is None


def test_nothing_unnamed_stays_on_disk(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    (tmp_path / "kept" / f"{'0' * 64}.tmp").write_bytes(b"half an update")  # of a power cut
    for number in range(1, 6):
        finish(state, number)
        state.commit_acknowledgement("ok")
    files = {f.name for f in (tmp_path / "kept").iterdir() if f.is_file()}
    assert hashlib.sha256(b"update 5").hexdigest() in files
    assert len(files) == 4  # the update, the own model, the residual, the responsibilities


STEPS: dict[str, Callable[[DeviceState], object]] = {
    "finish": lambda state: finish(state, 2),
    "acknowledge": lambda state: state.commit_acknowledgement("ok"),
    "epoch": lambda state: state.see_epoch(9, KEY),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_power_cut_at_any_write_leaves_the_state_before_or_after(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = blobs._publish
    outcomes = []
    for cut_at in range(20):
        folder = tmp_path / str(cut_at)
        state = open_state(folder)
        state.see_epoch(1, KEY)
        finish(state, 1)
        before = seen(folder)
        writes = iter(range(100))

        def cutting(beside: Path, path: Path, cut_at: int = cut_at, writes: object = writes) -> None:
            if next(writes) == cut_at:  # type: ignore[call-overload]
                raise PowerCut
            publish(beside, path)

        with monkeypatch.context() as patch:
            patch.setattr(blobs, "_publish", cutting)
            try:
                STEPS[step](state)
            except PowerCut:
                outcomes.append((before, seen(folder)))
                continue
        after = seen(folder)
        break
    assert outcomes
    assert after != before
    assert all(found in (began, after) for began, found in outcomes)


def test_a_full_disk_costs_neither_an_epoch_nor_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes on; what disk and memory name is there, and the next change writes both."""
    state = open_state(tmp_path)
    finish(state, 1)
    state.commit_acknowledgement("ok")
    finish(state, 2)
    before, on_disk = open_state(tmp_path).epoch, set((tmp_path / "kept").iterdir())
    with monkeypatch.context() as full:
        full.setattr(state_module, "write_atomically", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        assert state.see_epoch(before + 1, KEY)
        state.commit_acknowledgement("ok")
        assert not state.see_epoch(before, KEY)
        with pytest.raises(ConfigError, match="cannot write to the state folder") as told:
            state.next_birth()
        assert (told.value.hint, told.value.exit_code) == ("free disk space", 70)
    assert open_state(tmp_path).epoch == before
    assert set((tmp_path / "kept").iterdir()) == on_disk
    finish(state, 3)
    assert open_state(tmp_path).epoch == before + 1


def test_a_result_that_could_not_be_written_has_not_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = open_state(tmp_path)
    finish(state, 1)
    (tmp_path / "state.json").unlink()
    (tmp_path / "state.json").mkdir()  # nothing can be put in its place
    birth, files = state.next_birth(), sorted((tmp_path / "kept").iterdir())
    state.keep_residual(flat(9, 9, 9), SCHEMA)  # this fitted, and takes no room when the rest did not

    def refuse(_data: bytes) -> str:
        state.next_birth()  # of a reconnection in another thread
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as full:
        full.setattr(state.pending_result, "put", refuse)
        with pytest.raises(OSError, match="no space"):
            state.store_result(result_of(2, b"delta"), b"delta", SCHEMA, own=None)
    assert state.birth == birth + 1
    assert sorted((tmp_path / "kept").iterdir()) == files
    wrong = replace(result_of(2, b"delta"), metrics={"loss": float("inf")})
    with pytest.raises(Malformed, match="cannot be written"):
        state.store_result(wrong, b"delta", SCHEMA, own=None)
    before, sums = state.result, DeviceSums(federation="test", cid="dev-1", next_number=16)
    with pytest.raises(OSError, match="directory"):
        state.store_result(
            result_of(2, b"shares"), b"shares", SCHEMA, own=("main", flat(2, 2, 2)), progress=SumProgress(sums=sums)
        )
    assert state.result is before
    assert before is not None
    assert before.key.round == 1
    assert state.sums.next_number == 0
    assert state.own_model("r1", "main", SCHEMA).tolist() == [1, 1, 1]  # type: ignore[union-attr]
